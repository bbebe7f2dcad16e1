"""What each training option gains: `python -m mdps.benchmarks.train_options DATA --out FOLDER`.

Trains the small network from the paper's settings with one option changed at a time, all on the same images, timesteps
and noises, and measures each on good images that took no part: the error of the predicted noise at the timesteps that
inference uses (t <= 250), and its difference to the base with the standard error over those images. Where DATA is a
category with test images, a bundle of each denoiser judges them as well (first pass only).

A run of a few hundred steps says what helps a short training. It can be stopped and called again: finished options are
kept, and one that was cut short goes on from its checkpoint.
"""

import argparse
import json
import math
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from mdps.benchmarks.datasets import Category, find_categories
from mdps.benchmarks.script import exit_code
from mdps.models.checkpoints import load_denoiser, save_denoiser
from mdps.models.unet import UNet
from mdps.runtime import atomic
from mdps.runtime.errors import UsageError
from mdps.runtime.preprocessing import Preprocessing
from mdps.runtime.schedule import NoiseSchedule
from mdps.runtime.versions import versions
from mdps.training import FileSource, TrainingConfig, fit, small_network, small_recipe
from mdps.training.folder import CHECKPOINT, DENOISER, PACKAGES
from mdps.training.loss import noise_losses, to_unit

HELD_OUT = 5  # every fifth image
TIMESTEPS = (5, 25, 50, 100, 150, 200, 249)
ALL = "all of them (recipe small)"
RESULTS = "train_options"
METRICS = ("image_auroc", "pixel_auroc")
Row = dict[str, Any]


@dataclass(frozen=True)
class Option:
    """One line of the table: what is changed in the base, and whether the average of the weights is judged."""

    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    average: bool = False

    @property
    def run(self) -> str:
        """Its run's folder; options that train alike share one."""
        return "-".join(f"{name}_{value}" for name, value in self.changes.items()) or "base"


