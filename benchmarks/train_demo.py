"""Trains the demo's denoiser: `python -m mdps.benchmarks.train_demo --out FILE`.

Needs torch, accelerate, safetensors and scikit-image, and neither an engine nor the command line's libraries, so that
it runs on a bare GPU machine too. The denoiser that ships took 42 minutes on one CPU core.
"""

import argparse
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from mdps.benchmarks.script import exit_code
from mdps.benchmarks.textures import PHOTOS, SIZE, TextureSet
from mdps.runtime import atomic
from mdps.training.config import TrainingConfig, small_network, small_recipe
from mdps.training.fit import choose_device, fit
from mdps.training.sources import CropSource

MULT = (1, 1, 2, 2)  # 1.5 M parameters; narrow at full size, where most of the time goes


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(prog="mdps.benchmarks.train_demo", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the .safetensors file to write")
    parser.add_argument("--photo", choices=PHOTOS, default="brick")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--minutes", type=float, help="end within so many minutes, with the learning rate at zero")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--base", type=int, default=32, help="channels of the first level, a multiple of 32")
    parser.add_argument("--mult", type=int, nargs="+", default=list(MULT), help="channels of each level, times base")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), help="default: bf16 on CUDA, else fp32")
    parser.add_argument("--compile", action="store_true", help="compile the network (needs a C compiler)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=500, help="steps between progress lines")
    parser.add_argument("--run", type=Path, help="keep the run folder here (checkpoints, log.jsonl)")
    parser.add_argument("--resume", action="store_true", help="continue the run in --run")
    return parser.parse_args(argv)


def configure(options: argparse.Namespace) -> TrainingConfig:
    """The recipe for small networks with the demo's sizes, and mirrored crops: see `textures.py` on the strips."""
    on_gpu = choose_device(options.device).type == "cuda"
    return replace(
        small_recipe(small_network(SIZE, options.base, tuple(options.mult))),
        steps=options.steps,
        minutes=options.minutes,
        batch=options.batch,
        learning_rate=options.learning_rate,
        warmup=min(100, options.steps // 10),
        flip_horizontal=True,
        precision=options.precision or ("bf16" if on_gpu else "fp32"),
        compile=options.compile,
        seed=options.seed,
        log_every=options.every,
        checkpoint_every=max(options.every, 2000),
    )


def report(row: dict[str, Any]) -> None:
    """One line of progress on stderr."""
    rate = row["step"] / max(row["seconds"], 1e-9)
    print(
        f"step {row['step']}  loss {row['loss']:.5f}  rate {row['learning_rate']:.2e}  "
        f"{row['seconds']:.0f} s  {rate:.1f} steps/s",
        file=sys.stderr,
        flush=True,
    )


def train(options: argparse.Namespace, run: Path) -> None:
    """Fit in the folder `run` and put the denoiser at `options.out`."""
    source = CropSource(TextureSet(options.photo).training_area, (SIZE, SIZE))
    config = configure(options)
    path = fit(source, run, config, device=options.device, resume=options.resume, on_log=report)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_bytes(options.out, path.read_bytes())
    print(f"wrote {options.out} ({options.out.stat().st_size / 1e6:.1f} MB)", file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    """Run the command; a mistake of the user's is one sentence on stderr and the error's exit code."""
    options = arguments(argv)
    with nullcontext(options.run) if options.run else tempfile.TemporaryDirectory() as folder:
        return exit_code(lambda: train(options, Path(folder)))


if __name__ == "__main__":
    sys.exit(main())
