"""The command line: assembles the commands of `commands/`."""

import sys

import click

from mdps import __version__
from mdps.commands import COMMANDS, LazyGroup
from mdps.commands.options import TRACEBACK
from mdps.commands.terminal import run


@click.group("mdps", cls=LazyGroup, purposes=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
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


def main() -> None:
    """Entry point of `mdps`."""
    sys.exit(run(cli))


def main_export() -> None:
    """Entry point of `mdps-export`."""
    from mdps.commands.export import export

    sys.exit(run(export, name="mdps-export"))


if __name__ == "__main__":
    main()
