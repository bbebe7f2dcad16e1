"""Manifests survive a round trip, and whatever is wrong with a bundle is one sentence with the file in it."""

import hashlib
import json
import re
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mdps.runtime.atomic import new_folder
from mdps.runtime.calibration import Calibration
from mdps.runtime.errors import BundleError
from mdps.runtime.graphs import GraphEntry
from mdps.runtime.manifest import (
    FILE_NAME,
    SCHEMA_VERSION,
    CheckpointEntry,
    FileEntry,
    Manifest,
    hash_files,
    migrate,
)
from mdps.runtime.preprocessing import Preprocessing
from mdps.runtime.schedule import NoiseSchedule
from mdps.runtime.scope import Scope
from mdps.runtime.settings import paper_settings
from mdps.runtime.tiles import Tiling

CALIBRATION = Calibration(0.5, 0.05, 0.05, 20, 0.0, 1.5, 0.0, 1.25, 1, 0)


@pytest.fixture
def bundle(tmp_path):
    folder = tmp_path / "a bündle"
    folder.mkdir()
    (folder / "score.onnx").write_bytes(b"graph")
    (folder / "denoiser.weights").write_bytes(b"weights" * 100)
    Manifest(
        schema_version=SCHEMA_VERSION,
        name="bottle",
        settings=paper_settings((8, 8)),
        precision="fp32",
        network={"base": 32, "multipliers": [1, 2]},
        schedule=NoiseSchedule.linear(),
        prediction="eps",
        preprocessing=Preprocessing((8, 8)),
        calibrations={"default": CALIBRATION},
        files=hash_files(folder),
        graphs={"score": GraphEntry("score.onnx")},
        plans=(),
        versions={"mdps": "0.1.0"},
        parity={"worst": 1e-6},
        checkpoint=CheckpointEntry("bottle.pt", "0" * 64),
        guidance_backend="onnx",
    ).write(folder)
    return folder


def spoil(folder, change):
    path = folder / FILE_NAME
    obj = json.loads(path.read_text())
    change(obj)
    path.write_text(json.dumps(obj))


def test_round_trip(bundle):
    manifest = Manifest.read(bundle)
    text = (bundle / FILE_NAME).read_bytes()
    manifest.write(bundle)
    assert (bundle / FILE_NAME).read_bytes() == text
    assert Manifest.read(bundle) == manifest
    assert list(json.loads(text))[:3] == ["schema_version", "name", "settings"]
    assert sorted(path.name for path in bundle.iterdir()) == ["denoiser.weights", FILE_NAME, "score.onnx"]


def test_hashes_are_those_of_the_files(bundle):
    files = hash_files(bundle)
    assert set(files) == {"score.onnx", "denoiser.weights"}
    for name, entry in files.items():
        content = (bundle / name).read_bytes()
        assert entry == FileEntry(hashlib.sha256(content).hexdigest(), len(content))


def test_calibrations_are_added_by_product(bundle):
    manifest = Manifest.read(bundle)
    manifest.with_calibration("cap", replace(CALIBRATION, threshold=0.75)).write(bundle)
    again = Manifest.read(bundle)
    assert list(again.calibrations) == ["default", "cap"]
    assert again.calibrations["default"] == CALIBRATION
    assert again.calibrations["cap"].threshold == 0.75


def test_a_missing_file_is_named(bundle):
    (bundle / "denoiser.weights").unlink()
    with pytest.raises(BundleError, match=r"denoiser\.weights is missing.*copy the whole bundle"):
        Manifest.read(bundle)


def test_a_truncated_file_is_named(bundle):
    (bundle / "denoiser.weights").write_bytes(b"weights")
    with pytest.raises(BundleError, match=r"denoiser\.weights has 7 bytes where the manifest says 700"):
        Manifest.read(bundle)


