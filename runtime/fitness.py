"""Whether a detector sees defects on the parts it was calibrated on, told by defects put into images of good ones."""

from dataclasses import dataclass

from mdps.runtime.errors import require
from mdps.runtime.records import Record

FLOOR = 0.68
"""Of `Fitness.auroc`; how it was found is in docs/measure/tuning.md."""


@dataclass(frozen=True)
class Found(Record):
    """Of `shown` images with a synthetic defect, `found` score above the threshold.

    `auroc` is the mean of two: that of these images against good ones, and the mean of those of their maps' pixels in
    the defect against all others of the image.
    """

    shown: int
    found: int
    auroc: float

    def __post_init__(self) -> None:
        require(0 <= self.found <= self.shown and self.shown >= 1, "found should lie between 0 and shown")
        require(0 <= self.auroc <= 1, f"auroc {self.auroc} should lie between 0 and 1")


@dataclass(frozen=True)
class Fitness(Record):
    """Synthetic defects in good parts by kind and by size ("small", "medium", "large"); `auroc` is the kinds' mean."""

    auroc: float
    kinds: dict[str, Found]
    sizes: dict[str, Found]

    @property
    def fit(self) -> bool:
        """Whether the detector sees defects on these parts at all."""
        return self.auroc >= FLOOR

    @property
    def summary(self) -> dict[str, str]:
        """Return what was found of each kind and size, in words."""
        found = {"all kinds": f"AUROC {self.auroc:.2f}"}
        return found | {
            name: f"{one.found} of {one.shown}, AUROC {one.auroc:.2f}"
            for name, one in (self.kinds | self.sizes).items()
        }

    @property
    def doubt(self) -> str:
        """Return a sentence where the detector does not see defects on these parts; empty where it does."""
        if self.fit:
            return ""
        found, shown = (sum(getattr(kind, name) for kind in self.kinds.values()) for name in ("found", "shown"))
        return (
            f"this detector does not see defects on these parts: it finds {found} of {shown} that were put into good "
            f"images, and ranks defects above good parts in {self.auroc:.0%} of pairs of images and of pixels (at "
            f"least {FLOOR:.0%} is needed): run `mdps tune`, or train on more of these parts"
        )
