"""How parts lie in their pictures: the reference view of a product, and the pose of a part beside it."""

import base64
import hashlib
import json
import math
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mdps.runtime.errors import BundleError, ImageError
from mdps.runtime.pictures import read_image
from mdps.runtime.records import Record

SIDE, NARROWEST = 256, 32  # pixels of the reference view's longer and shorter side

Matrix = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Alignment(Record):
    """The reference view of a product, and how well its good parts fit it once they are moved.

    `view` is a PNG of at most SIDE pixels a side, as base64. Of `images` good images `typical` is the median of
    the residuals; a picture that leaves more than `limit` shows something else, or was not registered.
    """

    view: str
    typical: float
    limit: float
    images: int

    @property
    def name(self) -> str:
        """A name for it, another for any that aligns otherwise: a calibration is of one of them."""
        return hashlib.sha256(json.dumps([self.view, self.limit]).encode()).hexdigest()[:16]

    @property
    def pixels(self) -> NDArray[np.uint8]:
        """The view [h, w, 3]; BundleError where it is none."""
        again = "calibrate again with --align"
        try:
            pixels = np.asarray(read_image(base64.b64decode(self.view, validate=True)))
        except (ValueError, ImageError) as error:
            raise BundleError(f"the reference view of an alignment cannot be read ({error}): {again}") from None
        height, width, _ = pixels.shape
        if max(height, width) > SIDE or min(height, width) < NARROWEST:
            raise BundleError(f"the reference view of an alignment has {width} x {height} pixels: {again}")
        return pixels


@dataclass(frozen=True)
class Pose:
    """How a part lies in a picture of `size` (W, H), beside the reference view.

    It was turned clockwise about the picture's centre by `turn` degrees, then shifted by `shift` (x, y) pixels of the
    upright picture; the detector saw it with that undone. `residual` is 1 - the correlation of the two then, 0 where
    they are equal. `fault` says why nothing was undone, so that the picture was judged as it lies; empty where it was.
    """

    size: tuple[int, int]
    shift: tuple[float, float] = (0.0, 0.0)
    turn: float = 0.0
    residual: float | None = None
    fault: str = ""

    @property
    def ok(self) -> bool:
        """Whether the picture was aligned."""
        return not self.fault

    @property
    def moved(self) -> bool:
        """Whether the part lies off, as far as that is known."""
        return bool(any(self.shift) or self.turn)

    def at(self, size: tuple[int, int]) -> Self:
        """Return the pose in the same picture at another size."""
        (x, y), (width, height) = self.shift, self.size
        return replace(self, size=size, shift=(x * size[0] / width, y * size[1] / height))

    def told(self) -> dict[str, Any]:
        """Return plain JSON values, rounded to what is known."""
        values = {"shift_x": self.shift[0], "shift_y": self.shift[1], "turn": self.turn, "residual": self.residual}
        return {name: value and round(value, 4) for name, value in values.items()} | {"fault": self.fault or None}

    @property
    def matrix(self) -> Matrix:
        """The matrix from places (x, y, 1) in the reference view to those in the picture, both in its pixels."""
        cosine, sine = math.cos(math.radians(self.turn)), math.sin(math.radians(self.turn))
        turned = np.array([[cosine, -sine, 0], [sine, cosine, 0], [0, 0, 1]])
        x, y = self.size[0] / 2, self.size[1] / 2
        matrix: Matrix = moved_by(x + self.shift[0], y + self.shift[1]) @ turned @ moved_by(-x, -y)
        return matrix

    @classmethod
    def of(cls, matrix: Matrix, size: tuple[int, int], residual: float) -> Self:
        """Return the pose of this matrix, which is rigid."""
        x, y = (matrix @ (size[0] / 2, size[1] / 2, 1))[:2] - (size[0] / 2, size[1] / 2)
        turn = math.degrees(math.atan2(matrix[1, 0], matrix[0, 0]))
        return cls(size, (float(x), float(y)), turn, residual)


def moved_by(x: float, y: float) -> Matrix:
    """Return the matrix that shifts places by (x, y)."""
    return np.array([[1.0, 0, x], [0, 1, y], [0, 0, 1]])
