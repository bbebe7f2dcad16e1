"""The two modes, and settings that survive JSON or say what is wrong with it."""

import csv
import json
from dataclasses import FrozenInstanceError, replace

import pytest

from mdps.runtime.errors import BundleError, UsageError
from mdps.runtime.settings import (
    MaskSettings,
    PassSettings,
    Settings,
    paper_settings,
    reference_settings,
    top_pixels,
)

BOTTLE = {"eta": 7, "guidance_mask_pass": 50, "guidance": 100, "mask_steps": 200, "test_steps": 200, "skip": 20}
REFERENCE = reference_settings(**BOTTLE, mask_lambda=0.12)


def test_paper_defaults():
    settings = paper_settings()
    expected = PassSettings(noise_level=200, guidance_scale=100.0, steps=10)
    assert settings.sampler.first_pass == settings.sampler.masked_pass == expected
    sampler = settings.sampler
    assert (sampler.time_index, sampler.mask_rule, sampler.guidance_norm) == ("paper", "blend", "l2")
    assert settings.mask == MaskSettings(0.1, "per-image")
    assert settings.score.stages == (1, 2, 3)
    assert (settings.score.eta, settings.score.pixel, settings.score.smoothing_sigma) == (0.3, "l1", 0.0)
    assert (settings.score.image_score, settings.score.top) == ("top_mean", 500)


@pytest.mark.parametrize(
    ("size", "top"), [((256, 256), 500), ((224, 224), 500), ((64, 64), 31), ((4, 4), 1), ((128, 256), 250)]
)
def test_top_pixels_scale_with_the_area_except_at_the_papers_sizes(size, top):
    assert top_pixels(*size) == top
    assert paper_settings(size).score.top == top


def test_every_preset_of_the_authors_becomes_settings(shared):
    with (shared / "reference-presets.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 18
    for row in rows:
        numbers = {key: float(row[key]) for key in ("eta", "guidance_mask_pass", "guidance", "mask_lambda")}
        numbers |= {key: int(row[key]) for key in ("mask_steps", "test_steps", "skip")}
        sampler = reference_settings(**numbers).sampler
        last = PassSettings(numbers["test_steps"], numbers["guidance"], skip=numbers["skip"])
        assert sampler.passes[-1] == last
        assert len(sampler.passes) == (2 if numbers["mask_steps"] else 1)
        if numbers["mask_steps"]:
            first = PassSettings(numbers["mask_steps"], numbers["guidance_mask_pass"], skip=numbers["skip"])
            assert sampler.first_pass == first


def test_reference_choices():
    assert REFERENCE.mask.range == "frozen"
    score = REFERENCE.score
    assert (score.stages, score.pool, score.align_corners, score.pixel) == ((2, 3), 3, True, "scaled")
    assert (score.smoothing_sigma, score.smoothing_kernel, score.map_scale) == (4.0, 33, 0.5)
    assert (score.image_score, score.top, score.feature_size) == ("softmax_top_sum", 500, None)
    assert REFERENCE.sampler.mask_rule == "replace"


@pytest.mark.parametrize("settings", [paper_settings(), REFERENCE, reference_settings(2, 0, 100, 0, 250, 20, 0.15)])
def test_json_round_trip(settings):
    text = json.dumps(settings.to_json())
    assert Settings.from_json(json.loads(text)) == settings
    assert json.dumps(Settings.from_json(json.loads(text)).to_json()) == text


def _spoil(path, value):
    obj = json.loads(json.dumps(paper_settings().to_json()))
    *folders, last = path
    inner = obj
    for folder in folders:
        inner = inner[folder]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return obj


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        (["sampler", "seed"], ..., r"S\.sampler lacks the key 'seed'"),
        (["sampler", "sead"], 1, r"S\.sampler has the unknown key 'sead'"),
        (["sampler", "seed"], "1", r"S\.sampler\.seed should be a whole number, found \"1\""),
        (["sampler", "seed"], True, r"S\.sampler\.seed should be a whole number"),
        (["sampler", "seed"], 1.5, r"S\.sampler\.seed should be a whole number"),
        (["sampler", "seed"], -1, "seed -1 should lie"),
        (["sampler", "eta_ddim"], None, r"S\.sampler\.eta_ddim should be a number, found null"),
        (["sampler", "eta_ddim"], float("inf"), "finite"),
        (["sampler", "eta_ddim"], 1.5, "between 0 and 1"),
        (["sampler", "mask_rule"], "mix", r"S\.sampler\.mask_rule should be one of blend, replace, inpaint"),
        (["sampler", "noise"], "perlin", r"S\.sampler\.noise should be one of gaussian, simplex"),
        (["sampler", "masked_pass", "resamples"], 0, "resamples 0 should lie between 1"),
        (["sampler", "first_pass", "start"], "stitched", "nothing before it to stitch from"),
        (["sampler", "first_pass", "target"], "previous", "nothing before it to stitch from or to be guided by"),
        (["sampler", "antithetic"], True, "come in pairs: ask for an even number"),
        (["sampler", "masked_pass"], [], r"S\.sampler\.masked_pass should be an object"),
        (["sampler", "time_index"], "reference", "reference time index takes skip"),
        (["score", "stages"], [1, "2"], r"S\.score\.stages\[1\] should be a whole number"),
        (["score", "stages"], "123", "should be a list"),
        (["score", "stages"], [0], "counted from 1"),
        (["score", "pool"], 2, "one of 0, 3"),
        (["score", "smoothing_kernel"], 4, "should be odd"),
        (["score", "align_corners"], 0, "true or false"),
        (["mask"], 3, r"S\.mask should be an object with keys, found 3"),
        (["mask", "mask_lambda"], 1.2, "between 0 and 1"),
    ],
)
def test_a_wrong_value_is_a_sentence_that_names_its_key(path, value, sentence):
    with pytest.raises(BundleError, match=sentence):
        Settings.from_json(_spoil(path, value), "S")


def test_whole_numbers_are_accepted_as_numbers():
    settings = Settings.from_json(_spoil(["sampler", "eta_ddim"], 1))
    assert isinstance(settings.sampler.eta_ddim, float)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"noise_level": 0, "steps": 1}, "at least 1"),
        ({"noise_level": 20, "steps": 0}, "at least 1"),
        ({"noise_level": 20}, "either steps or skip"),
        ({"noise_level": 20, "steps": 2, "skip": 10}, "either steps or skip"),
        ({"noise_level": 20, "steps": 2, "guidance_scale": -1.0}, "not be negative"),
        ({"noise_level": 20, "steps": 2, "start": "stitched", "target": "previous"}, "it cannot be stitched"),
    ],
)
def test_passes_are_checked(fields, sentence):
    with pytest.raises(UsageError, match=sentence):
        PassSettings(**{"guidance_scale": 1.0, **fields})


def test_ablations_are_settings():
    settings = paper_settings()
    replace(settings.sampler, masked_pass=None)
    replace(settings.score, stages=())
    replace(settings.score, eta=0.0)
    with pytest.raises(UsageError, match="nothing is left to score"):
        replace(settings.score, stages=(), eta=0.0)
    with pytest.raises(UsageError, match="needs feature stages"):
        replace(REFERENCE.score, stages=())


def test_settings_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        paper_settings().sampler.seed = 2
