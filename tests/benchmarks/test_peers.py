"""Detectors of anomalib: what is handed to them, what comes back, and what a user reads where they cannot run."""

import importlib.util
import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from click.testing import CliRunner
from PIL import Image
from tuned_bundle import tuned_bundle

from mdps.benchmarks.data.samples import Category, Sample
from mdps.benchmarks.evaluate.results import METRICS, Evaluation, ScoredImage
from mdps.benchmarks.options import PeerOptions
from mdps.benchmarks.peers import PEERS, PeerSkippedError, fitting, predict, settings_of
from mdps.benchmarks.peers.fitting import layer_names, local_backbone, write_textures
from mdps.benchmarks.peers.predict import peer_predictor
from mdps.commands.peers import peers
from mdps.models.backbones import IMAGENET, load_backbone
from mdps.runtime.errors import UsageError
from mdps.runtime.preprocessing import Preprocessing

SIZE = (32, 32)
INSTALLED = importlib.util.find_spec("anomalib") is not None
with_anomalib = pytest.mark.skipif(not INSTALLED, reason="anomalib is not installed: pip install 'mdps[peers]'")


@pytest.fixture(scope="module")
def category(tmp_path_factory):
    """Six smooth good images, and a test of two good ones and two with a white square."""
    root, rng = tmp_path_factory.mktemp("parts"), np.random.default_rng(0)

    def picture(name, square=False):
        pixels = rng.integers(90, 130, (8, 8, 3)).astype(np.uint8)
        image = np.array(Image.fromarray(pixels).resize((48, 48), Image.Resampling.BICUBIC))
        if square:
            image[12:24, 20:34] = 255
        Image.fromarray(image).save(root / name)
        return root / name

    mask = np.zeros((48, 48), np.uint8)
    mask[12:24, 20:34] = 255
    Image.fromarray(mask).save(root / "mask.png")
    good = tuple(Sample(picture(f"good{i}.png"), "good", False) for i in range(2))
    bad = tuple(Sample(picture(f"bad{i}.png", True), "square", True, (root / "mask.png",)) for i in range(2))
    train = tuple(picture(f"train{i}.png") for i in range(6))
    return Category("parts", "plain", root, train, (), good + bad)


# Without anomalib


def test_a_name_that_is_none_is_refused_before_anything_is_read(category, tmp_path):
    with pytest.raises(UsageError, match="there is no peer 'glass': choose among patchcore"):
        peer_predictor("glass", category, work=tmp_path, size=SIZE)
    with pytest.raises(UsageError, match="there is no peer glass"):
        predict.compare(["patchcore", "glass"], [category], tmp_path, size=SIZE)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("fastflow", {}, "runs on resnet18, wide_resnet50_2 only, not on efficientnet_lite0: give --backbone"),
        ("reverse-distillation", {}, "Reverse Distillation of anomalib runs on resnet18, .*: give --backbone"),
        ("supersimplenet", {}, "at least 128 pixels a side, not 64 x 64: give a larger --image-size"),
        ("efficientad", {}, "nothing is downloaded: give --set teacher=FILE .* and --set imagenette=FOLDER"),
        ("efficientad", {"teacher": Path("teacher.pth")}, "--set imagenette="),
    ],
)
def test_who_cannot_run_says_why_and_what_to_give(name, changes, reason):
    with pytest.raises(PeerSkippedError, match=reason):
        settings_of(name, PeerOptions((64, 64), **changes))


@pytest.mark.parametrize("backbone", ["resnet18", "wide_resnet50_2"])
def test_networks_with_few_backbones_take_those(backbone):
    for name in ("fastflow", "reverse-distillation"):
        assert settings_of(name, PeerOptions((64, 64), backbone=backbone)) == {}


@pytest.mark.parametrize(
    "wrong",
    [
        {"size": (16, 64)},
        {"minutes": 0.0},
        {"steps": 0},
        {"coreset": 0.0},
        {"coreset": 1.5},
        {"coreset": 0.1, "patches": 100},
        {"patches": 0},
        {"threads": 0},
        {"device": "tpu"},
        {"false_alarm_rate": 0.0},
        {"false_alarm_rate": 1.0},
        {"textures": Path("nowhere")},
        {"imagenette": Path("nowhere")},
    ],
)
def test_options_that_mean_nothing_are_refused(wrong):
    with pytest.raises(UsageError):
        replace(PeerOptions(SIZE), **wrong)


