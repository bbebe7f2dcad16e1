"""Opens a bundle's folder as a Detector: verify, pick the calibration, open only the sessions its passes need."""

import warnings
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, Unpack

import numpy as np

from mdps.runtime.bundle import Bundle, LoadFields, LoadOptions
from mdps.runtime.calibration import Calibration, exit_limit
from mdps.runtime.detector import Detector
from mdps.runtime.engines import AUTO, DEFAULT, ENGINES, ORT_WHEELS, Engine, clash, named
from mdps.runtime.engines.interface import GraphFile, card_module_of, module_of
from mdps.runtime.errors import BackendError, BackendWarning, CalibrationError, require
from mdps.runtime.fused import Fused
from mdps.runtime.graphs import STEPS, GraphEntry, Graphs, step_role
from mdps.runtime.machine import available_cpus, installed
from mdps.runtime.noise import NoiseBank
from mdps.runtime.pipeline import Inspector, Pipeline
from mdps.runtime.schedule import plan_steps
from mdps.runtime.scope import inspected
from mdps.runtime.session import ChunkedSession, Session
from mdps.runtime.tiled import Tiled, check_tiled
from mdps.runtime.tuning import Tuning

if TYPE_CHECKING:
    from mdps.runtime.cards import Card

D = TypeVar("D", bound=Detector)


def load(path: Path | str, options: LoadOptions | None = None, **fields: Unpack[LoadFields]) -> Detector:
    """Load the bundle in folder `path`, check every file's hash, and run one image to warm up.

    `fields` are those of `LoadOptions`, which says what each means: `load("bundle", engine="auto", samples=4)`.

    Raises UsageError for a value out of its range, an engine or card that is not there; BundleError and
    CalibrationError, which are UsageErrors too; BackendError where the engine or the card does not do it.
    """
    options = replace(options or LoadOptions(), **fields)
    return load_bundle(Bundle.read(path, options), options)


def load_bundle(bundle: Bundle, options: LoadOptions) -> Detector:
    """Load a bundle whose manifest is read, and may say more than its file; raises as `load`."""
    manifest, sampler = bundle.manifest, bundle.settings.sampler
    for one_pass in sampler.passes:  # a plan that does not fit the schedule should fail now, not on the line
        plan_steps(manifest.schedule, sampler.time_index, one_pass, sampler.eta_ddim)
    if manifest.tiles and bundle.tuning is None:
        check_tiled(bundle.settings)
    calibration = _calibration(bundle, options) if options.calibrated else None
    exit_limit(calibration, sampler.early_exit, str(bundle.path))  # the detector says so too, but after its engines

    def detector(pipeline: Inspector, engine: str) -> Detector:
        return Detector(manifest, pipeline, calibration, product=options.product, engine=engine, tuning=bundle.tuning)

    return open_detector(bundle, options, detector)


def open_detector(bundle: Bundle, options: LoadOptions, make: Callable[[Inspector, str], D]) -> D:
    """Open the bundle and return make(inspector, name of the engine); raises as `load`.

    What was opened is closed where this fails, and otherwise with the detector.
    """
    from mdps.runtime.memory import check_bundle
    from mdps.runtime.placement import place

    if sentence := clash(installed(*ORT_WHEELS)):  # which of them computes depends on the order of installation
        warnings.warn(sentence, BackendWarning, stacklevel=2)
    check_bundle(bundle, options)
    engine = choose_engine(bundle, options)
    placement = place(bundle, options, engine)
    with ExitStack() as opened:
        opener = _Opener(bundle, options, opened, engine, placement.card if placement else None)
        inspector = opener.inspector()
        detector = make(inspector, engine.name)
        if options.warm_up:
            detector.warm_up()
        if options.warm_up and placement:
            placement.loaded()
        opened.pop_all()  # only a failure above closes what was opened
    return detector


def _check_reference(bundle: Bundle, sessions: Graphs[Session], engine: Engine) -> None:
    """Compare what an engine of the processor computes, where nobody did; see `reference.check`."""
    from mdps.runtime import reference  # heavy, as all that only a load needs: `import mdps.runtime` is quick

    if engine.on_card:
        return
    samples = bundle.settings.sampler.samples
    roles = {bundle.role_of_file(role): session for role, session in sessions.roles.items()}
    reference.check(
        bundle.path, bundle.manifest, roles, samples=samples, engine=engine.name, arithmetic=engine.arithmetic
    )


def open_pipeline(
    bundle: Bundle, opened: ExitStack, options: LoadOptions | None = None, **fields: Unpack[LoadFields]
) -> Pipeline:  # fmt: skip
    """Open the sessions of a bundle for a loop on the host, closed with `opened`; options and errors as of `load`."""
    return _opener(bundle, opened, replace(options or LoadOptions(), **fields)).pipeline()


def open_graphs(
    bundle: Bundle, opened: ExitStack, options: LoadOptions | None = None, **fields: Unpack[LoadFields]
) -> Graphs[Session]:  # fmt: skip
    """Open every graph that the bundle has, closed with `opened`; options and errors as of `load`."""
    return _opener(bundle, opened, replace(options or LoadOptions(), **fields)).graphs(bundle.manifest.graphs)


