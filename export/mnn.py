"""Step graphs as MNN's own files: one image at a time, the weights in a file beside each.

The library's converter is called as such and in a process of its own: the script `mnnconvert` that comes with it
reports each conversion to its makers over the network, and installs a package for that.
"""

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import onnx
from onnx import ModelProto

from mdps.export.mnn_graph import for_mnn
from mdps.export.mnn_order import reordered
from mdps.runtime import atomic
from mdps.runtime.engines.mnn import WEIGHTS, capture_output, load_library
from mdps.runtime.errors import BackendError, first_line, require

SUFFIX = ".mnn"
_CONVERT = "import sys, _tools; _tools.mnnconvert(sys.argv)"
_UUID = b"00000000-0000-0000-0000-000000000000"


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
