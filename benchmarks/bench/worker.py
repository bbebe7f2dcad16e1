"""One competitor's process: reads a command a line from stdin, answers with a JSON object a line.

Started as `python -m mdps.benchmarks.bench.worker SPEC`. Commands: open, run, peak.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any, TextIO

from mdps.benchmarks.bench import Competitor, SkippedError, Spec, missing, peak_mb
from mdps.runtime.errors import MdpsError, first_line

Answer = dict[str, Any]


# Each imports the libraries of its kind and no others.
COMPETITORS = {
    "ours": "mdps.benchmarks.bench.local:Ours",
    "method": "mdps.benchmarks.bench.local:Ours",
    "file": "mdps.benchmarks.bench.local:OneFile",
    "rate": "mdps.benchmarks.bench.local:MatrixRate",
    "torch": "mdps.benchmarks.bench.eager:Eager",
    "peer": "mdps.benchmarks.bench.peers:open_peer",
    "checked": "mdps.benchmarks.gpu_check.checked:Checked",
}


def open_competitor(spec: Spec) -> Competitor:
    """Load the competitor of a kind. Raises SkippedError with the reason, or MdpsError."""
    if spec.kind == "peer":
        import_module("anomalib")  # where it is missing, that is known before torch is loaded
    module, _, name = COMPETITORS[spec.kind].partition(":")
    opened: Competitor = getattr(import_module(module), name)(spec)
    return opened


class Worker:
    """Answers commands about one competitor; whatever goes wrong is an answer with the reason under `skipped`.

    With `failed` where the reason is none that was foreseen.
    """

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self._competitor: Competitor | None = None
        self._commands: dict[str, Callable[[], Answer]] = {"open": self.open, "run": self.run, "peak": self.peak}

    def answer(self, command: str) -> Answer:
        """The answer to one of open, run, peak."""
        try:
            return self._commands[command]()
        except (SkippedError, MdpsError) as error:
            return {"skipped": str(error)}
        except ModuleNotFoundError as error:
            return {"skipped": missing(error, self.spec.kind)}
        except Exception as error:  # a competitor's library may raise anything, and the others must go on
            traceback.print_exc()
            return {"skipped": f"{type(error).__name__}: {first_line(str(error))}", "failed": True}

    def open(self) -> Answer:
        """Load it and judge the first image."""
        start = time.perf_counter()
        self._competitor = open_competitor(self.spec)
        load_ms = (time.perf_counter() - start) * 1000
        loaded = {"load_ms": load_ms, "loaded_mb": peak_mb()}
        first = self.run()
        return {**self._competitor.facts, **loaded, "first_ms": first["ms"], "score": first["score"]}

    def run(self) -> Answer:
        """Judge a batch once."""
        assert self._competitor is not None
        outcome, ms = self._competitor.timer(self._competitor.run)
        return {"ms": ms, "score": outcome.score, "passes_ms": outcome.passes_ms, "device_ms": outcome.device_ms}

    def peak(self) -> Answer:
        """Memory held at most so far."""
        return {"peak_mb": peak_mb()}


def serve(worker: Worker, commands: Iterable[str], answers: TextIO) -> None:
    """Answers until the commands end."""
    for line in commands:
        answers.write(json.dumps(worker.answer(line.strip())) + "\n")
        answers.flush()


def main() -> None:
    """Serves this process's stdin; what libraries print goes to stderr, so that answers stay alone on stdout."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(Worker(Spec(**json.loads(sys.argv[1]))), sys.stdin, answers)


if __name__ == "__main__":
    main()