def test_one_flipped_bit_is_found(bundle):
    content = bytearray((bundle / "denoiser.weights").read_bytes())
    content[350] ^= 1
    (bundle / "denoiser.weights").write_bytes(content)
    with pytest.raises(BundleError, match=r"denoiser\.weights is not the file.*SHA-256"):
        Manifest.read(bundle)
    assert Manifest.read(bundle, verify=False).name == "bottle"


def test_other_files_beside_the_bundle_are_left_alone(bundle):
    (bundle / "engine.plan").write_bytes(b"cache")
    Manifest.read(bundle)


@pytest.mark.parametrize(
    "name",
    ["../secret", "/etc/passwd", "a/b", "a\\b", "..", ".", "", "C:x", "C:\\x", "a\0b", "..\\x", "x:stream", FILE_NAME],
)
def test_file_names_that_leave_the_folder_are_refused(bundle, name):
    entry = {"sha256": "0" * 64, "bytes": 1}
    spoil(bundle, lambda obj: obj["files"].update({name: entry}))
    with pytest.raises(BundleError, match=r"plain name|own hash"):
        Manifest.read(bundle)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda o: o.pop("graphs"), "lacks the key 'graphs': make the bundle again"),
        (lambda o: o.update(extra=1), "unknown key 'extra'"),
        (lambda o: o["settings"]["sampler"].pop("seed"), r"settings\.sampler lacks the key 'seed'"),
        (lambda o: o.update(prediction="noise"), r"prediction should be one of eps, v, x0"),
        (lambda o: o["graphs"]["score"].update(file="other.onnx"), "not among the files"),
        (lambda o: o["graphs"]["score"].update(session="plan"), r"session should be one of ort, traced"),
        (lambda o: o["files"]["score.onnx"].update(sha256="X"), "64 hexadecimal"),
        (lambda o: o["files"]["score.onnx"].update(bytes=-1), "not be negative"),
        (lambda o: o["calibrations"]["default"].update(threshold=None), r"default\.threshold should be a number"),
        (lambda o: o["calibrations"]["default"].update(mask_low=9.0), "mask_low"),
        (lambda o: o.update(schema_version=SCHEMA_VERSION + 1), f"schema version {SCHEMA_VERSION + 1}.*upgrade mdps"),
        (lambda o: o.update(schema_version=0), "too old to migrate"),
        (lambda o: o.update(schema_version=True), "no schema_version"),
        (lambda o: o.pop("schema_version"), "no schema_version"),
        (lambda o: o["schedule"].update(kind="x"), r"schedule\.kind"),
        (lambda o: o["calibrations"]["default"].update(threshold=float("nan")), "NaN is no number"),
    ],
)
def test_a_wrong_manifest_says_what_is_wrong(bundle, change, sentence):
    spoil(bundle, change)
    with pytest.raises(BundleError, match=sentence) as caught:
        Manifest.read(bundle)
    assert FILE_NAME in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"schema_version": 1}'])
def test_a_damaged_manifest_is_a_sentence(bundle, content):
    (bundle / FILE_NAME).write_bytes(content)
    with pytest.raises(BundleError, match=r"manifest\.json"):
        Manifest.read(bundle)


def test_a_huge_manifest_is_not_read(bundle):
    with (bundle / FILE_NAME).open("ab") as file:
        file.truncate(17 * 2**20)
    with pytest.raises(BundleError, match="larger than"):
        Manifest.read(bundle)


def test_what_is_no_bundle(bundle):
    with pytest.raises(BundleError, match="no such folder"):
        Manifest.read(bundle / "absent")
    (bundle / FILE_NAME).unlink()
    with pytest.raises(BundleError, match=r"it has no manifest\.json"):
        Manifest.read(bundle)


def test_a_leftover_of_an_export_is_not_loadable(bundle):
    with new_folder(bundle.parent / "new") as folder:
        for path in bundle.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        with pytest.raises(BundleError, match="leftover"):
            Manifest.read(folder)
    Manifest.read(bundle.parent / "new")


