"""The worth of candidates, and which of them is chosen."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mdps.runtime.preprocessing import Preprocessing
from mdps.serving.fitness import reduced
from mdps.tuning.candidates import Candidate, Raw, Tried
from mdps.tuning.photographs import photograph, split
from mdps.tuning.search import choose
from mdps.tuning.statistics import Statistic, View
from mdps.tuning.value import KindValue, Truth, worst_aware
from mdps.tuning.work import Work


def raw(name: str, strength: float, ms: float, **parts: float) -> Raw:
    """Maps of noise, those of two kinds of defects with a square of this strength."""
    rng = np.random.default_rng(0)
    good, bad = (rng.normal(0, 1, (8, 16, 16)).astype(np.float32) for _ in range(2))
    bad[:, 4:8, 4:8] += strength
    return Raw(name, "position", "photograph", 0.0, {name: ms, **parts}, good, bad)


def truth() -> Truth:
    masks = np.zeros((8, 16, 16), np.bool_)
    masks[:, 4:8, 4:8] = True
    return Truth(("spot",) * 4 + ("crack",) * 4, masks)


def tried(*raws: Raw, **how: Any) -> Tried:
    return Tried.of(Candidate(raws, **how), truth(), 4)


def test_the_better_candidate_is_chosen_within_the_budget() -> None:
    poor, fair, best = tried(raw("poor", 0, 5)), tried(raw("fair", 2, 50)), tried(raw("best", 6, 500))
    assert poor.value < fair.value < best.value
    assert choose([poor, fair, best], 1000) is best
    assert choose([poor, fair, best], 100) is fair
    assert choose([poor, fair, best], 1) is None


def test_of_equals_the_simpler_and_then_the_better_is_chosen() -> None:
    """Two kinds that a second term helps on in turn are no proof that it helps; one that helps on both is."""
    one = tried(raw("one", 2, 10))
    both = replace(one, candidate=Candidate((raw("one", 2, 10), raw("other", 2, 10)), (1.0, 1.0)))
    simple = _worth(one, 0.7, 0.7)
    assert _worth(both, 1.0, 0.69).value > simple.value
    assert choose([simple, _worth(both, 1.0, 0.69)], 100) is simple
    surely = _worth(both, 1.0, 1.0)
    assert choose([simple, surely], 100) is surely
    assert choose([simple, _worth(one, 0.6, 0.6)], 100) is simple


def test_both_sizes_take_the_place_of_one_where_they_are_hardly_worse() -> None:
    small, large = (
        replace(raw(str(size), 2, 10), statistic=Statistic("position", "photograph", View(size, (1,), 8), 0.0))
        for size in (64, 128)
    )
    alone, both = _worth(tried(large), 0.7, 0.7), tried(small, large, weights=(1.0, 1.0))
    assert choose([alone, _worth(both, 0.69, 0.69)], 100).candidate is both.candidate
    assert choose([alone, _worth(both, 0.67, 0.67)], 100) is alone
    assert choose([alone, _worth(both, 0.69, 0.69)], 15) is alone
    other = replace(small, statistic=Statistic("position", "photograph", View(64, (1, 2), 8), 0.0))
    assert choose([alone, _worth(tried(other, large, weights=(1.0, 1.0)), 0.69, 0.69)], 100) is alone


def _worth(one: Tried, spot: float, crack: float) -> Tried:
    return replace(one, kinds={"spot": KindValue(spot, spot), "crack": KindValue(crack, crack)})


def test_a_part_that_two_terms_need_counts_once() -> None:
    one, two = raw("a", 1, 3, features=20), raw("b", 1, 4, features=20)
    assert Candidate((one, two), (1.0, 1.0)).ms == pytest.approx(27)


def test_the_worst_kinds_count_most() -> None:
    kinds = {name: KindValue(1.0, 1.0) for name in "abcdefg"} | {"h": KindValue(0.2, 0.4)}
    mean, worst = (7 + 0.3) / 8, (0.3 + 1.0) / 2
    assert worst_aware(kinds) == pytest.approx((mean + worst) / 2)


def test_values_are_those_of_scikit_learn() -> None:
    from sklearn.metrics import roc_auc_score

    one, labels = raw("a", 1.5, 1), [0] * 8 + [1] * 4
    found = truth().values(one.good, one.bad, 3)["spot"]
    scores = [np.sort(image.ravel())[-3:].mean() for image in (*one.good, *one.bad[:4])]
    assert found.image == pytest.approx(roc_auc_score(labels, scores), abs=1e-4)
    pixels = roc_auc_score(truth().masks[:4].ravel(), one.bad[:4].ravel())
    assert found.pixel == pytest.approx(pixels, abs=1e-4)


def test_a_term_goes_from_its_own_quantiles_to_0_and_1() -> None:
    one = raw("a", 1, 1)
    good, _ = Candidate((one,)).fused(4, (16, 16))
    assert np.median(good[:4]) == pytest.approx(0, abs=1e-5)
    assert np.quantile(good[:4], 0.995) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize(("old", "new"), [((10, 7), (4, 4)), ((3, 5), (7, 9)), ((8, 8), (8, 8))])
def test_a_mask_keeps_every_pixel_that_it_touches(old: tuple[int, int], new: tuple[int, int]) -> None:
    mask = np.random.default_rng(1).random(old) > 0.8
    wanted = np.zeros(new, bool)
    for y, x in np.argwhere(mask):
        for row in range(new[0]):
            for column in range(new[1]):
                apart = (row + 1) * old[0] <= y * new[0] or row * old[0] >= (y + 1) * new[0]
                aside = (column + 1) * old[1] <= x * new[1] or column * old[1] >= (x + 1) * new[1]
                wanted[row, column] |= not (apart or aside)
    np.testing.assert_array_equal(reduced(mask, new), wanted)


@pytest.mark.parametrize("count", [5, 6, 20, 100, 500])
def test_a_split_takes_every_image_once(count: int) -> None:
    parts = split(count)
    assert sorted((*parts.fit, *parts.scale, *parts.bearing)) == list(range(count))
    assert min(len(parts.fit), len(parts.scale), len(parts.bearing)) >= 1
    assert split(count) == parts
    assert [len(rows) for rows in (split(5000).fit, split(5000).held)] == [400, 300]


def test_a_photograph_shows_what_the_observation_does() -> None:
    image = np.random.default_rng(0).integers(0, 256, (90, 120, 3), dtype=np.uint8)
    bundle = Preprocessing((64, 64), crop="input", crop_size=48, roi=(10, 5, 80, 80))
    view = photograph(bundle, 96)
    assert view.network_size == (96, 96)
    ours, theirs = view(image), bundle(image)
    np.testing.assert_allclose(ours.reshape(3, 48, 2, 48, 2).mean(axis=(2, 4)), theirs, atol=0.25)


def test_a_folder_of_another_search_is_begun_anew_and_of_other_things_refused(tmp_path: Any) -> None:
    made: list[int] = []

    def make() -> dict[str, Any]:
        made.append(1)
        return {"a": np.arange(3)}

    for _ in range(2):
        work = Work(tmp_path / "work", {"images": "a"})
        np.testing.assert_array_equal(work.keep("one", make)["a"], np.arange(3))
    assert len(made) == 1
    Work(tmp_path / "work", {"images": "b"}).keep("one", make)
    assert len(made) == 2
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    with pytest.raises(Exception, match="holds other files"):
        Work(tmp_path / "mine", {})
