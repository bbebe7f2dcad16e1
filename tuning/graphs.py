"""A tuning's graphs: fitted modules recorded as ONNX beside those of a bundle, which has the old tuning or the new one.

Files go first, under names that no file of the manifest has; then the manifest; then the files that it does not name.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mdps.export.graph import WeightStore, places
from mdps.export.graph import write as write_graph
from mdps.export.parity import ParityError
from mdps.export.tracer import recorded
from mdps.models.backbones import Backbone
from mdps.runtime.alignment import Alignment
from mdps.runtime.atomic import sync, writing
from mdps.runtime.calibration import Calibration
from mdps.runtime.engines.interface import open_session
from mdps.runtime.graphs import FEATURES, GraphEntry
from mdps.runtime.manifest import FileEntry, Manifest
from mdps.runtime.preprocessing import Preprocessing
from mdps.runtime.settings import SamplerSettings
from mdps.runtime.tuning import FUSION, PHOTOGRAPH, Cascade, Term, Tuning
from mdps.tuning.statistics import Distance, PhotographViews, Pixels, Residual, fusion

TOLERANCE = 1e-3
"""Largest difference between a graph and its module, over the largest value or one."""
_ROOT = "tuning-"
_AXES = {"posterior_samples": ("batch", "samples")}
Say = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class Fitted:
    """A term and what `statistics.fit` or `fit_pixels` made for it; None for the kind "map", which needs no graph."""

    term: Term
    module: Distance | Pixels | None = None

    def distance(self, of: str) -> Distance | None:
        """Return the module where the term is a statistic `of` the photograph or of the residual."""
        return self.module if isinstance(self.module, Distance) and self.term.of == of else None


@dataclass(frozen=True, eq=False)
class Fused:
    """A fused detector to write: its terms in their order, and the rest of its `Tuning`.

    `backbone` is needed for terms of features, loaded with their stages. `top`: how many pixels the score counts. The
    parts of the product are aligned as `alignment` says, or not.
    """

    terms: Sequence[Fitted]
    top: int
    backbone: Backbone | None = None
    photograph: Preprocessing | None = None
    sampler: SamplerSettings | None = None
    cascade: Cascade | None = None
    alignment: Alignment | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)

    @property
    def stages(self) -> dict[int, tuple[int, ...]]:
        """The stages that some term reads of the photograph, by the size at which it is seen."""
        views = [one.statistic.view for term in self.terms if (one := term.distance("photograph"))]
        sizes = sorted({view.size for view in views})
        return {
            size: tuple(sorted({stage for view in views if view.size == size for stage in view.stages}))
            for size in sizes
        }

    def tuning(self, graphs: dict[str, GraphEntry]) -> Tuning:
        """Return the record of it, with these graphs."""
        terms = tuple(fitted.term for fitted in self.terms)
        return Tuning(self.sampler, self.photograph, terms, graphs, self.cascade, dict(self.evidence))


def write(
    bundle: Path,
    product: str,
    fused: Fused,
    settle: Callable[[Manifest], tuple[Tuning, Calibration]] | None = None,
    say: Say = lambda _: None,
) -> Tuning:
    """Write the tuning of a product into a bundle, in the place of the one that is there, and return it.

    `settle` is given the manifest as it will be, whose files are all in the folder, and returns the tuning of these
    graphs that is written, and the calibration that goes with it. Whatever interrupts, the folder is the old bundle or
    the new one. Raises ParityError for a graph that does not compute what its module does, MdpsError where the disk is
    full.
    """
    manifest, stem = Manifest.read(bundle), _plain(product)
    _sweep(bundle, stem, manifest)
    try:
        with writing(bundle):
            tuning, files = _record(bundle, _prefix(stem, manifest), manifest, fused, say)

        def tuned(manifest: Manifest) -> Manifest:
            return _tuned(manifest, product, tuning, files).with_alignment(product, fused.alignment)

        tuning, calibration = settle(tuned(manifest)) if settle else (tuning, None)
        with writing(bundle):
            manifest = tuned(Manifest.read(bundle, verify=False))
            (manifest.with_calibration(product, calibration) if calibration else manifest).write(bundle)
    finally:
        _sweep(bundle, stem, Manifest.read(bundle, verify=False))
    return tuning


def _record(
    bundle: Path, prefix: str, manifest: Manifest, fused: Fused, say: Say
) -> tuple[Tuning, dict[str, FileEntry]]:
    features = manifest.graphs.get(FEATURES)
    known = places(bundle / features.file) if features else {}
    recorder = _Recorder(bundle, prefix, WeightStore(bundle / f"{prefix}.weights", known), say)
    recorder.all(fused, manifest.preprocessing.network_size)
    written = [path for path in bundle.iterdir() if path.name.startswith(f"{prefix}.")]
    for path in written:
        sync(path)
    return fused.tuning(recorder.graphs), {path.name: FileEntry.of(path) for path in written}


@dataclass
class _Recorder:
    """Writes graphs into a folder, each compared with the module that it is of."""

    folder: Path
    prefix: str
    weights: WeightStore
    say: Say
    graphs: dict[str, GraphEntry] = field(default_factory=dict)

    def all(self, fused: Fused, size: tuple[int, int]) -> None:
        """Write the features of the photograph, the terms and their fusion, for a network of `size` (H, W)."""
        stream = torch.Generator().manual_seed(0)
        two, three = (torch.rand(2, *extra, 3, *size, generator=stream) * 2 - 1 for extra in ((), (3,)))
        shown = {"observation": two, "posterior_samples": three}
        seen: dict[tuple[int, int], tuple[str, Tensor]] = {}
        if fused.photograph is not None and fused.backbone is not None:
            image = torch.rand(2, 3, *fused.photograph.network_size, generator=stream) * 2 - 1
            read = [(size, stage) for size, stages in fused.stages.items() for stage in stages]
            names = [f"photograph_features_{index}" for index in range(1, len(read) + 1)]
            made = self.write(PHOTOGRAPH, PhotographViews(fused.backbone, fused.stages), {"photograph": image}, names)
            seen = dict(zip(read, zip(names, made, strict=True), strict=True))
        maps = {one.term.name: self._term(one, fused.backbone, shown, seen) for one in fused.terms}
        terms = [fitted.term for fitted in fused.terms]
        self.write(FUSION, fusion(terms, size, fused.top), maps, ["anomaly_map", "anomaly_score", "mask"])

    def _term(
        self, fitted: Fitted, backbone: Backbone | None, shown: dict[str, Tensor],
        seen: Mapping[tuple[int, int], tuple[str, Tensor]],
    ) -> Tensor:  # fmt: skip
        """Return its map of the examples."""
        if fitted.module is None:
            return shown["observation"][:, :1]
        inputs, module = shown, _Map(fitted.module)
        if distance := fitted.distance("photograph"):
            view = distance.statistic.view
            inputs = dict(seen[view.size, stage] for stage in view.stages)
        elif distance := fitted.distance("residual"):
            assert backbone is not None
            module = _Map(Residual(backbone, distance))
        return self.write(fitted.term.name, module, inputs, ["map"])[0]

    def write(
        self, role: str, module: nn.Module, inputs: dict[str, Tensor], outputs: Sequence[str]
    ) -> tuple[Tensor, ...]:
        """Write a graph and return what the module makes of the inputs."""
        file = f"{self.prefix}.{role}.onnx"
        axes = {name: _AXES.get(name, ("batch",)) for name in inputs}
        write_graph(recorded(module.eval(), inputs, outputs, axes, self.say), self.folder / file, self.weights)
        with torch.no_grad():
            wanted: tuple[Tensor, ...] = module(*inputs.values())
        self._check(self.folder / file, inputs, dict(zip(outputs, wanted, strict=True)))
        self.graphs[role] = GraphEntry(file)
        return wanted

    def _check(self, file: Path, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        session = open_session(file)
        try:
            found = session.run({name: tensor.numpy() for name, tensor in inputs.items()}, list(outputs))
        finally:
            session.close()
        for name, tensor in outputs.items():
            wanted = tensor.numpy()
            error = np.abs(found[name] - wanted).max() / max(1.0, float(np.abs(wanted).max()))
            if name != "mask" and not error <= TOLERANCE:  # so that NaN fails; a mask is its map's
                raise ParityError(f"the graph {file.name} differs from its module: {name} is off by {error:.2g}")


class _Map(nn.Module):
    """A module of one map as one of a tuple of outputs."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Tensor) -> tuple[Tensor]:
        return (self.module(*inputs),)


