"""The test set of large missing parts: what is gone, and that it is read like any other."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mdps.benchmarks.data import find_categories
from mdps.benchmarks.missing import main, without, write
from mdps.runtime.errors import UsageError


def disc(grain: float = 2.0) -> tuple[np.ndarray, np.ndarray]:
    """A dark disc on a bright ground, and where it is."""
    rows, columns = np.mgrid[:96, :128]
    part = (rows - 50) ** 2 + (columns - 60) ** 2 < 33**2
    pixels = np.where(part, 60, 200) + np.random.default_rng(0).normal(0, grain, part.shape)
    return np.repeat(pixels.clip(0, 255).astype(np.uint8)[..., None], 3, axis=-1), part


@pytest.mark.parametrize("seed", range(4))
def test_a_third_of_the_part_gives_way_to_its_background(seed: int) -> None:
    image, part = disc()
    new, mask = without(image, np.random.default_rng(seed))
    assert mask.sum() / part.sum() == pytest.approx(1 / 3, abs=0.05)
    assert (mask & ~part).sum() < 0.1 * mask.sum()
    assert abs(np.median(new[mask & part]) - 200) < 2  # its edge is soft
    assert np.abs(new.astype(int) - image)[~mask].max() < 20  # the background beyond stays as it was, but for grain


def test_of_a_surface_a_third_of_the_picture_gives_way() -> None:
    rng = np.random.default_rng(0)
    image = np.repeat(rng.normal(120, 30, (96, 96, 1)).clip(0, 255).astype(np.uint8), 3, axis=-1)
    new, mask = without(image, rng)
    assert mask.mean() == pytest.approx(1 / 3, abs=0.05)
    assert new[mask].std() < 0.3 * image.std()


def test_the_set_is_read_as_a_category_and_made_again_the_same(
    make_category: Callable[..., Path], tmp_path: Path
) -> None:
    root = make_category(good=3, defective=2)
    for name in ("one", "two"):
        assert main([str(root), "--out", str(tmp_path / name)]) == 0
    (found,) = find_categories(tmp_path / "one")
    assert (found.layout, len(found.train), found.check()) == ("mvtec-ad", 1, ())
    assert [sample.kind for sample in found.test] == ["good"] * 3 + ["missing"] * 3
    for sample in found.test:
        with Image.open(sample.path) as image:
            assert sample.truth().shape == image.size[::-1]
        assert sample.truth().any() == sample.defective
        again = tmp_path / "two" / sample.path.relative_to(tmp_path / "one")
        assert again.read_bytes() == sample.path.read_bytes()


def test_a_folder_in_use_and_a_set_without_good_images_are_refused(
    make_category: Callable[..., Path], tmp_path: Path
) -> None:
    root = make_category(good=0)
    with pytest.raises(UsageError, match=r"should hold images in train/good and in test/good"):
        write(root, tmp_path / "out")
    with pytest.raises(UsageError, match="holds files"):
        write(make_category("other"), root)
