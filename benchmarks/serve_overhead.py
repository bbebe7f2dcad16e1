"""What serving costs: `mdps serve` under wrk beside the bare runtime, in turns within one run.

    python -m mdps.benchmarks.serve_overhead BUNDLE IMAGE --out overhead.json

Both sides start from the bytes of a file and use the same engine and threads. Needs wrk (apt-get install wrk).
"""

import json
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np

from mdps.benchmarks.bench.machine import machine_facts
from mdps.benchmarks.serve_process import ServerProcess, serving
from mdps.runtime import Detector, load
from mdps.runtime.errors import MdpsError
from mdps.runtime.manifest import Manifest

_CLIENTS = 8  # that together keep the server busy
_QUICK = 5  # percent
_IDLE = 0.3  # seconds without work, after which the server counts as idle
_FEW = 3  # answers
BATCH = 4

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
    """One side for a moment: seconds an image took (one at a time), images a second, processor ms an image."""

    took: list[float]
    per_second: float
    processor_ms: float


@dataclass(frozen=True)
class Overhead:
    """What serving adds, on so many threads of the engine.

    Times are of one image at a time, over all rounds of a side: medians, and the 5th percentile (`quick`), which other
    work on the machine moves less. Throughputs are medians over rounds, and `throughput_share` is the median of the
    rounds' own comparisons: a busy server beside the better of the bare runtime with one image and with a batch.
    `processor` is the time of all threads for an image when kept busy, which other work hardly changes.
    """

    rounds: int
    threads: int | None
    images: int
    bare_ms: float
    served_ms: float
    added_ms: float
    bare_quick_ms: float
    served_quick_ms: float
    added_quick_ms: float
    bare_per_second: float
    served_per_second: float
    throughput_share: float
    throughput_shares: list[float]
    bare_processor_ms: float
    served_processor_ms: float
    machine: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The fields."""
        rounded = {name: round(value, 3) if isinstance(value, float) else value for name, value in asdict(self).items()}
        return rounded | {"throughput_shares": [round(share, 3) for share in self.throughput_shares]}


def measure(bundle: Path, image: bytes, *, threads: int | None = 1, rounds: int = 7, seconds: float = 3.0) -> Overhead:
    """Compare in turns: so many rounds of four phases of so many seconds, each side alone on the machine in its phase.

    Raises MdpsError without wrk, and where an answer is refused or wrong.
    """
    wrk = shutil.which("wrk")
    if wrk is None:
        raise MdpsError("the load comes from wrk, which is not installed: apt-get install wrk")
    # A long deadline: eight clients of a detector of seconds an image would be refused otherwise.
    options = (
        "--batch",
        str(BATCH),
        "--deadline-ms",
        "120000",
        *(() if threads is None else ("--threads", str(threads))),
    )
    found: list[tuple[Phase, Phase, Phase, Phase]] = []
    with (
        tempfile.NamedTemporaryFile("w", suffix=".lua") as file,
        load(bundle, threads=threads) as detector,
        serving([bundle], *options) as server,
    ):
        file.write(_script(image, detector))
        file.flush()
        for _ in range(rounds):
            found.append(
                (
                    _bare(detector, [image], seconds), _wrk(wrk, server, file.name, 1, seconds),
                    _bare(detector, [image] * BATCH, seconds), _wrk(wrk, server, file.name, _CLIENTS, seconds),
                )
            )  # fmt: skip
    return _overhead(found, threads, machine_facts(Manifest.read(bundle)))


def _overhead(
    found: Sequence[tuple[Phase, Phase, Phase, Phase]], threads: int | None, machine: dict[str, Any]
) -> Overhead:
    bare, served = ([1000 * s for phases in found for s in phases[side].took] for side in (0, 1))
    busy = [max(one, many, key=lambda phase: phase.per_second) for one, _, many, _ in found]
    loaded = [phases[3] for phases in found]
    shares = [theirs.per_second / ours.per_second for theirs, ours in zip(loaded, busy, strict=True)]
    middle, quick = ([float(np.percentile(side, at)) for side in (bare, served)] for at in (50, _QUICK))
    return Overhead(
        rounds=len(found), threads=threads, images=len(bare) + len(served),
        bare_ms=middle[0], served_ms=middle[1], added_ms=middle[1] - middle[0],
        bare_quick_ms=quick[0], served_quick_ms=quick[1], added_quick_ms=quick[1] - quick[0],
        bare_per_second=statistics.median(phase.per_second for phase in busy),
        served_per_second=statistics.median(phase.per_second for phase in loaded),
        throughput_share=statistics.median(shares), throughput_shares=shares,
        bare_processor_ms=statistics.median(phase.processor_ms for phase in busy),
        served_processor_ms=statistics.median(phase.processor_ms for phase in loaded),
        machine=machine,
    )  # fmt: skip


def _bare(detector: Detector, images: list[bytes], seconds: float) -> Phase:
    started, used = time.perf_counter(), time.process_time()
    times: list[float] = []
    while (begun := time.perf_counter()) - started < seconds or not times:
        detector.batch(images)
        times.append(time.perf_counter() - begun)
    count = len(times) * len(images)
    used = time.process_time() - used
    return Phase(times, count / (time.perf_counter() - started), 1000 * used / count)


def _script(image: bytes, detector: Detector) -> str:
    right = detector(image)
    body = "".join(f"\\{byte:03d}" for byte in image)
    return _SCRIPT % {"body": body, "score": right.score, "verdict": right.verdict}


def _wrk(wrk: str, server: ServerProcess, script: str, clients: int, seconds: float) -> Phase:
    command = [
        wrk,
        "-t1",
        f"-c{clients}",
        f"-d{max(1, round(seconds))}s",
        "--timeout",
        "120s",
        "-s",
        script,
        server.url,
    ]
    used, started = server.processor_seconds(), time.perf_counter()
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used, took = server.processor_seconds() - used, time.perf_counter() - started
    _wait_until_idle(server)
    lines = [line.split("\t") for line in said.splitlines() if "\t" in line]
    moments = sorted(float(value) for name, value in lines if name == "answer")
    troubles = sum(int(value) for name, value in lines if name in ("errors", "wrong"))
    if troubles:
        raise MdpsError(f"requests failed under wrk, so there is nothing to compare: {said[:2000]}")
    if len(moments) < _FEW:
        raise MdpsError(f"wrk got {len(moments)} answers in {seconds:g} s, too few to compare: give it more --seconds")
    per_second = rate(moments, clients)
    # The work for those that wrk left without an answer at its end counts in `used` too, so not by the answers.
    return Phase(np.diff(moments).tolist(), per_second, 1000 * used / took / per_second)


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
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True)
@click.option(
    "--seconds", type=click.FloatRange(1), default=3, show_default=True, help="Of a phase; a dozen images at least."
)
@click.option("--out", type=click.Path(path_type=Path), help="File for the result (JSON).")
def main(bundle: Path, image: Path, threads: int, rounds: int, seconds: float, out: Path | None) -> None:
    """Measure what serving BUNDLE adds to its runtime, on IMAGE."""
    result = measure(bundle, image.read_bytes(), threads=threads, rounds=rounds, seconds=seconds)
    text = json.dumps(result.to_json(), indent=2)
    click.echo(text)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
