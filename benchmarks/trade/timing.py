"""Times many ways of judging in one interleaved run: every way once a round, all on the round's image."""

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from mdps.benchmarks.bench.rounds import orders
from mdps.benchmarks.reproduce.bundles import digest
from mdps.runtime.atomic import write_text
from mdps.runtime.bundle import Bundle
from mdps.runtime.detector import Detector
from mdps.runtime.loading import open_pipeline
from mdps.runtime.manifest import Manifest
from mdps.runtime.preprocessing import read_image
from mdps.runtime.settings import Settings

Times = dict[str, list[float]]


@dataclass(frozen=True)
class Way:
    """A bundle and the settings it judges with, which its graphs can compute; `engine` where it is not the clock's."""

    name: str
    bundle: Path
    settings: Settings
    engine: str | None = None


@dataclass(frozen=True)
class Clock:
    """How to measure: `pictures` are the images of the rounds in turns; `engine` and `threads` as in `load`."""

    pictures: Sequence[Path]
    rounds: int
    engine: str
    threads: int | None

    def kept(self, ways: Sequence[Way], path: Path) -> Times:
        """As `measure`; what was measured before of exactly these ways is read from `path` instead."""
        asked = [[way.name, way.bundle.name, way.settings.to_json(), way.engine] for way in ways]
        pictures = [picture.name for picture in self.pictures]
        key = digest([asked, pictures, self.rounds, self.engine, self.threads])
        if path.is_file():
            before = json.loads(path.read_text(encoding="utf-8"))
            if before["key"] == key:
                return {name: list(map(float, values)) for name, values in before["ms"].items()}
        found = self.measure(ways)
        write_text(path, json.dumps({"key": key, "ms": found}, indent=1) + "\n")
        return found

    def measure(self, ways: Sequence[Way]) -> Times:
        """Milliseconds of one image lying in memory, all passes and scoring, a number a round; after one untimed round.

        Ways of one bundle share its loaded graphs. Raises as `open_pipeline` and for pictures that cannot be read.
        """
        with ExitStack() as opened:
            detectors = self._open(ways, opened)
            any_of_them = detectors[ways[0].name]
            images = [any_of_them.preprocessing(read_image(path))[None] for path in self.pictures]
            for detector in detectors.values():
                _ms(detector, images[0])
            found: Times = {way.name: [] for way in ways}
            rounds = enumerate(orders(list(detectors.items()), self.rounds))
            for index, order in tqdm(rounds, total=self.rounds, desc="timing", unit="round", disable=None):
                for name, detector in order:
                    found[name].append(_ms(detector, images[index % len(images)]))
            return found

    def _open(self, ways: Sequence[Way], opened: ExitStack) -> dict[str, Detector]:
        manifests = {way.bundle: Manifest.read(way.bundle) for way in ways}
        pipelines = {
            (path, engine): open_pipeline(
                Bundle(path, manifests[path], manifests[path].settings), opened, engine=engine, threads=self.threads
            )
            for path, engine in dict.fromkeys((way.bundle, self._engine(way)) for way in ways)
        }
        return {
            way.name: Detector(
                manifests[way.bundle], replace(pipelines[way.bundle, self._engine(way)], settings=way.settings)
            )
            for way in ways
        }

    def _engine(self, way: Way) -> str:
        return way.engine or self.engine


def _ms(detector: Detector, image: NDArray[np.float32]) -> float:
    """A mask range that is not the image's own is taken as (0, 1): it costs the same."""
    start = time.perf_counter()
    detector.inspect(image, mask_range=(0.0, 1.0))
    return (time.perf_counter() - start) * 1000


def steps_within(budget: float, few: tuple[int, float], many: tuple[int, float], noise_level: int) -> int:
    """How many steps take `budget` ms, where (N, ms) of few and of many steps are known and time grows evenly with N.

    Of the numbers whose time is within a tenth of the budget one that divides the noise level is taken, as it changes
    nothing but N; else the nearest number.
    """
    (low, low_ms), (high, high_ms) = few, many
    a_step = max((high_ms - low_ms) / (high - low), 1e-9)
    wanted = low + (budget - low_ms) / a_step
    nearest = min(max(1, round(wanted)), noise_level)
    whole = [n for n in range(1, noise_level + 1) if noise_level % n == 0 and abs(n - wanted) * a_step <= budget / 10]
    return min(whole, key=lambda n: abs(n - wanted)) if whole else nearest


def middle(times: Mapping[str, Sequence[float]], name: str) -> float | None:
    """The median of a way, None where it was not timed."""
    return median(times[name]) if times.get(name) else None
