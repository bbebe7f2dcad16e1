"""Good images set scales and threshold by terms that they were not fitted to, and all are fitted to."""

import numpy as np
import torch

from mdps.tuning.candidates import Candidate, Raw
from mdps.tuning.crossfit import FOLDS, crossfitted, folds
from mdps.tuning.photographs import Seen
from mdps.tuning.search import Search
from mdps.tuning.statistics import Statistic, View

COUNT, CHANNELS, GRID = 60, 24, 4
STATISTIC = Statistic("position", "photograph", View(32, (1,), GRID), 0.0)


class Given(Search):
    """A search whose images are their features."""

    def inputs(self, raw: Raw, seen: Seen) -> list[torch.Tensor]:
        return [torch.from_numpy(seen.photographs)]


def features(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 1, (count, CHANNELS, GRID, GRID)).astype(np.float32)


def given(count: int) -> tuple[Given, Candidate, Seen]:
    empty = np.zeros((count, GRID, GRID), np.float32)
    raw = Raw("position", "position", "photograph", 0.0, {}, empty, empty, statistic=STATISTIC)
    search = Given(None, None, None, None)  # type: ignore[arg-type]
    return search, Candidate((raw,)), Seen(np.zeros((count, 1), np.uint8), features(count, 0))


def test_every_image_is_left_out_once() -> None:
    for count, expected in ((5, 2), (40, 12), (41, 12), (200, FOLDS)):
        parts = list(folds(count))
        assert len(parts) == expected
        assert sorted(row for rows, _ in parts for row in rows) == list(range(count))
        assert all(sorted((*rows, *others)) == list(range(count)) for rows, others in parts)


def test_maps_of_good_images_are_as_those_of_further_ones() -> None:
    """With hardly more images than channels a Gaussian knows its own; what is left out scores as new images do."""
    search, candidate, seen = given(COUNT)
    crossed, (module,) = crossfitted(search, candidate, seen)
    assert module is not None
    fresh = module(torch.from_numpy(features(400, 1)))[:, 0].numpy()
    own = module(torch.from_numpy(seen.photographs))[:, 0].numpy()
    apart = crossed.raws[0].good
    assert apart.shape == (COUNT, GRID, GRID)
    assert own.mean() < 0.8 * fresh.mean()
    assert 1 < apart.mean() / fresh.mean() < 1.15  # by terms of fewer images, on the safe side


def test_what_is_fitted_to_others_does_not_see_the_image() -> None:
    search, candidate, seen = given(COUNT)
    rows, _ = next(folds(COUNT))
    changed = Seen(seen.images, seen.photographs.copy())
    changed.photographs[rows[0]] += 3.0
    before, after = (crossfitted(search, candidate, one)[0].raws[0].good for one in (seen, changed))
    others = rows[1:]  # of the same fold; the others' fit has seen the change
    np.testing.assert_array_equal(before[others], after[others])
    assert (after[rows[0]] > before[rows[0]]).all()
