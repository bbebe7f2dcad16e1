"""The graphs of a bundle on an engine, one by one and together, beside the arrays of the torch oracle, and then timed.

numpy only: where the oracle's file travels along, the machine that is checked needs no torch.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mdps.benchmarks.bench import Outcome, Spec
from mdps.benchmarks.bench.local import Ours
from mdps.benchmarks.kit import Fields, write_arrays
from mdps.runtime.bundle import Bundle
from mdps.runtime.detector import Detector
from mdps.runtime.device.seam import Buffer, DeviceEngine, Driver, Stream
from mdps.runtime.engines import Engine, named
from mdps.runtime.errors import UsageError
from mdps.runtime.graphs import SCORE, STEPS, Graphs
from mdps.runtime.loading import open_graphs
from mdps.runtime.manifest import Manifest
from mdps.runtime.pipeline import mask_scalars
from mdps.runtime.session import Arrays, Session
from mdps.runtime.settings import Settings


class PlanRuns:
    """A plan as a session: every array goes up, and every result comes back."""

    def __init__(self, driver: Driver, stream: Stream, engine: DeviceEngine) -> None:
        self._driver, self._stream, self._engine = driver, stream, engine
        self.inputs = tuple(port.name for port in engine.inputs)

    def run(self, feeds: Mapping[str, NDArray[Any]], outputs: Sequence[str] | None = None) -> Arrays:
        """All outputs, whose axis of any length is as long as the inputs' first one."""
        fed = {name: np.ascontiguousarray(feeds[name], dtype=np.float32) for name in self.inputs}
        fed = {name: array.reshape(feeds[name].shape) for name, array in fed.items()}  # a scalar stays one
        count = next(len(array) for array in fed.values() if array.ndim)
        found = {
            port.name: np.empty([count if n is None else n for n in port.shape], dtype=np.float32)
            for port in self._engine.outputs
        }
        with self._driver.current():
            places = {name: Buffer(self._driver.allocate(array.nbytes), array.shape)
                      for name, array in (fed | found).items()}  # fmt: skip
            for name, array in fed.items():
                self._driver.upload(places[name].address, array, self._stream)
            self._engine.bind(places).enqueue(self._stream)
            for name, array in found.items():
                self._driver.download(array, places[name].address, self._stream)
            self._driver.synchronise(self._stream)
        return dict(found)


Runs = Session | PlanRuns
Stages = Graphs[Runs]


@contextmanager
def open_stages(folder: Path, manifest: Manifest, engine: str, threads: int) -> Iterator[Stages]:
    """Open all graphs of the bundle, those too that no pass needs; raises as `load`."""
    row = named(engine)
    with ExitStack() as opened:
        if row.reads == "plans":
            yield _plans(folder, manifest, row, opened)
            return
        bundle = Bundle(folder, manifest, manifest.settings)
        sessions = open_graphs(bundle, opened, engine=engine, threads=threads)
        yield Graphs[Runs].of(dict(sessions.roles))


def _plans(folder: Path, manifest: Manifest, engine: Engine, opened: ExitStack) -> Stages:
    """The plans that there are; whether they fit card and release is asked as by `load`."""
    from mdps.runtime.device import cuda
    from mdps.runtime.engines.tensorrt import Loader, check_plan, load_library

    library, driver = load_library(engine), cuda.open_driver()
    opened.callback(driver.close)
    entries = manifest.plans_of(engine.name)
    for entry in entries.values():
        check_plan(entry, str(library.__version__), driver.card, folder, manifest)
    with driver.current():
        stream, loader = driver.stream(), Loader(engine, library, driver)
        engines = {role: loader.open(folder / entry.file) for role, entry in entries.items()}

    def close() -> None:
        with driver.current():
            for one in engines.values():
                one.close()

    opened.callback(close)
    return Graphs[Runs].of({role: PlanRuns(driver, stream, one) for role, one in engines.items()})


Array = NDArray[Any]
SCALARS = ("timestep", "alpha_t", "alpha_s", "sigma_t")
STAGES = ("guided_step", "plain_step", "features", "score", "first_pass", "both_passes", "verdict")
# Of each output: which of the export gate's tolerances holds, and the least value that errors are shares of.
JUDGED = {
    "guided_step.x_s": ("one_step", 1.0),
    "guided_step.eps": ("eps", 1.0),
    "guided_step.guidance_gradient": ("guidance_gradient", 1e-12),
    "plain_step.x_s": ("one_step", 1.0),
    "plain_step.eps": ("eps", 1.0),
    "score.anomaly_map": ("first_map", 1e-2),
    "score.anomaly_score": ("anomaly_score", 1e-2),
    "first_pass.anomaly_map": ("first_map", 1e-2),
    "first_pass.anomaly_score": ("anomaly_score", 1e-2),
    "both_passes.posterior_sample": ("posterior_sample", 1.0),
    "both_passes.anomaly_map": ("anomaly_map", 1e-2),
    "both_passes.anomaly_score": ("anomaly_score", 1e-2),
}
DISAGREE = {"score.mask": "mask_disagreement", "first_pass.mask": "mask_disagreement"}
FEATURES = ("one_step", 1e-2)  # unit vectors, in float32 whatever the denoiser computes in


