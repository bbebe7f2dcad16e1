"""The run folder: what the run is (config.json), what it did (log.jsonl, tensorboard/, samples/, loss.png)."""

import errno
import io
import json
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mdps.models.unet_config import UNetConfig
from mdps.runtime import atomic
from mdps.runtime.errors import MdpsError, UsageError
from mdps.runtime.machine import versions
from mdps.runtime.preprocessing import Preprocessing
from mdps.training.config import NETWORKS, TrainingConfig
from mdps.training.sources import Source

CHECKPOINT, DENOISER = "checkpoint.pt", "denoiser.safetensors"
CONFIG, LOG, CURVE, SAMPLES, BOARD = "config.json", "log.jsonl", "loss.png", "samples", "tensorboard"
PACKAGES = ("torch", "accelerate", "numpy", "pillow", "safetensors")
WINDOW = 100  # steps that a loss is the mean of: batches of eight differ by half of it and more
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NOT_OURS = (errno.EROFS, errno.EACCES, errno.EPERM)
Row = dict[str, Any]


def check_folder(out: Path, resume: bool) -> None:
    """Raise UsageError where a new run would overwrite one, or there is none to go on with."""
    existing = (out / CHECKPOINT).exists()
    if existing and not resume:
        raise UsageError(f"{out} already holds a training run; continue it with --resume or choose another folder")
    if resume and not existing:
        raise UsageError(f"there is no {CHECKPOINT} in {out} to resume from; start the run without --resume")
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file; choose a folder for the run")


def unwritable(out: Path, error: OSError) -> MdpsError:
    """Return a sentence for an OSError in the run: what is left of it, and what to do."""
    wrong = f"{out} cannot be written ({error.strerror or error})"
    advice = "make room" if error.errno in NO_ROOM else "see to that"
    if (out / CHECKPOINT).exists():
        advice = "make the folder writable" if error.errno in NOT_OURS else advice
        return MdpsError(f"{wrong}; its last checkpoint is whole: {advice}, then go on with --resume")
    if error.errno in NOT_OURS:
        return MdpsError(f"{wrong} and holds no checkpoint yet: choose a folder that can be written to with --out")
    return MdpsError(f"{wrong} and holds no checkpoint yet: {advice}, then begin the run again")


class RunFolder:
    """Writes as the run goes; made by the one process that writes, at the step it starts or resumes from."""

    def __init__(self, out: Path, step: int, on_row: Callable[[Row], None] | None) -> None:
        self.out = out
        out.mkdir(parents=True, exist_ok=True)
        self._log = Log(out / LOG, step, on_row)
        self._board = open_board(out / BOARD, step)

    def describe(self, config: TrainingConfig, source: Source, preprocessing: Row, session: Row) -> None:
        """Write config.json; `session` is added to those of the same run before."""
        path = self.out / CONFIG
        before = json.loads(path.read_text(encoding="utf-8")) if path.exists() and session["from_step"] else {}
        content = {
            "training": config.to_json(),
            "preprocessing": preprocessing,
            "images": {
                "sha256": source.fingerprint,
                "count": source.count,
                "files": [str(file) for file in getattr(source, "paths", ())],
            },
            "sessions": [*before.get("sessions", []), session | {"versions": versions(*PACKAGES), "started": _now()}],
        }
        atomic.write_text(path, json.dumps(content, indent=1) + "\n")

    def row(self, row: Row) -> None:
        """Write a line of log.jsonl, and its numbers as TensorBoard's curves."""
        if self._board is not None:
            for name in ("loss", "learning_rate", "images_per_s"):
                self._board.add_scalar(name, row[name], row["step"])
            for index, loss in enumerate(row["loss_by_quarter"]):
                if loss is not None:
                    self._board.add_scalar(f"loss_by_timestep/quarter_{index + 1}", loss, row["step"])
        self._log.write(row)

    def sample(self, picture: NDArray[np.uint8], step: int) -> None:
        """Write uint8 [H, W, 3] into samples/ and TensorBoard."""
        path = self.out / SAMPLES / f"step_{step:07d}.png"
        path.parent.mkdir(exist_ok=True)
        buffer = io.BytesIO()
        Image.fromarray(picture).save(buffer, format="png")
        atomic.write_bytes(path, buffer.getvalue())
        if self._board is not None:
            self._board.add_image("reconstructions", picture, step, dataformats="HWC")

    def close(self) -> None:
        """Write what is still held, and the curve of the loss where matplotlib is installed."""
        if self._board is not None:
            self._board.close()
        draw_curve(self.out / LOG, self.out / CURVE)


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


def rows_of(log: Path) -> list[Row]:
    """Return the lines of a run's log; none where it has no such file."""
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []


def open_board(folder: Path, step: int) -> Any:
    """Open TensorBoard's writer, less what an earlier session wrote after `step`; None and a warning without it."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        warnings.warn(f"{folder} will not be written: pip install tensorboard to watch the run there", stacklevel=2)
        return None
    return SummaryWriter(str(folder), purge_step=step + 1 if step else None)


def draw_curve(log: Path, path: Path) -> None:
    """Draw the loss over the steps as a picture; nothing where matplotlib is missing or there is no line yet."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    if not (rows := rows_of(log)):
        return
    steps = [row["step"] for row in rows]
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    axes.plot(steps, [row["loss"] for row in rows], color="black", label="loss")
    for index in range(len(rows[0].get("loss_by_quarter", ()))):
        values = [(row.get("loss_by_quarter") or {index: None})[index] for row in rows]
        axes.plot(steps, [float("nan") if v is None else v for v in values], lw=0.8, label=f"timesteps {index + 1}/4")
    axes.set(xlabel="step", ylabel="mean squared error of the noise", yscale="log")
    axes.legend()
    temporary = path.with_name(f".{path.name}")
    figure.savefig(temporary, format="png", dpi=100)
    temporary.replace(path)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):  # a line cut short by a crash
        return float("inf")


class Outcome(NamedTuple):
    """Steps and seconds of a run in all its sessions, and losses over its last hundred steps or so.

    `first_quarter_loss` is the mean squared error of the noise at the first quarter of the timesteps, where detection
    works; None where none of them was drawn. `late_fall` is the mean loss of the last quarter of the steps, as a share
    of that of their second quarter.
    """

    steps: int
    seconds: float
    loss: float
    first_quarter_loss: float | None
    late_fall: float

    def notes(self) -> dict[str, Any]:
        """Return what a denoiser keeps of it, without the seconds, so that the same run gives the same file."""
        return {name: value for name, value in self._asdict().items() if name != "seconds"}


def outcome(out: Path) -> Outcome | None:
    """Return how the run in folder `out` ended or stands; None where its log has no line yet."""
    if not (rows := rows_of(out / LOG)):
        return None
    last = rows[-1]
    weighted = _last(rows)
    quarter = [(steps, row["loss_by_quarter"][0]) for steps, row in weighted if row.get("loss_by_quarter")]
    return Outcome(
        last["step"],
        last["seconds"],
        _mean([(steps, row["loss"]) for steps, row in weighted]) or 0.0,
        _mean([(steps, loss) for steps, loss in quarter if loss is not None]),
        _over(rows, 0.75, 1.0) / _over(rows, 0.25, 0.5),
    )


def _over(rows: Sequence[Row], begin: float, end: float) -> float:
    """Return the mean loss from one share of the steps to another; a line counts by its steps between the two."""
    first, last = (share * rows[-1]["step"] for share in (begin, end))
    before = [0, *(row["step"] for row in rows[:-1])]
    spans = [min(last, row["step"]) - max(first, start) for start, row in zip(before, rows, strict=True)]
    return _mean([(span, row["loss"]) for span, row in zip(spans, rows, strict=True) if span > 0]) or 1.0


def _last(rows: Sequence[Row]) -> list[tuple[int, Row]]:
    """Return the last lines that cover the window, or all, each with the number of steps it is the mean of."""
    before = [0, *(row["step"] for row in rows[:-1])]
    weighted = [(row["step"] - start, row) for start, row in zip(before, rows, strict=True)]
    first = next((n for n in range(len(rows) - 1, -1, -1) if rows[-1]["step"] - before[n] >= WINDOW), 0)
    return weighted[first:]


def _mean(weighted: Sequence[tuple[float, float]]) -> float | None:
    total = sum(weight for weight, _ in weighted)
    return sum(weight * value for weight, value in weighted) / total if total else None


def resumed_settings(
    out: Path,
    *,
    recipe: str | None = None,
    image_size: int | None = None,
    crop_size: int | None = None,
    base: int | None = None,
) -> tuple[TrainingConfig, Preprocessing]:
    """Return the settings and preprocessing of the run in folder `out`, as its config.json has them.

    UsageError where there is no run to go on with, where its config.json cannot be read, and where one of the others is
    given and is not the run's: `recipe` ("paper" or "small"), the sides `image_size` and `crop_size` (0: no crop) in
    pixels, `base` channels.
    """
    check_folder(out, resume=True)
    path = out / CONFIG
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        config = TrainingConfig.from_json(content["training"])
        preprocessing = Preprocessing.from_json(content["preprocessing"], f"{path}, preprocessing")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} does not say what the run was begun with ({type(error).__name__}); put the file back, or choose "
            "another folder for the run"
        ) from error
    given = {"image-size": image_size, "crop-size": crop_size, "base": base}
    theirs = (preprocessing.image_size[0], preprocessing.crop_size or 0, config.network.model_channels)
    for (name, ours), value in zip(given.items(), theirs, strict=True):
        if ours is not None and ours != value:
            raise UsageError(f"{out} was begun with --{name} {value}, not {ours}; leave --{name} out")
    if recipe is not None and config.network != _network(recipe, config.network):
        raise UsageError(
            f"{out} was begun with another network than that of --recipe {recipe}; leave --recipe out, and --resume "
            "takes the run's own"
        )
    return config, preprocessing


def _network(recipe: str, like: UNetConfig) -> UNetConfig | None:
    """Return the network of the recipe in the size of another; None where it cannot have that."""
    try:
        return NETWORKS[recipe](like.image_size, like.model_channels)
    except UsageError:
        return None
