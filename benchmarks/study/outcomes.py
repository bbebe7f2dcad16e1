"""What one run said of one category, kept as files so that no run is made twice."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from mdps.benchmarks.bootstrap import ImageScores, Interval, bootstrap, bootstrap_difference
from mdps.benchmarks.evaluate import Evaluation, finite
from mdps.benchmarks.streaming import PixelCounts
from mdps.runtime.atomic import write_text
from mdps.runtime.errors import UsageError

AUROCS = ("image_auroc", "pixel_auroc")


@dataclass(frozen=True)
class Outcome:
    """An evaluation without its pictures: `labels` and `scores` [n] of the judged images, `counts` of their pixels.

    `metrics` has the keys of `evaluate.METRICS`, NaN where undefined.
    """

    images: int
    metrics: dict[str, float]
    labels: tuple[bool, ...]
    scores: tuple[float, ...]
    counts: PixelCounts
    provenance: dict[str, Any]
    problems: tuple[str, ...]

    @classmethod
    def of(cls, evaluation: Evaluation) -> Self:
        """What is kept of an evaluation."""
        judged = [(row.defective, row.score) for row in evaluation.rows if row.score is not None]
        return cls(
            images=evaluation.images,
            metrics=dict(evaluation.metrics),
            labels=tuple(label for label, _ in judged),
            scores=tuple(score for _, score in judged),
            counts=evaluation.counts,
            provenance=dict(evaluation.provenance),
            problems=evaluation.problems,
        )

    def save(self, folder: Path, name: str) -> None:
        """`<name>.json` and `<name>.npz` in `folder`, the JSON last."""
        self.counts.save(folder / f"{name}.npz")
        record = {
            "images": self.images,
            "metrics": {key: finite(value) for key, value in self.metrics.items()},
            "labels": self.labels,
            "scores": self.scores,
            "provenance": self.provenance,
            "problems": self.problems,
        }
        write_text(folder / f"{name}.json", json.dumps(record, indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path, name: str) -> Self:
        """What `save` wrote; UsageError where a file is damaged."""
        path = folder / f"{name}.json"
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            metrics = {key: math.nan if value is None else float(value) for key, value in record["metrics"].items()}
            labels, scores = tuple(map(bool, record["labels"])), tuple(map(float, record["scores"]))
            images, provenance, problems = int(record["images"]), record["provenance"], tuple(record["problems"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{path} is damaged ({error}): remove its folder, and it is computed again") from error
        return cls(images, metrics, labels, scores, PixelCounts.load(folder / f"{name}.npz"), provenance, problems)

    def intervals(self) -> dict[str, tuple[float, float]]:
        """95 % intervals of image and pixel AUROC where they are defined."""
        found = {name: bootstrap(self._resampled(name)) for name in AUROCS if self._defined(name)}
        return {name: (interval.low, interval.high) for name, interval in found.items()}

    def minus(self, other: "Outcome") -> dict[str, Interval]:
        """This one's AUROCs minus the other's on the same images, with paired intervals; without undefined ones.

        Raises UsageError where the two judged other images.
        """
        names = [name for name in AUROCS if self._defined(name) and other._defined(name)]
        return {name: bootstrap_difference(self._resampled(name), other._resampled(name)) for name in names}

    def _defined(self, name: str) -> bool:
        if not math.isfinite(self.metrics[name]):
            return False
        defective = self.counts.defective
        return name == "image_auroc" or (bool(defective.any()) and not defective.all())

    def _resampled(self, name: str) -> ImageScores | PixelCounts:
        return self.counts if name == "pixel_auroc" else ImageScores(self.labels, self.scores)
