"""Fits a denoiser to images of good parts."""

import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from tqdm import tqdm

from mdps.models.checkpoints import save_denoiser
from mdps.runtime import atomic
from mdps.runtime.errors import MdpsError, UsageError
from mdps.runtime.preprocessing import Preprocessing
from mdps.runtime.schedule import NoiseSchedule
from mdps.training.config import TrainingConfig, rate_factor
from mdps.training.loss import draw_timesteps, noise_loss, to_unit
from mdps.training.sources import ArraySource, FolderSource, Source, vary
from mdps.training.state import TrainingState

CHECKPOINT, LOG, DENOISER = "checkpoint.pt", "log.jsonl", "denoiser.safetensors"
Row = dict[str, Any]


def fit(
    images: NDArray[np.uint8] | Path | Source,
    out: Path,
    config: TrainingConfig,
    *,
    device: str = "auto",
    preprocessing: Preprocessing | None = None,
    resume: bool = False,
    on_log: Callable[[Row], None] | None = None,
) -> Path:
    """Train on `images` and return the path of `denoiser.safetensors` (the moving average) in the run folder `out`.

    images: uint8 [n, H, W, 3], a folder of image files (read through `preprocessing`), or a Source. The run folder also
    gets `checkpoint.pt` and `log.jsonl`, a line every `log_every` steps, which `on_log` is handed too. With `resume` a
    run goes on from its checkpoint and, on the CPU, ends with the same weights to the bit as one that never stopped.
    UsageError for settings, images or a run folder that do not fit; MdpsError if the loss stops being finite.
    """
    where = choose_device(device)
    size = config.network.image_size
    preprocessing = preprocessing or Preprocessing(image_size=(size, size))
    source = as_source(images, preprocessing)
    _check_size(source, config)
    _check_folder(out, resume)
    with torch.random.fork_rng(devices=[where] if where.type == "cuda" else []):
        state = TrainingState(config, where)
        if (out / CHECKPOINT).exists():
            state.restore(out / CHECKPOINT, source.fingerprint)
        schedule = NoiseSchedule.linear()
        with torch.backends.cudnn.flags(enabled=True, benchmark=where.type == "cuda"):
            _train(state, source, schedule, out, on_log)
    notes = {"training": config.to_json(), "steps": state.step, "images": source.fingerprint}
    save_denoiser(out / DENOISER, state.ema, schedule, "eps", preprocessing.to_json(), notes)
    return out / DENOISER


