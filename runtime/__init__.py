"""The lean runtime: loads a bundle and judges images with numpy, Pillow and one engine library.

with mdps.runtime.load("bundle") as detector:
    result = detector("part.png")
    print(result.verdict, result.score)
"""

from mdps.runtime.bundle import LoadOptions
from mdps.runtime.calibration import Calibration, CalibrationWarning, calibrate
from mdps.runtime.detector import Detector, Result
from mdps.runtime.errors import BackendError, BundleError, CalibrationError, ImageError, MdpsError, UsageError
from mdps.runtime.loading import load
from mdps.runtime.settings import (
    MaskSettings,
    PassSettings,
    SamplerSettings,
    ScoreSettings,
    Settings,
    paper_settings,
    reference_settings,
)

__all__ = [
    "BackendError",
    "BundleError",
    "Calibration",
    "CalibrationError",
    "CalibrationWarning",
    "Detector",
    "ImageError",
    "LoadOptions",
    "MaskSettings",
    "MdpsError",
    "PassSettings",
    "Result",
    "SamplerSettings",
    "ScoreSettings",
    "Settings",
    "UsageError",
    "calibrate",
    "load",
    "paper_settings",
    "reference_settings",
]
