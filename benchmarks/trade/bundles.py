"""Bundles with less precision, made from full ones: an int8 feature network, weights stored in fp16.

int8: static quantisation of the feature network's convolutions by onnxruntime.quantization (QDQ, a scale a channel of
the weights, MinMax ranges over good images). The observation and the samples go through two copies of the network, in
features.onnx and score.onnx. A posterior sample of a good part looks like one, so both see the same good images for
calibration and get the same scales: equal images keep a distance of zero. Weights use seven bits, without which sums
saturate on processors that lack VNNI (AVX2).

fp16: the rounding of the weights alone. The graphs compute in fp32, and the engine widens the weights when it loads, so
this halves the bundle and changes neither time nor memory; it tells what storing them so costs.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper

from mdps.benchmarks.kit import Say, digest
from mdps.benchmarks.study import Bundles, Changes, Variant, settled
from mdps.export.graph import INLINE_BYTES
from mdps.runtime import reference
from mdps.runtime.atomic import new_folder
from mdps.runtime.bundle import Bundle
from mdps.runtime.calibration import calibrate
from mdps.runtime.detector import Detector
from mdps.runtime.engines.interface import open_session
from mdps.runtime.errors import UsageError
from mdps.runtime.loading import open_pipeline
from mdps.runtime.manifest import FILE_NAME, Manifest, hash_files
from mdps.runtime.preprocessing import read_image
from mdps.runtime.settings import Settings

Feeds = dict[str, NDArray[Any]]


class PreciseBundles(Bundles):
    """Bundles whose changes may also say how they are `reduced`, of `PRECISIONS`, or `calibrated`, for how many steps.

    `good` pictures show int8 ranges and calibrate; `threads` as in `load`.
    """

    def __init__(
        self, folder: Path, choices: Mapping[str, Any], say: Say, good: Sequence[Path], threads: int | None = None
    ) -> None:
        super().__init__(folder, choices, say)
        self._good, self._threads = good, threads

    def get(self, checkpoint: Path, category: str, changes: Mapping[str, Any]) -> Path:
        """Export, then reduce or calibrate; UsageError where nothing in the bundle can be reduced so."""
        usual = {key: value for key, value in changes.items() if key not in ("reduced", "calibrated")}
        bundle = super().get(checkpoint, category, usual)
        if how := changes.get("reduced"):
            change = partial(self._reducers[how], self)
            return self._made(bundle, how, lambda out: reduce_bundle(bundle, out, change))
        if steps := changes.get("calibrated"):
            settle = settled(Variant("", "", Changes(steps=steps)))
            write = partial(write_calibrated, change=settle, good=self._good, threads=self._threads)
            return self._made(bundle, f"calibrated-{steps}", lambda out: write(bundle, out))
        return bundle

    def _made(self, bundle: Path, what: str, write: Callable[[Path], None]) -> Path:
        """The bundle made of another one with the good pictures, once."""
        seen = [[path.name, path.stat().st_size] for path in self._good]
        out = bundle.with_name(f"{bundle.name}-{what}-{digest(seen)[:8]}")
        if not (out / FILE_NAME).is_file():
            self._say(f"making a bundle: {what}")
            write(out)
        return out

    def _int8(self, folder: Path, manifest: Manifest) -> None:
        if not manifest.settings.score.stages:
            raise UsageError("this detector compares pixels only: there is no feature network to quantise")
        if not self._good:
            raise UsageError("this category has no good training images to take int8 ranges from")
        quantise_features(folder, manifest, self._good)

    def _fp16(self, folder: Path, manifest: Manifest) -> None:
        for path in sorted(folder.glob("*.onnx")):
            model = onnx.load(path)
            store_in_half(model)
            onnx.save(model, path)  # its weights inside
        for path in folder.glob("*.weights"):
            path.unlink()

    _reducers: Mapping[str, Callable[["PreciseBundles", Path, Manifest], None]] = {
        "int8-features": _int8,
        "fp16-weights": _fp16,
    }


def reduce_bundle(bundle: Path, out: Path, change: Callable[[Path, Manifest], None]) -> None:
    """A copy of a bundle whose graphs `change` replaced in the folder it is given, and a manifest that says so."""
    manifest = Manifest.read(bundle)
    with new_folder(out) as folder:
        for name in manifest.files:
            shutil.copy(bundle / name, folder / name)
        (folder / reference.FILE_NAME).unlink(missing_ok=True)  # it computes otherwise on purpose
        change(folder, manifest)
        files = hash_files(folder)
        graphs = {
            role: replace(graph, variants={key: file for key, file in graph.variants.items() if file in files})
            for role, graph in manifest.graphs.items()
        }
        replace(manifest, name=out.name, files=files, graphs=graphs, parity={}).write(folder)


def store_in_half(model: ModelProto) -> None:
    """Large fp32 constants become fp16 ones that a Cast widens; what a Constant node holds stays."""
    casts: list[NodeProto] = []
    for tensor in model.graph.initializer:
        values = numpy_helper.to_array(tensor)
        if tensor.data_type != TensorProto.FLOAT or values.nbytes < INLINE_BYTES:
            continue
        name = tensor.name
        tensor.CopyFrom(numpy_helper.from_array(values.astype(np.float16), f"{name}.half"))
        casts.append(onnx.helper.make_node("Cast", [f"{name}.half"], [name], to=TensorProto.FLOAT))
    nodes = [*casts, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def quantise_features(folder: Path, manifest: Manifest, good: Sequence[Path]) -> None:
    """Puts int8 graphs in the place of a bundle's features.onnx and score.onnx, ranges from the pictures `good`."""
    feeds = list(_feeds(folder, manifest, good))
    network = weights_of(folder / "features.onnx")
    made = {}
    for role in ("features", "score"):
        path = folder / f"{role}.onnx"
        seen = [{"image": one["observation"]} if role == "features" else one for one in feeds]
        made[path] = quantised(path, [name for name, key in convolutions(path) if key in network], seen)
    for path, model in made.items():
        onnx.save(model, path)
    (folder / "features.weights").unlink()  # what is left of them is in the graphs


