"""Both passes and the scoring on a card: the host gives observations and takes maps, scores, masks and samples."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mdps.runtime.bundle import Bundle, LoadOptions
from mdps.runtime.device.program import Device, Program, Steps, upload_passes
from mdps.runtime.device.seam import DeviceEngine, Driver, Event, Graph, Stream
from mdps.runtime.errors import BackendError, BackendWarning, UsageError
from mdps.runtime.graphs import SCORE, Graphs
from mdps.runtime.noise import Noise, NoiseBank
from mdps.runtime.pipeline import Array, Inspection, check_finite, check_range, chunks, joined, mask_scalars
from mdps.runtime.preprocessing import Views, images_of
from mdps.runtime.schedule import NoiseSchedule, Step
from mdps.runtime.settings import Settings

ELSEWHERE = "use the engine onnxruntime, or onnxruntime-cuda"


def check_settings(settings: Settings) -> None:
    """Raise UsageError for what the loop on a card cannot do, with the setting and where it can be done."""
    for name, one_pass in zip(("first_pass", "masked_pass"), settings.sampler.passes, strict=False):
        if one_pass.start != "observation":
            raise UsageError(f"{name}.start {one_pass.start!r} needs arithmetic between the passes: {ELSEWHERE}")
        if one_pass.resamples != 1:
            raise UsageError(f"{name}.resamples {one_pass.resamples} goes back to noise between steps: {ELSEWHERE}")
    if settings.sampler.mask_rule == "inpaint" and settings.sampler.masked_pass is not None:
        raise UsageError(f"mask_rule 'inpaint' puts the image in after the last step: {ELSEWHERE}")


def open_loop(
    driver: Driver, bundle: Bundle, options: LoadOptions, open_one: Callable[[str, Stream], DeviceEngine]
) -> "DevicePipeline":
    """Open the loop of a bundle on a card, each graph that its settings need by `open_one`, called with its role.

    The driver is closed with the pipeline, or here where this fails. Raises as `DevicePipeline` and `open_one`.
    """
    settings, manifest = bundle.settings, bundle.manifest
    engines: dict[str, DeviceEngine] = {}
    try:
        check_settings(settings)
        with driver.current():
            stream = driver.stream()
            for role in settings.roles:
                engines[role] = open_one(role, stream)
        noise = NoiseBank.of(settings.sampler, manifest.preprocessing.network_size)
        graphs = Graphs.of(engines)
        return DevicePipeline(driver, stream, graphs, manifest.schedule, settings, noise, options.max_batch)
    except BaseException:
        with suppress(BackendError), driver.current():
            for one in engines.values():
                one.close()
        driver.close()
        raise


class DevicePipeline:
    """`Inspector` of a card. A number of images together is prepared once, then replayed from recorded graphs.

    `stream` is the one the engines were made for. The arrays of the next images go up while the card computes; what it
    found comes down in one copy. `close` closes engines and driver. Called by one thread at a time, whichever it is.
    Raises UsageError for settings that `check_settings` refuses, BackendError where the engines do not fit.
    """

    def __init__(
        self,
        driver: Driver,
        stream: Stream,
        engines: Graphs[DeviceEngine],
        schedule: NoiseSchedule,
        settings: Settings,
        noise: Noise,
        max_batch: int = 8,
    ) -> None:
        check_settings(settings)
        self.settings, self._driver, self._engines_on_card = settings, driver, engines
        self._device = Device(driver, stream)
        self._samples = settings.sampler.samples
        limits = _Limits.of(engines, self._samples, max_batch)
        self._at_once, self._rows = limits.images, limits.rows
        self._programs: dict[int, _Loaded] = {}
        self._closed = False
        with driver.current():
            self._uploads = driver.stream()
            self._passes = upload_passes(self._device, engines, schedule, settings, noise, self._rows)
            self._ones = self._device.filled(np.ones((self._rows, 1, *limits.size), dtype=np.float32))
        self._steps = Steps(self._device, limits.size)

    @property
    def on_card(self) -> bool:
        return True

    @property
    def engines(self) -> dict[str, str]:
        return {role: engine.provider for role, engine in self._engines_on_card.roles.items()}

    def inspect(
        self, observations: Views, mask_range: tuple[float, float] | None, exit_limit: float | None = None
    ) -> Inspection:
        """Inspect; of images computed together all go through the masked pass, or none."""
        check_range(self.settings, mask_range)
        found = joined(self._each(images_of(observations), mask_range, exit_limit, only_first=False))
        check_finite(found.anomaly_map, found.anomaly_score)
        return found

    def first_maps(self, observations: Views) -> Array:
        found = joined(self._each(images_of(observations), (0.0, 1.0), None, only_first=True))
        check_finite(found.first_map, found.first_score)
        return found.first_map

    def predicted_noise(self, noised: Array, step: Step) -> Array:
        engine = self._engines_on_card.step(self.settings.sampler.first_pass.guidance_scale)
        with self._driver.current():
            parts = [self._steps.predicted_noise(engine, part, step) for part in chunks(noised, self._rows)]
        return np.concatenate(parts)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with self._driver.current():
            with suppress(BackendError):  # a card that fell out still has to be let go
                self._driver.synchronise(self._device.stream)
            for engine in self._engines_on_card.roles.values():
                engine.close()
        self._programs.clear()
        self._driver.close()

    def _each(
        self, observations: Array, mask_range: tuple[float, float] | None, exit_limit: float | None, *, only_first: bool
    ) -> list[Inspection]:
        """Of each part of the images, in order: the next one goes up and starts before what was found comes back."""
        if self._closed:
            raise BackendError("this detector was closed: load the bundle again")
        with self._driver.current():
            parts, scalars = chunks(observations, self._at_once), mask_scalars(self.settings.mask, mask_range)
            found: list[Inspection] = []
            before: _Run | None = None
            run = self._staged(parts[0], scalars)
            for index in range(len(parts)):
                run.start(stop_after_first=only_first or exit_limit is not None)
                following = self._staged(parts[index + 1], scalars) if index + 1 < len(parts) else None
                if not only_first:
                    run.go_on(exit_limit)
                run.take()
                if before is not None:
                    found.append(before.result())
                before = run
                if following is not None:
                    run = following
            return [*found, run.result()]

    def _staged(self, observations: Array, scalars: dict[str, float]) -> "_Run":
        loaded = self._programs.get(len(observations))
        if loaded is None:
            loaded = self._programs[len(observations)] = self._load(len(observations))
        return loaded.stage(observations, scalars)

    def _load(self, images: int) -> "_Loaded":
        """Allocates and binds for so many images, runs all once, and records it where every engine can be."""
        program = Program(
            self._device, self._engines_on_card, self._passes, self._steps, images, self._samples, self._rows,
            self._ones,
        )  # fmt: skip
        loaded = _Loaded(self._device, self._uploads, program)
        loaded.warm_up()
        if self._driver.captures and all(engine.captures for engine in self._engines_on_card.roles.values()):
            loaded.record()
        return loaded


@dataclass(frozen=True)
class _Limits:
    """The most that the engines take at once: images, posterior samples (rows), and their size in pixels."""

    images: int
    rows: int
    size: tuple[int, int]

    @classmethod
    def of(cls, engines: Graphs[DeviceEngine], samples: int, max_batch: int) -> "_Limits":
        if not (steps := engines.steps):
            raise BackendError("no step graph was loaded: export the bundle again")
        at_once = max(1, max_batch // samples)
        most = engines.need(SCORE).largest.get("posterior_samples", (at_once, samples))
        if samples > most[1]:
            raise BackendError(
                f"the score plan takes at most {most[1]} samples an image, not {samples}: export again with "
                f"--samples {samples}"
            )
        images = [most[0], *([engines.features.largest.get("image", most)[0]] if engines.features else [])]
        rows = [engine.largest.get("x_t", (max_batch,))[0] for engine in steps]
        at_once = min(at_once, *images)
        ports = {port.name: port.shape for port in steps[0].inputs}
        height, width = ports["x_t"][2:]
        if height is None or width is None:
            raise BackendError("the step graph says no size of its images: export the bundle again")
        return cls(at_once, min(max_batch, at_once * samples, *rows), (height, width))


class _Loaded:
    """A program that is ready to run, with two places on the host for what goes up and what comes down."""

    def __init__(self, device: Device, uploads: Stream, program: Program) -> None:
        self.device, self.uploads, self.program = device, uploads, program
        self.landing = device.driver.allocate(program.work.nbytes)
        self.taken: Event = device.driver.event()
        self.graphs: list[Graph] | None = None
        self._slots = [_Slot.of(device.driver, program) for _ in range(2)]
        self._turn = 0

    def stage(self, observations: Array, scalars: dict[str, float]) -> "_Run":
        """Write the images down for the card and send them up, beside what it computes."""
        driver, slot = self.device.driver, self._slots[self._turn]
        self._turn = 1 - self._turn
        driver.finish(slot.landed)  # the place is free once its last images are up
        slot.given["observation"][...] = observations
        for index, one_pass in enumerate(self.program.passes):
            one_pass.begin(observations, slot.given[f"x_{index}"])
        for name, value in scalars.items():
            slot.given[name][...] = value
        driver.wait(self.uploads, self.taken)
        driver.upload(self.landing, slot.up, self.uploads)
        driver.record(slot.landed, self.uploads)
        return _Run(self, slot)

    def warm_up(self) -> None:
        """Everything once, on grey: engines compile and allocate in their first run."""
        size = self._slots[0].given["observation"].shape
        run = self.stage(np.zeros(size, dtype=np.float32), dict.fromkeys(("mask_lambda", "mask_high"), 1.0))
        run.start(stop_after_first=False)
        run.take()
        self.device.driver.synchronise(self.device.stream)

    def record(self) -> None:
        """Each stage as a graph; with a BackendWarning none, where the card or an engine refuses."""
        driver, stream, graphs = self.device.driver, self.device.stream, []
        try:
            for stage in self.program.stages:
                driver.begin_capture(stream)
                try:
                    stage.work()
                except BaseException:
                    with suppress(BackendError):  # what was recorded so far is of no use, nor what is said of it
                        driver.end_capture(stream)
                    raise
                graphs.append(driver.end_capture(stream))
        except BackendError as error:
            warnings.warn(
                f"the work could not be recorded as a CUDA graph ({error}), and is asked for again for every image: "
                "results are the same, later",
                BackendWarning,
                stacklevel=2,
            )
        else:
            self.graphs = graphs

    def run_stage(self, index: int) -> None:
        """Ask the card for one stage."""
        if self.graphs is None:
            self.program.stages[index].work()
        else:
            self.device.driver.launch(self.graphs[index], self.device.stream)


@dataclass(frozen=True)
class _Slot:
    """Page-locked memory for one run in flight, and its events: `marks` before the first stage and after each."""

    up: NDArray[np.uint8]
    given: dict[str, Array]
    down: NDArray[np.uint8]
    found: dict[str, Array]
    landed: Event
    done: Event
    marks: Sequence[Event]

    @classmethod
    def of(cls, driver: Driver, program: Program) -> "_Slot":
        up, down = driver.pinned(program.work.nbytes), driver.pinned(program.results.nbytes)
        up[...] = 0
        marks = [driver.event() for _ in range(2 * len(program.stages))]
        return cls(up, program.work.views(up), down, program.results.views(down), driver.event(), driver.event(), marks)


class _Run:
    """Some images on their way through a program: staged, started, gone on with, taken, and their result."""

    def __init__(self, loaded: _Loaded, slot: _Slot) -> None:
        self._loaded, self._slot = loaded, slot
        self._ran = 0
        self._leaves = np.zeros(loaded.program.images, dtype=np.bool_)
        self._first_samples: Array | None = None

    def start(self, *, stop_after_first: bool) -> None:
        """From where the images landed to where the program reads them, then the stages."""
        device, program = self._loaded.device, self._loaded.program
        device.driver.wait(device.stream, self._slot.landed)
        device.copy(program.work_address, self._loaded.landing, program.work.nbytes)
        device.driver.record(self._loaded.taken, device.stream)
        self._run_to(program.first_stages if stop_after_first else len(program.stages))

    def go_on(self, exit_limit: float | None) -> None:
        """The masked pass, unless it ran or every image leaves before it."""
        program = self._loaded.program
        if self._ran == len(program.stages) and exit_limit is None:
            return
        limit = -np.inf if exit_limit is None else exit_limit
        self._leaves = self._download("first_score") <= limit  # never a NaN
        if self._ran == len(program.stages) or self._leaves.all():
            return
        if self._leaves.any():
            self._first_samples = self._download("samples")
        self._run_to(len(program.stages))

    def take(self) -> None:
        """Ask for what was found to come down."""
        device = self._loaded.device
        device.driver.download(self._slot.down, self._loaded.program.results_address, device.stream)
        device.driver.record(self._slot.done, device.stream)

    def result(self) -> Inspection:
        """Return what was found, once it is here."""
        self._loaded.device.driver.finish(self._slot.done)
        found = {name: array.copy() for name, array in self._slot.found.items()}
        maps, scores, samples = found["map"], found["score"], found["samples"]
        if self._first_samples is not None:
            maps[self._leaves], scores[self._leaves] = (
                found[name][self._leaves] for name in ("first_map", "first_score")
            )
            rows = np.repeat(self._leaves, len(samples) // len(maps))
            samples[rows] = self._first_samples[rows]
        return Inspection(
            anomaly_map=maps,
            anomaly_score=scores,
            mask=found["mask"],
            first_map=found["first_map"],
            first_score=found["first_score"],
            posterior_samples=samples,
            times=self._times(),
            early_exit=self._leaves,
        )

    def _run_to(self, end: int) -> None:
        """The stages that are left before `end`, timed by the card."""
        device = self._loaded.device
        for index in range(self._ran, end):
            device.driver.record(self._slot.marks[2 * index], device.stream)
            self._loaded.run_stage(index)
            device.driver.record(self._slot.marks[2 * index + 1], device.stream)
        self._ran = end

    def _download(self, name: str) -> Array:
        """One array of the results, now."""
        device, program = self._loaded.device, self._loaded.program
        array = self._slot.found[name]
        device.driver.download(array, program.found[name].address, device.stream)
        device.driver.record(self._slot.done, device.stream)
        device.driver.finish(self._slot.done)
        return array.copy()

    def _times(self) -> dict[str, float]:
        times = {"first_pass": 0.0, "masked_pass": 0.0, "score": 0.0}
        for index, stage in enumerate(self._loaded.program.stages[: self._ran]):
            start, end = self._slot.marks[2 * index : 2 * index + 2]
            times[stage.name] += self._loaded.device.driver.milliseconds(start, end)
        return times