def test_layers_are_those_whose_maps_have_the_strides_of_the_stages():
    assert layer_names("resnet18", (1, 2, 3)) == ["layer1", "layer2", "layer3"]
    names = layer_names("efficientnet_lite0", (1, 2, 3))
    network = timm.create_model("tf_efficientnet_lite0", pretrained=False).eval()
    sides = {}
    for name in names:
        network.get_submodule(name).register_forward_hook(lambda _, __, out, n=name: sides.update({n: out.shape[-1]}))
    with torch.inference_mode():
        network(torch.zeros(1, 3, 64, 64))
    assert [sides[name] for name in names] == [16, 8, 4]
    with pytest.raises(UsageError, match="has no stage 9"):
        layer_names("resnet18", (9,))


def test_a_pretrained_backbone_is_filled_from_the_local_file_and_nothing_is_fetched(monkeypatch):
    def fetch(*_, **__):
        raise AssertionError("went to the network")

    monkeypatch.setattr("timm.models._builder.load_pretrained", fetch)
    make = {"features_only": True, "out_indices": (2, 3)}
    with local_backbone("efficientnet_lite0", None, (2, 3)) as read:
        filled = timm.create_model("tf_efficientnet_lite0", pretrained=True, **make)
        assert len(read) == 1
        empty = timm.create_model("tf_efficientnet_lite0", pretrained=False, **make)
        assert len(read) == 1
    wanted = load_backbone("efficientnet_lite0", stages=(2, 3))
    assert read == [wanted.weights_sha256]
    for key, value in wanted.network.state_dict().items():
        assert torch.equal(filled.state_dict()[key], value)
    assert not torch.equal(empty.conv_stem.weight, filled.conv_stem.weight)
    with pytest.raises(AssertionError, match="went to the network"):  # afterwards timm is as it was
        timm.create_model("tf_efficientnet_lite0", pretrained=True, **make)


def test_textures_are_pictures_of_several_scales(tmp_path):
    write_textures(tmp_path)
    sides = {Image.open(path).size for path in tmp_path.glob("*.png")}
    assert len(list(tmp_path.glob("*.png"))) == 15
    assert len(sides) > 1


@pytest.mark.skipif(INSTALLED, reason="anomalib is installed")
def test_without_anomalib_one_sentence_says_what_to_install(category, tmp_path):
    with pytest.raises(UsageError, match=r"not installed: pip install 'mdps\[peers\]'"):
        peer_predictor("patchcore", category, work=tmp_path, size=SIZE)
    answer = CliRunner().invoke(peers, [str(category.root), "--out", str(tmp_path / "out")])
    assert answer.exit_code != 0
    assert "needs anomalib, which is not installed: pip install 'mdps[peers]'" in answer.output


class Bright:
    """Scores by the brightest pixel."""

    name, crop = "PaDiM", None
    provenance = {"train_images": 6, "fit_seconds": 2.4, "steps": 7}  # noqa: RUF012

    def __call__(self, paths):
        for path in paths:
            grey = Preprocessing(SIZE)(path).mean(axis=0)
            yield float(grey.max()), grey


@pytest.fixture
def bright(monkeypatch):
    def make(name, *_, **__):
        if name == "draem":
            raise PeerSkippedError("no reason at all")
        return Bright()

    monkeypatch.setattr(predict, "peer_predictor", make)


def test_a_comparison_gives_the_rows_of_an_evaluation_and_names_who_was_skipped(bright, category, tmp_path):
    said = []
    rows = predict.compare(["padim", "draem"], [category], tmp_path, say=said.append, size=SIZE)
    assert rows[0]["judge"] == "PaDiM"
    assert rows[0]["image_auroc"] == 1.0
    assert rows[0]["pixel_auroc"] > 0.95
    assert rows[1] == {"judge": "DRAEM", "category": "parts", "skipped": "no reason at all"}
    assert json.loads((tmp_path / "peers.json").read_text()) == rows
    table = (tmp_path / "peers.md").read_text()
    assert "| PaDiM |  | parts | 4 | 1.0000 |" in table
    assert "6 images, 2 s, 7 steps |" in table
    assert "Skipped DRAEM on parts: no reason at all" in table
    assert (tmp_path / "padim" / "parts" / "results.json").is_file()
    assert any("no reason at all" in line for line in said)


