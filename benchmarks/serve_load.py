"""Drives `mdps serve` at twice the rate it can answer, and checks every answer.

    python -m mdps.benchmarks.serve_load BUNDLE IMAGES --seconds 1800 --out load.json

Good images (as files and as tensors), images that are broken and requests that are malformed come at fixed moments,
whether or not the server keeps up. Each must be answered once: a good one with the score the bare runtime gives, or
refused with 503; the others with 400.
"""

import http.client
import json
import math
import random
import struct
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np

from mdps.benchmarks.serve_process import ServerProcess, serving
from mdps.runtime import Detector, Result, load
from mdps.runtime.errors import MdpsError
from mdps.runtime.preprocessing import read_image

CLIENTS = 48
_SHARES = {"file": 0.5, "tensor": 0.3, "broken image": 0.1, "malformed": 0.1}
_SAMPLE = 1.0  # seconds between looks at the memory
_WARM = 0.2  # share of the run after which memory counts


@dataclass(frozen=True)
class Job:
    """One request: its kind, its bytes, and for a good one the result it must have."""

    kind: str
    path: str
    body: bytes
    headers: dict[str, str]
    expected: Result | None = None


@dataclass
class Report:
    """What came of a run; `faults` should be empty.

    `capacity` is what the bare runtime judges a second, `rate` the requests sent a second, of which the good ones alone
    are twice the capacity. Times in ms are those of accepted requests, from the moment they were due.
    """

    seconds: float
    rate: float
    capacity: float
    deadline_ms: float
    sent: int = 0
    statuses: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    accepted_per_second: float = 0.0
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    max_ms: float = 0.0
    memory_mb: list[float] = field(default_factory=list)
    memory_growth_mb: float = 0.0
    exit_code: int | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields, with so many memory samples that their course shows."""
        step = max(1, len(self.memory_mb) // 60)
        return asdict(self) | {"memory_mb": [round(mb, 1) for mb in self.memory_mb[::step]]}


def run_load(
    bundle: Path, images: Sequence[bytes], *, seconds: float, threads: int = 1, factor: float = 2.0, seed: int = 0
) -> Report:
    """Serve `bundle` and drive it for so long with `factor` times the images that the bare runtime judges in a second.

    Raises MdpsError where the server does not start.
    """
    with load(bundle, threads=threads) as detector:
        expected = [detector(image) for image in images]
        capacity = max(_rate(detector, images, batch) for batch in (1, 4))
    deadline_ms = 10_000.0
    options = ("--threads", str(threads), "--deadline-ms", str(deadline_ms))
    report = Report(seconds, factor * capacity / (_SHARES["file"] + _SHARES["tensor"]), capacity, deadline_ms)
    with serving([bundle], *options) as server:
        name = server.wait_for("ready")["models"][0]
        jobs = _jobs(name, images, expected)
        drive = _Drive(server, jobs, report, random.Random(seed))
        drive.run()
        report.exit_code = server.stop()
        _check_counts(server, report)
    return report


def _rate(detector: Detector, images: Sequence[bytes], batch: int) -> float:
    """Images a second of the bare runtime."""
    started = time.perf_counter()
    for start in range(0, len(images), batch):
        detector.batch(images[start : start + batch])
    return len(images) / (time.perf_counter() - started)


def _jobs(name: str, images: Sequence[bytes], expected: Sequence[Result]) -> dict[str, list[Job]]:
    infer = f"/v2/models/{name}/infer"
    pairs = list(zip(images, expected, strict=True))
    broken = [image[: max(20, len(image) // 3)] for image in images]
    malformed = (
        b"{",
        b"[]",
        b'{"inputs": []}',
        b'{"inputs": [{"name": "image", "shape": [1], "datatype": "FP32"}]}',
        b"\xff",
    )
    return {
        "file": [Job("file", "/inspect", image, {}, result) for image, result in pairs],
        "tensor": [_tensor_job(infer, image, result) for image, result in pairs],
        "broken image": [Job("broken image", "/inspect", image, {}) for image in broken],
        "malformed": [Job("malformed", infer, body, {}) for body in malformed],
    }


def _tensor_job(path: str, image: bytes, expected: Result) -> Job:
    pixels = np.asarray(read_image(image))
    tensor = {
        "name": "image",
        "shape": list(pixels.shape),
        "datatype": "UINT8",
        "parameters": {"binary_data_size": pixels.nbytes},
    }
    outputs = [{"name": name, "parameters": {"binary_data": True}} for name in ("score", "anomaly_map")]
    head = json.dumps({"inputs": [tensor], "outputs": outputs}).encode()
    return Job("tensor", path, head + pixels.tobytes(), {"Inference-Header-Content-Length": str(len(head))}, expected)


class _Drive:
    """The clients of one run: threads that each take the next request when it is due, and check its answer."""

    def __init__(
        self, server: ServerProcess, jobs: dict[str, list[Job]], report: Report, chance: random.Random
    ) -> None:
        self._server, self._jobs, self._report, self._chance = server, jobs, report, chance
        self._lock = threading.Lock()
        self._sent = 0
        self._statuses: Counter[str] = Counter()
        self._times: list[float] = []
        self._started = 0.0

    def run(self) -> None:
        """The whole run; fills the report."""
        self._started = time.perf_counter()
        clients = [threading.Thread(target=self._client) for _ in range(CLIENTS)]
        for client in clients:
            client.start()
        while any(client.is_alive() for client in clients):
            self._report.memory_mb.append(self._server.memory() / 1e6)
            time.sleep(_SAMPLE)
        self._conclude(time.perf_counter() - self._started)

    def _client(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=60)
        while (due := self._next()) is not None:
            number, moment, job = due
            time.sleep(max(0.0, moment - time.perf_counter()))
            self._ask(connection, number, moment, job)
        connection.close()

    def _next(self) -> tuple[int, float, Job] | None:
        with self._lock:
            moment = self._started + self._sent / self._report.rate
            if moment - self._started > self._report.seconds:
                return None
            self._sent += 1
            kind = self._chance.choices(list(_SHARES), list(_SHARES.values()))[0]
            return self._sent, moment, self._chance.choice(self._jobs[kind])

    def _ask(self, connection: http.client.HTTPConnection, number: int, moment: float, job: Job) -> None:
        name = f"load-{number}"
        try:
            connection.request("POST", job.path, job.body, {"X-Request-Id": name, **job.headers})
            reply = connection.getresponse()
            body = reply.read()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            self._note("no answer", f"{name} ({job.kind}) was not answered: {error!r}", None)
            return
        milliseconds = (time.perf_counter() - moment) * 1000
        fault = _fault(job, reply, body, name)
        self._note(f"{job.kind}: {reply.status}", fault, milliseconds if reply.status == 200 else None)

    def _note(self, status: str, fault: str | None, milliseconds: float | None) -> None:
        with self._lock:
            self._statuses[status] += 1
            if milliseconds is not None:
                self._times.append(milliseconds)
            if fault is not None and len(self._report.faults) < 100:
                self._report.faults.append(fault)

    def _conclude(self, seconds: float) -> None:
        report = self._report
        report.sent, report.statuses = self._sent, dict(sorted(self._statuses.items()))
        report.accepted_per_second = len(self._times) / seconds
        if self._times:
            report.p50_ms, report.p99_ms = (float(value) for value in np.percentile(self._times, (50, 99)))
            report.max_ms = max(self._times)
        warm = report.memory_mb[math.ceil(len(report.memory_mb) * _WARM) :] or report.memory_mb
        third = max(1, len(warm) // 3)
        report.memory_growth_mb = float(np.median(warm[-third:]) - np.median(warm[:third]))


def _fault(job: Job, reply: http.client.HTTPResponse, body: bytes, name: str) -> str | None:
    """What is wrong with an answer; None where nothing is."""
    if reply.headers.get("X-Request-Id") != name:
        return f"{name} got the answer to {reply.headers.get('X-Request-Id')}"
    if reply.status in (429, 503):
        return None if reply.headers.get("Retry-After") else f"{name} was refused without Retry-After"
    if job.expected is None:
        return None if reply.status == 400 else f"{name} ({job.kind}) got {reply.status}"
    if reply.status != 200:
        return f"{name} ({job.kind}) got {reply.status}: {body[:200]!r}"
    score = _score(job, reply, body)
    if not math.isclose(score, job.expected.score, rel_tol=1e-4, abs_tol=1e-6):
        return f"{name} ({job.kind}) got the score {score}, not {job.expected.score}"
    return None


def _score(job: Job, reply: http.client.HTTPResponse, body: bytes) -> float:
    if job.kind == "file":
        return float(json.loads(body)["score"])
    head = int(reply.headers["Inference-Header-Content-Length"])
    assert json.loads(body[:head])["outputs"][0]["name"] == "score"
    return float(struct.unpack_from("<f", body, head)[0])


def _check_counts(server: ServerProcess, report: Report) -> None:
    """Each request is in the server's log once: none was judged twice for one that was sent."""
    logged = Counter(event["id"] for event in server.named("request") if event["id"].startswith("load-"))
    twice = [name for name, count in logged.items() if count > 1]
    if twice:
        report.faults.append(f"{len(twice)} requests were answered twice, such as {twice[0]}")
    if len(logged) != report.sent:
        report.faults.append(f"{report.sent} requests were sent, and the server logged {len(logged)}")


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path, exists=True))
@click.argument("images", type=click.Path(path_type=Path, exists=True))
@click.option("--seconds", type=click.FloatRange(1), default=60, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="File for the report (JSON).")
def main(bundle: Path, images: Path, seconds: float, threads: int, out: Path | None) -> None:
    """Drive BUNDLE with the PNG files below IMAGES; exit code 1 where an answer was wrong or missing."""
    found = [path.read_bytes() for path in sorted(images.rglob("*.png"))]
    if not found:
        raise MdpsError(f"{images} holds no PNG file")
    report = run_load(bundle, found[:64], seconds=seconds, threads=threads)
    text = json.dumps(report.to_json(), indent=2)
    click.echo(text)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
    raise SystemExit(bool(report.faults))


if __name__ == "__main__":
    main()
