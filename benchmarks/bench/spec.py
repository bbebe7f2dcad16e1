"""What one process is to time, as it travels to that process."""

from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

Kind = Literal["ours", "method", "file", "checked", "torch", "peer", "rate"]


class SkippedError(Exception):
    """A competitor that cannot run here; the text is the reason its row gives."""


@dataclass(frozen=True)
class Spec:
    """One competitor. `variant` is an engine, a way of running torch, a peer's name, or the one file's path.

    The rest is the same for all. Another method on our runtime has a `bundle` of its own, and so has ours at another
    image size.

    On the device "cuda" the process sees `card` (a UUID) and no other, or all where it is None.

    `samples` (N_s) and `batch` are those of this row; `bank_images` good images make a peer's memory, taken from the
    folder `good` or made up. What is "checked" is ours, beside the oracle's arrays in the file `reference` first.
    """

    name: str
    kind: Kind
    variant: str
    bundle: str
    threads: int
    device: str = "cpu"
    card: str | None = None
    batch: int = 1
    samples: int | None = None
    ckpt: str | None = None
    backbone_weights: str | None = None
    good: str | None = None
    bank_images: int = 200
    matrix_side: int = 2048
    reference: str | None = None
    max_batch: int = 8

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, obj: dict[str, Any]) -> Self:
        """Inverse of `to_json`."""
        return cls(**obj)
