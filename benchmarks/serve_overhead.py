"""What serving costs: `mdps serve` beside the bare runtime, one image at a time and under wrk, in turns within one run.

    python -m mdps.benchmarks.serve_overhead BUNDLE IMAGE --out overhead.json

Both sides start from the bytes of a file and use the same engine and threads. Needs wrk (apt-get install wrk).
"""

import http.client
import json
import math
import multiprocessing
import os
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from math import comb
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import click
import numpy as np

from mdps.benchmarks.bench.machine import machine_facts
from mdps.benchmarks.serve_process import ServerProcess, processor_seconds, serving
from mdps.runtime import Detector, load
from mdps.runtime.errors import MdpsError
from mdps.runtime.manifest import Manifest

_CLIENTS = 8  # that together keep the server busy
_IDLE = 0.3  # seconds without work, after which the server counts as idle
_FEW = 16  # answers
_TURN = 1.0  # seconds
T = TypeVar("T")

# wrk counts whole requests in a whole time, which cuts up to a batch off the end; the moments of the answers do not.
_SCRIPT = """
local ffi = require("ffi")
ffi.cdef[[typedef struct { long seconds; long nanoseconds; } moment; int clock_gettime(int, moment *);]]
local now = ffi.new("moment")
local function clock() ffi.C.clock_gettime(1, now); return tonumber(now.seconds) + tonumber(now.nanoseconds) / 1e9 end

wrk.method = "POST"
wrk.path = "/inspect"
wrk.body = "%(body)s"
local threads = {}
function setup(thread) table.insert(threads, thread) end
function init(args) moments, wrong = {}, 0 end
function response(status, headers, body)
  moments[#moments + 1] = string.format("%%.6f", clock())
  local score = tonumber(string.match(body, '"score":([^,]+),') or "")
  local right = status == 200 and score and math.abs(score - %(score).9g) <= 1e-4 * math.abs(%(score).9g)
  if not right or not string.find(body, '"verdict":"%(verdict)s"', 1, true) then wrong = wrong + 1 end
end
function done(summary, latency, requests)
  local errors = summary.errors
  print("errors\t" .. (errors.connect + errors.read + errors.write + errors.status + errors.timeout))
  for _, thread in ipairs(threads) do
    print("wrong\t" .. thread:get("wrong"))
    for _, moment in ipairs(thread:get("moments")) do print("answer\t" .. moment) end
  end
end
"""


@dataclass(frozen=True)
class Phase:
    """One side kept busy for a moment: images a second, processor ms an image."""

    per_second: float
    processor_ms: float


