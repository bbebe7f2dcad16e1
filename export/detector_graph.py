"""The graph of a one-file detector: preprocessing, both passes, scoring and the calibrated threshold as ONNX nodes.

The steps of a pass are an ONNX Loop around the bundle's step graph, and passes of one kind are a Loop around that.
Unrolled, the same runs no faster and takes more than ten times as long to load. ONNX Runtime lays out convolution
weights for the processor only where they are constants of the very graph that uses them, so the weights of a step are
constants of the inner body: in the file once, unless one pass is guided and the other is not.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, TensorProto, ValueInfoProto, helper

from mdps.export.merge import Merger
from mdps.export.tracer import IR_VERSION, OPSET
from mdps.runtime.bundle import Bundle
from mdps.runtime.calibration import Calibration
from mdps.runtime.detector import Detector
from mdps.runtime.graphs import FEATURES, GUIDED, PLAIN, SCORE
from mdps.runtime.manifest import Manifest
from mdps.runtime.noise import INITIAL, NoiseBank
from mdps.runtime.preprocessing import Preprocessing
from mdps.runtime.schedule import Step, plan_steps
from mdps.runtime.tuning import FUSION, PHOTOGRAPH, Tuning

PRECISION_BITS = 22  # of Pillow's fixed-point coefficients for 8-bit pictures


def compose(bundle: Path, detector: Detector) -> ModelProto:
    """Build the graph of the bundle that `detector` was loaded from, with its calibration.

    `image` uint8 [height, width, 3] of any size -> `anomaly_map` float32 [H, W] of the network's size, `anomaly_score`
    float32 [], `verdict` bool [] (true: fail), `threshold` float32 [].
    """
    assert detector.calibration is not None
    add = Merger()
    loaded = Bundle(bundle, detector.manifest, detector.settings, detector.tuning)
    outputs = _Composer(loaded, detector.calibration, add).outputs("image")
    shapes: tuple[list[int], ...] = ([*detector.preprocessing.network_size], [], [], [])
    types = (TensorProto.FLOAT, TensorProto.FLOAT, TensorProto.BOOL, TensorProto.FLOAT)
    graph = helper.make_graph(
        add.nodes,
        "detector",
        [_value("image", TensorProto.UINT8, ["height", "width", 3])],
        [_value(*output) for output in zip(outputs, types, shapes, strict=True)],
        add.initializers,
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION, producer_name="mdps"
    )
    helper.set_model_props(model, {key: _text(value) for key, value in detector.provenance.items()})
    return model


@dataclass(frozen=True)
class _Plan:
    """One pass in numbers: its place, what `plan_steps` says of it, and its scale."""

    index: int
    alpha_first: float
    steps: tuple[Step, ...]
    guidance_scale: float
    by_samples: bool

    @property
    def kind(self) -> tuple[bool, bool]:
        """Whether it is guided, and whether by the samples of the pass before."""
        return self.guidance_scale > 0, self.by_samples


@dataclass(frozen=True)
class _Composer:
    """Writes the method as nodes: what `runtime.detector`, `pipeline` and `sampler` do, in the same order."""

    bundle: Bundle
    calibration: Calibration
    add: Merger
    _graphs: dict[str, GraphProto] = field(default_factory=dict)

    def outputs(self, image: str) -> tuple[str, str, str, str]:
        """Return the names of anomaly_map, anomaly_score, verdict, threshold for a uint8 picture [H, W, 3]."""
        y = observation(self.add, image, self.manifest.preprocessing)
        if self.bundle.tuning is None:
            _, anomaly_map, score, *_ = self._reconstructed(y)
        else:
            anomaly_map, score = self._fused(self.bundle.tuning, image, y)
        size = self.add.shape(*self.manifest.preprocessing.network_size)
        flat = self.add("Reshape", anomaly_map, size, name="anomaly_map")
        return (flat, *self._verdict(flat, score))

    @property
    def manifest(self) -> Manifest:
        """The bundle's."""
        return self.bundle.manifest

    def _fused(self, tuning: Tuning, image: str, y: str) -> tuple[str, str]:
        """Return map and score of a tuned detector, as `runtime.fused` finds them."""
        add, files = self.add, {role: graph.file for role, graph in tuning.graphs.items()}
        feeds, maps = {"observation": y}, dict[str, str]()
        if tuning.photograph is not None:
            features = self._graph(files[PHOTOGRAPH])
            view = observation(add, image, tuning.photograph)
            feeds |= add.splice(features, {"photograph": view}, [output.name for output in features.output])
        if tuning.sampler is not None:
            samples, maps = self._few(tuning, y)
            feeds["posterior_samples"] = add("Unsqueeze", samples, add.shape(0))
        for name in files.keys() - {PHOTOGRAPH, FUSION}:
            maps[name] = add.splice(self._graph(files[name]), feeds, ["map"])["map"]
        found = add.splice(self._graph(files[FUSION]), maps, ["anomaly_map", "anomaly_score"])
        return found["anomaly_map"], found["anomaly_score"]

    def _few(self, tuning: Tuning, y: str) -> tuple[str, dict[str, str]]:
        """Return the samples of a tuning's reconstruction, and the maps of the terms that are its own."""
        if not tuning.scores:
            numbers = _Numbers(self.add, self.bundle, self._plans())
            return self._sample(self.add, numbers, self.add.scalar(0, np.int64), y, (y, self._ones)), {}
        _, anomaly_map, _, samples = self._reconstructed(y, samples=True)
        return samples, {term.name: anomaly_map for term in tuning.terms if term.kind == "map"}

    def _reconstructed(self, y: str, *, samples: bool = False) -> list[str]:
        """Run all passes and return the mask, the map and the score of the last, and its samples if asked for."""
        plans, features = self._plans(), self._features(y)
        found = [self._ones, self._ones, self.add.constant(np.zeros(1, dtype=np.float32))]  # of the right shapes
        if samples or any(plan.by_samples for plan in plans):
            found.append(y)  # in the place of the samples before the first pass, which reads none
        for _, alike in groupby(plans, lambda plan: plan.kind):
            found = self._passes(list(alike), y, features, found)
        return found

    @property
    def _ones(self) -> str:
        """The mask of a first pass."""
        return self.add.constant(np.ones((1, 1, *self.manifest.preprocessing.network_size), dtype=np.float32))

    def _plans(self) -> list[_Plan]:
        schedule, sampler = self.manifest.schedule, self.bundle.settings.sampler
        plans = []
        for index, one in enumerate(sampler.passes):
            alpha_first, steps = plan_steps(schedule, sampler.time_index, one, sampler.eta_ddim)
            plans.append(_Plan(index, alpha_first, steps, one.guidance_scale, one.target == "previous"))
        return plans

    def _features(self, y: str) -> dict[str, str]:
        if not self.bundle.settings.score.stages:
            return {}
        graph = self._graph_of(FEATURES)
        return self.add.splice(graph, {"image": y}, [output.name for output in graph.output])

    def _passes(self, plans: Sequence[_Plan], y: str, features: dict[str, str], carried: list[str]) -> list[str]:
        """Run passes of one kind, each under the mask of the one before; mask, map, score, and samples if carried."""
        numbers, ones = _Numbers(self.add, self.bundle, plans), self._ones

        def write(body: Merger, index: str, current: list[str]) -> list[str]:
            mask, _, _, *before = current
            guide = (before[0], ones) if plans[0].by_samples else (y, mask)
            samples = self._sample(body, numbers, index, y, guide)
            found = self._score(body, samples, y, features)
            return [found["mask"], found["anomaly_map"], found["anomaly_score"], *([samples] if before else [])]

        # The scoring network's weights stay outside: the features of the observation are computed with them too.
        return self.add.loop(self.add.scalar(len(plans), np.int64), carried, write, own_constants=False)

    def _sample(self, add: Merger, numbers: "_Numbers", pass_index: str, y: str, guide: tuple[str, str]) -> str:
        """Run Algorithm 1 from y, guided by an image under a mask; float32 [N_s, 3, H, W]."""
        graph = self._graph_of(GUIDED if numbers.guided else PLAIN)
        start, z = numbers.of_pass(add, "start", pass_index), numbers.of_pass(add, "z", pass_index)
        x_first = add("Add", add("Mul", y, numbers.of_pass(add, "signal", pass_index)), start)
        offset = numbers.of_pass(add, "offset", pass_index)

        def write(body: Merger, index: str, current: list[str]) -> list[str]:
            feeds = numbers.of_step(body, body("Add", offset, index))
            feeds |= {"x_t": current[0], "observation": guide[0], "mask": guide[1], "mask_noise": z}
            return [body.splice(graph, feeds, ["x_s"])["x_s"]]

        return add.loop(numbers.of_pass(add, "count", pass_index), [x_first], write, own_constants=True)[0]

    def _score(self, add: Merger, x: str, y: str, features: dict[str, str]) -> dict[str, str]:
        mask = self.bundle.settings.mask
        scalars = {
            "mask_lambda": mask.mask_lambda,
            "mask_low": self.calibration.mask_low,
            "mask_high": self.calibration.mask_high,
            "mask_frozen": float(mask.range == "frozen"),
        }
        by_image = add("Unsqueeze", x, add.shape(0))
        feeds = {"posterior_samples": by_image, "observation": y, **features}
        feeds |= {name: add.scalar(value, np.float32) for name, value in scalars.items()}
        return add.splice(self._graph_of(SCORE), feeds, ["anomaly_map", "anomaly_score", "mask"])

    def _verdict(self, anomaly_map: str, score: str) -> tuple[str, str, str]:
        """Return (anomaly_score, verdict, threshold); a map that is not finite gives NaN and a fail."""
        add = self.add
        limit = add.scalar(float(np.finfo(np.float32).max), np.float32)
        finite = add("LessOrEqual", add("ReduceSum", add("Abs", anomaly_map), keepdims=0), limit)
        single = add("Reshape", score, add.constant(np.zeros(0, dtype=np.int64)))
        score = add("Where", finite, single, add.scalar(np.nan, np.float32), name="anomaly_score")
        threshold = add("Identity", add.constant(_not_above(self.calibration.threshold)), name="threshold")
        verdict = add("Not", add("LessOrEqual", score, threshold), name="verdict")
        return score, verdict, threshold

    def _graph_of(self, role: str) -> GraphProto:
        return self._graph(self.manifest.graph(self.bundle.role_of_file(role), self.bundle.path).file)

    def _graph(self, file: str) -> GraphProto:
        if file not in self._graphs:
            self._graphs[file] = onnx.load(self.bundle.path / file).graph
        return self._graphs[file]


