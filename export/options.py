"""A user's choices for an export, and the settings that follow from them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from mdps.export.methods import method
from mdps.export.presets import preset
from mdps.models.checkpoints import LoadOptions
from mdps.runtime.errors import require
from mdps.runtime.preprocessing import Preprocessing
from mdps.runtime.schedule import NoiseSchedule
from mdps.runtime.session import ARITHMETIC, BACKENDS, PLAN_BACKENDS
from mdps.runtime.settings import (
    PassSettings,
    SamplerSettings,
    ScoreSettings,
    Settings,
    gaussian_kernel,
    top_pixels,
)

T = TypeVar("T")


@dataclass(frozen=True)
class ExportOptions:
    """Choices of an export; None leaves a value to the mode or the preset. UsageError for what contradicts itself.

    `method` names the detector ("mdps", "ddim", "anoddpm", "autoddpm", "ddad"; see `methods`). A `preset`
    ("mvtec/bottle", ..) is MDPS in the mode `reference`, without one it is `paper`. `noise`: None is what the
    checkpoint was trained on. `noise_level` is that of the passes which start from the observation; a stitched one
    keeps its own, and takes steps as long as the first pass's. `crop` "input" cuts
    `crop_size` out of the resized image before the network, "metrics" only for evaluation.

    The fields that `PassSettings`, `SamplerSettings`, `ScoreSettings` and `MaskSettings` have too mean what they mean
    there, in the same ranges. `backbone_weights` is a file, None what is installed or cached; `roi` is (left, top,
    width, height) in pixels of the photograph; `load` is what the checkpoint does not say.

    `precision` is that of the denoiser's graphs. `backend` names the library whose own files the bundle holds too:
    "mnn" the step graphs for a CPU, the others plans for cards of each `compute_capability` and steps of at most
    `max_batch` samples. `engines` are those of the processor that have to agree with ONNX Runtime, None all that are
    here; one that was left out is compared when it first loads the bundle. With `count_nodes` the manifest also
    says what torch's autograd performs for a guided step, beside the nodes of the graphs.
    """

    preset: str | None = None
    method: str | None = None
    guidance_backend: Literal["onnx", "traced"] = "onnx"
    precision: Literal["fp32", "fp16", "bf16"] = "fp32"
    backend: Literal["tensorrt", "tensorrt-rtx", "mnn"] | None = None
    compute_capability: tuple[str, ...] | None = None
    max_batch: int = 8
    engines: tuple[str, ...] | None = None
    count_nodes: bool = False
    gradient: Literal["exact", "jacobian-free", "ddad"] | None = None
    guidance_norm: Literal["l2", "squared"] | None = None
    guidance_scale: float | None = None
    masked_guidance_scale: float | None = None
    noise_level: int | None = None
    steps: int | None = None
    noise: Literal["gaussian", "simplex"] | None = None
    mask_pass: bool | None = None
    samples: int = 1
    seed: int = 0
    backbone: str | None = None
    backbone_weights: Path | None = None
    stages: tuple[int, ...] | None = None
    eta: float | None = None
    pixel: Literal["l1", "squared", "scaled"] | None = None
    feature_size: int | None = None
    smoothing_sigma: float | None = None
    top: int | None = None
    mask_lambda: float | None = None
    mask_range: Literal["per-image", "frozen"] | None = None
    crop: Literal["none", "input", "metrics"] | None = None
    crop_size: int | None = None
    roi: tuple[int, int, int, int] | None = None
    load: LoadOptions = field(default_factory=LoadOptions)

    def __post_init__(self) -> None:
        require(
            self.precision == "fp32" or self.guidance_backend == "onnx",
            f"--precision {self.precision} is of ONNX graphs, and --guidance-backend traced makes a torch program of "
            "the guided step: leave one of them out",
        )
        require(
            self.compute_capability is None or self.backend in PLAN_BACKENDS,
            "--compute-capability is of engine plans, and none are asked for: add --backend tensorrt-rtx",
        )
        exact = [name for name in BACKENDS if name not in ARITHMETIC]
        for name in self.engines or ():
            require(name in exact, f"--engines has {name!r}: choose of {', '.join(exact)}")
        require(
            self.backend != "mnn" or (self.precision == "fp32" and self.guidance_backend == "onnx"),
            "--backend mnn computes ONNX graphs in fp32: leave out --precision and --guidance-backend",
        )

    @classmethod
    def of(cls, choices: Mapping[str, Any]) -> Self:
        """From the options of `mdps export` by name, those of `LoadOptions` among them; None keeps a default."""
        given = {name: value for name, value in choices.items() if value is not None}
        schedule = given.pop("schedule", None)
        said: dict[str, Any] = {one.name: given.pop(one.name) for one in fields(LoadOptions) if one.name in given}
        load = LoadOptions(**said, schedule=getattr(NoiseSchedule, schedule)() if schedule else None)
        return cls(**given, load=load)

    def preprocessing(self, trained: Preprocessing) -> Preprocessing:
        """The way from a picture to the network: as in training, unless told otherwise."""
        changed = trained if self.crop is None else replace(trained, crop=self.crop, crop_size=self.crop_size)
        return changed if self.roi is None else replace(changed, roi=self.roi)

    def settings(self, size: tuple[int, int], trained_noise: Literal["gaussian", "simplex"] = "gaussian") -> Settings:
        """All settings for a network of `size` (H, W) that was trained on such noise."""
        base = self._base(size)
        base = replace(base, sampler=replace(base.sampler, noise=self.noise or trained_noise))
        skip = base.sampler.first_pass.skip
        require(
            skip is None or self.steps is None,
            f"--steps belongs to the paper's time index; this preset or method counts steps by its skip of {skip}",
        )
        mask = _given(base.mask, mask_lambda=self.mask_lambda, range=self.mask_range)
        return replace(base, sampler=self._sampler(base.sampler), score=self._score(base, size), mask=mask)

    def _base(self, size: tuple[int, int]) -> Settings:
        require(
            self.preset is None or self.method in (None, "mdps"),
            f"a --preset holds the authors' numbers for mdps and says nothing of --method {self.method}: leave one out",
        )
        return preset(self.preset) if self.preset is not None else method(self.method or "mdps", size)

    def _score(self, base: Settings, size: tuple[int, int]) -> ScoreSettings:
        score = replace(base.score, top=top_pixels(*size)) if base.mode == "reference" else base.score
        kernel = None if self.smoothing_sigma is None else gaussian_kernel(self.smoothing_sigma)
        return _given(
            score, backbone=self.backbone, stages=self.stages, eta=self.eta, pixel=self.pixel,
            feature_size=self.feature_size, smoothing_sigma=self.smoothing_sigma, smoothing_kernel=kernel, top=self.top,
        )  # fmt: skip

    def _sampler(self, base: SamplerSettings) -> SamplerSettings:
        first = self._pass(base.first_pass)
        masked = None if base.masked_pass is None else self._masked(base.masked_pass, first)
        if self.mask_pass is not None:
            masked = (masked or first) if self.mask_pass else None
        if masked is not None:
            masked = _given(masked, guidance_scale=self.masked_guidance_scale)
        require(
            masked is not None or self.masked_guidance_scale is None,
            "--masked-guidance-scale is of the masked pass, and there is none: add --mask-pass, or leave it out",
        )
        changed = replace(base, first_pass=first, masked_pass=masked, samples=self.samples, seed=self.seed)
        return _given(changed, gradient=self.gradient, guidance_norm=self.guidance_norm)

    def _masked(self, base: PassSettings, first: PassSettings) -> PassSettings:
        if base.start == "observation":
            return self._pass(base)
        changed = _given(base, guidance_scale=self.guidance_scale)
        if self.steps is None:
            return changed
        stride = max(1, first.noise_level // self.steps)
        require(
            base.noise_level % stride == 0,
            f"{self.steps} steps from {first.noise_level} are {stride} long, and the second pass from "
            f"{base.noise_level} is no multiple of that: choose other --steps",
        )
        return replace(changed, steps=base.noise_level // stride)

    def _pass(self, base: PassSettings) -> PassSettings:
        return _given(base, noise_level=self.noise_level, guidance_scale=self.guidance_scale, steps=self.steps)


def _given(base: T, **changes: object) -> T:
    """`base` with those changes that are not None."""
    return replace(base, **{name: value for name, value in changes.items() if value is not None})  # type: ignore[type-var]
