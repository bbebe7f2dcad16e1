"""Detectors by diffusion as settings of the one sampler, each with what its publication and its code chose.

Presets are the authors' published settings of MDPS for each category of MVTec AD and BTAD.

What differs from the publications is told in docs/use/methods.md.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from mdps.runtime.errors import UsageError, require
from mdps.runtime.schedule import NoiseSchedule
from mdps.runtime.settings import (
    MaskSettings,
    Mode,
    PassSettings,
    Settings,
    gaussian_kernel,
    paper_settings,
    reference_settings,
    top_pixels,
)

Size = tuple[int, int]
LINEAR = NoiseSchedule.linear()


def ddim(size: Size) -> Settings:
    """Denoise without guidance or mask: the baseline of the paper's ablation, with its score (Song et al. 2021)."""
    base = paper_settings(size)
    first = replace(base.sampler.first_pass, guidance_scale=0.0)
    return replace(base, mode="ddim", sampler=replace(base.sampler, first_pass=first, masked_pass=None))


def ddad(size: Size) -> Settings:
    """Follow DDAD (Mousakhan et al. 2023, arXiv:2305.15956), config.yaml of github.com/arimousa/DDAD.

    T = 250 in steps of 25, eta 1, v 1; w = 4 is the median of their README's fifteen values for MVTec AD (0 to 11).
    Their Gaussian of 4 pixels at 256 is scaled to `size`; the image score is the map's maximum.
    """
    base = reference_settings(
        eta=1, guidance_mask_pass=0, guidance=4, mask_steps=0, test_steps=250, skip=25, mask_lambda=0.1
    )
    sigma = 4.0 * min(size) / 256
    score = replace(
        base.score, backbone="efficientnet_lite0", feature_size=224, smoothing_sigma=sigma,
        smoothing_kernel=gaussian_kernel(sigma), map_scale=1.0, image_score="top_mean", top=1,
    )  # fmt: skip
    sampler = replace(base.sampler, gradient="ddad")
    return Settings("ddad", sampler, score, MaskSettings(0.1, "per-image"))


def anoddpm(size: Size) -> Settings:
    """Follow AnoDDPM (Wyatt et al. 2022): T = 250 and every step back, squared difference of the pixels.

    The noise is what the checkpoint was trained on; theirs is simplex noise (github.com/Julian-Wyatt/AnoDDPM).
    """
    base = paper_settings(size)
    every_step = PassSettings(noise_level=250, guidance_scale=0.0, steps=250)
    score = replace(base.score, stages=(), pixel="squared", eta=1.0, top=top_pixels(*size))
    return replace(
        base, mode="anoddpm", sampler=replace(base.sampler, first_pass=every_step, masked_pass=None), score=score
    )


def autoddpm(size: Size) -> Settings:
    """Follow AutoDDPM (Bercea et al. 2023, arXiv:2305.19643), autoddpm.yaml of github.com/ci-ber/autoDDPM.

    T = 200 and every step back; a mask at 0.13; the stitched image to T = 50 and back, each step made five times.
    """
    base = paper_settings(size)
    first = PassSettings(noise_level=200, guidance_scale=0.0, steps=200)
    again = PassSettings(noise_level=50, guidance_scale=0.0, steps=50, start="stitched", resamples=5)
    sampler = replace(base.sampler, mask_rule="inpaint", first_pass=first, masked_pass=again)
    return replace(base, mode="autoddpm", sampler=sampler, mask=MaskSettings(0.13, "per-image"))


def one_call(size: Size) -> Settings:
    """Denoise once from T = 100: the fewest calls that reconstruct."""
    return _few_calls(size, "one-call", PassSettings(noise_level=100, guidance_scale=0.0, steps=1))


def noise_pair(size: Size) -> Settings:
    """Denoise once from T = 200 under a noise and under its negative, whose errors cancel in part."""
    first = PassSettings(noise_level=200, guidance_scale=0.0, steps=1)
    return _few_calls(size, "noise-pair", first, samples=2, antithetic=True)


def diffusionad(size: Size) -> Settings:
    """Follow DiffusionAD (Zhang et al. 2023, arXiv:2303.08730): x0 found at T = 250 guides the denoising from T = 100.

    w = 1 is args1.json of github.com/HuiZhang0812/DiffusionAD; the noise levels are what we measured.
    """
    first = PassSettings(noise_level=250, guidance_scale=0.0, steps=1)
    second = PassSettings(noise_level=100, guidance_scale=1.0, steps=1, target="previous")
    return _few_calls(size, "diffusionad", first, masked_pass=second, gradient="ddad")