@dataclass(frozen=True)
class Overhead:
    """What serving adds, on so many threads of the engine.

    Milliseconds are medians over `pairs` of one image, judged by both sides one directly after the other: the speed of
    a machine that others share changes within seconds, and both of a pair see the same. `added_ms` is the median of the
    pairs' differences, `added_interval_ms` its 95 % confidence interval. Throughputs are of both sides kept busy, in
    turns of a second in which the other's process stands still, over `busy_seconds` each; `processor` is the time of
    all threads for an image meanwhile.
    """

    threads: int | None
    pairs: int
    bare_ms: float
    served_ms: float
    added_ms: float
    added_interval_ms: tuple[float, float]
    busy_seconds: float
    bare_per_second: float
    served_per_second: float
    throughput_share: float
    bare_processor_ms: float
    served_processor_ms: float
    machine: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The fields, to a thousandth."""
        fields: dict[str, Any] = json.loads(json.dumps(asdict(self)), parse_float=lambda text: round(float(text), 3))
        return fields


def measure(
    bundle: Path, image: bytes, *, threads: int | None = 1, pairs: int = 100, seconds: float = 20.0
) -> Overhead:
    """Compare in turns: first image by image, then each side kept busy for so many seconds in all. Linux only.

    Raises MdpsError without wrk, and where an answer is refused or wrong.
    """
    wrk = shutil.which("wrk")
    if wrk is None:
        raise MdpsError("the load comes from wrk, which is not installed: apt-get install wrk")
    # A long deadline: eight clients of a detector of seconds an image would be refused otherwise.
    options = ("--deadline-ms", "120000", *(() if threads is None else ("--threads", str(threads))))
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as file, serving([bundle], *options) as server:
        with load(bundle, threads=threads) as detector:
            bare, served = _image_by_image(detector, server, image, pairs)
            file.write(_script(image, detector))
            file.flush()
        how = ("-t1", f"-c{_CLIENTS}", f"-d{round(2 * seconds)}s", "--timeout", "120s", "-s", file.name)
        ours, theirs = _kept_busy(bundle, image, threads, server, [wrk, *how, server.url])
    added = [1000 * (slow - fast) for fast, slow in zip(bare, served, strict=True)]
    return Overhead(
        threads=threads, pairs=pairs,
        bare_ms=1000 * statistics.median(bare), served_ms=1000 * statistics.median(served),
        added_ms=statistics.median(added), added_interval_ms=median_interval(added),
        busy_seconds=seconds,
        bare_per_second=ours.per_second, served_per_second=theirs.per_second,
        throughput_share=theirs.per_second / ours.per_second,
        bare_processor_ms=ours.processor_ms, served_processor_ms=theirs.processor_ms,
        machine=machine_facts(Manifest.read(bundle)),
    )  # fmt: skip


def in_turns(sides: tuple[Callable[[], T], Callable[[], T]], count: int) -> list[tuple[T, T]]:
    """Both sides so many times, as a b, b a, a b, ..: always being second would be a better or a worse place."""
    found = []
    for index in range(count):
        if index % 2:
            second, first = sides[1](), sides[0]()
        else:
            first, second = sides[0](), sides[1]()
        found.append((first, second))
    return found


def median_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Distribution-free confidence interval of a median: order statistics, by the binomial distribution.

    As in Conover 1999, "Practical Nonparametric Statistics", section 3.2. With fewer than six values, their range.
    """
    ordered, count = sorted(values), len(values)
    tail, below = 0.0, 0
    while below < (count - 1) // 2 and tail + comb(count, below) / 2**count <= (1 - level) / 2:
        tail += comb(count, below) / 2**count
        below += 1
    first = max(0, below - 1)
    return ordered[first], ordered[count - 1 - first]


