"""Opens a bundle's folder as a Detector: verify, pick the calibration, open only the sessions its passes need."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack

from mdps.runtime import reference
from mdps.runtime.calibration import Calibration, exit_limit
from mdps.runtime.detector import Detector
from mdps.runtime.errors import BackendError, CalibrationError, require
from mdps.runtime.manifest import GraphEntry, Manifest
from mdps.runtime.noise import NoiseBank
from mdps.runtime.ort import ON_CARDS, OnCard
from mdps.runtime.pipeline import Inspector, Pipeline
from mdps.runtime.plans import plans_of
from mdps.runtime.sampler import StepSessions
from mdps.runtime.schedule import plan_steps
from mdps.runtime.session import (
    ARITHMETIC,
    OWN_FILES,
    PLAN_BACKENDS,
    ChunkedSession,
    Session,
    check_backend,
    engine_of,
    open_session,
)
from mdps.runtime.settings import Settings
from mdps.runtime.threads import available_cpus

if TYPE_CHECKING:
    from mdps.runtime.placement import BundleCard

D = TypeVar("D", bound=Detector)


class EngineOptions(TypedDict, total=False):
    """What computes a bundle's graphs, in the words and with the defaults of `load`; "auto" stands for no engine."""

    backend: str
    provider: str
    threads: int | None
    max_batch: int
    torch_compile: str | None


def load(
    path: Path | str,
    *,
    product: str = "default",
    backend: str = "onnxruntime",
    provider: str = "cpu",
    device: str | int | None = None,
    threads: int | None = None,
    samples: int | None = None,
    seed: int | None = None,
    early_exit: float | None = None,
    calibrated: bool = True,
    max_batch: int = 8,
    warm_up: bool = True,
    torch_compile: str | None = None,
) -> Detector:
    """Load the bundle in folder `path`, check every file's hash, and run one image to warm up.

    `backend` is the engine on the CPU: "onnxruntime", "openvino", "mnn" for a bundle exported with `--backend mnn`, or
    "auto" for the fastest of those installed, which is measured on this bundle for a moment the first time and then
    remembered (see `choice`, which warns with a BackendWarning where it cannot). "openvino-bf16" computes the steps in
    bfloat16, on processors that have it: faster, with other scores, so that it needs a calibration of its own. The
    guided step of a bundle made with `--guidance-backend traced` runs in torch whatever the backend. `provider` chooses
    among ONNX Runtime's; any but "cpu" excludes the other backends.
    "tensorrt" and "tensorrt-rtx" run the bundle's engine plans on an NVIDIA card (docs/use/gpu.md).

    `device` is the card for those and for the providers "cuda" and "tensorrt": its index as nvidia-smi shows it, or its
    UUID or the beginning of that; by default the first one CUDA shows. A card without room for the bundle is refused
    before anything is opened. `torch_compile` is a back end of torch.compile, such as "inductor", for the guided step
    of a traced bundle.

    `samples` (N_s), `seed` and `early_exit` override the bundle's, in the ranges of `SamplerSettings`; an early exit
    needs a calibration. At most `max_batch` (1 or more) posterior samples are computed at once, by so many `threads` of
    the processor, by default all this process may use. `product` is the calibration's name; with `calibrated` there
    must be one, made with the same number of samples, without it the results have no verdict.

    Raises UsageError for a value out of its range, a backend, provider or card that is not there; BundleError and
    CalibrationError, which are UsageErrors too; BackendError where the engine or the card does not do it.
    """
    path = Path(path)
    require(max_batch >= 1, f"max_batch {max_batch} should be at least 1")
    manifest = Manifest.read(path)
    settings = override(manifest.settings, samples=samples, seed=seed, early_exit=early_exit)
    for one_pass in settings.sampler.passes:  # a plan that does not fit the schedule should fail now, not on the line
        plan_steps(manifest.schedule, settings.sampler.time_index, one_pass, settings.sampler.eta_ddim)
    engine = _options(backend=backend, provider=provider, device=device)
    arithmetic = ARITHMETIC.get(backend, "")
    calibration = _calibration(path, manifest, product, settings, engine, arithmetic) if calibrated else None
    exit_limit(calibration, settings.sampler.early_exit, str(path))  # the detector says so too, but after its engines

    def detector(pipeline: Inspector, chosen: str) -> Detector:
        return Detector(manifest, pipeline, calibration, product=product, backend=chosen)

    return open_detector(
        path, manifest, settings, detector, device=device, warm_up=warm_up, backend=backend, provider=provider,
        threads=threads, max_batch=max_batch, torch_compile=torch_compile,
    )  # fmt: skip


