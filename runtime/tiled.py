"""Judges pictures of any size by an inspector of tiles: one map and one score, in memory that the picture decides."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
from numpy.typing import NDArray

from mdps.runtime.errors import ImageError, require
from mdps.runtime.inspected import image_score
from mdps.runtime.pipeline import Array, Inspection, Inspector, check_range
from mdps.runtime.preprocessing import Observations, Preprocessing, Views
from mdps.runtime.schedule import Step
from mdps.runtime.settings import Settings
from mdps.runtime.tiles import Plan, Sheet, Sheets, Size, Tiling

AT_ONCE = 8
"""The most tiles that are judged together."""


@dataclass
class Tiled:
    """`Inspector` of one picture's tiles, which `inner` judges; of views that are no picture it is the inner one.

    `photograph` makes the view of a tuned detector's features, whose score counts one pixel of the map. `progress` is
    told how many of how many tiles of a picture were judged. `inside` says which pixels of a size (H, W) are inspected,
    and is None where all are. Tiles without such a pixel are not judged; pixels outside get the lowest value inside.
    The published method's settings are to pass `check_tiled`.
    """

    inner: Inspector
    tiling: Tiling
    tile: tuple[int, int]
    photograph: Preprocessing | None = None
    inside: Callable[[Size], NDArray[np.bool_]] | None = None
    progress: Callable[[int, int], object] = field(default=lambda done, of: None, repr=False)

    @property
    def settings(self) -> Settings:
        return self.inner.settings

    @property
    def engines(self) -> dict[str, str]:
        return self.inner.engines

    @property
    def on_card(self) -> bool:
        return self.inner.on_card

    def predicted_noise(self, noised: Array, step: Step) -> Array:
        return self.inner.predicted_noise(noised, step)

    def close(self) -> None:
        self.inner.close()

    def inspect(
        self, observations: Views, mask_range: tuple[float, float] | None, exit_limit: float | None = None
    ) -> Inspection:
        """Inspect one picture; no tile leaves before the masked pass, whatever its score."""
        if not isinstance(observations, Sheets):
            return self.inner.inspect(observations, mask_range, exit_limit)
        check_range(self.settings, mask_range)
        sheet = _only(observations)
        canvas, times, tuned = _Canvas(self._plan(sheet)), dict[str, float](), True
        for rows, views in self._tiles(sheet, canvas.plan):
            found = self.inner.inspect(views, mask_range)
            canvas.add("map", rows, found.anomaly_map)
            if found.tuned is None and self.settings.sampler.masked_pass:
                canvas.add("first", rows, found.first_map)
            if len(found.posterior_samples):
                canvas.add("sample", rows, found.posterior_samples[:: len(found.posterior_samples) // len(rows)])
            times = {name: times.get(name, 0.0) + spent for name, spent in found.times.items()}
            tuned = tuned and found.tuned is not None and bool(found.tuned.all())
        self._cool(canvas)
        return self._inspection(canvas, mask_range, times, tuned, judged=found.tuned is not None)

    def first_maps(self, observations: Views) -> Array:
        if not isinstance(observations, Sheets):
            return self.inner.first_maps(observations)
        sheet = _only(observations)
        canvas = _Canvas(self._plan(sheet))
        for rows, views in self._tiles(sheet, canvas.plan):
            canvas.add("map", rows, self.inner.first_maps(views))
        self._cool(canvas)
        return canvas.arrays["map"]

    def _plan(self, sheet: Sheet) -> Plan:
        return Plan.of(sheet.size, self.tile, self.tiling.overlap)

    def _tiles(self, sheet: Sheet, plan: Plan) -> Iterator[tuple[list[int], Observations]]:
        """Yield the rows of the next tiles and their views, and tell `progress` once they were judged."""
        corners, size = plan.corners, self.photograph.network_size if self.photograph else None
        wanted = self._wanted(plan)
        for start in range(0, len(wanted), AT_ONCE):
            rows = wanted[start : start + AT_ONCE]
            yield rows, sheet.views(corners[rows], self.tile, size)
            self.progress(start + len(rows), len(wanted))

    def _wanted(self, plan: Plan) -> list[int]:
        """Return the tiles with a pixel that is inspected."""
        if self.inside is None:
            return [*range(len(plan.corners))]
        inside, (height, width) = self.inside(plan.size), self.tile
        corners = enumerate(plan.corners)
        return [index for index, (top, left) in corners if inside[top : top + height, left : left + width].any()]

    def _cool(self, canvas: "_Canvas") -> None:
        if self.inside is not None:
            inside = self.inside(canvas.plan.size)
            for name in {"map", "first"} & set(canvas.arrays):
                array = canvas.arrays[name][0, 0]
                array[~inside] = array[inside].min()

    def _inspection(
        self, canvas: "_Canvas", mask_range: tuple[float, float] | None, times: dict[str, float], tuned: bool, *,
        judged: bool,
    ) -> Inspection:  # fmt: skip
        anomaly_map = canvas.arrays["map"]
        first = canvas.arrays.get("first", anomaly_map)
        score, none = self._score(anomaly_map, judged), np.zeros((0, 3, *canvas.plan.size), dtype=np.float32)
        limit = 1.0 if judged else _limit(self.settings, first, mask_range)
        return Inspection(
            anomaly_map=anomaly_map,
            anomaly_score=score,
            mask=cast(Array, first > np.float32(limit)),
            first_map=first,
            first_score=score if first is anomaly_map else self._score(first, judged),
            posterior_samples=canvas.arrays.get("sample", none),
            times=times,
            early_exit=np.zeros(1, np.bool_),
            tuned=np.array([tuned]) if judged else None,
        )

    def _score(self, anomaly_map: Array, judged: bool) -> Array:
        return np.array(
            [anomaly_map.max() if judged else image_score(anomaly_map.ravel(), self.settings.score)], dtype=np.float32
        )


def check_tiled(settings: Settings) -> None:
    """Raise UsageError for settings by which a tile's result would depend on what else lies in it."""
    again = settings.sampler.masked_pass
    require(
        again is None or again.target == "previous" or settings.mask.range != "per-image",
        'a mask by the range of each tile finds something in all of them: export with --mask-range frozen',
    )  # fmt: skip
    require(not settings.sampler.early_exit, "an early exit is of whole pictures, and tiles have none: leave it out")