class _Numbers:
    """Scalars and noises of some passes as stacked constants, and the nodes that pick those of one pass or step."""

    def __init__(self, add: Merger, bundle: Bundle, plans: Sequence[_Plan]) -> None:
        sampler = bundle.settings.sampler
        bank = NoiseBank.of(sampler, bundle.manifest.preprocessing.network_size)
        self.guided = plans[0].guidance_scale > 0
        z = [bank.draw(plan.index, INITIAL, sampler.samples) for plan in plans]
        counts = [len(plan.steps) for plan in plans]
        spreads = [np.sqrt(np.float32(1 - plan.alpha_first)) for plan in plans]
        passes = {
            "signal": np.asarray([np.sqrt(np.float32(plan.alpha_first)) for plan in plans], dtype=np.float32),
            "start": np.stack([spread * noise for spread, noise in zip(spreads, z, strict=True)]),
            "z": np.stack(z),
            "offset": np.cumsum([0, *counts[:-1]], dtype=np.int64),
            "count": np.asarray(counts, dtype=np.int64),
        }
        steps = [(plan, n, step) for plan in plans for n, step in enumerate(plan.steps)]
        noises = [bank.draw(plan.index, n, sampler.samples) * np.float32(step.sigma_t > 0) for plan, n, step in steps]
        scalars = ("timestep", "alpha_t", "alpha_s", "sigma_t")
        of_steps = {name: np.asarray([getattr(step, name) for *_, step in steps], dtype=np.float32) for name in scalars}
        of_steps["guidance_scale"] = np.asarray([plan.guidance_scale for plan, *_ in steps], dtype=np.float32)
        self._passes = {name: add.constant(value) for name, value in passes.items()}
        self._steps = {name: add.constant(value) for name, value in {**of_steps, "noise": np.stack(noises)}.items()}

    def of_pass(self, add: Merger, name: str, index: str) -> str:
        """Return `signal`, `start` (the noise part of the first x_t), `z`, `offset` or `count` of a pass."""
        return add("Gather", self._passes[name], index, axis=0)

    def of_step(self, add: Merger, index: str) -> dict[str, str]:
        """Return the scalars and the noise of a step, by the names of the step graph's inputs."""
        return {name: add("Gather", stacked, index, axis=0) for name, stacked in self._steps.items()}


