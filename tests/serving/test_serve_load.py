"""The server under more load than it can take: every request answered once and right, or refused; and a clean stop."""

import http.client
import json
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from server_load import difference, run_load
from server_process import serving

from mdps.runtime import load
from mdps.runtime.detector import Result

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


def test_serving_takes_little_processor_time(line_bundle, line_images):
    """Processor time: other work on the machine makes every wall time meaningless."""
    image, count = line_images[0], 40
    with load(line_bundle, threads=1) as detector:
        detector(image)
        start = time.process_time()
        for _ in range(count):
            detector(image)
        bare = time.process_time() - start
    with serving([line_bundle], "--threads", "1") as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        for index in range(count + 5):
            if index == 5:  # warm by then
                start = server.processor_seconds()
            connection.request("POST", "/inspect", image)
            assert json.loads(connection.getresponse().read())["verdict"] in ("pass", "fail")
        served = server.processor_seconds() - start
        connection.close()
    assert 1000 * (served - bare) / count <= 5


def test_sigterm_under_load_answers_every_accepted_request(line_bundle, line_images):
    """The clients got every answer that the server counts; whoever got nothing was never accepted."""
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
