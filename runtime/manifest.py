"""A bundle's description of itself: `manifest.json`, with a hash of every file beside it."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, ClassVar, Literal, Self

from mdps.runtime.alignment import Alignment
from mdps.runtime.atomic import is_temporary, write_text
from mdps.runtime.calibration import Calibration
from mdps.runtime.engines import Engine
from mdps.runtime.errors import BundleError, require
from mdps.runtime.graphs import GraphEntry
from mdps.runtime.preprocessing import Preprocessing
from mdps.runtime.records import Record
from mdps.runtime.schedule import NoiseSchedule
from mdps.runtime.scope import Scope
from mdps.runtime.settings import Settings
from mdps.runtime.tiles import Tiling
from mdps.runtime.tuning import Tuning

FILE_NAME = "manifest.json"
SCHEMA_VERSION = 7
MAX_BYTES = 16 * 2**20
_MAX_DEPTH = 50

Migration = Callable[[dict[str, Any]], dict[str, Any]]


def _add_fields(obj: dict[str, Any]) -> dict[str, Any]:
    """Schema 4 had the precision among the notes on the network, and the plans in the parity report."""
    added: dict[str, Any] = {"precision": "fp32", "plans": []}
    for key, inside in (("precision", "network"), ("plans", "parity")):
        if isinstance(notes := obj.get(inside), dict):  # what is no object stays for `from_json` to refuse
            added[key] = notes.get(key, added[key])
            obj = {**obj, inside: {name: value for name, value in notes.items() if name != key}}
    if isinstance(added["plans"], list):
        added["plans"] = [_of_engine(plan) for plan in added["plans"]]
    return added | obj


def _of_engine(plan: Any) -> Any:
    if not isinstance(plan, dict):
        return plan
    return {"engine" if key == "backend" else key: value for key, value in plan.items()}


def _add_tuning(obj: dict[str, Any]) -> dict[str, Any]:
    """Schema 5 knew no tuning, no fitness, no pairs of noises and no pass that is guided by another."""
    for path, defaults in _PLACES.items():
        obj = _filled(obj, path, defaults)
    return obj | {"tunings": {}}


_PLACES: dict[tuple[str, ...], dict[str, Any]] = {
    ("settings", "sampler"): {"antithetic": False},
    ("settings", "sampler", "first_pass"): {"target": "observation"},
    ("settings", "sampler", "masked_pass"): {"target": "observation"},
    ("calibrations", "*"): {"fitness": None, "tuned": ""},
}


def _filled(obj: Any, path: tuple[str, ...], defaults: dict[str, Any]) -> Any:
    """Return the value with these keys added at the place; what is no object stays for `from_json` to refuse."""
    if not isinstance(obj, dict):
        return obj
    if not path:
        return obj | {key: value for key, value in defaults.items() if key not in obj}
    keys = list(obj) if path[0] == "*" else [key for key in obj if key == path[0]]
    return obj | {key: _filled(obj[key], path[1:], defaults) for key in keys}


def _add_photographs(obj: dict[str, Any]) -> dict[str, Any]:
    """Schema 6 knew photographs that are shrunk to the network's size, no tiles, and no scale in mm."""
    return {"tiles": None, "scopes": {}} | obj


MIGRATIONS: dict[int, Migration] = {4: _add_fields, 5: _add_tuning, 6: _add_photographs}
"""From each older schema version to the next one; those before 4 were never released."""


@dataclass(frozen=True)
class FileEntry(Record):
    """Hash and size of one file of the bundle."""

    sha256: str
    bytes: int

    def __post_init__(self) -> None:
        is_hash = len(self.sha256) == 64 and set(self.sha256) <= set("0123456789abcdef")
        require(is_hash, f"sha256 {self.sha256!r} should be 64 hexadecimal digits in lower case")
        require(self.bytes >= 0, f"the size {self.bytes} of a file should not be negative")

    @classmethod
    def of(cls, path: Path) -> Self:
        """Entry of a file on the disk."""
        with path.open("rb") as file:
            return cls(hashlib.file_digest(file, "sha256").hexdigest(), path.stat().st_size)


@dataclass(frozen=True)
class PlanEntry(Record):
    """One plan file.

    `engine` is its name, `version` its release: a plan runs on no other. `compute_capabilities` are the cards',
    such as "8.6". `graph` is the ONNX file it was built from; `key` a hash of that graph with its weights, the library,
    the capabilities and the build's options. `batch` is the smallest, best and largest first axis, `samples` the same
    of the second axis where the graph has one. `types` counts layers by the type of their result, as `inspected` told:
    the network that was parsed, or the engine where a card was there to load it.
    """

    role: str
    file: str
    engine: str
    version: str
    compute_capabilities: tuple[str, ...]
    precision: Literal["fp32", "fp16", "bf16"]
    graph: str
    key: str
    batch: tuple[int, int, int]
    samples: tuple[int, int, int] | None
    types: dict[str, int]
    inspected: Literal["network", "engine"]


