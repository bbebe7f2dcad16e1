"""Feeds a target changed inputs, in a child process that is ended when it hangs, grows, runs code or writes elsewhere.

Inputs that reach lines of mdps which none reached before are kept and changed further. CPU time is what counts, so that
a busy machine changes nothing.
"""

import base64
import copy
import json
import mmap
import multiprocessing
import pickle
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any, Protocol

import mdps

Case = dict[str, bytes]
PACKAGE = Path(mdps.__file__).parent
SECONDS = 20.0
"""CPU time of one input; the longest that is refused takes less than one second."""
SPACE, RESIDENT = 3 * 2**30, 512 * 2**20
"""Address space a child may add, and resident memory one input may."""
_BETWEEN = 120.0  # seconds between two lines about how far it is
_STUCK = 1800.0  # seconds of the wall clock without a new input
_SHARED = 64 * 2**20
_TRACED = 0.5  # share of the inputs whose lines are looked at
_WRITES = {
    "os.mkdir",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.link",
    "os.symlink",
    "os.truncate",
    "os.chmod",
    "os.utime",
}
_CODE = {
    "os.system",
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.spawn",
    "subprocess.Popen",
    "pickle.find_class",
}
_CODE |= {
    "socket.connect",
    "socket.bind",
    "socket.getaddrinfo",
    "urllib.Request",
    "pty.spawn",
    "ctypes.dlopen",
    "code.__new__",
}


class Target(Protocol):
    """Code to fuzz. `run` raises one of `refusals` for what it does not take; anything else is a finding."""

    refusals: tuple[type[BaseException], ...]

    def start(self, folder: Path) -> None:
        """Called once in the child; `folder` is the only one to write into."""

    def seeds(self) -> list[Case]:
        """Good inputs."""

    def mutated(self, case: Case, random: Random) -> Case:
        """Another input."""

    def run(self, case: Case, folder: Path) -> None:
        """Let mdps read it."""


class Violation(BaseException):
    """Something was about to run, to be written or to be connected to. No `except Exception` hides it."""


@dataclass
class Finding:
    """A kind of failure, the input that first showed it, and how often it came."""

    what: str
    case: Case
    times: int = 1


@dataclass
class Report:
    """The result of one run."""

    cases: int = 0
    refused: int = 0
    cpu: float = 0.0
    kept: int = 0
    lines: int = 0
    findings: dict[str, Finding] = field(default_factory=dict)

    def add(self, key: str, what: str, case: Case) -> None:
        """One more of a kind."""
        if key in self.findings:
            self.findings[key].times += 1
        else:
            self.findings[key] = Finding(what, case)

    def __str__(self) -> str:
        share = 100 * self.refused / max(1, self.cases)
        head = (
            f"{self.cases} cases ({share:.0f} % refused), {self.cpu:.1f} CPU seconds, {self.kept} kept for new lines, "
        )
        lines = [head + f"{self.lines} lines of mdps reached, {len(self.findings)} kinds of finding"]
        return "\n".join([*lines, *(f"  {finding.times} x {key}" for key, finding in self.findings.items())])

    def save(self, folder: Path) -> None:
        """Each finding as a file that `--replay` reads."""
        folder.mkdir(parents=True, exist_ok=True)
        for number, (key, finding) in enumerate(self.findings.items()):
            parts = {name: base64.b85encode(value).decode() for name, value in finding.case.items()}
            text = json.dumps({"finding": key, "what": finding.what, "case": parts}, indent=1)
            (folder / f"{number:03}.json").write_text(text, encoding="utf-8")


def saved_case(path: Path) -> Case:
    """The input of a saved finding."""
    return {name: base64.b85decode(text) for name, text in json.loads(path.read_text(encoding="utf-8"))["case"].items()}