def test_older_versions_migrate_step_by_step():
    table = {
        1: lambda obj: {**obj, "title": obj["name"]},
        2: lambda obj: {key: value for key, value in obj.items() if key != "name"},
    }
    old = {"schema_version": 1, "name": "x"}
    assert migrate(old, "m", table, 3) == {"schema_version": 3, "title": "x"}
    assert old == {"schema_version": 1, "name": "x"}
    assert migrate({**old, "schema_version": 3}, "m", table, 3)["name"] == "x"
    with pytest.raises(BundleError, match="version 0, too old"):
        migrate({"schema_version": 0}, "m", table, 3)


PLAN = {
    "role": "score", "file": "score.onnx", "engine": "tensorrt", "version": "10", "compute_capabilities": ["8.9"],
    "precision": "fp32", "graph": "score.onnx", "key": "k", "batch": [1, 1, 8], "samples": None, "types": {},
    "inspected": "network",
}  # fmt: skip


def of_schema_4(obj):
    """The precision stood among the notes on the network, the plans in the parity report, their engine as `backend`."""
    obj["schema_version"] = 4
    obj["network"]["precision"] = obj.pop("precision")
    plans = [dict(plan, backend=plan["engine"]) for plan in obj.pop("plans")]
    obj["parity"]["plans"] = [{key: value for key, value in plan.items() if key != "engine"} for plan in plans]


def test_schema_5_gets_the_defaults_of_what_it_did_not_know(bundle):
    now = Manifest.read(bundle)

    def older(obj):
        obj["schema_version"] = 5
        del obj["tiles"], obj["scopes"], obj["tunings"], obj["settings"]["sampler"]["antithetic"]
        for key in ("first_pass", "masked_pass"):
            del obj["settings"]["sampler"][key]["target"]
        for calibration in obj["calibrations"].values():
            del calibration["fitness"], calibration["tuned"]

    spoil(bundle, older)
    assert Manifest.read(bundle) == now


def test_schema_6_has_no_tiles_and_no_scopes(bundle):
    now = Manifest.read(bundle)

    def older(obj):
        obj["schema_version"] = 6
        del obj["tiles"], obj["scopes"]

    spoil(bundle, older)
    assert Manifest.read(bundle) == now
    assert (now.tiles, now.scope("default")) == (None, Scope())


def test_a_scope_comes_back_and_a_wrong_one_is_a_sentence(bundle):
    replace(Manifest.read(bundle), scopes={"blue": Scope(mm_per_pixel=0.05)}).write(bundle)
    assert Manifest.read(bundle).scope("blue").mm_per_pixel == 0.05
    spoil(bundle, lambda obj: obj["scopes"]["blue"].update(mm_per_pixel=0.0))
    with pytest.raises(BundleError, match=r"scopes\.blue: mm_per_pixel is 0.0; it must be positive"):
        Manifest.read(bundle)


def test_tiles_are_kept(bundle):
    tiled = replace(Manifest.read(bundle), tiles=Tiling(0.25, 0.5))
    tiled.write(bundle)
    assert Manifest.read(bundle) == tiled


@pytest.mark.parametrize(
    ("tiles", "sentence"),
    [
        ({"scale": 0, "overlap": 0.5}, "tiles: scale 0.0 should lie above 0"),
        ({"scale": 1.5, "overlap": 0.5}, "scale 1.5 should lie above 0 and be at most 1"),
        ({"scale": 0.5, "overlap": 0.95}, "overlap 0.95 should lie between 0 and 0.9"),
        ({"scale": 0.5}, "lacks the key 'overlap'"),
    ],
)
def test_a_wrong_tiling_is_a_sentence(bundle, tiles, sentence):
    spoil(bundle, lambda obj: obj.update(tiles=tiles))
    with pytest.raises(BundleError, match=sentence):
        Manifest.read(bundle)