@dataclass(frozen=True)
class CheckpointEntry(Record):
    """File name and hash of the checkpoint the bundle was made from."""

    name: str
    sha256: str


@dataclass(frozen=True)
class Manifest(Record):
    """All a runtime must know of a bundle.

    `graphs` maps a role (guided_step, plain_step, ddad_step, features, score) to its file; `calibrations` a product's
    name to its calibration, `tunings` to its tuning, `scopes` to what is known of its photographs, `alignments` to how
    its parts are aligned; `files` each plain file name to its hash. `precision` is that of the step graphs, `plans` are
    built from the graphs for engines of plans. `network`, `versions` and `parity` are records for people and for the
    exporter, free of form. With `tiles`
    photographs are judged in tiles of the network's size, without them they are resized to it.
    """

    schema_version: int
    name: str
    settings: Settings
    precision: Literal["fp32", "fp16", "bf16"]
    network: dict[str, Any]
    schedule: NoiseSchedule
    prediction: Literal["eps", "v", "x0"]
    preprocessing: Preprocessing
    calibrations: dict[str, Calibration]
    files: dict[str, FileEntry]
    graphs: dict[str, GraphEntry]
    plans: tuple[PlanEntry, ...]
    versions: dict[str, str]
    parity: dict[str, Any]
    checkpoint: CheckpointEntry
    guidance_backend: Literal["onnx", "traced"]
    tunings: dict[str, Tuning] = field(default_factory=dict)
    tiles: Tiling | None = None
    scopes: dict[str, Scope] = field(default_factory=dict)
    alignments: dict[str, Alignment] = field(default_factory=dict)

    later: ClassVar[Mapping[str, Any]] = {"alignments": {}}

    def __post_init__(self) -> None:
        require(self.schema_version == SCHEMA_VERSION, f"schema_version should be {SCHEMA_VERSION}")
        for name in self.files:
            require(_is_plain_name(name), f"the file name {name!r} should be a plain name, without folders")
            require(name != FILE_NAME, f"{FILE_NAME} cannot hold its own hash")
        for role, graph in self.graphs.items():
            for file in (graph.file, *graph.variants.values()):
                require(file in self.files, f"the graph {role!r} is in {file!r}, which is not among the files")
        for product, tuning in self.tunings.items():
            for graph in tuning.graphs.values():
                require(graph.file in self.files, f"the tuning of {product} names {graph.file!r}, which is not there")
        require(
            self.tiles is None or self.preprocessing.crop == "none", "tiles show all of a picture: crop should be none"
        )
        for plan in self.plans:
            require(plan.file in self.files, f"the plan {plan.file!r} is not among the files: export again")

    @classmethod
    def read(cls, folder: Path | str, *, verify: bool = True) -> Self:
        """The manifest of a bundle; with `verify` every file's presence, size and hash is checked.

        Raises BundleError naming the file and what to do.
        """
        folder = Path(folder)
        where = folder / FILE_NAME
        manifest = cls.from_json(migrate(_read_json(folder, where), where), str(where))
        if verify:
            for name, entry in manifest.files.items():
                try:
                    _verify(folder / name, entry)
                except OSError as error:  # a name that is too long, a drive that has gone, no permission
                    raise BundleError(f"{folder / name} cannot be read: {error.strerror}") from error
        return manifest

    @property
    def files_sha256(self) -> str:
        """One hash of all files but the manifest: calibrating a bundle does not change it."""
        hashes = sorted((name, entry.sha256) for name, entry in self.files.items())
        return hashlib.sha256(json.dumps(hashes).encode()).hexdigest()

    def graph(self, role: str, folder: Path | str) -> GraphEntry:
        """The entry of the graph `role`; BundleError, naming the `folder` the manifest is from, where there is none."""
        if role not in self.graphs:
            raise BundleError(f"{Path(folder) / FILE_NAME} names no graph {role!r}: export the bundle again")
        return self.graphs[role]

    def plans_of(self, engine: str) -> dict[str, PlanEntry]:
        """The plans that this engine runs, by the roles of their graphs."""
        return {plan.role: plan for plan in self.plans if plan.engine == engine}

    def serves(self, engine: Engine) -> bool:
        """Whether the bundle has what this engine reads; of step graphs of its own one is enough."""
        if engine.reads == "plans":
            return bool(self.plans_of(engine.name))
        if engine.reads == "program":
            return self.guidance_backend == "traced"
        return engine.reads == "onnx" or any(engine.form in graph.variants for graph in self.graphs.values())

    def write(self, folder: Path | str) -> None:
        """Write `manifest.json` into the folder, whole or not at all; keys in the order of the fields."""
        text = json.dumps(self.to_json(), indent=2, ensure_ascii=False, allow_nan=False)
        write_text(Path(folder) / FILE_NAME, text + "\n")

    def tuned(self, tuning: Tuning | None) -> str:
        """Return the name of a tuning of this bundle, another for any that judges otherwise; "" for none."""
        if tuning is None:
            return ""
        files = [self.files[graph.file].sha256 for graph in tuning.graphs.values()]
        told = replace(tuning, evidence={}).to_json()
        return hashlib.sha256(json.dumps([told, files], sort_keys=True).encode()).hexdigest()[:16]

    def scope(self, product: str) -> Scope:
        """Return what is known of a product's photographs, which may be nothing."""
        return self.scopes.get(product, Scope())

    def with_scope(self, product: str, scope: Scope) -> "Manifest":
        """A copy in which this is known of a product's photographs."""
        others = {name: one for name, one in self.scopes.items() if name != product}
        return replace(self, scopes=others | ({} if scope == Scope() else {product: scope}))

    def aligned(self, product: str) -> str:
        """Return the name of how this product's parts are aligned, "" where they are not."""
        return self.alignments[product].name if product in self.alignments else ""

    def with_alignment(self, product: str, alignment: Alignment | None) -> "Manifest":
        """A copy in which this product's parts are aligned so, or with None not."""
        others = {name: one for name, one in self.alignments.items() if name != product}
        return replace(self, alignments=others | ({product: alignment} if alignment else {}))

    def with_calibration(self, product: str, calibration: Calibration) -> "Manifest":
        """A copy that also holds this product's calibration."""
        return replace(self, calibrations={**self.calibrations, product: calibration})


