"""Engine plans of a bundle's graphs: which ones, for which batches, under which names."""

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import onnx

from mdps.export.engine import OPTIONS, Builder, Profile
from mdps.runtime.atomic import write_bytes
from mdps.runtime.errors import require
from mdps.runtime.graphs import DDAD, SCORE, STEPS, GraphEntry
from mdps.runtime.manifest import FileEntry, Manifest, PlanEntry

Range = tuple[int, int, int]


def add_plans(
    folder: Path, manifest: Manifest, builder: Builder, max_batch: int = 8, say: Callable[[str], None] = lambda _: None
) -> Manifest:
    """Build a plan of each ONNX graph of the bundle in `folder` but DDAD's; return the manifest with them, unwritten.

    `max_batch` is how many posterior samples a step takes at most, as in the runtime. Plans of the same key stay as
    they are, others of the same engine make way. Raises BackendError where one does not build.
    """
    require(max_batch >= 1, f"max_batch {max_batch} should be at least 1")
    old = {entry.key: entry for entry in manifest.plans}
    new = []
    for role, graph in manifest.graphs.items():
        if graph.session == "ort" and role != DDAD:
            wanted = _wanted(folder, manifest, builder, role, graph, max_batch)
            new.append(old.get(wanted.key) or _built(folder, builder, wanted, say))
    kept = [entry for entry in old.values() if entry.engine != builder.engine.name]
    return _listing(folder, manifest, [*kept, *new], old.values())


def _wanted(
    folder: Path, manifest: Manifest, builder: Builder, role: str, graph: GraphEntry, max_batch: int
) -> PlanEntry:
    """Return the entry of a plan that is to be built: all but the types of its layers."""
    samples = manifest.settings.sampler.samples
    images = max(1, max_batch // samples)
    step = role in STEPS
    entry = PlanEntry(
        role=role,
        file="",
        engine=builder.engine.name,
        version=builder.version,
        compute_capabilities=builder.capabilities,
        precision=manifest.precision if step else "fp32",
        graph=graph.variants.get(builder.engine.form, graph.file),
        key="",
        batch=(1, min(samples, max_batch), max_batch) if step else (1, 1, images),
        samples=(1, samples, samples) if role == SCORE else None,
        types={},
        inspected="network",
    )
    key = _key(entry, _graph_hash(folder, manifest, entry.graph))
    return replace(entry, key=key, file=f"{role}.{builder.engine.name}.{key[:16]}.plan")


def _key(entry: PlanEntry, graph: str) -> str:
    """Return a hash of all a plan depends on."""
    facts = entry.to_json() | {"graph": graph, "options": OPTIONS}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _graph_hash(folder: Path, manifest: Manifest, file: str) -> str:
    """Hash the graph and the weights it refers to."""
    model = onnx.load(folder / file, load_external_data=False)
    places = {entry.value for t in model.graph.initializer for entry in t.external_data if entry.key == "location"}
    return "".join(manifest.files[name].sha256 for name in (file, *sorted(places)))


def _built(folder: Path, builder: Builder, entry: PlanEntry, say: Callable[[str], None]) -> PlanEntry:
    say(f"building {entry.file} for compute capability {', '.join(entry.compute_capabilities)}")
    path = folder / entry.graph
    built = builder.build(path, profile_of(path, entry.batch, entry.samples), entry.precision)
    write_bytes(folder / entry.file, built.plan)
    return replace(entry, types=built.types, inspected=built.inspected)  # type: ignore[arg-type]


def profile_of(path: Path, batch: Range, samples: Range | None) -> Profile:
    """Return the smallest, best and largest shape of every input of a graph that has a dynamic axis."""
    ranges = {"batch": batch, "samples": samples or (1, 1, 1)}
    profile = {}
    for value in onnx.load(path, load_external_data=False).graph.input:
        dims = value.type.tensor_type.shape.dim
        if any(dim.dim_param for dim in dims):
            shapes = [tuple(ranges[d.dim_param][i] if d.dim_param else d.dim_value for d in dims) for i in range(3)]
            profile[value.name] = (shapes[0], shapes[1], shapes[2])
    return profile


def _listing(folder: Path, manifest: Manifest, entries: list[PlanEntry], old: Iterable[PlanEntry]) -> Manifest:
    plans = {entry.file: FileEntry.of(folder / entry.file) for entry in entries}
    gone = {entry.file for entry in old} - plans.keys()
    for file in gone:
        (folder / file).unlink(missing_ok=True)
    files = {name: entry for name, entry in manifest.files.items() if name not in gone} | plans
    return replace(manifest, files=files, plans=tuple(entries))
