"""Bundles that are calibrated on good images under settings of a study, for its early exits."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from mdps.benchmarks.kit import Say, digest
from mdps.benchmarks.study import Bundles, Changes, Variant, settled
from mdps.runtime.atomic import new_folder
from mdps.runtime.bundle import Bundle
from mdps.runtime.calibration import calibrate
from mdps.runtime.detector import Detector
from mdps.runtime.errors import UsageError
from mdps.runtime.loading import open_pipeline
from mdps.runtime.manifest import FILE_NAME, Manifest
from mdps.runtime.settings import Settings


class CalibratedBundles(Bundles):
    """Bundles whose changes may also say that they are `calibrated`, for how many steps, on the pictures `good`.

    `threads` as in `load`.
    """

    def __init__(
        self, folder: Path, choices: Mapping[str, Any], say: Say, good: Sequence[Path], threads: int | None = None
    ) -> None:
        super().__init__(folder, choices, say)
        self._good, self._threads = good, threads

    def get(self, checkpoint: Path, category: str, changes: Mapping[str, Any]) -> Path:
        """Export, then calibrate, once; UsageError as `write_calibrated`."""
        usual = {key: value for key, value in changes.items() if key != "calibrated"}
        bundle = super().get(checkpoint, category, usual)
        if not (steps := changes.get("calibrated")):
            return bundle
        seen = [[path.name, path.stat().st_size] for path in self._good]
        out = bundle.with_name(f"{bundle.name}-calibrated-{steps}-{digest(seen)[:8]}")
        if not (out / FILE_NAME).is_file():
            self._say(f"making a bundle: calibrated-{steps}")
            write_calibrated(bundle, out, settled(Variant("", "", Changes(steps=steps))), self._good, self._threads)
        return out


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
