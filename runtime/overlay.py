"""Pictures of a result: image, reconstruction, anomaly map as heat, mask as a contour, side by side."""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mdps.runtime.calibration import Calibration
from mdps.runtime.preprocessing import to_uint8, to_unit
from mdps.runtime.regions import Box, Region

if TYPE_CHECKING:
    from PIL import Image

Unit = NDArray[np.float32]  # [3, H, W], values in [-1, 1]
Pixels = NDArray[np.uint8]  # [H, W, 3]
SMALLEST = 256  # small images are enlarged by a whole factor until their shorter side has about so many pixels
LARGEST = 2048  # and in a strip larger ones are shrunk by one until no side has more
_BAND = 256  # rows that are drawn together
_GAP = 4
_CONTOUR = (0, 255, 80)
_FRAME = (0, 200, 255)
# Black through red and yellow to white: brighter is worse, also for a reader who sees no colours.
_HEAT_AT = (0.0, 0.35, 0.7, 1.0)
_HEAT = ((0.0, 0.0, 0.0), (200.0, 20.0, 20.0), (255.0, 200.0, 0.0), (255.0, 255.0, 255.0))


@dataclass(frozen=True)
class HeatRange:
    """Map values that are drawn as no heat (`low`) and full heat (`high`)."""

    low: float
    high: float

    def __call__(self, anomaly_map: NDArray[np.float32]) -> NDArray[np.float64]:
        """Anomaly map [H, W] in its own unit -> heat [H, W] in [0, 1]."""
        span = max(self.high - self.low, 1e-12)
        heat: NDArray[np.float64] = np.clip((anomaly_map.astype(np.float64) - self.low) / span, 0.0, 1.0)
        return heat


def heat_range(calibration: Calibration | None) -> HeatRange | None:
    """From the coolest pixel of good parts, with the hottest of theirs at half heat; None without a calibration."""
    if calibration is None:
        return None
    return HeatRange(calibration.map_low, 2 * calibration.map_high - calibration.map_low)


def own_range(anomaly_map: NDArray[np.float32]) -> HeatRange:
    """The range of one map: shows where, not how much; for detectors without a calibration."""
    return HeatRange(float(anomaly_map.min()), float(anomaly_map.max()))


