"""Two hundred hostile inputs: each is refused with a clear 4xx, and the server goes on as if nothing had been."""

import base64
import contextlib
import gzip
import io
import json
import socket
import struct
import threading
import time
import urllib.request
import zlib

import numpy as np
import pytest
from PIL import Image
from server_process import serving

pytest.importorskip("starlette", reason="the extra [serve] is not installed")

INFER = "/v2/models/line/infer"
BODY_LIMIT, PIXEL_LIMIT = 2**20, 1_000_000


def request(method, path, body=b"", **headers):
    """The bytes of a request."""
    lines = {"Host": "127.0.0.1", "Content-Length": str(len(body)), "Connection": "close"}
    lines |= {name.replace("_", "-"): value for name, value in headers.items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value is not None)
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body


def saved(kind, size=(24, 24), mode="RGB", **options):
    buffer = io.BytesIO()
    levels = np.random.default_rng(0).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(levels).convert(mode).save(buffer, kind, **options)
    return buffer.getvalue()


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width, height, *chunks, depth=8, colour=2):
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + chunk(b"IEND", b"")


def message(**changes):
    """A good request's JSON, with changes to its input; None removes a key."""
    tensor = {"name": "image", "shape": [2, 2, 3], "datatype": "UINT8", "data": [7] * 12} | changes
    return {"inputs": [{key: value for key, value in tensor.items() if value is not None}]}


def infer(content, **headers):
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return request("POST", INFER, body, **headers)


def with_binary(head, raw, length=None):
    text = json.dumps(head).encode()
    size = str(len(text) if length is None else length)
    return infer(text + raw, Inference_Header_Content_Length=size)


def form(body, boundary="x", **headers):
    return request("POST", "/inspect", body, Content_Type=f"multipart/form-data; boundary={boundary}", **headers)


def part(data, name="a", filename="p.png"):
    return (
        f'--x\r\nContent-Disposition: form-data; name="{name}"; filename="{filename}"\r\n\r\n'.encode() + data + b"\r\n"
    )