def choose_device(name: str) -> torch.device:
    """`auto` is CUDA if there is one, else the CPU; UsageError for CUDA asked for and absent, or an unknown name."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"unknown device {name!r}; choose auto, cpu or cuda") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("device cuda was asked for, but torch finds no CUDA device here; use --device cpu or auto")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def as_source(images: NDArray[np.uint8] | Path | Source, preprocessing: Preprocessing) -> Source:
    """The source that `images` stand for: an array, a folder, or a source already."""
    if isinstance(images, Path):
        return FolderSource(images, preprocessing)
    return ArraySource(images) if isinstance(images, np.ndarray) else images


def _check_size(source: Source, config: TrainingConfig) -> None:
    shape = source.batch(np.random.default_rng(0), 1).shape[1:]
    factor = 2 ** (len(config.network.channel_mult) - 1)
    if shape[0] % factor or shape[1] % factor:
        raise UsageError(
            f"images of {shape[0]} x {shape[1]} pixels do not fit this network; both sides must be "
            f"multiples of {factor}"
        )
    if config.shift >= min(shape[:2]):
        raise UsageError(f"shift is {config.shift}; it must be smaller than the images of {shape[0]} x {shape[1]}")


def _check_folder(out: Path, resume: bool) -> None:
    begun = (out / CHECKPOINT).exists()
    if begun and not resume:
        raise UsageError(f"{out} already holds a training run; continue it with --resume or choose another folder")
    if resume and not begun:
        raise UsageError(f"there is no {CHECKPOINT} in {out} to resume from; start the run without --resume")
    out.mkdir(parents=True, exist_ok=True)


def _train(
    state: TrainingState, source: Source, schedule: NoiseSchedule, out: Path, on_log: Callable[[Row], None] | None
) -> None:
    config = state.config
    alphas = torch.tensor(schedule.alphas_cumprod, dtype=torch.float32, device=state.device)
    network: Any = torch.compile(state.network, mode="reduce-overhead") if config.compile else state.network
    log = Log(out / LOG, state.step, on_log)
    start = time.monotonic() - state.seconds
    total = torch.zeros((), device=state.device)
    since = state.step
    # disable=None: a bar on a terminal, nothing in a pipe
    with tqdm(total=config.steps, initial=state.step, unit="step", disable=None) as bar:
        while (progress := _progress(state)) < 1:
            rate = config.learning_rate * rate_factor(config, state.step, progress)
            total += _step(state, network, _batch(state, source), alphas, rate)
            state.seconds = time.monotonic() - start
            bar.update()
            ends = _progress(state) >= 1
            if ends or state.step % config.log_every == 0:
                loss = float(total) / (state.step - since)
                _require_finite(loss, state.step)
                row = {"step": state.step, "loss": loss, "learning_rate": rate, "seconds": round(state.seconds, 2)}
                log.write(row)
                bar.set_postfix(loss=f"{loss:.4f}")
                total.zero_()
                since = state.step
            if ends or state.step % config.checkpoint_every == 0:
                state.save(out / CHECKPOINT, source.fingerprint)


def _progress(state: TrainingState) -> float:
    by_time = state.seconds / (60 * state.config.minutes) if state.config.minutes else 0.0
    return min(1.0, max(state.step / state.config.steps, by_time))


def _batch(state: TrainingState, source: Source) -> Tensor:
    config = state.config
    images = source.batch(state.rng, config.batch)
    varied = vary(
        images, state.rng, horizontal=config.flip_horizontal, vertical=config.flip_vertical, shift=config.shift
    )
    batch = torch.from_numpy(np.ascontiguousarray(varied))
    if state.device.type == "cuda":
        batch = batch.pin_memory().to(state.device, non_blocking=True)  # so that the copy does not stop the queue
    return to_unit(batch)


def _step(state: TrainingState, network: nn.Module, clean: Tensor, alphas: Tensor, rate: float) -> Tensor:
    """One update; returns the loss, float32 [], still on the device."""
    for group in state.optimizer.param_groups:
        group["lr"] = rate
    timesteps = draw_timesteps(state.config, len(clean), len(alphas), state.device)
    noise = torch.randn_like(clean)
    with _autocast(state):
        loss = noise_loss(network, clean, timesteps, noise, alphas)
    state.optimizer.zero_grad(set_to_none=True)
    state.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
    state.scaler.step(state.optimizer)
    state.scaler.update()
    state.step += 1
    state.follow()
    return loss.detach()


def _autocast(state: TrainingState) -> Any:
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
    precision = state.config.precision
    return nullcontext() if precision == "fp32" else torch.autocast(state.device.type, kinds[precision])


def _require_finite(loss: float, step: int) -> None:
    if not np.isfinite(loss):
        raise MdpsError(
            f"the loss is {loss} at step {step}; lower the learning rate, or train in fp32 if this was half precision"
        )


class Log:
    """`log.jsonl`: one JSON object a line; lines of steps that a resumed run will repeat are dropped first."""

    def __init__(self, path: Path, step: int, on_row: Callable[[Row], None] | None) -> None:
        self.path, self.on_row = path, on_row
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        kept = [line for line in lines if _step_of(line) <= step] if step else []
        atomic.write_text(path, "".join(f"{line}\n" for line in kept))

    def write(self, row: Row) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        if self.on_row:
            self.on_row(row)


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):  # a line cut short by a crash
        return float("inf")