def test_times_of_one_run_are_compared_with_patchcores():
    def found(name, *times, **made):
        rows = [ScoredImage(f"{i}.png", "good", False, 0.0, ms, ms + 5) for i, ms in enumerate(times)]
        rows.append(ScoredImage("torn.png", "good", False, error="torn"))
        return Evaluation(name, "parts", len(times), dict.fromkeys(METRICS, 0.5), tuple(rows), None, made, (), 1.0)

    peer = {"train_images": 6, "fit_seconds": 2.0}
    calibration = {"images": 41, "false_alarm_rate": 0.01}
    tuned = found("glass", 10.0, 30.0, 20.0, 40.0, 90.0, tuned="0f", calibration=calibration)
    bank = found("PatchCore", 20.0, 15.0, 10.0, patches=1200, **peer)
    rows = predict.timed([tuned, found("glass", 60.0, tuned=None), bank])
    assert [row["judge"] for row in rows] == ["glass, tuned", "glass, published", "PatchCore"]
    assert (rows[0]["ms"], rows[0]["processor_ms"]) == ([20.0, 30.0, 40.0], [25.0, 35.0, 45.0])
    assert [row["ms_to_patchcore"] for row in rows] == [2.0, 4.0, 1.0]
    assert [row["processor_ms_to_patchcore"] for row in rows] == [35 / 20, 65 / 20, 1.0]
    assert "ms_to_patchcore" not in predict.timed([tuned])[0]
    shown = predict.markdown([{**row, "threads": 1} for row in rows]).splitlines()
    first, _, last = [line.split(" | ")[12:] for line in shown[2:5]]
    assert first == ["20.0 to 40.0", "2.00", "35.0", "1.75", "1", "0 of 0", "0 of 5", "41 for 0.01", " |"]
    made = "6 images, 2 s, one pass, 1,200 patches |"
    assert last == ["12.5 to 17.5", "1.00", "20.0", "1.00", "1", "0 of 0", "0 of 3", "", made]


@pytest.mark.parametrize("patches", [1, 25, 43, 123, 1200, 4000])
def test_a_number_of_patches_is_the_share_that_anomalib_rounds_to_it(patches):
    for images, size, count in ((167, (256, 256), 171_008), (12, (60, 36), 480)):
        kept = min(patches, count)
        found = predict.with_share(PeerOptions(size, patches=patches), images)
        assert int(count * found.coreset) == kept
    assert predict.with_share(PeerOptions(SIZE, coreset=0.5), 9).coreset == 0.5


@with_anomalib
def test_a_published_row_needs_a_bundle(make_category, tmp_path):
    arguments = [str(make_category()), "--set", "published=yes", "--out", str(tmp_path / "out")]
    with pytest.raises(UsageError, match="give --beside BUNDLE"):
        CliRunner().invoke(peers, arguments, catch_exceptions=False)


def test_the_key_holds_what_a_fit_depends_on(category, monkeypatch):
    monkeypatch.setattr(predict, "version", lambda name: "1")

    def key(name, cat=category, **options):
        chosen = PeerOptions(SIZE, **options)
        return predict._identity(name, predict.divided(cat, chosen), chosen)

    base = key("draem")
    assert base == key("draem", coreset=0.5, backbone="resnet18")  # DRAEM reads neither
    for change in ({"minutes": 1.0}, {"steps": 5}, {"seed": 1}, {"textures": category.root}):
        assert key("draem", **change) != base
    assert key("draem", replace(category, train=category.train[:-1])) != base
    assert key("draem", false_alarm_rate=0.2) == base  # the scores of good images are kept, not the threshold
    assert key("draem", false_alarm_rate=None) != base
    assert key("patchcore", minutes=1.0) == key("patchcore")  # one pass over the images knows no budget
    assert key("patchcore", coreset=0.5) != key("patchcore")
    assert key("patchcore", backbone="resnet18") != key("patchcore")


def fitted_to(category):
    """Return all but the fifth of six."""
    return category.train[:4] + category.train[5:]


def test_every_fifth_good_image_is_held_apart_for_the_threshold(category):
    found = predict.divided(category, PeerOptions(SIZE))
    assert (found.train, found.apart) == (fitted_to(category), category.train[4:5])
    whole = predict.divided(category, PeerOptions(SIZE, false_alarm_rate=None))
    assert (whole.train, whole.apart) == (category.train, ())


