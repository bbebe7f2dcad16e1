"""Settings of a training run, and how its images are framed."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Annotated, Any, Literal

from mdps.models.unet_config import UNetConfig
from mdps.runtime.errors import UsageError, require
from mdps.runtime.option import Option, check_ranges
from mdps.runtime.preprocessing import Preprocessing

SIZES = {"paper": 256, "small": 64}
PAPER_CROP = {"mvtec-ad": 224}  # "resize all images to 256 and center crop to 224 for MVTec"; BTAD has no crop


def paper_network(image_size: int = 256, base: int = 64) -> UNetConfig:
    """Return the authors' U-Net (33 M parameters by default): attention where the image is 8, 16, 32 times smaller.

    That is at 32, 16 and 8 pixels of 256, and at 28, 14 and 7 of the paper's crop of 224; four heads.
    """
    return UNetConfig(image_size=image_size, model_channels=base)


def small_network(image_size: int = 64, base: int = 32, mult: tuple[int, ...] = (1, 2, 2, 2)) -> UNetConfig:
    """Return a U-Net for 64 x 64 (1.9 M parameters by default): a residual block a level, attention at the deepest."""
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
    starts; the others from all of them. With `crop`, the side of the network's images, samples are crops of photographs
    at `scale`; else whole ones.
    """

    network: UNetConfig = field(default_factory=paper_network)
    epochs: Annotated[int, Option("Passes over the images.", low=1)] = 2000
    steps: Annotated[int | None, Option("Training steps, instead of epochs.", low=1)] = None
    minutes: Annotated[float | None, Option("End within so many minutes.", low=0, above=True)] = None
    crop: Annotated[int | None, Option("Train on crops of this side, of photographs at --scale.", low=8)] = None
    scale: Annotated[
        float, Option("Of the photographs that crops are cut from; 0.5: half their sides.", low=0, high=1, above=True)
    ] = 1.0
    batch: Annotated[int, Option("Images a step, of all processes together.", low=1)] = 8
    optimizer: Annotated[Literal["adam", "adamw"], Option("What changes the weights.", seldom=True)] = "adam"
    learning_rate: Annotated[float, Option("The largest of the run.", low=0, above=True)] = 1e-4
    weight_decay: Annotated[
        float, Option("Added to the gradient by adam, taken from the weights by adamw.", low=0, seldom=True)
    ] = 5e-2
    decay: Annotated[Literal["constant", "linear", "cosine"], Option("Of the learning rate.", seldom=True)] = "constant"
    warmup: Annotated[int, Option("Steps the rate rises over.", low=0, seldom=True)] = 0
    clip: Annotated[float | None, Option("Largest norm of the gradient.", low=0, above=True, seldom=True)] = None
    ema: Annotated[float, Option("Decay of the weights' average that is kept; 0 keeps the last.", low=0, high=1)] = 0.0
    weighting: Annotated[Literal["uniform", "min-snr"], Option("Of the loss.", seldom=True)] = "uniform"
    low_share: Annotated[float, Option("Share of timesteps drawn below 260, where sampling works.", low=0, high=1)] = (
        0.0
    )
    noise: Annotated[Literal["gaussian", "simplex"], Option("Mixed into images; simplex is AnoDDPM's.")] = "gaussian"
    flip_horizontal: Annotated[bool, Option("Parts may be mirrored left to right.")] = False
    flip_vertical: Annotated[bool, Option("Parts may be mirrored top to bottom.")] = False
    rotate: Annotated[bool, Option("Parts may be turned by quarters.")] = False
    shift: Annotated[int, Option("Parts may be moved by so many pixels, edges mirrored.", low=0)] = 0
    precision: Annotated[Literal["fp32", "bf16", "fp16"], Option("What the network computes in.")] = "fp32"
    compile: Annotated[bool, Option("Compile the network with torch first.", seldom=True)] = False
    seed: Annotated[int, Option("Of all that is drawn.", low=0)] = 0
    log_every: Annotated[int, Option("Steps between lines of the log.", low=1, seldom=True)] = 100
    checkpoint_every: Annotated[int, Option("Steps between checkpoints.", low=1, seldom=True)] = 1000
    checkpoint_minutes: Annotated[
        float, Option("Or minutes, whichever comes first.", low=0, above=True, seldom=True)
    ] = 5.0
    sample_every: Annotated[
        int, Option("Steps between reconstructions to look at; 0: only at the end.", low=0, seldom=True)
    ] = 1000
    samples: int = 4  # reconstructions shown
    snr_limit: float = 5.0  # of min-snr
    low_limit: int = 260

    def __post_init__(self) -> None:
        """Refuse settings that cannot be meant, with a UsageError that names the setting."""
        check_ranges(self)
        require(self.snr_limit > 0, f"snr_limit is {self.snr_limit}; it must be positive")
        require(self.samples >= 0, f"samples is {self.samples}; it must not be negative")
        side = self.network.image_size
        require(
            self.crop in (None, side), f"crop is {self.crop}, and the network sees images of {side}: let both be one"
        )
        require(
            self.crop is not None or self.scale == 1, f"scale is {self.scale:g}, which is for crops: give --crop too"
        )
        require(1 <= self.low_limit <= 1000, f"low_limit is {self.low_limit}; it must lie between 1 and 1000")

    def with_steps(self, images: int | None) -> "TrainingConfig":
        """Return the same run with `steps` a number: ceil(images / batch) an epoch where it was given in epochs.

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
        """Invert `to_json`; an unknown field is a UsageError that names it, an absent one has its default."""
        unknown = set(obj) - {f.name for f in fields(cls)}
        if unknown:
            raise UsageError(f"unknown training setting {sorted(unknown)[0]!r}")
        return cls(**(obj | {"network": UNetConfig.from_json(obj["network"])}))


def paper_recipe(network: UNetConfig | None = None) -> TrainingConfig:
    """Return the paper's recipe and no more: Adam 1e-4, decay 5e-2 added to the gradient, batch 8, 2000 epochs.

    It names no average of the weights, no decay of the rate and no variation of the images, so there are none.
    """
    return TrainingConfig(network=network or paper_network())


def small_recipe(network: UNetConfig | None = None) -> TrainingConfig:
    """Return AdamW 4e-4 decaying to zero, EMA 0.999, 70 % of timesteps below 260: good after a few thousand steps."""
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
    """Return the share of the learning rate to use at `step` (from 0) when `progress` in [0, 1] of the run is over."""
    ramp = min(1.0, (step + 1) / config.warmup) if config.warmup else 1.0
    falls = {"constant": 1.0, "linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}
    return ramp * falls[config.decay]


def framing(
    recipe: str,
    layout: str,
    image_size: int | None,
    crop_size: int | None,
    crops: int | None = None,
    *,
    say: Callable[[str], object],
) -> Preprocessing:
    """Return the preprocessing of `recipe` for images of a data set's `layout`; what is given wins, and 0 is no crop.

    The paper's crop is for its own size of 256; at another none is made unless `crop_size` asks for it. What was
    decided for the user is said. A training on crops of the side `crops` sees these whole. UsageError for a crop larger
    than the image, and for sizes of whole images beside `crops`.
    """
    if crops:
        whole = "which are of whole photographs: leave these out"
        require(image_size is None and crop_size is None, f"--crop is given with --image-size or --crop-size, {whole}")
        return Preprocessing(image_size=(crops, crops))
    size = image_size or SIZES[recipe]
    crop = crop_size or None
    if crop_size is None and recipe == "paper" and layout in PAPER_CROP:
        if size == SIZES["paper"]:
            crop = PAPER_CROP[layout]
            say(f"images are resized to {size} and the centre {crop} is cut, as in the paper (--crop-size 0: no cut)")
        else:
            say(f"no centre crop, as the paper's is for {SIZES['paper']} and these are {size} (--crop-size makes one)")
    if crop is not None and crop > size:
        raise UsageError(f"a crop of {crop} is larger than the images of {size}; choose at most {size}")
    return Preprocessing(image_size=(size, size), crop="input" if crop else "none", crop_size=crop)
