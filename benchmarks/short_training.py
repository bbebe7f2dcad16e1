"""How much a short training buys: `python -m mdps.benchmarks.short_training CATEGORY --out FOLDER`.

Trains on four of five good images, stops at each number of steps and goes on from there, the rate decaying to zero each
time. At each stop the denoiser is valued as the cheapest detector that reconstructs: one call without guidance, pixels
in standard deviations of the images it was trained on. It is valued on synthetic defects in the good images kept apart,
and on the test images. A stopped run goes on.
"""

import argparse
import json
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mdps.benchmarks.data import category_of
from mdps.benchmarks.data.samples import Category
from mdps.benchmarks.kit import Fields, Say, exit_code, machine_facts, plain, quiet, say_on_stderr, table, write_report
from mdps.benchmarks.study.terms import TestSet, load_test_set
from mdps.models.checkpoints import load_denoiser
from mdps.models.checkpoints.load import Denoiser
from mdps.runtime.calibration import linear_error, noise_error, signal_step
from mdps.runtime.preprocessing import Preprocessing
from mdps.runtime.schedule import Step
from mdps.training import TrainingConfig, fit, outcome, small_network, small_recipe
from mdps.training.draw import draw_noise, noise_losses
from mdps.training.folder import CHECKPOINT
from mdps.training.progress import reconstruct
from mdps.tuning.candidates import TOP
from mdps.tuning.photographs import defects, see
from mdps.tuning.statistics import Pixels, fit_pixels
from mdps.tuning.value import Truth, scores

LEVELS = (20, 50)  # T of the call
BLUR = 1.0
TIMES = (5, 25, 50, 100, 150, 200, 249)  # at which the held-out error is measured
EVERY = 5  # a good image of so many is kept apart
LARGEST = 256  # side of the ground truth, as in an evaluation
_AT_ONCE = 16

Array = NDArray[np.float32]


@dataclass(frozen=True)
class Value(Fields):
    """AUROCs by one call at T = `level`: of the test images, and of synthetic defects, the mean over their kinds."""

    level: int
    image: float
    pixel: float
    synthetic_image: float
    synthetic_pixel: float


@dataclass(frozen=True)
class Row(Fields):
    """A stop of the run.

    `core_seconds` are the processor's for all steps so far, `loss` the training's at its end. On good images kept apart
    `low_loss` is the error of the noise below t = 250, `of_filter` that of a calibration as a share of the filter's.
    """

    steps: int
    core_seconds: float
    loss: float
    low_loss: float
    of_filter: float
    values: tuple[Value, ...]


@dataclass(frozen=True)
class Pictures:
    """Views [n, 3, H, W] of good images: trained on, and kept apart; of the latter with defects; and the test set."""

    trained: Array
    held: Array
    bad: Array
    truth: Truth
    test: TestSet


def measure(
    folder: Path, out: Path, config: TrainingConfig, stops: Sequence[int], every: int = 1, say: Say = quiet
) -> list[dict[str, Any]]:
    """Train on the category in `folder`, and return the rows of all stops, which short_training.json and .md hold.

    Every n-th test image is judged. UsageError as of `fit`, and where the category has no test images of both sorts.
    """
    category = category_of(folder)
    settings = {"category": category.name, "every": every, "training": config.to_json()}
    rows = _kept(out, settings)
    pictures = _pictures(category, config.network.image_size, every)
    for stop in stops[len(rows) :]:
        spent, path = _trained(_apart(category)[0], out / "run", replace(config, steps=stop))
        ended = outcome(out / "run")
        assert ended is not None
        before = rows[-1]["core_seconds"] if rows else 0.0
        rows.append(_row(load_denoiser(path), pictures, stop, before + spent, ended.loss).to_json())
        write_report(out, "short_training", settings | machine_facts() | {"rows": rows}, markdown(settings, rows))
        say(json.dumps(rows[-1]))
    return rows


def value(ckpt: Path, folder: Path, out: Path, every: int = 1) -> dict[str, Any]:
    """Value a denoiser of another run in the same way; it may have been trained on the images kept apart."""
    denoiser, category = load_denoiser(ckpt), category_of(folder)
    settings = {"category": category.name, "every": every, "training": denoiser.extra.get("training")}
    steps, loss = (denoiser.extra.get(name) or 0 for name in ("steps", "loss"))
    row = _row(denoiser, _pictures(category, denoiser.config.image_size, every), steps, 0.0, loss).to_json()
    write_report(out, "short_training", settings | {"rows": [row]}, markdown(settings, [row]))
    return row


def _apart(category: Category) -> tuple[list[Path], list[Path]]:
    """Return the good images to train on, and those kept apart."""
    held = list(category.train[::EVERY])
    return [path for path in category.train if path not in held], held


