"""Target `request`: heads and bodies of `mdps serve`, through its application, with a detector that only looks."""

import asyncio
import base64
import gzip
import io
import json
import struct
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import trees
from engine import Case
from PIL import Image
from starlette.routing import Router

from mdps.runtime.detector import Result
from mdps.runtime.preprocessing import Observations, Preprocessing
from mdps.serving.http import endpoints
from mdps.serving.http.guard import Guard
from mdps.serving.http.model import Loaded, Model
from mdps.serving.http.options import Limits, ServerOptions
from mdps.serving.http.service import Service
from mdps.serving.http.telemetry import Live, Metrics

LIMITS = Limits(body_bytes=2 * 2**20, pixels=1_000_000, deadline=1e6)
ROUTES = ("/v2/models/line/infer", "/inspect", "/v2/models/line/versions/1/infer", "/inspect/line")
FORMATS = ("PNG", "JPEG", "BMP", "TIFF", "WEBP", "GIF", "PPM")


class Refused(Exception):  # noqa: N818 - an answer, not a fault
    """The server said why not."""


class _Loud(Guard):
    """A guard that does not turn a failure into a 500."""

    async def _fail(self, error: Exception, *_: Any) -> None:
        raise error


class _Looking:
    """A detector that finds nothing."""

    calibration = SimpleNamespace(threshold=0.5, map_low=0.0, map_high=1.0, fitness=None)
    doubt = ""
    engine = "none"
    provenance = MappingProxyType({"engines": {}})
    preprocessing = Preprocessing((16, 16))
    tiles = None
    warm_up_seconds = 0.0

    def observe(self, pictures: Sequence[Any]) -> Observations:
        return Observations(np.stack([self.preprocessing(picture) for picture in pictures]))

    def judge(self, seen_all: Observations) -> list[Result]:
        observations = seen_all.images
        assert observations.dtype == np.float32
        assert observations.shape[1:] == (3, 16, 16)
        assert np.isfinite(observations).all()
        times = dict.fromkeys(("preprocess", "first_pass", "masked_pass", "score", "total"), 0.0)
        maps = np.zeros((16, 16), np.float32)
        return [Result(0.4, 0.5, "pass", maps, maps > 0, seen, seen, times) for seen in observations]

    def close(self) -> None:
        pass