def strip(
    observation: Unit,
    posterior_sample: Unit | None,
    anomaly_map: NDArray[np.float32],
    mask: NDArray[np.bool_],
    heat_range: HeatRange,
    regions: Sequence[Region] = (),
    box: Box | None = None,
) -> "Image.Image":
    """One picture of four tiles: the image, its reconstruction, the map's heat over the image, the mask's contour.

    Args:
        observation, posterior_sample: [3, H, W], values in [-1, 1]; without a posterior sample there are three tiles.
        anomaly_map: [H, W], in the unit of the score.
        mask: [H, W], True where the part may be anomalous.
        heat_range: what map values are drawn as no and full heat.
        regions, box: those of `Result`, framed in the heat.

    Of images larger than `LARGEST` a tile shows means of pixels, and the largest values of map and mask.
    """
    if (step := -(-max(anomaly_map.shape) // LARGEST)) > 1:
        observation, anomaly_map = shrunk(observation, step, np.mean), shrunk(anomaly_map, step, np.max)
        posterior_sample = None if posterior_sample is None else shrunk(posterior_sample, step, np.mean)
        mask = shrunk(mask, step, np.max)
    factor, enlarge = _enlarger(anomaly_map)
    image = enlarge(to_uint8(observation))
    heat = np.asarray(heat_picture(observation, anomaly_map, heat_range, regions, box))
    contour = _draw_contour(image, np.kron(mask, np.ones((factor, factor), bool)).astype(bool))
    made = [] if posterior_sample is None else [enlarge(to_uint8(posterior_sample))]
    return _side_by_side([image, *made, heat, contour])


def heat_picture(
    observation: Unit,
    anomaly_map: NDArray[np.float32],
    heat_range: HeatRange,
    regions: Sequence[Region] = (),
    box: Box | None = None,
) -> "Image.Image":
    """The map's heat over the image, enlarged as in `strip`, which describes the arguments."""
    from PIL import Image

    _, enlarge = _enlarger(anomaly_map)
    height, width = observation.shape[1:]
    drawn = Image.fromarray(enlarge(_heat_over(observation, anomaly_map, heat_range)))
    return framed(drawn, regions, box or (0.0, 0.0, float(width), float(height)))


def photograph_picture(
    photograph: "Image.Image",
    anomaly_map: NDArray[np.float32],
    heat_range: HeatRange,
    regions: Sequence[Region] = (),
    box: Box | None = None,
) -> "Image.Image":
    """The heat over the upright photograph itself, at its resolution, with the regions framed."""
    from PIL import Image

    whole = (0.0, 0.0, float(photograph.width), float(photograph.height))
    left, top, right, bottom = map(round, box or whole)
    shown = photograph.crop((left, top, right, bottom))
    heat = Image.fromarray(anomaly_map).resize(shown.size, Image.Resampling.BILINEAR)
    drawn = photograph.copy()
    drawn.paste(Image.fromarray(_heat_over(to_unit(np.asarray(shown)), np.asarray(heat), heat_range)), (left, top))
    return framed(drawn, regions, whole)


def framed(picture: "Image.Image", regions: Sequence[Region], shown: Box) -> "Image.Image":
    """Draw a frame around each region; `shown` is what of the photograph the picture shows."""
    from PIL import ImageDraw

    draw, line = ImageDraw.Draw(picture), max(1, round(max(picture.size) / 400))
    across, down = picture.width / (shown[2] - shown[0]), picture.height / (shown[3] - shown[1])
    for region in regions:
        left, top, width, height = region.box
        x, y = round((left - shown[0]) * across), round((top - shown[1]) * down)
        end = x + round(width * across) - 1 + line, y + round(height * down) - 1 + line
        draw.rectangle((x - line, y - line, *end), outline=_FRAME, width=line)
    return picture


def plain_picture(observation: Unit) -> "Image.Image":
    """The image alone, in the size of `heat_picture`."""
    from PIL import Image

    _, enlarge = _enlarger(observation[0])
    return Image.fromarray(enlarge(to_uint8(observation)))


def png(image: "Image.Image") -> bytes:
    """`image` as the bytes of a PNG file."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def npy(array: NDArray[Any]) -> bytes:
    """Return `array` as the bytes of a float32 file of NumPy's."""
    buffer = io.BytesIO()
    np.save(buffer, np.asarray(array, dtype=np.float32), allow_pickle=False)
    return buffer.getvalue()


def thumbnail(image: "Image.Image", width: int = 520) -> bytes:
    """`image` made at most `width` pixels wide, as the bytes of a JPEG file."""
    small = image.convert("RGB")
    small.thumbnail((width, width))
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=80)
    return buffer.getvalue()


def _enlarger(plane: NDArray[np.float32]) -> tuple[int, Callable[[Pixels], Pixels]]:
    """Return by which factor pictures of the size of `plane` [H, W] are enlarged, and the function that does it."""
    from PIL import Image

    height, width = plane.shape
    factor = max(1, min(round(SMALLEST / min(height, width)), LARGEST // max(height, width)))
    size = (width * factor, height * factor)
    return factor, lambda pixels: np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BILINEAR))


def shrunk(array: NDArray[Any], step: int, how: Callable[..., NDArray[Any]]) -> NDArray[Any]:
    """Return [.., H, W] with blocks of `step` x `step` made one pixel by `how`; the last ones may be smaller."""
    height, width = array.shape[-2:]
    rows = [how(array[..., top : top + step, :], axis=-2, keepdims=True) for top in range(0, height, step)]
    columns = np.concatenate(rows, axis=-2)
    parts = [how(columns[..., left : left + step], axis=-1, keepdims=True) for left in range(0, width, step)]
    return np.concatenate(parts, axis=-1)


def _heat_over(observation: Unit, anomaly_map: NDArray[np.float32], heat_range: HeatRange) -> Pixels:
    """Draw some rows after others: a photograph may have more than are worth their memory at once."""
    bands = [slice(top, top + _BAND) for top in range(0, len(anomaly_map), _BAND)]
    return np.concatenate([_mixed(to_uint8(observation[:, one]), heat_range(anomaly_map[one])) for one in bands])


def _mixed(pixels: Pixels, heat: NDArray[np.float64]) -> Pixels:
    """Mixes the heat's colour into the image made grey and dark: no colour of the part itself looks like heat."""
    colours = np.stack([np.interp(heat, _HEAT_AT, [stop[c] for stop in _HEAT]) for c in range(3)], axis=-1)
    grey = pixels.mean(axis=2, keepdims=True) * 0.5
    share = np.clip(heat * 1.5, 0.0, 0.8)[..., None]
    mixed: Pixels = np.rint((1 - share) * grey + share * colours).astype(np.uint8)
    return mixed


def _draw_contour(pixels: Pixels, mask: NDArray[np.bool_]) -> Pixels:
    """Colours the mask's rim: its pixels with a neighbour outside it."""
    padded = np.pad(mask, 1, mode="edge")
    inner = padded[:-2, 1:-1] & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:]
    drawn = pixels.copy()
    drawn[mask & ~inner] = _CONTOUR
    return drawn


def _side_by_side(tiles: list[Pixels]) -> "Image.Image":
    from PIL import Image

    height, width = tiles[0].shape[:2]
    sheet = Image.new("RGB", (len(tiles) * width + (len(tiles) - 1) * _GAP, height), "white")
    for index, tile in enumerate(tiles):
        sheet.paste(Image.fromarray(tile), (index * (width + _GAP), 0))
    return sheet
