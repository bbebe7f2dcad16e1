"""Step graphs as MNN's own files: one image at a time, the weights in a file beside each.

The library's converter is called as such and in a process of its own: the script `mnnconvert` that comes with it
reports each conversion to its makers over the network, and installs a package for that.
"""

import heapq
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import onnx
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
        slots = _elements(data, _field(data, _table(data, 0), _OPERATIONS))
        tables = [_table(data, slot) for slot in slots]
        needs = [_numbers(data, table, _INPUTS) for table in tables]
        makes = [_numbers(data, table, _OUTPUTS) for table in tables]
        names = [_text(data, table) for table in tables]
        if ranks and ranks.keys().isdisjoint(names):
            raise IndexError("it names no operation of the graph")
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise BackendError(f"what MNN's converter wrote is not a file of MNN 3 ({error})") from error
    order = _order(needs, makes, [ranks.get(name) for name in names])
    for slot, index in zip(slots, order, strict=True):
        struct.pack_into("<I", data, slot, tables[index] - slot)
    return bytes(data)


def _order(needs: Sequence[Sequence[int]], makes: Sequence[Sequence[int]], ranks: Sequence[int | None]) -> list[int]:
    """Return the indices of the operations: always the one of the lowest rank of those whose inputs are there."""
    makers = {tensor: index for index, tensors in enumerate(makes) for tensor in tensors}
    sources = [{makers[tensor] for tensor in tensors if tensor in makers} for tensors in needs]
    users: list[list[int]] = [[] for _ in needs]
    for index, found in enumerate(sources):
        for source in found:
            users[source].append(index)
    key: list[float] = [float("inf") if rank is None else rank for rank in ranks]
    for index in reversed(range(len(needs))):  # users come later in the file
        if ranks[index] is None:
            key[index] = min((key[user] for user in users[index]), default=float("inf"))
    missing = [len(found) for found in sources]
    ready = [(key[index], index) for index, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        _, index = heapq.heappop(ready)
        order.append(index)
        for user in users[index]:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, (key[user], user))
    return order


def _table(data: bytearray, slot: int) -> int:
    """Return where the table begins whose offset lies in the slot."""
    return slot + int(struct.unpack_from("<I", data, slot)[0])


def _field(data: bytearray, table: int, index: int) -> int:
    """Return where the field of a table lies; 0 if it is not there."""
    described = table - int(struct.unpack_from("<i", data, table)[0])
    if 4 + 2 * index >= struct.unpack_from("<H", data, described)[0]:
        return 0
    offset = int(struct.unpack_from("<H", data, described + 4 + 2 * index)[0])
    return table + offset if offset else 0


def _elements(data: bytearray, slot: int) -> list[int]:
    """Return where the elements, of four bytes each, of the vector lie whose offset lies in the slot."""
    if not slot:
        return []
    start = _table(data, slot)
    (count,) = struct.unpack_from("<I", data, start)
    if start + 4 + 4 * count > len(data):
        raise IndexError(f"{count} elements do not fit into it")
    return [start + 4 + 4 * i for i in range(count)]


def _numbers(data: bytearray, table: int, index: int) -> list[int]:
    return [int(struct.unpack_from("<i", data, place)[0]) for place in _elements(data, _field(data, table, index))]


def _text(data: bytearray, table: int) -> str:
    slot = _field(data, table, _NAME)
    if not slot:
        return ""
    start = _table(data, slot)
    return data[start + 4 : start + 4 + struct.unpack_from("<I", data, start)[0]].decode()