class Queries:
    """Cases have the parts `path`, `head` (lines "name: value") and `body`."""

    refusals = (Refused,)

    def start(self, folder: Path) -> None:
        endpoints.Guard = _Loud  # type: ignore[misc]
        self._loop = asyncio.new_event_loop()
        self._app = self._loop.run_until_complete(self._built(folder))

    async def _built(self, folder: Path) -> Router:
        metrics, options = Metrics(), ServerOptions(limits=LIMITS, token=None)
        pool = ThreadPoolExecutor(2)
        service = Service(options, metrics, pool)
        detector: Any = _Looking()
        service.live["line"] = Live()
        service.models["line"] = Model(
            "line",
            folder,
            Loaded(detector, None, 0.0),
            load=lambda: detector,
            options=options,
            metrics=metrics,
            pool=pool,
        )
        built: Any = endpoints.build(service)
        return built

    def seeds(self) -> list[Case]:
        levels = np.random.RandomState(0).randint(0, 255, (6, 5, 3), dtype=np.uint8)
        images = [_saved(levels, kind) for kind in FORMATS]
        images += [_saved(levels, "PNG", "P"), _saved(levels, "PNG", "LA"), _saved(levels, "TIFF", "CMYK")]
        images += [
            _saved(levels, "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0")
        ]
        images += [
            _saved(levels, "TIFF", compression="tiff_lzw"),
            _saved(levels, "TIFF", "I;16"),
            _saved(levels, "GIF", "L"),
        ]
        frames = [Image.fromarray(levels), Image.fromarray(levels[::-1].copy())]
        for kind in ("GIF", "TIFF", "WEBP"):
            buffer = io.BytesIO()
            frames[0].save(buffer, kind, save_all=True, append_images=frames[1:])
            images.append(buffer.getvalue())
        cases = [_case(ROUTES[1], image, "content-type: image/png") for image in images]
        cases += [_case(ROUTES[1] + "?map=png&record=no", _form(image), _FORM) for image in images[:4]]
        cases.append(_case(ROUTES[3] + "?map=npy", gzip.compress(images[2]), "content-encoding: gzip"))
        cases.append(_case(ROUTES[1], zlib.compress(images[2]), "content-encoding: deflate"))
        listed = {"name": "image", "shape": [6, 5, 3], "datatype": "UINT8", "data": levels.reshape(-1).tolist()}
        asked = [{"name": "score"}, {"name": "anomaly_map", "parameters": {"binary_data": True}}]
        cases.append(_infer({"inputs": [listed], "id": "a", "outputs": asked, "parameters": {"timeout": 10**12}}))
        nested = listed | {"shape": [1, 6, 5, 3], "data": levels[None].tolist()}
        cases.append(_infer({"inputs": [nested], "parameters": {"binary_data_output": True}}))
        cases += [_binary(levels.tobytes(), [6, 5, 3], "UINT8")]
        for image in images[:6]:
            text = base64.b64encode(image).decode()
            cases.append(_infer({"inputs": [{"name": "image", "shape": [1], "datatype": "BYTES", "data": [text]}]}))
            cases.append(_binary(struct.pack("<I", len(image)) + image, [1], "BYTES"))
        return cases

    def mutated(self, case: Case, random: Random) -> Case:
        kind = random.random()
        if kind < 0.07:
            return case | {"path": random.choice(_paths(case["path"], random))}
        if kind < 0.2:
            return case | {"head": _head_mutated(case["head"], random)}
        body = case["body"]
        length = _header_length(case["head"])
        if length is not None and length <= len(body):
            text, rest = body[:length], body[length:]
            if random.random() < 0.5:
                rest = _picture_mutated(rest, random)
            else:
                text = _text_mutated(text, random)
            wrong = random.random() < 0.1
            head = case["head"].replace(
                b"%d" % length, b"%d" % (random.choice([0, 1, 10**11, len(body)]) if wrong else len(text))
            )
            return case | {"head": head, "body": text + rest}
        if body[:1] == b"{":
            return case | {"body": _text_mutated(body, random)}
        return case | {"body": _picture_mutated(body, random)}

    def run(self, case: Case, folder: Path) -> None:
        self._loop.run_until_complete(self._ask(case))

    async def _ask(self, case: Case) -> None:
        path, _, query = case["path"].partition(b"?")
        lines = [line.partition(b": ") for line in case["head"].split(b"\n") if line]
        headers = [(name.lower(), value) for name, _, value in lines]
        headers.append((b"content-length", b"%d" % len(case["body"])))
        scope = {
            "type": "http", "http_version": "1.1", "method": "POST", "path": path.decode("latin-1"), "raw_path": path,
            "query_string": query, "headers": headers, "client": ("1.2.3.4", 5), "server": ("127.0.0.1", 80),
            "scheme": "http", "root_path": "", "asgi": {"version": "3.0"},
        }  # fmt: skip
        sent: list[Any] = []
        coming = [{"type": "http.request", "body": case["body"], "more_body": False}]

        async def receive() -> Any:
            if not coming:
                await asyncio.get_running_loop().create_future()  # the client waits for its answer
            return coming.pop()

        async def send(message: Any) -> None:
            sent.append(message)

        await self._app(scope, receive, send)
        status = sent[0]["status"]
        body = b"".join(message.get("body", b"") for message in sent)
        if 400 <= status < 500 or status == 504:  # 504 where the client itself gave a few microseconds
            sentence = json.loads(body)["error"]
            assert 0 < len(sentence) < 600
            raise Refused(sentence)
        assert status == 200, f"{status} {body[:200]!r}"


_FORM = "content-type: multipart/form-data; boundary=xyz"


def _case(path: str, body: bytes, *head: str) -> Case:
    return {"path": path.encode(), "head": "\n".join(["host: 127.0.0.1", *head]).encode(), "body": body}


def _infer(message: Any) -> Case:
    return _case(ROUTES[0], json.dumps(message).encode(), "content-type: application/json")


def _binary(data: bytes, shape: list[int], datatype: str) -> Case:
    tensor = {"name": "image", "shape": shape, "datatype": datatype, "parameters": {"binary_data_size": len(data)}}
    text = json.dumps({"inputs": [tensor]}).encode()
    return _case(ROUTES[2], text + data, f"inference-header-content-length: {len(text)}")


def _form(image: bytes) -> bytes:
    head = b'--xyz\r\nContent-Disposition: form-data; name="image"; filename="a.png"\r\nContent-Type: image/png\r\n\r\n'
    return head + image + b'\r\n--xyz\r\nContent-Disposition: form-data; name="note"\r\n\r\nhello\r\n--xyz--\r\n'