def quantised(path: Path, nodes: Sequence[str], feeds: Sequence[Feeds]) -> ModelProto:
    """The graph in `path` with the named convolutions in int8, their ranges those that `feeds` show; weights inside."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Reader(CalibrationDataReader):  # type: ignore[misc]  # it has no types
        def __init__(self) -> None:
            self._left = iter(feeds)

        def get_next(self) -> Feeds | None:
            return next(self._left, None)

    with TemporaryDirectory() as folder:
        out = Path(folder) / "quantised.onnx"
        quantize_static(
            path, out, Reader(), quant_format=QuantFormat.QDQ, nodes_to_quantize=list(nodes), per_channel=True,
            reduce_range=True, activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
        )  # fmt: skip
        return onnx.load(out)


def convolutions(path: Path) -> Iterator[tuple[str, bytes]]:
    """Name and weight of each convolution with a constant weight."""
    model = onnx.load(path)
    constants = {tensor.name: numpy_helper.to_array(tensor).tobytes() for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Conv" and node.input[1] in constants:
            yield node.name, constants[node.input[1]]


def weights_of(path: Path) -> set[bytes]:
    """The weights of a graph's convolutions; by them its network is found again in another graph."""
    return {key for _, key in convolutions(path)}


def _feeds(folder: Path, manifest: Manifest, good: Sequence[Path]) -> Iterator[Feeds]:
    """Inputs of the score graph for each picture, as if it were its own posterior sample."""
    with closing(open_session(folder / "features.onnx")) as session:
        for path in good:
            image = manifest.preprocessing(read_image(path))[None]
            scalars = dict.fromkeys(("mask_lambda", "mask_low", "mask_frozen"), np.zeros((), np.float32))
            scalars["mask_high"] = np.ones((), np.float32)
            yield {"posterior_samples": image[None], "observation": image, **scalars, **session.run({"image": image})}


def write_calibrated(
    bundle: Path, out: Path, change: Callable[[Settings], Settings], good: Sequence[Path], threads: int | None
) -> None:
    """A copy of a bundle with changed settings, calibrated under them on `good`; UsageError where there are none."""
    if not good:
        raise UsageError("this category has no good training images to calibrate an early exit on")
    manifest = Manifest.read(bundle)
    settings = change(manifest.settings)
    with ExitStack() as opened:
        pipeline = open_pipeline(Bundle(bundle, manifest, settings), opened, threads=threads)
        calibration = calibrate(Detector(manifest, pipeline), good)
    with new_folder(out) as folder:
        for name in manifest.files:
            shutil.copy(bundle / name, folder / name)
        changed = replace(manifest, name=out.name, settings=settings)
        changed.with_calibration("default", calibration).write(folder)
