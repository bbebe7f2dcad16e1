"""The demo's data: disjoint parts of a photograph, visible defects, exact masks, the same every time."""

import importlib.util
import itertools

import numpy as np
import pytest

from mdps.benchmarks.data import textures
from mdps.benchmarks.data.textures import TextureSet
from mdps.runtime.errors import UsageError


@pytest.fixture(scope="module", params=textures.PHOTOS)
def data(request):
    return TextureSet(request.param)


def test_good_images_are_grey_crops_of_their_own_strip(data):
    picture = textures.photograph(data.photo)
    strips = {"training": textures.TRAINING, "calibration": textures.CALIBRATION, "test": textures.TEST}
    columns = sorted((s.start, s.stop) for s in strips.values())
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(columns))
    crops = {
        "training": data.training(4),
        "calibration": data.calibration(4),
        "test": [sample.image for sample in data.test(good=4, each=0)],
    }
    for part, strip in strips.items():
        windows = np.lib.stride_tricks.sliding_window_view(picture[:, strip], (64, 64))
        for crop in crops[part]:
            assert crop.shape == (64, 64, 3)
            assert crop.dtype == np.uint8
            assert (crop == crop[..., :1]).all()
            candidates = np.argwhere(windows[:, :, 0, 0] == crop[0, 0, 0])
            assert any((windows[y, x] == crop[..., 0]).all() for y, x in candidates)


def test_there_are_enough_of_each_kind(data):
    kinds = [sample.kind for sample in data.test()]
    assert kinds.count("good") == 30
    assert {kind: kinds.count(kind) for kind in textures.DEFECTS} == dict.fromkeys(textures.DEFECTS, 10)


def test_masks_hold_the_change_and_nothing_but_the_change(data, monkeypatch):
    before = []
    put = textures.put
    monkeypatch.setattr(textures, "put", lambda kind, crop, *rest: (before.append(crop), put(kind, crop, *rest))[1])
    for sample in data.test(good=0, each=10):
        change = np.abs(sample.image[..., 0].astype(float) - before.pop(0))
        assert 20 <= sample.mask.sum() <= 0.4 * sample.mask.size, sample
        assert change[sample.mask].mean() >= textures.EVIDENT, sample
        # what is left outside is the soft edge: faint, and a small part of the whole change
        assert change[~sample.mask].sum() <= 0.25 * change.sum(), sample
        assert change.max() < 200, "no garish defects"


def test_the_same_seed_gives_the_same_set_and_another_another():
    first, again, other = (TextureSet("brick", seed).test() for seed in (3, 3, 4))
    assert all((a.image == b.image).all() and (a.mask == b.mask).all() for a, b in zip(first, again, strict=True))
    assert any((a.image != b.image).any() for a, b in zip(first, other, strict=True))


def test_the_test_set_does_not_depend_on_what_was_asked_before():
    asked = TextureSet("brick")
    asked.training(10), asked.calibration(3)
    assert all((a.image == b.image).all() for a, b in zip(asked.test(), TextureSet("brick").test(), strict=True))


def test_missing_photographs_are_one_sentence(monkeypatch, tmp_path):
    with pytest.raises(UsageError, match=r"no photograph 'sand'; choose one of brick, grass, gravel"):
        TextureSet("sand")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install scikit-image"):
        TextureSet("brick")


def test_a_defect_that_cannot_be_seen_is_refused():
    black = np.zeros((64, 64), dtype=np.uint8)
    with pytest.raises(UsageError, match="no visible defect of kind 'crack'"):
        textures.put("crack", black, black, np.random.default_rng(0))