def _saved(levels: Any, kind: str, mode: str = "RGB", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image = Image.fromarray(levels)
    image = Image.fromarray(levels[..., 0].astype(np.uint16)) if mode == "I;16" else image.convert(mode)
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def _header_length(head: bytes) -> int | None:
    _, found, rest = head.partition(b"inference-header-content-length: ")
    digits = rest.split(b"\n")[0]
    return int(digits) if found and digits.isdigit() and len(digits) < 12 else None


def _paths(path: bytes, random: Random) -> list[bytes]:
    return [
        *(path + b"?map=" + value for value in (b"png", b"npy", b"none", b"x", b"%00", b"\xff", b"png&map=npy")),
        *(path + b"?record=" + value for value in (b"no", b"yes", b"", b"%ED%A0%80")),
        *(route.encode() for route in ROUTES),
        *(
            b"/v2/models/" + name + b"/infer"
            for name in (b"\xff\xfe", b"..", b"a" * 300, b"\xed\xa0\x80", b"%", b"line/versions/2")
        ),
        trees.garbled(path, random),
    ]


def _head_mutated(head: bytes, random: Random) -> bytes:
    lines = head.split(b"\n")
    kind = random.random()
    if kind < 0.25:
        return trees.garbled(head, random)
    if kind < 0.4:
        return b"\n".join(line for line in lines if random.random() < 0.7)
    values = [
        b"",
        b"0",
        b"-1",
        b"1e9",
        b"nan",
        b"inf",
        b"1_0",
        b"9" * 30,
        b"\xff",
        b"gzip",
        b"GZIP ",
        b"gzip, gzip",
        b"deflate",
        b"br",
    ]
    values += [
        b"\xd9\xa3",
        b"+5",
        b" 7",
        b"0x10",
        b"text/plain",
        b"multipart/form-data",
        b"multipart/form-data; boundary=",
    ]
    for charset in (
        b"utf-16",
        b"idna",
        b"punycode",
        b"hex",
        b"undefined",
        b"utf-7",
        b"rot13",
        b"a\x00b",
        b"mbcs",
        b"unicode_escape",
    ):
        values.append(b"multipart/form-data; boundary=xyz; charset=" + charset)
    values += [
        b"multipart/x; boundary=" + b"b" * 200,
        b'multipart/form-data; boundary="xyz',
        b"Bearer x",
        b"http://[",
        b"null",
    ]
    names = [
        b"content-type",
        b"content-encoding",
        b"inference-header-content-length",
        b"x-deadline-ms",
        b"origin",
        b"host",
    ]
    names += [b"authorization", b"x-request-id", b"expect"]
    return b"\n".join([*lines, random.choice(names) + b": " + random.choice(values)])


def _text_mutated(text: bytes, random: Random) -> bytes:
    if random.random() < 0.15:
        return trees.garbled(text, random)
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        return trees.garbled(text, random)
    if random.random() < 0.3 and isinstance(tree, dict) and isinstance(tree.get("inputs"), list) and tree["inputs"]:
        tensor = tree["inputs"][0]
        if isinstance(tensor, dict):
            tensor["data"] = random.choice(_odd_data(random))
    return trees.written(trees.mutated(tree, random) if random.random() < 0.8 else tree, random)


def _odd_data(random: Random) -> list[Any]:
    count = random.choice([12, 90, 91, 20_000])
    return [
        ["x" * random.choice([1, 100_000]), *[""] * count],
        [0] * count,
        [[0] * 15] * 6,
        [[0] * 15] * 5 + [[0] * 14],
        [0.5] * 90,
        [True] * 90,
        [trees.Raw("1" + "0" * 400)] * 90,
        [-1] * 90,
        [256] * 90,
        [2**63] * 90,
        [[[[[[]]]]]],
        trees.Raw("[" * 70 + "1" + "]" * 70),
        [None] * 90,
        [{}] * 90,
        ["7"] * 90,
        [0] * 89 + [[0]],
        [[[0, 0, 0]] * 5] * 6,
    ]


def _picture_mutated(data: bytes, random: Random) -> bytes:
    """A file with its checksums made right again, so that a change gets behind them."""
    data = trees.garbled(data, random)
    if data.startswith(b"\x89PNG") and random.random() < 0.8:
        return _mended_png(data)
    if data[:2] == b"\x1f\x8b" and random.random() < 0.3:
        return gzip.compress(bytes(random.choice([0, 10, 3 * 2**20])))
    if random.random() < 0.05:
        return (
            random.choice(
                [b"%!PS-Adobe-3.0 EPSF\n", b"%PDF-1.4\n", b"<svg>", b"P6 1000000 1000000 255\n", b"P7\n", b"#?RADIANCE"]
            )
            + data
        )
    return data


def _mended_png(data: bytes) -> bytes:
    out, at = data[:8], 8
    while at + 12 <= len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        end = at + 8 + size
        if end > len(data):
            break
        chunk = data[at + 4 : end]
        out += data[at : at + 4] + chunk + struct.pack(">I", zlib.crc32(chunk))
        at = end + 4
    return out + data[at:]
