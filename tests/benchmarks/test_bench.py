"""`mdps bench`: what is measured, how it is compared, and that one competitor's failure costs no other its row."""

import importlib.util
import io
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mdps.benchmarks import bench
from mdps.benchmarks.bench import (
    EventTimer,
    SkippedError,
    Spec,
    WallTimer,
    eager,
    observation,
    report,
    torch_timer,
    worker,
)
from mdps.benchmarks.bench.local import forward_flop
from mdps.benchmarks.bench.report import Bench, Cost, Row, Yardstick, markdown, matrix_rate, write
from mdps.benchmarks.bench.rounds import Measurement, Process, environment, measure
from mdps.benchmarks.bench.run import BenchOptions, Variations, find_checkpoint, run_bench
from mdps.benchmarks.bench.worker import Worker, serve
from mdps.benchmarks.kit import orders
from mdps.cli import cli
from mdps.commands import terminal
from mdps.export.methods import autoddpm
from mdps.models.unet import AttentionBlock
from mdps.runtime import UsageError, load
from mdps.runtime.manifest import Manifest

CONTRACT = ("name", "median_ms", "p95_ms", "peak_mb", "ratio_to_ours")


@pytest.fixture(scope="module")
def bundle(tiny_bundle: Path, small_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny bundle with its checkpoint beside it, as an export leaves them."""
    folder = tmp_path_factory.mktemp("bench")
    shutil.copytree(tiny_bundle, folder / "tiny")
    shutil.copy(small_checkpoint, folder / small_checkpoint.name)
    return folder / "tiny"


@pytest.fixture(scope="module")
def run(bundle: Path) -> tuple[list[dict[str, Any]], Path]:
    """The command on a small choice, as a user runs it: rows, and the folder it wrote."""
    out = bundle.parent / "out"
    command = [
        sys.executable, "-m", "mdps.cli", "bench", str(bundle), "--json", "--out", str(out), "--threads", "1",
        "--engines", "onnxruntime", "--torch", "authors,eager", "--peers", "draem", "--rounds", "3",
        "--set", "warm-up=0", "--batches", "2", "--samples", "none", "--sizes", "16", "--methods", "none",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), out


def row_of(rows: list[dict[str, Any]], part: str) -> dict[str, Any]:
    (found,) = [row for row in rows if part in row["name"]]
    return found


def test_the_rows_hold_what_is_promised(run: tuple[list[dict[str, Any]], Path]) -> None:
    rows, _ = run
    ours = row_of(rows, "onnxruntime, batch 2")
    assert rows[0]["name"] == "mdps, onnxruntime"
    for row in rows:
        assert set(CONTRACT) <= row.keys()
        assert row["threads"] == 1
        assert row["device"] == "cpu"
        assert (row["median_ms"] is None) == (row["skipped"] is not None)
    assert rows[0]["ratio_to_ours"] == 1
    assert rows[0]["cold_ms"] > rows[0]["median_ms"] > rows[0]["step_ms"] > 0
    assert rows[0]["runs"] == 3
    assert 20 < rows[0]["loaded_mb"] <= rows[0]["peak_mb"]
    assert 0 < rows[0]["share_of_matrix_rate"] < 2
    assert ours["images_per_second"] == pytest.approx(2000 / ours["median_ms"])
    assert 0.3 < ours["ratio_to_single"] < 2
    smaller = row_of(rows, "16 x 16")
    assert (rows[0]["image_size"], smaller["image_size"]) == ([32, 32], [16, 16])
    assert smaller["ratio_to_single"] == pytest.approx(smaller["ratio_to_ours"], rel=1)
    assert smaller["score_difference"] is None


def test_torch_computes_the_same_score_and_two_forwards_cost_more_than_one(
    run: tuple[list[dict[str, Any]], Path],
) -> None:
    rows, _ = run
    authors, one = row_of(rows, "authors"), row_of(rows, "one forward")
    for row in (authors, one):
        assert row["score_agrees"]
        assert row["score_difference"] < 1e-4
        assert row["peak_mb"] > rows[0]["peak_mb"]
    assert authors["median_ms"] > 1.1 * one["median_ms"]


def test_a_peer_runs_or_says_what_to_install(run: tuple[list[dict[str, Any]], Path]) -> None:
    row = row_of(run[0], "DRAEM")
    if importlib.util.find_spec("anomalib") is None:
        assert "not installed: pip install 'mdps[peers]'" in row["skipped"]
    else:
        assert row["median_ms"] > 0
        assert row["score"] is None


def test_table_plot_and_json_are_written(run: tuple[list[dict[str, Any]], Path], bundle: Path) -> None:
    rows, out = run
    assert sorted(path.name for path in out.iterdir()) == [
        "bench.json",
        "bench.md",
        "bench.png",
        "machine.json",
        "scaling.png",
    ]
    assert json.loads((out / "bench.json").read_text()) == rows
    machine = json.loads((out / "machine.json").read_text())
    assert machine["cpu"]
    assert machine["versions"]["torch"]
    assert machine["checkpoint_sha256"] == Manifest.read(bundle).checkpoint.sha256
    assert machine["matrix_gflops_per_s"] > 1
    assert (out / "bench.png").read_bytes().startswith(b"\x89PNG")
    table = (out / "bench.md").read_text()
    assert "| mdps, onnxruntime |" in table
    assert "same score" in table


# FLOPs


def test_flops_are_those_of_the_layers_counted_by_hand(bundle: Path, small_denoiser: Any) -> None:
    """Hooks on every convolution, linear layer and attention (two products of all pixels with all pixels)."""
    counted = 0

    def layer(module: Any, inputs: Any, output: torch.Tensor) -> None:
        nonlocal counted
        counted += 2 * output.numel() * int(np.prod(module.weight.shape[1:]))

    def attention(module: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        nonlocal counted
        _, channels, height, width = output.shape
        counted += 2 * 2 * channels * (height * width) ** 2

    weighted = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Linear)
    hooks = []
    for module in small_denoiser.network.modules():
        if isinstance(module, (*weighted, AttentionBlock)):
            hooks.append(module.register_forward_hook(layer if isinstance(module, weighted) else attention))
    with torch.no_grad():
        small_denoiser.network(torch.zeros(1, 3, 32, 32), torch.zeros(()))
    for hook in hooks:
        hook.remove()
    assert forward_flop(Manifest.read(bundle)) == counted


def test_a_guided_step_counts_twice_and_a_plain_or_jacobian_free_one_once(bundle: Path) -> None:
    manifest = Manifest.read(bundle)
    sampler = manifest.settings.sampler
    assert Cost.of(manifest, 10) == Cost(steps=6, flop=120)

    def cost(**changes: Any) -> Cost:
        settings = replace(manifest.settings, sampler=replace(sampler, **changes))
        return Cost.of(replace(manifest, settings=settings), 10)

    assert cost(gradient="jacobian-free") == Cost(6, 60)
    assert cost(first_pass=replace(sampler.first_pass, guidance_scale=0.0)) == Cost(6, 90)
    assert cost(masked_pass=None) == Cost(3, 60)


# Timers


def test_the_wall_clock_measures_the_work() -> None:
    result, ms = WallTimer()(lambda: time.sleep(0.03) or "done")
    assert result == "done"
    assert 29 < ms < 300
    assert isinstance(torch_timer("cpu"), WallTimer)


class FakeCuda:
    """A stream that notes what happens on it, and events that say 12.5 ms lie between them."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def Event(self, *, enable_timing: bool) -> Any:  # noqa: N802 - torch's name
        cuda = self
        assert enable_timing

        class Event:
            def record(self) -> None:
                cuda.log.append("record")

            def synchronize(self) -> None:
                cuda.log.append("wait")

            def elapsed_time(self, end: Any) -> float:
                assert end is not self
                return 12.5

        return Event()


def test_events_stand_around_the_work_on_the_stream_and_are_waited_for() -> None:
    cuda = FakeCuda()
    result, ms = EventTimer(cuda)(lambda: cuda.log.append("work") or 7)
    assert (result, ms) == (7, 12.5)
    assert cuda.log == ["synchronize", "record", "work", "record", "wait"]


# Rounds and rows


def test_rounds_change_their_order_and_hold_everybody_once() -> None:
    shuffled = list(orders(["a", "b", "c", "d"], 6))
    assert all(sorted(order) == ["a", "b", "c", "d"] for order in shuffled)
    assert len({tuple(order) for order in shuffled}) > 1
    assert shuffled == list(orders(["a", "b", "c", "d"], 6))


def a_spec(**changes: Any) -> Spec:
    return replace(Spec("x", "ours", "onnxruntime", "bundle", 1), **changes)


def measured(ms: list[float], score: float = 2.0, **changes: Any) -> Measurement:
    facts = {"load_ms": 5.0, "first_ms": 9.0, "score": score, "note": ""}
    return Measurement(a_spec(**changes), facts, ms, [value - 1 for value in ms], 80.0)


def test_ratios_rates_and_agreement_come_from_medians() -> None:
    stick = Yardstick(Cost(steps=3, flop=9_000_000), samples=1, image_ms=10.0, score=2.0, matrix_rate=2.0)
    row = stick.row(measured([19.0, 10.0, 400.0], score=2.001, batch=2), measured([4.75]))
    assert (row.median_ms, row.ratio_to_ours, row.ratio_to_single) == (19.0, 0.95, 2.0)
    assert row.p95_ms == pytest.approx(np.percentile([19, 10, 400], 95))
    assert (row.cold_ms, row.step_ms, row.outside_ms) == (14.0, 6.0, 1.0)
    assert row.gflops_per_s == pytest.approx(2 * 9e6 / 18e-3 / 1e9)
    assert row.share_of_matrix_rate == pytest.approx(0.5)
    assert row.score_agrees
    assert stick.row(measured([2.0], score=2.003)).score_agrees is False
    assert stick.row(measured([2.0], samples=4)).score_agrees is None
    rate = Measurement(a_spec(kind="rate"), {"matrix_flop": 8_000_000}, [2.0, 4.0, 100.0])
    assert matrix_rate(rate) == pytest.approx(2.0)


def test_a_table_says_who_was_skipped_and_who_computed_another_score(bundle: Path) -> None:
    rows = [Row("a", 1.0, 1.0, score_difference=0.5, score_agrees=False), Row("b", skipped="no compiler")]
    machine = {
        "image_size": [32, 32], "matrix_gflops_per_s": None, "image_gflop": None, "bundle": "t", "bundle_sha256": "0",
        "steps": 6, "cpu": "c", "threads": 1, "device": "cpu", "load_average": None, "rounds": 1, "versions": {},
    }  # fmt: skip
    text = markdown(Bench(rows, machine))
    assert "ANOTHER SCORE (off by 0.5)" in text
    assert "Skipped b: no compiler" in text


# Processes


def test_a_worker_that_dies_or_hangs_is_a_reason_and_not_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dies, hangs = tmp_path / "dies.py", tmp_path / "hangs.py"
    dies.write_text("import sys; input(); print('bad luck', file=sys.stderr); sys.exit(4)")
    hangs.write_text("import time; input(); time.sleep(60)")
    real = subprocess.Popen

    def instead(script: Path) -> Callable[..., Any]:
        return lambda command, **options: real([command[0], str(script)], **options)

    for script, patience, reason in ((dies, 30, "code 4: bad luck"), (hangs, 0.5, "took longer than 0.5 seconds")):
        monkeypatch.setattr(subprocess, "Popen", instead(script))
        (found,) = measure([a_spec()], rounds=2, warm_up=1, patience=patience, say=lambda _: None)
        assert reason in found.skipped
        assert found.ms == []
        assert Yardstick(Cost(1, None), 1).row(found).skipped == found.skipped


def test_every_kind_of_failure_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = {
        SkippedError("no"): "no",
        UsageError("give it"): "give it",
        ModuleNotFoundError("x", name="anomalib"): "not installed: pip install 'mdps[peers]' (there is no anomalib)",
        RuntimeError("\nfirst\nsecond"): "RuntimeError: first",
    }
    for failure, reason in failures.items():

        def fail(_: Spec, failure: Exception = failure) -> Any:
            raise failure

        monkeypatch.setattr("mdps.benchmarks.bench.worker.open_competitor", fail)
        answers = io.StringIO()
        serve(Worker(a_spec(kind="peer")), ["open\n"], answers)
        assert json.loads(answers.getvalue()) == {"skipped": reason} | (
            {"failed": True} if isinstance(failure, RuntimeError) else {}
        )


def test_what_a_library_prints_does_not_mix_with_the_answers(bundle: Path) -> None:
    with Process(a_spec(bundle=str(bundle)), patience=60) as process:
        assert process.ask("open")["score"] > 0
        assert process.ask("run")["ms"] > 0
        assert process.ask("peak")["peak_mb"] > 10


def test_a_process_is_told_its_threads_and_to_stay_offline() -> None:
    told = environment(3)
    assert told["OMP_NUM_THREADS"] == told["OPENBLAS_NUM_THREADS"] == "3"
    assert told["HF_HUB_OFFLINE"] == "1"


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's own high-water mark")
def test_peak_memory_is_the_childs_own_and_can_be_forgotten() -> None:
    big = np.ones(60_000_000, dtype=np.float64)  # 480 MB here; getrusage would hand it down to the child
    code = "from mdps.benchmarks.bench import peak_mb; print(peak_mb())"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 5 < float(child.stdout) < 200
    before = bench.peak_mb()
    del big
    assert bench.forget_peak()
    after = bench.peak_mb()
    assert before is not None
    assert after is not None
    assert before - after > 400


# Bundles made for the run


def test_other_methods_and_sizes_are_made_from_the_bundles_checkpoint(bundle: Path, tmp_path: Path) -> None:
    manifest = Manifest.read(bundle)
    variations = Variations(manifest, find_checkpoint(bundle, manifest, None), None, tmp_path, lambda _: None)
    auto = Manifest.read(variations.get("autoddpm"))
    assert auto.settings.sampler == autoddpm((32, 32)).sampler
    assert auto.settings.score.backbone == "random_tiny"
    assert auto.checkpoint == manifest.checkpoint
    assert Cost.of(auto, 10) == Cost(200 + 49 * 5 + 1, 4460)
    small = Manifest.read(variations.get(16))
    assert small.preprocessing.network_size == (16, 16)
    assert small.settings == replace(manifest.settings, score=replace(manifest.settings.score, top=2))
    assert small.network["parameters"] == manifest.network["parameters"]
    assert 3.9 < forward_flop(manifest) / forward_flop(small) < 16.1
    with pytest.raises(SkippedError, match="a multiple of 2, not 17"):
        variations.get(17)
    with pytest.raises(SkippedError, match="give --ckpt"):
        Variations(manifest, None, None, tmp_path, lambda _: None).get("anoddpm")


def test_a_method_is_a_row_with_its_own_work_and_no_score_to_compare(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = shutil.copytree(bundle, tmp_path / "other")

    def all_alike(specs: list[Spec], **_: Any) -> list[Measurement]:
        facts = {"load_ms": 5.0, "first_ms": 9.0, "score": 2.0, "matrix_flop": 8, "forward_flop": 1000}
        return [Measurement(spec, facts, [10.0], [8.0], 80.0) for spec in specs]

    monkeypatch.setattr("mdps.benchmarks.bench.run.measure", all_alike)
    monkeypatch.setattr(Variations, "_make", lambda self, what: other if what == "anoddpm" else SkippedError("no"))
    options = BenchOptions(engines=("openvino",), ways=(), peers=(), batches=(), samples=(), sizes=(64,))
    ours, ano, auto, size = run_bench(bundle, options).rows
    assert (ours.score_agrees, ano.score_agrees, ano.ratio_to_ours) == (True, None, 1.0)
    assert ano.name == "AnoDDPM, our runtime"
    assert (auto.skipped, size.skipped) == ("no", "no")
    assert size.name == "mdps, openvino, 64 x 64"


def test_the_one_file_detector_is_a_row_in_the_same_rounds(line_bundle: Path, bundle: Path) -> None:
    alone = BenchOptions(
        engines=("onnxruntime",), ways=(), methods=(), peers=(), batches=(), samples=(), rounds=1, warm_up=0,
        threads=1, matrix_side=64, one_file=True,
    )  # fmt: skip
    before = sorted(path.name for path in line_bundle.iterdir())
    _, file = run_bench(line_bundle, alone).rows
    assert (file.name, file.skipped, file.score) == ("mdps, one file", None, None)
    assert file.median_ms is not None
    assert file.ratio_to_ours is not None
    assert sorted(path.name for path in line_bundle.iterdir()) == before
    _, file = run_bench(bundle, alone).rows
    assert file.skipped is not None
    assert "mdps calibrate" in file.skipped


def test_lines_of_the_plot_are_one_competitor_with_one_thing_varied() -> None:
    size = (32, 32)
    rows = [
        Row("a", 8.0, image_size=size), Row("b", 4.0, image_size=size),
        Row("a, batch 4", 16.0, batch=4, ratio_to_single=0.5, image_size=size),
        Row("a, 64 x 64", 40.0, ratio_to_single=5.0, image_size=(64, 64)),
        Row("a, 128 x 128", ratio_to_single=None, skipped="no", image_size=size),
    ]  # fmt: skip
    batch, samples, pixels = (report.curves(rows, value) for value in report.AXES.values())
    assert batch == {"a": [(1, 8.0), (4, 4.0)]}
    assert samples == {}
    assert pixels == {"a": [(1024, 8.0), (4096, 40.0)]}
    assert report.plot_scaling(rows).startswith(b"\x89PNG")


# Who takes part


def test_the_checkpoint_is_found_beside_the_bundle_and_another_is_refused(bundle: Path, tmp_path: Path) -> None:
    manifest = Manifest.read(bundle)
    assert find_checkpoint(bundle, manifest, None) == bundle.parent / "checkpoint"
    other = tmp_path / "checkpoint"
    other.write_bytes(b"another")
    with pytest.raises(UsageError, match="is not the checkpoint that"):
        find_checkpoint(bundle, manifest, other)
    shutil.copytree(bundle, tmp_path / "alone")
    assert find_checkpoint(tmp_path / "alone", manifest, None) is None  # the other one lies beside it
    with pytest.raises(SkippedError, match="give --ckpt"):
        eager.Eager(a_spec(kind="torch", variant="eager", bundle=str(bundle)))


@pytest.mark.parametrize(
    "wrong",
    [
        {"peers": ("glass",)},
        {"methods": ("ddad",)},
        {"sizes": (0,)},
        {"ways": ("jax",)},
        {"engines": ("tvm",)},
        {"batches": (0,)},
    ],
)
def test_names_and_numbers_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        BenchOptions(**wrong)


def test_the_second_forward_is_made_only_where_a_gradient_is_wanted() -> None:
    calls = []

    def network(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        calls.append(x.requires_grad)
        return 2 * x

    twice = eager.two_forwards(network)
    x, t = torch.ones(1, 3, 4, 4), torch.tensor(1.0)
    assert torch.equal(twice(x, t), 2 * x)
    assert calls == [False]
    assert twice(x.requires_grad_(), t).requires_grad
    assert calls == [False, False, True]


@pytest.mark.parametrize("prediction", ["eps", "v", "x0"])
def test_eps_is_recovered_from_what_the_network_predicts(bundle: Path, prediction: str) -> None:
    schedule = Manifest.read(bundle).schedule
    x0, noise, a = torch.randn(1, 3, 4, 4), torch.randn(1, 3, 4, 4), float(schedule.alphas_cumprod[150])
    x_t = a**0.5 * x0 + (1 - a) ** 0.5 * noise
    predicted = {"eps": noise, "v": a**0.5 * noise - (1 - a) ** 0.5 * x0, "x0": x0}[prediction]
    eps = eager.eps_of(lambda x, t: predicted, prediction, schedule)
    assert torch.allclose(eps(x_t, torch.tensor(150.0)), noise, atol=1e-5)


def test_samples_and_batches_score_their_first_image_as_the_runtime_does(bundle: Path, small_checkpoint: Path) -> None:
    torch_way = worker.open_competitor(
        a_spec(kind="torch", variant="eager", bundle=str(bundle), ckpt=str(small_checkpoint), samples=2, batch=2)
    )
    images = np.stack([observation((32, 32), index) for index in range(2)])
    with load(bundle, samples=2, calibrated=False, warm_up=False, threads=1) as detector:
        wanted = detector.inspect(images).anomaly_score[0]
    assert torch_way.run().score == pytest.approx(float(wanted), rel=1e-4)


def test_a_network_that_cannot_be_compiled_is_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(torch, "compile", lambda network: refuse)
    with pytest.raises(SkippedError, match="cannot compile the network here: no C"):
        eager._way("compile", torch.nn.Identity())(torch.zeros(1), torch.zeros(()))


def test_nothing_but_skipped_rows_is_still_a_result(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody(specs: list[Spec], **_: Any) -> list[Measurement]:
        return [Measurement(spec, skipped="not today") for spec in specs]

    monkeypatch.setattr("mdps.benchmarks.bench.run.measure", nobody)
    monkeypatch.setattr(Variations, "_make", lambda self, what: SkippedError("not today"))
    assert terminal.run(cli, ["bench", "--json", str(bundle)]) == 1
    bench = run_bench(bundle, BenchOptions())
    assert [row.skipped for row in bench.rows] == ["not today"] * 11
    write(bench, tmp_path / "out")
    assert "Skipped PatchCore: not today" in (tmp_path / "out" / "bench.md").read_text()
