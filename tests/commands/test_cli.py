"""The command line: exit codes, streams, sentences; what the commands call is faked or real where it is quick."""

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import pytest
from PIL import Image

import mdps.runtime
import mdps.serving.calibrate  # before a fixture fakes what it imports
from mdps import __version__
from mdps.cli import cli
from mdps.commands.export import export
from mdps.commands.terminal import needs, run
from mdps.runtime import BundleError, ImageError, LoadOptions, MdpsError, Result
from mdps.runtime.manifest import Manifest
from mdps.runtime.preprocessing import Preprocessing
from mdps.serving.folder import TABLE_HEADER

COMMANDS = ("export", "predict", "calibrate", "inspect", "train", "doctor", "demo", "bench")


def mdps_process(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mdps.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


class FakeDetector:
    """Scores by brightness; has what a report asks for."""

    calibration, doubt, tiles = None, "", None
    manifest = SimpleNamespace(name="fake")
    preprocessing = Preprocessing((16, 16))
    provenance = {"bundle": "fake", "settings": {"samples": 1}}  # noqa: RUF012 - never changed

    def __enter__(self) -> "FakeDetector":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def batch(self, images: Sequence[Image.Image]) -> list[Result]:
        return [self._judge(np.asarray(image, np.float32) / 255) for image in images]

    def _judge(self, pixels: np.ndarray) -> Result:
        image = pixels.transpose(2, 0, 1) * 2 - 1
        score = float(pixels.mean())
        grey = pixels.mean(axis=2)
        return Result(score, 0.5, "fail" if score > 0.5 else "pass", grey, grey > 0.5, image, image, {"total": 1.0})


@pytest.fixture
def line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A fake bundle, and a folder with a good, a bad and a broken image."""
    calls: list[tuple[Path, LoadOptions]] = []

    def load(path: Path, options: LoadOptions) -> FakeDetector:
        calls.append((path, options))
        return FakeDetector()

    monkeypatch.setattr(mdps.runtime, "load", load)
    bundle, images = tmp_path / "bundle", tmp_path / "images"
    for folder in (bundle, images):
        folder.mkdir()
    (bundle / "manifest.json").write_text("{}")
    for name, level in (("good", 20), ("scratched", 220)):
        Image.new("RGB", (16, 16), (level, level, level)).save(images / f"{name}.png")
    (images / "torn.png").write_bytes(b"\x89PNG\r\n")
    return SimpleNamespace(bundle=str(bundle), images=str(images), out=tmp_path / "out", calls=calls)


# Help


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)])
def test_every_command_has_help(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(cli, [*command, "--help"]) == 0
    assert "Usage: mdps" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["export", "predict", "calibrate", "inspect", "train", "demo", "bench"])
def test_commands_with_arguments_show_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(cli, [command, "-h"])
    assert f"Examples:\n    mdps {command}" in capsys.readouterr().out


def test_help_is_quick_because_it_imports_nothing_heavy() -> None:
    code = (
        "import sys; from mdps.cli import cli; from mdps.commands.terminal import run; run(cli, ['--help']); "
        "print(sorted({'numpy', 'PIL', 'torch', 'onnxruntime'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.endswith(
        "[]\n"
    )

    def seconds() -> float:
        """Processor time, which neighbours on a busy machine do not lengthen as they do the clock's."""
        before = os.times()
        mdps_process("--help")
        after = os.times()
        return sum(after[2:4]) - sum(before[2:4])

    assert min(seconds() for _ in range(5)) < 0.3


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(cli, ["--version"]) == 0
    assert __version__ in capsys.readouterr().out


# Predict


def test_predict_as_json_is_lines_on_stdout_and_messages_on_stderr(
    line: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(cli, ["predict", line.bundle, line.images, "--out", str(line.out), "--json"]) == 3
    streams = capsys.readouterr()
    rows = [json.loads(text) for text in streams.out.splitlines()]
    assert [row["verdict"] for row in rows] == ["pass", "fail", "error"]
    assert all(list(row) == TABLE_HEADER.strip().split(",") for row in rows)
    assert "torn.png" in streams.err
    assert "2 of 3 images judged" in streams.err
    assert streams.out == (line.out / "results.jsonl").read_text()


def test_predict_for_people_says_verdicts_and_where_the_report_is(
    line: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(cli, ["predict", line.bundle, line.images, "--out", str(line.out)]) == 3
    out = capsys.readouterr().out
    assert "pass  0.078431" in out
    assert "fail  0.86275" in out
    assert str(line.out / "report.html") in out
    report = (line.out / "report.html").read_text()
    assert "3 images: " in report
    assert "settings.samples" in report


def test_predict_leaves_with_0_when_all_images_were_judged(line: SimpleNamespace) -> None:
    assert run(cli, ["predict", line.bundle, f"{line.images}/good.png", "--out", str(line.out)]) == 0


def save_12_bits(path: Path) -> None:
    """A picture of a 12-bit camera in a 16-bit PNG: its white is 4095."""
    Image.fromarray(np.full((16, 16), 4000, np.uint16)).save(path)


def test_predict_says_first_what_is_odd_about_the_images(
    line: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(cli, ["predict", line.bundle, f"{line.images}/good.png", "--out", str(line.out)]) == 0
    assert capsys.readouterr().err == ""
    save_12_bits(Path(line.images, "deep.png"))
    for name, size in (("tiny", (4, 4)), ("wide", (64, 16))):
        Image.new("RGB", size).save(Path(line.images, f"{name}.png"))
    assert run(cli, ["predict", line.bundle, line.images, "--out", str(line.out.with_name("more"))]) == 3
    said = [text for text in capsys.readouterr().err.splitlines() if text.startswith("Warning: ")]
    assert len(said) == 3
    assert "1 of 5 images has more than 8 bits (such as deep.png)" in said[0]  # torn.png says nothing of itself
    assert "1 of 5 images is much smaller than the 16 x 16 it is enlarged to (such as tiny.png, 4 x 4)" in said[1]
    assert "distorts" in said[2]


def test_predict_of_a_broken_image_alone_is_3_as_its_help_says(
    line: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(cli, ["predict", line.bundle, f"{line.images}/torn.png", "--out", str(line.out)]) == 3
    assert (line.out / "report.html").is_file()
    (said,) = capsys.readouterr().err.splitlines()
    assert said.count("torn.png") == 1
    run(cli, ["predict", "--help"])
    assert "3 some images, or all, could not be judged" in capsys.readouterr().out


def test_predict_asks_before_it_replaces_results(line: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["predict", line.bundle, f"{line.images}/good.png", "--out", str(line.out)]
    assert [run(cli, command), run(cli, command), run(cli, [*command, "--force"])] == [0, 2, 0]
    assert "holds results of an earlier run (results.jsonl): " in capsys.readouterr().err
    assert len(line.calls) == 2  # no bundle is loaded in vain


def test_predict_hands_its_options_on(line: SimpleNamespace) -> None:
    options = ["--samples", "5", "--threads", "2", "--product", "blue", "--scores-only", "--batch", "20"]
    options += ["--engine", "onnxruntime-cuda", "--early-exit", "0.5", "--device", "1"]
    expected = LoadOptions(
        product="blue", threads=2, engine="onnxruntime-cuda", samples=5, calibrated=False, early_exit=0.5, device="1",
        max_batch=20,
    )  # fmt: skip
    run(cli, ["predict", line.bundle, line.images, "--out", str(line.out), *options])
    assert line.calls == [(Path(line.bundle), expected)]


# With a real bundle


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """A folder of twenty noisy images."""
    rng = np.random.default_rng(0)
    (tmp_path / "good").mkdir()
    for index in range(20):
        pixels = rng.integers(90, 160, (32, 32, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / "good" / f"{index:02d}.png")
    return tmp_path / "good"


def test_calibrate_then_predict_fails_as_many_good_parts_as_it_said(
    tiny_bundle: Path, good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(tiny_bundle, bundle)
    refused = ["predict", str(bundle), str(good), "--out", str(tmp_path / "out"), "--json"]
    assert run(cli, refused) == 2
    assert "mdps calibrate" in capsys.readouterr().err
    assert run(cli, ["calibrate", str(bundle), str(good), "--false-alarm-rate", "0.1", "--json"]) == 0
    calibration = json.loads(capsys.readouterr().out)
    assert calibration["images"] == 20
    assert run(cli, refused) == 2
    assert "does not see defects on these parts" in capsys.readouterr().err  # a random network
    assert run(cli, [*refused, "--force"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["threshold"] for row in rows} == {calibration["threshold"]}
    assert sum(row["verdict"] == "fail" for row in rows) == 1  # the 19th of 20 scores is the threshold
    manifest_hash = hashlib.sha256((bundle / "manifest.json").read_bytes()).hexdigest()
    assert manifest_hash in (tmp_path / "out" / "report.html").read_text()


def test_what_is_wrong_with_a_calibration_is_said_in_a_line_each(
    tiny_bundle: Path, good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(tiny_bundle, bundle)
    assert run(cli, ["calibrate", str(bundle), str(good)]) == 0
    streams = capsys.readouterr()
    few, untrained, blind = streams.err.splitlines()  # and no progress, for this is no terminal
    assert few.startswith("Warning: 20 good images can promise")
    assert untrained.startswith("Warning: the denoiser does not know these parts")
    assert blind.startswith("Warning: this detector does not see defects on these parts: it finds ")
    threshold, count, rate, heading, *found = streams.out.splitlines()
    assert threshold.startswith("threshold: ")
    assert "replaces" not in threshold
    assert count == "calibrated on: 20 good images"
    assert rate.startswith("false alarms: at most 4.76 % of further good parts, which so few images can promise; 1 % ")
    assert heading == "found of defects put into good images:"
    fitness = Manifest.read(bundle).calibrations["default"].fitness
    assert fitness is not None
    assert found == [f"  {name}: {words}" for name, words in fitness.summary.items()]
    assert {kind.shown for kind in fitness.kinds.values()} == {2}

    before = Manifest.read(bundle).calibrations["default"].threshold
    for extra in sorted(good.iterdir())[1:]:
        extra.unlink()
    command = ["calibrate", str(bundle), str(good), "--false-alarm-rate", "0.5", "--samples", "1"]
    assert run(cli, command) == 0
    threshold, count, rate, *_ = capsys.readouterr().out.splitlines()
    assert threshold.endswith(f" (replaces {before:.5g}, of 20 good images)")
    assert count == "calibrated on: 1 good image"
    assert rate == "false alarms: at most 50 % of further good parts"
    assert run(cli, ["calibrate", str(bundle), str(good)]) == 0
    assert capsys.readouterr().err.startswith("Warning: 1 good image can promise")


def test_calibrating_on_images_of_more_than_8_bits_warns(
    tiny_bundle: Path, good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(tiny_bundle, bundle)
    save_12_bits(good / "deep.png")
    scaled = ["--set", "mm-per-pixel=0.05"]
    assert run(cli, ["calibrate", str(bundle), str(good), "--false-alarm-rate", "0.1", *scaled]) == 0
    assert Manifest.read(bundle).scope("default").mm_per_pixel == 0.05
    assert "1 of 21 images has more than 8 bits (such as deep.png)" in capsys.readouterr().err


def test_a_bad_image_among_the_good_ones_is_not_left_out_silently(
    tiny_bundle: Path, good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(tiny_bundle, bundle)
    before = (bundle / "manifest.json").read_bytes()
    torn = [good / f"{index:02d}.png" for index in range(4, 11)]
    for path in torn:
        path.write_bytes(b"torn")
    assert run(cli, ["calibrate", str(bundle), str(good)]) == 3
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("Error: 7 of 20 images cannot be read, and a calibration uses all of them or none: ")
    assert said.endswith("; and 2 more")
    assert [path.name in said for path in torn] == [True] * 5 + [False] * 2
    assert (bundle / "manifest.json").read_bytes() == before


def test_a_bundle_that_cannot_be_written_is_told_before_anything_is_computed(
    tiny_bundle: Path, good: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(**_: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    monkeypatch.setattr("mdps.serving.calibrate.load_bundle", lambda *_, **__: pytest.fail("computes in vain"))
    assert run(cli, ["calibrate", str(tiny_bundle), str(good)]) == 1
    said = f"Error: {tiny_bundle / 'manifest.json'} cannot be written: Read-only file system"
    assert capsys.readouterr().err.startswith(said)


def test_inspect_says_what_a_bundle_is(tiny_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(cli, ["inspect", str(tiny_bundle), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["schema_version"] >= 1
    assert run(cli, ["inspect", str(tiny_bundle)]) == 0
    summary, everything = capsys.readouterr().out.split("\n\n")
    assert "guidance_backend: onnx" in everything
    assert len(summary.splitlines()) == 6
    assert summary.endswith(f"calibrated: no, it gives no verdicts yet; next: mdps calibrate {tiny_bundle} GOOD_FOLDER")


def test_inspect_says_first_how_a_bundle_is_calibrated(line_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(cli, ["inspect", str(line_bundle)]) == 0
    threshold = Manifest.read(line_bundle).calibrations["default"].threshold
    assert capsys.readouterr().out.splitlines()[:7] == [
        "bundle: line",
        "images: 16 x 16",
        "method: mdps, as the paper has it",
        "passes: 2",
        "made from: line.safetensors",
        "calibrated:",
        f"  default: threshold {threshold:.5g} of 20 good images, false alarms at most 9.52 % of further good parts",
    ]


def test_inspect_of_a_folder_of_photographs_says_what_it_takes(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(cli, ["inspect", str(good)]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"Error: {good} is neither a bundle (")


# Export


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Record what the export is called with; nothing is exported."""
    import mdps.export

    calls: list[tuple[Any, ...]] = []

    def export_bundle(ckpt: Path, out: Path | None, options: Any, *, force: bool, say: Any) -> Path:
        calls.append((ckpt, out, options, force))
        return Path("made")

    monkeypatch.setattr(mdps.export, "export_bundle", export_bundle)
    return calls


def test_export_with_a_checkpoint_alone_changes_nothing(exported: list[tuple[Any, ...]]) -> None:
    from mdps.export import ExportOptions

    assert run(cli, ["export", "--ckpt", "a.pt"]) == 0
    assert exported == [(Path("a.pt"), None, ExportOptions(), False)]


def test_every_export_option_reaches_the_export(exported: list[tuple[Any, ...]]) -> None:
    from mdps.export import ExportOptions
    from mdps.models.checkpoints import CheckpointOptions
    from mdps.runtime.schedule import NoiseSchedule

    text = (
        "--ckpt a.pt --out b --force --guidance-backend traced --gradient jacobian-free --guidance-norm squared "
        "--guidance-scale 5 --masked-guidance-scale 6 --noise-level 150 --steps 8 --noise simplex "
        "--method ddim --no-mask-pass --mask-lambda 0.2 --mask-range frozen "
        "--samples 3 --seed 7 --backbone resnet18 --backbone-weights w.pth --stages 2,3 --eta 0.5 --pixel squared "
        "--feature-size 96 --smoothing-sigma 1.5 --top 20 "
        "--crop input --crop-size 56 --roi 1 2 30 40 --image-size 64 --scale 0.5 "
        "--set overlap=0.25 --set count-nodes=yes "
        "--num-heads 4 --norm-groups 16 --set new-attention-order=yes --prediction v --schedule cosine"
    )
    assert run(export, text.split()) == 0
    load = CheckpointOptions(64, 4, None, True, NoiseSchedule.cosine(), "v", 16)
    options = ExportOptions(
        guidance_backend="traced", gradient="jacobian-free", guidance_norm="squared", guidance_scale=5.0,
        masked_guidance_scale=6.0, noise_level=150, steps=8, mask_pass=False, samples=3, seed=7, backbone="resnet18",
        backbone_weights=Path("w.pth"), stages=(2, 3), eta=0.5, pixel="squared", noise="simplex", method="ddim",
        feature_size=96, smoothing_sigma=1.5, top=20,
        mask_lambda=0.2, mask_range="frozen", crop="input", crop_size=56, roi=(1, 2, 30, 40), load=load,
        scale=0.5, overlap=0.25, count_nodes=True,
    )  # fmt: skip
    assert exported == [(Path("a.pt"), Path("b"), options, True)]


def test_no_stages_means_pixels_only(exported: list[tuple[Any, ...]]) -> None:
    assert run(cli, ["export", "--ckpt", "a.pt", "--stages", "none", "--preset", "mvtec/bottle"]) == 0
    assert (exported[0][2].stages, exported[0][2].preset) == ((), "mvtec/bottle")


def test_the_export_script_has_its_own_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(export, ["--help"], name="mdps-export") == 0
    assert "Usage: mdps-export [OPTIONS]" in capsys.readouterr().out


# What goes wrong


@pytest.mark.parametrize(
    "arguments",
    [
        ["predict"],
        ["predict", "bundle", "a.png"],
        ["predict", "bundle", "a.png", "--out", "o", "--batch", "0"],
        ["calibrate", "bundle", "good", "--false-alarm-rate", "1"],
        ["predikt"],
        ["train", "good", "--out", "run", "--recipe", "huge"],
        ["export"],
        ["export", "--ckpt", "a.pt", "--mode", "reference"],
        ["export", "--ckpt", "a.pt", "--mode", "paper", "--preset", "mvtec/bottle"],
        ["export", "--ckpt", "a.pt", "--stages", "one"],
        ["export", "--ckpt", "a.pt", "--num-heads", "4", "--num-head-channels", "32"],
    ],
)
def test_wrong_usage_is_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(cli, arguments) == 2
    assert "Error: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["predict", "nowhere", "a.png", "--out", "o"],
        ["calibrate", "nowhere", "nowhere"],
        ["inspect", "nowhere"],
        ["train", "nowhere", "--out", "run"],
        ["export", "--ckpt", "nowhere"],
    ],
)
def test_paths_that_do_not_exist_are_2_and_one_sentence(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(cli, arguments) == 2
    err = capsys.readouterr().err
    last = err.splitlines()[-1]
    assert last.startswith("Error: ")
    assert "nowhere" in last
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def raising(error: BaseException) -> click.Command:
    def body() -> None:
        raise error

    group = click.Group("mdps", params=cli.params)
    group.add_command(click.Command("boom", callback=body))
    return group


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (MdpsError("the disk is full"), 1, "Error: the disk is full\n"),
        (ImageError("a.png is torn"), 3, "Error: a.png is torn\n"),
        (BundleError("b is no bundle"), 2, "Error: b is no bundle\n"),
        (KeyboardInterrupt(), 130, ""),
        (click.Abort(), 130, ""),
    ],
)
def test_errors_become_exit_codes(
    error: BaseException, code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(raising(error), ["boom"]) == code
    assert capsys.readouterr().err.lstrip() == text  # after ^C the cursor goes to a new line


def test_what_nobody_foresaw_is_one_sentence_with_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(raising(ZeroDivisionError("by zero")), ["boom"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("Error: unexpected ZeroDivisionError: by zero; run it again with --traceback")
    assert "Traceback" not in err


def test_traceback_shows_where(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(raising(ZeroDivisionError("by zero")), ["--traceback", "boom"]) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_traceback_may_stand_after_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(mdps.runtime, "load", fail)
    assert run(cli, ["predict", "b", "a.png", "--out", "o", "--traceback"]) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_a_missing_package_is_named_with_its_extra() -> None:
    with pytest.raises(click.ClickException, match=r"needs torch, .* pip install 'mdps\[export\]'"), needs("export"):
        raise ModuleNotFoundError("No module named 'torch'", name="torch")


def test_a_missing_module_of_our_own_is_not_called_an_extra() -> None:
    with pytest.raises(ModuleNotFoundError), needs("export"):
        raise ModuleNotFoundError("No module named 'mdps.gone'", name="mdps.gone")


@pytest.mark.skipif(sys.platform == "win32", reason="no such pipes")
def test_a_reader_that_leaves_is_no_error() -> None:
    code = (
        "import sys, click; from mdps.commands.terminal import run\n"
        "say = click.Command('mdps', callback=lambda: [click.echo('x' * 1000) for _ in range(1000)])\n"
        "sys.exit(run(say, []))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        err = process.stderr.read()
    assert process.returncode == 1
    assert err == b""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("as_json", [True, False])
def test_a_stdout_that_is_full_is_one_sentence_and_the_files_are_complete(
    line_bundle: Path, line_images: list[bytes], tmp_path: Path, as_json: bool
) -> None:
    for index, data in enumerate(line_images[:3]):
        (tmp_path / f"{index}.png").write_bytes(data)
    command = [sys.executable, "-m", "mdps.cli", "predict", str(line_bundle), str(tmp_path), "--out"]
    command += [str(tmp_path / "out"), "--batch", "1", *(["--json"] if as_json else [])]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        "Error: standard output cannot be written: No space left on device; make room or choose another place\n"
    )
    assert len((tmp_path / "out" / "results.jsonl").read_text().splitlines()) == 3
    assert (tmp_path / "out" / "report.html").is_file()


@pytest.mark.parametrize(
    ("code", "name", "text"),
    [
        (errno.EROFS, "ro/b", "ro/b cannot be written: Read-only file system; make room or choose another place"),
        (errno.ENOSPC, None, "a file cannot be written: No space left on device; make room or choose another place"),
        (errno.EACCES, "b", "b cannot be opened: Permission denied; check who may use it"),
    ],
)
def test_what_a_disk_answers_is_nothing_unexpected(
    code: int, name: str | None, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(raising(OSError(code, os.strerror(code), name)), ["boom"]) == 1
    assert capsys.readouterr().err == f"Error: {text}\n"


# Doctor, inspect


def test_doctor_as_json_is_one_object() -> None:
    done = mdps_process("doctor", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["works"] is True


def test_doctor_leaves_with_1_when_nothing_works(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.setitem(sys.modules, "openvino", None)
    assert run(cli, ["doctor"]) == 1
    out = capsys.readouterr().out
    assert "works: no" in out
    assert "mdps[cpu]" in out


def test_inspect_says_what_a_checkpoint_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from mdps.models.checkpoints import save_denoiser
    from mdps.models.unet import UNet
    from mdps.runtime.schedule import NoiseSchedule
    from mdps.training import small_network

    path = tmp_path / "denoiser.safetensors"
    save_denoiser(path, UNet(small_network(32)), schedule=NoiseSchedule.linear(), prediction="eps")
    assert run(cli, ["inspect", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["format"] == "mdps"
    assert run(cli, ["inspect", str(path)]) == 0
    assert "image_size = 32" in capsys.readouterr().out


def test_inspect_refuses_what_is_neither(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    assert run(cli, ["inspect", str(tmp_path / "notes.txt")]) == 2
    assert "notes.txt" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["new\nline.png", "\x1b[31mred.png", "\u202egnp.exe", "a\rb.png", "\udcff.png"])
def test_a_name_is_one_line_that_no_terminal_obeys(name: str) -> None:
    from mdps.commands.predict import _shown

    shown = _shown(f"pass 1  {name}")
    assert shown.isprintable()
    assert shown.encode("ascii").decode("unicode_escape") == f"pass 1  {name}"
    assert _shown("Größe 漢字.png") == "Größe 漢字.png"