@dataclass(frozen=True)
class Finding(Fields):
    """The difference of one output from the oracle's, beside what is allowed; `error` None where it is no number."""

    output: str
    error: float | None
    tolerance: float

    @property
    def stage(self) -> str:
        """One of STAGES."""
        return self.output.partition(".")[0]

    @property
    def agrees(self) -> bool:
        """Whether it is within."""
        return self.error is not None and self.error <= self.tolerance


@dataclass(frozen=True)
class Reference:
    """Arrays by name, and `about`: which checkpoint and settings they are of, tolerances, FLOPs of a forward pass."""

    arrays: Mapping[str, Array]
    about: Mapping[str, Any]

    def save(self, path: Path) -> None:
        """Into one file, which appears whole or not at all."""
        write_arrays(path, about=np.array(json.dumps(self.about)), **self.arrays)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Inverse of `save`; UsageError where the file is damaged."""
        try:
            with np.load(path, allow_pickle=False) as found:
                arrays = dict(found)
            return cls(arrays, json.loads(str(arrays.pop("about"))))
        except (OSError, ValueError, KeyError, EOFError) as error:
            raise UsageError(f"{path} cannot be read ({error}): remove it, and it is made again") from error

    def check_same(self, manifest: Manifest) -> None:
        """UsageError unless these are the oracle's numbers for this bundle."""
        if self.about["of"] != identity(manifest):
            raise UsageError(
                f"the oracle's numbers are of another checkpoint or other settings than the bundle {manifest.name}: "
                "remove the work folder, and both are made again"
            )

    def __getitem__(self, name: str) -> Array:
        return self.arrays[name]

    def has(self, prefix: str) -> bool:
        """Whether there is an array whose name begins so."""
        return any(name.startswith(prefix) for name in self.arrays)

    def step_feeds(self, names: Sequence[str], samples: int) -> dict[str, Array]:
        """Feeds of a step graph, the one picture `samples` times."""
        images = {
            name: _many(self[f"step.{name}"], samples) for name in ("x_t", "observation", "mask", "noise", "mask_noise")
        }
        scalars = {name: np.asarray(self[f"step.{name}"], np.float32) for name in (*SCALARS, "guidance_scale")}
        return {name: value for name, value in (images | scalars).items() if name in names}


def identity(manifest: Manifest) -> dict[str, Any]:
    """Return what the oracle's numbers depend on; in half precision, traced and with another N_s they are the same."""
    settings = replace(manifest.settings, sampler=replace(manifest.settings.sampler, samples=1))
    return {"checkpoint": manifest.checkpoint.sha256, "settings": settings.to_json()}


def compare_stages(
    reference: Reference, stages: Stages, settings: Settings, precision: str, samples: int
) -> list[Finding]:
    """Every graph by itself, on the reference's one picture so many times over."""
    comparison = _Comparison(reference, precision)
    _steps(comparison, stages, samples)
    _scoring(comparison, stages, settings, samples)
    return comparison.findings


def compare_whole(reference: Reference, detector: Detector, precision: str, samples: int) -> list[Finding]:
    """Whole detections, where the oracle made them with as many samples."""
    comparison = _Comparison(reference, precision)
    if reference.has(f"whole{samples}."):
        _whole(comparison, detector, samples)
    if samples == 1 and reference.has("verdict."):
        _verdicts(comparison, detector)
    return comparison.findings


class _Comparison:
    """Gathers findings."""

    def __init__(self, reference: Reference, precision: str) -> None:
        self.reference, self.findings = reference, list[Finding]()
        self._allowed: dict[str, float] = reference.about["tolerances"][precision]
        self._exact: dict[str, float] = reference.about["tolerances"]["fp32"]

    def compare(self, output: str, got: Array, wanted: Array, share: float = 1.0) -> None:
        """The largest difference; with `share` below 1 the largest of that share of the values."""
        name, floor = JUDGED[output]
        self._add(output, _difference(got, wanted, floor, share), self._allowed[name])

    def features(self, index: int, got: Array, wanted: Array) -> None:
        name, floor = FEATURES
        self._add(f"features.{index}", _difference(got, wanted, floor, 1.0), self._exact[name])

    def disagree(self, output: str, got: Array, wanted: Array) -> float:
        share = float(np.abs(got - wanted).mean())
        self._add(output, share, self._allowed[DISAGREE[output]])
        return share

    def verdicts(self, wrong: int, of: int) -> None:
        self._add("verdict.other_side", wrong / of, 0.0)

    def _add(self, output: str, error: float, tolerance: float) -> None:
        self.findings.append(Finding(output, error if np.isfinite(error) else None, tolerance))


