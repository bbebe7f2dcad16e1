"""The views of pictures that a detector judges: observations for the network, photographs for features."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mdps.runtime.errors import ImageError
from mdps.runtime.pictures import describe, read_image
from mdps.runtime.preprocessing import Picture, Preprocessing

Array = NDArray[np.float32]


@dataclass(frozen=True)
class Observations:
    """B pictures: `images` [B, 3, H, W] are the network's view, `photographs` [B, 3, h, w] that of a tuning's features.

    Both are float32 in [-1, 1]. `photographs` is None for a detector that reads none.
    """

    images: Array
    photographs: Array | None = None

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, rows: slice) -> Self:
        return type(self)(self.images[rows], None if self.photographs is None else self.photographs[rows])

    @classmethod
    def of(cls, given: "Self | Array") -> "Self":
        """Return what was given, images alone as observations without photographs."""
        return given if isinstance(given, cls) else cls(np.asarray(given))

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """All pictures of the parts, in order; of one detector, so that either all have photographs or none."""
        photographs = [part.photographs for part in parts if part.photographs is not None]
        return cls(
            np.concatenate([part.images for part in parts]), np.concatenate(photographs) if photographs else None
        )


Views: TypeAlias = Observations | Array
"""Observations, or where no photographs are needed the images alone."""


def images_of(given: Views) -> Array:
    """Return the network's views."""
    return given.images if isinstance(given, Observations) else given


def observe(
    pictures: Sequence[Picture], preprocessing: Preprocessing, photograph: Preprocessing | None = None
) -> Observations:
    """Decode each picture once and return its views; `photograph` makes that of the feature network.

    Raises ImageError naming the first picture that cannot be read.
    """
    views = [_views(picture, preprocessing, photograph) for picture in pictures]
    photographs = None if photograph is None else np.stack([view[-1] for view in views])
    return Observations(np.stack([view[0] for view in views]), photographs)


def _views(picture: Picture, *wanted: Preprocessing | None) -> list[Array]:
    name = describe(picture)
    try:
        rgb = read_image(picture)
        return [one.view(rgb, name) for one in wanted if one is not None]
    except MemoryError as error:
        raise ImageError(f"{name} does not fit into memory") from error
