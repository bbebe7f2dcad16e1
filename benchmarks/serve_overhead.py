"""What serving costs: `mdps serve` under wrk beside the bare runtime, in turns within one run.

    python -m mdps.benchmarks.serve_overhead BUNDLE IMAGE --out overhead.json

Both sides start from the bytes of a file and use the same engine and threads. Needs wrk (apt-get install wrk).
"""

import json
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from mdps.benchmarks.serve_process import ServerProcess, serving
from mdps.runtime import Detector, load
from mdps.runtime.errors import MdpsError

_UNITS = {"us": 1e-3, "ms": 1.0, "s": 1e3}
_CLIENTS = 8  # that together keep the server busy
BATCH = 4


@dataclass(frozen=True)
class Phase:
    """One side for a moment: images a second, ms of an image that nothing interrupted, processor ms an image."""

    per_second: float
    quick_ms: float
    processor_ms: float


@dataclass(frozen=True)
class Overhead:
    """Medians over rounds; the two that compare are medians of each round's own comparison.

    `quick` times are the 5th percentile at batch 1: on a machine that does other work too they are what is left of the
    comparison. `processor` is the time of all threads for an image when kept busy, which other work hardly changes.
    """

    rounds: int
    bare_ms: float
    served_ms: float
    bare_quick_ms: float
    served_quick_ms: float
    added_quick_ms: float
    bare_per_second: float
    served_per_second: float
    throughput_share: float
    bare_processor_ms: float
    served_processor_ms: float

    def to_json(self) -> dict[str, Any]:
        """The fields."""
        return {name: round(value, 3) for name, value in asdict(self).items()}


def measure(bundle: Path, image: bytes, *, threads: int = 1, rounds: int = 7, seconds: float = 3.0) -> Overhead:
    """Compare in turns: so many rounds of four phases of so many seconds. Raises MdpsError without wrk."""
    wrk = shutil.which("wrk")
    if wrk is None:
        raise MdpsError("the load comes from wrk, which is not installed: apt-get install wrk")
    options = ("--threads", str(threads), "--batch", str(BATCH))
    found = []
    with (
        tempfile.NamedTemporaryFile("w", suffix=".lua") as file,
        load(bundle, threads=threads) as detector,
        serving([bundle], *options) as server,
    ):
        file.write(_script(image))
        file.flush()
        for _ in range(rounds):
            bare = _bare(detector, [image], seconds)
            served = _wrk(wrk, server, file.name, 1, seconds)
            busy = max(bare, _bare(detector, [image] * BATCH, seconds), key=lambda phase: phase.per_second)
            loaded = _wrk(wrk, server, file.name, _CLIENTS, seconds)
            found.append(
                (
                    1000 / bare.per_second, 1000 / served.per_second,
                    bare.quick_ms, served.quick_ms, served.quick_ms - bare.quick_ms,
                    busy.per_second, loaded.per_second, loaded.per_second / busy.per_second,
                    busy.processor_ms, loaded.processor_ms,
                )
            )  # fmt: skip
    return Overhead(rounds, *(statistics.median(column) for column in zip(*found, strict=True)))


def _bare(detector: Detector, images: list[bytes], seconds: float) -> Phase:
    started, used, times = time.perf_counter(), time.process_time(), []
    while (begun := time.perf_counter()) - started < seconds:
        detector.batch(images)
        times.append(time.perf_counter() - begun)
    count = len(times) * len(images)
    used = time.process_time() - used
    quick = statistics.quantiles(times, n=20)[0] if len(times) > 1 else times[0]
    return Phase(count / (time.perf_counter() - started), 1000 * quick, 1000 * used / count)


def _script(image: bytes) -> str:
    body = "".join(f"\\{byte:03d}" for byte in image)
    done = "function done(summary, latency) print(string.format('quick %.6f ms', latency:percentile(5) / 1000)) end"
    return f'wrk.method = "POST"\nwrk.path = "/inspect"\nwrk.body = "{body}"\n{done}\n'


def _wrk(wrk: str, server: ServerProcess, script: str, clients: int, seconds: float) -> Phase:
    command = [wrk, "-t1", f"-c{clients}", f"-d{max(1, round(seconds))}s", "--timeout", "60s", "-s", script, server.url]
    used = server.processor_seconds()
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = server.processor_seconds() - used
    if "Non-2xx" in said or "Socket errors" in said:
        raise MdpsError(f"requests failed under wrk, so there is nothing to compare: {said}")
    count, quick = re.search(r"(\d+) requests in ([\d.]+)(us|ms|s)\b", said), re.search(r"quick ([\d.]+) ms", said)
    if count is None or quick is None:
        raise MdpsError(f"wrk did not say how many requests it made: {said}")
    rate = int(count[1]) / (float(count[2]) * _UNITS[count[3]] / 1000)
    return Phase(rate, float(quick[1]), 1000 * used / int(count[1]))


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path, exists=True))
@click.argument("image", type=click.Path(path_type=Path, exists=True))
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True)
@click.option("--seconds", type=click.FloatRange(1), default=3, show_default=True)
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
