"""Places that are inspected and ignored: what counts for the map, the score, a calibration and its defects."""

import json
import warnings
from dataclasses import replace

import numpy as np
import pytest
import test_detector as tiny
from PIL import Image
from tuned_bundle import TERMS, add_tuning

from mdps.runtime import CalibrationError, UsageError, load
from mdps.runtime.errors import BundleError
from mdps.runtime.manifest import Manifest
from mdps.runtime.preprocessing import Preprocessing
from mdps.runtime.scope import Area, Scope, inspected, read_areas
from mdps.runtime.tiles import Tiling
from mdps.serving.calibrate import calibrate_folder

SIZE = tiny.SIZE
LEFT = Area((80, 80), (((0, 0), (39, 0), (39, 79), (0, 79)),))
TOP_RIGHT = Area((16, 8), (((8, 0), (15, 0), (15, 3), (8, 3)),))


def scoped(bundle, folder, scope, calibrated=True):
    """A copy of the bundle with this scope, calibrated for it or still for all."""
    import shutil

    shutil.copytree(bundle, folder)
    Manifest.read(bundle).with_scope("default", scope).write(folder)
    return tiny.calibrated(folder) if calibrated else folder


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return tiny.calibrated(tiny.make_bundle(tmp_path_factory.mktemp("b") / "whole"))


def spotted(*places):
    image = tiny.good(1)[0]
    for row, column in places:
        image[row, column] = 0
    return image


def test_what_lies_outside_is_neither_scored_nor_a_region(bundle, tmp_path):
    with load(scoped(bundle, tmp_path / "b", Scope(inspect=(LEFT,))), threads=1) as detector:
        outside, inside, clean = detector.batch([spotted((3, 6)), spotted((3, 6), (5, 1)), spotted()])
    with load(bundle, threads=1) as detector:
        whole = detector(spotted((3, 6), (5, 1)))
    assert (outside.verdict, outside.regions, clean.verdict) == ("pass", (), "pass")
    assert inside.verdict == "fail"
    assert [region.box for region in inside.regions] == [(1, 5, 1, 1)]
    np.testing.assert_array_equal(inside.anomaly_map[:, :4], whole.anomaly_map[:, :4])
    assert (inside.anomaly_map[:, 4:] == inside.anomaly_map[:, :4].min()).all()
    assert not inside.mask[:, 4:].any()
    assert len(whole.regions) == 2


def test_ignored_places_are_taken_out_of_the_inspected_ones(bundle, tmp_path):
    scope = Scope(inspect=(LEFT, TOP_RIGHT), ignore=(Area((8, 8), (((0, 0), (1, 0), (1, 7), (0, 7)),)),))
    inside = inspected(scope, Preprocessing((SIZE, SIZE)).covered_box, (SIZE, SIZE))
    expected = np.zeros((SIZE, SIZE), bool)
    expected[:, :4] = expected[:4, 4:] = True
    expected[:, :2] = False
    np.testing.assert_array_equal(inside, expected)


def test_an_area_is_of_the_photograph_also_where_the_map_shows_a_part_of_it():
    view = Preprocessing((8, 8), roi=(40, 0, 40, 80))
    with pytest.raises(UsageError, match="nothing that the detector sees is inspected"):
        inspected(Scope(inspect=(LEFT,)), view.covered_box, (8, 8))
    assert inspected(Scope(ignore=(LEFT,)), view.covered_box, (8, 8)).all()
    cropped = Preprocessing((8, 8), crop="input", crop_size=4)
    np.testing.assert_array_equal(
        inspected(Scope(inspect=(LEFT,)), cropped.covered_box, (4, 4)), [[True, True, False, False]] * 4
    )


def test_a_calibration_is_of_one_scope(bundle, tmp_path):
    with pytest.raises(CalibrationError, match="calibrated with other places to inspect, so its threshold"):
        load(scoped(bundle, tmp_path / "b", Scope(ignore=(LEFT,)), calibrated=False))
    load(scoped(bundle, tmp_path / "mm", Scope(mm_per_pixel=0.1), calibrated=False)).close()


def test_a_tuned_detector_scores_its_hottest_inspected_pixel(tmp_path):
    folder = add_tuning(tiny.make_bundle(tmp_path / "b"), TERMS)
    manifest = Manifest.read(folder)
    with load(folder, calibrated=False, threads=1) as detector:
        whole = detector(spotted((3, 6)))
    manifest.with_scope("default", Scope(inspect=(LEFT,))).write(folder)
    with load(folder, calibrated=False, threads=1) as detector:
        half = detector(spotted((3, 6)))
    assert half.score == pytest.approx(whole.anomaly_map[:, :4].max())
    assert half.score < whole.score


