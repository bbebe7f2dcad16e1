"""Fits a denoiser to images of good parts."""

import math
import signal
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from mdps.models.checkpoints import run_warnings, save_denoiser
from mdps.runtime.errors import MdpsError, require
from mdps.runtime.memory import check_training
from mdps.runtime.preprocessing import Preprocessing
from mdps.runtime.schedule import NoiseSchedule
from mdps.training.config import TrainingConfig, rate_factor
from mdps.training.crops import CropsOfFiles, CropsSource
from mdps.training.draw import draw_batch, loss_weights, noise_losses, seed_dropout
from mdps.training.engine import Engine, choose_device, first_process, process_count
from mdps.training.folder import CHECKPOINT, DENOISER, Row, RunFolder, check_folder, outcome, unwritable
from mdps.training.progress import Meter, Progress, Reconstructions, progress_of
from mdps.training.sources import ArraySource, FileSource, Source, check_files, images_below
from mdps.training.state import TrainingState

EARLY = (1, 10)  # steps that are logged besides, so that a slow machine's log is not empty for minutes
Given = NDArray[np.uint8] | Path | Sequence[Path] | Source


def fit(
    images: Given,
    out: Path,
    config: TrainingConfig,
    *,
    device: str = "auto",
    preprocessing: Preprocessing | None = None,
    resume: bool = False,
    on_log: Callable[[Row], None] | None = None,
) -> Path:
    """Train on `images` and return the path of `denoiser.safetensors` in the run folder `out`.

    It holds the moving average of the weights where `config.ema` is above 0, and the last weights otherwise.

    images: uint8 [n, H, W, 3], a folder of image files or a list of them (read through `preprocessing`), or a Source;
    with `config.crop` crops of them at `config.scale`.
    A warning says where the run ended before the network learned anything; the file's notes let the export repeat it.
    The run folder also gets what docs/use/training.md lists; `on_log` gets each line of its log. With `resume` a run
    goes on from its checkpoint and, on the CPU, ends with the same weights to the bit as one that never stopped. It may
    be made longer or shorter then (`steps`, `epochs`, `minutes`): the learning rate goes on as the new length has it.

    Under torchrun, or from `mdps.training.launch`, all processes share each batch and the first one writes.
    UsageError for settings, images or a run folder that do not fit; ImageError for files that cannot be read;
    StoppedError after SIGINT or SIGTERM; MdpsError if the loss stops being finite or the run folder cannot be written.
    """
    where = choose_device(device)
    size = config.network.image_size
    preprocessing = preprocessing or Preprocessing(image_size=(size, size))
    check_folder(out, resume)
    source = as_source(images, preprocessing, config)
    config = config.with_steps(source.count)
    _check_size(source, config)
    if where.type == "cpu":
        check_training(config.network.to_json(), preprocessing.network_size, config.batch, process_count())
    engine = Engine(config, where)
    try:
        with torch.random.fork_rng(devices=[where] if where.type == "cuda" else []):
            return Run(source, out, config, engine, preprocessing, on_log).train()
    except OSError as error:
        raise unwritable(out, error) from error
    finally:
        engine.close()


def as_source(images: Given, preprocessing: Preprocessing, config: TrainingConfig) -> Source:
    """Return the source that `images` stand for; what is odd about image files becomes warnings."""
    if isinstance(images, np.ndarray):
        return CropsSource(list(ArraySource(images).images), config.crop) if config.crop else ArraySource(images)
    if not isinstance(images, Path | Sequence):
        return images
    paths, where = (images_below(images), str(images)) if isinstance(images, Path) else (images, "the list")
    source: CropsOfFiles | FileSource
    if config.crop:
        source = CropsOfFiles(paths, config.crop, config.scale, where)
    else:
        source = FileSource(paths, preprocessing, where)
    if first_process():
        for sentence in check_files(
            source.paths, list(source.images), None if config.crop else preprocessing.image_size
        ):
            warnings.warn(sentence, stacklevel=3)
    return source


def _check_size(source: Source, config: TrainingConfig) -> None:
    shape = source.image(0, np.random.default_rng(0)).shape
    factor = 2 ** (len(config.network.channel_mult) - 1)
    sides = f"images of {shape[0]} x {shape[1]}"
    fits = not (shape[0] % factor or shape[1] % factor)
    require(fits, f"{sides} pixels do not fit this network; both sides must be multiples of {factor}")
    require(config.shift < min(shape[:2]), f"shift is {config.shift}; it must be smaller than the {sides}")
    square = shape[0] == shape[1]
    require(square or not config.rotate, f"{sides} pixels cannot be turned by a quarter; leave out rotate")


class StoppedError(MdpsError):
    """The run was asked to stop and has written a checkpoint to go on from."""

    exit_code = 130


class StopSignal:
    """Within the block, SIGINT and SIGTERM are noted in `number` (0: none yet); a second SIGINT interrupts at once.

    Python lets only the main thread watch signals; in another one nothing changes.
    """

    WATCHED = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.number = 0
        self._interrupts = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in self.WATCHED}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.number = number
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            raise KeyboardInterrupt


