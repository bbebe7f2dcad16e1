"""Which engine is the fastest one for a bundle on this machine: measured once, written down, then read."""

import hashlib
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Self

import numpy as np

from mdps import __version__
from mdps.runtime import engines
from mdps.runtime.errors import BackendError, BackendWarning
from mdps.runtime.graphs import Graphs
from mdps.runtime.machine import installed as versions
from mdps.runtime.manifest import Manifest
from mdps.runtime.noise import NoiseBank
from mdps.runtime.sampler import posterior_sampling
from mdps.runtime.session import Session
from mdps.runtime.settings import Settings
from mdps.runtime.user_cache import cache_file, entries, readable_entries, write_newest

FILE_NAME = "engines.json"
MEASURED_SECONDS = 1.5
LEAST_ROUNDS, MOST_ROUNDS = 3, 25

Probe = Callable[[], object]
"""Does once what is to be compared."""


@dataclass(frozen=True)
class CpuSituation:
    """The circumstances of a choice; one that was made in another situation does not count."""

    bundle: str
    cpu: str
    threads: int
    samples: int
    versions: dict[str, str]

    @classmethod
    def here(cls, manifest: Manifest, threads: int, samples: int) -> Self:
        """This machine with this bundle; calibrating a bundle does not change it."""
        releases = {"mdps": __version__} | engine_versions()
        return cls(manifest.files_sha256, cpu_model(), threads, samples, releases)

    @property
    def key(self) -> str:
        """One word that differs where anything differs."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


def choose(
    situation: CpuSituation,
    open_probe: Callable[[str, ExitStack], Probe] | None,
    has_files: Callable[[str], bool] = lambda _: True,
) -> str:
    """One of the installed engines: the only one, the remembered one, or the one whose probe runs fastest.

    `open_probe` opens what an engine needs, closed with the stack it is given; None where there is nothing to compare,
    which gives the first. `has_files`: whether the bundle has what the engine reads. Raises BackendError
    where no engine is installed or none works; warns with a BackendWarning of all that does not work but leaves a
    choice.
    """
    names = [name for name in installed() if has_files(name)]
    if open_probe is None or len(names) == 1:
        return names[0]
    if (known := remembered(situation)) in names:
        return str(known)
    times = measure(names, open_probe)
    best = min(times, key=lambda name: times[name])
    if len(times) == len(names):  # one that failed today may be repaired tomorrow
        remember(situation, best, times)
    return best


def installed() -> tuple[str, ...]:
    """Automatic engines whose library is installed, without importing it; BackendError where there is none."""
    there = [engine for engine in automatic() if engine.installed]
    # The default engine computes what one with files of its own has no file of.
    rest = any(engine.name == engines.DEFAULT for engine in there)
    names = tuple(engine.name for engine in there if engine.complete or rest)
    if not names:
        raise BackendError('no engine is installed: pip install "mdps[cpu]" or "mdps[openvino]"')
    return names


def engine_versions() -> dict[str, str]:
    """Return the installed releases of the libraries among which there is a choice, by the names of their wheels."""
    return versions(*dict.fromkeys(wheel for engine in automatic() for wheel in engine.wheels))


def automatic() -> tuple[engines.Engine, ...]:
    """The rows of the table among which there is a choice."""
    return tuple(engine for engine in engines.ENGINES if engine.automatic)


def stepper(sessions: Graphs[Session], manifest: Manifest, settings: Settings, passes: Sequence[int]) -> Probe:
    """A probe of the first step of each of these passes, on one grey image: the steps are nearly all of its time."""
    grey = np.zeros((1, 3, *manifest.preprocessing.network_size), dtype=np.float32)
    mask = np.ones_like(grey[:, :1])
    noise = NoiseBank.of(settings.sampler, manifest.preprocessing.network_size)
    previous = np.repeat(grey, settings.sampler.samples, axis=0)

    def step() -> None:
        for index in passes:
            states = posterior_sampling(
                sessions, manifest.schedule, settings.sampler, grey, mask, index, noise, previous, reuse=True
            )
            next(islice(states, 1, None))  # the first of all is the noised image

    return step


def measure(names: Sequence[str], open_probe: Callable[[str, ExitStack], Probe]) -> dict[str, float]:
    """Median seconds of each engine's probe, in turns; one that fails is left out with a BackendWarning."""
    with ExitStack() as opened:
        probes = _warm(names, open_probe, opened)
        times: list[dict[str, float]] = []
        start = time.perf_counter()
        while len(times) < LEAST_ROUNDS or (
            len(times) < MOST_ROUNDS and time.perf_counter() - start < MEASURED_SECONDS
        ):
            # Every other round the other way round: neither always runs in caches the other has left.
            order = list(probes)[:: -1 if len(times) % 2 else 1]
            times.append({name: _seconds(probes[name]) for name in order})
        return {name: statistics.median(row[name] for row in times) for name in probes}


def _warm(names: Sequence[str], open_probe: Callable[[str, ExitStack], Probe], opened: ExitStack) -> dict[str, Probe]:
    probes: dict[str, Probe] = {}
    failures: list[BackendError] = []
    for name in names:
        try:
            probe = open_probe(name, opened)
            probe()  # compiles and allocates
        except BackendError as error:
            failures.append(error)
            _warn(f"the engine {name} is left out of the choice: {error}")
        else:
            probes[name] = probe
    if not probes:
        raise failures[0]
    return probes


def _seconds(probe: Probe) -> float:
    start = time.perf_counter()
    probe()
    return time.perf_counter() - start


def remembered(situation: CpuSituation) -> str | None:
    """The engine written down for this situation, if any; a BackendWarning where the file is damaged."""
    try:
        entry = entries(FILE_NAME).get(situation.key)
        return None if entry is None else str(entry["engine"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error)
        if not isinstance(error, OSError):
            reason = f"{cache_file(FILE_NAME)} is damaged ({type(error).__name__}: {error})"
        _warn(f"the choice of an engine cannot be read and is made again: {reason}")
        return None


def remember(situation: CpuSituation, engine: str, times: Mapping[str, float]) -> None:
    """Write the choice down, with what it rests on; a BackendWarning where that is not possible."""
    milliseconds = {name: round(seconds * 1000, 3) for name, seconds in times.items()}
    entry = {"engine": engine, "step_ms": milliseconds, **asdict(situation)}
    try:
        write_newest(FILE_NAME, readable_entries(FILE_NAME), situation.key, entry)
    except OSError as error:
        _warn(f"the choice of the engine {engine} is not remembered and will be measured again: {error}")


def _warn(sentence: str) -> None:
    warnings.warn(sentence, BackendWarning, stacklevel=2)


def cpu_model() -> str:
    """The processor's name as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{platform.machine()} {names[0] if names else platform.processor()}".strip()
