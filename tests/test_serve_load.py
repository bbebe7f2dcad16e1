"""The server under more load than it can take: every request answered once and right, or refused; and a clean stop."""

import http.client
import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest

from mdps.benchmarks.serve_load import run_load
from mdps.benchmarks.serve_overhead import measure
from mdps.benchmarks.serve_process import serving

pytest.importorskip("starlette", reason="the extra [serve] is not installed")
pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")


def check(report):
    assert report.faults == []
    assert report.exit_code == 0
    assert sum(report.statuses.values()) == report.sent > 0
    assert report.statuses.get("file: 200", 0) > 0
    assert report.statuses.get("tensor: 200", 0) > 0
    assert report.p99_ms < report.deadline_ms


def test_twice_the_rate_for_a_moment(line_bundle, line_images):
    check(run_load(line_bundle, line_images, seconds=8))


@pytest.mark.slow  # half an hour; MDPS_SOAK_SECONDS makes it shorter, MDPS_SOAK_OUT keeps its numbers
def test_twice_the_rate_for_half_an_hour(line_bundle, line_images):
    report = run_load(line_bundle, line_images, seconds=float(os.environ.get("MDPS_SOAK_SECONDS", "1800")))
    if out := os.environ.get("MDPS_SOAK_OUT"):
        Path(out).write_text(json.dumps(report.to_json(), indent=2) + "\n", encoding="utf-8")
    check(report)
    assert any(status.endswith("503") for status in report.statuses), "it was not more than the server can take"
    assert report.memory_growth_mb < 10


@pytest.mark.slow  # needs the processors to itself
def test_serving_adds_little_to_the_runtime(tmp_path):
    if shutil.which("wrk") is None:
        pytest.skip("the load comes from wrk: apt-get install wrk")
    from mdps.benchmarks.demo import calibrate_demo, export_demo
    from mdps.benchmarks.textures import TextureSet

    bundle = export_demo(tmp_path / "bundle")
    calibrate_demo(bundle, tmp_path / "good", TextureSet("brick"), 1)
    image = next((tmp_path / "good").rglob("*.png")).read_bytes()
    result = measure(bundle, image, threads=1, rounds=5, seconds=10)
    if out := os.environ.get("MDPS_OVERHEAD_OUT"):
        Path(out).write_text(json.dumps(result.to_json(), indent=2) + "\n", encoding="utf-8")
    assert result.added_quick_ms <= 5
    assert result.throughput_share >= 0.95


def test_serving_takes_little_processor_time(line_bundle, line_images):
    """Also where other work on the machine makes every wall time meaningless."""
    if shutil.which("wrk") is None:
        pytest.skip("the load comes from wrk: apt-get install wrk")
    result = measure(line_bundle, line_images[0], threads=1, rounds=2, seconds=2)
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
