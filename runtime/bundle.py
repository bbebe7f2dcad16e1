"""A bundle to be opened, and how: the two objects that go whole from a caller to what opens an engine."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Self, TypedDict

from mdps.runtime.engines import AUTO, DEFAULT, ENGINES, named
from mdps.runtime.errors import require
from mdps.runtime.graphs import DDAD, GUIDED
from mdps.runtime.manifest import Manifest
from mdps.runtime.option import Option
from mdps.runtime.settings import Settings
from mdps.runtime.tuning import Tuning


@dataclass(frozen=True)
class LoadOptions:
    """How a bundle is loaded: each option's help says what it means. UsageError for a value out of its range.

    The choice of "auto" is measured on this bundle the first time and then remembered, with a BackendWarning where it
    cannot be. "torch" is for bundles made with `--guidance-backend traced`, whose guided step runs in torch on
    "onnxruntime" too; `torch_compile` names a back end of torch.compile for it, such as "inductor". A card without room
    for the bundle is refused before anything is opened (docs/use/gpu.md).

    `samples`, `seed` and `early_exit` override the bundle's; an early exit needs a calibration. At most `max_batch`
    posterior samples are computed at once. With `calibrated` there must be a calibration of the `product`, made with
    the same number of samples; without it the results have no verdict. `warm_up` runs one image. `force` takes a
    calibration that found too few of the defects put into good parts, which is refused otherwise (`Detector.doubt`).
    `tuned` is the detector that `mdps tune` fitted to the product, where there is one; without it the published method
    judges.
    """

    samples: Annotated[int | None, Option("Posterior samples an image [default: the bundle's].", low=1)] = None
    early_exit: Annotated[
        float | None,
        Option(
            "Skip the mask pass where the first one scores no higher than this share of good parts did, 0.05 to 0.95 "
            "[default: the bundle's, which is 0, off].",
            low=0,
            high=0.95,
        ),
    ] = None
    product: Annotated[str, Option("Which of the bundle's calibrations.")] = "default"
    threads: Annotated[int | None, Option("Processor threads [default: all this process may use].", low=1)] = None
    engine: Annotated[
        str,
        Option(
            "What computes; auto measures once which is fastest on this CPU, and remembers. mnn, torch, tensorrt and "
            "tensorrt-rtx run a bundle that was exported for them. openvino-bf16 rounds the steps to bfloat16, faster "
            "on processors that have it, and needs its own calibration. All of tensorrt and cuda need an NVIDIA card.",
            words=(*(one.name for one in ENGINES), AUTO),
        ),
    ] = DEFAULT
    device: Annotated[
        str | int | None,
        Option("Card to compute on: its index as nvidia-smi shows it, or its UUID [default: CUDA's first]."),
    ] = None
    tuned: Annotated[
        bool,
        Option(
            "The detector that `mdps tune` made for the product, or the method as published.",
            flag="--tuned/--published",
        ),
    ] = True
    seed: int | None = None
    calibrated: bool = True
    max_batch: int = 8
    warm_up: bool = True
    torch_compile: str | None = None
    force: bool = False

    def __post_init__(self) -> None:
        require(self.max_batch >= 1, f"max_batch {self.max_batch} should be at least 1")
        require(self.threads is None or self.threads >= 1, f"threads should be at least 1, not {self.threads}")
        if self.engine != AUTO:
            named(self.engine)

    @property
    def arithmetic(self) -> str:
        """The arithmetic that the engine computes the steps in, "" for the bundle's own precision."""
        return "" if self.engine == AUTO else named(self.engine).arithmetic

    def override(self, settings: Settings) -> Settings:
        """Return `settings` with the samples, seed and early exit asked for; UsageError out of their range."""
        given = {name: getattr(self, name) for name in ("samples", "seed", "early_exit")}
        changes = {name: value for name, value in given.items() if value is not None}
        return replace(settings, sampler=replace(settings.sampler, **changes))

    def command_line(self, *names: str) -> str:
        """The options of a command that ask for the same, of the fields `names`; nothing for what is the default."""
        given = {name: getattr(self, name) for name in names if getattr(self, name) != getattr(LoadOptions, name)}
        return "".join(f" --{name.replace('_', '-')} {value}" for name, value in given.items())


class LoadFields(TypedDict, total=False):
    """The fields of `LoadOptions`, for type checkers: a test compares them."""

    samples: int | None
    early_exit: float | None
    product: str
    threads: int | None
    engine: str
    device: str | int | None
    tuned: bool
    seed: int | None
    calibrated: bool
    max_batch: int
    warm_up: bool
    torch_compile: str | None
    force: bool


@dataclass(frozen=True)
class Bundle:
    """A bundle's folder, what it says of itself, and what to judge with: settings, and a tuning where there is one.

    The settings are the bundle's own or the tuning's, or what overrides them.
    """

    path: Path
    manifest: Manifest
    settings: Settings
    tuning: Tuning | None = None

    @classmethod
    def of(cls, path: Path | str, manifest: Manifest, options: LoadOptions | None = None) -> Self:
        """Take what the options ask for; UsageError for a setting out of its range, or that is the tuning's own."""
        options = options or LoadOptions()
        tuning = manifest.tunings.get(options.product) if options.tuned else None
        if tuning is None:
            return cls(Path(path), manifest, options.override(manifest.settings))
        settings = tuning.settings(manifest.settings)
        require(
            options.override(settings) == settings,
            f"{path} was tuned for the product {options.product!r}, with samples, seed and exit of its own: leave "
            "these options out, or load the published method (tuned=False)",
        )
        return cls(Path(path), manifest, settings, tuning)

    @classmethod
    def read(cls, path: Path | str, options: LoadOptions | None = None) -> Self:
        """Read the manifest and check every file's hash, and go on as `of`; raises BundleError too."""
        return cls.of(path, Manifest.read(path), options)

    @property
    def published(self) -> "Bundle":
        """The same bundle judging as published, with its own settings."""
        return Bundle(self.path, self.manifest, self.manifest.settings) if self.tuning else self

    @property
    def tuned(self) -> str:
        """The name of the tuning, "" for the published method."""
        return self.manifest.tuned(self.tuning)

    @property
    def roles(self) -> tuple[str, ...]:
        """The graphs of the bundle that are run; those of a tuning are beside them."""
        return self.tuning.roles(self.manifest.settings) if self.tuning else self.settings.roles

    def role_of_file(self, role: str) -> str:
        """Return which of the bundle's graphs computes the part `role`: for DDAD's gradient it has a guided step more.

        UsageError where it has no such step.
        """
        asked, baked = self.settings.sampler.gradient, self.manifest.settings.sampler.gradient
        if role != GUIDED or asked == baked:
            return role
        require(asked == "ddad", f"{self.path} guides with the gradient {baked!r} in its graphs, not with {asked!r}")
        return DDAD