def hash_files(folder: Path | str) -> dict[str, FileEntry]:
    """Entries of every file in a bundle's folder but the manifest, by name."""
    files = sorted(path for path in Path(folder).iterdir() if path.is_file())
    return {path.name: FileEntry.of(path) for path in files if path.name != FILE_NAME and not is_temporary(path)}


def migrate(
    obj: dict[str, Any],
    where: Path | str,
    migrations: Mapping[int, Migration] = MIGRATIONS,
    current: int = SCHEMA_VERSION,
) -> dict[str, Any]:
    """`obj` brought to the `current` schema version, one version at a time; BundleError where there is no way."""
    version = obj.get("schema_version")
    if not isinstance(version, int) or isinstance(version, bool):
        raise BundleError(f"{where} has no schema_version: it is no manifest of mdps")
    if version > current:
        raise BundleError(f"{where} has schema version {version}, this mdps knows up to {current}: upgrade mdps")
    while version < current:
        if version not in migrations:
            raise BundleError(f"{where} has schema version {version}, too old to migrate: {_made_anew(obj, where)}")
        version += 1
        obj = {**migrations[version - 1](obj), "schema_version": version}
    return obj


def _made_anew(obj: Mapping[str, Any], where: Path | str) -> str:
    checkpoint = obj.get("checkpoint")
    name = checkpoint.get("name") if isinstance(checkpoint, dict) else None
    return f"run `mdps export --ckpt {name or 'CHECKPOINT'} --out {Path(where).parent} --force`, with its options"


def _is_plain_name(name: str) -> bool:
    plain = PurePosixPath(name).name == name and PureWindowsPath(name).name == name
    return plain and name not in ("", ".", "..") and "\0" not in name and ":" not in name


def _read_json(folder: Path, where: Path) -> dict[str, Any]:
    if is_temporary(folder):
        raise BundleError(f"{folder} is a leftover of an export that was cut off: remove it and export again")
    try:
        if not where.is_file():
            hint = f"it has no {FILE_NAME}" if folder.is_dir() else "there is no such folder"
            raise BundleError(f"{folder} is no bundle, {hint}: give the folder that `mdps export` wrote")
        with where.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise BundleError(f"{where} is larger than {MAX_BYTES} bytes and is refused")
        obj = json.loads(content.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_refuse_doubles)
        _check_writable(obj)
    except (OSError, ValueError, RecursionError) as error:
        raise BundleError(f"{where} cannot be read ({error}): export the bundle again or restore it") from error
    if not isinstance(obj, dict):
        raise BundleError(f"{where} should be an object with keys: export the bundle again or restore it")
    return obj


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number JSON has")


def _refuse_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    obj = dict(pairs)
    if len(obj) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"it has the key {next(key for key in keys if keys.count(key) > 1)!r} twice")
    return obj


def _check_writable(value: Any, depth: int = 0) -> None:
    """ValueError for what could be read and not be written again: half a character, values nested too deeply."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"its values are nested deeper than {_MAX_DEPTH} levels")
    if isinstance(value, str):
        value.encode("utf-8")
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_writable(key)
            _check_writable(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _check_writable(item, depth + 1)


def _verify(path: Path, entry: FileEntry) -> None:
    again = "copy the whole bundle again, or export it again"
    if not path.is_file():
        raise BundleError(f"{path} is missing from the bundle: {again}")
    if (size := path.stat().st_size) != entry.bytes:
        raise BundleError(f"{path} has {size} bytes where the manifest says {entry.bytes}: {again}")
    if FileEntry.of(path).sha256 != entry.sha256:
        raise BundleError(f"{path} is not the file the manifest describes, its SHA-256 differs: {again}")
