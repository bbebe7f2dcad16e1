"""A bundle that judges in tiles, from its calibration to the pictures of a run and its evaluation."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from mdps.commands import predict as command
from mdps.runtime import load
from mdps.runtime.errors import UsageError
from mdps.runtime.manifest import Manifest
from mdps.runtime.overlay import LARGEST, HeatRange, heat_picture, shrunk, strip
from mdps.runtime.tiles import Tiling
from mdps.serving.calibrate import calibrate_folder
from mdps.serving.fitness import defective
from mdps.serving.folder import predict

SIDE = 16


def photographs(folder, count, size=(24, 37), seed=0):
    folder.mkdir(parents=True)
    stream = np.random.default_rng(seed)
    for index in range(count):
        Image.fromarray(stream.integers(90, 130, (*size, 3), dtype=np.uint8)).save(folder / f"{index}.png")
    return folder


@pytest.fixture(scope="module")
def bundle(line_bundle, tmp_path_factory):
    """The random network of the line, in tiles at half the size of the photograph."""
    import shutil

    folder = tmp_path_factory.mktemp("tiled") / "line"
    shutil.copytree(line_bundle, folder)
    manifest = Manifest.read(folder)
    settings = replace(manifest.settings, mask=replace(manifest.settings.mask, range="frozen"))
    replace(manifest, settings=settings, calibrations={}, tiles=Tiling(0.5)).write(folder)
    calibration = calibrate_folder(folder, photographs(folder.parent / "good", 4), 0.2, threads=1)
    assert calibration.fitness.kinds["stain"].shown == 2
    replace(Manifest.read(folder), calibrations={"default": replace(calibration, fitness=None)}).write(folder)
    return folder


def test_a_run_leaves_maps_and_pictures_of_every_size(bundle, tmp_path):
    photographs(tmp_path / "in" / "a", 2)
    photographs(tmp_path / "in" / "b", 1, (9, 70), seed=1)
    out = tmp_path / "out"
    with load(bundle, threads=1) as detector:
        rows = predict(detector, [tmp_path / "in"], out)
        assert [np.load(out / row.map).shape for row in rows] == [(12, 18), (12, 18), (4, 35)]
        assert all(row.verdict in ("pass", "fail") for row in rows)
        for row in rows:
            whole = Image.open(out / "overlays" / "whole" / f"{Path(row.map).stem}.png")
            assert whole.size[0] % np.load(out / row.map).shape[1] == 0
        predict(detector, [tmp_path / "in" / "b"], out, force=True)
    assert len(list((out / "overlays" / "whole").iterdir())) == 1


def test_an_evaluation_takes_the_whole_map(bundle, tmp_path, write_category):
    from mdps.benchmarks.evaluate.bundle import BundlePredictor

    root = write_category(tmp_path / "disc", good=1, defective=1, size=(50, 40))
    paths = sorted((root / "test").glob("*/*.png"))
    with BundlePredictor(bundle, threads=1, batch=3) as predictor:
        found = list(predictor.predictions(paths))
        assert [one.anomaly_map.shape for one in found] == [(20, 25)] * len(paths)
        assert predictor.covered((50, 40)) == (0, 0, 50, 40)


def test_defects_of_the_size_of_a_tile_are_put_anywhere(bundle, tmp_path):
    (path,) = photographs(tmp_path / "p", 1, (300, 400)).iterdir()
    with load(bundle, threads=1) as detector:
        seen, tiles = detector.preprocessing, detector.tiles
    places = []
    for index in range(6):
        mask = defective(seen, [path], ("stain", "medium", 0, 0), [index], tiles).mask
        rows, columns = np.nonzero(mask)
        assert mask.shape == (300, 400)
        assert max(np.ptp(rows), np.ptp(columns)) < 2 * SIDE
        places.append((rows.mean() // 50, columns.mean() // 50))
    assert len(set(places)) > 3


def test_no_single_file(bundle):
    from mdps.export.single_file import export_single_file

    with pytest.raises(UsageError, match=r"judges photographs in tiles.*deploy the bundle's folder"):
        export_single_file(bundle)


def test_a_strip_of_a_large_photograph_loses_no_hot_pixel():
    height, width = 40, 2 * LARGEST + 1
    observation, sample = np.zeros((2, 3, height, width), np.float16)
    anomaly_map, mask = np.zeros((height, width), np.float32), np.zeros((height, width), bool)
    anomaly_map[7, 4001] = mask[7, 4001] = 1
    picture = np.asarray(strip(observation, sample, anomaly_map, mask, HeatRange(0, 1)))
    assert picture.shape[1] < 4 * (LARGEST + 10)
    assert picture.max() == 255
    assert shrunk(anomaly_map, 3, np.max).shape == (14, 1366)
    assert shrunk(anomaly_map, 3, np.max).sum() == 1


def test_a_large_picture_of_heat_is_that_of_its_rows():
    stream = np.random.default_rng(0)
    observation = stream.uniform(-1, 1, (3, 600, 300)).astype(np.float32)
    anomaly_map = stream.uniform(0, 1, (600, 300)).astype(np.float32)
    picture = np.asarray(heat_picture(observation, anomaly_map, HeatRange(0, 1)))
    part = np.asarray(heat_picture(observation[:, 250:520], anomaly_map[250:520], HeatRange(0, 1)))
    np.testing.assert_array_equal(picture[250:520], part)


def test_a_long_run_is_told_before_it_begins(bundle, tmp_path, monkeypatch):
    photographs(tmp_path / "in", 2, (100, 100))
    said: list[str] = []
    monkeypatch.setattr(command, "say", said.append)
    with load(bundle, threads=1) as detector:
        detector.warm_up_seconds = 3.0
        command._tell_of_tiles(detector, [tmp_path / "in"], tmp_path / "out")
        assert said == []  # no terminal
        monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: True, write=len, flush=int))
        command._tell_of_tiles(detector, [tmp_path / "in"], tmp_path / "out")
        assert said == ["72 tiles in 2 images, about 3.6 minutes"]
        detector(tmp_path / "in" / "0.png")


def test_a_bundle_says_its_tiles(bundle):
    assert json.loads((bundle / "manifest.json").read_text())["tiles"] == {"scale": 0.5, "overlap": 0.5}
