"""A torch module becomes an ONNX file: traced with a dynamic batch, slimmed, named, its weights in a shared file."""

import contextlib
import hashlib
import inspect
import io
import logging
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import onnx
import onnxslim
import torch
from onnx import ModelProto, TensorProto
from torch import Tensor, nn

INLINE_BYTES = 1024  # smaller constants (shapes, scalars) stay inside the graph
ALIGNMENT = 4096  # lets an engine map weights instead of copying them


class WeightStore:
    """One external-data file that graphs share; identical tensors are stored once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._places: dict[str, tuple[int, int]] = {}
        self._end = 0

    def place(self, data: bytes) -> tuple[int, int]:
        """Return (offset, length) of the bytes in the file, appended if they are new."""
        key = hashlib.sha256(data).hexdigest()
        if key not in self._places:
            offset = -(-self._end // ALIGNMENT) * ALIGNMENT
            with self.path.open("r+b" if self.path.exists() else "w+b") as file:
                _write_at(file, offset, data)
            self._places[key] = (offset, len(data))
            self._end = offset + len(data)
        return self._places[key]


def _write_at(file: IO[bytes], offset: int, data: bytes) -> None:
    file.seek(offset)
    file.write(data)


def trace(
    module: nn.Module, inputs: Mapping[str, Tensor], outputs: Sequence[str], axes: Mapping[str, Sequence[str]]
) -> ModelProto:
    """Record a module as `tracer.record` does, by torch's own exporter: slower, for operators that one does not know.

    Example inputs need at least two along each dynamic axis, or the trace would take one for a constant.
    """
    dims = {name: torch.export.Dim(name, min=1) for names in axes.values() for name in names}
    dynamic = [{axis: dims[a] for axis, a in enumerate(axes.get(name, ()))} for name in inputs]
    parameters = list(inspect.signature(module.forward).parameters.values())
    if parameters[-1].kind is inspect.Parameter.VAR_POSITIONAL:
        count = len(parameters) - 1
        dynamic = [*dynamic[:count], tuple(dynamic[count:])]  # type: ignore[list-item]
    with torch.no_grad(), _quiet():
        program = torch.export.export(module, tuple(inputs.values()), dynamic_shapes=tuple(dynamic))
        onnx_program = torch.onnx.export(
            program, dynamo=True, input_names=list(inputs), output_names=list(outputs), optimize=True, verbose=False
        )
        assert onnx_program is not None
        return _tidy(onnxslim.slim(onnx_program.model_proto), axes)


def _tidy(model: ModelProto, axes: Mapping[str, Sequence[str]]) -> ModelProto:
    """Drop what the exporter notes for itself (source paths among it) and give dynamic axes readable names."""
    symbols = {}
    for value in model.graph.input:
        for index, name in enumerate(axes.get(value.name, ())):
            symbols[value.type.tensor_type.shape.dim[index].dim_param] = name
    del model.graph.value_info[:]
    for value in [*model.graph.input, *model.graph.output]:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in symbols:
                dim.dim_param = symbols[dim.dim_param]
    for item in [
        model,
        model.graph,
        *model.graph.node,
        *model.graph.input,
        *model.graph.output,
        *model.graph.initializer,
    ]:
        item.ClearField("doc_string")
        item.ClearField("metadata_props")
    model.producer_name, model.producer_version = "mdps", ""
    return model


def write(model: ModelProto, path: Path, weights: WeightStore) -> None:
    """Write the graph with its large constants moved to the weight store beside it, and check it."""
    for tensor in model.graph.initializer:
        data = onnx.numpy_helper.to_array(tensor).tobytes()
        if len(data) >= INLINE_BYTES:
            _externalise(tensor, weights.path.name, *weights.place(data))
    path.write_bytes(model.SerializeToString(deterministic=True))
    onnx.checker.check_model(str(path))


def _externalise(tensor: TensorProto, location: str, offset: int, length: int) -> None:
    for field in ("raw_data", "float_data", "int32_data", "int64_data", "double_data"):
        tensor.ClearField(field)
    tensor.data_location = TensorProto.EXTERNAL
    del tensor.external_data[:]
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(length))):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value


def count_nodes(model: ModelProto) -> dict[str, int]:
    """Count nodes by kind, most frequent first."""
    return dict(Counter(node.op_type for node in model.graph.node).most_common())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence an exporter's progress and warnings about its own internals: the terminal is for our messages."""
    level = logging.getLogger("torch.onnx").level
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        try:
            yield
        finally:
            logging.getLogger("torch.onnx").setLevel(level)
