"""An export's results in one step, kept in the bundle: an engine it did not compare is compared when first loaded.

The gate of an export covers the engines, releases and the processor that were there. Another one may compute wrongly,
and nothing in its results would show it. The inputs are drawn again from a stream that never changes; of the outputs
the bundle holds a few values and the norm.
"""

import hashlib
import json
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mdps import __version__
from mdps.runtime.atomic import write_text
from mdps.runtime.choice import cpu_model, engine_versions
from mdps.runtime.errors import BackendError, BackendWarning, BundleError
from mdps.runtime.graphs import FEATURES, SCORE, STEPS
from mdps.runtime.manifest import Manifest
from mdps.runtime.noise import INITIAL, KNOWN, NoiseBank
from mdps.runtime.pipeline import mask_scalars
from mdps.runtime.records import Record
from mdps.runtime.sampler import noise_root, signal_root
from mdps.runtime.session import Arrays, Session
from mdps.runtime.settings import MaskSettings
from mdps.runtime.user_cache import readable_entries, write_newest

FILE_NAME = "reference.json"
COMPARED = "engines"
"""The key of the manifest's `parity` under which an export lists what it compared: `Compared.to_json`."""
CACHE_NAME = "compared.json"
TOLERANCES = {"fp32": 1e-3, "fp16": 5e-2, "bf16": 0.2}
"""By what a graph computes in: a little more than the gate allows two engines on one machine. What is wrong is off by
some tenths at least."""
SAMPLED = 64
_OUTPUTS = {SCORE: ("anomaly_map", "anomaly_score")}  # a mask's pixels may fall to either side of its threshold
Sessions = Mapping[str, Session]


@dataclass(frozen=True)
class Output(Record):
    """One output of a graph: its largest absolute value, its norm, and some of its values."""

    largest: float
    norm: float
    values: tuple[float, ...]

    @classmethod
    def of(cls, array: NDArray[Any]) -> Self:
        """Rounded to nine digits, which tell all float32 numbers apart."""
        largest, norm, values = _measured(array)
        return cls(_short(largest), _short(norm), tuple(map(_short, values)))

    def error(self, array: NDArray[Any]) -> float:
        """How far the array is off: of the values by the largest one, or of the norm by itself; NaN stays."""
        _, norm, values = _measured(array)
        apart = np.abs(values - np.asarray(self.values)).max() / max(self.largest, 1e-12)
        return float(np.maximum(apart, abs(norm - self.norm) / max(self.norm, 1e-12)))


