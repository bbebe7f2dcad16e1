"""All that came of a tuning."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdps.runtime.calibration import Calibration
from mdps.serving.fitness import of_pixels
from mdps.tuning.candidates import Tried
from mdps.tuning.photographs import Defects
from mdps.tuning.search import Search


@dataclass(frozen=True)
class Shown:
    """The synthetic defects of the search as the tuned detector judged them: scores [m] and maps [m, H, W]."""

    defects: Defects
    scores: NDArray[np.float32]
    maps: NDArray[np.float32]

    def told(self) -> list[list[Any]]:
        """Return kind, size, score and `of_pixels` of each."""
        pixels = [of_pixels(*pair) for pair in zip(self.maps, self.defects.masks, strict=True)]
        columns = (self.defects.kinds, self.defects.sizes, self.scores.tolist(), pixels)
        return [list(row) for row in zip(*columns, strict=True)]


@dataclass(frozen=True)
class Outcome:
    """All that a tuning found."""

    chosen: Tried
    search: Search
    calibration: Calibration
    budget_ms: float
    ms: float
    shown: Shown
    evidence: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return all of it as values of JSON."""
        found = self.calibration.to_json()
        return {"chosen": self.chosen.candidate.name, "ms": round(self.ms, 1), "calibration": found, **self.evidence}

    def told(self) -> dict[str, str]:
        """Say what was chosen, in a few words."""
        best = max(one.value for one in self.search.tried)
        left = f"; no time was left for {len(self.search.left_out)} more" if self.search.left_out else ""
        return {
            "chosen": self.chosen.candidate.name,
            "time": f"{self.ms:.0f} ms an image, of {self.budget_ms:g} allowed",
            "value": f"{self.chosen.value:.3f}; the best of {len(self.search.tried)} candidates {best:.3f}{left}",
            "cascade": self.evidence["cascade"]["said"],
        }