# Files


def test_polygons_and_masks_of_files_mean_the_same(tmp_path):
    (tmp_path / "left.json").write_text(json.dumps({"size": LEFT.size, "polygons": LEFT.polygons}))
    pixels = np.zeros((80, 80), np.uint8)
    pixels[:, :40] = 255
    Image.fromarray(pixels).save(tmp_path / "left.png")
    shown = [
        inspected(Scope(inspect=read_areas(str(tmp_path / f"left.{kind}"))), lambda size: (0, 0, *size), (13, 17))
        for kind in ("json", "png")
    ]
    np.testing.assert_array_equal(*shown)
    assert read_areas("none") == ()


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.json", b"{", "is no JSON"),
        ("a.json", b'{"size": [4, 4]}', "should be"),
        ("a.json", b'{"size": [4, 4], "polygons": [[[0, 0], [1, 1]]]}', "at least 3 corners"),
        ("a.json", b'{"size": [4, 4], "polygons": "x"}', "polygons should be a list"),
        ("a.json", b'{"size": [0, 4], "polygons": [[[0, 0], [1, 1], [1, 0]]]}', "should be at least 1 x 1"),
        ("a.json", None, "cannot be read"),
        ("a.png", b"no image", "not a picture"),
    ],
)
def test_a_file_that_is_no_area_is_a_sentence(tmp_path, name, content, sentence):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=sentence):
        read_areas(str(tmp_path / name))


def test_a_mask_of_one_colour_is_refused(tmp_path):
    Image.new("L", (4, 4)).save(tmp_path / "a.png")
    with pytest.raises(ValueError, match="black throughout"):
        read_areas(str(tmp_path / "a.png"))


def test_a_damaged_mask_in_a_bundle_is_a_sentence():
    with pytest.raises(BundleError, match="mask of an area cannot be read"):
        inspected(Scope(inspect=(Area((4, 4), mask="????"),)), lambda size: (0, 0, *size), (4, 4))


def test_calibrating_a_folder_stores_the_scope_with_defects_where_it_looks(bundle, tmp_path, monkeypatch):
    import shutil

    shutil.copytree(bundle, tmp_path / "b")
    (tmp_path / "good").mkdir()
    for index, pixels in enumerate(tiny.good(8)):
        Image.fromarray(np.kron(pixels, np.ones((8, 8, 1), np.uint8))).save(tmp_path / "good" / f"{index}.png")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = calibrate_folder(tmp_path / "b", tmp_path / "good", 0.2, scope={"inspect": (TOP_RIGHT,)}, threads=1)
        manifest = Manifest.read(tmp_path / "b")
        assert manifest.scope("default") == Scope(inspect=(TOP_RIGHT,))
        assert manifest.calibrations["default"].scope == found.scope == Scope(inspect=(TOP_RIGHT,)).name != ""
        monkeypatch.setattr("mdps.serving.fitness._TURNS", 0)
        again = calibrate_folder(tmp_path / "b", tmp_path / "good", 0.2, threads=1)
        assert again.scope == found.scope
        free = calibrate_folder(tmp_path / "b", tmp_path / "good", 0.2, scope={"inspect": ()}, threads=1)
    assert again.fitness.auroc < found.fitness.auroc - 0.1  # most of its defects lie where nobody looks
    assert free.scope == ""
    assert Manifest.read(tmp_path / "b").scopes == {}


def test_tiles_without_an_inspected_pixel_are_not_judged(tmp_path):
    tiny.make_bundle(tmp_path / "b", tiny.settings_of(masked=None))
    tiled = replace(Manifest.read(tmp_path / "b"), tiles=Tiling(1.0, 0.5))
    tiled.write(tmp_path / "b")
    picture = np.tile(spotted((3, 6)), (5, 5, 1))  # 40 x 40 pixels: 81 tiles of 8 x 8
    with load(tmp_path / "b", calibrated=False, threads=1) as detector:
        whole = detector(picture)
    tiled.with_scope("default", Scope(inspect=(Area((40, 40), (((24, 0), (31, 0), (31, 7), (24, 7)),)),))).write(
        tmp_path / "b"
    )
    seen = []
    with load(tmp_path / "b", calibrated=False, threads=1) as detector:
        detector.watch_tiles(lambda done, of: seen.append(of))
        found = detector(picture)
    assert set(seen) == {6}
    np.testing.assert_allclose(found.anomaly_map[:8, 24:32], whole.anomaly_map[:8, 24:32], rtol=1e-5)
    assert (found.anomaly_map[:, :24] == found.anomaly_map[:8, 24:32].min()).all()