def observation(add: Merger, image: str, preprocessing: Preprocessing) -> str:
    """Preprocess a picture as `Preprocessing` does: uint8 [H, W, 3] to float32 [1, 3, h, w] in [-1, 1].

    A picture too small for the region of interest makes the engine fail, as it makes the runtime raise.
    """
    if preprocessing.roi is not None:
        left, top, width, height = preprocessing.roi
        image = _cut(add, image, (top, left), (height, width))
        image = add("Reshape", image, add.shape(height, width, 3))  # fails where the slice came out smaller
    image = resize(add, image, *preprocessing.image_size)
    if preprocessing.network_size != preprocessing.image_size:
        sizes = zip(preprocessing.image_size, preprocessing.network_size, strict=True)
        top, left = ((whole - part) // 2 for whole, part in sizes)
        image = _cut(add, image, (top, left), preprocessing.network_size)
    planes = add("Cast", add("Transpose", image, perm=[2, 0, 1]), to=TensorProto.FLOAT)
    unit = add("Sub", add("Div", planes, add.scalar(127.5, np.float32)), add.scalar(1, np.float32))
    return add("Unsqueeze", unit, add.shape(0))


def _cut(add: Merger, image: str, start: tuple[int, int], size: tuple[int, int]) -> str:
    end = (start[0] + size[0], start[1] + size[1])
    return add("Slice", image, add.shape(*start), add.shape(*end), add.shape(0, 1))


def _not_above(threshold: float) -> NDArray[np.float32]:
    """Return the largest float32 not above it: a float32 score exceeds the one exactly where it exceeds the other."""
    single = np.float32(threshold)
    return np.asarray(single if single <= threshold else np.nextafter(single, np.float32(-np.inf)))


def _value(name: str, dtype: int, shape: Sequence[int | str]) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def resize(add: Merger, image: str, height: int, width: int) -> str:
    """Resize uint8 [H, W, 3] of any size to uint8 [height, width, 3], equal to Pillow's bilinear to the last bit.

    ONNX has a Resize with `antialias`, but ONNX Runtime computes its coefficients in single precision and rounds one
    pixel in a thousand to the next level, which moves a map by more than any other part does. Here the coefficients are
    Pillow's: double precision rounded to 22 bits, every sum exact in integers, and uint8 between the two passes. The
    horizontal pass comes first, as in every Pillow to 12; Pillow 13 begins with the vertical one where that is cheaper,
    which may change pixels by a level.
    """
    lines = add("Reshape", image, add.shape(0, -1))
    # Matrices throughout: engines move the bytes of a transposed matrix fast, and those of [H, W, 3] slowly.
    columns = _shrink(add, add("Reshape", add("Transpose", lines, perm=[1, 0]), _tail(add, image)), width)
    upright = add("Transpose", add("Reshape", columns, add.shape(3 * width, -1)), perm=[1, 0])
    return add("Reshape", _shrink(add, upright, height), add.shape(height, width, 3))


def _tail(add: Merger, image: str) -> str:
    """Return the shape [W, -1]."""
    return add("Concat", add("Gather", add("Shape", image), add.shape(1)), add.shape(-1), axis=0)


def _shrink(add: Merger, matrix: str, size: int) -> str:
    """Resize along the first axis: uint8 [L, M] to uint8 [size, M]."""
    taps, coefficients = _taps(add, add("Gather", add("Shape", matrix), add.shape(0)), size)
    sums = add("MatMulInteger", coefficients, add("Gather", matrix, taps))  # int32 [size, 3, M]
    high, middle, low = (add("Gather", sums, add.scalar(i, np.int64), axis=1) for i in range(3))
    total = add("Add", _scaled(add, add("Add", _scaled(add, high), middle)), low)
    rounded = add("Add", total, add.scalar(1 << (PRECISION_BITS - 1), np.int32))
    levels = add("Div", rounded, add.scalar(1 << PRECISION_BITS, np.int32))
    return add("Cast", add("Min", levels, add.scalar(255, np.int32)), to=TensorProto.UINT8)


def _scaled(add: Merger, sums: str) -> str:
    return add("Mul", sums, add.scalar(256, np.int32))


def _taps(add: Merger, rows: str, size: int) -> tuple[str, str]:
    """Return (int64 [size, K] rows of an output row, uint8 [size, 3, K] their coefficients as bytes, highest first)."""
    length = add("Cast", rows, to=TensorProto.DOUBLE)  # [1]
    scale = add("Div", length, _number(add, size))
    support = add("Max", scale, _number(add, 1))
    center = add("Mul", add.constant(np.arange(size, dtype=np.float64).reshape(-1, 1) + 0.5), scale)
    start = add("Floor", add("Add", add("Sub", center, support), _number(add, 0.5)))
    count = add("Add", add("Mul", add("Ceil", support), _number(add, 2)), _number(add, 1))
    steps = add("Range", _number(add, 0), add("Squeeze", count), _number(add, 1))
    index = add("Add", add("Max", start, _number(add, 0)), steps)  # [size, K]; beyond the last row it weighs nothing
    offset = add("Add", add("Sub", index, center), _number(add, 0.5))
    distance = add("Abs", add("Mul", offset, add("Div", _number(add, 1), support)))
    triangle = add("Max", add("Sub", _number(add, 1), distance), _number(add, 0))
    weight = add("Where", add("Less", index, length), triangle, _number(add, 0))
    share = add("Div", weight, add("ReduceSum", weight, add.shape(1), keepdims=1))
    whole = add("Floor", add("Add", add("Mul", share, _number(add, 1 << PRECISION_BITS)), _number(add, 0.5)))
    inside = add("Min", index, add("Sub", length, _number(add, 1)))
    return add("Cast", inside, to=TensorProto.INT64), _bytes(add, whole)


def _bytes(add: Merger, whole: str) -> str:
    """Split whole numbers below 2^24, double [size, K], as uint8 [size, 3, K]."""
    high = add("Floor", add("Mul", whole, _number(add, 2.0**-16)))
    rest = add("Sub", whole, add("Mul", high, _number(add, 2.0**16)))
    middle = add("Floor", add("Mul", rest, _number(add, 2.0**-8)))
    low = add("Sub", rest, add("Mul", middle, _number(add, 2.0**8)))
    parts = [add("Unsqueeze", part, add.shape(1)) for part in (high, middle, low)]
    return add("Cast", add("Concat", *parts, axis=1), to=TensorProto.UINT8)


def _number(add: Merger, value: float) -> str:
    return add.scalar(value, np.float64)
