"""The command line: assembles the commands of `commands/`, and imports one when it is asked for."""

import sys
from importlib import import_module

import click

from mdps import __version__
from mdps.commands.options import TRACEBACK
from mdps.commands.terminal import run

# What each is for, in the list of `mdps --help`, and its module.
COMMANDS = {
    "demo": ("Show all of it on the example that ships with mdps.", "demo"),
    "train": ("Fit a denoiser to images of good parts.", "train"),
    "export": ("Turn a checkpoint into a bundle.", "export"),
    "calibrate": ("Set a bundle's threshold from images of good parts.", "calibrate"),
    "predict": ("Judge images: verdicts, maps, pictures, a report.", "predict"),
    "serve": ("Judge images over HTTP, and show them on a page.", "serve"),
    "single-file": ("Write a bundle as one ONNX file.", "single_file"),
    "inspect": ("Say what a checkpoint or a bundle is.", "inspect"),
    "doctor": ("Say which engines and cards work here.", "doctor"),
    "evaluate": ("Measure a bundle on a data set with ground truth.", "evaluate"),
    "bench": ("Time a bundle beside torch and other detectors.", "bench"),
    "gpu-check": ("Try every engine on this machine's card.", "gpu_check"),
    "peers": ("Measure other detectors, through anomalib.", "peers"),
    "reproduce": ("Measure the tables of the paper.", "study"),
    "sweep": ("Try the settings that the paper leaves open.", "study"),
    "trade": ("Show what a millisecond buys.", "trade"),
}


class Commands(click.Group):
    """A group that imports a command only to run it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f"mdps.commands.{COMMANDS[cmd_name][1]}")
        command: click.Command = getattr(module, cmd_name.replace("-", "_"))
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, purpose) for name, (purpose, _) in COMMANDS.items()])


@click.group("mdps", cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
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
