"""The U-Net's forward pass and vector-Jacobian product, written as ordinary forward operations.

`linearize(network, x, timestep)` returns the output and a pullback g -> J^T g (J = d output / d x). Both are plain
tensor arithmetic, so recording the two gives a graph without autograd: its batch is dynamic, both halves share what
the form of the norms lets them (`norms.py`), and no weight gradient is computed. Each rule is tested against autograd.

The convolutions' type is the blocks' type: with half-precision ones (`precision.in_precision`) activations and
gradients between them are half too, while norms, softmax and the time embedding compute in float32.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mdps.export.norms import Grouped, Linear, Norm, NormForm, Pullback
from mdps.models.unet import AttentionBlock, Downsample, ResBlock, TimestepSequential, UNet, Upsample, split_heads

GROUPED = Grouped()


def prepare_input_gradients(network: nn.Module, subpixel: bool = False) -> nn.Module:
    """Store beside each stride-1 convolution the weight of its input gradient: in and out swapped, flipped.

    With `subpixel` also beside those of stride 2, whose gradient then needs no transposed convolution.
    """
    for module in network.modules():
        if isinstance(module, nn.Conv2d) and module.stride == (1, 1):
            flipped = module.weight.detach().transpose(0, 1).flip(2, 3).contiguous()
            module.register_buffer("input_gradient_weight", flipped, persistent=False)
        elif isinstance(module, nn.Conv2d) and subpixel:
            module.register_buffer("input_gradient_weight", _subpixel(module.weight.detach()), persistent=False)
    return network


def _subpixel(weight: Tensor) -> Tensor:
    """Turn [O, C, 3, 3] of stride 2 to [4 C, O, 2, 2]: a filter for each of the four kinds of pixels of the stride.

    Along one axis, pixel 2 q of the padded input was seen by tap 0 of output q and tap 2 of q - 1, pixel 2 q + 1 by
    tap 1 of q.
    """
    taps = weight.new_zeros(2, 2, 3)  # kind of pixel, q - 1 or q, tap
    taps[0, 0, 2] = taps[0, 1, 0] = taps[1, 1, 1] = 1
    filters = torch.einsum("hax,wby,ocxy->chwoab", taps.float(), taps.float(), weight.float())
    return filters.reshape(-1, weight.shape[0], 2, 2).to(weight.dtype)


def block_type(network: UNet) -> torch.dtype:
    """Return the type that the convolutions compute in, and so the activations between them."""
    return network.out[2].get_parameter("weight").dtype


def linearize(network: UNet, x: Tensor, timestep: Tensor, norms: NormForm = GROUPED) -> Linear:
    """Return (output, pullback) at x [B, C, H, W], timestep []. The network went through `prepare_input_gradients`.

    x, the output and both ends of the pullback are float32, whatever the blocks compute in. A pullback that is not
    called costs nothing in a recorded graph.
    """
    emb = network.embed(timestep)
    x = x.to(block_type(network))
    encoder: list[Pullback] = []
    skips: list[Tensor] = []
    for block in network.input_blocks:
        x, pullback = _sequential(norms, block, x, emb)
        encoder.append(pullback)
        skips.append(x)
    x, middle = _sequential(norms, network.middle_block, x, emb)
    decoder: list[tuple[Pullback, int]] = []
    for block in network.output_blocks:
        channels = x.shape[1]
        x, pullback = _sequential(norms, block, torch.cat([x, skips.pop()], dim=1), emb)
        decoder.append((pullback, channels))
    x, norm = _norm(norms.silu, network.out[0], x)
    x, conv = _conv(network.out[2], x)

    def pull(g: Tensor) -> Tensor:
        g = norm(conv(g.to(x.dtype)))
        skip_gradients: list[Tensor] = []
        for pullback, channels in reversed(decoder):
            joint = pullback(g)
            g, skip = torch.split(joint, [channels, joint.shape[1] - channels], dim=1)
            skip_gradients.append(skip)
        g = middle(g)
        for pullback in reversed(encoder):
            g = pullback(g + skip_gradients.pop())
        return g.float()

    return x.float(), pull


def _sequential(form: NormForm, block: nn.Module, x: Tensor, emb: Tensor) -> Linear:
    assert isinstance(block, TimestepSequential)
    pullbacks: list[Pullback] = []
    for layer in block:
        x, pullback = _layer(form, layer, x, emb)
        pullbacks.append(pullback)

    def pull(g: Tensor) -> Tensor:
        for pullback in reversed(pullbacks):
            g = pullback(g)
        return g

    return x, pull


def _layer(form: NormForm, layer: nn.Module, x: Tensor, emb: Tensor) -> Linear:
    if isinstance(layer, ResBlock):
        return _res_block(form, layer, x, emb)
    if isinstance(layer, AttentionBlock):
        return _attention(form, layer, x)
    if isinstance(layer, Downsample):
        return _downsample(layer, x)
    if isinstance(layer, Upsample):
        return _upsample(layer, x)
    if isinstance(layer, nn.Conv2d):
        return _conv(layer, x)
    raise TypeError(f"no gradient rule for {type(layer).__name__}")


def _res_block(form: NormForm, block: ResBlock, x: Tensor, emb: Tensor) -> Linear:
    h, in_norm = _norm(form.silu, block.in_layers[0], x)
    skip, skip_resample = _resample(block.resample, x)
    h, h_resample = _resample(block.resample, h)
    h, in_conv = _conv(block.in_layers[2], h)
    time = block.emb_layers(emb)[:, :, None, None]  # float32
    if block.scale_shift_norm:
        scale, shift = time.chunk(2, dim=1)
        h, out_norm = _norm(form.silu, block.out_layers[0], h, (1 + scale, shift))
    else:
        h, out_norm = _norm(partial(form.silu, shift=time), block.out_layers[0], h)
    h, out_conv = _conv(block.out_layers[3], h)
    skip, skip_conv = _conv(block.skip_connection, skip)

    def pull(g: Tensor) -> Tensor:
        main = in_norm(h_resample(in_conv(out_norm(out_conv(g)))))
        return main + skip_resample(skip_conv(g))

    return skip + h, pull


def _channels(vector: Tensor | None, x: Tensor) -> Tensor:
    """Make [C] broadcastable over [B, C, ...]."""
    assert vector is not None
    return vector.reshape(-1, *[1] * (x.dim() - 2))


def _norm(form: Norm, norm: nn.Module, x: Tensor, time: tuple[Tensor, Tensor] | None = None) -> Linear:
    """Apply group norm as `form` writes it; `time` is (factor, shift), both [1, C, 1, 1], applied to its result.

    In float32, its parameters too: squares of half-precision values overflow, and their mean loses its last digits.
    """
    assert isinstance(norm, nn.GroupNorm)
    gamma, beta = _channels(norm.weight, x), _channels(norm.bias, x)
    if time is not None:
        gamma, beta = gamma * time[0], beta * time[0] + time[1]
    y, pullback = form(norm, x.float(), gamma, beta)
    return y.to(x.dtype), lambda g: pullback(g.float()).to(x.dtype)


def _conv(conv: nn.Module, x: Tensor) -> Linear:
    if isinstance(conv, nn.Identity):
        return x, lambda g: g
    assert isinstance(conv, nn.Conv2d)
    if conv.stride == (1, 1):
        padding = conv.kernel_size[0] - 1 - int(conv.padding[0])
        return conv(x), lambda g: F.conv2d(g, conv.get_buffer("input_gradient_weight"), padding=padding)
    if hasattr(conv, "input_gradient_weight"):
        return conv(x), lambda g: _spread(conv, g, x.shape)
    # The output padding restores the even input size that the stride rounded away.
    padding = int(conv.padding[0])
    extra = x.shape[-1] - ((x.shape[-1] + 2 * padding - 3) // 2 * 2 + 3 - 2 * padding)
    return conv(x), lambda g: F.conv_transpose2d(g, conv.weight, stride=2, padding=padding, output_padding=extra)


def _spread(conv: nn.Conv2d, g: Tensor, shape: torch.Size) -> Tensor:
    """Return the gradient at the input, of this shape, of a convolution with stride 2; see `_subpixel`."""
    pixels = F.pixel_shuffle(F.conv2d(g, conv.get_buffer("input_gradient_weight"), padding=1), 2)
    first = int(conv.padding[0])
    return pixels[:, :, first : first + shape[2], first : first + shape[3]]


def _resample(layer: nn.Module | None, x: Tensor) -> Linear:
    if isinstance(layer, Downsample):
        return _downsample(layer, x)
    if isinstance(layer, Upsample):
        return _upsample(layer, x)
    return x, lambda g: g


def _downsample(layer: Downsample, x: Tensor) -> Linear:
    if layer.op is None:
        return F.avg_pool2d(x, 2), lambda g: F.interpolate(g * 0.25, scale_factor=2.0, mode="nearest")
    if not layer.asymmetric:
        return _conv(layer.op, x)
    y, pullback = _conv(layer.op, F.pad(x, (0, 1, 0, 1)))
    return y, lambda g: pullback(g)[:, :, :-1, :-1]


def _upsample(layer: Upsample, x: Tensor) -> Linear:
    y = F.interpolate(x, scale_factor=2.0, mode="nearest")
    conv_pullback: Pullback = lambda g: g  # noqa: E731
    if layer.conv is not None:
        y, conv_pullback = _conv(layer.conv, y)
    return y, lambda g: F.avg_pool2d(conv_pullback(g), 2) * 4.0


def _attention(form: NormForm, block: AttentionBlock, x: Tensor) -> Linear:
    batch, channels, height, width = x.shape
    flat = x.reshape(batch, channels, height * width)
    normed, norm_pullback = _norm(form, block.norm, flat)
    qkv_weight, proj_weight = block.qkv.weight[:, :, 0], block.proj_out.weight[:, :, 0]
    qkv = qkv_weight @ normed + _channels(block.qkv.bias, flat)
    q, k, v = split_heads(qkv, block.heads, block.new_order)
    scale = (channels // block.heads) ** -0.5
    q = q * scale  # before the product, whose sums could overflow in half precision
    parts = [_attend(*heads) for heads in zip(*(_heads(form, tensor) for tensor in (q, k, v)), strict=True)]
    attended = _joined([part for part, _ in parts])
    out = flat + proj_weight @ attended.reshape(flat.shape) + _channels(block.proj_out.bias, flat)

    def pull(g: Tensor) -> Tensor:
        flat_g = g.reshape(flat.shape)
        g_attended = (proj_weight.t() @ flat_g).reshape(attended.shape)
        pieces = _heads(form, g_attended)
        pulled = [pullback(piece) for (_, pullback), piece in zip(parts, pieces, strict=True)]
        g_q, g_k, g_v = (_joined(tensors) for tensors in zip(*pulled, strict=True))
        g_qkv = _join_heads(g_q * scale, g_k, g_v, block.new_order)
        return (flat_g + norm_pullback(qkv_weight.t() @ g_qkv)).reshape(g.shape)

    return out.reshape(x.shape), pull


def _attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]]:
    """Return softmax_s(q_t k_s) v_s, [B, heads, C / heads, L] as q, k, v, and a pullback to all three."""
    weights = torch.softmax((q.transpose(-1, -2) @ k).float(), dim=-1).to(q.dtype)
    # The weights, the largest matrix of the block, are never the factor that an engine has to turn round or pack.
    attended = (weights @ v.transpose(-1, -2)).transpose(-1, -2)

    def pull(g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # The softmax rule needs sum_s dW[t, s] W[t, s], which equals sum_c g[c, t] attended[c, t].
        inner = (g.float() * attended.float()).sum(dim=-2).unsqueeze(-1)
        g_logits = (weights.float() * ((g.transpose(-1, -2) @ v).float() - inner)).to(q.dtype)
        return (g_logits @ k.transpose(-1, -2)).transpose(-1, -2), q @ g_logits, g @ weights

    return attended, pull


def _heads(form: NormForm, tensor: Tensor) -> Sequence[Tensor]:
    """Return the heads of [B, heads, C / heads, L] one by one where the engine wants them apart, else all as one."""
    return torch.split(tensor, 1, dim=1) if form.heads_apart else (tensor,)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Join what `_heads` gave."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1)


def _join_heads(q: Tensor, k: Tensor, v: Tensor, new_order: bool) -> Tensor:
    """Join what `split_heads` gave."""
    batch, _, _, length = q.shape
    if new_order:
        return torch.cat([part.reshape(batch, -1, length) for part in (q, k, v)], dim=1)
    return torch.cat([q, k, v], dim=2).reshape(batch, -1, length)
