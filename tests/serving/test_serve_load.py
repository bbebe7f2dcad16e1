"""The server under more load than it can take: every request answered once and right, or refused; and a clean stop."""

import http.client
import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from mdps.benchmarks.serve_load import difference, run_load
from mdps.benchmarks.serve_overhead import in_turns, measure, median_interval, rate
from mdps.benchmarks.serve_process import serving
from mdps.runtime.detector import Result
from mdps.runtime.threads import available_cpus

pytest.importorskip("starlette", reason="the extra [serve] is not installed")
pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
KINDS = {"file", "tensor", "broken image", "malformed"}


def check(report):
    assert report.faults == []
    assert report.exit_code == 0
    assert sum(report.statuses.values()) == report.sent > 0
    assert {status.partition(":")[0] for status in report.statuses} == KINDS
    assert {status.rpartition(" ")[2] for status in report.statuses} <= {"200", "400", "503"}
    assert report.statuses.get("file: 200", 0) > 0
    assert report.statuses.get("tensor: 200", 0) > 0
    assert report.p99_ms < report.deadline_ms


def test_twice_the_rate_for_a_moment(line_bundle, line_images):
    check(run_load(line_bundle, line_images, seconds=8))


@pytest.mark.slow  # half an hour; MDPS_SOAK_SECONDS makes it shorter, MDPS_SOAK_OUT keeps its numbers
def test_twice_the_rate_for_half_an_hour(line_bundle, line_images):
    seconds = float(os.environ.get("MDPS_SOAK_SECONDS", "1800"))
    report = run_load(line_bundle, line_images, seconds=seconds)
    if out := os.environ.get("MDPS_SOAK_OUT"):
        Path(out).write_text(json.dumps(report.to_json(), indent=2) + "\n", encoding="utf-8")
    check(report)
    assert report.took_seconds > seconds - 1
    assert any(status.endswith("503") for status in report.statuses), "it was not more than the server can take"
    assert report.overload >= 1.95, "the clients did not send twice what the server judged"
    assert report.memory_growth_mb < 10


def test_the_load_knows_a_wrong_answer():
    heat = np.linspace(0, 2, 16, dtype=np.float32)
    nothing = np.zeros((3, 4, 4), np.float32)
    right = Result(2.0, 1.0, "fail", heat.reshape(4, 4), heat.reshape(4, 4) > 1, nothing, nothing, {})
    assert difference(right, 2.0, 1.0, "fail", heat, "x") is None
    assert difference(right, 2.00001, 1.0, "fail", None, "x") is None
    assert "score" in difference(right, 2.1, 1.0, "fail", heat, "x")
    assert "threshold" in difference(right, 2.0, 1.1, "fail", heat, "x")
    assert "pass" in difference(right, 2.0, 1.0, "pass", heat, "x")
    assert "map" in difference(right, 2.0, 1.0, "fail", heat + 0.01, "x")
    assert "map" in difference(right, 2.0, 1.0, "fail", heat[:8], "x")


@pytest.mark.slow  # needs the processors to itself
def test_serving_adds_little_to_the_runtime(tmp_path, line_bundle, line_images):
    """The demo's detector on one thread and on all; a tiny one too, where milliseconds show better."""
    if shutil.which("wrk") is None:
        pytest.skip("the load comes from wrk: apt-get install wrk")
    from mdps.benchmarks.demo import calibrate_demo, export_demo
    from mdps.benchmarks.textures import TextureSet

    bundle = export_demo(tmp_path / "bundle")
    calibrate_demo(bundle, tmp_path / "good", TextureSet("brick"), 1)
    image = next((tmp_path / "good").rglob("*.png")).read_bytes()
    found = {"tiny": measure(line_bundle, line_images[0], threads=1, pairs=1000, seconds=20)}
    for threads in sorted({1, available_cpus()}):
        name = f"demo, {threads} threads"
        found[name] = measure(bundle, image, threads=threads, pairs=60, seconds=80)
    if out := os.environ.get("MDPS_OVERHEAD_OUT"):
        text = json.dumps({name: result.to_json() for name, result in found.items()}, indent=2)
        Path(out).write_text(text + "\n", encoding="utf-8")
    for name, result in found.items():
        # What is added does not depend on the detector. The tiny one shows it to a fraction of a millisecond, a
        # detector of a second an image only whether it is refuted; of throughput it is the other way round.
        low, high = result.added_interval_ms
        assert (high if name == "tiny" else low) <= 5, name
        assert name == "tiny" or result.throughput_share >= 0.95, name


def test_both_sides_take_their_turn_in_the_same_pair():
    order: list[str] = []
    found = in_turns((lambda: order.append("a") or "a", lambda: order.append("b") or "b"), 3)  # type: ignore[func-returns-value]
    assert found == [("a", "b")] * 3
    assert order == ["a", "b", "b", "a", "a", "b"]


@pytest.mark.parametrize(
    ("count", "low", "high"), [(1, 0, 0), (5, 0, 4), (6, 0, 5), (10, 1, 8), (25, 7, 17), (100, 39, 60)]
)
def test_the_interval_of_a_median_is_that_of_the_tables(count, low, high):
    """Ranks as in published tables of the sign test (from 0 here): 10 values: 2nd and 9th, 25: 8th and 18th."""
    assert median_interval(list(range(count))) == (low, high)


@pytest.mark.parametrize("cut", [0.1, 3.9, 4.0, 4.1, 7.9])
def test_a_rate_is_not_cut_by_the_end_of_its_measurement(cut):
    """Batches of four, a second an image, whose answers come within milliseconds; the first request came alone."""
    moments = [100.0] + [100.0 + 4 * (1 + index // 4) + 0.003 * (index % 4) for index in range(40)]
    seen = [moment for moment in moments if moment < 124.0 + cut]
    assert rate(seen, 8) == pytest.approx(1.0, rel=0.01)
    steady = [index / 250 for index in range(2500)]
    assert rate(steady, 1) == pytest.approx(250)
    assert rate([1.0, 2.0, 3.0], 8) == pytest.approx(1.0)


def test_serving_takes_little_processor_time(line_bundle, line_images):
    """Also where other work on the machine makes every wall time meaningless."""
    if shutil.which("wrk") is None:
        pytest.skip("the load comes from wrk: apt-get install wrk")
    result = measure(line_bundle, line_images[0], threads=1, pairs=20, seconds=3)
    assert result.served_processor_ms - result.bare_processor_ms <= 5


def test_sigterm_under_load_answers_every_accepted_request(line_bundle, line_images):
    """What the server says it answered, the clients got; whoever got nothing was never accepted."""
    answered, cut = [], []

    def client(port, index):
        connection, number = http.client.HTTPConnection("127.0.0.1", port, timeout=60), 0
        while True:
            name, number = f"stop-{index}-{number}", number + 1
            try:
                connection.request("POST", "/inspect", line_images[index % len(line_images)], {"X-Request-Id": name})
                reply = connection.getresponse()
            except (OSError, http.client.HTTPException):
                return
            try:
                reply.read()
                answered.append((name, reply.status))
            except (OSError, http.client.HTTPException):
                cut.append(name)

    with serving([line_bundle], "--threads", "1") as server:
        clients = [threading.Thread(target=client, args=(server.port, index)) for index in range(24)]
        for thread in clients:
            thread.start()
        while len(answered) < 30:
            time.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        for thread in clients:
            thread.join()
        assert server.stop() == 0
        logged = {
            (event["id"], event["status"]) for event in server.named("request") if event["id"].startswith("stop-")
        }
    assert cut == []
    assert set(answered) == logged
    assert {status for _, status in answered} <= {200, 503}
