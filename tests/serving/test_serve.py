"""The server answers what the runtime answers, on the protocol that clients know."""

import base64
import io
import json
import signal
import threading
import time
import urllib.error
import urllib.request

import numpy as np
import pytest
from PIL import Image
from server_process import serving

from mdps.runtime import load

triton = pytest.importorskip("tritonclient.http", reason="tritonclient[http] is not installed")
ONE = ("--threads", "1")


@pytest.fixture(scope="module")
def expected(line_bundle, line_images):
    """Return the bare runtime's result for each picture."""
    with load(line_bundle, threads=1) as detector:
        return detector.batch(line_images)


@pytest.fixture(scope="module")
def server(line_bundle):
    with serving([line_bundle], *ONE) as running:
        yield running


@pytest.fixture
def client(server):
    with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
        yield client


def ask(url, body=None, method=None, **headers):
    """(status, headers, body) whatever the status."""
    request = urllib.request.Request(url, body, {k.replace("_", "-"): v for k, v in headers.items()}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return reply.status, reply.headers, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read()


def ask_json(url, body=None, **more):
    status, _, content = ask(url, body, **more)
    return status, json.loads(content)


def pixels_of(data):
    return np.asarray(Image.open(io.BytesIO(data)))


def tensor(pixels, binary=True):
    given = triton.InferInput("image", list(pixels.shape), "UINT8")
    given.set_data_from_numpy(pixels, binary_data=binary)
    return given


def test_the_inputs_of_these_tests_pass_and_fail(expected):
    assert {result.verdict for result in expected} == {"pass", "fail"}


def test_health_and_metadata_as_triton_reads_them(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("line")
    assert client.is_model_ready("line", "1")
    assert not client.is_model_ready("other")
    assert client.get_server_metadata()["extensions"] == ["binary_tensor_data", "model_repository"]
    described = client.get_model_metadata("line")
    assert described["inputs"] == [{"name": "image", "datatype": "UINT8", "shape": [-1, -1, 3]}]
    assert [output["name"] for output in described["outputs"]] == ["score", "threshold", "verdict", "anomaly_map"]
    assert client.get_model_repository_index() == [{"name": "line", "version": "1", "state": "READY", "reason": ""}]


@pytest.mark.parametrize("binary_in", [True, False], ids=["binary in", "JSON in"])
@pytest.mark.parametrize("binary_out", [True, False], ids=["binary out", "JSON out"])
def test_triton_gets_what_the_runtime_says(client, line_images, expected, binary_in, binary_out):
    wanted = [
        triton.InferRequestedOutput(name, binary_data=binary_out)
        for name in ("score", "threshold", "verdict", "anomaly_map")
    ]
    for data, result in zip(line_images[:6], expected, strict=False):
        reply = client.infer("line", [tensor(pixels_of(data), binary_in)], outputs=wanted, request_id="part 7")
        assert reply.get_response()["id"] == "part 7"
        assert reply.as_numpy("score") == pytest.approx([result.score], rel=1e-5)
        assert reply.as_numpy("threshold") == pytest.approx([result.threshold])
        verdict = reply.as_numpy("verdict")[0]
        assert (verdict.decode() if isinstance(verdict, bytes) else verdict) == result.verdict
        np.testing.assert_allclose(reply.as_numpy("anomaly_map"), result.anomaly_map, atol=1e-5)


def test_an_encoded_file_as_bytes(client, line_images, expected):
    given = triton.InferInput("image", [1], "BYTES")
    given.set_data_from_numpy(np.array([line_images[0]], dtype=object))
    assert client.infer("line", [given]).as_numpy("score") == pytest.approx([expected[0].score], rel=1e-5)


def test_an_encoded_file_in_json_is_base64(server, line_images, expected):
    message = {"inputs": [tensor_in_json(line_images[0])]}
    status, reply = ask_json(f"{server.url}/v2/models/line/versions/1/infer", json.dumps(message).encode())
    assert status == 200
    assert reply["outputs"][0]["data"] == pytest.approx([expected[0].score], rel=1e-5)
    assert {"queue", "first_pass", "masked_pass", "score"} <= set(reply["parameters"])


def test_a_leading_axis_of_one_comes_back(client, line_images, expected):
    reply = client.infer("line", [tensor(pixels_of(line_images[0])[None])])
    np.testing.assert_allclose(reply.as_numpy("anomaly_map"), expected[0].anomaly_map[None], atol=1e-5)


@pytest.mark.parametrize("compression", ["gzip", "deflate"])
def test_a_compressed_request(client, line_images, expected, compression):
    reply = client.infer("line", [tensor(pixels_of(line_images[1]))], request_compression_algorithm=compression)
    assert reply.as_numpy("score") == pytest.approx([expected[1].score], rel=1e-5)


def test_triton_raises_what_the_server_refuses(client):
    with pytest.raises(triton.InferenceServerException, match="there is no model 'other'"):
        client.infer("other", [tensor(np.zeros((8, 8, 3), np.uint8))])
    with pytest.raises(triton.InferenceServerException, match=r"\[H, W, 3\]"):
        client.infer("line", [tensor(np.zeros((2, 8, 8, 3), np.uint8))])


def test_inspect_takes_a_file_raw_or_in_a_form(server, line_images, expected):
    raw = ask_json(f"{server.url}/inspect", line_images[2])
    form = (
        b"--x\r\nContent-Disposition: form-data; name=a; filename=../p.png\r\n\r\n" + line_images[2] + b"\r\n--x--\r\n"
    )
    formed = ask_json(f"{server.url}/inspect/line", form, Content_Type="multipart/form-data; boundary=x")
    for status, reply in (raw, formed):
        assert status == 200
        assert reply["score"] == pytest.approx(expected[2].score, rel=1e-5)
        assert reply["threshold"] == pytest.approx(expected[2].threshold)
        assert reply["verdict"] == expected[2].verdict
        assert reply["early_exit"] is False
        assert [one["box"] for one in reply["regions"]] == [list(one.box) for one in expected[2].regions]
        assert reply["times_ms"]["total"] >= reply["times_ms"]["first_pass"] > 0
        assert "map" not in reply


def test_a_picture_that_is_odd_for_the_network_is_judged_with_a_note(server, client, line_images):
    file = io.BytesIO()
    Image.fromarray(np.full((4, 24), 4000, np.uint16)).save(file, "PNG")  # a 12-bit camera's white is 4095
    status, reply = ask_json(f"{server.url}/inspect", file.getvalue(), X_Request_Id="odd")
    assert status == 200
    deep, small = reply["notes"]
    assert deep.startswith("the image has more than 8 bits: 65535 counts as white")
    assert small == "the image is much smaller (24 x 4) than the 16 x 16 it is enlarged to"
    given = triton.InferInput("image", [1], "BYTES")
    given.set_data_from_numpy(np.array([file.getvalue()], object))
    client.infer("line", [given], headers={"X-Request-Id": "odd-2"})
    end = time.monotonic() + 10
    while len(lines := [e for e in server.named("request") if "notes" in e]) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    assert {line["id"]: line["notes"] for line in lines} == {"odd": reply["notes"], "odd-2": reply["notes"]}
    assert "notes" not in ask_json(f"{server.url}/inspect", line_images[0])[1]


def test_an_early_exit_is_said_of_each_picture(line_bundle, line_images):
    with load(line_bundle, threads=1, early_exit=0.5) as detector:
        wanted = detector.batch(line_images)
    assert {result.early_exit for result in wanted} == {True, False}
    with serving([line_bundle], *ONE, "--early-exit", "0.5") as running:
        for image, result in zip(line_images, wanted, strict=True):
            _, reply = ask_json(f"{running.url}/inspect", image)
            assert (reply["verdict"], reply["early_exit"]) == (result.verdict, result.early_exit)
            assert reply["score"] == pytest.approx(result.score, rel=1e-5)
            assert (reply["times_ms"]["masked_pass"] == 0) == result.early_exit
        message = json.dumps({"inputs": [tensor_in_json(line_images[0])]}).encode()
        _, reply = ask_json(f"{running.url}/v2/models/line/infer", message)
        assert reply["parameters"]["early_exit"] is wanted[0].early_exit


def tensor_in_json(data):
    return {"name": "image", "datatype": "BYTES", "shape": [1], "data": [base64.b64encode(data).decode()]}


def test_inspect_gives_the_map_as_numbers_or_as_a_picture(server, line_images, expected):
    _, reply = ask_json(f"{server.url}/inspect?map=npy", line_images[3])
    found = np.load(io.BytesIO(base64.b64decode(reply["map"]["base64"])), allow_pickle=False)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected[3].anomaly_map, atol=1e-5)
    _, reply = ask_json(f"{server.url}/inspect?map=png", line_images[3])
    assert Image.open(io.BytesIO(base64.b64decode(reply["map"]["base64"]))).format == "PNG"
    assert ask(f"{server.url}/inspect?map=jpg", line_images[3])[0] == 400


def test_many_at_once_are_batched_and_each_gets_its_own(line_bundle, line_images, expected):
    with serving([line_bundle], *ONE, "--batch", "8") as server:
        replies = at_once([lambda d=data: ask_json(f"{server.url}/inspect", d) for data in line_images[:24]])
        metrics = ask(f"{server.url}/metrics")[2].decode()
    for (status, reply), result in zip(replies, expected, strict=False):
        assert status == 200
        assert reply["score"] == pytest.approx(result.score, rel=1e-5)
        assert reply["verdict"] == result.verdict
    assert value_of(metrics, 'mdps_batch_images_bucket{le="1.0",model="line"}') < value_of(
        metrics, 'mdps_batch_images_count{model="line"}'
    )


def at_once(calls):
    """Results of calls made by a thread each, in order."""
    found = [None] * len(calls)

    def put(index, call):
        found[index] = call()

    threads = [threading.Thread(target=put, args=pair) for pair in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def value_of(metrics, series):
    return next(float(line.rsplit(" ", 1)[1]) for line in metrics.splitlines() if line.startswith(series + " "))


def test_a_full_queue_refuses_at_once_and_loses_nothing(line_bundle, line_images, expected):
    with serving([line_bundle], *ONE, "--queue", "2", "--batch", "1") as server:
        replies = at_once([lambda d=data: ask(f"{server.url}/inspect", d) for data in line_images])
        assert ask(f"{server.url}/v2/health/ready")[0] == 200
    statuses = [status for status, _, _ in replies]
    assert set(statuses) == {200, 503}
    for (status, headers, body), result in zip(replies, expected, strict=True):
        if status == 503:
            assert int(headers["Retry-After"]) >= 1
            assert "try again" in json.loads(body)["error"]
        else:
            assert json.loads(body)["score"] == pytest.approx(result.score, rel=1e-5)


def test_a_deadline_ends_a_request_and_its_work_is_not_done(line_bundle, line_images):
    with serving([line_bundle], *ONE, "--batch", "1", "--queue", "64") as server:
        url = f"{server.url}/inspect"
        long = [lambda d=data: ask(url, d) for data in line_images[:10]]
        short = [lambda d=data: ask(url, d, X_Deadline_Ms="1") for data in line_images[:10]]
        replies = at_once(long + short)
        assert [status for status, _, _ in replies[:10]] == [200] * 10
        # Too late is said afterwards, or at once where it is foreseen.
        assert {status for status, _, _ in replies[10:]} <= {503, 504}
        assert all("deadline" in json.loads(body)["error"] for _, _, body in replies[10:])
        judged = value_of(ask(f"{server.url}/metrics")[2].decode(), 'mdps_batch_images_count{model="line"}')
        assert judged == 10  # only results that were asked for are counted
        assert ask(url, line_images[0], X_Deadline_Ms="soon")[0] == 400


def test_triton_timeout_is_a_deadline_too(client, line_images):
    with pytest.raises(triton.InferenceServerException, match="deadline"):
        client.infer("line", [tensor(pixels_of(line_images[0]))], timeout=1)


def test_two_bundles_under_their_own_names(line_bundle, line_images):
    with serving([f"blue={line_bundle}", f"red={line_bundle}"], *ONE) as server:
        assert [ask_json(f"{server.url}/inspect/{name}", line_images[0])[1]["model"] for name in ("red", "blue")] == [
            "red",
            "blue",
        ]
        assert ask(f"{server.url}/inspect/green", line_images[0])[0] == 404
        assert ask_json(f"{server.url}/live")[1] == {"models": ["blue", "red"]}


def test_scores_only_offers_no_verdict(line_bundle, line_images, expected):
    with serving([line_bundle], *ONE, "--scores-only") as server:
        outputs = ask_json(f"{server.url}/v2/models/line")[1]["outputs"]
        assert [output["name"] for output in outputs] == ["score", "anomaly_map"]
        reply = ask_json(f"{server.url}/inspect", line_images[0])[1]
        assert reply["verdict"] is None
        assert reply["threshold"] is None
        assert reply["score"] > 0


def test_metrics_tell_of_verdicts_stages_errors_and_the_provider(line_bundle, line_images, expected):
    with serving([line_bundle], *ONE) as server:
        for data in line_images[:5]:
            assert ask(f"{server.url}/inspect", data)[0] == 200
        assert ask(f"{server.url}/inspect", b"no image")[0] == 400
        text = ask(f"{server.url}/metrics")[2].decode()
    for verdict in ("pass", "fail"):
        count = sum(result.verdict == verdict for result in expected[:5])
        assert not count or value_of(text, f'mdps_verdicts_total{{model="line",verdict="{verdict}"}}') == count
    for stage in ("read", "prepare", "queue", "first_pass", "masked_pass", "score", "answer", "total"):
        assert value_of(text, f'mdps_stage_seconds_count{{model="line",stage="{stage}"}}') == 5
    assert value_of(text, 'mdps_errors_total{kind="bad_image"}') == 1
    assert value_of(text, 'mdps_queue_length{model="line"}') == 0
    assert 'graph="score",model="line",provider="CPUExecutionProvider"' in text
    assert value_of(text, 'mdps_threshold{model="line"}') == pytest.approx(expected[0].threshold)


def test_the_log_has_an_object_a_request(server, line_images):
    _, headers, _ = ask(f"{server.url}/inspect", line_images[0], X_Request_Id="camera-1:77")
    assert headers["X-Request-Id"] == "camera-1:77"
    end = time.monotonic() + 10
    while not (found := [e for e in server.named("request") if e["id"] == "camera-1:77"]) and time.monotonic() < end:
        time.sleep(0.01)
    (line,) = found
    assert line["status"] == 200
    assert line["verdict"] in ("pass", "fail")
    assert line["times"]["total"] > 0


def test_sigterm_answers_what_was_accepted_and_exits_with_0(line_bundle, line_images, expected):
    with serving([line_bundle], *ONE, "--batch", "1", "--queue", "64") as server:
        replies = []
        threads = [
            threading.Thread(target=lambda i=i: replies.append((i, *ask_json(f"{server.url}/inspect", line_images[i]))))
            for i in range(20)
        ]
        for thread in threads:
            thread.start()
        while not replies:  # the first is answered, the others wait
            time.sleep(0.001)
        server.process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join()
        assert server.stop() == 0
        assert server.named("stopped")
    assert len(replies) == 20
    for index, status, reply in replies:
        assert status == 200
        assert reply["score"] == pytest.approx(expected[index].score, rel=1e-5)
