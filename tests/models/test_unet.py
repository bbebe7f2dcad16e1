"""The U-Net's parts against independent formulas; the whole against public code in test_checkpoints.py."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from mdps.models.unet import (
    AttentionBlock,
    Downsample,
    ResBlock,
    UNet,
    UNetConfig,
    Upsample,
    timestep_embedding,
)

TINY = UNetConfig(image_size=16, model_channels=32, channel_mult=(1, 2), num_res_blocks=1, attention_factors=(2,))
VARIANTS: dict[str, dict[str, Any]] = {
    "biggan": {},
    "scale and shift": {"scale_shift_norm": True},
    "strided": {"resblock_updown": False},
    "pooled": {"resblock_updown": False, "conv_resample": False},
    "asymmetric": {"resblock_updown": False, "asymmetric_padding": True},
    "new attention": {"new_attention_order": True, "num_head_channels": 32},
    "two blocks": {"num_res_blocks": 2, "attention_factors": (1,)},
    "three levels": {"channel_mult": (1, 2, 3), "attention_factors": (2, 4)},
    "fractional": {"channel_mult": (1, 1.5), "norm_groups": 16},
    "one level": {"channel_mult": (1,), "attention_factors": ()},
}


def network(config: UNetConfig, seed: int = 0) -> UNet:
    torch.manual_seed(seed)
    return UNet(config).eval()


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_keeps_the_shape_and_lets_gradients_through(name: str) -> None:
    net = network(replace(TINY, **VARIANTS[name]))
    x = torch.randn(2, 3, 16, 16, requires_grad=True)
    out = net(x, torch.tensor(7.0))
    assert out.shape == x.shape
    (grad,) = torch.autograd.grad(out.square().sum(), x)
    assert torch.isfinite(grad).all()
    assert grad.abs().max() > 0


@pytest.mark.parametrize("name", VARIANTS)
def test_an_image_does_not_depend_on_its_neighbours(name: str) -> None:
    net = network(replace(TINY, **VARIANTS[name]))
    x, t = torch.randn(3, 3, 16, 16), torch.tensor([1.0, 50.0, 999.0])
    with torch.no_grad():
        together = net(x, t)
        alone = torch.cat([net(x[i : i + 1], t[i]) for i in range(3)])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)


def test_sizes_other_than_the_trained_one_and_not_square() -> None:
    assert network(TINY)(torch.zeros(1, 3, 8, 24), torch.tensor(3.0)).shape == (1, 3, 8, 24)


def test_time_changes_the_output() -> None:
    net, x = network(TINY), torch.randn(1, 3, 16, 16)
    assert (net(x, torch.tensor(1.0)) - net(x, torch.tensor(500.0))).abs().max() > 1e-3


@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_embedding_is_cos_then_sin(shift: float) -> None:
    row = timestep_embedding(torch.tensor(180.0), 8, shift)[0].tolist()
    frequencies = [10000 ** (-k / (4 - shift)) for k in range(4)]
    expected = [math.cos(180 * f) for f in frequencies] + [math.sin(180 * f) for f in frequencies]
    assert row == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("new_order", [False, True])
def test_attention_is_scaled_dot_product_attention(new_order: bool) -> None:
    config = replace(TINY, num_heads=4, new_attention_order=new_order)
    torch.manual_seed(0)
    block, x = AttentionBlock(config, 64), torch.randn(2, 64, 4, 6)
    qkv = block.qkv(block.norm(x.flatten(2)))
    # Legacy: the channels of one head are q, k and v of that head; new: all of q, then all of k, then all of v.
    shape = (2, 3, 4, 16, 24) if new_order else (2, 4, 3, 16, 24)
    q, k, v = qkv.reshape(shape).transpose(3, 4).unbind(1 if new_order else 2)
    attended = F.scaled_dot_product_attention(q, k, v).transpose(2, 3).reshape(2, 64, 24)
    expected = x + block.proj_out(attended).reshape(x.shape)
    torch.testing.assert_close(block(x), expected, atol=1e-5, rtol=1e-5)


def test_head_count_matters_and_follows_from_head_width() -> None:
    assert TINY.heads(64) == 4
    assert replace(TINY, num_head_channels=32).heads(64) == 2
    x, t = torch.randn(1, 3, 16, 16), torch.tensor(3.0)
    outs = [network(replace(TINY, num_heads=heads))(x, t) for heads in (1, 4)]
    assert (outs[0] - outs[1]).abs().max() > 1e-4


@pytest.mark.parametrize("scale_shift", [False, True])
def test_residual_block_by_hand(scale_shift: bool) -> None:
    torch.manual_seed(0)
    block = ResBlock(replace(TINY, scale_shift_norm=scale_shift), 32, 64)
    x, emb = torch.randn(2, 32, 5, 5), torch.randn(2, 128)
    h = block.in_layers[2](F.silu(F.group_norm(x, 32, block.in_layers[0].weight, block.in_layers[0].bias)))
    time = block.emb_layers[1](F.silu(emb))[:, :, None, None]
    norm = block.out_layers[0]
    if scale_shift:
        scale, shift = time[:, :64], time[:, 64:]
        h = F.group_norm(h, 32, norm.weight, norm.bias) * (1 + scale) + shift
    else:
        h = F.group_norm(h + time, 32, norm.weight, norm.bias)
    expected = block.skip_connection(x) + block.out_layers[3](F.silu(h))
    torch.testing.assert_close(block(x, emb), expected)


def test_resampling() -> None:
    x = torch.arange(16.0).reshape(1, 1, 4, 4)
    assert Downsample(1, conv=False)(x).flatten().tolist() == [2.5, 4.5, 10.5, 12.5]
    assert torch.equal(Upsample(1, conv=False)(x), x.repeat_interleave(2, 2).repeat_interleave(2, 3))
    centre = torch.zeros(1, 1, 3, 3)
    centre[..., 1, 1] = 1
    for asymmetric, picked in ((False, x[..., ::2, ::2]), (True, x[..., 1::2, 1::2])):
        down = Downsample(1, conv=True, asymmetric=asymmetric)
        down.load_state_dict({"op.weight": centre, "op.bias": torch.zeros(1)})
        assert torch.equal(down(x), picked)


def test_keys_are_those_of_guided_diffusion() -> None:
    keys = set(network(TINY).state_dict())
    for key in (
        "time_embed.2.weight",
        "input_blocks.0.0.weight",
        "input_blocks.2.0.in_layers.2.weight",
        "input_blocks.3.1.qkv.weight",
        "middle_block.1.proj_out.bias",
        "output_blocks.1.2.out_layers.3.weight",
        "out.2.weight",
    ):
        assert key in keys


@pytest.mark.parametrize("name", VARIANTS)
def test_config_survives_json(name: str) -> None:
    config = replace(TINY, **VARIANTS[name])
    assert UNetConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


@pytest.mark.parametrize(("obj", "word"), [({"image_size": 16, "colour": 1}, "colour"), ({}, "image_size")])
def test_config_names_the_wrong_field(obj: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        UNetConfig.from_json(obj)
