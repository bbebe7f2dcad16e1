"""From a checkpoint to a bundle: graphs, weights, manifest, parity gate; a folder that appears whole or not at all."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, Protocol, cast

import onnx
import torch
from torch import Tensor, nn

from mdps.export.engine import Builder
from mdps.export.graph import WeightStore, autograd_operations, count_nodes, live_bytes, write
from mdps.export.norms import ByChannel, ByDepthwise, Grouped, NormForm
from mdps.export.options import ExportOptions
from mdps.export.parity import ParityError, check_parity, engines_disagree
from mdps.export.plans import add_plans
from mdps.export.precision import LayerErrors, Precision, emulated_bundle, in_precision, layer_errors, prepare
from mdps.export.score import Features, Score
from mdps.export.step import Denoiser as StepDenoiser
from mdps.export.step import GuidedStep, PlainStep, StepRules
from mdps.export.tracer import Say, record, recorded
from mdps.models.backbones import Backbone, load_backbone
from mdps.models.checkpoints import Denoiser, crops_of, load_denoiser, run_warnings
from mdps.models.oracle_setup import oracle_of
from mdps.runtime.atomic import new_folder
from mdps.runtime.bundle import Bundle
from mdps.runtime.choice import installed
from mdps.runtime.engines import DEFAULT, ENGINES, Engine, named
from mdps.runtime.engines.interface import open_session
from mdps.runtime.errors import BackendError, require
from mdps.runtime.graphs import DDAD, GUIDED, PLAIN, STEPS, GraphEntry, step_role
from mdps.runtime.loading import open_graphs
from mdps.runtime.machine import versions
from mdps.runtime.manifest import SCHEMA_VERSION, CheckpointEntry, FileEntry, Manifest, hash_files
from mdps.runtime.memory import check_export
from mdps.runtime.noise import NoiseBank
from mdps.runtime.pipeline import Pipeline
from mdps.runtime.preprocessing import Preprocessing
from mdps.runtime.reference import COMPARED, Compared, Reference, compared
from mdps.runtime.reference import FILE_NAME as REFERENCE
from mdps.runtime.sampler import step_scalars
from mdps.runtime.schedule import plan_steps
from mdps.runtime.session import Session
from mdps.runtime.settings import Settings
from mdps.runtime.tiled import check_tiled
from mdps.runtime.tiles import Tiling

FORMS = {row.form: row for row in ENGINES if row.norms or row.name == DEFAULT}
"""The engine that each form of the step graphs is written for."""
_NORMS: dict[str, NormForm] = {"": Grouped(), "by-channel": ByChannel(), "by-depthwise": ByDepthwise()}
BATCHED = dict.fromkeys(("x_t", "observation", "mask", "noise", "mask_noise"), ("batch",))


def export_bundle(
    ckpt: Path | str,
    out: Path | str | None = None,
    options: ExportOptions | None = None,
    *,
    force: bool = False,
    say: Say = lambda _: None,
) -> Path:
    """Write the bundle of a checkpoint to folder `out` (default: beside it, with the suffix .bundle) and return it.

    `force` replaces an existing folder; `say` is told what is going on. Raises CheckpointError or UsageError for what
    the user can mend, ParityError where the graphs do not compute what the torch oracle does: then nothing is written.
    """
    ckpt, options = Path(ckpt), options or ExportOptions()
    out = Path(out) if out is not None else ckpt.with_name(ckpt.stem + ".bundle")
    require(force or not out.exists(), f"{out} already exists: choose another --out, or replace it with --force")
    say(f"reading {ckpt}")
    denoiser = load_denoiser(ckpt, options.load)
    if assumed := denoiser.report.assumptions():
        say(f"the checkpoint does not say, and is assumed to have: {assumed}")
    for sentence in run_warnings(denoiser.extra):
        say(f"Warning: {sentence}")
    preprocessing = options.preprocessing(_trained_preprocessing(denoiser))
    trained_noise = _trained_noise(denoiser)
    tiling = options.tiling(_trained_tiles(denoiser))
    settings = options.settings(preprocessing.network_size, trained_noise or "gaussian", denoiser.schedule, tiling)
    if settings.sampler.noise != (trained_noise or "gaussian"):
        say(f"Warning: {_unknown_noise(settings.sampler.noise, trained_noise)}")
    _check(denoiser, settings, preprocessing)
    _check_tiles(tiling, settings, preprocessing)
    check_export(denoiser.config.to_json(), preprocessing.network_size, settings)
    own = named(options.engine) if options.engine else None
    builder = _builder(own, options)
    engines = _engines(options)
    backbone = _backbone(settings, options)
    with new_folder(out, replace=force) as folder:
        writer = _Writer(folder, denoiser, settings, preprocessing, say, options.precision, tiling)
        forms = {form: row for form, row in FORMS.items() if row.reads == "onnx" or row == own}
        writer.steps(options.guidance_backend, forms)
        writer.scoring(backbone)
        if options.count_nodes:
            writer.count_autograd()
        manifest = writer.manifest(out.name, options.guidance_backend, backbone)
        say("comparing with the torch oracle")
        manifest = _proof(folder, manifest, denoiser, backbone, engines).added(manifest, folder)
        if builder:
            manifest = add_plans(folder, manifest, builder, options.max_batch, say)
        manifest.write(folder)
    return out


def _builder(own: Engine | None, options: ExportOptions) -> Builder | None:
    """Return what builds the engine's plans; for other files of its own, check that their library is there."""
    if own and own.reads == "plans":
        return Builder.of(own, options.compute_capability, options.precision)
    if own:
        _writer_of(own).check_library()
    return None