def noise_error(size: Size) -> Settings:
    """Return the mean squared error of the noise that one call finds at T = 50: no feature network."""
    few = _few_calls(size, "noise-error", PassSettings(noise_level=50, guidance_scale=0.0, steps=1))
    eta = noise_error_weight(LINEAR, few.sampler.first_pass.noise_level)
    return replace(few, score=replace(few.score, stages=(), pixel="squared", eta=eta))


def noise_error_weight(schedule: NoiseSchedule, noise_level: int) -> float:
    """Return eta that makes the squared difference after one call from T the mean over channels of (z - eps)^2.

    x0 - y = sqrt((1 - a) / a) (z - eps), whatever the guidance. UsageError for a T beyond the schedule.
    """
    require(noise_level <= len(schedule), f"noise level {noise_level} is beyond the {len(schedule)} of the schedule")
    alpha = float(schedule.alphas_cumprod[noise_level - 1])
    return alpha / (3 * (1 - alpha))


def _few_calls(size: Size, mode: Mode, first: PassSettings, **sampler: Any) -> Settings:
    """The paper's map, blurred by 2 pixels at 64 x 64; the score is its maximum."""
    base, sigma = paper_settings(size), min(size) / 32
    score = replace(base.score, smoothing_sigma=sigma, smoothing_kernel=gaussian_kernel(sigma), top=1)
    changed = replace(base.sampler, **({"first_pass": first, "masked_pass": None} | sampler))
    return replace(base, mode=mode, sampler=changed, score=score)


METHODS: dict[str, Callable[[Size], Settings]] = {
    "mdps": paper_settings,
    "ddim": ddim,
    "anoddpm": anoddpm,
    "autoddpm": autoddpm,
    "ddad": ddad,
    "one-call": one_call,
    "noise-pair": noise_pair,
    "diffusionad": diffusionad,
    "noise-error": noise_error,
}


def method(name: str, size: Size) -> Settings:
    """Return the settings of a method for a network of `size` (H, W); UsageError that lists the known names."""
    if name not in METHODS:
        raise UsageError(f"there is no method {name!r}; there are {', '.join(METHODS)}")
    return METHODS[name](size)


@dataclass(frozen=True)
class Preset:
    """One row: scales w of the mask-making and the last pass, their noise levels T (0: no mask pass), mask lambda."""

    eta: float
    guidance_mask_pass: float
    guidance: float
    mask_steps: int
    test_steps: int
    mask_lambda: float

    def settings(self) -> Settings:
        return reference_settings(
            eta=self.eta, guidance_mask_pass=self.guidance_mask_pass, guidance=self.guidance,
            mask_steps=self.mask_steps, test_steps=self.test_steps, skip=20, mask_lambda=self.mask_lambda,
        )  # fmt: skip


PRESETS = {
    "mvtec/bottle": Preset(7, 50, 100, 200, 200, 0.12),
    "mvtec/cable": Preset(1, 50, 50, 250, 250, 0.19),
    "mvtec/capsule": Preset(7, 100, 100, 200, 200, 0.03),
    "mvtec/carpet": Preset(2, 0, 100, 0, 250, 0.15),
    "mvtec/grid": Preset(7, 0, 100, 0, 200, 0.15),
    "mvtec/hazelnut": Preset(7, 50, 0, 250, 200, 0.25),
    "mvtec/leather": Preset(7, 0, 100, 0, 200, 0.25),
    "mvtec/metal_nut": Preset(7, 50, 0, 250, 200, 0.25),
    "mvtec/pill": Preset(7, 50, 100, 150, 200, 0.12),
    "mvtec/screw": Preset(7, 50, 0, 200, 200, 0.15),
    "mvtec/tile": Preset(0, 0, 100, 0, 150, 0.15),
    "mvtec/toothbrush": Preset(7, 50, 50, 250, 200, 0.15),
    "mvtec/transistor": Preset(7, 50, 50, 200, 250, 0.18),
    "mvtec/wood": Preset(7, 0, 100, 0, 200, 0.15),
    "mvtec/zipper": Preset(7, 0, 100, 200, 200, 0.08),
    "btad/01": Preset(7, 100, 150, 200, 250, 0.05),
    "btad/02": Preset(7, 50, 200, 200, 250, 0.10),
    "btad/03": Preset(7, 50, 50, 200, 250, 0.10),
}


def preset(name: str) -> Settings:
    """Return the settings of a category, such as "mvtec/bottle"; UsageError that lists the known names."""
    if name not in PRESETS:
        raise UsageError(f"there is no preset {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name].settings()
