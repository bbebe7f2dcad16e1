"""What a user may choose about the other detectors."""

import re
from dataclasses import dataclass
from pathlib import Path

from mdps.runtime.errors import UsageError, require


class PeerSkippedError(UsageError):
    """A detector that cannot run with what is on this machine; the text is the reason its row gives."""


@dataclass(frozen=True)
class PeerOptions:
    """How the detectors are fitted. UsageError for values that mean nothing.

    `size` (H, W) is what pictures are resized to. `backbone` is the feature network of those that take one, with
    weights from the file `backbone_weights`, a package or timm's cache. `minutes` and `steps` end iterative fits
    before their published length; None is no limit. `coreset` is the share of patches PatchCore keeps. `textures`
    (folder of pictures) is what DRAEM pastes; `teacher` (file) and `imagenette` (folder) are what EfficientAD needs.
    `device` is auto, cpu, cuda or cuda:N.
    """

    size: tuple[int, int]
    backbone: str = "efficientnet_lite0"
    backbone_weights: Path | None = None
    minutes: float | None = None
    steps: int | None = None
    seed: int = 0
    device: str = "cpu"
    coreset: float = 0.02
    textures: Path | None = None
    teacher: Path | None = None
    imagenette: Path | None = None

    def __post_init__(self) -> None:
        require(min(self.size) >= 32, f"image size {self.size} is too small for these networks: give at least 32")
        require(self.minutes is None or self.minutes > 0, f"minutes should be above 0, not {self.minutes}")
        require(self.steps is None or self.steps > 0, f"steps should be above 0, not {self.steps}")
        require(0 < self.coreset <= 1, f"coreset should lie above 0 and at most at 1, not {self.coreset}")
        require(
            re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device) is not None,
            f"there is no device {self.device!r}: use auto, cpu, cuda or cuda:N",
        )
        for name, path in (("textures", self.textures), ("imagenette", self.imagenette)):
            require(path is None or path.is_dir(), f"{path} is no folder: give {name} a folder of pictures")
