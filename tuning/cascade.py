"""Whether the published method judges again what a tuned detector scores near its threshold, and in which band.

The band is the widest that there is time for. So one question is asked, and one test answers it: does the published
method get clearly fewer of the images in it wrong, at no more false alarms?
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import comb, floor
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdps.runtime.calibration import good_threshold
from mdps.runtime.detector import Detector
from mdps.runtime.errors import MdpsError
from mdps.runtime.tuning import Cascade
from mdps.serving.fitness import auroc
from mdps.tuning.photographs import Seen, unit
from mdps.tuning.work import Arrays, Work

MOST, PART = 60, 0.2  # images that the published method is asked about, and the share of the time left for that
FIRST = 2  # by which its time is measured before it is asked about more
GOOD = 3  # at least one of so many that it is asked about is good: few of these lie in the band
RANGED = 8  # good images whose first pass gives a frozen mask range
CHANCE = 0.05
RANKED = 0.65  # of pairs near the threshold that the published method puts in the right order, at least

Array = NDArray[np.float32]


class _NoneError(MdpsError):
    """No cascade is chosen; says why."""


@dataclass(frozen=True)
class Judged:
    """Scores of good images by terms that were not fitted to them, and of defects.

    At most the share `rate` of good parts is to fail; an image takes `ms`.
    """

    good: Array
    bad: Array
    rate: float
    ms: float

    @cached_property
    def threshold(self) -> float:
        """That which a calibration finds."""
        return good_threshold(self.good, self.rate)[0]

    @property
    def missed(self) -> int:
        """How many defects pass."""
        return int((self.bad <= self.threshold).sum())

    @property
    def false_alarms(self) -> int:
        """How many good images fail."""
        return int((self.good > self.threshold).sum())


@dataclass(frozen=True)
class Found:
    """The cascade that was chosen, or none, and what is told of it as values of JSON, a sentence under "said".

    `judged` is by both detectors together; `maps` are those of the defects that were judged again, by their place.
    """

    cascade: Cascade | None
    told: dict[str, Any]
    judged: Judged
    maps: dict[int, Array] = field(default_factory=dict)

    @classmethod
    def none(cls, judged: Judged, why: object, **more: Any) -> "Found":
        """Return that there is none, and why."""
        return cls(None, more | {"said": f"none: {why}"}, judged)


@dataclass(frozen=True)
class Asked:
    """Scores and maps of images by the published method, and the ms that an image took it."""

    scores: Array
    maps: list[Array]
    ms: float


@dataclass(frozen=True)
class Published:
    """The published method, asked about good images and defects; opened when needed, each answer kept.

    `mask_range` is how its mask settings call the range.
    """

    open: Callable[[], Detector]
    good: Seen
    bad: Seen
    mask_range: str
    work: Work
    say: Callable[[str], object]
    opened: ExitStack = field(default_factory=ExitStack)

    def ask(self, what: str, rows: Sequence[int]) -> Asked:
        """Return what it says of these images, `what` of which is "good" or "bad"."""
        found = []
        for index, row in enumerate(rows, 1):
            self.say(f"published method near the threshold, {what} image {index} of {len(rows)}")
            image = getattr(self, what).images[row : row + 1]
            found.append(self.work.keep(f"published, {what} {row}", partial(self._judged, image)))
        scores = np.array([one["score"] for one in found], np.float32)
        return Asked(scores, [one["map"] for one in found], median(float(one["ms"]) for one in found))

    @cached_property
    def _detector(self) -> Detector:
        return self.opened.enter_context(self.open())

    def _judged(self, image: NDArray[np.uint8]) -> Arrays:
        found = self._detector.inspect(unit(image), mask_range=self._range, early_exit=False)
        ms = np.asarray(sum(found.times.values()))
        return {"score": found.anomaly_score[0], "map": found.anomaly_map[0, 0], "ms": ms}

    @cached_property
    def _range(self) -> tuple[float, float] | None:
        """Return a frozen mask range by some of the good images; a calibration takes all."""
        if self.mask_range != "frozen":
            return None
        some = unit(self.good.images[:: max(1, len(self.good.images) // RANGED)][:RANGED])
        maps = self.work.keep("published, first maps", lambda: {"maps": self._detector.first_maps(some)})["maps"]
        return float(maps.min()), float(maps.max())


@dataclass(frozen=True)
class Band:
    """From `low` to `high` with the threshold in the middle; at most the share `share` of further good parts is in."""

    low: float
    high: float
    share: float

    def rows(self, scores: Array) -> list[int]:
        """Return which scores lie in it, as the runtime sees it."""
        wide = np.asarray(scores, np.float64)
        return [int(row) for row in np.flatnonzero((self.low <= wide) & (wide <= self.high))]


def bands(good: Array, threshold: float, room: float) -> Iterator[Band]:
    """Yield those for which the share `room` of further good parts is enough, the widest first.

    The next good part reaches the k-th highest of n scores `good` with a probability of at most k / (n + 1), whatever
    the distribution: as `good_threshold` promises. The threshold is one of them.
    """
    ordered = np.sort(good)[::-1]
    for count in range(min(len(good), floor((len(good) + 1) * room + 1e-9)), 0, -1):
        low = float(ordered[count - 1])
        if low < threshold and (good >= np.float32(low)).sum() == count:  # several may have one score
            yield Band(low, 2 * threshold - low, count / (len(good) + 1))


def chance(gained: int, lost: int) -> float:
    """Return how probable so many gains or more are where gain and loss are equally so (McNemar's test, exact)."""
    count = gained + lost
    return float(sum(comb(count, index) for index in range(gained, count + 1)) / 2**count)


@dataclass(frozen=True)
class Compared:
    """Images in the band, and who is wrong about them.

    `limit` is the published method's own threshold; its scores times `scale` are on the scale of the tuned one: both
    zeros meet, and both thresholds.
    """

    limit: float
    scale: float
    tuned: NDArray[np.bool_]
    published: NDArray[np.bool_]

    @classmethod
    def of(
        cls, threshold: float, inside: NDArray[np.bool_], good: tuple[Array, Array], bad: tuple[Array, Array]
    ) -> "Compared":
        """Compare scores by the tuned and the published one of good images near the threshold, and of defects.

        Those of the good ones that are `inside` the band are few, so the published one's threshold is by all of them:
        it lets as many fail as the tuned one's does in the band.
        """
        failing = int((good[0] > threshold)[inside].sum())
        limit = float(np.sort(good[1])[-1 - failing])
        wrong = (
            np.concatenate([(good[which] > at)[inside], bad[which] <= at]) for which, at in ((0, threshold), (1, limit))
        )
        return cls(limit, threshold / limit if limit > 0 else 0.0, *wrong)

    @property
    def gained(self) -> int:
        """Images that the published method alone is right about."""
        return int((self.tuned & ~self.published).sum())

    @property
    def lost(self) -> int:
        """Images that the tuned detector alone is right about."""
        return int((self.published & ~self.tuned).sum())


def look(tuned: Judged, published: Published, budget_ms: float, seconds: float) -> Found:
    """Return the cascade that is chosen, or why there is none; `seconds` are left, of which it may take a part."""
    with published.opened:
        try:
            return _Look(tuned, published, budget_ms, seconds).found()
        except _NoneError as why:
            return Found.none(tuned, why)


def _refuse(wrong: bool, why: str) -> None:
    if wrong:
        raise _NoneError(why)


@dataclass(frozen=True)
class _Look:
    tuned: Judged
    published: Published
    budget_ms: float
    seconds: float

    def found(self) -> Found:
        _refuse(self.budget_ms <= self.tuned.ms, "the tuned detector takes the whole budget")
        _refuse(self.seconds <= 0, "no time was left to ask the published method")
        _refuse(self.published.mask_range == "dataset", "the published mask range is that of a whole data set")
        near = np.argsort(np.abs(self.tuned.good - self.tuned.threshold), kind="stable").tolist()
        first = self.published.ask("good", near[:FIRST]).ms
        most = min(MOST, int(1000 * PART * self.seconds / first))
        near = near[: max(most // GOOD, len(self._band(first, most).rows(self.tuned.good)))]
        asked = self.published.ask("good", near)
        ms = max(first, asked.ms)
        return self._compared(self._band(ms, most), near, asked, ms)

    def _band(self, ms: float, most: int) -> Band:
        """Return the widest where the published method takes `ms`, and that asks it about so many images at most."""
        good, bad, threshold = self.tuned.good, self.tuned.bad, self.tuned.threshold
        room = min(1.0, (self.budget_ms - self.tuned.ms) / ms)
        known = list(bands(good, threshold, room))
        least = (self.tuned.false_alarms + 2) / (len(good) + 1)
        _refuse(
            not known,
            f"the published method takes {ms:.0f} ms, so that the budget lets it judge {room:.1%} of good parts again, "
            f"and a band around the threshold of {len(good)} good images holds {least:.1%} or more",
        )
        for one in known:
            if max(most // GOOD, len(one.rows(good))) + len(one.rows(bad)) <= most:
                return one
        raise _NoneError(f"at {ms:.0f} ms an image no time was left to ask the published method about enough of them")

    def _compared(self, around: Band, near: list[int], asked: Asked, ms: float) -> Found:
        """Return what comes of the band, by the good images `near` the threshold that were `asked` about."""
        tuned, rows = self.tuned, around.rows(self.tuned.bad)
        _refuse(not rows, "no synthetic defect scores near the threshold")
        again = self.published.ask("bad", rows)
        seen = auroc(asked.scores, again.scores)
        _refuse(
            seen < RANKED,
            f"near the threshold the published method ranks a defective part above a good one in {seen:.0%} of pairs "
            f"(at least {RANKED:.0%} is needed)",
        )
        inside = np.isin(near, around.rows(tuned.good))
        compared = Compared.of(
            tuned.threshold, inside, (tuned.good[near], asked.scores), (tuned.bad[rows], again.scores)
        )
        _refuse(
            chance(compared.gained, compared.lost) > CHANCE,
            f"of {len(compared.tuned)} images near the threshold the published method alone is right about "
            f"{compared.gained}, the tuned detector alone about {compared.lost}: no clear gain",
        )
        _refuse(min(tuned.threshold, compared.limit) <= 0, "its scores are not positive, and on no common scale")
        judged = np.asarray(near)[inside], asked.scores[inside]
        return self._chosen(around, compared, judged, dict(zip(rows, again.maps, strict=True)), again.scores, ms)

    def _chosen(
        self, around: Band, compared: Compared, good: tuple[Any, Array], maps: dict[int, Array], bad: Array, ms: float
    ) -> Found:
        """Return the cascade, given scores in the band by the published method: `good` with their rows, and `bad`."""
        both = replace(
            self.tuned,
            good=_replaced(self.tuned.good, *good, around, compared.scale),
            bad=_replaced(self.tuned.bad, list(maps), bad, around, compared.scale),
            ms=self.tuned.ms + around.share * ms,
        )
        cascade = Cascade(around.low, around.high, around.low / compared.scale, around.high / compared.scale)
        scaled = {row: np.float32(compared.scale) * one for row, one in maps.items()}
        return Found(cascade, self._told(around, compared, both, ms), both, scaled)

    def _told(self, around: Band, compared: Compared, both: Judged, ms: float) -> dict[str, Any]:
        alone, good, bad = self.tuned, len(both.good), len(both.bad)
        missed = f"with it {both.missed} of {bad} synthetic defects are missed, {alone.missed} without"
        _refuse(both.missed >= alone.missed, missed)
        return {
            "said": f"what scores from {around.low:.3g} to {around.high:.3g}, at most {around.share:.1%} of good "
            f"parts, is judged again by the published method in {ms:.0f} ms: {both.ms:.0f} ms an image in the mean; "
            f"{missed}; of {good} good images {both.false_alarms} fail, {alone.false_alarms} without",
            "band": [around.low, around.high], "share": round(around.share, 4), "ms": round(both.ms, 1),
            "published_ms": round(ms, 1), "gained": compared.gained, "lost": compared.lost,
            "chance": round(chance(compared.gained, compared.lost), 4),
            "missed": {"without": alone.missed, "with": both.missed, "of": bad},
            "false_alarms": {"without": alone.false_alarms, "with": both.false_alarms, "of": good},
        }  # fmt: skip


def _replaced(scores: Array, rows: Any, published: Array, around: Band, scale: float) -> Array:
    """Return the scores, where the published method judges these images again."""
    found = scores.copy()
    found[rows] = np.clip(scale * published, around.low, around.high)
    return found