def _trained_preprocessing(denoiser: Denoiser) -> Preprocessing:
    side = denoiser.config.image_size
    if denoiser.preprocessing is None:
        return Preprocessing(image_size=(side, side))
    trained = Preprocessing.from_json(denoiser.preprocessing, "the checkpoint's preprocessing")
    height, width = trained.network_size
    said = f"{denoiser.report.path} was trained on images of {height} x {width}, not {side} x {side}"
    require(side in (height, width), f"{said}: leave out --image-size")
    return trained


def _trained_noise(denoiser: Denoiser) -> Literal["gaussian", "simplex"] | None:
    """Return the noise that the checkpoint's notes say it was trained on; None where they say nothing."""
    training = denoiser.extra.get("training")
    for notes in (denoiser.extra, training if isinstance(training, dict) else {}):
        if notes.get("noise") in ("gaussian", "simplex"):
            return notes["noise"]  # type: ignore[no-any-return]
    return None


def _trained_tiles(denoiser: Denoiser) -> Tiling | None:
    """Return the tiles that look like the crops which the checkpoint was trained on; None for whole photographs."""
    crops = crops_of(denoiser.extra)
    return Tiling(float(crops["scale"])) if crops else None


def _unknown_noise(chosen: str, trained: str | None) -> str:
    on = f"was trained on {trained} noise"
    known = on if trained else "does not say that it was trained on any but gaussian noise"
    return f"the checkpoint {known}, so it cannot tell {chosen} noise from defects: leave out --noise, or train with it"


def _check(denoiser: Denoiser, settings: Settings, preprocessing: Preprocessing) -> None:
    """Raise before a trace starts what would fail deep inside it."""
    unit = 2 ** (len(denoiser.config.channel_mult) - 1)
    size = preprocessing.network_size
    require(
        not any(side % unit for side in size),
        f"the network halves its input again and again: {size[0]} x {size[1]} must be multiples of {unit}",
    )
    for one in settings.sampler.passes:
        plan_steps(denoiser.schedule, settings.sampler.time_index, one, settings.sampler.eta_ddim)
    score = settings.score
    require(
        not score.smoothing_sigma or min(size) > score.smoothing_kernel // 2,
        f"maps of {size[0]} x {size[1]} are too small for a Gaussian of {score.smoothing_kernel} pixels",
    )
    require(score.top <= size[0] * size[1], f"the image score counts {score.top} pixels, the map has fewer")


def _check_tiles(tiling: Tiling | None, settings: Settings, preprocessing: Preprocessing) -> None:
    if tiling is not None:
        require(preprocessing.crop == "none", "tiles show all of a photograph: leave out --scale, or add --crop none")
        check_tiled(settings)


def _backbone(settings: Settings, options: ExportOptions) -> Backbone | None:
    if not settings.score.stages:
        return None
    return load_backbone(settings.score.backbone, options.backbone_weights, settings.score.stages)


