"""The detector that ships with mdps: photographs of bricks of 64 x 64 pixels, and one picture of each verdict."""

from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from mdps.runtime.bundle import LoadFields
from mdps.runtime.detector import Detector
from mdps.runtime.errors import require
from mdps.runtime.loading import load
from mdps.runtime.pictures import read_image

if TYPE_CHECKING:
    from PIL import Image

FOLDER = Path(__file__).parent / "files"
PICTURES = {"good": "good", "bad": "stain"}
"""Names of the pictures, and of which kind of the demo's test images each is the first."""
VERDICTS = {"good": "pass", "bad": "fail"}


def demo_detector(**fields: Unpack[LoadFields]) -> Detector:
    """Load the detector of bricks that is part of this package; `fields`, such as engine="auto", as of `load`."""
    return load(FOLDER / "bundle", **fields)


def demo_picture(name: str) -> "Image.Image":
    """Return a photograph of bricks that the detector passes, or one with a stain that it fails."""
    require(name in PICTURES, f"there is no picture {name!r} in the package: choose one of {', '.join(PICTURES)}")
    return read_image(FOLDER / f"{name}.png")