def fuzz(target: Target, seed: int, *, cpu_seconds: float, cases: int | None, say: Callable[[str], None]) -> Report:
    """Run until the CPU time or the number of cases is used up; children that die are findings and are replaced."""
    report, number = Report(), 0
    while report.cpu < cpu_seconds and (cases is None or report.cases < cases):
        number += 1
        shared = mmap.mmap(-1, _SHARED)
        left = (cpu_seconds - report.cpu, None if cases is None else cases - report.cases)
        child = multiprocessing.get_context("fork").Process(
            target=_child, args=(target, seed * 1000 + number, shared, left)
        )
        child.start()
        stuck = _wait(child, shared, partial(_tell, report, shared, say))
        state = _read(shared)
        report = _merged(report, state)
        if child.exitcode != 0:
            died = "hangs without using CPU time" if stuck else _name(child.exitcode)
            if state["case"]:
                report.add(died, died, state["case"])
            else:
                say(f"what makes inputs {died}: on with others")
        say(str(report))
        shared.close()
        if not state["report"].cases and child.exitcode != 0:
            raise RuntimeError(f"the child ended before its first input: {child.exitcode}")
    return report


def _tell(report: Report, shared: mmap.mmap, say: Callable[[str], None]) -> None:
    with suppress(pickle.UnpicklingError, EOFError):  # the child writes at this moment
        say(str(_merged(report, _read(shared))))


def _wait(child: Any, shared: mmap.mmap, tell: Callable[[], None]) -> bool:
    seen, since = -1, time.monotonic()
    told = since
    while child.is_alive():
        child.join(2)
        count = int.from_bytes(shared[:8], "little")
        if count != seen:
            seen, since = count, time.monotonic()
            if since - told > _BETWEEN:
                told = since
                tell()
        elif time.monotonic() - since > _STUCK:
            child.kill()
            child.join()
            return True
    return False


def _name(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        kind = signal.Signals(-exitcode).name
        return f"takes more than {SECONDS:g} CPU seconds" if kind == "SIGPROF" else f"ends the process by {kind}"
    return f"ends the process with exit code {exitcode}"


def _merged(before: Report, state: dict[str, Any]) -> Report:
    report, part = copy.deepcopy(before), state["report"]
    report.cases += part.cases
    report.refused += part.refused
    report.cpu += part.cpu
    report.kept += part.kept
    report.lines = max(report.lines, part.lines)
    for key, finding in part.findings.items():
        known = report.findings.setdefault(key, Finding(finding.what, finding.case, 0))
        known.times += finding.times
    return report


def _write(shared: mmap.mmap, report: Report, case: Case, progress: int) -> None:
    data = pickle.dumps({"report": report, "case": case})
    shared[8:16] = len(data).to_bytes(8, "little")
    shared[16 : 16 + len(data)] = data
    shared[:8] = progress.to_bytes(8, "little")


def _read(shared: mmap.mmap) -> dict[str, Any]:
    size = int.from_bytes(shared[8:16], "little")
    state: dict[str, Any] = pickle.loads(shared[16 : 16 + size]) if size else {"report": Report(), "case": {}}
    return state


def _child(target: Target, seed: int, shared: mmap.mmap, left: tuple[float, int | None]) -> None:
    folder = Path(tempfile.mkdtemp(prefix="mdps-fuzz-"))
    try:
        _Runner(target, Random(seed), shared, folder).run(*left)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Runner:
    def __init__(self, target: Target, random: Random, shared: mmap.mmap, folder: Path) -> None:
        self.target, self.random, self.shared, self.folder = target, random, shared, folder
        self.report, self.lines = Report(), _Lines()
        self.guard = _Guard(folder)

    def run(self, cpu_seconds: float, cases: int | None) -> None:
        threading.settrace(self.lines.trace)  # for the threads that the target starts
        self.target.start(self.folder)
        corpus = self.target.seeds()
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + SPACE, used + SPACE))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        begun = time.process_time()
        while self.report.cpu < cpu_seconds and (cases is None or self.report.cases < cases):
            index = self.report.cases
            _write(self.shared, self.report, {}, index)  # the libraries that make an input may end the process too
            case = corpus[index] if index < len(corpus) else self.another(corpus)
            _write(self.shared, self.report, case, index + 1)
            if self.one(case) and sum(map(len, case.values())) < 200_000:
                self.report.kept += 1
                corpus.append(case)
            self.report.cpu = time.process_time() - begun
        _write(self.shared, self.report, {}, self.report.cases + 1)

    def another(self, corpus: list[Case]) -> Case:
        while True:
            with suppress(RecursionError):  # a tree so deep that it is read but cannot be walked through
                case = self.target.mutated(self.random.choice(corpus), self.random)
                if sum(map(len, case.values())) < _SHARED // 2:  # the parent is shown it
                    return case

    def one(self, case: Case) -> bool:
        """Whether the input reached a line that none before reached."""
        self.report.cases += 1
        before, traced = _resident(), self.random.random() < _TRACED
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # its default action ends this process
        self.lines.on, self.guard.on = traced, True
        sys.settrace(self.lines.trace if traced else None)
        try:
            self.target.run(case, self.folder)
        except self.target.refusals:
            self.report.refused += 1
        except BaseException as error:
            self.guard.on = False
            key, what = _said(error)
            self.report.add(key, what, case)
        finally:
            sys.settrace(None)
            self.lines.on = self.guard.on = False
            signal.setitimer(signal.ITIMER_PROF, 0)
        if self.guard.seen:
            self.report.add(self.guard.seen[0], self.guard.seen[0], case)
            self.guard.seen.clear()
        if (grown := _resident() - before) > RESIDENT:
            self.report.add("memory", f"resident memory grew by {grown >> 20} MiB", case)
        news = self.lines.news
        self.lines.news, self.report.lines = False, len(self.lines.seen)
        return news


