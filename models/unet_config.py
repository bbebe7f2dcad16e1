"""The structure of a U-Net; without torch, so that options and manifests can speak of it."""

from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class UNetConfig:
    """The structure of a U-Net. `attention_factors` are downsampling factors (image size / attention resolution)."""

    image_size: int
    in_channels: int = 3
    out_channels: int = 3
    model_channels: int = 64
    channel_mult: tuple[float, ...] = (1, 1, 2, 2, 4, 4)
    num_res_blocks: int = 2
    attention_factors: tuple[int, ...] = (8, 16, 32)
    num_heads: int = 4
    num_head_channels: int | None = None  # if given, heads = channels / num_head_channels
    new_attention_order: bool = False
    scale_shift_norm: bool = False
    resblock_updown: bool = True  # BigGAN residual blocks change the resolution
    conv_resample: bool = True  # else plain average pooling and nearest upsampling
    norm_groups: int = 32
    norm_eps: float = 1e-5
    frequency_shift: float = 0.0  # time frequencies are exp(-ln 10000 k / (half - shift))
    asymmetric_padding: bool = False  # strided convolutions pad only right and bottom (diffusers' DDPM networks)
    dropout: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {
            "channel_mult": list(self.channel_mult),
            "attention_factors": list(self.attention_factors),
        }

    @classmethod
    def from_json(cls, obj: dict[str, Any]) -> "UNetConfig":
        """Invert `to_json`; an unknown or missing field is a ValueError that names it."""
        unknown = set(obj) - {f.name for f in fields(cls)}
        if unknown:
            raise ValueError(f"unknown network field {sorted(unknown)[0]!r}")
        if "image_size" not in obj:
            raise ValueError("the network description has no image_size")
        tuples: dict[str, Any] = {k: tuple(obj[k]) for k in ("channel_mult", "attention_factors") if k in obj}
        return cls(**(obj | tuples))

    def width(self, level: int) -> int:
        """Return the channels of a level."""
        return int(self.channel_mult[level] * self.model_channels)

    def heads(self, channels: int) -> int:
        """Return the attention heads of a block with that many channels."""
        return self.num_heads if self.num_head_channels is None else channels // self.num_head_channels