def open_detector(
    path: Path,
    manifest: Manifest,
    settings: Settings,
    make: Callable[[Inspector, str], D],
    *,
    device: str | int | None = None,
    warm_up: bool = True,
    backend: str = "onnxruntime",
    provider: str = "cpu",
    threads: int | None = None,
    max_batch: int = 8,
    torch_compile: str | None = None,
) -> D:
    """What `make` makes of the opened bundle and the name of its backend; the rest is said, and raises, as in `load`.

    What was opened is closed where this fails, and otherwise with the detector.
    """
    chosen = choose_backend(
        path, manifest, settings, backend=backend, provider=provider, threads=threads, max_batch=max_batch
    )
    placement = placed(
        path, manifest, settings, backend=chosen, provider=provider, device=device, max_batch=max_batch
    )  # fmt: skip
    with ExitStack() as opened:
        pipeline = open_inspector(
            path, manifest, settings, opened, ordinal=placement.ordinal if placement else 0, backend=chosen,
            provider=provider, threads=threads, max_batch=max_batch, torch_compile=torch_compile,
        )  # fmt: skip
        if isinstance(pipeline, Pipeline) and provider not in ON_CARDS:
            _check_reference(path, manifest, settings, pipeline.sessions(), chosen)
        detector = make(pipeline, chosen)
        if warm_up:
            detector.warm_up()
        if warm_up and placement:
            placement.loaded()
        opened.pop_all()  # only a failure above closes what was opened
    return detector


def _check_reference(
    path: Path, manifest: Manifest, settings: Settings, sessions: Mapping[str, Session | None], backend: str
) -> None:
    arithmetic, samples = ARITHMETIC.get(backend, ""), settings.sampler.samples
    reference.check(path, manifest, sessions, samples=samples, engine=backend, arithmetic=arithmetic)


def placed(
    path: Path,
    manifest: Manifest,
    settings: Settings,
    *,
    backend: str,
    provider: str = "cpu",
    device: str | int | None = None,
    max_batch: int = 8,
) -> "BundleCard | None":
    """The card for a bundle, with room for it; None where none computes. Raises as `load`."""
    if device is None and backend not in PLAN_BACKENDS and provider not in ON_CARDS:
        return None
    from mdps.runtime.placement import place

    return place(path, manifest, settings, backend=backend, provider=provider, device=device, max_batch=max_batch)


def open_inspector(
    path: Path,
    manifest: Manifest,
    settings: Settings,
    opened: ExitStack,
    *,
    ordinal: int = 0,
    **engine: Unpack[EngineOptions],
) -> Inspector:
    """What judges images on any backend, closed with `opened`; `ordinal` is CUDA's number of the card. As `load`."""
    return _Opener(path, manifest, settings, opened, ordinal, **engine).inspector()


def open_pipeline(
    path: Path, manifest: Manifest, settings: Settings, opened: ExitStack, **engine: Unpack[EngineOptions]
) -> Pipeline:
    """The sessions of a bundle whose files lie in `path`, closed with `opened`; raises as `load`."""
    return _Opener(path, manifest, settings, opened, **engine).pipeline()


def open_graphs(
    path: Path, manifest: Manifest, opened: ExitStack, **engine: Unpack[EngineOptions]
) -> dict[str, Session]:
    """A session of every graph of a bundle by role, closed with `opened`; raises as `load`."""
    opener = _Opener(path, manifest, manifest.settings, opened, **engine)
    return {role: opener._open(role) for role in manifest.graphs}


