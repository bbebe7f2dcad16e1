"""Step graphs as MNN's own files: one image at a time, the weights in a file beside each.

The library's converter is called as such and in a process of its own: the script `mnnconvert` that comes with it
reports each conversion to its makers over the network, and installs a package for that.
"""

import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import networkx
import onnx
from flatbuffers import number_types
from flatbuffers.table import Table
from onnx import ModelProto

from mdps.export.mnn_graph import for_mnn
from mdps.runtime import atomic
from mdps.runtime.engines.mnn import WEIGHTS, capture_output, load_library
from mdps.runtime.errors import BackendError, first_line, require

SUFFIX = ".mnn"
_CONVERT = "import sys, _tools; _tools.mnnconvert(sys.argv)"
_UUID = b"00000000-0000-0000-0000-000000000000"

# fields by their index in the schema: of the table Net, and of Op (whose union `main` takes two)
_OPERATIONS = 3
_INPUTS, _NAME, _OUTPUTS = 0, 3, 4


def check_library() -> None:
    """Raise BackendError where MNN or its converter is not installed."""
    load_library()
    found = subprocess.run([sys.executable, "-c", "import _tools"], capture_output=True, check=False)
    if found.returncode:
        raise BackendError('the converter of MNN cannot be imported: pip install "mdps[mnn]"')


def write(model: ModelProto, path: Path) -> None:
    """Write the graph, whose batch becomes one image, to `path` and its weights beside it.

    Equal models give equal files: the random name that the converter gives each is replaced. BackendError where it
    does not convert.
    """
    require(path.suffix == SUFFIX, f"{path} should end in {SUFFIX}")
    with TemporaryDirectory() as folder:
        source = Path(folder) / "graph.onnx"
        rewritten = for_mnn(model)
        onnx.save(rewritten, source)
        arguments = ["-f", "ONNX", "--modelFile", source, "--MNNModel", path, "--bizCode", "mdps", "--saveExternalData"]
        done = subprocess.run(
            [sys.executable, "-c", _CONVERT, *map(str, arguments)], capture_output=True, text=True, check=False
        )
    weights = path.with_name(path.name + WEIGHTS)
    if done.returncode or not path.is_file() or not weights.is_file():
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise BackendError(f"MNN does not convert {path.stem}: {first_line(lines[-1]) if lines else done.returncode}")
    ranks = {name: rank for rank, node in enumerate(rewritten.graph.node) for name in node.output}
    atomic.write_bytes(path, reordered(_named_evenly(path), ranks))


def _named_evenly(path: Path) -> bytes:
    """Return the file's content without the random name that the converter gives it."""
    library = load_library()
    with capture_output():
        name = library.get_model_uuid(str(path)).encode()
    content = path.read_bytes()
    unlike = len(name) != len(_UUID) or content.count(name) != 1
    return content if unlike else content.replace(name, _UUID)


def reordered(content: bytes, ranks: Mapping[str, int]) -> bytes:
    """Return the file with each operation as early as its rank, by name, and its inputs allow.

    MNN runs operations in the order of the file. Its converter sorts them by what the outputs need, first come first
    served: what the backward half needs of a norm is then computed when that half begins, and all it is computed from
    waits so long in memory. The order of our graphs is made so that little waits. The file is a flatbuffer (schema
    `MNN.fbs` of MNN 3): the list of operations is a vector of offsets, which are set anew; nothing moves.

    Operations without a rank, which the converter added, come right before the first that needs them. BackendError
    for a file that is not as expected.
    """
    data = bytearray(content)
    try:
        slots = _elements(_table(data, 0), _OPERATIONS)
        tables = [_table(data, slot) for slot in slots]
        needs = [_numbers(table, _INPUTS) for table in tables]
        makes = [_numbers(table, _OUTPUTS) for table in tables]
        names = [_name(table) for table in tables]
        if ranks and ranks.keys().isdisjoint(names):
            raise IndexError("it names no operation of the graph")
        order = _order(needs, makes, [ranks.get(name) for name in names])
    except (struct.error, IndexError, TypeError, UnicodeDecodeError, networkx.NetworkXUnfeasible) as error:
        raise BackendError(f"what MNN's converter wrote is not a file of MNN 3 ({error})") from error
    for slot, index in zip(slots, order, strict=True):
        struct.pack_into("<I", data, slot, tables[index].Pos - slot)
    return bytes(data)


def _order(needs: Sequence[Sequence[int]], makes: Sequence[Sequence[int]], ranks: Sequence[int | None]) -> list[int]:
    """Return the indices of the operations: always the one of the lowest rank of those whose inputs are there."""
    makers = {tensor: index for index, tensors in enumerate(makes) for tensor in tensors}
    uses = networkx.DiGraph()
    uses.add_nodes_from(range(len(needs)))
    uses.add_edges_from((makers[one], index) for index, tensors in enumerate(needs) for one in tensors if one in makers)
    key: list[float] = [float("inf") if rank is None else rank for rank in ranks]
    for index in reversed(range(len(needs))):  # users come later in the file
        if ranks[index] is None:
            key[index] = min((key[user] for user in uses[index]), default=float("inf"))
    return list(networkx.lexicographical_topological_sort(uses, key.__getitem__))


def _table(data: bytearray, slot: int) -> Any:
    """Return the table whose offset lies in the slot."""
    return Table(data, slot + int(struct.unpack_from("<I", data, slot)[0]))


def _elements(table: Any, index: int) -> range:
    """Return where the elements, of four bytes each, of the vector in a field lie; none without the field."""
    field = table.Offset(4 + 2 * index)
    if not field:
        return range(0)
    start, count = table.Vector(field), table.VectorLen(field)
    if start + 4 * count > len(table.Bytes):
        raise IndexError(f"{count} elements do not fit into it")
    return range(start, start + 4 * count, 4)


def _numbers(table: Any, index: int) -> list[int]:
    return [table.Get(number_types.Int32Flags, place) for place in _elements(table, index)]


def _name(table: Any) -> str:
    field = table.Offset(4 + 2 * _NAME)
    return str(table.String(table.Pos + field).decode()) if field else ""
