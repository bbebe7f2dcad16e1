"""What the torch oracle computed at every stage, in a file, and how a runtime's pipeline is compared with it.

numpy only: where the file travels along, the machine that is checked needs no torch.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mdps.benchmarks.gpu_check.stages import Stages
from mdps.runtime.detector import Detector
from mdps.runtime.errors import UsageError
from mdps.runtime.graphs import SCORE, STEPS
from mdps.runtime.manifest import Manifest
from mdps.runtime.pipeline import mask_scalars
from mdps.runtime.settings import Settings

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
class Finding:
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

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Reference:
    """Arrays by name, and `about`: which checkpoint and settings they are of, tolerances, FLOPs of a forward pass."""

    arrays: Mapping[str, Array]
    about: Mapping[str, Any]

    def save(self, path: Path) -> None:
        """Into one file, which appears whole or not at all."""
        import io

        from mdps.runtime.atomic import write_bytes

        buffer = io.BytesIO()
        np.savez_compressed(buffer, about=np.array(json.dumps(self.about)), **self.arrays)  # type: ignore[arg-type]
        write_bytes(path, buffer.getvalue())

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
    """What the oracle's numbers depend on; in half precision, traced and with another N_s they are the same."""
    settings = replace(manifest.settings, sampler=replace(manifest.settings.sampler, samples=1))
    return {"checkpoint": manifest.checkpoint.sha256, "settings": settings.to_json()}


def compare_stages(
    reference: Reference, stages: Stages, settings: Settings, precision: str, samples: int
) -> list[Finding]:
    """Every graph by itself, on the reference's one picture so many times over."""
    judge = _Judge(reference, precision)
    _steps(judge, stages, samples)
    _scoring(judge, stages, settings, samples)
    return judge.findings


def compare_whole(reference: Reference, detector: Detector, precision: str, samples: int) -> list[Finding]:
    """Whole detections, where the oracle made them with as many samples."""
    judge = _Judge(reference, precision)
    if reference.has(f"whole{samples}."):
        _whole(judge, detector, samples)
    if samples == 1 and reference.has("verdict."):
        _verdicts(judge, detector)
    return judge.findings


class _Judge:
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


def _steps(judge: _Judge, stages: Stages, samples: int) -> None:
    for role, session in stages.roles.items():
        if role not in STEPS:
            continue
        found = session.run(judge.reference.step_feeds(session.inputs, samples))
        for name in ("x_s", "eps", "guidance_gradient"):
            if f"{role}.{name}" in judge.reference.arrays:
                judge.compare(f"{role}.{name}", found[name], _many(judge.reference[f"{role}.{name}"], samples))


def _scoring(judge: _Judge, stages: Stages, settings: Settings, samples: int) -> None:
    """The features of the picture, and the score of another one as its posterior sample."""
    reference, y = judge.reference, judge.reference["step.observation"]
    features = {} if stages.features is None else stages.features.run({"image": y})
    for index, (name, got) in enumerate(features.items(), start=1):
        judge.features(index, got, reference[f"features.{index}"])
        features[name] = np.asarray(reference[f"features.{index}"])
    scalars = mask_scalars(settings.mask, (0.0, 1.0))
    feeds = {"posterior_samples": _many(reference["score.sample"], samples)[None], "observation": y, **features}
    feeds |= {name: np.asarray(value, np.float32) for name, value in scalars.items()}
    score = stages.need(SCORE)
    found = score.run({name: feeds[name] for name in score.inputs})
    for name in ("anomaly_map", "anomaly_score"):
        judge.compare(f"score.{name}", found[name], reference[f"score.{name}"])
    judge.disagree("score.mask", found["mask"], reference["score.mask"])


def _whole(judge: _Judge, detector: Detector, samples: int) -> None:
    """Both passes. Where a pixel of the mask lies on the other side, the second pass is another one there."""
    wanted: Callable[[str], Array] = lambda name: judge.reference[f"whole{samples}.{name}"]  # noqa: E731
    found = detector.inspect(judge.reference["step.observation"], mask_range=(0.0, 1.0))
    judge.compare("first_pass.anomaly_map", found.first_map, wanted("first_map"))
    judge.compare("first_pass.anomaly_score", found.first_score, wanted("first_score"))
    share = 0.99 if judge.disagree("first_pass.mask", found.mask, wanted("mask")) else 1.0
    judge.compare("both_passes.posterior_sample", found.posterior_samples, wanted("posterior_samples"), share)
    judge.compare("both_passes.anomaly_map", found.anomaly_map, wanted("anomaly_map"), share)
    judge.compare("both_passes.anomaly_score", found.anomaly_score, wanted("anomaly_score"))


def _verdicts(judge: _Judge, detector: Detector) -> None:
    images, wanted = judge.reference["verdict.observations"], judge.reference["verdict.scores"]
    threshold = float(judge.reference["verdict.threshold"])
    scores = np.concatenate([detector.inspect(image[None], mask_range=(0.0, 1.0)).anomaly_score for image in images])
    judge.verdicts(int(((scores > threshold) != (wanted > threshold)).sum()), len(wanted))