def _opener(bundle: Bundle, opened: ExitStack, options: LoadOptions) -> "_Opener":
    """An opener for sessions alone: on a card the first one that CUDA shows, with room or not."""
    from mdps.runtime.cards import Card

    engine = named(options.engine)
    return _Opener(bundle, options, opened, engine, Card(ordinal=0) if engine.on_card else None)


def choose_engine(bundle: Bundle, options: LoadOptions) -> Engine:
    """Return the engine asked for, checked, or what "auto" stands for on this machine; raises as `load`."""
    if options.engine != AUTO:
        engine = named(options.engine)
        _check_serves(bundle, engine)
        return engine
    from mdps.runtime.choice import CpuSituation, Probe, choose, stepper

    manifest, settings = bundle.manifest, bundle.settings
    passes = _comparable_passes(bundle)

    def open_probe(name: str, opened: ExitStack) -> Probe:
        opener = _Opener(bundle, options, opened, named(name))
        roles = {step_role(settings.sampler.passes[index].guidance_scale) for index in passes}
        steps = opener.graphs(roles)
        _check_reference(bundle, steps, named(name))
        return stepper(steps, manifest, settings, passes)

    situation = CpuSituation.here(manifest, options.threads or available_cpus(), settings.sampler.samples)
    return named(choose(situation, open_probe if passes else None, lambda name: manifest.serves(named(name))))


def _check_serves(bundle: Bundle, engine: Engine) -> None:
    """UsageError where the bundle is not for this engine. Which plans it lacks is said when they are opened."""
    path, manifest = bundle.path, bundle.manifest
    if engine.reads == "own":
        remedy = f"export it again with --engine {engine.name}"
        require(manifest.serves(engine), f"{path} has no step graphs for the engine {engine.name}: {remedy}")
    if engine.reads == "program":
        remedy = "choose another, or export it again with --guidance-backend traced"
        guides = f"{path} guides with an ONNX graph, which the engine {engine.name} does not run"
        require(manifest.serves(engine), f"{guides}: {remedy}")
    if engine.arithmetic:
        traced = f"{path} guides in torch, which computes in float32 whatever the engine"
        require(manifest.guidance_backend != "traced", f"{traced}: choose another than {engine.name}")
        reduced = f"{path} is in {manifest.precision} already: choose another engine than {engine.name}"
        require(manifest.precision == "fp32", reduced)


def _comparable_passes(bundle: Bundle) -> list[int]:
    """A pass for each step graph that an engine runs: torch runs the guided one of a traced bundle."""
    passes = bundle.settings.sampler.passes if set(bundle.roles) & {*STEPS} else ()
    by_role = {bundle.role_of_file(step_role(one.guidance_scale)): index for index, one in enumerate(passes)}
    graphs = bundle.manifest.graphs
    return [index for role, index in by_role.items() if role not in graphs or graphs[role].session != "traced"]


def _calibration(bundle: Bundle, options: LoadOptions) -> Calibration:
    """The product's, or CalibrationError where there is none for these options."""
    path, manifest, product = bundle.path, bundle.manifest, options.product
    asked = options.command_line("product", "engine", "device") + " --align" * (options.product in manifest.alignments)
    command = f"run `mdps calibrate {path} GOOD_FOLDER{asked}`"
    calibration = manifest.calibrations.get(product)
    if calibration is None:
        known = f" (it has {', '.join(manifest.calibrations)})" if manifest.calibrations else ""
        raise CalibrationError(f"{path} has no calibration for the product {product!r}{known}: {command}")
    if calibration.tuned != bundle.tuned:
        theirs = "before it was tuned" if bundle.tuned else "with a tuned detector"
        remedy = command if options.tuned else "load the published method with calibrated=False"
        raise CalibrationError(f"{path} was calibrated {theirs}, so its threshold does not apply: {remedy}")
    if calibration.aligned != manifest.aligned(product):
        raise CalibrationError(
            f"{path} was calibrated with parts that lay otherwise, aligned or not, so its threshold does not apply: "
            f"{command}"
        )
    if calibration.scope != manifest.scope(product).name:
        raise CalibrationError(
            f"{path} was calibrated with other places to inspect, so its threshold does not apply: {command}"
        )
    if calibration.samples != bundle.settings.sampler.samples:
        raise CalibrationError(
            f"{path} was calibrated with {calibration.samples} samples an image, not "
            f"{bundle.settings.sampler.samples}, so its threshold does not apply: {command} with that number of samples"
        )
    if calibration.arithmetic != options.arithmetic:
        ours, theirs = (name or manifest.precision for name in (options.arithmetic, calibration.arithmetic))
        raise CalibrationError(
            f"{path} was calibrated with steps in {theirs}, not {ours}, so its threshold does not apply: {command}"
        )
    if calibration.doubt and not options.force:
        raise CalibrationError(f"{path}: {calibration.doubt}, or go on with --force")
    return calibration


