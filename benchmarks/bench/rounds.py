"""One interleaved run of competitors in processes of their own: each once a round, in an order that changes."""

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Self

from mdps.benchmarks.bench import Spec
from mdps.benchmarks.kit import Say, orders

Answer = dict[str, Any]
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


class Process:
    """A worker that was started: `ask` it, then `close`. After a failure `skipped` says why, and it is done for.

    `failed` tells a crash, a hang or a library's surprise from what merely cannot run here; `hung` is a hang.
    """

    def __init__(self, spec: Spec, patience: float) -> None:
        self.spec, self.skipped, self.failed, self.hung = spec, "", False, False
        self._patience = patience
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - closed below
        self._child = subprocess.Popen(
            [sys.executable, "-m", "mdps.benchmarks.bench.worker", json.dumps(spec.to_json())],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, encoding="utf-8",
            env=environment(spec.threads, spec.card),
        )  # fmt: skip
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def ask(self, command: str, patience: float | None = None) -> Answer:
        """The worker's answer; where it fails, dies or takes longer than its patience, `skipped` and no other key."""
        assert self._child.stdin is not None
        patience = self._patience if patience is None else patience
        try:
            self._child.stdin.write(command + "\n")
            self._child.stdin.flush()
            line = self._lines.get(timeout=patience)
        except OSError:
            line = ""
        except queue.Empty:
            self.hung = True
            return self._give_up(f"took longer than {patience:g} seconds to {command} one image")
        answer: Answer = json.loads(line) if line else {"skipped": self._death(), "failed": True}
        return self._give_up(answer["skipped"], answer.get("failed", False)) if "skipped" in answer else answer

    def close(self) -> None:
        """End the process and free its memory."""
        if self._child.poll() is None:
            self._child.kill()
        self._child.wait()
        for stream in (self._child.stdin, self._child.stdout):
            try:
                assert stream is not None
                stream.close()
            except OSError:  # what was not sent to a dead process
                continue
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> None:
        assert self._child.stdout is not None
        try:
            for line in self._child.stdout:
                self._lines.put(line)
        except ValueError:  # closed while it was read
            return
        self._lines.put("")

    def _give_up(self, reason: str, failed: bool = True) -> Answer:
        self.skipped, self.failed = reason, failed
        if self._child.poll() is None:
            self._child.kill()
        return {"skipped": reason}

    def _death(self) -> str:
        code = self._child.wait()
        self._errors.seek(0)
        said = [line.strip() for line in self._errors if line.strip()]
        hint = " (the system may have run out of memory)" if code == -9 else ""
        return f"its process ended with code {code}{hint}" + (f": {said[-1]}" if said else "")


def environment(threads: int, card: str | None = None) -> dict[str, str]:
    """This process's environment with every library's threads set, and nothing to be fetched from the network.

    Of the cards, where one is given, it shows this one alone, to torch and all others alike.
    """
    count = str(threads)
    # Compilers in torch's pool of processes would compete with what is timed.
    fixed = {"HF_HUB_OFFLINE": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    if card is not None:
        fixed["CUDA_VISIBLE_DEVICES"] = card
    return os.environ | dict.fromkeys(THREAD_VARIABLES, count) | fixed


@dataclass
class Measurement:
    """Times of a competitor: `facts` of its opening, an entry a round in the lists; or why it was skipped."""

    spec: Spec
    facts: dict[str, Any] = field(default_factory=dict)
    ms: list[float] = field(default_factory=list)
    passes_ms: list[float] = field(default_factory=list)
    peak_mb: float | None = None
    skipped: str = ""

    def add(self, answer: Answer) -> None:
        """Take in one run."""
        self.ms.append(answer["ms"])
        if answer["passes_ms"] is not None:
            self.passes_ms.append(answer["passes_ms"])
        if answer["device_ms"] is not None:
            self.facts.setdefault("device_ms", []).append(answer["device_ms"])


def measure(specs: Sequence[Spec], *, rounds: int, warm_up: int, patience: float, say: Say) -> list[Measurement]:
    """Opens all, one after another; warms each up; then `rounds` rounds. Measurements in the order of `specs`."""
    found = [Measurement(spec) for spec in specs]
    with ExitStack() as opened:
        running = []
        for one in found:  # started one by one, so that no cold start has another beside it
            say(f"loading {one.spec.name}")
            process = opened.enter_context(Process(one.spec, patience))
            running.append((one, process))
            _open(one, process, warm_up)
            if one.skipped:
                say(f"skipped {one.spec.name}: {one.skipped}")
        for number, order in enumerate(orders(running, rounds), start=1):
            say(f"round {number} of {rounds}")
            for one, process in order:
                if not one.skipped:
                    _time(one, process)
        for one, process in running:
            if not one.skipped:
                one.peak_mb = process.ask("peak").get("peak_mb")
    return found


def _open(one: Measurement, process: Process, warm_up: int) -> None:
    answer = process.ask("open")
    for _ in range(warm_up):
        if not process.skipped:
            process.ask("run")
    one.skipped, one.facts = process.skipped, answer


def _time(one: Measurement, process: Process) -> None:
    answer = process.ask("run")
    one.skipped = process.skipped
    if not one.skipped:
        one.add(answer)
