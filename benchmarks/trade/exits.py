"""Early exit: a bundle that knows from good images which others may skip the masked pass, and who did."""

import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mdps.benchmarks.reproduce.outcomes import Outcome
from mdps.runtime.atomic import new_folder
from mdps.runtime.bundle import Bundle
from mdps.runtime.calibration import calibrate, exit_limit
from mdps.runtime.detector import Detector
from mdps.runtime.errors import UsageError
from mdps.runtime.loading import open_pipeline
from mdps.runtime.manifest import Manifest
from mdps.runtime.settings import Settings


@dataclass(frozen=True)
class Exits:
    """Shares of the good and of the defective test images that skipped the masked pass; None where there are none."""

    good: float | None
    defective: float | None

    @classmethod
    def of(cls, first: Outcome, bundle: Path, share: float) -> "Exits":
        """From the scores of the first pass, and the calibration of a bundle with an early exit at that share."""
        limit = exit_limit(Manifest.read(bundle, verify=False).calibrations["default"], share, bundle.name)
        assert limit is not None
        labels, left = np.array(first.labels), np.array(first.scores) <= limit
        shares = [float(left[labels == kind].mean()) if (labels == kind).any() else None for kind in (False, True)]
        return cls(*shares)

    def ms(self, one_pass: Sequence[float], both: Sequence[float]) -> list[float]:
        """Expected ms of a good part, from the times of one pass and of both in the same rounds."""
        share = self.good or 0.0
        return [share * one + (1 - share) * two for one, two in zip(one_pass, both, strict=True)]


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