def choose_backend(
    path: Path,
    manifest: Manifest,
    settings: Settings,
    *,
    backend: str,
    provider: str = "cpu",
    threads: int | None = None,
    max_batch: int = 8,
) -> str:
    """`backend` itself, checked, or what "auto" stands for on this machine; raises as `load`."""
    automatic = backend == "auto"
    check_backend("openvino" if automatic else backend, provider)
    if not automatic:
        require(
            runs_on(manifest, backend),
            f"{path} has no step graphs for the backend {backend}: export it again with --backend {backend}",
        )
        if backend in ARITHMETIC:
            _check_reducible(path, manifest, backend)
        return backend
    from mdps.runtime.choice import CpuSituation, Probe, choose, stepper

    passes = _comparable_passes(manifest, settings)

    def open_probe(name: str, opened: ExitStack) -> Probe:
        opener = _Opener(
            path, manifest, settings, opened, backend=name, provider=provider, threads=threads, max_batch=max_batch
        )
        steps = opener.steps(passes)
        opened_steps = {"guided_step": steps.guided, "plain_step": steps.plain}
        _check_reference(path, manifest, settings, opened_steps, name)
        return stepper(steps, manifest, settings, passes)

    situation = CpuSituation.here(manifest, threads or available_cpus(), settings.sampler.samples)
    return choose(situation, open_probe if passes else None, partial(runs_on, manifest))


def _check_reducible(path: Path, manifest: Manifest, backend: str) -> None:
    precision = manifest.network.get("precision", "fp32")
    require(
        manifest.guidance_backend != "traced",
        f"{path} guides in torch, which computes in float32 whatever the backend: choose another than {backend}",
    )
    require(precision == "fp32", f"{path} is in {precision} already: choose another backend than {backend}")


def runs_on(manifest: Manifest, backend: str) -> bool:
    """Whether the bundle has the files that this backend needs."""
    steps = [graph for role, graph in manifest.graphs.items() if role.endswith("_step")]
    return backend not in OWN_FILES or any(backend in graph.variants for graph in steps)


def _comparable_passes(manifest: Manifest, settings: Settings) -> list[int]:
    """A pass for each step graph that a backend runs: torch runs the guided one of a traced bundle."""
    traced = manifest.guidance_backend == "traced"
    guided = {bool(one.guidance_scale): index for index, one in enumerate(settings.sampler.passes)}
    return [index for is_guided, index in guided.items() if not (is_guided and traced)]


def override(settings: Settings, **given: int | float | None) -> Settings:
    """`settings` with the fields of its sampler that are `given` and not None; UsageError out of their range."""
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return replace(settings, sampler=replace(settings.sampler, **changes))


def _options(**given: str | int | None) -> str:
    """The options that ask a command for the same, as they follow its arguments; nothing for what is the default."""
    usual = {"backend": "onnxruntime", "provider": "cpu", "product": "default"}
    return "".join(f" --{name} {value}" for name, value in given.items() if value not in (None, usual.get(name)))


def _calibration(
    path: Path, manifest: Manifest, product: str, settings: Settings, engine: str, arithmetic: str
) -> Calibration:
    calibration = manifest.calibrations.get(product)
    command = f"run `mdps calibrate {path} GOOD_FOLDER{_options(product=product)}{engine}`"
    if calibration is None:
        known = f" (it has {', '.join(manifest.calibrations)})" if manifest.calibrations else ""
        raise CalibrationError(f"{path} has no calibration for the product {product!r}{known}: {command}")
    if calibration.samples != settings.sampler.samples:
        raise CalibrationError(
            f"{path} was calibrated with {calibration.samples} samples an image, not {settings.sampler.samples}, so "
            f"its threshold does not apply: {command} with that number of samples"
        )
    if calibration.arithmetic != arithmetic:
        ours, theirs = (
            name or str(manifest.network.get("precision", "fp32")) for name in (arithmetic, calibration.arithmetic)
        )
        raise CalibrationError(
            f"{path} was calibrated with steps in {theirs}, not {ours}, so its threshold does not apply: {command}"
        )
    return calibration


