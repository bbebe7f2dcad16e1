"""Fitted modules as the runtime will run them, one image after another: their results, and their time."""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mdps.export.graph import WeightStore, write
from mdps.export.tracer import recorded
from mdps.runtime.engines import DEFAULT
from mdps.runtime.engines.interface import open_session

Array = NDArray[np.float32]
UNTIMED = 1  # images, in which an engine makes itself ready


@dataclass(frozen=True)
class Machine:
    """An engine that reads ONNX, and how many threads of it compute."""

    engine: str = DEFAULT
    threads: int | None = None

    def run(self, module: nn.Module, *sets: Sequence[Array]) -> "Results":
        """Return what the module makes of sets of images, each the arrays of its inputs, [n, ...]; one at least."""
        names = [f"input_{index}" for index in range(len(sets[0]))]
        with tempfile.TemporaryDirectory(prefix="mdps-tune-") as folder:
            file = _recorded(module, dict(zip(names, sets[0], strict=True)), Path(folder))
            session = open_session(file, self.engine, self.threads)
            try:
                found, times = [], []
                for arrays in sets:
                    rows = []
                    for index in range(len(arrays[0])):
                        feeds = {name: array[index : index + 1] for name, array in zip(names, arrays, strict=True)}
                        start = time.perf_counter()
                        made = session.run(feeds)
                        times.append(1000 * (time.perf_counter() - start))
                        rows.append([made[name].copy() for name in session.outputs])
                    found.append([np.concatenate(output) for output in zip(*rows, strict=True)])
            finally:
                session.close()
        return Results(found, median(times[UNTIMED:] or times))


@dataclass(frozen=True)
class Results:
    """Of each set of images the outputs [n, ...] of the module, and the median of its time an image in ms."""

    sets: list[list[Array]]
    ms: float


def _recorded(module: nn.Module, inputs: dict[str, Array], folder: Path) -> Path:
    given = {name: torch.from_numpy(np.concatenate([array[:1], array[-1:]])) for name, array in inputs.items()}
    wrapped = Outputs(module).eval()
    with torch.no_grad():
        count = len(wrapped(*given.values()))
    axes = dict.fromkeys(given, ("batch",))
    outputs = [f"output_{index}" for index in range(count)]
    model = recorded(wrapped, given, outputs, axes, lambda _: None)
    write(model, folder / "module.onnx", WeightStore(folder / "module.weights"))
    return folder / "module.onnx"


class Outputs(nn.Module):
    """A module whose outputs are a tuple, also where they are one tensor."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        found = self.module(*inputs)
        return (found,) if isinstance(found, Tensor) else tuple(found)
