"""Writes an untrained denoiser of the authors' size: `python -m mdps.benchmarks.random_denoiser --out FILE`.

For timings only, as time and memory do not depend on what the weights are worth. Needs torch and safetensors.
"""

import argparse
import sys
from pathlib import Path

import torch

from mdps.benchmarks.kit import exit_code
from mdps.models.checkpoints import save_denoiser
from mdps.models.unet import UNet
from mdps.runtime.errors import UsageError
from mdps.runtime.schedule import NoiseSchedule
from mdps.training.config import paper_network


def write(path: Path, image_size: int = 256, base: int = 64, seed: int = 0) -> int:
    """The paper's network for images of that side, weights drawn from `seed`, at `path`; how many parameters it has."""
    levels = len(paper_network(image_size, base).channel_mult)
    if image_size < 2 ** (levels - 1) or image_size % 2 ** (levels - 1):
        raise UsageError(f"--image-size {image_size} must be a multiple of {2 ** (levels - 1)}")
    if base < 32 or base % 32:
        raise UsageError(f"--base {base} must be a multiple of 32")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = UNet(paper_network(image_size, base))
    save_denoiser(path, network, NoiseSchedule.linear())
    return sum(weight.numel() for weight in network.parameters())


def main(argv: list[str] | None = None) -> int:
    """Run the command; a mistake of the user's is one sentence on stderr and exit code 2."""
    parser = argparse.ArgumentParser(prog="mdps.benchmarks.random_denoiser", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the .safetensors file to write")
    parser.add_argument("--image-size", type=int, default=256)
    parser.add_argument("--base", type=int, default=64, help="channels of the first level, a multiple of 32")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)

    def work() -> None:
        parameters = write(options.out, options.image_size, options.base, options.seed)
        print(f"wrote {options.out} ({parameters / 1e6:.1f} M parameters, untrained)", file=sys.stderr)

    return exit_code(work)


if __name__ == "__main__":
    sys.exit(main())
