"""A card's work for one batch size: stages of copies and runs over buffers that are allocated once.

A binding has fixed addresses, so what a step reads is copied to it first: x of the step before, its noise, its scalars.
Posterior samples beyond what a plan takes at once go through the same binding in chunks, each through all its steps.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
from numpy.typing import NDArray

from mdps.runtime.device.seam import BoundEngine, Buffer, DeviceEngine, Driver, Stream
from mdps.runtime.errors import BackendError
from mdps.runtime.graphs import SCORE, Graphs
from mdps.runtime.noise import INITIAL, Noise
from mdps.runtime.sampler import alone, noise_root, signal_root, step_scalars
from mdps.runtime.schedule import NoiseSchedule, Step, plan_steps
from mdps.runtime.session import Port
from mdps.runtime.settings import Settings

ALIGNMENT = 256
MASK_SCALARS = ("mask_lambda", "mask_low", "mask_high", "mask_frozen")
_STEP_SCALARS = ("timestep", "alpha_t", "alpha_s", "sigma_t", "guidance_scale")
_SLOT = ALIGNMENT // 4  # floats from one scalar to the next


@dataclass(frozen=True)
class Block:
    """Several arrays one after another in one piece of memory, so that one copy moves them all.

    Offsets are multiples of ALIGNMENT; scalars have one each.
    """

    shapes: Mapping[str, tuple[int, ...]]
    offsets: Mapping[str, int]
    nbytes: int

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]]) -> "Block":
        """The layout of these arrays in this order."""
        offsets, end = {}, 0
        for name, shape in shapes.items():
            offsets[name] = end
            end += -(-4 * prod(shape) // ALIGNMENT) * ALIGNMENT
        return cls(dict(shapes), offsets, end)

    def at(self, address: int) -> dict[str, Buffer]:
        """The arrays of a block of the card that begins there."""
        return {name: Buffer(address + self.offsets[name], shape) for name, shape in self.shapes.items()}

    def views(self, memory: NDArray[np.uint8]) -> dict[str, NDArray[np.float32]]:
        """The arrays of a block of the host."""
        whole = memory.view(np.float32)
        return {
            name: whole[self.offsets[name] // 4 :][: prod(shape)].reshape(shape) for name, shape in self.shapes.items()
        }


@dataclass
class Device:
    """A card, the stream that computes, and what all batch sizes share on it."""

    driver: Driver
    stream: Stream

    def buffer(self, shape: tuple[int, ...]) -> Buffer:
        """New memory."""
        return Buffer(self.driver.allocate(4 * prod(shape)), shape)

    def filled(self, array: NDArray[np.float32]) -> Buffer:
        """New memory that holds the array."""
        buffer = self.buffer(array.shape)
        self.driver.upload(buffer.address, np.ascontiguousarray(array), self.stream)
        self.driver.synchronise(self.stream)  # the array may be gone after this
        return buffer

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Within the card, in the order of what it computes."""
        self.driver.copy(to, source, nbytes, self.stream)


@dataclass(frozen=True)
class Pass:
    """One pass of Algorithm 1 with all it needs beside the images, on the card since loading.

    `noise` is that of each step and `initial` that of the first x_t, with so many rows that any chunk finds its own
    in one piece; `scalars` are those of each step, in the layout of a binding. `root` and `noise_part` make the first
    x_t of an image on the host: root * y + noise_part. `by_samples`: those of the pass before guide it, without a mask.
    """

    engine: DeviceEngine
    steps: tuple[Step, ...]
    noise: tuple[Buffer, ...]
    initial: Buffer | None
    scalars: tuple[Buffer, ...]
    root: np.float32
    noise_part: NDArray[np.float32]
    by_samples: bool

    def begin(self, observations: NDArray[np.float32], into: NDArray[np.float32]) -> None:
        """The first x_t of each sample of images [B, 3, H, W], written as [B * N_s, 3, H, W]."""
        by_image = into.reshape(len(observations), *self.noise_part.shape)
        np.multiply(observations[:, None], self.root, out=by_image)
        np.add(by_image, self.noise_part, out=by_image)


def upload_passes(
    device: Device, engines: Graphs[DeviceEngine], schedule: NoiseSchedule, settings: Settings, noise: Noise, rows: int
) -> tuple[Pass, ...]:
    """The passes of a bundle; no chunk has more than `rows` posterior samples."""
    sampler, zeros, passes = settings.sampler, None, []
    for index, one_pass in enumerate(sampler.passes):
        alpha, steps = plan_steps(schedule, sampler.time_index, one_pass, sampler.eta_ddim)
        engine = engines.step(one_pass.guidance_scale)
        first = noise.draw(index, INITIAL, sampler.samples)
        table = [device.filled(_scalar_table(step, one_pass.guidance_scale)) for step in steps]
        if zeros is None:
            zeros = device.filled(_cyclic(np.zeros_like(first), rows))
        passes.append(
            Pass(
                engine=engine,
                steps=steps,
                noise=tuple(
                    device.filled(_cyclic(noise.draw(index, n, sampler.samples), rows)) if step.sigma_t else zeros
                    for n, step in enumerate(steps)
                ),
                initial=device.filled(_cyclic(first, rows)) if _takes(engine, "mask_noise") else None,
                scalars=tuple(table),
                root=signal_root(alpha),
                noise_part=first * noise_root(alpha),
                by_samples=one_pass.target == "previous",
            )
        )
    return tuple(passes)


