"""The project's feature weights inside anomalib's detectors, and no download by any of them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import timm
import torch

from mdps.models.backbones import LITE0, load_backbone
from mdps.models.checkpoints.errors import naming
from mdps.models.checkpoints.files import read_file, sha256_of
from mdps.runtime.errors import UsageError

__all__ = ["layer_names", "local_backbone", "read_teacher", "sha256_of", "timm_name"]


def timm_name(backbone: str) -> str:
    """What timm and anomalib call a backbone of ours."""
    return "tf_efficientnet_lite0" if backbone == LITE0 else backbone


def layer_names(backbone: str, stages: Sequence[int]) -> list[str]:
    """timm's names of the layers at strides 2^(k+1), as anomalib wants them; UsageError for a stage it lacks."""
    with torch.device("meta"):
        network: Any = timm.create_model(timm_name(backbone), pretrained=False, features_only=True)
    strides, names = network.feature_info.reduction(), network.feature_info.module_name()
    missing = [stage for stage in stages if 2 ** (stage + 1) not in strides]
    if missing:
        raise UsageError(f"the backbone {backbone} has no stage {missing[0]} (its strides are {strides})")
    return [names[strides.index(2 ** (stage + 1))] for stage in stages]


@contextmanager
def local_backbone(backbone: str, weights: Path | None, stages: Sequence[int]) -> Iterator[list[str]]:
    """While it lasts, timm fills a pretrained backbone from a local file; yields the SHA-256 of the files read.

    Several of anomalib's detectors ask timm for pretrained weights and offer no way to name a file, so timm's entry
    is stood in for. UsageError and CheckpointError as from `load_backbone`.
    """
    create, read = timm.create_model, []

    def from_file(name: str, pretrained: bool = False, **settings: Any) -> Any:
        network: Any = create(name, pretrained=False, **settings)
        if pretrained:
            source = load_backbone(backbone, weights, tuple(stages))
            network.load_state_dict(source.network.state_dict())
            read.append(str(source.weights_sha256))
        return network

    with patch.object(timm, "create_model", from_file):
        yield read


def read_teacher(path: Path) -> Any:
    """The tensors of EfficientAD's teacher; CheckpointError naming the file where it cannot be read."""
    with naming(path):
        return read_file(path)[0]
