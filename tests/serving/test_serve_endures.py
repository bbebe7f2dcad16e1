"""The server survives slow clients, greedy requests, a closed terminal, a full disk."""

import asyncio
import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from server_process import serving

pytest.importorskip("starlette", reason="the extra [serve] is not installed")

import uvicorn

from mdps.runtime.detector import Result
from mdps.runtime.errors import UsageError
from mdps.runtime.pipeline import check_finite
from mdps.runtime.preprocessing import Observations
from mdps.serving.http.bodies import Bodies, open_image
from mdps.serving.http.guard import bounded_protocol
from mdps.serving.http.model import Loaded, Model
from mdps.serving.http.options import Limits, ServerOptions
from mdps.serving.http.refusals import Refusal
from mdps.serving.http.server import _Server
from mdps.serving.http.service import Service
from mdps.serving.http.telemetry import Live, Metrics
from mdps.serving.http.tensors import parse
from mdps.serving.http.worker import Worker

ONE = ("--threads", "1")


def post(port, body, timeout=60):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    with contextlib.closing(connection):
        connection.request("POST", "/inspect", body)
        return connection.getresponse().status


def test_bodies_that_never_come_do_not_fill_the_queue(line_bundle, line_images):
    head = f"POST /inspect HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(line_images[0])}\r\n\r\n".encode()
    with (
        serving([line_bundle], *ONE, "--queue", "3", "--deadline-ms", "60000") as server,
        contextlib.ExitStack() as held,
    ):
        for _ in range(12):
            connection = held.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            connection.sendall(head + line_images[0][:-20])
        time.sleep(0.5)
        assert [post(server.port, line_images[0]) for _ in range(3)] == [200] * 3


def test_bodies_of_all_requests_together_are_bounded():
    bodies = Bodies(100)
    with bodies.share() as first:
        first.take(60)
        with bodies.share() as second:
            second.take(30)
            with pytest.raises(Refusal) as refused:
                second.take(20)
        assert refused.value.status == 503
        assert bodies.held == 60
    assert bodies.held == 0


def test_a_request_that_cannot_be_in_time_is_refused_at_once():
    """Or a slow model would make all its clients wait for nothing, up to their deadlines."""

    async def main():
        model = object.__new__(Model)
        model.name, model._limit, model._accepted = "line", 32, 0
        model._worker = SimpleNamespace(seconds=4.0, alive=True)
        now = asyncio.get_running_loop().time()
        with model.admitted(now + 1), model.admitted(now + 10):  # whoever is alone is always taken
            with pytest.raises(Refusal, match="deadline") as refused:
                model.check_room(now + 10)
            assert (refused.value.status, refused.value.retry_after) == (503, 8)
            model.check_room(now + 13)

    asyncio.run(main())


def test_the_queue_holds_as_many_as_was_said():
    async def main():
        model = object.__new__(Model)
        model.name, model._limit, model._accepted = "line", 2, 0
        model._worker = SimpleNamespace(seconds=0.0, alive=True)
        late = asyncio.get_running_loop().time() + 60
        with model.admitted(late):
            with model.admitted(late), pytest.raises(Refusal, match="2 requests waiting: try again"):
                model.check_room(late)
            model.check_room(late)

    asyncio.run(main())


def test_a_client_that_takes_a_little_of_its_answer_and_then_nothing_is_let_go():
    body = bytes(16 * 2**20)

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body})

    refused = []
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listening:
        protocol = bounded_protocol(Limits(write_seconds=1.0), refused.append)
        server = uvicorn.Server(uvicorn.Config(app, http=protocol, lifespan="off", log_config=None))
        thread = threading.Thread(target=asyncio.run, args=(server._serve([listening]),))
        thread.start()
        try:
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.connect(listening.getsockname())
                client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 2)  # the second answer waits for the first
                end = time.monotonic() + 60
                while not server.server_state.connections and time.monotonic() < end:
                    time.sleep(0.01)
                time.sleep(0.3)
                taken = 0
                while taken < 4 * 2**20:
                    taken += len(client.recv(65536))
                while server.server_state.connections and time.monotonic() < end:
                    time.sleep(0.05)
                assert not server.server_state.connections
                assert refused == ["slow_client"]
        finally:
            server.should_exit = server.force_exit = True
            thread.join()


