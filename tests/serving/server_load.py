"""Drives `mdps serve` at twice the rate it can answer, and checks every answer.

    python tests/serving/server_load.py BUNDLE IMAGES --seconds 1800 --out load.json

Good images (as files and as tensors), images that are broken and requests that are malformed come at fixed moments,
whether or not the server keeps up. Each must be answered once: a good one with the score, threshold, verdict and map
that the bare runtime gives, or refused with 503; the others with 400.
"""

import http.client
import json
import math
import random
import threading
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray
from server_process import ServerProcess, serving

from mdps.benchmarks.kit import measured_with
from mdps.runtime import Detector, Result, load
from mdps.runtime.errors import MdpsError
from mdps.runtime.manifest import Manifest
from mdps.runtime.preprocessing import read_image

CLIENTS = 48
_SHARES = {"file": 0.5, "tensor": 0.3, "broken image": 0.1, "malformed": 0.1}
_GOOD = ("file", "tensor")
_OUTPUTS = ("score", "threshold", "verdict", "anomaly_map")
_SAMPLE = 1.0  # seconds between looks at the memory
_WARM = 0.2  # share of the run after which memory counts
_FAULTS = 100  # that are kept
_NEAR, _NEAR_ZERO = 1e-4, 1e-6  # a batch of another size may be summed in another order


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
    """The result of a run; `faults` should be empty.

    `capacity` is what the bare runtime judges a second, `rate` the requests that are due a second, of which the good
    ones alone are twice the capacity. `overload` is how many good requests were sent for each that was judged, over the
    whole run. Times in ms are those of accepted requests from their sending to the whole answer; `late_p99_ms` is how
    long after they were due requests were sent, which says whether the clients kept up.
    """

    seconds: float
    rate: float
    capacity: float
    deadline_ms: float
    took_seconds: float = 0.0
    sent: int = 0
    sent_per_second: float = 0.0
    statuses: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    accepted_per_second: float = 0.0
    overload: float = 0.0
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    max_ms: float = 0.0
    late_p99_ms: float = 0.0
    memory_mb: list[float] = field(default_factory=list)
    memory_growth_mb: float = 0.0
    exit_code: int | None = None
    machine: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The fields, with so many memory samples that their course shows."""
        step = max(1, len(self.memory_mb) // 60)
        return asdict(self) | {"memory_mb": [round(mb, 1) for mb in self.memory_mb[::step]]}

    def fault(self, sentence: str) -> None:
        """Write down what was wrong, if it is among the first."""
        if len(self.faults) < _FAULTS:
            self.faults.append(sentence)


def run_load(
    bundle: Path, images: Sequence[bytes], *, seconds: float, threads: int = 1, factor: float = 2.0, seed: int = 0
) -> Report:
    """Serve `bundle` and drive it for so long with `factor` times the images that the bare runtime judges in a second.

    Raises MdpsError where the server does not start.
    """
    with load(bundle, threads=threads) as detector:
        expected = [detector(image) for image in images]
        capacity = _capacity(detector, images)
    deadline_ms = 10_000.0
    options = ("--threads", str(threads), "--deadline-ms", str(deadline_ms))
    report = Report(seconds, factor * capacity / sum(_SHARES[kind] for kind in _GOOD), capacity, deadline_ms)
    report.machine = measured_with(Manifest.read(bundle)) | {"threads": threads}
    with serving([bundle], *options) as server:
        name = server.wait_for("ready")["models"][0]
        jobs = _jobs(name, images, expected)
        drive = _Drive(server, jobs, report, random.Random(seed))
        server.keep = drive.keep
        drive.run()
        report.exit_code = server.stop()
        drive.check_log()
    return report


def _capacity(detector: Detector, images: Sequence[bytes]) -> float:
    """Images a second of the bare runtime at its best: whichever batch is faster, when nothing interrupted it."""
    return max(_rate(detector, images, batch) for _ in range(3) for batch in (1, 4))


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
    outputs = [{"name": name, "parameters": {"binary_data": True}} for name in _OUTPUTS]
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
        self._good = 0
        self._statuses: Counter[str] = Counter()
        self._answered, self._logged = array("H"), array("H")  # by a request's number: its status, 0 for none
        self._times, self._late = array("d"), array("d")
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

    def keep(self, event: dict[str, Any]) -> bool:
        """Take in what the server logged of a request of this run; False, for nobody else needs it."""
        name = event.get("id", "")
        if event["event"] != "request" or not name.startswith("load-"):
            return True
        number = int(name.removeprefix("load-"))
        if _at(self._logged, number):
            self._report.fault(f"the server answered {name} twice")
        _put(self._logged, number, event.get("status") or 1)
        return False

    def check_log(self) -> None:
        """The server's log, now complete, has each request once, with the status its client got."""
        for number in range(1, max(len(self._logged), len(self._answered))):
            logged, answered = _at(self._logged, number), _at(self._answered, number)
            if logged != answered:
                self._report.fault(
                    f"load-{number} got {answered or 'no answer'}, and the log has {logged or 'nothing'}"
                )

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
            # Also by the clock: clients that fall behind stop when the time is over, not when all is sent.
            if max(moment, time.perf_counter()) - self._started > self._report.seconds:
                return None
            self._sent += 1
            kind = self._chance.choices(list(_SHARES), list(_SHARES.values()))[0]
            self._good += kind in _GOOD
            return self._sent, moment, self._chance.choice(self._jobs[kind])

    def _ask(self, connection: http.client.HTTPConnection, number: int, moment: float, job: Job) -> None:
        name, begun = f"load-{number}", time.perf_counter()
        try:
            connection.request("POST", job.path, job.body, {"X-Request-Id": name, **job.headers})
            reply = connection.getresponse()
            body = reply.read()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            self._note(number, job, 0, f"{name} ({job.kind}) was not answered: {error!r}", begun - moment, 0.0)
            return
        took = time.perf_counter() - begun
        try:
            fault = _fault(job, reply, body, name)
        except Exception as error:  # whatever the answer is, it is not what was asked for
            fault = f"{name} ({job.kind}) got {reply.status} with what cannot be read: {error!r}, {body[:200]!r}"
        self._note(number, job, reply.status, fault, begun - moment, took)

    def _note(self, number: int, job: Job, status: int, fault: str | None, late: float, took: float) -> None:
        with self._lock:
            self._statuses[f"{job.kind}: {status or 'no answer'}"] += 1
            _put(self._answered, number, status)
            self._late.append(late * 1000)
            if status == 200:
                self._times.append(took * 1000)
            if fault is not None:
                self._report.fault(fault)

    def _conclude(self, seconds: float) -> None:
        report = self._report
        report.sent, report.statuses = self._sent, dict(sorted(self._statuses.items()))
        report.took_seconds, report.sent_per_second = seconds, self._sent / seconds
        report.accepted_per_second = len(self._times) / seconds
        if self._times:
            report.p50_ms, report.p99_ms = (float(value) for value in np.percentile(self._times, (50, 99)))
            report.max_ms = max(self._times)
            report.late_p99_ms = float(np.percentile(self._late, 99))
            report.overload = self._good / len(self._times)
        warm = report.memory_mb[math.ceil(len(report.memory_mb) * _WARM) :] or report.memory_mb
        third = max(1, len(warm) // 3)
        report.memory_growth_mb = float(np.median(warm[-third:]) - np.median(warm[:third]))


def _at(values: "array[int]", index: int) -> int:
    return values[index] if index < len(values) else 0


def _put(values: "array[int]", index: int, value: int) -> None:
    if index >= len(values):
        values.extend([0] * (index + 1 - len(values)))
    values[index] = value


def _fault(job: Job, reply: http.client.HTTPResponse, body: bytes, name: str) -> str | None:
    """Return what is wrong with an answer; None where nothing is."""
    if reply.headers.get("X-Request-Id") != name:
        return f"{name} got the answer to {reply.headers.get('X-Request-Id')}"
    if reply.status != 200 and not json.loads(body)["error"]:
        return f"{name} got {reply.status} without a word"
    if reply.status in (429, 503):
        return None if int(reply.headers.get("Retry-After", "0")) > 0 else f"{name} was refused without Retry-After"
    if job.expected is None:
        return None if reply.status == 400 else f"{name} ({job.kind}) got {reply.status}"
    if reply.status != 200:
        return f"{name} ({job.kind}) got {reply.status}: {body[:200]!r}"
    return difference(job.expected, *_found(job, reply, body), f"{name} ({job.kind})")


def _found(
    job: Job, reply: http.client.HTTPResponse, body: bytes
) -> tuple[float, float, str, NDArray[np.float32] | None]:
    """Score, threshold, verdict and, where it was asked for, the map of an answer."""
    if job.kind == "file":
        said = json.loads(body)
        return said["score"], said["threshold"], said["verdict"], None
    head = int(reply.headers["Inference-Header-Content-Length"])
    values, at = {}, head
    for output in json.loads(body[:head])["outputs"]:
        size = output["parameters"]["binary_data_size"]
        values[output["name"]], at = body[at : at + size], at + size
    if at != len(body) or tuple(values) != _OUTPUTS:
        raise ValueError(f"outputs {tuple(values)} of {at} bytes in {len(body)}")
    numbers = {name: np.frombuffer(values[name], "<f4") for name in ("score", "threshold", "anomaly_map")}
    return (
        float(numbers["score"][0]),
        float(numbers["threshold"][0]),
        values["verdict"][4:].decode(),
        numbers["anomaly_map"],
    )


def difference(
    right: Result, score: float, threshold: float, verdict: str, heat: NDArray[np.float32] | None, name: str
) -> str | None:
    """How an answer differs from the bare runtime's; a verdict may differ where the score lies on the threshold."""
    if not math.isclose(score, right.score, rel_tol=_NEAR, abs_tol=_NEAR_ZERO):
        return f"{name} got the score {score}, not {right.score}"
    if not math.isclose(threshold, right.threshold or 0.0, rel_tol=1e-6):
        return f"{name} got the threshold {threshold}, not {right.threshold}"
    on_it = math.isclose(right.score, threshold, rel_tol=_NEAR, abs_tol=_NEAR_ZERO)
    if verdict != right.verdict and not (on_it and verdict in ("pass", "fail")):
        return f"{name} got {verdict}, not {right.verdict}"
    if heat is not None:
        wanted = right.anomaly_map.reshape(-1)
        if heat.shape != wanted.shape or not np.allclose(heat, wanted, rtol=_NEAR, atol=_NEAR * float(wanted.max())):
            return f"{name} got another anomaly map"
    return None


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