def _limit(settings: Settings, first: Array, mask_range: tuple[float, float] | None) -> float:
    frozen = mask_range if settings.mask.range != "per-image" else None
    low, high = frozen or (float(first.min()), float(first.max()))
    return low + settings.mask.mask_lambda * (high - low)


def _only(observations: Sheets) -> Sheet:
    if len(observations) != 1:
        raise ImageError(f"pictures in tiles are judged one by one, these are {len(observations)}")
    return observations.sheets[0]


class _Canvas:
    """Arrays [1, C, H, W] of a whole picture, to which its tiles are added by their weights."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.arrays = plan, dict[str, Array]()
        self._corners, (self._down, self._across) = plan.corners, plan.weights

    def add(self, name: str, rows: Sequence[int], values: Array) -> None:
        """Add what was found on these tiles [B, C, h, w]; pictures to look at are kept in half precision."""
        if name not in self.arrays:
            kind = np.float32 if values.shape[1] == 1 else np.float16
            self.arrays[name] = cast(Array, np.zeros((1, values.shape[1], *self.plan.size), dtype=kind))
        whole, (height, width) = self.arrays[name][0], self.plan.size
        for index, tile in zip(rows, values, strict=True):
            top, left = self._corners[index]
            weight = self._weight(index)[: height - top, : width - left]
            high, wide = weight.shape
            whole[:, top : top + high, left : left + wide] += tile[:, :high, :wide] * weight

    def _weight(self, index: int) -> Array:
        row, column = divmod(index, len(self.plan.columns))
        weight: Array = self._down[row][:, None] * self._across[column][None]
        return weight