# The paper's rate of 1e-4 is made for a hundred times as many steps, so the base has that of short runs.
OPTIONS = (
    Option("base: the paper's settings, rate 4e-4"),
    Option("rate 1e-4, the paper's", {"learning_rate": 1e-4}),
    Option("weight decay past the gradient (AdamW, 0.01)", {"optimizer": "adamw", "weight_decay": 1e-2}),
    Option("cosine decay of the rate", {"decay": "cosine"}),
    Option("average of the weights (EMA 0.999)", average=True),
    Option("70 % of the timesteps below 260", {"low_share": 0.7}),
    Option("min-SNR weighting", {"weighting": "min-snr"}),
    Option("flips", {"flip_horizontal": True, "flip_vertical": True}),
    Option(ALL, {"optimizer": "adamw", "weight_decay": 1e-2, "decay": "cosine", "warmup": 100, "low_share": 0.7}, True),
)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(
        prog="mdps.benchmarks.train_options",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("data", type=Path, help="a folder of good images, or a category of a data set")
    parser.add_argument("--out", type=Path, required=True, help="folder for runs and results")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--every", type=int, default=4, help="judge every n-th test image; 0: none")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def base_config(options: argparse.Namespace) -> TrainingConfig:
    """The paper's settings for the small network. An average is kept beside the weights; it changes no training."""
    return TrainingConfig(
        small_network(options.image_size),
        steps=options.steps,
        batch=options.batch,
        learning_rate=small_recipe().learning_rate,
        ema=small_recipe().ema,
        seed=options.seed,
        log_every=max(1, options.steps // 10),
        checkpoint_every=max(1, options.steps // 5),
        samples=0,
    )


def measure_all(options: argparse.Namespace) -> list[Row]:
    """A row for each option, written after each; UsageError for data that cannot be held out from or judged."""
    category = _category(options.data)
    held, used = category.train[::HELD_OUT], [p for i, p in enumerate(category.train) if i % HELD_OUT]
    if len(held) < 2:
        raise UsageError(f"{options.data} holds {len(category.train)} images; at least {HELD_OUT + 1} are needed")
    size = options.image_size
    preprocessing = Preprocessing(image_size=(size, size))
    source, kept = FileSource(used, preprocessing), FileSource(held, preprocessing)
    config = base_config(options)
    header = {"settings": config.to_json(), "images": source.fingerprint, "every": options.every}
    rows, base = _finished(options.out / f"{RESULTS}.json", header)
    for option in OPTIONS[len(rows) :]:
        denoiser = trained(option, source, config, preprocessing, options)
        errors = held_out_errors(denoiser, kept.images, options.seed)
        base = errors.tolist() if base is None else base
        measured = _compared(errors, np.asarray(base)) | _judged(denoiser, category, options)
        rows.append({"option": option.name, "run": option.run, **measured})
        _write(options.out, header, base, rows)
        print(f"{option.name}: {measured}", file=sys.stderr, flush=True)
    return rows


def _category(path: Path) -> Category:
    found = find_categories(path)
    if len(found) > 1:
        raise UsageError(f"{path} holds {len(found)} categories: give one, such as {found[0].root}")
    return found[0]


def trained(
    option: Option, source: FileSource, base: TrainingConfig, preprocessing: Preprocessing, options: argparse.Namespace
) -> Path:
    """The denoiser of an option: the average or the last weights of its run, which is made, or gone on with."""
    run: Path = options.out / "runs" / option.run
    if not (run / DENOISER).exists():
        begun = (run / CHECKPOINT).exists()
        config = replace(base, **option.changes)
        fit(source, run, config, device=options.device, preprocessing=preprocessing, resume=begun)
    if option.average:
        return run / DENOISER
    path = run / "last_weights.safetensors"
    content = torch.load(run / CHECKPOINT, map_location="cpu", weights_only=True)
    network = UNet(base.network)
    network.load_state_dict(content["network"])
    save_denoiser(path, network, NoiseSchedule.linear(), "eps", preprocessing.to_json())
    return path


@torch.inference_mode()
def held_out_errors(denoiser: Path, images: NDArray[np.uint8], seed: int) -> NDArray[np.float64]:
    """Mean squared error of the noise for each image [n], over TIMESTEPS; the same noises for every denoiser."""
    network = load_denoiser(denoiser).network
    clean = to_unit(torch.from_numpy(images))
    alphas = torch.tensor(NoiseSchedule.linear().alphas_cumprod, dtype=torch.float32)
    errors = []
    for timestep in tqdm(TIMESTEPS, desc="held out", disable=None, leave=False):
        noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(1000 * seed + timestep))
        parts = zip(torch.split(clean, 8), torch.split(noise, 8), strict=True)
        errors.append(torch.cat([_errors(network, *part, timestep, alphas) for part in parts]))
    mean: NDArray[np.float64] = torch.stack(errors).double().mean(dim=0).numpy()
    return mean


def _errors(network: UNet, clean: torch.Tensor, noise: torch.Tensor, t: int, alphas: torch.Tensor) -> torch.Tensor:
    return noise_losses(network, clean, torch.full((len(clean),), t), noise, alphas)


def _compared(errors: NDArray[np.float64], base: NDArray[np.float64]) -> Row:
    difference = errors - base
    return {
        "held_out_error": float(errors.mean()),
        "difference": float(difference.mean()),
        "standard_error": float(difference.std(ddof=1) / math.sqrt(len(difference))),
    }


def _judged(denoiser: Path, category: Category, options: argparse.Namespace) -> Row:
    """Image and pixel AUROC through the exported bundle; nothing where there are no test images or none are wanted."""
    if not category.test or not options.every:
        return {}
    from mdps.benchmarks.evaluate import evaluate
    from mdps.benchmarks.judges import BundleJudge
    from mdps.export import ExportOptions, export_bundle

    bundle = export_bundle(denoiser, options.out / "bundle", ExportOptions(mask_pass=False), force=True)
    with BundleJudge(bundle) as judge:
        found = evaluate(judge, category, every=options.every)
    defined = {name: found.metrics[name] for name in METRICS if math.isfinite(found.metrics[name])}
    return defined | {"judged_images": found.images}


def _finished(path: Path, header: Row) -> tuple[list[Row], list[float] | None]:
    """The rows of an earlier call, and the base's errors."""
    if not path.exists():
        return [], None
    before = json.loads(path.read_text(encoding="utf-8"))
    if {name: before.get(name) for name in header} != header:
        raise UsageError(f"{path} is of other settings or images: choose another --out, or remove it")
    return before["rows"], before["base_errors"]


def _write(out: Path, header: Row, base: list[float], rows: Sequence[Row]) -> None:
    content = header | {
        "timesteps": TIMESTEPS,
        "versions": versions(*PACKAGES),
        "base_errors": base,
        "rows": list(rows),
    }
    atomic.write_text(out / f"{RESULTS}.json", json.dumps(content, indent=1) + "\n")
    atomic.write_text(out / f"{RESULTS}.md", table(rows))


def table(rows: Sequence[Row]) -> str:
    """Markdown; differences are in percent of the base's error."""
    return "".join(f"{line}\n" for line in _lines(rows))


def _lines(rows: Sequence[Row]) -> Iterator[str]:
    judged = all(name in row for row in rows for name in METRICS)
    yield "| option | held-out error, t <= 250 | against the base |" + " image AUROC | pixel AUROC |" * judged
    yield "|---|---:|---:|" + "---:|---:|" * judged
    for row in rows:
        percent = 100 / rows[0]["held_out_error"]
        change = f"{percent * row['difference']:+.1f} % ± {percent * row['standard_error']:.1f}"
        scores = "".join(f" {row[name]:.4f} |" for name in METRICS) if judged else ""
        yield f"| {row['option']} | {row['held_out_error']:.5f} | {change} |{scores}"


def main(argv: list[str] | None = None) -> int:
    """Run the command; a mistake of the user's is one sentence on stderr and the error's exit code."""
    options = arguments(argv)
    warnings.showwarning = lambda message, *_, **__: print(f"Warning: {message}", file=sys.stderr)
    return exit_code(lambda: print(table(measure_all(options)), end=""))


if __name__ == "__main__":
    sys.exit(main())