def _difference(got: Array, wanted: Array, floor: float, share: float) -> float:
    if got.shape != wanted.shape:
        return float("nan")
    apart = np.abs(np.asarray(got, np.float64) - wanted) / max(floor, float(np.abs(wanted).max()))
    return float(apart.max() if share == 1 or not np.isfinite(apart).all() else np.quantile(apart, share))


def _many(array: Array, count: int) -> Array:
    return np.repeat(array, count, axis=0)


def _steps(comparison: _Comparison, stages: Stages, samples: int) -> None:
    for role, session in stages.roles.items():
        if role not in STEPS:
            continue
        found = session.run(comparison.reference.step_feeds(session.inputs, samples))
        for name in ("x_s", "eps", "guidance_gradient"):
            if f"{role}.{name}" in comparison.reference.arrays:
                comparison.compare(
                    f"{role}.{name}", found[name], _many(comparison.reference[f"{role}.{name}"], samples)
                )


def _scoring(comparison: _Comparison, stages: Stages, settings: Settings, samples: int) -> None:
    """The features of the picture, and the score of another one as its posterior sample."""
    reference, y = comparison.reference, comparison.reference["step.observation"]
    features = {} if stages.features is None else stages.features.run({"image": y})
    for index, (name, got) in enumerate(features.items(), start=1):
        comparison.features(index, got, reference[f"features.{index}"])
        features[name] = np.asarray(reference[f"features.{index}"])
    scalars = mask_scalars(settings.mask, (0.0, 1.0))
    feeds = {"posterior_samples": _many(reference["score.sample"], samples)[None], "observation": y, **features}
    feeds |= {name: np.asarray(value, np.float32) for name, value in scalars.items()}
    score = stages.need(SCORE)
    found = score.run({name: feeds[name] for name in score.inputs})
    for name in ("anomaly_map", "anomaly_score"):
        comparison.compare(f"score.{name}", found[name], reference[f"score.{name}"])
    comparison.disagree("score.mask", found["mask"], reference["score.mask"])


def _whole(comparison: _Comparison, detector: Detector, samples: int) -> None:
    """Both passes. Where a pixel of the mask lies on the other side, the second pass is another one there."""
    wanted: Callable[[str], Array] = lambda name: comparison.reference[f"whole{samples}.{name}"]  # noqa: E731
    found = detector.inspect(comparison.reference["step.observation"], mask_range=(0.0, 1.0))
    comparison.compare("first_pass.anomaly_map", found.first_map, wanted("first_map"))
    comparison.compare("first_pass.anomaly_score", found.first_score, wanted("first_score"))
    share = 0.99 if comparison.disagree("first_pass.mask", found.mask, wanted("mask")) else 1.0
    comparison.compare("both_passes.posterior_sample", found.posterior_samples, wanted("posterior_samples"), share)
    comparison.compare("both_passes.anomaly_map", found.anomaly_map, wanted("anomaly_map"), share)
    comparison.compare("both_passes.anomaly_score", found.anomaly_score, wanted("anomaly_score"))


def _verdicts(comparison: _Comparison, detector: Detector) -> None:
    images, wanted = comparison.reference["verdict.observations"], comparison.reference["verdict.scores"]
    threshold = float(comparison.reference["verdict.threshold"])
    scores = np.concatenate([detector.inspect(image[None], mask_range=(0.0, 1.0)).anomaly_score for image in images])
    comparison.verdicts(int(((scores > threshold) != (wanted > threshold)).sum()), len(wanted))


class Checked(Ours):
    """`Ours` compared first: the facts have `findings`, an entry an output, and runs on a card its own times."""

    facts: dict[str, Any]

    def __init__(self, spec: Spec) -> None:
        assert spec.reference is not None
        folder, reference = Path(spec.bundle), Reference.read(Path(spec.reference))
        manifest = Manifest.read(folder)
        reference.check_same(manifest)  # before an engine is loaded for nothing
        precision, samples = manifest.precision, spec.samples or 1
        with open_stages(folder, manifest, spec.variant, spec.threads) as stages:
            found = compare_stages(reference, stages, manifest.settings, precision, samples)
        super().__init__(spec)
        found += compare_whole(reference, self.detector, precision, samples)
        self.facts["findings"] = [one.to_json() for one in found]
        self._by_events = self.detector.on_card

    def run(self) -> Outcome:
        """Run once; where the whole loop stays on the card, events on it time passes and scoring too."""
        found = self.detector.inspect(self._observations, mask_range=(0.0, 1.0))
        passes = found.times["first_pass"] + found.times["masked_pass"]
        device = sum(found.times.values()) if self._by_events else None
        return Outcome(float(found.anomaly_score[0]), passes, device)
