"""Results of an evaluation: a row an image, metrics of a category, and of each type of defect by itself."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from mdps.benchmarks.kit import Fields
from mdps.benchmarks.metrics import auroc
from mdps.benchmarks.metrics.pixels import PixelCounts

METRICS = (
    "image_auroc", "image_ap", "image_f1max", "pixel_auroc", "pixel_ap", "aupro_0.30", "aupro_0.05", "ms_per_image",
)  # fmt: skip
HEADS = ("kind of defect", "images", "image AUROC", "pixel AUROC", "missed")
CHANCE = 0.55
"""An AUROC up to here is called chance: blind scores exceed it every fourth time on 80 images, one in 16 on 500."""


@dataclass(frozen=True)
class ScoredImage(Fields):
    """One test image: `path` below the category's folder, `kind` "good" or the defect's name, and its score and time.

    `ms` are the predictor's own; `processor_ms` are of all threads until it answered, with the reading of the file.
    An image that could not be judged has only an `error`, the sentence that says why.
    """

    path: str
    kind: str
    defective: bool
    score: float | None = None
    ms: float | None = None
    processor_ms: float | None = None
    error: str | None = None


@dataclass(frozen=True)
class DefectTypeMetrics(Fields):
    """One kind of defect: how many images were judged, image and pixel AUROC (NaN where undefined)."""

    kind: str
    images: int
    image_auroc: float
    pixel_auroc: float

    def cells(self) -> tuple[str, ...]:
        """Texts under HEADS but for the last, empty where undefined."""
        aurocs = ("" if math.isnan(value) else f"{value:.4f}" for value in (self.image_auroc, self.pixel_auroc))
        return (self.kind, str(self.images), *aurocs)


@dataclass(frozen=True)
class Evaluation:
    """Results of one predictor on one category.

    `metrics` has the keys of METRICS, NaN where a metric is undefined (`problems` says why); `images` were judged;
    `rows` has every test image in order; `counts` are what a bootstrap resamples; `threshold` is the predictor's own,
    None where it has none; `defect_types` are metrics of each, empty where there is one only. `regions` are those it
    lists beside the ground truth (`RegionCounts.to_json`), None where it lists none. `problems` name, as sentences,
    what was left out and what a reader of the numbers must know.
    """

    predictor: str
    category: str
    images: int
    metrics: dict[str, float]
    rows: tuple[ScoredImage, ...]
    counts: PixelCounts
    provenance: dict[str, object]
    problems: tuple[str, ...]
    threshold: float | None = None
    defect_types: tuple[DefectTypeMetrics, ...] = ()
    regions: dict[str, Any] | None = None

    @property
    def failed(self) -> tuple[ScoredImage, ...]:
        """The images that could not be judged."""
        return tuple(row for row in self.rows if row.error is not None)

    def to_json(self) -> dict[str, Any]:
        """METRICS (null where undefined), `category`, `images`, `provenance`, `verdicts`, `regions`; no rows."""
        return {
            **{name: finite(self.metrics[name]) for name in METRICS},
            "category": self.category,
            "images": self.images,
            "provenance": self.provenance,
            "verdicts": self.verdicts(),
            "regions": self.regions,
            "problems": list(self.said()),
        }

    def said(self) -> Iterator[str]:
        """Yield `problems`, the errors of the verdicts, and where scores or maps are no better than chance."""
        yield from self.problems
        counted = self.verdicts()
        if counted is None:
            yield "no threshold applies, so that neither missed defects nor false alarms are counted"
        else:
            yield from _errors(counted)
        for name, what in (("image", "the scores rank"), ("pixel", "the maps locate")):
            if (value := self.metrics[f"{name}_auroc"]) <= CHANCE:
                yield f"{what} defects no better than chance ({name} AUROC {value:.2f})"

    def kinds(self) -> Iterator[tuple[str, ...]]:
        """Yield texts under HEADS for each of `defect_types`."""
        missed = (self.verdicts() or {}).get("missed_by_kind", {})
        yield from ((*found.cells(), str(missed.get(found.kind, ""))) for found in self.defect_types)

    def verdicts(self) -> dict[str, Any] | None:
        """Return what the predictor's own threshold gets wrong, in numbers and shares; None where it has none."""
        if self.threshold is None:
            return None
        judged = [(row.kind, row.defective, row.score) for row in self.rows if row.score is not None]
        good = [score > self.threshold for _, defective, score in judged if not defective]
        bad = [(kind, score <= self.threshold) for kind, defective, score in judged if defective]
        missed = sum(passed for _, passed in bad)
        return {
            "threshold": self.threshold,
            "good": len(good),
            "false_alarms": sum(good),
            "false_alarm_rate": sum(good) / len(good) if good else None,
            "defective": len(bad),
            "missed": missed,
            "miss_rate": missed / len(bad) if bad else None,
            "missed_by_kind": {name: sum(passed for kind, passed in bad if kind == name) for name in sorted(dict(bad))},
        }


def _errors(counted: Mapping[str, Any]) -> Iterator[str]:
    for wrong, of, sentence in (
        ("missed", "defective", "defective images were missed"),
        ("false_alarms", "good", "good images were called defective"),
    ):
        if counted[wrong]:
            yield f"{counted[wrong]} of {counted[of]} {sentence} at the threshold"


def finite(value: float) -> float | None:
    """The value, or None where it is no number: JSON has no NaN."""
    return value if math.isfinite(value) else None


def mean_metrics(evaluations: Sequence[Evaluation]) -> dict[str, float | None]:
    """The mean of each metric over the categories where it is defined; None where it is nowhere."""
    defined = {name: [e.metrics[name] for e in evaluations if math.isfinite(e.metrics[name])] for name in METRICS}
    return {name: fmean(values) if values else None for name, values in defined.items()}


def by_defect_type(
    judged: Sequence[tuple[str, bool, float]], counts: PixelCounts, counted: Sequence[tuple[str, bool]]
) -> tuple[DefectTypeMetrics, ...]:
    """Each kind of defect in `judged` (kind, whether defective, score) against the good images, by name.

    `counted` has kind and whether defective of each image in `counts`. Pixel AUROC compares the defect's pixels with
    all others of its images and of the good ones. Empty where there is one kind only: it would say what the whole says.
    """
    kinds = sorted({kind for kind, defective, _ in judged if defective})
    if len(kinds) < 2:
        return ()
    return tuple(_one(kind, judged, counts, counted) for kind in kinds)


def _one(
    kind: str, judged: Sequence[tuple[str, bool, float]], counts: PixelCounts, counted: Sequence[tuple[str, bool]]
) -> DefectTypeMetrics:
    own = [(defective, score) for name, defective, score in judged if name == kind or not defective]
    labels, scores = [label for label, _ in own], [score for _, score in own]
    weights = np.array([name == kind or not defective for name, defective in counted], dtype=np.float64)
    image = auroc(labels, scores) if len(set(labels)) == 2 else math.nan
    return DefectTypeMetrics(kind, sum(labels), image, counts.auroc(weights) if len(weights) else math.nan)
