"""Settings of a training run."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from mdps.models.unet import UNetConfig
from mdps.runtime.errors import UsageError

POSITIVE = ("epochs", "batch", "learning_rate", "snr_limit", "log_every", "checkpoint_every", "checkpoint_minutes")
POSITIVE_IF_GIVEN = ("steps", "clip", "minutes")
NOT_NEGATIVE = ("weight_decay", "warmup", "shift", "seed", "samples", "sample_every")
BETWEEN = (("ema", 0, 1), ("low_share", 0, 1), ("low_limit", 1, 1000))


def paper_network(image_size: int = 256, base: int = 64) -> UNetConfig:
    """The authors' U-Net (33 M parameters at the defaults): attention where the image is 8, 16 and 32 times smaller.

    That is at 32, 16 and 8 pixels of 256, and at 28, 14 and 7 of the paper's crop of 224; four heads.
    """
    return UNetConfig(image_size=image_size, model_channels=base)


def small_network(image_size: int = 64, base: int = 32, mult: tuple[int, ...] = (1, 2, 2, 2)) -> UNetConfig:
    """A U-Net for 64 x 64 (1.9 M parameters at the defaults): one residual block a level, attention at the deepest."""
    if base % 32:
        raise UsageError(f"a base width of {base} does not divide into groups of normalisation; use a multiple of 32")
    return UNetConfig(
        image_size=image_size,
        model_channels=base,
        channel_mult=mult,
        num_res_blocks=1,
        attention_factors=(8,),
        num_head_channels=32,
        scale_shift_norm=True,
    )


@dataclass(frozen=True)
class TrainingConfig:
    """Settings of one run; the defaults are the paper's (section "Implementation details"), and none of our options.

    A run is `steps` long or, where that is None, `epochs` passes over the images. `minutes` ends it early and bends the
    learning rate's decay to end with it. `low_share` of the timesteps are drawn below `low_limit`, where sampling
    starts; the others from all of them.
    """

    network: UNetConfig = field(default_factory=paper_network)
    steps: int | None = None
    epochs: int = 2000
    batch: int = 8  # of all processes together
    optimizer: Literal["adam", "adamw"] = "adam"
    learning_rate: float = 1e-4
    weight_decay: float = 5e-2  # added to the gradient by adam, taken from the weights by adamw
    decay: Literal["constant", "linear", "cosine"] = "constant"
    warmup: int = 0
    clip: float | None = None  # largest norm of the gradient
    ema: float = 0.0  # of the weights that are kept; 0 keeps the last ones
    weighting: Literal["uniform", "min-snr"] = "uniform"
    snr_limit: float = 5.0  # of min-snr
    noise: Literal["gaussian", "simplex"] = "gaussian"
    low_share: float = 0.0
    low_limit: int = 260
    flip_horizontal: bool = False
    flip_vertical: bool = False
    rotate: bool = False  # by quarter turns
    shift: int = 0  # images are moved by up to so many pixels, their edges mirrored
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    compile: bool = False
    seed: int = 0
    minutes: float | None = None
    log_every: int = 100
    checkpoint_every: int = 1000
    checkpoint_minutes: float = 5.0  # whichever of the two comes first
    samples: int = 4  # reconstructions shown
    sample_every: int = 1000  # 0: only at the end

    def __post_init__(self) -> None:
        """Refuse settings that cannot be meant, with a UsageError that names the setting."""
        given = tuple(name for name in POSITIVE_IF_GIVEN if getattr(self, name) is not None)
        for name in POSITIVE + given:
            if getattr(self, name) <= 0:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be positive")
        for name in NOT_NEGATIVE:
            if getattr(self, name) < 0:
                raise UsageError(f"{name} is {getattr(self, name)}; it must not be negative")
        for name, low, high in BETWEEN:
            if not low <= getattr(self, name) <= high:
                raise UsageError(f"{name} is {getattr(self, name)}; it must lie between {low} and {high}")

    def with_steps(self, images: int | None) -> "TrainingConfig":
        """The same run with `steps` a number: ceil(images / batch) an epoch where it was given in epochs.

        UsageError where the source has no number of `images` and so no epochs.
        """
        if self.steps is not None:
            return self
        if images is None:
            raise UsageError("this source of images has no epochs; give the number of steps")
        return replace(self, steps=self.epochs * math.ceil(images / self.batch))

    @property
    def last_step(self) -> int:
        """`steps`, once it is known (`with_steps`)."""
        if self.steps is None:
            raise UsageError("the number of steps depends on the images; ask with_steps() first")
        return self.steps

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"network": self.network.to_json()}

    @classmethod
    def from_json(cls, obj: dict[str, Any]) -> "TrainingConfig":
        """Inverse of `to_json`; an unknown field is a UsageError that names it, an absent one has its default."""
        unknown = set(obj) - {f.name for f in fields(cls)}
        if unknown:
            raise UsageError(f"unknown training setting {sorted(unknown)[0]!r}")
        return cls(**(obj | {"network": UNetConfig.from_json(obj["network"])}))


def paper_recipe(network: UNetConfig | None = None) -> TrainingConfig:
    """The paper's: Adam 1e-4, weight decay 5e-2 added to the gradient, batch 8, 2000 epochs; nothing it does not state.

    It names no average of the weights, no decay of the rate and no variation of the images, so there are none.
    """
    return TrainingConfig(network=network or paper_network())


def small_recipe(network: UNetConfig | None = None) -> TrainingConfig:
    """AdamW 4e-4 decaying to zero, EMA 0.999, 70 % of the timesteps below 260: good after a few thousand steps."""
    return replace(
        TrainingConfig(network=network or small_network()),
        steps=4000,
        optimizer="adamw",
        learning_rate=4e-4,
        weight_decay=1e-2,
        decay="cosine",
        warmup=100,
        ema=0.999,
        low_share=0.7,
    )


NETWORKS: dict[str, Callable[..., UNetConfig]] = {"paper": paper_network, "small": small_network}
RECIPES = {"paper": paper_recipe, "small": small_recipe}


def rate_factor(config: TrainingConfig, step: int, progress: float) -> float:
    """Share of the learning rate to use at `step` (from 0) when `progress` in [0, 1] of the run is over."""
    ramp = min(1.0, (step + 1) / config.warmup) if config.warmup else 1.0
    falls = {"constant": 1.0, "linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}
    return ramp * falls[config.decay]
