"""A strided convolution and its pullback on every engine of the processor, against torch's autograd."""

from itertools import product
from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor, nn

from mdps.export.graph import WeightStore, write
from mdps.export.tracer import record
from mdps.runtime.engines.interface import open_session

CHANNELS = [(16, 16), (32, 32), (16, 32), (3, 16), (8, 8)]
SHAPES = [(3, 2, 1, 16), (3, 2, 0, 17), (3, 1, 1, 16), (2, 2, 0, 16), (5, 2, 2, 15)]
"""Kernel size, stride, padding, side of the image: odd and even, with and without output padding."""


class ThereAndBack(nn.Module):
    """x -> J^T J x, the two products sharing their weights as the two halves of a step do."""

    def __init__(self, channels: tuple[int, int], kernel: int, stride: int, padding: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.randn(channels[1], channels[0], kernel, kernel, generator=generator)
        self.stride, self.padding, self.kernel = stride, padding, kernel

    def forward(self, x: Tensor) -> tuple[Tensor]:
        y = nn.functional.conv2d(x, self.weight, stride=self.stride, padding=self.padding)
        extra = x.shape[-1] - ((y.shape[-1] - 1) * self.stride + self.kernel - 2 * self.padding)
        back = nn.functional.conv_transpose2d(
            y, self.weight, stride=self.stride, padding=self.padding, output_padding=extra
        )
        return (back,)

    def by_autograd(self, x: Tensor) -> Tensor:
        def there(x: Tensor) -> Tensor:
            return nn.functional.conv2d(x, self.weight, stride=self.stride, padding=self.padding)

        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(there(x), x, there(x).detach())
        return gradient


def written(backend: str, model: onnx.ModelProto, folder: Path) -> Path:
    if backend != "mnn":
        write(model, folder / "g.onnx", WeightStore(folder / "g.weights"))
        return folder / "g.onnx"
    from mdps.export import mnn

    mnn.write(model, folder / "g.mnn")
    return folder / "g.mnn"


@pytest.fixture(params=["onnxruntime", "openvino", "mnn"])
def backend(request: pytest.FixtureRequest) -> str:
    pytest.importorskip({"mnn": "MNN"}.get(request.param, request.param))
    return str(request.param)


def test_a_strided_convolution_and_its_pullback_share_weights(backend: str, tmp_path: Path) -> None:
    wrong = {}
    for index, (channels, shape) in enumerate(product(CHANNELS, SHAPES)):
        *how, side = shape
        module = ThereAndBack(channels, *how).eval()
        x = torch.randn(1, channels[0], side, side, generator=torch.Generator().manual_seed(1))
        (folder := tmp_path / str(index)).mkdir()
        model = record(module, {"x": x}, ["z"], {"x": ("batch",)})
        session = open_session(written(backend, model, folder), threads=1, engine=backend)
        found = torch.from_numpy(session.run({"x": x.numpy()})["z"])
        session.close()
        wanted = module.by_autograd(x)
        error = float((found - wanted).abs().max() / wanted.abs().max())
        if not error < 1e-5:
            wrong[channels, shape] = error
    assert not wrong
