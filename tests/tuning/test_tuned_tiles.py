"""A bundle that judges in tiles is tuned on tiles, and its threshold is of whole photographs."""

import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mdps.runtime import load
from mdps.runtime.bundle import LoadOptions
from mdps.runtime.errors import CalibrationError
from mdps.runtime.manifest import Manifest
from mdps.runtime.preprocessing import Preprocessing
from mdps.runtime.tiles import Tiling
from mdps.serving.calibrate import fingerprint
from mdps.tuning.options import TuneOptions
from mdps.tuning.tiles import cut
from mdps.tuning.tune import Outcome, tune

FIRST = TuneOptions(budget_ms=1e6, per_kind=1, minutes=1e-9)


def photographs(folder: Path, count: int, size: tuple[int, int]) -> list[Path]:
    """Write smooth grey images whose level says which it is."""
    folder.mkdir(parents=True)
    rng, columns = np.random.default_rng(0), np.arange(size[1])[None, :]
    for index in range(count):
        pixels = 80 + 5 * index + 40 * np.sin(columns / 5) + rng.normal(0, 5, size)
        Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).convert("RGB").save(folder / f"{index:02d}.png")
    return sorted(folder.iterdir())


@pytest.fixture(scope="module")
def tuned(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path], Outcome]:
    folder = tmp_path_factory.mktemp("tiles")
    bundle, good = Path(shutil.copytree(tiny_bundle, folder / "bundle")), photographs(folder / "good", 12, (90, 130))
    manifest = Manifest.read(bundle)
    settings = replace(manifest.settings, mask=replace(manifest.settings.mask, range="frozen"))
    replace(manifest, settings=settings, tiles=Tiling(0.5)).write(bundle)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = tune(bundle, folder / "good", FIRST, LoadOptions(threads=1), 0.2)
    return bundle, good, found


def test_a_tuned_detector_in_tiles_judges_whole_photographs(tuned: tuple[Path, list[Path], Outcome]) -> None:
    bundle, good, _ = tuned
    with load(bundle, threads=1, force=True) as detector:
        result = detector(good[0])
        assert (result.judged_by, result.anomaly_map.shape) == ("tuned", (45, 65))
        assert result.score == pytest.approx(result.anomaly_map.max())
        np.testing.assert_array_equal(result.mask, result.anomaly_map > 1)
        broken = np.array(Image.open(good[0]))
        broken[40:60, 60:80] = 255
        assert detector(broken).score > 2 * result.score


def test_the_threshold_is_of_photographs_that_no_tile_was_of(tuned: tuple[Path, list[Path], Outcome]) -> None:
    bundle, good, _ = tuned
    manifest = Manifest.read(bundle)
    assert manifest.calibrations["default"].images == 6
    fitted = manifest.tunings["default"].evidence["fitted"]
    assert len(fitted) == 6
    assert set(fitted) < {fingerprint(path) for path in good}


def test_no_gaussian_of_a_place_is_tried(tuned: tuple[Path, list[Path], Outcome]) -> None:
    search = tuned[2].search
    assert any("position (in tiles" in left for left in search.left_out)
    assert {raw.kind for one in search.tried for raw in one.candidate.raws} == {"shared", "bank"}
    assert tuned[2].budget_ms == 1e6 / 8  # 45 x 65 pixels in tiles of 32 with half in common: 2 x 4


def test_tiles_of_one_photograph_are_in_one_part(tmp_path: Path) -> None:
    paths = photographs(tmp_path / "good", 14, (40, 70))
    (tmp_path / "tiles").mkdir()
    found = cut(paths, Preprocessing((16, 16)), Tiling(0.5), tmp_path / "tiles")
    assert (len(found.apart), len(set(found.owners)), len(found.tiles)) == (7, 7, 7 * 2 * 3)
    assert not set(found.apart) & set(found.owners)
    parts = [
        {found.owners[tile] for tile in part} for part in (found.parts.fit, found.parts.scale, found.parts.bearing)
    ]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 7
    for tile, owner in zip(found.tiles, found.owners, strict=True):
        level = np.asarray(Image.open(tile)).mean()
        assert abs(level - np.asarray(Image.open(owner)).mean()) < 12
        assert Image.open(tile).size == (32, 32)


def test_few_photographs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="9 good photographs are too few to tune on in tiles: give at least 10"):
        cut(photographs(tmp_path / "good", 9, (20, 20)), Preprocessing((16, 16)), Tiling(0.5), tmp_path)