@dataclass(frozen=True)
class _Opener:
    """Opens what one bundle needs on an engine, and leaves the closing to `opened`."""

    bundle: Bundle
    options: LoadOptions
    opened: ExitStack
    engine: Engine
    card: "Card | None" = None

    def inspector(self) -> Inspector:
        """Return what judges as the bundle is asked to."""
        tuning, manifest = self.bundle.tuning, self.bundle.manifest
        whole = self._loop() if tuning is None else self._fused(tuning)
        if manifest.tiles is None:
            return whole
        size, photograph = manifest.preprocessing.network_size, tuning.photograph if tuning else None
        scope, covered = manifest.scope(self.options.product), manifest.preprocessing.covered_box
        inside = partial(inspected, scope, covered) if scope.restricts else None
        return Tiled(whole, manifest.tiles, size, photograph, inside)

    def _loop(self) -> Inspector:
        """The whole loop on a card where engine and settings allow that, else sessions and a loop here, compared.

        The loop on a card has one noise for all images, and tiles each have theirs.
        """
        inspector = None
        if self.card is not None and self.bundle.manifest.tiles is None:
            module = card_module_of(self.engine)
            inspector = module.open_bundle(self.engine, self.bundle, self.options, self.card)
        if inspector is None:
            pipeline = self.pipeline()
            _check_reference(self.bundle, pipeline.graphs, self.engine)
            return pipeline
        self.opened.callback(inspector.close)
        return inspector

    def _fused(self, tuning: Tuning) -> Fused:
        """The tuning's graphs and a loop here for its reconstruction; for a cascade also what judges as published."""
        engine = self.engine if self.engine.reads == "onnx" else named(DEFAULT)
        files = {role: self.bundle.path / entry.file for role, entry in tuning.graphs.items()}
        sessions = {role: self._open_file(role, engine, file) for role, file in files.items()}
        few = self.pipeline() if tuning.sampler else None
        if few:
            _check_reference(self.bundle, few.graphs, self.engine)
        published = replace(self, bundle=self.bundle.published)._loop() if tuning.cascade else None
        if published and self.options.warm_up:  # the grey image may lie outside the band
            size = self.bundle.manifest.preprocessing.network_size
            published.inspect(np.zeros((1, 3, *size), np.float32), (0.0, 1.0))
        return Fused(tuning, sessions, self.bundle.settings, few, published)

    def pipeline(self) -> Pipeline:
        """The sessions this bundle's passes and score need, no others: a graph holds its weights in memory."""
        manifest, settings, tuning = self.bundle.manifest, self.bundle.settings, self.bundle.tuning
        roles = settings.roles
        if tuning:  # a mask of the few calls has no calibrated range
            roles = tuning.few_roles(manifest.settings)
            settings = replace(settings, mask=replace(settings.mask, range="per-image"))
        return Pipeline(
            graphs=self.graphs(roles),
            schedule=manifest.schedule,
            settings=settings,
            noise=NoiseBank.of(settings.sampler, manifest.preprocessing.network_size),
        )

    def graphs(self, roles: Iterable[str]) -> Graphs[Session]:
        """Sessions of these graphs; batches of steps are cut into chunks."""
        found = {role: self._open(role) for role in roles}
        chunk = self.options.max_batch
        return Graphs.of({role: ChunkedSession(one, chunk) if role in STEPS else one for role, one in found.items()})

    def _open(self, role: str) -> Session:
        role = self.bundle.role_of_file(role)
        return self._open_file(role, *self._form(self.bundle.manifest.graph(role, self.bundle.path)))

    def _open_file(self, role: str, engine: Engine, file: Path) -> Session:
        graph = GraphFile(file, role, self.bundle, self.card)
        try:
            session = module_of(engine).open(engine, graph, self.options)
        except BackendError as error:
            raise BackendError(f"{error}{self._remedy(engine)}") from error
        self.opened.callback(session.close)
        return session

    def _form(self, graph: GraphEntry) -> tuple[Engine, Path]:
        """The engine that runs the graph, and the file it is in: what the one chosen cannot read, the default does."""
        engine = self.engine
        if graph.session == "traced":
            engine = next(one for one in ENGINES if one.reads == "program")
        elif not engine.complete and engine.form not in graph.variants:
            engine = named(DEFAULT)
        return engine, self.bundle.path / graph.variants.get(engine.form, graph.file)

    def _remedy(self, engine: Engine) -> str:
        """The end of the sentence, of a bundle that no processor computes."""
        if self.bundle.manifest.precision != "bf16" or engine.on_card or engine.reads == "program":
            return ""
        plans = self.bundle.manifest.plans
        name = plans[0].engine if plans else next(one.name for one in ENGINES if one.reads == "plans")
        remedy = "run it" if plans else "it has no plans: export it again, and run it,"
        return f" (the bundle is in bf16, which only a card computes: {remedy} with --engine {name})"