def _scalar_table(step: Step, guidance_scale: float) -> NDArray[np.float32]:
    """Return what a step is told, in the layout of a binding."""
    values = step_scalars(step) | {"guidance_scale": np.asarray(guidance_scale, dtype=np.float32)}
    table = np.zeros((len(_STEP_SCALARS), _SLOT), dtype=np.float32)
    table[:, 0] = [values[name] for name in _STEP_SCALARS]
    return table


def _cyclic(noise: NDArray[np.float32], rows: int) -> NDArray[np.float32]:
    """Samples 0, 1, .., 0, 1, ..: `rows` of them in one piece from whichever sample on."""
    return noise[np.arange(rows + len(noise) - 1) % len(noise)]


def _takes(engine: DeviceEngine, name: str) -> bool:
    return any(port.name == name for port in engine.inputs)


@dataclass(frozen=True)
class BoundStep:
    """A step engine bound for one number of posterior samples."""

    buffers: Mapping[str, Buffer]
    scalars: Buffer
    bound: BoundEngine


@dataclass
class Steps:
    """Bindings of the step engines, one for each engine and number of samples, which all batch sizes share."""

    device: Device
    shape: tuple[int, int]
    _bound: dict[tuple[int, int], BoundStep] = field(default_factory=dict)

    def at(self, engine: DeviceEngine, count: int) -> BoundStep:
        """The binding for so many samples."""
        key = (id(engine), count)
        if key not in self._bound:
            self._bound[key] = self._bind(engine, count)
        return self._bound[key]

    def predicted_noise(self, engine: DeviceEngine, noised: NDArray[np.float32], step: Step) -> NDArray[np.float32]:
        """Run one step alone and wait for its `eps`."""
        bound, (driver, stream) = self.at(engine, len(noised)), (self.device.driver, self.device.stream)
        given = {name: array for name, array in alone(noised).items() if name in bound.buffers}
        for name, array in given.items():
            driver.upload(bound.buffers[name].address, np.ascontiguousarray(array), stream)
        table, eps = _scalar_table(step, 0.0), np.empty_like(noised)
        driver.upload(bound.scalars.address, table, stream)
        bound.bound.enqueue(stream)
        driver.download(eps, bound.buffers["eps"].address, stream)
        driver.synchronise(stream)
        return eps

    def _bind(self, engine: DeviceEngine, count: int) -> BoundStep:
        table = self.device.buffer((len(_STEP_SCALARS), _SLOT))
        buffers = {name: Buffer(table.address + ALIGNMENT * i, ()) for i, name in enumerate(_STEP_SCALARS)}
        for port in (*engine.inputs, *engine.outputs):
            if port.shape:
                buffers[port.name] = self.device.buffer((count, port.shape[1] or 1, *self.shape))
        names = {port.name for port in (*engine.inputs, *engine.outputs)}
        bound = engine.bind({name: buffer for name, buffer in buffers.items() if name in names})
        return BoundStep(buffers, table, bound)


@dataclass(frozen=True)
class Stage:
    """Part of the work, under the name its time goes by."""

    name: str
    work: Callable[[], None]