def _image_by_image(
    detector: Detector, server: ServerProcess, image: bytes, pairs: int
) -> tuple[list[float], list[float]]:
    """Seconds of each side, in pairs; the client of the server is one of Python's, on a connection that stays."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    score = detector(image).score

    def bare() -> float:
        begun = time.perf_counter()
        detector.batch([image])
        return time.perf_counter() - begun

    def served() -> float:
        begun = time.perf_counter()
        connection.request("POST", "/inspect", image)
        reply = connection.getresponse()
        body = reply.read()
        took = time.perf_counter() - begun
        if reply.status != 200 or not math.isclose(json.loads(body)["score"], score, rel_tol=1e-4):
            raise MdpsError(
                f"a request was refused or judged otherwise, so there is nothing to compare: {body[:500]!r}"
            )
        return took

    in_turns((bare, served), 2)  # the first connection, buffers of a single image
    found = in_turns((bare, served), pairs)
    connection.close()
    return [ours for ours, _ in found], [theirs for _, theirs in found]


def _kept_busy(
    bundle: Path, image: bytes, threads: int | None, server: ServerProcess, load_command: list[str]
) -> tuple[Phase, Phase]:
    """The bare runtime in a process of its own and the server under wrk, whose processes run in turns of a second.

    What a turn cuts off goes on in the next, so nothing is lost at its ends.
    """
    spawn = multiprocessing.get_context("spawn")
    moments, sender = spawn.Pipe(duplex=False)
    bare = spawn.Process(target=_judge_for_ever, args=(bundle, image, threads, sender), daemon=True)
    bare.start()
    try:
        moments.recv()  # it is loaded
        assert bare.pid is not None
        sides = (_Turns(bare.pid), _Turns(server.process.pid))
        with subprocess.Popen(load_command, stdout=subprocess.PIPE, text=True) as load_:
            while load_.poll() is None:
                for side in sides:
                    side.turn()
            said = load_.communicate()[0]
        found = [moments.recv() for _ in iter(moments.poll, False)]
    finally:
        bare.kill()
        os.kill(server.process.pid, signal.SIGCONT)
    _wait_until_idle(server)
    return sides[0].phase(found, 1), sides[1].phase(_moments(said), _CLIENTS)


def _judge_for_ever(bundle: Path, image: bytes, threads: int | None, moments: Connection) -> None:
    with load(bundle, threads=threads) as detector:
        while True:
            detector.batch([image])
            moments.send(time.monotonic())


class _Turns:
    """A process that runs in turns, and how long it ran before any moment."""

    def __init__(self, pid: int) -> None:
        self._pid, self._turns = pid, list[tuple[float, float]]()
        self.stop()
        self._first = self._last = processor_seconds(pid)

    def turn(self) -> None:
        """Let it run for a second."""
        begun = time.monotonic()
        os.kill(self._pid, signal.SIGCONT)
        time.sleep(_TURN)
        self.stop()
        self._turns.append((begun, time.monotonic()))
        self._last = processor_seconds(self._pid)

    def stop(self) -> None:
        """Let it stand still."""
        os.kill(self._pid, signal.SIGSTOP)

    def phase(self, moments: Sequence[float], clients: int) -> Phase:
        """What came at these moments of the clock (`time.monotonic`) in the seconds it ran."""
        if len(moments) < _FEW:
            raise MdpsError(f"there were {len(moments)} answers in all, too few to compare: give it more --seconds")
        per_second = rate([self._ran_before(moment) for moment in moments], clients)
        ran = sum(end - begun for begun, end in self._turns)
        # The work for those that got no answer in the end counts in what was used too, so not by the answers.
        return Phase(per_second, 1000 * (self._last - self._first) / ran / per_second)

    def _ran_before(self, moment: float) -> float:
        return sum(min(end, moment) - begun for begun, end in self._turns if begun < moment)


def _script(image: bytes, detector: Detector) -> str:
    right = detector(image)
    body = "".join(f"\\{byte:03d}" for byte in image)
    return _SCRIPT % {"body": body, "score": right.score, "verdict": right.verdict}


def _moments(said: str) -> list[float]:
    """When wrk got its answers; MdpsError where one was refused or wrong."""
    lines = [line.split("\t") for line in said.splitlines() if "\t" in line]
    if sum(int(value) for name, value in lines if name in ("errors", "wrong")):
        raise MdpsError(f"requests failed under wrk, so there is nothing to compare: {said[:2000]}")
    return sorted(float(value) for name, value in lines if name == "answer")


def _wait_until_idle(server: ServerProcess) -> None:
    """Wait for the batch whose clients have gone, which would slow down whatever is measured next."""
    used, since = server.processor_seconds(), time.monotonic()
    while time.monotonic() - since < _IDLE:
        time.sleep(_IDLE / 10)
        if (now := server.processor_seconds()) > used + 0.01:
            used, since = now, time.monotonic()


def rate(moments: Sequence[float], clients: int) -> float:
    """Answers a second between the ends of two bursts: batches answer all their clients at once.

    The first and the last burst are cut by the start and the end; each side's mark is the answer with the longest pause
    behind it among the answers of two rounds of all clients.
    """
    window = min(2 * clients, len(moments) // 2)
    pauses = np.diff(np.asarray(moments))
    first = int(np.argmax(pauses[:window]))
    last = len(pauses) - window + int(np.argmax(pauses[-window:]))
    if last <= first:
        first, last = 0, len(moments) - 1
    return (last - first) / (moments[last] - moments[first])


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path, exists=True))
@click.argument("image", type=click.Path(path_type=Path, exists=True))
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True)
@click.option("--pairs", type=click.IntRange(1), default=100, show_default=True, help="Of single images.")
@click.option(
    "--seconds",
    type=click.FloatRange(1),
    default=3,
    show_default=True,
    help="Of a side in a round; 24 images at least.",
)
@click.option("--out", type=click.Path(path_type=Path), help="File for the result (JSON).")
def main(bundle: Path, image: Path, threads: int, pairs: int, seconds: float, out: Path | None) -> None:
    """Measure what serving BUNDLE adds to its runtime, on IMAGE."""
    result = measure(bundle, image.read_bytes(), threads=threads, pairs=pairs, seconds=seconds)
    text = json.dumps(result.to_json(), indent=2)
    click.echo(text)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