def _engines(options: ExportOptions) -> tuple[str, ...]:
    """Return the engines to compare on, ONNX Runtime first; raise for an engine that is asked for and is not there."""
    there = [name for name in installed() if named(name).reads != "own" or name == options.engine]
    for name in options.engines or ():
        asked = named(name).reads != "own" or name == options.engine
        require(asked, f"--engines {name} needs --engine {name} too")
        extra = named(name).extra
        require(name in there, f'--engines {name}: it is not installed: pip install "mdps[{extra}]", or leave it out')
    others = (name for name in there if options.engines is None or name in options.engines)
    return tuple(dict.fromkeys([DEFAULT, *others]))


@dataclass(frozen=True)
class _Proof:
    """Checks of the gate, numbers for engines that were not there, and which engines have computed them."""

    checks: dict[str, Any]
    reference: Reference
    compared: list[Compared]

    def added(self, manifest: Manifest, folder: Path) -> Manifest:
        """Return the manifest with all of it; the reference is written to the folder."""
        self.reference.write(folder)
        files = manifest.files | {REFERENCE: FileEntry.of(folder / REFERENCE)}
        records = {"checks": self.checks, COMPARED: [one.to_json() for one in self.compared]}
        return replace(manifest, files=files, parity=records | manifest.parity)


def _proof(
    folder: Path, manifest: Manifest, denoiser: Denoiser, backbone: Backbone | None, engines: Sequence[str]
) -> _Proof:
    precision, size = manifest.precision, manifest.preprocessing.network_size
    with ExitStack() as opened:
        if precision == "bf16":  # ONNX Runtime's CPU provider has no kernels for it
            emulated = Path(opened.enter_context(TemporaryDirectory()))
            emulated_bundle(folder, manifest, emulated)
            folder, engines = emulated, ()
        bundle = Bundle(folder, manifest, manifest.settings)
        opened_here, settings = open_graphs(bundle, opened), manifest.settings
        pipeline = Pipeline(opened_here, manifest.schedule, settings, NoiseBank.of(settings.sampler, size))
        ours = opened_here.roles
        graphs = {name: open_graphs(bundle, opened, engine=name).roles for name in engines[1:]}
        checks = check_parity(pipeline, denoiser, backbone, size, _variants(bundle, ours, graphs, opened), precision)
        reference = Reference.measured(ours, size, manifest.settings.mask, _first_steps(manifest))
        graphs = {engines[0]: ours, **graphs} if engines else {}
        try:
            agreed = [one for name, sessions in graphs.items() for one in compared(manifest, reference, sessions, name)]
        except BackendError as error:
            raise ParityError(engines_disagree(str(error))) from error
    return _Proof(checks, reference, agreed)


def _variants(
    bundle: Bundle, ours: Mapping[str, Session], graphs: Mapping[str, Mapping[str, Session]], opened: ExitStack
) -> list[tuple[str, Session, Session]]:
    """Pair step graphs with other engines'; what is written for one that is not there runs on ONNX Runtime."""
    pairs = []
    for role, graph in bundle.manifest.graphs.items():
        for form, file in graph.variants.items():
            engine = FORMS[form]
            if engine.name in graphs:
                pairs.append((engine.name, ours[role], graphs[engine.name][role]))
            elif engine.reads == "onnx":
                session = open_session(bundle.path / file)
                opened.callback(session.close)
                pairs.append(("variants", ours[role], session))
    return pairs


def _first_steps(manifest: Manifest) -> dict[str, dict[str, float]]:
    """Return the scalars of each step graph in the first step of the first pass it makes, or else of the first pass."""
    sampler, scalars = manifest.settings.sampler, {}
    for role in (role for role in STEPS if role in manifest.graphs):
        its_own = (one for one in sampler.passes if step_role(one.guidance_scale) == role)
        one = next(its_own, sampler.first_pass)
        _, (step, *_) = plan_steps(manifest.schedule, sampler.time_index, one, sampler.eta_ddim)
        scale = {GUIDED: {"guidance_scale": one.guidance_scale}, DDAD: {"guidance_scale": 1.0}}.get(role, {})
        scalars[role] = {name: float(value) for name, value in step_scalars(step).items()} | scale
    return scalars


