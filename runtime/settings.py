"""Every choice of the method as frozen dataclasses, and the two modes that fill them in."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from mdps.runtime.errors import require
from mdps.runtime.graphs import FEATURES, SCORE, STEPS, step_role
from mdps.runtime.records import Record

EXIT_SHARES = tuple(k / 20 for k in range(1, 20))
"""Shares of good parts whose first-pass scores a calibration records, and so the early exits there are."""


Mode = Literal[
    "paper", "reference", "ddim", "ddad", "anoddpm", "autoddpm", "one-call", "noise-pair", "diffusionad", "noise-error"
]


@dataclass(frozen=True)
class PassSettings(Record):
    """One sampling pass: noise level T >= 1, guidance scale (rho, w) >= 0, and `steps` N (paper) or `skip` (reference).

    `start`: what is noised to T, the observation, or "stitched": the samples of the pass before inside the mask and the
    observation outside (AutoDDPM, Bercea et al. 2023). `resamples`: how often each step but the last is made; before it
    is made again its result is noised back to where the step began (RePaint, Lugmayr et al. 2022); 1 to 1000.
    `target`: what guides, the observation, or "previous": the samples of the pass before, under no mask; the pass
    itself starts from the observation (DiffusionAD, Zhang et al. 2023).
    UsageError for a value out of its range, here and in all settings.
    """

    noise_level: int
    guidance_scale: float
    steps: int | None = None
    skip: int | None = None
    start: Literal["observation", "stitched"] = "observation"
    resamples: int = 1
    target: Literal["observation", "previous"] = "observation"

    def __post_init__(self) -> None:
        require(self.noise_level >= 1, f"noise level {self.noise_level} should be at least 1")
        require(self.guidance_scale >= 0, f"guidance scale {self.guidance_scale} should not be negative")
        require((self.steps is None) != (self.skip is None), "a pass needs either steps or skip, not both")
        require((self.steps or self.skip or 0) >= 1, "steps and skip should be at least 1")
        require(1 <= self.resamples <= 1000, f"resamples {self.resamples} should lie between 1 and 1000")
        both = self.target == "previous" and self.start != "observation"
        require(not both, "a pass that is guided by the one before starts from the observation: it cannot be stitched")


@dataclass(frozen=True)
class SamplerSettings(Record):
    """How posterior samples are drawn (Algorithm 1); `masked_pass` None means that one unmasked pass is all.

    `mask_rule`, outside the mask: "blend" takes the noise that leads to the observation for eps (paper); "replace" puts
    the observation under one noise z in the place of x_t before each call (the authors' code); "inpaint" does so under
    fresh noise for each call, and without noise after the last (RePaint).
    `gradient`: "exact" is that of the norm of y - x0_hat by x_t; "jacobian-free" takes eps as constant in it; "ddad" is
    x_t - y_t with y_t the observation under the predicted noise (DDAD, Mousakhan et al. 2023). Only "exact" needs the
    network's vector-Jacobian product, at twice the cost of a forward.
    `early_exit`: an image that scores no higher in the first pass than this share of good parts did, nor than the
    threshold, skips the masked pass; one of EXIT_SHARES, or 0 where every image goes through all passes.
    `antithetic`: the noises of every second sample are those of the one before, negated; needs an even number.
    `eta_ddim` lies in [0, 1], `samples` (N_s) in 1..4096, `seed` in 0..2^63 - 1.
    """

    time_index: Literal["paper", "reference"]
    mask_rule: Literal["blend", "replace", "inpaint"]
    guidance_norm: Literal["l2", "squared"]
    gradient: Literal["exact", "jacobian-free", "ddad"]
    eta_ddim: float
    first_pass: PassSettings
    masked_pass: PassSettings | None
    samples: int
    seed: int
    noise: Literal["gaussian", "simplex"] = "gaussian"
    early_exit: float = 0.0
    antithetic: bool = False

    def __post_init__(self) -> None:
        require(0 <= self.eta_ddim <= 1, f"eta_ddim {self.eta_ddim} should lie between 0 and 1")
        require(1 <= self.samples <= 4096, f"the number of samples {self.samples} should lie between 1 and 4096")
        require(0 <= self.seed < 2**63, f"seed {self.seed} should lie between 0 and 2**63 - 1")
        require(
            self.early_exit in (0, *EXIT_SHARES),
            f"early exit {self.early_exit} should be 0 (off) or a multiple of 0.05 from 0.05 to 0.95",
        )
        require(
            not self.early_exit or self.masked_pass is not None,
            "an early exit skips the masked pass, and these settings have none: leave the early exit out",
        )
        require(
            not self.antithetic or self.samples % 2 == 0, "antithetic samples come in pairs: ask for an even number"
        )
        has_one_before = self.first_pass.start != "observation" or self.first_pass.target != "observation"
        require(not has_one_before, "the first pass has nothing before it to stitch from or to be guided by")
        for settings in self.passes:
            given = "steps" if settings.skip is None else "skip"
            wanted = "steps" if self.time_index == "paper" else "skip"
            require(given == wanted, f"the {self.time_index} time index takes {wanted}, not {given}")

    @cached_property
    def passes(self) -> tuple[PassSettings, ...]:
        """The passes in the order they run: one or two."""
        return (self.first_pass,) if self.masked_pass is None else (self.first_pass, self.masked_pass)


@dataclass(frozen=True)
class ScoreSettings(Record):
    """How a posterior sample and the observation become a map and a score (paper, equations of "Anomaly Scoring").

    `pixel`: "l1" is eta * sum over channels of |y - x0| in [-1, 1], "squared" that of (y - x0)^2; "scaled" is eta *
    max(feature map) / max(pixel map) times the mean over channels of the difference in ImageNet-normalised space.
    `pool` 3 smooths features by a 3 x 3 mean, 0 does not. `feature_size`: the feature network sees the image at this
    size, or its own if larger; None: as it is. `smoothing_sigma` in pixels of the map, 0: no Gaussian; it is cut to an
    odd `smoothing_kernel` of pixels. `map_scale` > 0 multiplies the map. `top` >= 1: how many pixels the image score
    counts. `stages` are counted from 1; with none, `eta` >= 0 must be above 0.
    """

    backbone: str
    stages: tuple[int, ...]
    eta: float
    pixel: Literal["l1", "squared", "scaled"]
    pool: Literal[0, 3]
    align_corners: bool
    feature_size: int | None
    smoothing_sigma: float
    smoothing_kernel: int
    map_scale: float
    image_score: Literal["top_mean", "softmax_top_sum"]
    top: int

    def __post_init__(self) -> None:
        require(self.eta >= 0, f"eta {self.eta} should not be negative")
        require(bool(self.stages) or self.eta > 0, "with no feature stages and eta 0 nothing is left to score")
        require(all(stage >= 1 for stage in self.stages), f"feature stages {self.stages} are counted from 1")
        require(len(set(self.stages)) == len(self.stages), f"feature stages {self.stages} name one twice")
        require(bool(self.stages) or self.pixel != "scaled", 'the "scaled" pixel term needs feature stages: use "l1"')
        require(self.feature_size is None or self.feature_size >= 1, "feature_size should be at least 1")
        require(self.smoothing_sigma >= 0, f"smoothing_sigma {self.smoothing_sigma} should not be negative")
        odd = self.smoothing_kernel >= 1 and self.smoothing_kernel % 2 == 1
        require(odd, f"smoothing_kernel {self.smoothing_kernel} should be odd and at least 1")
        require(self.map_scale > 0, f"map_scale {self.map_scale} should be positive")
        require(self.top >= 1, f"top {self.top} should be at least 1")


@dataclass(frozen=True)
class MaskSettings(Record):
    """Mask threshold min + lambda (max - min) of the first pass's map, lambda in [0, 1], min and max as `range` says.

    "per-image": the map itself (paper); "frozen": the calibration on good images; "dataset": a whole test set, given by
    whoever reproduces the authors' numbers.
    """

    mask_lambda: float
    range: Literal["per-image", "frozen", "dataset"]

    def __post_init__(self) -> None:
        require(0 <= self.mask_lambda <= 1, f"mask_lambda {self.mask_lambda} should lie between 0 and 1")


@dataclass(frozen=True)
class Settings(Record):
    """All of the method; `mode` only labels where the values came from: the paper, its code, or another method."""

    mode: Mode
    sampler: SamplerSettings
    score: ScoreSettings
    mask: MaskSettings

    @property
    def roles(self) -> tuple[str, ...]:
        """The graphs of a bundle that the passes and the score run."""
        steps = {step_role(one.guidance_scale) for one in self.sampler.passes}
        features = (FEATURES,) if self.score.stages else ()
        return (*(role for role in STEPS if role in steps), *features, SCORE)


def gaussian_kernel(sigma: float) -> int:
    """Odd number of pixels that hold four sigma on either side: the authors' 33 at their sigma of 4, 1 for none."""
    return 2 * round(4 * sigma) + 1


def top_pixels(height: int, width: int) -> int:
    """How many pixels the image score counts: 500 at the paper's two sizes, elsewhere the same share of 256 x 256."""
    if height == width and height in (224, 256):
        return 500
    return max(1, round(500 * height * width / 256**2))


def paper_settings(image_size: tuple[int, int] = (256, 256)) -> Settings:
    """The paper's text, where it is decidable; `image_size` (H, W of the network) sets how many pixels are counted."""
    one_pass = PassSettings(noise_level=200, guidance_scale=100.0, steps=10)
    sampler = SamplerSettings(
        time_index="paper",
        mask_rule="blend",
        guidance_norm="l2",  # the squared norm the text prints diverges at rho = 100
        gradient="exact",
        eta_ddim=1.0,
        first_pass=one_pass,
        masked_pass=one_pass,
        samples=1,
        seed=0,
    )
    score = ScoreSettings(
        backbone="efficientnet_lite0",
        stages=(1, 2, 3),
        eta=0.3,
        pixel="l1",
        pool=0,
        align_corners=False,
        feature_size=224,
        smoothing_sigma=0.0,
        smoothing_kernel=1,
        map_scale=1.0,
        image_score="top_mean",
        top=top_pixels(*image_size),
    )
    return Settings("paper", sampler, score, MaskSettings(0.1, "per-image"))


def reference_settings(
    eta: float,
    guidance_mask_pass: float,
    guidance: float,
    mask_steps: int,
    test_steps: int,
    skip: int,
    mask_lambda: float,
) -> Settings:
    """Return the settings of the authors' published code, with the numbers of one category's preset.

    `mask_steps` is the noise level of the mask-making first pass, 0 for none: then the only pass has `test_steps`, its
    noise level, and `guidance`. A pass calls the network every `skip` timesteps. UsageError as the settings' own.
    """
    last = PassSettings(test_steps, float(guidance), skip=skip)
    first = PassSettings(mask_steps, float(guidance_mask_pass), skip=skip) if mask_steps else last
    sampler = SamplerSettings(
        time_index="reference",
        mask_rule="replace",
        guidance_norm="l2",
        gradient="exact",
        eta_ddim=1.0,
        first_pass=first,
        masked_pass=last if mask_steps else None,
        samples=1,
        seed=0,
    )
    score = ScoreSettings(
        backbone="wide_resnet101_2",
        stages=(2, 3),
        eta=float(eta),
        pixel="scaled",
        pool=3,
        align_corners=True,
        feature_size=None,
        smoothing_sigma=4.0,
        smoothing_kernel=33,
        map_scale=0.5,
        image_score="softmax_top_sum",
        top=500,
    )
    return Settings("reference", sampler, score, MaskSettings(mask_lambda, "frozen"))
