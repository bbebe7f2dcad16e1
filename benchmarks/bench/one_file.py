"""A bundle as one ONNX file, in plain ONNX Runtime, as a program without mdps runs it."""

from typing import Any

import onnxruntime

from mdps.benchmarks.bench.competitor import Outcome
from mdps.benchmarks.bench.picture import observation
from mdps.benchmarks.bench.spec import Spec
from mdps.benchmarks.bench.timer import Timer, WallTimer
from mdps.runtime.manifest import Manifest
from mdps.runtime.preprocessing import to_uint8


class OneFile:
    """The file `spec.variant`, with the engine's own defaults but for the threads.

    It is given the picture that the others see as a photograph of that size, and resizes it too. Its score is not
    compared: rounding to 8 bits changes it. That the file judges as the bundle does was proved when it was written.
    """

    def __init__(self, spec: Spec) -> None:
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