class Run:
    """One process of a run, from its first step, or its checkpoint, to its last."""

    def __init__(
        self,
        source: Source,
        out: Path,
        config: TrainingConfig,
        engine: Engine,
        preprocessing: Preprocessing,
        on_log: Callable[[Row], None] | None,
    ) -> None:
        self.source, self.out, self.config, self.engine = source, out, config, engine
        self.fingerprint, self.preprocessing = source.fingerprint, preprocessing
        self.schedule = NoiseSchedule.linear()
        self.state = TrainingState(config, engine.device)
        if (out / CHECKPOINT).exists():
            self.state.restore(out / CHECKPOINT, self.fingerprint)
        self.network, self.optimizer = engine.prepare(self.state.network, self.state.optimizer, config.compile)
        engine.restore_scaler(self.state.scaler)
        self.alphas = torch.tensor(self.schedule.alphas_cumprod, dtype=torch.float32, device=engine.device)
        self.meter = Meter(engine, len(self.alphas))
        if engine.main:
            self.folder = self._open_folder(on_log)
            self.samples = Reconstructions(config, source, self.schedule, engine.device) if config.samples else None

    def _open_folder(self, on_log: Callable[[Row], None] | None) -> RunFolder:
        folder = RunFolder(self.out, self.state.step, on_log)
        machine = {"device": str(self.engine.device), "processes": self.engine.processes}
        session = {"from_step": self.state.step} | machine
        folder.describe(self.config, self.source, self.preprocessing.to_json(), session)
        return folder

    def train(self) -> Path:
        """Train to the end and return the denoiser's path."""
        cuda = self.engine.device.type == "cuda"
        with torch.backends.cudnn.flags(enabled=True, benchmark=cuda), StopSignal() as stop:
            self._loop(stop)
        if self.engine.main:
            notes = self._notes()
            described = self.preprocessing.to_json()
            save_denoiser(self.out / DENOISER, self.state.ema, self.schedule, "eps", described, notes)
            self._show()
            self.folder.close()
            for sentence in run_warnings(notes):
                warnings.warn(sentence, stacklevel=3)
        self.engine.wait()
        return self.out / DENOISER

    def _notes(self) -> dict[str, Any]:
        """Return the notes on its training for the denoiser's file."""
        notes = {"training": self.config.to_json(), "steps": self.state.step, "images": self.fingerprint}
        ended = outcome(self.out)
        return notes | (ended.notes() if ended else {})

    def _loop(self, stop: StopSignal) -> None:
        state, config = self.state, self.config
        start = time.monotonic() - state.seconds
        if self.engine.main and progress_of(config, state.step, state.seconds) >= 1:
            warnings.warn(self._finished(), stacklevel=4)
        saved = state.seconds
        progress = progress_of(config, state.step, state.seconds)
        with Progress(config, state.step, progress, self.engine.main) as bar:
            while progress < 1:
                rate = config.learning_rate * rate_factor(config, state.step, progress)
                self._step(rate)
                stopped, state.seconds = self.engine.agree(stop.number, time.monotonic() - start)
                progress = progress_of(config, state.step, state.seconds)
                bar.update(state.step, progress, self.meter.so_far)
                ends = progress >= 1 or stopped > 0
                if ends or state.step in EARLY or state.step % config.log_every == 0:
                    self._log(rate, bar)
                overdue = state.seconds - saved >= 60 * config.checkpoint_minutes
                if ends or overdue or state.step % config.checkpoint_every == 0:
                    self._save()
                    saved = state.seconds
                if stopped:
                    self._leave(stopped)
                if config.sample_every and state.step % config.sample_every == 0 and progress < 1:
                    self._show()

    def _finished(self) -> str:
        by_steps = self.state.step >= self.config.last_step
        end = "" if by_steps else f" in its {self.config.minutes:g} minutes"
        return (
            f"the run in {self.out} has finished already, after {self.state.step} steps{end}, so nothing was trained; "
            f"to train on, give --resume more {'--steps' if by_steps else '--minutes'} than it had"
        )

    def _step(self, rate: float) -> None:
        """Update the weights once from this process's share of the batch."""
        state, config, engine = self.state, self.config, self.engine
        for group in state.optimizer.param_groups:
            group["lr"] = rate
        first = state.step * config.batch + engine.process * engine.share
        batch = draw_batch(config, self.source, range(first, first + engine.share), len(self.alphas), engine.device)
        seed_dropout(config, state.step, engine.process)
        losses = noise_losses(self.network, batch.clean, batch.timesteps, batch.noise, self.alphas)
        loss = (losses * loss_weights(config, batch.timesteps, self.alphas)).mean()
        engine.update(loss, self.network, self.optimizer)
        self.meter.add(loss, losses, batch.timesteps)
        state.step += 1
        state.follow()

    def _log(self, rate: float, bar: Progress) -> None:
        state = self.state
        row = {"step": state.step, **self.meter.read(), "learning_rate": rate, "seconds": round(state.seconds, 2)}
        if not math.isfinite(row["loss"]):
            raise MdpsError(
                f"the loss is {row['loss']} at step {state.step}; lower the learning rate, or train in fp32 if this "
                "was half precision"
            )
        if self.engine.main:
            self.folder.row(row)
            bar.note(state.step, row["loss"], row["images_per_s"])

    def _save(self) -> None:
        if self.engine.main:
            self.state.require_finite()
            self.state.scaler = self.engine.scaler_state()
            self.state.save(self.out / CHECKPOINT, self.fingerprint)

    def _show(self) -> None:
        if self.engine.main and self.samples is not None:
            self.folder.sample(self.samples.picture(self.state.ema), self.state.step)

    def _leave(self, number: int) -> None:
        if self.engine.main:
            self.folder.close()
        self.engine.wait()  # a process that left early would take the writing one with it
        bound = f" of {self.config.last_step}"
        if minutes := self.config.minutes:
            bound = f", {self.state.seconds / 60:.1f} of its {minutes:g} minutes"
        raise StoppedError(
            f"stopped by {signal.Signals(number).name} after step {self.state.step}{bound}; its checkpoint is in "
            f"{self.out}: go on with --resume"
        )
