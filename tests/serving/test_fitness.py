"""The measure of fitness: sharp for a detector that sees defects, half for one that does not."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from sklearn.metrics import roc_auc_score

from mdps.runtime.errors import UsageError
from mdps.runtime.preprocessing import Picture, Preprocessing
from mdps.runtime.scope import Scope
from mdps.serving.defects import KINDS, SIZES
from mdps.serving.fitness import MOST_SIDE, auroc, defective, measure, of_pixels, shown

CLEAN = np.full((64, 64, 3), 120, dtype=np.uint8)


@dataclass
class Fake:
    """Maps are the deviation from the clean image, or noise; scores their maxima."""

    blind: bool = False
    tiles: None = None
    preprocessing: Preprocessing = field(default_factory=lambda: Preprocessing((32, 32)))
    scope: Scope = field(default_factory=Scope)
    seen: list[NDArray[np.uint8]] = field(default_factory=list)

    def batch(self, images: Sequence[Picture]) -> Any:
        self.seen += [np.asarray(image) for image in images]
        maps = [np.abs(np.asarray(image, dtype=float) - 120).max(axis=2) for image in images]
        scores = [float(one.max()) for one in maps]
        if self.blind:
            stream = np.random.default_rng(len(self.seen))
            maps, scores = [stream.random(one.shape) for one in maps], stream.random(len(images)).tolist()
        return [SimpleNamespace(score=score, anomaly_map=one) for score, one in zip(scores, maps, strict=True)]


def test_auroc_is_sklearn_s() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        good, bad = (rng.integers(0, 9, rng.integers(1, 30)) / 8 for _ in range(2))
        labels = [0] * len(good) + [1] * len(bad)
        assert auroc(good, bad) == pytest.approx(roc_auc_score(labels, np.concatenate([good, bad])))


def test_a_detector_that_sees_is_fit() -> None:
    told: list[tuple[int, int]] = []
    found = measure(Fake(), 1.0, [CLEAN] * 5, good_scores=[0.0] * 5, progress=lambda *at: told.append(at))
    assert found.auroc == 1
    assert found.fit
    assert set(found.kinds) == set(KINDS)
    assert {(kind.shown, kind.found) for kind in found.kinds.values()} == {(6, 6)}
    assert {name: size.shown for name, size in found.sizes.items()} == dict.fromkeys(SIZES, 2 * len(KINDS))
    assert told[-1] == (6 * len(KINDS), 6 * len(KINDS))


def test_a_detector_that_guesses_is_not() -> None:
    good = np.random.default_rng(3).random(50)
    found = measure(Fake(blind=True), 0.9, [CLEAN], good_scores=good, per_kind=12)
    assert not found.fit
    assert 0.35 < found.auroc < 0.65
    assert found.auroc == pytest.approx(np.mean([kind.auroc for kind in found.kinds.values()]))
    assert 0 < sum(kind.found for kind in found.kinds.values()) < 0.3 * 12 * len(KINDS)


def test_half_of_it_is_where_in_the_image_the_defect_is_seen() -> None:
    class Elsewhere(Fake):
        """Its scores are right, its maps the wrong way round."""

        def batch(self, images: Sequence[Picture]) -> Any:
            return [SimpleNamespace(score=one.score, anomaly_map=-one.anomaly_map) for one in super().batch(images)]

    found = measure(Elsewhere(), 1.0, [CLEAN], good_scores=[0.0], per_kind=2)
    assert found.auroc == 0.5
    assert not found.fit


def test_a_mask_is_taken_to_the_size_of_the_map() -> None:
    """sklearn's AUROC of a map of a quarter of the photograph, cut from the middle."""
    mask = np.zeros((80, 80), np.bool_)
    mask[30:41, 42:45] = True
    seen = shown(mask, Preprocessing((20, 20), crop="input", crop_size=10), (10, 10))
    wanted = np.zeros((10, 10), np.bool_)
    wanted[2:6, 5:7] = True  # of 4 x 4 pixels each, from pixel 20 on
    np.testing.assert_array_equal(seen, wanted)
    values = np.random.default_rng(0).random((10, 10)).astype(np.float32)
    assert of_pixels(values, seen) == pytest.approx(roc_auc_score(seen.ravel(), values.ravel()))
    assert of_pixels(values, np.zeros((10, 10), np.bool_)) == 0.5


def test_a_score_at_the_threshold_is_not_found() -> None:
    class Constant(Fake):
        def batch(self, images: Sequence[Picture]) -> Any:
            return [SimpleNamespace(score=1.0, anomaly_map=np.ones((64, 64), np.float32)) for _ in images]

    found = measure(Constant(), 1.0, [CLEAN], good_scores=[1.0], per_kind=3)
    assert (found.auroc, {kind.found for kind in found.kinds.values()}) == (0.5, {0})


def test_it_repeats_and_other_seeds_differ() -> None:
    first, again, other = Fake(), Fake(), Fake()
    for judge, seed in ((first, 0), (again, 0), (other, 1)):
        measure(judge, 0.0, [CLEAN, CLEAN + 9], good_scores=[0.0], per_kind=1, seed=seed)
    assert all(map(np.array_equal, first.seen, again.seen))
    assert not all(map(np.array_equal, first.seen, other.seen))


def test_large_photographs_are_reduced_and_files_read(tmp_path: Any) -> None:
    Image.new("L", (2600, 1300), 90).save(tmp_path / "large.png")
    defect = defective(Preprocessing((32, 32)), [tmp_path / "large.png"], ("stain", "large", 0, 0), [0, 0])
    assert defect.image.shape == (MOST_SIDE // 2, MOST_SIDE, 3)


@pytest.mark.parametrize("how", [
    Preprocessing((64, 64), roi=(1240, 1100, 50, 40)),
    Preprocessing((60, 60), crop="input", crop_size=20),
])  # fmt: skip
def test_defects_lie_in_what_the_detector_sees(how: Preprocessing) -> None:
    photograph = np.full((1300, 1300, 3), 90, dtype=np.uint8)
    for index, kind in enumerate(KINDS):
        defect = defective(how, [photograph], (kind, "large", 0, 0), [index])
        left, top, right, bottom = how.covered_box((defect.image.shape[1], defect.image.shape[0]))
        rows, columns = np.nonzero(defect.mask)
        assert left - 1 <= columns.min() <= columns.max() < right
        assert top - 1 <= rows.min() <= rows.max() < bottom
        assert np.array_equal((defect.image != 90).any(axis=-1), defect.mask)
    assert (photograph == 90).all()


def test_no_images_are_refused() -> None:
    with pytest.raises(UsageError, match="no good images"):
        measure(Fake(), 1.0, [], good_scores=[])