def _resident() -> int:
    """The largest so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class _Lines:
    """Which lines of mdps ran."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, int]] = set()
        self.on = self.news = False
        self._ours = tuple(f"{PACKAGE / name}/" for name in ("runtime", "models", "serving", "export"))

    def trace(self, frame: FrameType, event: str, argument: object) -> Any:
        return self._line if self.on and frame.f_code.co_filename.startswith(self._ours) else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        spot = (frame.f_code.co_filename, frame.f_lineno)
        if spot not in self.seen:
            self.seen.add(spot)
            self.news = True
        return self._line


class _Guard:
    """An audit hook: no process, no socket, no unpickling by class, no write outside the one folder."""

    def __init__(self, folder: Path) -> None:
        self.on, self.seen = False, list[str]()
        self._folder = str(folder)
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        is_write = event in _WRITES or (event == "open" and _writes(arguments))
        if event in _CODE or (is_write and not str(arguments[0]).startswith(self._folder)):
            self.on = False
            self.seen.append(f"{event} {str(arguments)[:100]}")
            raise Violation(self.seen[-1])


def _writes(arguments: tuple[Any, ...]) -> bool:
    path, mode, flags = arguments
    if isinstance(path, int) or path == "/dev/null":
        return False
    return any(letter in (mode or "") for letter in "wax+") or bool((flags or 0) & 0o3 and mode is None)


def _said(error: BaseException) -> tuple[str, str]:
    """Return what tells one kind of finding from another, and all of it."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if frame.filename.startswith(f"{PACKAGE}/") and "/tests/" not in frame.filename]
    frame = (ours or list(frames))[-1]
    place = Path(frame.filename).relative_to(PACKAGE) if ours else Path(frame.filename).name
    text = str(error).split("\n")[0][:150].encode("ascii", "backslashreplace").decode()
    return f"{type(error).__name__} in {place}:{frame.lineno} {frame.name}", f"{text}\n{_trace(error)}"


def _trace(error: BaseException) -> str:
    text = "".join(traceback.format_exception(error, limit=-12))
    return text.encode("ascii", "backslashreplace").decode()[-4000:]