def progressive(scans, size=64):
    """A grey JPEG of scans that each say in a few bytes that there is nothing new in any block."""

    def segment(marker, data):
        return bytes([0xFF, marker]) + struct.pack(">H", len(data) + 2) + data

    one_code = bytes([1] + [0] * 15)
    blocks = (size // 8) ** 2
    return (
        b"\xff\xd8"
        + segment(0xDB, b"\0" + bytes([1] * 64))
        + segment(0xC2, struct.pack(">BHHB", 8, size, size, 1) + bytes([1, 0x11, 0]))
        + segment(0xC4, b"\x00" + one_code + b"\x00")
        + segment(0xC4, b"\x10" + one_code + b"\xe0")  # the code 0: no more in 2^14 blocks and those that follow
        + segment(0xDA, bytes([1, 1, 0, 0, 0, 0]))
        + bytes((blocks + 7) // 8)
        + (segment(0xDA, bytes([1, 1, 0, 1, 63, 0])) + b"\x2a\xaa") * scans
        + b"\xff\xd9"
    )


PNG, JPEG = saved("PNG"), saved("JPEG")
BINARY = {"name": "image", "shape": [2, 2, 3], "datatype": "UINT8", "parameters": {"binary_data_size": 12}}


SHAPES = (
    [], None, "2,2,3", [2, 2], [2, 2, 4], [2, 2, 3, 1], [2, 2, 2, 3], [-2, -2, 3], [2, 2, 3.0], [True, 4, 3],
    [0, 2, 3], [2**60, 2, 3], [1, 1, 1, 1, 3], ["2", 2, 3], [None], {"a": 1},
)  # fmt: skip
DATA = (
    [256] + [0] * 11, [-1] * 12, [0.5] * 12, [True] * 12, ["7"] * 12, [None] * 12, [7] * 11, [7] * 13, [], "x" * 12,
    {}, None, [[7] * 6, [7] * 5], [[[]]], [2**70] * 12, [{}] * 12,
)  # fmt: skip


def images():
    """Bodies for /inspect."""
    yield "nothing", b"", 400
    yield "text", b"this is a text and no image", 400
    yield "zeros", bytes(5000), 400
    yield "noise", np.random.default_rng(1).bytes(5000), 400
    for share in (1, 5, 20, 40, 60, 80, 95):
        yield f"PNG cut at {share} %", PNG[: max(9, len(PNG) * share // 100)], 400
    for share in (1, 5, 20, 40, 60, 80):
        yield f"JPEG cut at {share} %", JPEG[: len(JPEG) * share // 100], 400
    for kind in ("WEBP", "TIFF", "BMP", "GIF", "PPM"):
        whole = saved(kind, **({"lossless": True} if kind == "WEBP" else {}))
        yield f"{kind} cut in half", whole[: len(whole) // 2], 400
    tiny = chunk(b"IDAT", zlib.compress(b""))
    yield "bomb of a PNG header", png(60000, 60000, tiny), 413
    yield "bomb beyond Pillow's own limit", png(2**31 - 1, 2**31 - 1, tiny), 413
    yield "long line", png(2**31 - 1, 1, tiny), 413
    yield "long column", png(1, 2**31 - 1, tiny), 413
    yield "a little too large", png(1001, 1000, tiny), 413
    yield "real bomb", png(1200, 1200, chunk(b"IDAT", zlib.compress(bytes(1200 * 3601), 9))), 413
    yield "no pixels", png(0, 10, tiny), 400
    yield "data of a bomb in a small frame", png(4, 4, chunk(b"IDAT", zlib.compress(bytes(5), 9))), 400
    yield "text bomb", png(4, 4, chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(80_000_000), 9)), tiny), 400
    yield "profile bomb", png(4, 4, chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(80_000_000), 9)), tiny), 400
    yield "wrong check sum", PNG[:40] + bytes([PNG[40] ^ 255]) + PNG[41:], 400
    yield "palette without colours", png(4, 4, tiny, colour=3), 400
    yield "unknown colour type", png(4, 4, tiny, colour=5), 400
    yield "unknown depth", png(4, 4, tiny, depth=3), 400
    yield "no data chunk", png(4, 4), 400
    yield "GIF bomb", b"GIF89a" + struct.pack("<HH", 65535, 65535) + b"\0\0\0,\0\0\0\0" + b"\xff" * 20, (400, 413)
    yield (
        "BMP bomb",
        b"BM"
        + struct.pack("<IHHI", 100, 0, 0, 54)
        + struct.pack("<IiiHHIIiiII", 40, 60000, 60000, 1, 24, 0, 0, 0, 0, 0, 0),
        413,
    )
    yield (
        "BMP of odd size",
        b"BM" + struct.pack("<IHHI", 100, 0, 0, 54) + struct.pack("<IiiHHIIiiII", 40, -5, 5, 1, 24, 0, 0, 0, 0, 0, 0),
        (400, 413),
    )
    yield "PPM bomb", b"P6\n60000 60000\n255\n", 413
    yield "PPM without numbers", b"P6\nwide high\n255\n", 400
    yield "TIFF of loops", b"II*\0\x08\0\0\0" + struct.pack("<H", 0) + struct.pack("<I", 8), 400
    yield "EPS", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/etc/passwd) (r) file\n", 400
    yield "PDF", b"%PDF-1.7\n1 0 obj\n<< >>\nendobj\n", 400
    yield "SVG", b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>', 400
    yield "XML bomb", b'<?xml version="1.0"?><!DOCTYPE a [<!ENTITY b "x">]><a>&b;</a>', 400
    yield "pickle", b"\x80\x04\x95\x0b\0\0\0\0\0\0\0\x8c\x02os\x94.", 400
    yield "NumPy file", b"\x93NUMPY\x01\0v\0{'descr': '|O'}", 400
    yield "icon", saved("ICO"), 400
    yield "TGA", saved("TGA"), 400
    for kind in ("TIFF", "GIF", "PNG", "WEBP"):
        yield f"{kind} of two pictures", saved(kind, save_all=True, append_images=[Image.new("RGB", (24, 24))]), 400
    yield "JPEG whose end was never written", JPEG[: len(JPEG) // 2] + bytes(len(JPEG) // 2), 400
    yield "JPEG of a thousand scans", progressive(1000), 400
    yield "one byte too many", bytes(BODY_LIMIT + 1), 413


def messages():
    """Wrong requests in the protocol's JSON."""
    yield "no JSON", b"{", 400
    yield "nothing", b"", 400
    yield "a list", [], 400
    yield "null", b"null", 400
    yield "a number", b"7", 400
    yield "NaN", b'{"inputs": [NaN]}', 400
    yield (
        "infinity",
        b'{"inputs": [{"name": "image", "shape": [1,1,3], "datatype": "UINT8", "data": [1, Infinity, 3]}]}',
        400,
    )
    yield "no text", b"\xff\xfe\x00", 400
    yield "deeply nested", b'{"inputs":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400
    yield "a number of 5000 digits", b'{"inputs": ' + b"9" * 5000 + b"}", 400
    yield "no inputs", {}, 400
    yield "inputs as an object", {"inputs": {}}, 400
    yield "empty inputs", {"inputs": []}, 400
    yield "two inputs", {"inputs": message()["inputs"] * 2}, 400
    yield "an input of null", {"inputs": [None]}, 400
    for name in ("Image", "", None, 7, [], {}, "../image", "x" * 10_000):
        yield f"input called {str(name)[:12]!r}", message(name=name), 400
    for kind in ("FP32", "INT8", "uint8", "", None, 3, "BOOL", ["UINT8"]):
        yield f"datatype {kind!r}", message(datatype=kind), 400
    for shape in SHAPES:
        yield f"shape {str(shape)[:30]}", message(shape=shape), (400, 413)
    yield "shape of a bomb", message(shape=[50_000, 50_000, 3]), 413
    for data in DATA:
        yield f"data {str(data)[:30]} ({len(data or ())})", message(data=data), 400
    for value in ("!", "AAA", base64.b64encode(b"no image").decode(), 7, ""):
        yield f"BYTES {str(value)[:12]!r}", message(datatype="BYTES", shape=[1], data=[value]), 400
    yield "two files", message(datatype="BYTES", shape=[2], data=["AAAA", "AAAA"]), 400
    for outputs in (
        "score",
        [],
        [7],
        [{}],
        [{"name": "logits"}],
        [{"name": "score"}] * 2,
        [{"name": "score"}] * 99,
        {},
    ):
        yield f"outputs {str(outputs)[:30]} ({len(outputs)})", message() | {"outputs": outputs}, 400
    for parameters in ([], {"binary_data": 1}, {"classification": 3}, {"shared_memory_region": "a"}):
        yield (
            f"output parameters {parameters}",
            message() | {"outputs": [{"name": "score", "parameters": parameters}]},
            400,
        )
    for parameters in ([], "x", {"timeout": "1"}, {"timeout": -1}, {"timeout": 1e9}, {"binary_data_output": "yes"}):
        yield f"parameters {parameters}", message() | {"parameters": parameters}, 400
    for name in (7, "x" * 1000, [], {}):
        yield f"id {str(name)[:12]!r}", message() | {"id": name}, 400
    yield "shared memory", message(data=None, parameters={"shared_memory_region": "/dev/shm/x"}), 400
    yield "parameters as a list", message(parameters=[1]), 400


def tensors():
    """Binary tensors whose lengths do not fit."""
    good = {"inputs": [BINARY]}
    for length in ("-1", "0", "1e3", "abc", "99999999999999999999", "1", "100000", "", " ", "0x10", "١٢"):
        raw = length.encode("utf-8").decode("latin-1")
        yield f"header length {length!r}", with_binary(good, bytes(12), raw), 400
    for size in (11, 13, 0, -12, "12", 12.0, None, 2**70, True):
        tensor = BINARY | {"parameters": {"binary_data_size": size}}
        yield f"binary size {size!r}", with_binary({"inputs": [tensor]}, bytes(12)), 400
    yield "too few bytes", with_binary(good, bytes(11)), 400
    yield "too many bytes", with_binary(good, bytes(13)), 400
    yield "no bytes", with_binary(good, b""), 400
    yield "bytes and data", with_binary({"inputs": [BINARY | {"data": [7] * 12}]}, bytes(12)), 400
    yield "no header", infer(good), 400
    floats = BINARY | {"datatype": "FP32", "parameters": {"binary_data_size": 48}}
    yield "NaN tensor", with_binary({"inputs": [floats]}, np.full(12, np.nan, "<f4").tobytes()), 400
    for raw in (
        b"",
        b"\1\0",
        struct.pack("<I", 2**32 - 1),
        struct.pack("<I", 5) + b"abcd",
        struct.pack("<I", 4) + b"abcd",
    ):
        tensor = {"name": "image", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": len(raw)}}
        yield f"BYTES of {raw!r}", with_binary({"inputs": [tensor]}, raw), 400


def encodings():
    """Compressed bodies."""
    yield "gzip bomb", gzip.compress(bytes(200_000_000), 9)[:BODY_LIMIT], "gzip", 413
    yield "deflate bomb", zlib.compress(bytes(200_000_000), 9), "deflate", 413
    yield "gzip of gzip", gzip.compress(gzip.compress(PNG)), "gzip", 400
    yield "no gzip", PNG, "gzip", 400
    yield "gzip cut", gzip.compress(PNG)[:-9], "gzip", 400
    yield "gzip with more behind it", gzip.compress(PNG) + b"more", "gzip", 400
    yield "two members", gzip.compress(PNG) * 2, "gzip", 400
    for name in ("br", "zstd", "compress", "gzip, gzip", "x", "*"):
        yield f"encoding {name}", PNG, name, 415


def forms():
    """Forms."""
    yield "no boundary", request("POST", "/inspect", part(PNG) + b"--x--\r\n", Content_Type="multipart/form-data"), 400
    yield "other boundary", form(part(PNG) + b"--x--\r\n", "y"), 400
    yield "nothing", form(b""), 400
    yield "only an end", form(b"--x--\r\n"), 400
    yield "no file", form(b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\ntext\r\n--x--\r\n'), 400
    yield "two files", form(part(PNG) + part(PNG) + b"--x--\r\n"), 400
    yield "part without a name", form(b"--x\r\n\r\ntext\r\n--x--\r\n"), 400
    yield (
        "a hundred fields",
        form(b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n' * 100 + b"--x--\r\n"),
        400,
    )
    yield "cut off", form(part(PNG[:100])), 400
    yield "no image in it", form(part(b"text", filename="../../../etc/cron.d/x") + b"--x--\r\n"), 400
    yield "header without end", form(b"--x\r\n" + b"A: " + b"a" * 500_000), 400
    yield "many headers", form(b"--x\r\n" + b"A: a\r\n" * 50_000 + b"\r\n\r\n--x--\r\n"), 400


PATHS = """
/../../etc/passwd  /%2e%2e/%2e%2e/etc/passwd  /v2/models/../../../etc/passwd  /v2/models/..%2f..%2fetc%2fpasswd
/v2/models/%2e%2e  /v2/models/..  /v2/models/line%00  /v2/models/line%2f..%2f..  /v2/models/line/versions/2
/v2/models/line/versions/..  /v2/models/line/versions/1/../..  /v2/models//  /v2/models/%ff%fe  /live/..%2f..
/live/line/1/..%2fheat.png  /live/line/1/%2e%2e.png  /live/line/99999999999999999999999/heat.png
/live/line/-1/heat.png  /live/line?since=-1  /live/line?since=NaN  /page.html  /static/../page.js  /.git/config
//v2  /v2/  /\\windows\\win.ini  /v2/models/%3Cscript%3Ealert(1)  /file:///etc/passwd  *
http://169.254.169.254/latest/meta-data
"""
LONG = ("/live/line?since=" + "9" * 400, "/v2/models/" + "x" * 5000)


def paths():
    """Names with tricks."""
    for path in (*PATHS.split(), *LONG):
        yield path[:50], request("GET", path), (400, 404)
    for name in ("..%2f..%2ftmp", "%2fetc", "line%00", "https:%2f%2fexample.org%2fmodel", "x" * 3000):
        yield f"load {name[:20]}", request("POST", f"/v2/repository/models/{name}/load"), 404
        yield f"inspect with {name[:20]}", request("POST", f"/inspect/{name}", PNG), 404
    for method in ("PUT", "DELETE", "PATCH", "TRACE", "CONNECT", "BREW", "GET"):
        yield f"{method} to inspect", request(method, "/inspect"), 405
    for query in ("map=../x", "map=", "map=PNG", "record=1", "record=", "map=exe&record=no"):
        yield f"query {query}", request("POST", f"/inspect?{query}", PNG), 400
    for text in ("0", "-5", "NaN", "inf", "1e400", "soon", "", "0x10", "1,5"):
        yield f"deadline {text!r}", request("POST", "/inspect", PNG, X_Deadline_Ms=text), 400


def wire():
    """Bytes that are hardly HTTP."""
    yield "huge header", request("GET", "/v2", X_Big="a" * 100_000), 431
    yield "huge request line", request("GET", "/" + "a" * 100_000), 431
    yield "many headers", request("GET", "/v2", **{f"X-{i}": "1" for i in range(80)}), 431
    yield "very many headers", request("GET", "/v2", **{f"X-{i}": "1" for i in range(5000)}), 431
    yield "no HTTP", b"hello\r\n\r\n", 400
    yield "binary", bytes(range(256)) + b"\r\n\r\n", 400
    yield "TLS to a plain port", b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03" + bytes(500) + b"\r\n\r\n", 400
    yield "HTTP/2 preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", (400, 404, 405, 505)
    yield "HTTP/9", b"GET /v2 HTTP/9.9\r\nHost: 127.0.0.1\r\n\r\n", (400, 505)
    yield "no host", b"GET /v2 HTTP/1.1\r\n\r\n", 400
    yield "two hosts", b"GET /v2 HTTP/1.1\r\nHost: a\r\nHost: 127.0.0.1\r\n\r\n", 400
    yield "null in a header", b"GET /v2 HTTP/1.1\r\nHost: 127.0.0.1\r\nA: b\0c\r\n\r\n", 400
    yield "space before a colon", b"GET /v2 HTTP/1.1\r\nHost: 127.0.0.1\r\nA : b\r\n\r\n", 400
    yield "header without a colon", b"GET /v2 HTTP/1.1\r\nHost: 127.0.0.1\r\nnonsense\r\n\r\n", 400
    yield "empty header name", b"GET /v2 HTTP/1.1\r\nHost: 127.0.0.1\r\n: b\r\n\r\n", 400
    yield "negative length", request("POST", "/inspect", PNG, Content_Length="-5"), 400
    yield "length of letters", request("POST", "/inspect", PNG, Content_Length="many"), 400
    yield (
        "length of 30 digits",
        request("POST", "/inspect", b"", Content_Length="9" * 30, Connection="close"),
        (400, 413),
    )
    yield "two lengths", request("POST", "/inspect", PNG, Content_Length="5, 6"), 400
    yield (
        "length and chunks",
        request("POST", "/inspect", b"zz\r\n", Transfer_Encoding="chunked", Content_Length="9"),
        400,
    )
    yield (
        "length and chunks that are whole",
        request("GET", "/v2", b"0\r\n\r\n", Transfer_Encoding="chunked", Content_Length="5"),
        400,
    )
    yield "chunks of letters", chunked(b"zz\r\nabc\r\n0\r\n\r\n"), 400
    yield "negative chunk", chunked(b"-5\r\nabc\r\n0\r\n\r\n"), 400
    yield "endless chunk line", chunked(b"5;" + b"a" * 100_000), (400, 431)
    yield "too many chunks", chunked(b"1000\r\n" + bytes(4096) + b"\r\n", 300), 413
    yield (
        "unknown transfer",
        request("POST", "/inspect", PNG, Transfer_Encoding="gzip", Content_Length=None),
        (400, 501),
    )
    yield (
        "expecting the impossible",
        request("POST", "/inspect", b"", Content_Length="99999999", Expect="100-continue"),
        413,
    )
    yield "websocket", request("GET", "/nothing", Upgrade="websocket", Connection="Upgrade, close"), 404
    yield "foreign host", request("GET", "/v2", Host="evil.example"), 421
    yield "foreign origin", request("POST", "/inspect", PNG, Origin="https://evil.example"), 403


def chunked(content, times=1):
    return request("POST", "/inspect", content * times, Content_Length=None, Transfer_Encoding="chunked")


def cases():
    """(name, bytes to send, statuses that are right)"""
    for name, body, status in images():
        yield f"image: {name}", request("POST", "/inspect", body), status
    for name, content, status in messages():
        yield f"JSON: {name}", infer(content), status
    for name, body, encoding, status in encodings():
        yield f"encoding: {name}", request("POST", "/inspect", body, Content_Encoding=encoding), status
    for kind, made in (("tensor", tensors), ("form", forms), ("path", paths), ("wire", wire)):
        for name, sent, status in made():
            yield f"{kind}: {name}", sent, status


CASES = list(cases())


@pytest.fixture(scope="module")
def server(line_bundle):
    options = ("--max-body-mib", str(BODY_LIMIT / 2**20), "--max-megapixels", str(PIXEL_LIMIT / 1e6))
    with serving([line_bundle], "--threads", "1", "--deadline-ms", "20000", *options) as running:
        yield running


def exchange(port, sent):
    """Everything the server answers, until it closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        with contextlib.suppress(OSError):  # it has heard enough; what it said may still be read
            connection.sendall(sent)
        answer = b""
        try:
            while received := connection.recv(65536):
                answer += received
                if complete(answer):
                    break
        except ConnectionResetError:
            pass
    return answer


def complete(answer):
    head, end, body = answer.partition(b"\r\n\r\n")
    lengths = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
    return bool(end and lengths) and len(body) >= int(lengths[0])


def test_there_are_two_hundred():
    assert len(CASES) >= 200
    assert len({name for name, _, _ in CASES}) == len(CASES)


@pytest.mark.parametrize(
    ("sent", "right"), [case[1:] for case in CASES], ids=[case[0].encode("ascii", "replace").decode() for case in CASES]
)
def test_a_hostile_input_is_refused_with_a_sentence(server, sent, right):
    answer = exchange(server.port, sent)
    assert answer.startswith(b"HTTP/1.1 "), answer[:200]
    status = int(answer[9:12])
    assert status in (right if isinstance(right, tuple) else (right,)), answer[:600]
    if not sent.startswith(b"HEAD"):
        said = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        assert said
        assert "Traceback" not in said
        assert "File " not in said


def test_afterwards_the_server_is_as_before(server, line_images):
    """The last test of this file."""
    for _ in range(3):
        with urllib.request.urlopen(urllib.request.Request(f"{server.url}/inspect", line_images[0])) as reply:
            assert json.load(reply)["verdict"] in ("pass", "fail")
    assert server.named("internal_error") == []
    assert [event for event in server.events if event["level"] == "error"] == []
    assert [event for event in server.named("request") if (event.get("status") or 0) >= 500] == []
    assert server.memory() < 600e6


def test_slow_clients_are_let_go_and_hold_up_nobody(line_bundle, line_images):
    whole = request("POST", "/inspect", line_images[0])
    openings = {
        "says nothing": (b"", b"", 408),
        "head byte by byte": (b"GET /v2 HTTP/1.1\r\nA: ", b"a", 408),
        "body byte by byte": (whole[: whole.index(b"\r\n\r\n") + 4], b"\x89", 408),
        "half a body": (whole[:-50], b"", 408),
        "half a chunk": (chunked(b"ff\r\nabc"), b"", 408),
    }
    with serving([line_bundle], "--threads", "1", "--deadline-ms", "3000") as server:
        answers = {}

        def crawl(name, opening, drip):
            with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
                connection.sendall(opening)
                connection.settimeout(0.2)
                end = time.monotonic() + 30
                while time.monotonic() < end:
                    try:
                        answers[name] = connection.recv(65536)
                        return
                    except TimeoutError:
                        connection.sendall(drip)
                    except OSError:
                        return

        crawling = [
            threading.Thread(target=crawl, args=(n, o, d)) for n, (o, d, _) in openings.items() for _ in range(4)
        ]
        for thread in crawling:
            thread.start()
        while any(thread.is_alive() for thread in crawling):
            with urllib.request.urlopen(urllib.request.Request(f"{server.url}/inspect", line_images[0])) as reply:
                assert reply.status == 200
            time.sleep(0.1)
        for name, (_, _, status) in openings.items():
            assert answers.get(name, b"")[9:12] == str(status).encode(), (name, answers.get(name))
        assert server.named("internal_error") == []


def test_a_client_that_reads_nothing_and_one_that_leaves_cost_nothing(line_bundle, line_images):
    with serving([line_bundle], "--threads", "1") as server:
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", server.port)) as connection:
                connection.sendall(request("POST", "/inspect?map=png", line_images[0]))
        with urllib.request.urlopen(urllib.request.Request(f"{server.url}/inspect", line_images[0])) as reply:
            assert reply.status == 200
        with urllib.request.urlopen(f"{server.url}/metrics") as reply:
            text = reply.read().decode()
        assert 'mdps_queue_length{model="line"} 0.0' in text
        assert server.named("internal_error") == []


def test_too_many_connections_are_refused_and_the_others_go_on(line_bundle, line_images):
    with serving([line_bundle], "--threads", "1", "--max-connections", "8") as server:
        held = [socket.create_connection(("127.0.0.1", server.port), timeout=30) for _ in range(8)]
        time.sleep(0.5)
        answer = exchange(server.port, request("POST", "/inspect", line_images[0]))
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"retry-after: 1" in answer.lower()
        held[0].sendall(request("POST", "/inspect", line_images[0]))
        assert held[0].recv(65536).startswith(b"HTTP/1.1 200")
        for connection in held:
            connection.close()
        time.sleep(0.5)
        assert exchange(server.port, request("POST", "/inspect", line_images[0])).startswith(b"HTTP/1.1 200")