def _kept(out: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a run with these settings that was stopped; none of another."""
    path = out / "short_training.json"
    kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return list(kept["rows"]) if all(kept.get(name) == plain(value) for name, value in settings.items()) else []


def _trained(paths: Sequence[Path], run: Path, config: TrainingConfig) -> tuple[float, Path]:
    """Go on to the last of the steps; return the processor's seconds for it and the denoiser's path."""
    begun = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a run so short ends early is what is measured
        path = fit(paths, run, config, device="cpu", resume=(run / CHECKPOINT).exists())
    return time.process_time() - begun, path


def _pictures(category: Category, side: int, every: int) -> Pictures:
    framing = Preprocessing((side, side))
    test = load_test_set(category, framing, every, LARGEST)
    trained, held = (see(paths, framing, side).observations for paths in _apart(category))
    bad = defects(_apart(category)[1], framing, side)
    return Pictures(trained, held, bad.seen.observations, Truth(bad.kinds, bad.masks), test)


def _row(denoiser: Denoiser, pictures: Pictures, steps: int, spent: float, loss: float) -> Row:
    values = tuple(_value(denoiser, pictures, level) for level in LEVELS)
    low, share = _low_loss(denoiser, pictures.held), _of_filter(denoiser, pictures.held)
    return Row(steps, round(spent, 1), round(loss, 4), round(low, 4), round(share, 3), values)


@torch.inference_mode()
def _low_loss(denoiser: Denoiser, images: Array) -> float:
    clean = torch.from_numpy(images)
    alphas = torch.tensor(denoiser.schedule.alphas_cumprod, dtype=torch.float32)
    noise = torch.stack([draw_noise("gaussian", n, clean.shape[2:], clean.device) for n in range(len(clean))])
    errors = [
        noise_losses(denoiser.network, part, torch.full((len(part),), t), drawn, alphas)
        for t in TIMES
        for part, drawn in zip(_parts(clean), _parts(noise), strict=True)
    ]
    return float(torch.cat(errors).mean())


def _of_filter(denoiser: Denoiser, images: Array) -> float:
    step = signal_step(denoiser.schedule)

    @torch.inference_mode()
    def predicted(noised: Array, at: Step) -> Array:
        found: Array = denoiser.network(torch.from_numpy(noised), torch.tensor([at.timestep])).numpy()
        return found

    return noise_error(predicted, images, step) / linear_error(images, step.alpha_t)


def _value(denoiser: Denoiser, pictures: Pictures, level: int) -> Value:
    """Return the AUROCs of the call at T = `level`."""
    pixels = fit_pixels(*_reconstructed(denoiser, pictures.trained, level), BLUR)
    held, bad, test = (
        _maps(pixels, denoiser, images, level) for images in (pictures.held, pictures.bad, pictures.test.observations)
    )
    kinds = pictures.truth.values(held, bad, TOP).values()
    found = (
        pictures.test.image_auroc(scores(test, TOP)),
        pictures.test.pixel_auroc(test),
        float(np.mean([kind.image for kind in kinds])),
        float(np.mean([kind.pixel for kind in kinds])),
    )
    return Value(level, *(round(value, 4) for value in found))


def _maps(pixels: Pixels, denoiser: Denoiser, images: Array, level: int) -> Array:
    maps: Array = pixels(*_reconstructed(denoiser, images, level))[:, 0].numpy()
    return maps


def _reconstructed(denoiser: Denoiser, images: Array, level: int) -> tuple[Tensor, Tensor]:
    """Return observations [n, 3, H, W] and one sample of each; all have the same noise, as in a detector."""
    clean = torch.from_numpy(images)
    noise = draw_noise("gaussian", 0, clean.shape[2:], clean.device)
    made = [
        reconstruct(denoiser.network, part, noise.expand_as(part), denoiser.schedule, level, 1)
        for part in _parts(clean)
    ]
    return clean, torch.cat(made).clone()[:, None]


def _parts(images: Tensor) -> tuple[Tensor, ...]:
    return torch.split(images, _AT_ONCE)


def markdown(settings: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """Return the settings and a line a stop."""
    head = ["steps", "core minutes", "loss", "held out, t < 250", "of the filter's"]
    names = ("image", "pixel", "synthetic image", "synthetic pixel")
    head += [f"T = {level}: {' / '.join(names)}" for level in LEVELS]
    lines = [
        [
            str(row["steps"]),
            f"{row['core_seconds'] / 60:.1f}",
            *(f"{row[name]:.3f}" for name in ("loss", "low_loss", "of_filter")),
            *(" / ".join(f"{one[name.replace(' ', '_')]:.3f}" for name in names) for one in row["values"]),
        ]
        for row in rows
    ]
    return f"# A short training on {settings['category']}\n\n`{settings}`\n\n{table(head, lines)}\n"


def main(argv: list[str] | None = None) -> int:
    """Run the command; a mistake of the user's is one sentence on stderr and exit code 2."""
    parser = argparse.ArgumentParser(prog="mdps.benchmarks.short_training", description=__doc__.splitlines()[0])
    parser.add_argument("category", type=Path, help="folder of a category with good and defective test images")
    parser.add_argument("--out", type=Path, required=True, help="folder for short_training.json and .md, and the run")
    parser.add_argument("--steps", type=int, nargs="+", default=[400, 800, 1600], help="where to stop [400 800 1600]")
    parser.add_argument("--image-size", type=int, default=64, help="side of the images [64]")
    parser.add_argument("--every", type=int, default=1, help="judge every n-th test image only [1]")
    parser.add_argument("--change", nargs="*", default=[], metavar="NAME=VALUE", help="of TrainingConfig; JSON values")
    parser.add_argument("--ckpt", type=Path, help="value this denoiser instead, and train none")
    parser.add_argument("--threads", type=int, default=1, help="processor threads [1]")
    given = parser.parse_args(argv)

    def work() -> None:
        torch.set_num_threads(given.threads)
        if given.ckpt:
            say_on_stderr(json.dumps(value(given.ckpt, given.category, given.out, given.every)))
            return
        changes = {name: _json(text) for name, _, text in (change.partition("=") for change in given.change)}
        config = TrainingConfig.from_json(small_recipe(small_network(given.image_size)).to_json() | changes)
        measure(given.category, given.out, config, sorted(given.steps), given.every, say_on_stderr)

    return exit_code(work)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


if __name__ == "__main__":
    sys.exit(main())
