"""A user's choices for an export, and the settings that follow from them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from mdps.export.methods import LINEAR, METHODS, method, noise_error_weight, preset
from mdps.models.checkpoints.statements import CheckpointOptions
from mdps.runtime.engines import ENGINES, named
from mdps.runtime.errors import require
from mdps.runtime.option import Option, build
from mdps.runtime.preprocessing import Preprocessing
from mdps.runtime.schedule import NoiseSchedule
from mdps.runtime.settings import (
    PassSettings,
    SamplerSettings,
    ScoreSettings,
    Settings,
    gaussian_kernel,
    top_pixels,
)
from mdps.runtime.tiles import Tiling

T = TypeVar("T")


def compute_capabilities(text: str) -> tuple[str, ...]:
    """Read a list such as 8.6,12.0; ValueError, with a sentence for the user, for what is none."""
    parts = tuple(part.strip() for part in text.split(","))
    for part in parts:
        if re.fullmatch(r"\d{2,3}", part):
            raise ValueError(f"{part!r} lacks its dot: one is written as {part[:-1]}.{part[-1]}")
    if not all(re.fullmatch(r"\d+\.\d", part) for part in parts):
        raise ValueError(f"{text!r} is no list of compute capabilities such as 8.6,12.0")
    return parts


@dataclass(frozen=True)
class ExportOptions:
    """Choices of an export; None leaves a value to the mode or the preset. UsageError for what contradicts itself.

    The fields that `PassSettings`, `SamplerSettings`, `ScoreSettings` and `MaskSettings` have too mean what they mean
    there, in the same ranges. A `preset` is MDPS in the mode `reference`, without one it is `paper`. `noise_level`
    is that of the passes which start from the observation; a stitched one keeps its own, and takes steps as long as
    the first pass's; one that another guides keeps its own too. `crop` "input" cuts `crop_size` out of the resized
    image before the network, "metrics" only for evaluation. `scale` and `overlap` are those of a `Tiling`. `roi` is
    in pixels of the photograph; `load` is what the checkpoint does not say.

    The bundle also holds the files of `engine`, where it reads its own: "mnn" the step graphs for a CPU, the others
    plans for cards of each `compute_capability`. An engine that was left out of `engines` is compared when it first
    loads the bundle. With `count_nodes` the manifest also says what torch's autograd performs for a guided step.
    """

    method: Annotated[
        str | None,
        Option(
            "The detector, with its publication's settings (docs/use/methods.md) [default: mdps].", words=tuple(METHODS)
        ),
    ] = None
    preset: Annotated[str | None, Option("The authors' settings of a category, such as mvtec/bottle.")] = None
    guidance_backend: Annotated[
        Literal["onnx", "traced"], Option("What holds the guided step: an ONNX graph, or a torch program.")
    ] = "onnx"
    precision: Annotated[
        Literal["fp32", "fp16", "bf16"],
        Option("What the denoiser computes in; less than fp32 is for GPUs (docs/use/gpu.md)."),
    ] = "fp32"
    gradient: Annotated[
        Literal["exact", "jacobian-free", "ddad"] | None,
        Option("What guides: the exact gradient, or one without a backward pass at half the cost [default: exact]."),
    ] = None
    guidance_norm: Annotated[Literal["l2", "squared"] | None, Option("Of the residual whose gradient guides.")] = None
    guidance_scale: Annotated[float | None, Option("Strength of the guidance (rho, w); 0 for none.", low=0)] = None
    masked_guidance_scale: Annotated[float | None, Option("That of the masked pass [default: the same].", low=0)] = None
    noise_level: Annotated[int | None, Option("Step T that images are noised to.", low=1)] = None
    steps: Annotated[int | None, Option("Denoising steps N of a pass.", low=1)] = None
    noise: Annotated[
        Literal["gaussian", "simplex"] | None,
        Option("What images are noised with [default: what the checkpoint was trained on]."),
    ] = None
    mask_pass: Annotated[
        bool | None,
        Option("A second pass under the first one's mask, or not.", flag="--mask-pass/--no-mask-pass"),
    ] = None
    mask_lambda: Annotated[float | None, Option("Where the mask's threshold lies from min to max.", low=0, high=1)] = (
        None
    )
    mask_range: Annotated[Literal["per-image", "frozen"] | None, Option("Min and max of the image or good parts.")] = (
        None
    )
    samples: Annotated[int | None, Option("Posterior samples an image [default: 1; noise-pair: 2].", low=1)] = None
    seed: Annotated[int, Option("Of the noise bank.", low=0)] = 0
    backbone: Annotated[str | None, Option("Feature network: efficientnet_lite0, or any of timm's.")] = None
    backbone_weights: Annotated[Path | None, Option("Its weights [default: installed or cached].")] = None
    stages: Annotated[
        tuple[int, ...] | None,
        Option("Its stages to compare, such as 1,2,3; 'none' compares pixels only.", example="1,2,3"),
    ] = None
    eta: Annotated[float | None, Option("Weight of the pixel term.", low=0)] = None
    pixel: Annotated[
        Literal["l1", "squared", "scaled"] | None,
        Option("The pixel term: absolute, squared, or scaled to the feature distance."),
    ] = None
    feature_size: Annotated[int | None, Option("Side that the feature network sees smaller images at.", low=1)] = None
    smoothing_sigma: Annotated[float | None, Option("Blur of the map in pixels; 0 for none.", low=0)] = None
    top: Annotated[int | None, Option("How many of the map's pixels the image score counts.", low=1)] = None
    crop: Annotated[Literal["none", "input", "metrics"] | None, Option("Cut the centre of the resized image.")] = None
    crop_size: Annotated[int | None, Option("Side of the cut.", low=1)] = None
    scale: Annotated[
        float | None,
        Option("Judge photographs in tiles, shrunk by this factor and not to one size.", low=0, above=True, high=1),
    ] = None
    overlap: Annotated[
        float | None, Option("Share that tiles have in common [default: 0.5].", low=0, high=0.9, seldom=True)
    ] = None
    roi: Annotated[
        tuple[int, int, int, int] | None,
        Option("Region of interest in the photograph: LEFT TOP WIDTH HEIGHT.", example="LEFT,TOP,WIDTH,HEIGHT"),
    ] = None
    load: CheckpointOptions = field(default_factory=CheckpointOptions)
    count_nodes: Annotated[
        bool, Option("Count the graphs' nodes, and what torch performs for a guided step.", seldom=True)
    ] = False
    engine: Annotated[
        str | None,
        Option(
            "Write this engine's own files too: engine plans for a card (docs/use/gpu.md), or graphs for the CPU.",
            words=tuple(one.name for one in ENGINES if one.reads in ("own", "plans")),
        ),
    ] = None
    compute_capability: Annotated[
        tuple[str, ...] | None,
        Option(
            "Of the cards the plans are for [default: this machine's card; tensorrt-rtx: 8.6,8.9,12.0].",
            example="8.6,12.0",
            parse=compute_capabilities,
        ),
    ] = None
    engines: Annotated[
        tuple[str, ...] | None,
        Option(
            "Those of the processor that must compute the same as onnxruntime [default: all that are installed].",
            example="onnxruntime,mnn",
        ),
    ] = None
    max_batch: Annotated[int, Option("Posterior samples that the plans' steps take at once, at most.", low=1)] = 8

    @property
    def writes(self) -> str:
        """The kind of files of its own that the engine reads: "own" or "plans"; "" without one."""
        return named(self.engine).reads if self.engine else ""

    def __post_init__(self) -> None:
        require(self.writes in ("", "own", "plans"), f"the engine {self.engine} reads the ONNX graphs: leave it out")
        require(
            self.precision == "fp32" or self.guidance_backend == "onnx",
            f"--precision {self.precision} is of ONNX graphs, and --guidance-backend traced makes a torch program of "
            "the guided step: leave one of them out",
        )
        require(
            self.compute_capability is None or self.writes == "plans",
            "--compute-capability is of engine plans, and none are asked for: add --engine tensorrt-rtx",
        )
        exact = [one.name for one in ENGINES if one.automatic]
        for name in self.engines or ():
            require(name in exact, f"--engines has {name!r}: choose of {', '.join(exact)}")
        require(
            self.writes != "own" or (self.precision == "fp32" and self.guidance_backend == "onnx"),
            f"--engine {self.engine} computes ONNX graphs in fp32: leave out --precision and --guidance-backend",
        )

    @classmethod
    def of(cls, choices: Mapping[str, Any]) -> Self:
        """Build from the options of `mdps export` by name, with those of `CheckpointOptions`; None keeps a default."""
        return build(cls, choices)

    def preprocessing(self, trained: Preprocessing) -> Preprocessing:
        """Return the way from a picture to the network: as in training, unless told otherwise."""
        changed = trained if self.crop is None else replace(trained, crop=self.crop, crop_size=self.crop_size)
        return changed if self.roi is None else replace(changed, roi=self.roi)

    def tiling(self, trained: Tiling | None = None) -> Tiling | None:
        """Return how photographs are cut, unless told otherwise as the denoiser was `trained`; None: not at all."""
        tiling = trained if self.scale is None else Tiling(self.scale)
        require(tiling is not None or self.overlap is None, "an overlap is of tiles, and there are none: add --scale")
        return tiling and _given(tiling, overlap=self.overlap)

    def settings(
        self,
        size: tuple[int, int],
        trained_noise: Literal["gaussian", "simplex"] = "gaussian",
        schedule: NoiseSchedule = LINEAR,
        tiling: Tiling | None = None,
    ) -> Settings:
        """Return all settings for a network of `size` (H, W) that was trained on such noise, by such a schedule.

        In tiles a pass runs under a mask of frozen range: a tile's own says nothing of the picture.
        """
        base = self._base(size)
        base = replace(base, sampler=replace(base.sampler, noise=self.noise or trained_noise))
        skip = base.sampler.first_pass.skip
        require(
            skip is None or self.steps is None,
            f"--steps belongs to the paper's time index; this preset or method counts steps by its skip of {skip}",
        )
        sampler, score = self._sampler(base.sampler), self._score(base, size)
        frozen = "frozen" if tiling and sampler.masked_pass else None
        mask = _given(base.mask, mask_lambda=self.mask_lambda, range=self.mask_range or frozen)
        if base.mode == "noise-error" and self.eta is None:
            score = replace(score, eta=noise_error_weight(schedule, sampler.first_pass.noise_level))
        return replace(base, sampler=sampler, score=score, mask=mask)

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
        changed = replace(base, first_pass=first, masked_pass=masked, seed=self.seed)
        return _given(changed, gradient=self.gradient, guidance_norm=self.guidance_norm, samples=self.samples)

    def _masked(self, base: PassSettings, first: PassSettings) -> PassSettings:
        if base.target == "previous":
            return _given(base, guidance_scale=self.guidance_scale, steps=self.steps)
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
    """Return `base` with those changes that are not None."""
    return replace(base, **{name: value for name, value in changes.items() if value is not None})  # type: ignore[type-var]