def test_tiles_show_all_of_a_photograph(bundle):
    spoil(bundle, lambda obj: obj.update(tiles={"scale": 0.5, "overlap": 0.5}))
    spoil(bundle, lambda obj: obj["preprocessing"].update(crop="input", crop_size=4))
    with pytest.raises(BundleError, match="crop should be none"):
        Manifest.read(bundle)


def test_a_bundle_of_the_schema_before_means_what_it_meant(bundle):
    spoil(bundle, lambda obj: obj.update(precision="fp16", plans=[PLAN]))
    now = Manifest.read(bundle)
    assert (now.precision, [plan.engine for plan in now.plans]) == ("fp16", ["tensorrt"])
    spoil(bundle, of_schema_4)
    assert Manifest.read(bundle) == now
    spoil(bundle, lambda obj: (obj["network"].pop("precision"), obj["parity"].pop("plans")))
    assert (Manifest.read(bundle).precision, Manifest.read(bundle).plans) == ("fp32", ())


@pytest.mark.parametrize(
    ("where", "value", "sentence"),
    [
        ("network", {"precision": "fp8"}, "precision should be one of fp32"),
        ("network", None, "network should be"),
        ("parity", [], "parity should be"),
        ("parity", {"plans": 3}, "plans should be"),
        ("parity", {"plans": [3]}, r"plans\[0\]"),
        ("parity", {"plans": [{"backend": "tensorrt"}]}, r"plans\[0\]"),
    ],
)
def test_a_damaged_bundle_of_the_schema_before_is_a_sentence(bundle, where, value, sentence):
    spoil(bundle, of_schema_4)
    spoil(bundle, lambda obj: obj.update({where: value}))
    with pytest.raises(BundleError, match=sentence):
        Manifest.read(bundle)


@pytest.mark.parametrize("version", [1, 2, 3])
def test_bundles_from_before_the_first_release_are_refused_with_what_makes_them_anew(bundle, version):
    spoil(bundle, lambda obj: obj.update(schema_version=version))
    command = rf"`mdps export --ckpt bottle\.pt --out {re.escape(str(bundle))} --force`"
    with pytest.raises(BundleError, match=f"schema version {version}, too old to migrate: run {command}"):
        Manifest.read(bundle)
    spoil(bundle, lambda obj: obj.pop("checkpoint"))
    with pytest.raises(BundleError, match="--ckpt CHECKPOINT --out"):
        Manifest.read(bundle)


def test_a_plan_is_among_the_files(bundle):
    spoil(bundle, lambda obj: obj.update(plans=[PLAN | {"file": "absent.plan"}]))
    with pytest.raises(BundleError, match=r"the plan 'absent\.plan' is not among the files"):
        Manifest.read(bundle)


def test_early_exits_and_their_scores_come_back_from_the_file(bundle):
    quantiles = tuple(0.01 * k for k in range(19))
    manifest = Manifest.read(bundle)
    sampler = replace(manifest.settings.sampler, early_exit=0.45)
    calibration = replace(CALIBRATION, first_quantiles=quantiles)
    changed = replace(manifest, settings=replace(manifest.settings, sampler=sampler))
    changed.with_calibration("blue", calibration).write(bundle)
    again = Manifest.read(bundle)
    assert again.settings.sampler.early_exit == 0.45
    assert again.calibrations == {"default": CALIBRATION, "blue": calibration}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), value=JSON)
def test_any_value_anywhere_is_accepted_or_a_bundle_error(bundle, data, value):
    obj = Manifest.read(bundle, verify=False).to_json()
    inner = obj
    while True:
        key = data.draw(st.sampled_from(sorted(inner)))
        if not (isinstance(inner[key], dict) and inner[key]) or data.draw(st.booleans()):
            break
        inner = inner[key]
    inner[key] = value
    with suppress(BundleError):
        Manifest.from_json(migrate(obj, "m"), "m")