class Program:
    """The work for one number of images, over its own buffers: `stages` in order, between `work` and `results`.

    `work` holds what the host gives: observation, first x_t of each pass, scalars of the mask. `results` holds what it
    takes: samples, map and score of the last pass that ran, map, score and mask of the first one.
    """

    def __init__(
        self, device: Device, engines: Graphs[DeviceEngine], passes: Sequence[Pass], steps: Steps, images: int,
        samples: int, rows: int, ones: Buffer,
    ) -> None:  # fmt: skip
        self._device, self.passes, self._steps = device, passes, steps
        self._samples, self._rows, self._ones = samples, rows, ones
        self.images = images
        self._count, pixels = images * samples, steps.shape
        whole, one = (self._count, 3, *pixels), (images, 1, *pixels)
        starts = {f"x_{index}": whole for index in range(len(passes))}
        self.work = Block.of({"observation": (images, 3, *pixels), **starts, **dict.fromkeys(MASK_SCALARS, ())})
        self.results = Block.of(
            {
                "samples": whole, "map": one, "score": (images,), "first_map": one, "first_score": (images,),
                "mask": one,
            }
        )  # fmt: skip
        self.work_address = device.driver.allocate(self.work.nbytes)
        self.results_address = device.driver.allocate(self.results.nbytes)
        self.given, self.found = self.work.at(self.work_address), self.results.at(self.results_address)
        features = self._bind_features(engines.features)
        self._score_outputs: dict[str, Buffer] = {}
        score = self._bind_score(engines.need(SCORE), features)
        self.stages = self._plan(score)

    def _plan(self, score: BoundEngine) -> tuple[Stage, ...]:
        stages = []
        if self._features is not None:
            stages.append(Stage("score", lambda: self._enqueue(self._features)))
        stages.append(Stage("first_pass", lambda: self._run_pass(0)))
        stages.append(Stage("score", lambda: self._run_score(score, first=True)))
        self.first_stages = len(stages)
        if len(self.passes) > 1:
            stages.append(Stage("masked_pass", lambda: self._run_pass(1)))
            stages.append(Stage("score", lambda: self._run_score(score, first=False)))
        return tuple(stages)

    def _bind_features(self, engine: DeviceEngine | None) -> dict[str, Buffer]:
        self._features: BoundEngine | None = None
        if engine is None:
            return {}
        outputs = {port.name: self._buffer(port) for port in engine.outputs}
        self._features = engine.bind({"image": self.given["observation"], **outputs})
        return outputs

    def _bind_score(self, engine: DeviceEngine, features: Mapping[str, Buffer]) -> BoundEngine:
        samples = self.found["samples"]
        by_image = Buffer(samples.address, (self.images, self._samples, *samples.shape[1:]))
        known = {"posterior_samples": by_image, "observation": self.given["observation"], **features}
        known |= {name: self.given[name] for name in MASK_SCALARS}
        self._score_outputs = {port.name: self._buffer(port) for port in engine.outputs}
        return engine.bind({port.name: known[port.name] for port in engine.inputs} | self._score_outputs)

    def _buffer(self, port: Port) -> Buffer:
        """For an output of a graph that takes images, not samples: only its first axis may be open."""
        if any(length is None for length in port.shape[1:]):
            raise BackendError(f"the output {port.name!r} has the shape {list(port.shape)}, which is not known enough")
        return self._device.buffer((self.images, *(length or 1 for length in port.shape[1:])))

    def _enqueue(self, bound: BoundEngine | None) -> None:
        if bound is not None:
            bound.enqueue(self._device.stream)

    def _run_pass(self, index: int) -> None:
        """All steps of a chunk, then those of the next: what they read of the images is put into place once."""
        one_pass, samples = self.passes[index], self.found["samples"]
        row = samples.nbytes // self._count
        for start in range(0, self._count, self._rows):
            count = min(self._rows, self._count - start)
            step = self._steps.at(one_pass.engine, count)
            x_t, x_s = step.buffers["x_t"], step.buffers["x_s"]
            skipped = start % self._samples * row  # rows of noise before that of this chunk's first sample
            self._device.copy(x_t.address, self.given[f"x_{index}"].address + start * row, x_t.nbytes)
            if one_pass.by_samples:
                self._device.copy(step.buffers["observation"].address, samples.address + start * row, count * row)
            else:
                self._repeat(self.given["observation"], step.buffers["observation"], start)
            if index and not one_pass.by_samples:
                self._repeat(self.found["mask"], step.buffers["mask"], start)
            else:
                self._device.copy(step.buffers["mask"].address, self._ones.address, step.buffers["mask"].nbytes)
            if one_pass.initial is not None:
                self._device.copy(
                    step.buffers["mask_noise"].address, one_pass.initial.address + skipped, count * row
                )  # fmt: skip
            self._run_steps(one_pass, step, skipped)
            self._device.copy(samples.address + start * row, x_s.address, x_s.nbytes)

    def _run_steps(self, one_pass: Pass, step: BoundStep, skipped: int) -> None:
        x_t, x_s, noise = (step.buffers[name] for name in ("x_t", "x_s", "noise"))
        held = None
        for n, source in enumerate(one_pass.noise):
            if n:
                self._device.copy(x_t.address, x_s.address, x_s.nbytes)
            if source is not held:  # steps without noise share one buffer of zeros
                self._device.copy(noise.address, source.address + skipped, noise.nbytes)
                held = source
            self._device.copy(step.scalars.address, one_pass.scalars[n].address, step.scalars.nbytes)
            step.bound.enqueue(self._device.stream)

    def _repeat(self, images: Buffer, samples: Buffer, start: int) -> None:
        """Repeat what belongs to each image for each of its samples, from sample `start` on."""
        row = images.nbytes // self.images
        if self._samples == 1:
            self._device.copy(samples.address, images.address + start * row, samples.nbytes)
            return
        for offset in range(samples.shape[0]):
            image = (start + offset) // self._samples
            self._device.copy(samples.address + offset * row, images.address + image * row, row)

    def _run_score(self, score: BoundEngine, *, first: bool) -> None:
        score.enqueue(self._device.stream)
        wanted = {"map": "anomaly_map", "score": "anomaly_score"}
        if first:
            wanted |= {"first_map": "anomaly_map", "first_score": "anomaly_score", "mask": "mask"}
        for name, output in wanted.items():
            self._device.copy(
                self.found[name].address, self._score_outputs[output].address, self.found[name].nbytes
            )  # fmt: skip
