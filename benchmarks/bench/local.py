"""What the machine can do at most, measured in the same run: a matrix product; and what the network asks."""

from collections.abc import Callable
from typing import Any

import numpy as np

from mdps.benchmarks.bench.competitor import Outcome
from mdps.benchmarks.bench.spec import SkippedError, Spec
from mdps.benchmarks.bench.timer import Timer, WallTimer, torch_timer
from mdps.runtime.manifest import Manifest


class MatrixRate:
    """One product of two square matrices: torch's, or numpy's where there is no torch (then no FLOPs are counted).

    In float32 without TF32, or with the variant "fp16" in float16.
    """

    def __init__(self, spec: Spec) -> None:
        side = spec.matrix_side
        a, b = (np.random.RandomState(i).standard_normal((side, side)).astype(np.float32) for i in range(2))
        self.facts: dict[str, Any] = {"matrix_flop": 2 * side**3, "matrix_library": "numpy", "forward_flop": None}
        self.timer: Timer = WallTimer()
        self._product: Callable[[], object]
        try:
            import torch
        except ImportError as error:
            if spec.device != "cpu":
                raise SkippedError("only torch is asked for the rate of a card, and it is not installed") from error
            self._product = lambda: a @ b
            return
        torch.set_num_threads(spec.threads)
        kind = torch.float16 if spec.variant == "fp16" else torch.float32
        left, right = (torch.from_numpy(array).to(spec.device, kind) for array in (a, b))
        self._product = lambda: left @ right
        self.timer = torch_timer(spec.device)
        self.facts["matrix_library"] = "torch"
        if spec.bundle:
            self.facts["forward_flop"] = forward_flop(Manifest.read(spec.bundle))
        if spec.device != "cpu":
            self.facts["device_name"] = torch.cuda.get_device_name()

    def run(self) -> Outcome:
        """The product."""
        self._product()
        return Outcome()


def forward_flop(manifest: Manifest) -> int:
    """FLOPs (two a multiply-add) of the bundle's denoiser on one image, counted by torch on tensors without data."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from mdps.models.unet import UNet, UNetConfig

    known = UNetConfig.__dataclass_fields__
    config = UNetConfig.from_json({name: value for name, value in manifest.network.items() if name in known})
    counter: Any = FlopCounterMode(display=False)
    with torch.device("meta"), counter, torch.no_grad():
        UNet(config).eval()(torch.zeros(1, 3, *manifest.preprocessing.network_size), torch.zeros(()))
    return int(counter.get_total_flops())
