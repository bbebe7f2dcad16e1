"""How many operations torch itself performs for a guided step: what the lean graph is compared with."""

from collections import Counter

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

from mdps.models.oracle import Oracle, posterior_sampling
from mdps.models.unet import UNet

VIEWS = ("alias", "detach", "getitem", "lift_fresh_copy")
"""Operations that a trace notes and no engine would compute."""


def autograd_operations(network: UNet, oracle: Oracle, size: tuple[int, int]) -> dict[str, int]:
    """Count core ATen operations of one guided step with the gradient by autograd, by kind, most frequent first.

    The step is the oracle's, on one image of `size` (H, W), traced without computing anything; a network that predicts
    v or x0 is counted as if it predicted eps. These are what torch's exporter would turn into nodes, one or more each.
    """
    image, mask = torch.empty(1, 3, *size), torch.ones(1, 1, *size)

    def step(y: Tensor, m: Tensor, first: Tensor, noise: Tensor) -> Tensor:
        states = posterior_sampling(lambda x, t: network(x, t)[:, :3], y, m, first, [noise], oracle)
        return [next(states), next(states)][-1]

    tracer = make_fx(step, dict(core_aten_decompositions()), tracing_mode="fake", _allow_non_fake_inputs=True)
    names = Counter(_name(node) for node in tracer(image, mask, image, image).graph.nodes if node.op == "call_function")
    return {name: count for name, count in names.most_common() if name not in VIEWS}


def _name(node: Node) -> str:
    packet = getattr(node.target, "overloadpacket", node.target)
    return str(getattr(packet, "__name__", packet))
