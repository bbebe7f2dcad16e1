"""The command line: assembles the commands of `commands/`."""

import sys

import click

from mdps import __version__
from mdps.commands.bench import bench
from mdps.commands.calibrate import calibrate
from mdps.commands.demo import demo
from mdps.commands.doctor import doctor
from mdps.commands.evaluate import evaluate
from mdps.commands.export import export
from mdps.commands.gpu_check import gpu_check
from mdps.commands.inspect import inspect
from mdps.commands.options import TRACEBACK
from mdps.commands.peers import peers
from mdps.commands.predict import predict
from mdps.commands.serve import serve
from mdps.commands.single_file import single_file
from mdps.commands.study import reproduce, sweep
from mdps.commands.terminal import run
from mdps.commands.trade import trade
from mdps.commands.train import train

COMMANDS = (
    calibrate, single_file, inspect, export, train, doctor, predict, serve,
    evaluate, peers, reproduce, sweep, trade, demo, bench, gpu_check,
)  # fmt: skip


@click.group("mdps", context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mdps")
@TRACEBACK
def cli() -> None:
    """Finds defects with a diffusion model (MDPS): from a checkpoint to a verdict.

    \b
    Start with:
      mdps demo
    \b
    Then, with your own denoiser and images of good parts:
      mdps export --ckpt denoiser.pt --out bundle
      mdps calibrate bundle good/
      mdps predict bundle line/ --out results
    \b
    A denoiser from images of good parts alone, on a processor:
      mdps train good/ --out run --recipe small --minutes 45
    """


for command in COMMANDS:
    cli.add_command(command)


def main() -> None:
    """Entry point of `mdps`."""
    sys.exit(run(cli))


def main_export() -> None:
    """Entry point of `mdps-export`."""
    sys.exit(run(export, name="mdps-export"))


if __name__ == "__main__":
    main()
