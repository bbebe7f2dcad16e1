"""Our own runtime on one of its engines, as `mdps predict` runs it."""

from typing import Any

import numpy as np

from mdps.benchmarks.bench.competitor import Outcome
from mdps.benchmarks.bench.picture import observation
from mdps.benchmarks.bench.spec import Spec
from mdps.benchmarks.bench.timer import Timer, WallTimer
from mdps.runtime.loading import load


class Ours:
    """A loaded bundle. On a device too its calls return when the result is in the host's memory: a wall clock does."""

    def __init__(self, spec: Spec) -> None:
        self.timer: Timer = WallTimer()
        self.detector = load(
            spec.bundle, engine=spec.variant, threads=spec.threads, samples=spec.samples, max_batch=spec.max_batch,
            calibrated=False, warm_up=False,
        )  # fmt: skip
        size = self.detector.preprocessing.network_size
        self._observations = np.stack([observation(size, index) for index in range(spec.batch)])
        engines = sorted(set(self.detector.provenance["engines"].values()))  # type: ignore[attr-defined]
        self.facts: dict[str, Any] = {"note": ", ".join(engines)}

    def run(self) -> Outcome:
        """All passes and the scoring; a frozen mask range is taken as (0, 1), as by every competitor."""
        found = self.detector.inspect(self._observations, mask_range=(0.0, 1.0))
        passes = found.times["first_pass"] + found.times["masked_pass"]
        return Outcome(float(found.anomaly_score[0]), passes)
