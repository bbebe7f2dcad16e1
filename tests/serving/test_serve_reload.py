"""A served bundle changes: requests go on, and what was written takes effect or is said to need a reload."""

import contextlib
import http.client
import json
import shutil
import signal
import threading
import time
import urllib.error
import urllib.request
from dataclasses import replace

import pytest
from server_process import serving

from mdps.runtime import load
from mdps.runtime.manifest import Manifest

pytest.importorskip("starlette", reason="the extra [serve] is not installed")
ONE = ("--threads", "1")


@pytest.fixture
def bundle(line_bundle, tmp_path):
    """A copy that may be changed."""
    return shutil.copytree(line_bundle, tmp_path / "line")


def ask(url, body=None):
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body), timeout=60) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def set_threshold(bundle, threshold):
    manifest = Manifest.read(bundle)
    manifest.with_calibration("default", replace(manifest.calibrations["default"], threshold=threshold)).write(bundle)


def test_a_new_calibration_takes_effect_under_load_and_no_request_is_lost(bundle, line_images):
    with load(bundle, threads=1) as detector:
        scores = [result.score for result in detector.batch(line_images[:8])]
    replies, stop = [], threading.Event()

    def drive(url, index):
        while not stop.is_set():
            replies.append((index, *ask(url, line_images[index])))

    with serving([bundle], *ONE) as server:
        old = ask(f"{server.url}/inspect", line_images[0])[1]["threshold"]
        threads = [threading.Thread(target=drive, args=(f"{server.url}/inspect", index)) for index in range(8)]
        for thread in threads:
            thread.start()
        for count in (1, 2, 3):
            set_threshold(bundle, old + count)
            assert server.wait_for("reloaded", count)["threshold"] == old + count
        stop.set()
        for thread in threads:
            thread.join()
        assert ask(f"{server.url}/inspect", line_images[0])[1]["threshold"] == old + 3
    assert {status for _, status, _ in replies} == {200}
    for index, _, reply in replies:
        assert reply["score"] == pytest.approx(scores[index], rel=1e-5)
        assert reply["threshold"] in [pytest.approx(old + count) for count in range(4)]
        assert reply["verdict"] == ("fail" if reply["score"] > reply["threshold"] else "pass")


def test_a_half_written_bundle_is_not_taken_and_the_old_one_goes_on(bundle, line_images):
    with serving([bundle], *ONE) as server:
        url = f"{server.url}/inspect"
        before = ask(url, line_images[0])
        graph = bundle / "score.onnx"
        whole = graph.read_bytes()
        swap(graph, whole[: len(whole) // 2])
        set_threshold_without_check(bundle, 123.0)
        assert "score.onnx has" in server.wait_for("reload_failed")["error"]
        during = ask(url, line_images[0])
        assert (during[0], during[1]["score"], during[1]["threshold"]) == (
            before[0], before[1]["score"], before[1]["threshold"],
        )  # fmt: skip
        assert "cannot be loaded" in ask(f"{server.url}/v2/repository/index", b"")[1][0]["reason"]
        status, said = ask(f"{server.url}/v2/repository/models/line/load", b"")
        assert status == 400
        assert "score.onnx" in said["error"]
        swap(graph, whole)
        assert ask(f"{server.url}/v2/repository/models/line/load", b"")[0] == 200
        assert ask(url, line_images[0])[1]["threshold"] == 123.0
        assert ask(f"{server.url}/v2/repository/index", b"")[1][0]["reason"] == ""


def swap(path, content):
    """Replace a file as a copy of a new bundle would, the served one's open file stays what it was."""
    path.unlink()
    path.write_bytes(content)


def set_threshold_without_check(bundle, threshold):
    manifest = Manifest.read(bundle, verify=False)
    manifest.with_calibration("default", replace(manifest.calibrations["default"], threshold=threshold)).write(bundle)


def test_a_bundle_with_another_region_is_swapped_in_and_no_result_mixes_the_two(bundle, line_images):
    manifest = Manifest.read(bundle)
    narrower = replace(manifest, preprocessing=replace(manifest.preprocessing, roi=(4, 4, 12, 12)))
    stop, found = threading.Event(), []
    with serving([bundle], *ONE) as server:
        url = f"{server.url}/inspect"
        old = ask(url, line_images[1])[1]["score"]

        def drive():
            while not stop.is_set():
                found.append(ask(url, line_images[1]))

        threads = [threading.Thread(target=drive) for _ in range(6)]
        for thread in threads:
            thread.start()
        narrower.write(bundle)
        server.wait_for("reloaded")
        new = ask(url, line_images[1])[1]["score"]
        stop.set()
        for thread in threads:
            thread.join()
    assert new != pytest.approx(old, rel=1e-3)
    assert {status for status, _ in found} == {200}
    for _, reply in found:
        assert reply["score"] in (pytest.approx(old, rel=1e-5), pytest.approx(new, rel=1e-5))


def test_without_watching_it_says_that_a_reload_is_needed(bundle, line_images):
    with serving([bundle], *ONE, "--no-watch") as server:
        set_threshold(bundle, 7.0)
        assert "/v2/repository/models/line/load" in server.wait_for("reload_needed")["error"]
        assert ask(f"{server.url}/inspect", line_images[0])[1]["threshold"] != 7.0
        assert "reload" in server.named("reload_needed")[0]["event"]
        assert "changed" in ask(f"{server.url}/live/line")[1]["model"]["problem"]
        assert ask(f"{server.url}/v2/repository/models/line/load", b"")[0] == 200
        assert ask(f"{server.url}/inspect", line_images[0])[1]["threshold"] == 7.0


def test_unloading_is_refused_with_the_reason(bundle):
    with serving([bundle], *ONE) as server:
        status, said = ask(f"{server.url}/v2/repository/models/line/unload", b"")
        assert status == 400
        assert "does not unload" in said["error"]
        assert ask(f"{server.url}/v2/repository/models/other/load", b"")[0] == 404


def test_sigkill_under_load_damages_nothing_and_the_next_start_is_ready(bundle, line_images):
    before = {path.name: path.read_bytes() for path in bundle.iterdir()}
    began = time.monotonic()
    with serving([bundle], *ONE) as server:
        first_start = time.monotonic() - began
        url = f"{server.url}/inspect"
        threads = [threading.Thread(target=ask_until_gone, args=(url, line_images[index])) for index in range(6)]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        server.process.send_signal(signal.SIGKILL)
        for thread in threads:
            thread.join()
    assert {path.name: path.read_bytes() for path in bundle.iterdir()} == before
    began = time.monotonic()
    with serving([bundle], *ONE) as server:
        # Nothing is repaired, waited for or built again: as long as a first start, and twice that on a busy machine.
        assert time.monotonic() - began < 2 * first_start + 2
        assert ask(f"{server.url}/inspect", line_images[0])[0] == 200


def ask_until_gone(url, image):
    with contextlib.suppress(OSError, http.client.HTTPException):
        while True:
            ask(url, image)