@pytest.mark.parametrize("how", ["closed", "full"])
def test_stderr_may_be_closed_or_its_disk_full(line_bundle, line_images, how):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    to = {"closed": "2>&-", "full": "2>/dev/full"}[how]
    command = f'exec "$0" -m mdps.cli serve "$1" --threads 1 --host 0.0.0.0 --port {port} {to}'
    process = subprocess.Popen(["sh", "-c", command, sys.executable, str(line_bundle)])
    try:
        end = time.monotonic() + 120
        status = None
        while status is None and time.monotonic() < end and process.poll() is None:
            with contextlib.suppress(OSError):
                status = post(port, line_images[0])
            time.sleep(0.1)
        assert status == 200
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def test_a_log_that_nobody_reads_keeps_no_server_from_ending(line_bundle, line_images):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mdps.cli", "serve", str(line_bundle), "--threads", "1", "--port", str(port)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        while b'"ready"' not in process.stderr.readline():
            pass
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        for _ in range(1500):  # some 300 KB of log
            connection.request("GET", "/nothing")
            connection.getresponse().read()
        assert post(port, line_images[0]) == 200
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.fixture
def heard_hang_up():
    """Tests under nohup would hand down to the server that a hang-up is ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Windows has no SIGHUP")
@pytest.mark.usefixtures("heard_hang_up")
def test_a_closed_terminal_is_a_stop_like_any_other(line_bundle, line_images):
    with serving([line_bundle], *ONE) as server:
        assert post(server.port, line_images[0]) == 200
        server.process.send_signal(signal.SIGHUP)
        assert server.process.wait(60) == 0
        server.wait_for("stopped")


def test_a_port_taken_while_the_models_load_is_said():
    """Two servers that are started together both get the address, and one of them listens first."""

    async def main(bound, port):
        service = Service(ServerOptions(port=port), Metrics(), None)
        config = uvicorn.Config(lambda: None, lifespan="off", log_config=None)
        config.load()
        server = _Server(config, service)
        server.lifespan = config.lifespan_class(config)
        await server.startup([bound])

    with socket.socket() as bound, socket.socket() as other:
        for one in (bound, other):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        other.bind(("127.0.0.1", port))
        other.listen()
        with pytest.raises(UsageError, match=f"port {port} of 127.0.0.1"):
            asyncio.run(main(bound, port))


def test_an_image_that_gives_nan_is_a_500_that_is_counted():
    nothing = np.zeros((3, 4, 4), np.float32)

    class Engine:
        def judge(self, observations):
            check_finite(np.full((len(observations), 1, 4, 4), np.nan), np.zeros(len(observations)))

    async def main():
        model, metrics = object.__new__(Model), Metrics()
        model.name, model._metrics, model._preparing, model._pool = "line", metrics, 0, None
        model.current = Loaded(Engine(), None, 0.0)
        model._worker = Worker("line", max_batch=1, max_wait=0.0, coming=lambda: 0)
        with pytest.raises(Refusal, match="NaN") as refused:
            await model.predict(lambda detector: Observations(nothing[None]), asyncio.get_running_loop().time() + 60)
        await asyncio.to_thread(model._worker.stop)
        assert (refused.value.status, refused.value.kind) == (500, "nan")
        assert 'mdps_nan_total{model="line"} 1.0' in metrics.text().decode()

    asyncio.run(main())


def test_pictures_of_two_models_have_ids_of_their_own(monkeypatch):
    """The page keeps the pictures it has by id, also when another model is chosen."""
    monkeypatch.setattr(time, "time", lambda: 1_800_000_000.0)
    nothing = np.zeros((3, 4, 4), np.float32)
    result = Result(2.0, 1.0, "fail", nothing[0], nothing[0] > 1, nothing, nothing, {})
    blue, red = Live(), Live()
    for _ in range(3):
        blue.add(result, 1.0)
        red.add(result, 1.0)
    assert len({*blue.failures, *red.failures}) == 6


def read(text, **more):
    return parse(text, None, max_pixels=10**6, outputs=("score",), **more)


@pytest.mark.parametrize(
    "text",
    [
        b'{"inputs":[' + b",".join([b"[]"] * 5000) + b"]}",
        b'{"inputs":[' + b",".join([b"{}"] * 5000) + b"]}",
        b'{"inputs":[' + b"[" * 900 + b"]" * 900 + b"]}",
        b"{" + b",".join(b'"%d":0' % index for index in range(5000)) + b"}",
    ],
    ids=["lists", "objects", "depth", "keys"],
)
def test_json_that_would_become_many_objects_is_refused_unread(text):
    with pytest.raises(Refusal, match="more objects"):
        read(text)


@pytest.mark.parametrize("shape", [(40, 50, 3), (2000, 1, 3), (1, 2000, 3), (1, 700, 2, 3)])
def test_pictures_as_nested_lists_are_not(shape):
    pixels = np.random.default_rng(0).integers(0, 255, shape, dtype=np.uint8)
    tensor = {"name": "image", "shape": list(shape), "datatype": "UINT8", "data": pixels.tolist()}
    found = read(json.dumps({"inputs": [tensor]}).encode()).picture
    np.testing.assert_array_equal(found, pixels.reshape(found.shape))


def test_a_picture_written_in_digits_is_bounded():
    text = b"P3\n500 400\n255\n" + b"17 " * 600_000
    with pytest.raises(Refusal, match="binary"):
        open_image(text, 10**6)
    assert open_image(b"P3\n2 2\n255\n" + b"17 " * 12, 10**6).size == (2, 2)