@dataclass(frozen=True)
class _Opener:
    """Opens what one bundle needs, and leaves the closing to `opened`; `ordinal` is CUDA's number of the card."""

    path: Path
    manifest: Manifest
    settings: Settings
    opened: ExitStack
    ordinal: int = 0
    backend: str = "onnxruntime"
    provider: str = "cpu"
    threads: int | None = None
    max_batch: int = 8
    torch_compile: str | None = None

    def inspector(self) -> Inspector:
        """The whole loop on a card where backend, provider and settings allow that, else sessions and a loop here."""
        inspector = self._on_card()
        if inspector is None:
            return self.pipeline()
        self.opened.callback(inspector.close)
        return inspector

    def _on_card(self) -> Inspector | None:
        if self.backend in PLAN_BACKENDS:
            from mdps.runtime.device import cuda
            from mdps.runtime.trt import open_plans

            driver = partial(cuda.open_driver, self.ordinal)
            return open_plans(self.path, self.manifest, self.settings, self.backend, driver, self.max_batch)
        if self.provider not in ON_CARDS:
            return None
        from mdps.runtime.device import cuda
        from mdps.runtime.ort_card import can_stay, open_on_card

        if not can_stay(self.settings):  # some settings need the host between the steps
            return None
        return open_on_card(
            self.path, self.manifest, self.settings, cuda.open_driver(self.ordinal), provider=self.provider,
            threads=self.threads, max_batch=self.max_batch, compiled=self.torch_compile,
        )  # fmt: skip

    def pipeline(self) -> Pipeline:
        """The sessions this bundle's passes and score need, no others: a graph holds its weights in memory."""
        sampler = self.settings.sampler
        return Pipeline(
            steps=self.steps(range(len(sampler.passes))),
            features=self._open("features") if self.settings.score.stages else None,
            score=self._open("score"),
            schedule=self.manifest.schedule,
            settings=self.settings,
            noise=NoiseBank.of(sampler, self.manifest.preprocessing.network_size),
        )

    def steps(self, passes: Sequence[int]) -> StepSessions:
        """The step graphs of these passes."""
        scales = [self.settings.sampler.passes[index].guidance_scale for index in passes]
        return StepSessions(
            guided=self._step("guided_step") if any(scales) else None,
            plain=self._step("plain_step") if not all(scales) else None,
        )

    def _step(self, role: str) -> Session:
        return ChunkedSession(self._open(role), self.max_batch)

    def _open(self, role: str) -> Session:
        graph = self.manifest.graph(role, self.path)
        if graph.session == "traced":
            session: Session = self._traced(self.path / graph.file)
        else:
            backend, file = self._form(role, graph)
            try:
                session = open_session(file, self.provider, self.threads, backend, self._card(role))
            except BackendError as error:
                raise BackendError(f"{error}{self._remedy()}") from error
        self.opened.callback(session.close)
        return session

    def _remedy(self) -> str:
        """Of a bundle that no processor computes: the sentence's end."""
        if self.manifest.network.get("precision") != "bf16" or self.provider in ON_CARDS:
            return ""
        plans = plans_of(self.manifest, str(self.path))
        backend = plans[0].backend if plans else "tensorrt-rtx"
        remedy = "run it" if plans else "it has no plans: export it again, and run it,"
        return f" (the bundle is in bf16, which only a card computes: {remedy} with --backend {backend})"

    def _card(self, role: str) -> OnCard | None:
        if self.provider not in ON_CARDS:
            return None
        from mdps.runtime.ort_card import role_card

        return role_card(self.manifest, role, self.ordinal)

    def _form(self, role: str, graph: GraphEntry) -> tuple[str, Path]:
        """What runs the graph, and in which file. Features and scores are in float32 whatever the backend."""
        whole = self.backend in OWN_FILES and self.backend not in graph.variants
        backend = "onnxruntime" if whole else self.backend
        engine = engine_of(backend)
        chosen = backend if role.endswith("_step") else engine
        return chosen, self.path / graph.variants.get(engine, graph.file)

    def _traced(self, file: Path) -> Session:
        from mdps.runtime.traced import TracedSession

        manifest = self.manifest
        where = "cuda" if self.provider in ON_CARDS else self.provider
        return TracedSession(
            file, self.settings.sampler, manifest.prediction, where, self.threads, self.ordinal, self.torch_compile
        )
