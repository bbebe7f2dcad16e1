"""Competitors without torch: our runtime, the bundle as one file in plain ONNX Runtime, and a matrix product."""

from collections.abc import Callable
from typing import Any

import numpy as np

from mdps.benchmarks.bench import Outcome, SkippedError, Spec, Timer, WallTimer, observation, torch_timer
from mdps.runtime.loading import load
from mdps.runtime.manifest import Manifest
from mdps.runtime.preprocessing import to_uint8


class Ours:
    """A loaded bundle. On a device too its calls return when the result is in the host's memory: a wall clock does."""

    def __init__(self, spec: Spec) -> None:
        self.timer: Timer = WallTimer()
        self.detector = load(
            spec.bundle, engine=spec.variant, threads=spec.threads, samples=spec.samples, max_batch=spec.max_batch,
            calibrated=False, warm_up=False, tuned=False,
        )  # fmt: skip
        size = self.detector.preprocessing.network_size
        self._observations = np.stack([observation(size, index) for index in range(spec.batch)])
        engines = sorted(set(self.detector.provenance["engines"].values()))  # type: ignore[attr-defined]
        self.facts: dict[str, Any] = {"note": ", ".join(engines)}

    def run(self) -> Outcome:
        """All passes and the scoring; a frozen mask range is taken as (0, 1), as by every competitor."""
        found = self.detector.inspect(self._observations, mask_range=(0.0, 1.0))
        passes = found.times["first_pass"] + found.times["masked_pass"]
        return Outcome(float(found.anomaly_score[0]), passes)


class OneFile:
    """The file `spec.variant`, with the engine's own defaults but for the threads.

    It is given the picture that the others see as a photograph of that size, and resizes it too. Its score is not
    compared: rounding to 8 bits changes it. That the file judges as the bundle does was proved when it was written.
    """

    def __init__(self, spec: Spec) -> None:
        import onnxruntime

        self.timer: Timer = WallTimer()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = spec.threads
        self._session = onnxruntime.InferenceSession(spec.variant, options, ["CPUExecutionProvider"])
        size = Manifest.read(spec.bundle, verify=False).preprocessing.network_size
        self._feeds = {"image": to_uint8(observation(size))}
        self.facts: dict[str, Any] = {"note": "detector.onnx in plain ONNX Runtime, its defaults"}

    def run(self) -> Outcome:
        """A photograph to map, score and verdict."""
        self._session.run(None, self._feeds)
        return Outcome()


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
