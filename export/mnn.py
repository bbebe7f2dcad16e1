"""Step graphs as MNN's own files: one image at a time, the weights in a file beside each.

The library's converter is called as such and in a process of its own: the script `mnnconvert` that comes with it
reports each conversion to its makers over the network, and installs a package for that.
"""

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, helper, numpy_helper

from mdps.runtime.errors import BackendError, first_line, require
from mdps.runtime.mnn import WEIGHTS, capture_output, load_library

SUFFIX = ".mnn"
_CONVERT = "import sys, _tools; _tools.mnnconvert(sys.argv)"
_NOUGHT = "mnn_nought"
_UUID = b"00000000-0000-0000-0000-000000000000"


def check_library() -> None:
    """BackendError where MNN or its converter is not installed."""
    load_library()
    found = subprocess.run([sys.executable, "-c", "import _tools"], capture_output=True, check=False)
    if found.returncode:
        raise BackendError('the converter of MNN cannot be imported: pip install "mdps[mnn]"')


def write_mnn(model: ModelProto, path: Path) -> None:
    """Writes the graph, whose batch becomes one image, to `path` and its weights beside it.

    Equal models give equal files: the random name that the converter gives each is replaced. BackendError where it
    does not convert.
    """
    require(path.suffix == SUFFIX, f"{path} should end in {SUFFIX}")
    with TemporaryDirectory() as folder:
        source = Path(folder) / "graph.onnx"
        onnx.save(_of_one_image(model), source)
        arguments = ["-f", "ONNX", "--modelFile", source, "--MNNModel", path, "--bizCode", "mdps", "--saveExternalData"]
        done = subprocess.run(
            [sys.executable, "-c", _CONVERT, *map(str, arguments)], capture_output=True, text=True, check=False
        )
    weights = path.with_name(path.name + WEIGHTS)
    if done.returncode or not path.is_file() or not weights.is_file():
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise BackendError(f"MNN does not convert {path.stem}: {first_line(lines[-1]) if lines else done.returncode}")
    _name_evenly(path)


def _of_one_image(model: ModelProto) -> ModelProto:
    """A copy whose dynamic axes are 1, with the shapes inside: the converter asks for those of computed weights."""
    copy = ModelProto()
    copy.CopyFrom(model)
    for value in (*copy.graph.input, *copy.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_value = 1
    _compute_weights(copy)
    _convolve(copy)
    return onnx.shape_inference.infer_shapes(copy, data_prop=True)


def _compute_weights(model: ModelProto) -> None:
    """Makes constant weights whose bias is computed computed ones too: the converter knows no mixture.

    They become a sum with nought times an input, a thing that no optimiser takes for a constant; equal ones share it.
    """
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    computed: dict[tuple[tuple[int, ...], bytes], str] = {}
    before: list[NodeProto] = []
    for node in model.graph.node:
        weights, bias = [*node.input[1:], "", ""][:2]
        if node.op_type != "Conv" or weights not in constants or not bias or bias in constants:
            continue
        array = numpy_helper.to_array(constants[weights])
        key = (array.shape, array.tobytes())
        if key not in computed:
            computed[key] = f"{weights}_computed"
            before.append(helper.make_node("Add", [weights, _NOUGHT], [computed[key]], name=computed[key]))
        node.input[1] = computed[key]
    if before:
        scalar = next(value.name for value in model.graph.input if not value.type.tensor_type.shape.dim)
        model.graph.initializer.append(numpy_helper.from_array(np.zeros((), np.float32), f"{_NOUGHT}_factor"))
        before.insert(0, helper.make_node("Mul", [scalar, f"{_NOUGHT}_factor"], [_NOUGHT], name=_NOUGHT))
    for node in reversed(before):
        model.graph.node.insert(0, node)


def _convolve(model: ModelProto) -> None:
    """Products of constant weights and an image as the convolutions that they are: attention's stay in their layout."""
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        weights = constants.get(node.input[0]) if node.op_type == "MatMul" else None
        if weights is None or len(weights.dims) != 2:
            continue
        name = f"{weights.name}_filters"
        if name not in constants:
            filters = numpy_helper.from_array(numpy_helper.to_array(weights)[:, :, None], name)
            model.graph.initializer.append(filters)
            constants[name] = filters
        node.op_type = "Conv"
        node.input[:] = [node.input[1], name]
        node.attribute.append(helper.make_attribute("kernel_shape", [1]))


def _name_evenly(path: Path) -> None:
    library = load_library()
    with capture_output():
        name = library.get_model_uuid(str(path)).encode()
    content = path.read_bytes()
    if len(name) == len(_UUID) and content.count(name) == 1:
        path.write_bytes(content.replace(name, _UUID))