def _tuned(manifest: Manifest, product: str, tuning: Tuning, files: Mapping[str, FileEntry]) -> Manifest:
    """Return a copy with this tuning of the product and its files, in the place of the one before."""
    before = manifest.tunings.get(product)
    gone = {_prefix_of(graph.file) for graph in before.graphs.values()} if before else set()
    kept = {name: entry for name, entry in manifest.files.items() if _prefix_of(name) not in gone}
    return replace(manifest, tunings=manifest.tunings | {product: tuning}, files={**kept, **files})


def _plain(product: str) -> str:
    """Return the product's name as a part of a file's, in lower case: some disks know no other."""
    return re.sub(r"[^a-z0-9]+", "-", product.lower()).strip("-")[:40] or "product"


def _prefix(stem: str, manifest: Manifest) -> str:
    taken = {_prefix_of(name) for name in manifest.files}
    return next(name for number in count(1) if (name := f"{_ROOT}{stem}-{number}") not in taken)


def _prefix_of(file: str) -> str:
    """Return what all files of one tuning begin with; "" for another file."""
    return file.partition(".")[0] if file.startswith(_ROOT) else ""


def _sweep(bundle: Path, stem: str, manifest: Manifest) -> None:
    """Remove the files of tunings that were replaced, or cut off while they were written."""
    ours = re.compile(rf"{_ROOT}{re.escape(stem)}-\d+\.")
    for path in list(bundle.iterdir()):
        if ours.match(path.name) and path.name not in manifest.files:
            with suppress(OSError):  # one that is open cannot be removed everywhere; it goes the next time
                path.unlink()
