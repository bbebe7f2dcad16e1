"""The test set that lies off: how far, and that its ground truth goes with it."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage

from mdps.benchmarks.data import find_categories
from mdps.benchmarks.shifted import main, shifted, write
from mdps.runtime.errors import UsageError


def test_a_picture_is_moved_as_scipy_moves_it() -> None:
    rng = np.random.default_rng(0)
    image = ndimage.gaussian_filter(rng.normal(128, 150, (60, 80)), 3).clip(0, 255).astype(np.uint8)
    turn, shift = np.radians(4.0), np.array([2.5, -1.25])  # x, y
    # Rows come first in scipy, and it takes the output's place to the input's.
    back = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
    centre = np.array([29.5, 39.5])
    offset = centre - back @ (centre + shift[::-1])
    other = ndimage.affine_transform(image.astype(float), back, offset, order=3, mode="nearest")
    assert np.abs(shifted(image, (2.5, -1.25), 4.0) - other)[5:-5, 5:-5].max() < 3
    assert np.abs(image - other)[5:-5, 5:-5].max() > 10


def test_the_set_is_read_as_a_category_and_its_truth_lies_on_its_defects(
    make_category: Callable[..., Path], tmp_path: Path
) -> None:
    root = make_category(good=2, defective=6, size=(64, 64))
    for name in ("one", "two"):
        assert main([str(root), "--out", str(tmp_path / name)]) == 0
    (before,), (after,) = find_categories(root), find_categories(tmp_path / "one")
    assert (after.layout, len(after.train), after.check()) == ("mvtec-ad", 1, ())
    moves = []
    for old, new in zip(before.test, after.test, strict=True):
        assert (old.kind, old.defective) == (new.kind, new.defective)
        again = tmp_path / "two" / new.path.relative_to(tmp_path / "one")
        assert again.read_bytes() == new.path.read_bytes()
        if new.defective:
            bright = [np.asarray(Image.open(one.path).convert("L"))[one.truth()].mean() for one in (old, new)]
            assert bright[1] == pytest.approx(bright[0], abs=6)
            places = [ndimage.center_of_mass(one.truth()) for one in (old, new)]
            moves.append(np.abs(np.subtract(*places)).max())
    assert 1 < max(moves) <= 0.05 * 64 + 32 * np.sin(np.radians(5)) + 1


def test_a_folder_in_use_and_a_set_without_images_are_refused(
    make_category: Callable[..., Path], tmp_path: Path
) -> None:
    root = make_category()
    with pytest.raises(UsageError, match="holds files"):
        write(root, root)
    (tmp_path / "none" / "train" / "good").mkdir(parents=True)
    with pytest.raises(UsageError):
        write(tmp_path / "none", tmp_path / "out")
