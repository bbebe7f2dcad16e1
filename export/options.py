"""What a user may choose when exporting, and the settings that follow from it."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeVar

from mdps.export.presets import preset
from mdps.models.checkpoints import LoadOptions
from mdps.runtime.errors import require
from mdps.runtime.preprocessing import Preprocessing
from mdps.runtime.settings import (
    PassSettings,
    SamplerSettings,
    ScoreSettings,
    Settings,
    gaussian_kernel,
    paper_settings,
    top_pixels,
)

T = TypeVar("T")


@dataclass(frozen=True)
class ExportOptions:
    """Choices of an export; None leaves a value to the mode or the preset. UsageError for what contradicts itself.

    Without a `preset` ("mvtec/bottle", ..) the mode is `paper`, with one it is `reference`. `crop` "input" cuts
    `crop_size` out of the resized image before the network, "metrics" only for evaluation.
    """

    preset: str | None = None
    guidance_backend: Literal["onnx", "traced"] = "onnx"
    gradient: Literal["exact", "jacobian-free", "ddad"] | None = None
    guidance_norm: Literal["l2", "squared"] | None = None
    guidance_scale: float | None = None
    masked_guidance_scale: float | None = None
    noise_level: int | None = None
    steps: int | None = None
    mask_pass: bool | None = None
    samples: int = 1
    seed: int = 0
    backbone: str | None = None
    backbone_weights: Path | None = None
    stages: tuple[int, ...] | None = None
    eta: float | None = None
    feature_size: int | None = None
    smoothing_sigma: float | None = None
    top: int | None = None
    mask_lambda: float | None = None
    mask_range: Literal["per-image", "frozen"] | None = None
    crop: Literal["none", "input", "metrics"] | None = None
    crop_size: int | None = None
    roi: tuple[int, int, int, int] | None = None
    load: LoadOptions = field(default_factory=LoadOptions)

    def preprocessing(self, trained: Preprocessing) -> Preprocessing:
        """The way from a picture to the network: as in training, unless told otherwise."""
        changed = trained if self.crop is None else replace(trained, crop=self.crop, crop_size=self.crop_size)
        return changed if self.roi is None else replace(changed, roi=self.roi)

    def settings(self, size: tuple[int, int]) -> Settings:
        """All settings for a network of `size` (H, W)."""
        base = paper_settings(size) if self.preset is None else preset(self.preset)
        require(
            self.preset is None or self.steps is None,
            "--steps belongs to the paper's time index; a preset counts steps by its skip of 20",
        )
        mask = _given(base.mask, mask_lambda=self.mask_lambda, range=self.mask_range)
        return replace(base, sampler=self._sampler(base.sampler), score=self._score(base, size), mask=mask)

    def _score(self, base: Settings, size: tuple[int, int]) -> ScoreSettings:
        score = replace(base.score, top=top_pixels(*size)) if base.mode == "reference" else base.score
        kernel = None if self.smoothing_sigma is None else gaussian_kernel(self.smoothing_sigma)
        return _given(
            score, backbone=self.backbone, stages=self.stages, eta=self.eta, feature_size=self.feature_size,
            smoothing_sigma=self.smoothing_sigma, smoothing_kernel=kernel, top=self.top,
        )  # fmt: skip

    def _sampler(self, base: SamplerSettings) -> SamplerSettings:
        first = self._pass(base.first_pass)
        masked = None if base.masked_pass is None else self._pass(base.masked_pass)
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

    def _pass(self, base: PassSettings) -> PassSettings:
        return _given(base, noise_level=self.noise_level, guidance_scale=self.guidance_scale, steps=self.steps)


def _given(base: T, **changes: object) -> T:
    """`base` with those changes that are not None."""
    return replace(base, **{name: value for name, value in changes.items() if value is not None})  # type: ignore[type-var]
