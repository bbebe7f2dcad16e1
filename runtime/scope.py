"""The parts of a product's photographs that are inspected, and their scale in mm."""

import base64
import hashlib
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mdps.runtime.errors import BundleError, MdpsError, UsageError, require
from mdps.runtime.image_files import open_file
from mdps.runtime.option import Option, check_ranges
from mdps.runtime.records import Record
from mdps.runtime.regions import Box

Size = tuple[int, int]
Covered = Callable[[Size], Box]
MAX_BYTES = 4 * 2**20
_AGAIN = "give `mdps calibrate` other places, --set inspect=FILE or --set ignore=FILE"


@dataclass(frozen=True)
class Area(Record):
    """A part of photographs of `size` (W, H), of others in proportion: in a polygon, or where a mask is white.

    `polygons` have their corners (x, y) in pixels; `mask` is a PNG of that size as base64, "" where there are polygons.
    """

    size: Size
    polygons: tuple[tuple[tuple[float, float], ...], ...] = ()
    mask: str = ""

    def __post_init__(self) -> None:
        require(min(self.size) >= 1, f"the size {self.size} should be at least 1 x 1")
        require(bool(self.polygons) != bool(self.mask), "an area has polygons or a mask")
        require(all(len(one) >= 3 for one in self.polygons), "a polygon has at least 3 corners")
        floats = tuple(tuple((float(x), float(y)) for x, y in one) for one in self.polygons)
        object.__setattr__(self, "polygons", floats)  # whole numbers would give the scope another name

    def on(self, shape: Size, covered: Covered) -> NDArray[np.bool_]:
        """Return which pixels [H, W] of a map it holds by half or more; `covered` says what a map shows of a size."""
        from PIL import Image, ImageDraw

        from mdps.runtime.pictures import read_image

        drawn = Image.new("L", self.size)
        if self.mask:
            try:
                drawn = read_image(base64.b64decode(self.mask, validate=True)).convert("L")
            except (ValueError, MdpsError) as error:
                raise BundleError(f"the mask of an area cannot be read ({error}): {_AGAIN}") from None
        for corners in self.polygons:
            ImageDraw.Draw(drawn).polygon([*corners], fill=255)
        box = covered(self.size)
        return np.asarray(drawn.resize(shape[::-1], Image.Resampling.BOX, box=box)) >= 127.5


def read_areas(text: str) -> tuple[Area, ...]:
    """Return the area of a file: a mask as an image, or polygons as JSON; none for "none". ValueError for a user."""
    if text == "none":
        return ()
    try:
        return (_of_polygons(Path(text)) if text.lower().endswith(".json") else _of_mask(Path(text)),)
    except OSError as error:
        raise ValueError(f"{text} cannot be read: {error.strerror or error}") from None
    except MdpsError as error:
        raise ValueError(str(error)) from None


def _of_polygons(path: Path) -> Area:
    with open_file(path) as file:
        content = file.read(MAX_BYTES + 1)
    obj: Any
    try:
        obj = json.loads(content) if len(content) <= MAX_BYTES else None
    except ValueError as error:
        raise UsageError(f"{path} is no JSON: {error}") from None
    require(
        isinstance(obj, dict) and obj.keys() == {"size", "polygons"},
        f'{path} should be {{"size": [width, height], "polygons": [[[x, y], ..], ..]}}, of at most {MAX_BYTES} bytes',
    )
    return Area.from_json({**obj, "mask": ""}, str(path))


def _of_mask(path: Path) -> Area:
    from mdps.runtime.pictures import read_image

    picture = read_image(path).convert("L").point(lambda level: 255 * (level > 127))
    low, high = picture.getextrema()
    require(low != high, f"{path} is {'white' if low else 'black'} throughout: white is what is meant, and not all is")
    data = io.BytesIO()
    picture.convert("1").save(data, "PNG", optimize=True)
    require(data.tell() <= MAX_BYTES, f"{path} is larger than {MAX_BYTES} bytes as a PNG of two colours: shrink it")
    return Area(picture.size, mask=base64.b64encode(data.getvalue()).decode("ascii"))


def _area(what: str) -> Option:
    help_ = f"{what}: an image, white there, or polygons as JSON; none takes all back."
    return Option(help_, parse=read_areas, example="FILE", seldom=True)


@dataclass(frozen=True)
class Scope(Record):
    """A product's photographs: the areas to `inspect` (all of them where there is none), without those to `ignore`.

    `mm_per_pixel` is of the part, None where nobody has said it.
    """

    mm_per_pixel: Annotated[
        float | None,
        Option("Millimetres a pixel of a photograph, in which regions are told too.", low=0, above=True, seldom=True),
    ] = None
    inspect: Annotated[tuple[Area, ...], _area("The only places to inspect")] = ()
    ignore: Annotated[tuple[Area, ...], _area("Places that are not inspected")] = ()

    later: ClassVar[Mapping[str, Any]] = {"inspect": [], "ignore": []}

    def __post_init__(self) -> None:
        check_ranges(self)

    @property
    def name(self) -> str:
        """A name for what is inspected, "" for everything: a calibration is of one of them."""
        if not (self.inspect or self.ignore):
            return ""
        told = [[area.to_json() for area in areas] for areas in (self.inspect, self.ignore)]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]

    @property
    def restricts(self) -> bool:
        """Whether there is anything that is not inspected."""
        return bool(self.inspect or self.ignore)


@lru_cache(maxsize=2)
def inspected(scope: Scope, covered: Covered, shape: Size) -> NDArray[np.bool_]:
    """Return which pixels [H, W] of a map are inspected; `covered` says what a map shows of a photograph of a size.

    UsageError where none is.
    """
    inside = np.ones(shape, dtype=np.bool_)
    if scope.inspect:
        inside = np.any([area.on(shape, covered) for area in scope.inspect], axis=0)
    for area in scope.ignore:
        inside &= ~area.on(shape, covered)
    require(bool(inside.any()), f"nothing that the detector sees is inspected: {_AGAIN}")
    return inside