def test_a_threshold_is_that_of_a_calibration_and_too_few_images_are_told():
    peer = predict.PeerPredictor("padim", torch.nn.Identity(), PeerOptions(SIZE), {"seed": 0})
    peer.calibrate([1.0, 3.0, 2.0, 4.0], 0.25)
    assert peer.threshold == 4.0  # the fourth of four: 1 of 5 further good images may exceed it
    assert peer.notes == ()
    calibration = peer.provenance["calibration"]
    assert (calibration["images"], calibration["expected_false_alarm_rate"]) == (4, pytest.approx(0.2))
    peer.calibrate([1.0, 3.0, 2.0, 4.0], 0.5)
    assert peer.threshold == 3.0
    peer.calibrate([1.0, 3.0], 0.01)
    assert peer.notes == (
        "2 good images can promise a false-alarm rate of 0.333 only, not 0.01: calibrate on at least 99",
    )


# With anomalib


@pytest.fixture(scope="module")
def patchcore(category, tmp_path_factory):
    work = tmp_path_factory.mktemp("work")
    return peer_predictor("patchcore", category, work=work, size=SIZE, coreset=1.0), work


@with_anomalib
def test_patchcore_measures_distances_between_features_of_the_given_network(patchcore, category):
    """With every patch kept, the score without weighting is the largest distance to the nearest training patch."""
    peer, _ = patchcore
    backbone = load_backbone("efficientnet_lite0", stages=(2, 3))
    mean, std = (torch.tensor(values)[:, None, None] for values in IMAGENET)

    def patches(path):
        image = torch.from_numpy((Preprocessing(SIZE)(path) + 1) / 2)
        with torch.inference_mode():
            features = [torch.nn.functional.avg_pool2d(f, 3, 1, 1) for f in backbone(((image - mean) / std)[None])]
        large = torch.nn.functional.interpolate(features[1], size=features[0].shape[-2:], mode="bilinear")
        return torch.cat([features[0], large], 1)[0].flatten(1).T.double()

    bank = torch.cat([patches(path) for path in fitted_to(category)])
    peer._module.model.num_neighbors = 1
    paths = [sample.path for sample in category.test]
    for path, (score, anomaly_map) in zip(paths, peer(paths), strict=True):
        expected = torch.cdist(patches(path), bank).min(1).values.max()
        assert score == pytest.approx(float(expected), rel=1e-3)
        assert anomaly_map.shape == SIZE
        assert anomaly_map.dtype == np.float32


@with_anomalib
def test_a_bank_has_the_patches_asked_for_and_is_the_one_that_anomalib_chooses(category, tmp_path, monkeypatch):
    options = {"size": SIZE, "patches": 7, "threads": 1}
    found = peer_predictor("patchcore", category, work=tmp_path / "quick", **options)
    assert found.provenance["patches"] == 7
    monkeypatch.setattr(fitting, "quick_coreset", nullcontext)
    own = peer_predictor("patchcore", category, work=tmp_path / "own", **options)
    assert torch.equal(found._module.model.memory_bank, own._module.model.memory_bank)


@with_anomalib
def test_a_bundle_is_measured_beside_the_peers(make_category, tmp_path):
    root = make_category()
    for index in range(1, 6):
        shutil.copy(root / "test" / "good" / f"{index % 3:03d}.png", root / "train" / "good" / f"{index:03d}.png")
    out = tmp_path / "out"
    arguments = ["--names", "patchcore", "--image-size", "32", "--beside", str(tuned_bundle(tmp_path / "glass"))]
    arguments += ["--set", "patches=7", "--set", "published=yes", "--threads", "1", "--out", str(out), "--json"]
    answer = CliRunner().invoke(peers, [str(root), *arguments], catch_exceptions=False)
    tuned, published, peer = json.loads(answer.stdout)
    assert (tuned["judge"], published["judge"], peer["judge"]) == ("bottle, tuned", "bottle, published", "PatchCore")
    assert {row["threads"] for row in (tuned, published, peer)} == {1}
    assert tuned["ms"][1] == tuned["ms_per_image"]
    for name in ("ms", "processor_ms"):
        assert tuned[f"{name}_to_patchcore"] == pytest.approx(tuned[name][1] / peer[name][1])
    assert tuned["image_auroc"] != published["image_auroc"] or tuned["pixel_auroc"] != published["pixel_auroc"]
    assert {path.name for path in out.iterdir()} == {
        "tuned", "published", "patchcore", "fitted", "peers.json", "peers.md",
    }  # fmt: skip


@with_anomalib
def test_a_training_image_is_no_anomaly(patchcore, category):
    peer, _ = patchcore
    (known, _), (defect, _) = peer([category.train[0], category.test[-1].path])
    assert known < 0.05 * defect