@dataclass(frozen=True)
class Reference(Record):
    """`outputs` of each graph by role, of inputs drawn by `seed`; `scalars` are the step's, of the step graphs."""

    seed: int
    scalars: dict[str, dict[str, float]]
    outputs: dict[str, dict[str, Output]]

    @classmethod
    def measured(
        cls, sessions: Sessions, size: tuple[int, int], mask: MaskSettings, scalars: dict[str, dict[str, float]]
    ) -> Self:
        """Return what these sessions compute; `size` is the network's."""
        runs = _Runs(0, scalars, size, mask, sessions, samples=1)
        return cls(0, scalars, {role: {k: Output.of(v) for k, v in runs.of(role).items()} for role in sessions})

    @classmethod
    def read(cls, folder: Path, manifest: Manifest) -> Self | None:
        """That of a bundle, None in one from before there were any; BundleError where it is damaged."""
        if FILE_NAME not in manifest.files:
            return None
        try:
            content = json.loads((folder / FILE_NAME).read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise BundleError(f"{folder / FILE_NAME} cannot be read ({error}): export the bundle again") from error
        return cls.from_json(content, str(folder / FILE_NAME))

    def write(self, folder: Path) -> None:
        """Write it into the bundle's folder."""
        write_text(folder / FILE_NAME, json.dumps(self.to_json(), separators=(",", ":")) + "\n")

    def errors(
        self, sessions: Sessions, manifest: Manifest, roles: Iterable[str], samples: int = 1
    ) -> dict[str, tuple[str, float]]:
        """The output of each of these graphs that is off most, and by how much, for so many `samples` at once."""
        size, mask = manifest.preprocessing.network_size, manifest.settings.mask
        runs = _Runs(self.seed, self.scalars, size, mask, sessions, samples)
        return {role: _worst(self.outputs[role], runs.of(role)) for role in roles}


@dataclass(frozen=True)
class Compared(Record):
    """One graph on one engine that computed what the reference says."""

    role: str
    engine: str
    processor: str
    error: float


@dataclass(frozen=True)
class _Runs:
    """Runs of a bundle's graphs on the inputs of a reference."""

    seed: int
    scalars: Mapping[str, Mapping[str, float]]
    size: tuple[int, int]
    mask: MaskSettings
    sessions: Sessions
    samples: int

    def of(self, role: str) -> Arrays:
        """Outputs of the graph: of the steps a row a sample, of the others a row."""
        session = self.sessions[role]
        feeds = self._step(role) if role in self.scalars else self._whole(role)
        wanted = _OUTPUTS.get(role, session.outputs)
        return session.run({name: feeds[name] for name in session.inputs}, list(wanted))

    def _step(self, role: str) -> Arrays:
        scalars = self.scalars[role]
        images = {
            "x_t": signal_root(scalars["alpha_t"]) * self._picture + noise_root(scalars["alpha_t"]) * self._noise(0),
            "observation": self._picture,
            "mask": self._half,
            "noise": self._noise(1),
            "mask_noise": self._noise(KNOWN),
        }
        rows = {name: np.repeat(array, self.samples, axis=0) for name, array in images.items()}
        return rows | {name: np.asarray(value, np.float32) for name, value in scalars.items()}

    def _whole(self, role: str) -> Arrays:
        feeds = {"image": self._picture, "observation": self._picture}
        if role == SCORE:
            other = np.clip(0.8 * self._picture + 0.2 * self._noise(0), -1, 1).astype(np.float32)
            feeds["posterior_samples"] = np.repeat(other[:, None], self.samples, axis=1)
            scalars = mask_scalars(self.mask, (0.0, 1.0))
            feeds |= {name: np.asarray(value, np.float32) for name, value in scalars.items()} | self._features
        return feeds

    @cached_property
    def _features(self) -> Arrays:
        return self.of(FEATURES) if FEATURES in self.sessions else {}

    @cached_property
    def _picture(self) -> NDArray[np.float32]:
        """Squares of one colour under a little noise, [1, 3, H, W] in [-1, 1]."""
        height, width = self.size
        squares = np.random.RandomState(self.seed).uniform(-0.8, 0.8, (1, 3, 8, 8))
        coarse = squares[:, :, np.arange(height) * 8 // height][:, :, :, np.arange(width) * 8 // width]
        return np.clip(coarse + 0.1 * self._noise(INITIAL), -1, 1).astype(np.float32)

    @property
    def _half(self) -> NDArray[np.float32]:
        mask = np.zeros((1, 1, *self.size), np.float32)
        mask[..., : self.size[1] // 2] = 1
        return mask

    def _noise(self, index: int) -> NDArray[np.float32]:
        return NoiseBank(self.seed, (3, *self.size)).draw(0, index, 1)


def check(
    path: Path,
    manifest: Manifest,
    sessions: Sessions,
    *,
    samples: int,
    engine: str,
    arithmetic: str,
) -> None:
    """Compare what these sessions of a bundle compute with its reference, where nobody did so on this machine.

    `engine` is the option's word for them, `arithmetic` what it computes steps in where that is less than the bundle's
    precision. What agrees is remembered. BackendError for the first graph that is off. A bundle from before there were
    references is loaded, with a BackendWarning on an engine that its export did not have.
    """
    reference = Reference.read(path, manifest)
    if reference is None:
        _warn_of_none(path, manifest, engine)
        return
    known = _Known.of(manifest)
    roles = [role for role, session in sessions.items() if role in reference.outputs and not known.has(role, session)]
    if not roles:
        return
    found = reference.errors(sessions, manifest, roles, samples)
    for role, (output, error) in found.items():
        allowed = tolerance(manifest, role, arithmetic)
        if not error <= allowed:  # NaN is off too
            raise BackendError(
                f"{identity(sessions[role])} computes the {role} of {path} otherwise than its export did, so it is not "
                f"used: {output} is off by {error:.2g} of its size, and {allowed:g} is allowed; choose another engine "
                f"than {engine}, or export the bundle again on this machine"
            )
    known.remember([(role, sessions[role]) for role in roles])


def compared(
    manifest: Manifest, reference: Reference, sessions: Sessions, engine: str, arithmetic: str = ""
) -> list[Compared]:
    """An export's own comparison of all graphs on an engine; BackendError with what is off and by how much."""
    found = reference.errors(sessions, manifest, sessions)
    for role, (output, error) in found.items():
        allowed = tolerance(manifest, role, arithmetic)
        if not error <= allowed:
            raise BackendError(f"{engine} is off by {error:.2g} in {output} of the {role} (allowed {allowed:g})")
    cpu = cpu_model()
    return [Compared(role, identity(sessions[role]), cpu, _short(error)) for role, (_, error) in found.items()]


def tolerance(manifest: Manifest, role: str, arithmetic: str) -> float:
    """Return the tolerance of a graph: features and scores are in float32 whatever the steps are in."""
    return TOLERANCES[arithmetic or manifest.precision if role in STEPS else "fp32"]


def identity(session: Session) -> str:
    """The engine and its release, as far as they decide what is computed."""
    if not session.provider.endswith("ExecutionProvider"):
        return session.provider
    releases = [f"{name} {release}" for name, release in engine_versions().items() if name.startswith("onnxruntime")]
    return f"{session.provider} of {', '.join(releases) or 'onnxruntime'}"


@dataclass(frozen=True)
class _Known:
    """The comparisons made: by the export, and on this machine."""

    bundle: str
    processor: str
    exported: frozenset[tuple[str, str]]

    @classmethod
    def of(cls, manifest: Manifest) -> Self:
        cpu = cpu_model()
        entries = manifest.parity.get(COMPARED, []) if manifest.versions.get("mdps") == __version__ else []
        listed = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
        exported = {(str(e.get("role")), str(e.get("engine"))) for e in listed if e.get("processor") == cpu}
        return cls(manifest.files_sha256, cpu, frozenset(exported))

    def has(self, role: str, session: Session) -> bool:
        engine = identity(session)
        return (role, engine) in self.exported or f"{role} on {engine}" in self._remembered()

    def remember(self, passed: Iterable[tuple[str, Session]]) -> None:
        """Write it down; where nothing can be written, the next load compares again."""
        agreed = {*self._remembered(), *(f"{role} on {identity(session)}" for role, session in passed)}
        entry = {"bundle": self.bundle, "processor": self.processor, "mdps": __version__, "agreed": sorted(agreed)}
        with suppress(OSError):
            write_newest(CACHE_NAME, readable_entries(CACHE_NAME), self._key, entry)

    @property
    def _key(self) -> str:
        return hashlib.sha256(json.dumps([self.bundle, self.processor, __version__]).encode()).hexdigest()

    def _remembered(self) -> list[str]:
        entry = readable_entries(CACHE_NAME).get(self._key)
        agreed = entry.get("agreed") if isinstance(entry, dict) else None
        return [name for name in agreed if isinstance(name, str)] if isinstance(agreed, list) else []


def _warn_of_none(path: Path, manifest: Manifest, engine: str) -> None:
    library = engine.partition("-")[0]
    if library not in manifest.versions:
        warnings.warn(
            f"{path} was exported before bundles held a reference, so nothing shows that {engine} computes what its "
            "export did: export it again",
            BackendWarning,
            stacklevel=3,
        )


def _worst(wanted: Mapping[str, Output], found: Arrays) -> tuple[str, float]:
    errors = {name: max((wanted[name].error(row) for row in rows), key=_nan_last) for name, rows in found.items()}
    return max(errors.items(), key=lambda item: _nan_last(item[1]))


def _nan_last(error: float) -> float:
    return np.inf if np.isnan(error) else error


def _measured(array: NDArray[Any]) -> tuple[float, float, NDArray[np.float64]]:
    flat = np.asarray(array, np.float64).ravel()
    places = np.arange(flat.size)
    if flat.size > SAMPLED:
        places = np.random.RandomState(0).randint(flat.size, size=SAMPLED)
    return float(np.abs(flat).max()), float(np.linalg.norm(flat)), flat[places]


def _short(value: float) -> float:
    return float(f"{value:.9g}")
