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

from mdps.benchmarks.serve_process import serving
from mdps.runtime import Detector, load
from mdps.runtime.errors import MdpsError

_UNITS = {"us": 1e-3, "ms": 1.0, "s": 1e3}
_CLIENTS = 8  # that together keep the server busy
BATCH = 4


@dataclass(frozen=True)
class Overhead:
    """Medians over rounds. `added_ms` at batch 1 and `throughput_share` are medians of each round's own comparison."""

    rounds: int
    bare_ms: float
    served_ms: float
    added_ms: float
    bare_per_second: float
    served_per_second: float
    throughput_share: float

    def to_json(self) -> dict[str, Any]:
        """The fields."""
        return {name: round(value, 3) for name, value in asdict(self).items()}


def measure(bundle: Path, image: bytes, *, threads: int = 1, rounds: int = 7, seconds: float = 3.0) -> Overhead:
    """Compare in turns: so many rounds of four phases of so many seconds. Raises MdpsError without wrk."""
    wrk = shutil.which("wrk")
    if wrk is None:
        raise MdpsError("the load comes from wrk, which is not installed: apt-get install wrk")
    script = _script(image)
    options = ("--threads", str(threads), "--batch", str(BATCH))
    found = []
    with (
        tempfile.NamedTemporaryFile("w", suffix=".lua") as file,
        load(bundle, threads=threads) as detector,
        serving([bundle], *options) as server,
    ):
        file.write(script)
        file.flush()
        for _ in range(rounds):
            bare_ms = 1000 / _bare(detector, [image], seconds)
            served_ms = 1000 / _wrk(wrk, server.url, file.name, 1, seconds)
            bare_rate = max(1000 / bare_ms, _bare(detector, [image] * BATCH, seconds))
            served_rate = _wrk(wrk, server.url, file.name, _CLIENTS, seconds)
            found.append((bare_ms, served_ms, served_ms - bare_ms, bare_rate, served_rate, served_rate / bare_rate))
    return Overhead(rounds, *(statistics.median(column) for column in zip(*found, strict=True)))


def _bare(detector: Detector, images: list[bytes], seconds: float) -> float:
    """Images a second of the runtime alone."""
    started, count = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        detector.batch(images)
        count += len(images)
    return count / (time.perf_counter() - started)


def _script(image: bytes) -> str:
    body = "".join(f"\\{byte:03d}" for byte in image)
    return f'wrk.method = "POST"\nwrk.path = "/inspect"\nwrk.body = "{body}"\n'


def _wrk(wrk: str, url: str, script: str, clients: int, seconds: float) -> float:
    """Requests a second that wrk saw answered with success."""
    command = [wrk, "-t1", f"-c{clients}", f"-d{max(1, round(seconds))}s", "--timeout", "60s", "-s", script, url]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if "Non-2xx" in said or "Socket errors" in said:
        raise MdpsError(f"requests failed under wrk, so there is nothing to compare: {said}")
    count = re.search(r"(\d+) requests in ([\d.]+)(us|ms|s)\b", said)
    if count is None:
        raise MdpsError(f"wrk did not say how many requests it made: {said}")
    return int(count[1]) / (float(count[2]) * _UNITS[count[3]] / 1000)


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