@with_anomalib
def test_a_fit_is_kept_and_read_back_as_it_was(patchcore, category, monkeypatch):
    first, work = patchcore
    monkeypatch.setattr(predict, "_fit", lambda *_: pytest.fail("fitted again"))
    again = peer_predictor("patchcore", category, work=work, size=SIZE, coreset=1.0)
    ((score, _),) = again(category.train[4:5])
    assert again.threshold == first.threshold == pytest.approx(score)
    again._module.model.num_neighbors = first._module.model.num_neighbors
    path = [category.test[-1].path]
    (score, anomaly_map), (score_again, map_again) = next(first(path)), next(again(path))
    assert score_again == score
    assert np.array_equal(map_again, anomaly_map)
    assert again.provenance == first.provenance
    other = peer_predictor("patchcore", category, work=work, size=SIZE, coreset=1.0, false_alarm_rate=0.6)
    assert other.provenance["calibration"]["false_alarm_rate"] == 0.6  # and nothing is fitted again
    assert len(first.provenance["fitted_sha256"]) == 64


@with_anomalib
def test_a_broken_picture_is_a_sentence_and_the_others_are_judged(patchcore, category, tmp_path):
    peer, _ = patchcore
    (tmp_path / "broken.png").write_bytes(b"\x89PNG")
    paths = [category.test[0].path, tmp_path / "broken.png", category.test[1].path]
    first, broken, second = peer.predictions(paths)
    assert "broken.png" in broken
    assert [first.score, second.score] == [score for score, _ in peer([paths[0], paths[2]])]
    assert first.ms > 0


@pytest.mark.parametrize(("steps", "said"), [(3, True), (700, False)])
def test_a_shorter_fit_than_the_published_one_is_told(steps, said):
    peer = predict.PeerPredictor(
        "draem", torch.nn.Identity(), PeerOptions(SIZE), {"steps": steps, "published_steps": 700}
    )
    assert peer.notes == (("DRAEM was fitted for 3 of its 700 published steps: it can do better",) if said else ())
    assert predict.PeerPredictor("padim", torch.nn.Identity(), PeerOptions(SIZE), {}).notes == ()


@with_anomalib
def test_an_image_gives_the_same_beside_others(patchcore, category):
    peer, _ = patchcore
    paths = [sample.path for sample in category.test]
    together = [score for score, _ in peer(paths)]
    assert [next(peer([path]))[0] for path in paths] == together


@with_anomalib
@pytest.mark.slow
def test_a_fit_that_was_cut_off_goes_on(category, tmp_path, monkeypatch):
    from datetime import timedelta

    import anomalib.models

    step, calls = anomalib.models.Stfpm.training_step, []

    def cut_off(module, *args, **kwargs):
        calls.append(module)
        if len(calls) == 4:
            raise RuntimeError("the power went")
        return step(module, *args, **kwargs)

    monkeypatch.setattr(fitting, "SAVE_EVERY", timedelta(microseconds=1))
    monkeypatch.setattr(anomalib.models.Stfpm, "training_step", cut_off)
    few = replace(category, train=category.train[:2])
    with pytest.raises(RuntimeError, match="the power went"):
        peer_predictor("stfpm", few, work=tmp_path, size=(64, 64), steps=5)
    calls[:] = [None] * 10
    peer = peer_predictor("stfpm", few, work=tmp_path, size=(64, 64), steps=5)
    assert peer.provenance["resumed"] is True
    assert peer.provenance["steps"] == 5
    assert peer.provenance["published_steps"] == 100
    assert len(calls) - 10 < 5
    assert not list(tmp_path.glob("*.unfinished"))


@with_anomalib
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(PEERS) - {"patchcore", "efficientad"}))
def test_every_detector_fits_offline(name, category, tmp_path):
    backbone, weights = "efficientnet_lite0", None
    if PEERS[name].only:
        backbone, weights = "resnet18", tmp_path / "resnet18.pth"
        torch.save(timm.create_model("resnet18", pretrained=False).state_dict(), weights)
    size = (max(64, PEERS[name].least),) * 2
    options = {"size": size, "steps": 2, "backbone": backbone, "backbone_weights": weights}
    peer = peer_predictor(name, category, work=tmp_path / "work", **options)
    found = list(peer([sample.path for sample in category.test]))
    assert [anomaly_map.shape for _, anomaly_map in found] == [size] * 4
    assert all(np.isfinite(score) and np.isfinite(anomaly_map).all() for score, anomaly_map in found)
