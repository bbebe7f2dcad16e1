"""Photographs of parts that lie off: all views of them are aligned, synthetic defects and their masks too."""

import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage

from mdps.benchmarks.shifted import shifted
from mdps.runtime.bundle import LoadOptions
from mdps.runtime.manifest import Manifest
from mdps.runtime.preprocessing import Preprocessing, read_image
from mdps.runtime.registration import Aligner, align
from mdps.tuning.options import TuneOptions
from mdps.tuning.photographs import defects, see
from mdps.tuning.tune import tune

SIDE = 64


def part(seed: int) -> np.ndarray:
    smooth = ndimage.gaussian_filter(np.random.default_rng(3).normal(size=(SIDE, SIDE)), 3)
    pixels = 128 + 40 * smooth / smooth.std() + np.random.default_rng(seed).normal(0, 2, smooth.shape)
    return np.repeat(pixels.clip(0, 255).astype(np.uint8)[..., None], 3, axis=-1)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Ten parts of which each lies otherwise."""
    folder, rng = tmp_path_factory.mktemp("parts") / "good", np.random.default_rng(0)
    folder.mkdir()
    paths = [folder / f"{index}.png" for index in range(10)]
    for index, path in enumerate(paths):
        Image.fromarray(shifted(part(index), tuple(rng.uniform(-4, 4, 2)), rng.uniform(-5, 5))).save(path)
    return paths


def test_photographs_are_seen_as_the_reference_lies(good: list[Path]) -> None:
    aligner, framing = Aligner(align(good)), Preprocessing((32, 32))
    plain, found = (see(good, framing, SIDE, how) for how in (None, aligner))
    for before, after in ((plain.images, found.images), (plain.photographs, found.photographs)):
        assert after.astype(float).std(axis=0).mean() < 0.4 * before.astype(float).std(axis=0).mean()


def test_a_defects_mask_goes_with_it(good: list[Path]) -> None:
    aligner, framing = Aligner(align(good)), Preprocessing((SIDE, SIDE))
    clean = np.median([np.asarray(aligner(read_image(path))[0]) for path in good], axis=0)[..., 0]
    bad = defects(good, framing, SIDE, per_kind=2, align=aligner)
    changed = np.abs(bad.seen.images[..., 0] - clean)
    inside = [change[mask].mean() for change, mask in zip(changed, bad.masks, strict=True) if mask.sum() > 20]
    outside = [change[~mask].mean() for change, mask in zip(changed, bad.masks, strict=True) if mask.sum() > 20]
    assert len(inside) > 10
    assert np.median(inside) > 4 * np.median(outside)


def test_a_tuning_stores_the_reference(tiny_bundle: Path, good: list[Path], tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))
    options = TuneOptions(align=True, budget_ms=1e6, per_kind=1, minutes=1e-9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tune(bundle, good[0].parent, options, LoadOptions(threads=1), 0.05)
    manifest = Manifest.read(bundle)
    assert manifest.calibrations["default"].aligned == manifest.aligned("default") != ""