def _node_table(autograd: dict[str, int], nodes: dict[str, dict[str, int]]) -> str:
    """Say how many there are of each kind, the most frequent first."""
    rows = {"guided step by autograd in torch": autograd} | nodes
    return "\n".join(
        f"{name}: {sum(kinds.values())} nodes: " + ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        for name, kinds in rows.items()
    )


class OwnFiles(Protocol):
    """The module that writes an engine's own files."""

    SUFFIX: str

    def check_library(self) -> None:
        """BackendError where what writes them is not installed."""

    def write(self, model: onnx.ModelProto, path: Path) -> None:
        """Write a step graph to `path`, with that suffix."""


def _writer_of(engine: Engine) -> OwnFiles:
    return cast(OwnFiles, importlib.import_module(engine.writer))


@dataclass
class _Writer:
    """Fills a folder; remembers which graph is in which file."""

    folder: Path
    denoiser: Denoiser
    settings: Settings
    preprocessing: Preprocessing
    say: Say
    precision: Precision
    tiles: Tiling | None = None
    layers: LayerErrors = field(default_factory=dict)
    graphs: dict[str, GraphEntry] = field(default_factory=dict)
    nodes: dict[str, dict[str, int]] = field(default_factory=dict)
    live: dict[str, int] = field(default_factory=dict)
    autograd: dict[str, int] = field(default_factory=dict)

    def steps(self, backend: str, forms: Mapping[str, Engine]) -> None:
        """Write the step graphs the passes need in these of FORMS; the plain one and DDAD's in any case."""
        sampler = self.settings.sampler
        scales = [one.guidance_scale for one in sampler.passes]
        rules = StepRules(sampler.mask_rule, sampler.guidance_norm, sampler.gradient, self.denoiser.prediction)
        network = in_precision(self.denoiser.network, self.precision)
        if self.precision != "fp32":
            self.say(f"comparing the layers in {self.precision} with float32")
            self.layers = layer_errors(self.denoiser.network, self.precision, self._image(1), torch.tensor(99.0))
        weights = WeightStore(self.folder / "denoiser.weights")
        if backend == "traced" and any(scales):
            self._traced(network)
        made: dict[str, Callable[[StepDenoiser], PlainStep]] = {}
        if backend == "onnx" or not all(scales):
            made[PLAIN] = lambda denoiser: PlainStep(denoiser, rules)
        if backend == "onnx" and any(scales):
            made[GUIDED] = lambda denoiser: GuidedStep(denoiser, rules)
        if backend == "onnx" and not (any(scales) and sampler.gradient == "ddad"):
            made[DDAD] = lambda denoiser: GuidedStep(denoiser, replace(rules, gradient="ddad"))
        if GUIDED in made and sampler.gradient == "exact":
            prepare(network, self.precision)
        for role, make in made.items():
            for engine in forms.values():
                denoiser = StepDenoiser(network, self.denoiser.prediction, _NORMS[engine.norms])
                self._record(role, engine, make(denoiser), weights)

    def scoring(self, backbone: Backbone | None) -> None:
        """Write the features of the observation, and the score graph around the same features of the samples."""
        weights = WeightStore(self.folder / "features.weights")
        score, image = self.settings.score, self._image(2)
        features, observed = None, {}
        if backbone is not None:
            features = Features(backbone, backbone.mean, backbone.std, score.feature_size, score.pool).eval()
            observed = {f"observation_features_{i + 1}": f for i, f in enumerate(features(image))}
            graph = recorded(features, {"image": image}, list(observed), {"image": ("batch",)}, self.say)
            self._write("features", graph, weights)
        samples = torch.stack([image, -image, 0.5 * image], dim=1)  # two images, three samples: no size is another's
        scalars = {"mask_lambda": 0.1, "mask_low": 0.0, "mask_high": 1.0, "mask_frozen": 0.0}
        inputs = {"posterior_samples": samples, "observation": image}
        inputs |= {name: torch.tensor(value) for name, value in scalars.items()} | observed
        axes = dict.fromkeys(["observation", *observed], ("batch",)) | {"posterior_samples": ("batch", "samples")}
        module, outputs = Score(features, score).eval(), ["anomaly_map", "anomaly_score", "mask"]
        self._write("score", recorded(module, inputs, outputs, axes, self.say), weights)

    def count_autograd(self) -> None:
        """Count torch's operations for the guided step, beside those of the graphs; nothing where no pass is guided."""
        passes = self.settings.sampler.passes
        guided = [index for index, one in enumerate(passes) if one.guidance_scale]
        if not guided:
            return
        self.say("counting what torch performs for a guided step")
        oracle = oracle_of(self.settings, self.denoiser.schedule.betas, guided[0])
        self.autograd = autograd_operations(self.denoiser.network, oracle, self.preprocessing.network_size)
        self.say(_node_table(self.autograd, self.nodes))

    def manifest(self, name: str, backend: Literal["onnx", "traced"], backbone: Backbone | None) -> Manifest:
        """Return the manifest of what was written so far; its parity report lacks the checks."""
        report = self.denoiser.report
        hashes = {"backbone_weights_sha256": backbone.weights_sha256 or ""} if backbone else {}
        return Manifest(
            schema_version=SCHEMA_VERSION,
            name=name,
            settings=self.settings,
            precision=self.precision,
            network={"format": report.format, "parameters": report.parameters, "live_bytes": self.live}
            | self.denoiser.config.to_json()
            | ({"assumed": report.assumed} if report.assumed else {})
            | hashes
            | ({"trained_noise": noise} if (noise := _trained_noise(self.denoiser)) else {}),
            schedule=self.denoiser.schedule,
            prediction=self.denoiser.prediction,
            preprocessing=self.preprocessing,
            calibrations={},
            files=hash_files(self.folder),
            graphs=self.graphs,
            plans=(),
            versions=versions("torch", "timm", "onnx", "onnxruntime", "onnxslim", "numpy"),
            parity={"nodes": self.nodes}
            | ({"layers": self.layers} if self.layers else {})
            | ({"autograd_operations": self.autograd} if self.autograd else {}),
            checkpoint=CheckpointEntry(Path(report.path).name, report.sha256),
            guidance_backend=backend,
            tiles=self.tiles,
        )

    def _image(self, batch: int) -> Tensor:
        stream = torch.Generator().manual_seed(0)
        return torch.rand(batch, 3, *self.preprocessing.network_size, generator=stream) * 2 - 1

    def _record(self, role: str, engine: Engine, module: nn.Module, weights: WeightStore) -> None:
        image = self._image(1)
        noised = self.settings.sampler.mask_rule != "blend"
        inputs: dict[str, Tensor | None] = {
            "x_t": image, "observation": image.flip(-1), "mask": (image[:, :1] > 0).float(), "noise": image.flip(-2),
            "mask_noise": image.flip(-1, -2) if noised else None,
        }  # fmt: skip
        scalars = {"timestep": 99.0, "alpha_t": 0.6, "alpha_s": 0.7, "sigma_t": 0.1}
        if role != PLAIN:
            scalars["guidance_scale"] = 1.0
        inputs |= {name: torch.tensor(value) for name, value in scalars.items()}
        outputs = ["x_s", "eps"] if role == PLAIN else ["x_s", "eps", "guidance_gradient"]
        self._write(role, record(module.eval(), inputs, outputs, BATCHED), weights, engine)

    def _write(self, role: str, model: onnx.ModelProto, weights: WeightStore, engine: Engine = FORMS[""]) -> None:
        """Write a graph in the form of `engine`, the common one by default."""
        own, variant = _writer_of(engine) if engine.writer else None, engine.form
        name = f"{role}.{variant}" if variant and own is None else role
        file = name + (own.SUFFIX if own else ".onnx")
        self.say(f"writing {file}")
        if own:
            own.write(model, self.folder / file)
        else:
            self.live[file] = live_bytes(model)
            write(model, self.folder / file, weights)
        self.nodes[file if own else name] = count_nodes(model)
        entry = self.graphs.get(role, GraphEntry(f"{role}.onnx"))
        self.graphs[role] = replace(entry, variants=entry.variants | {variant: file}) if variant else entry

    def _traced(self, network: nn.Module) -> None:
        self.say("writing denoiser.pt2")
        batch = torch.export.Dim("batch", min=1)
        program = torch.export.export(
            network, (self._image(2), torch.tensor(99.0)), dynamic_shapes={"x": {0: batch}, "timestep": {}}
        )
        torch.export.save(program, self.folder / "denoiser.pt2")
        self.graphs[GUIDED] = GraphEntry("denoiser.pt2", "traced")
