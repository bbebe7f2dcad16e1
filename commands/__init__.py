"""The commands: they parse, call and print. A command and what it needs are imported when it runs."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import click

# The sentences of `mdps --help`, in its order.
COMMANDS = {
    "demo": "Show all of it on the example that ships with mdps.",
    "train": "Fit a denoiser to images of good parts.",
    "export": "Turn a checkpoint into a bundle.",
    "calibrate": "Set a bundle's threshold from images of good parts.",
    "tune": "Choose the detector that fits the parts, within a time.",
    "predict": "Judge images: verdicts, maps, pictures, a report.",
    "serve": "Judge images over HTTP, and show them on a page.",
    "single-file": "Write a bundle as one ONNX file.",
    "inspect": "Say what a checkpoint or a bundle is.",
    "doctor": "Say which engines and cards work here.",
    "evaluate": "Measure a bundle on a data set with ground truth.",
    "bench": "Time a bundle beside torch and other detectors.",
    "gpu-check": "Try every engine on this machine's card.",
    "peers": "Measure other detectors, through anomalib.",
    "reproduce": "Measure the tables of the paper.",
    "sweep": "Try the settings that the paper leaves open.",
    "trade": "Show what a millisecond buys.",
}
# Where a command is, of those that are in no module of their names.
_MODULES = {"demo": "show", "inspect": "show", "doctor": "show", "single-file": "export", "gpu-check": "bench"}
_MODULES |= dict.fromkeys(("reproduce", "sweep", "trade"), "studies")


class LazyGroup(click.Group):
    """A group of `purposes`, a sentence a command, that imports one only to run it: so the list of all is quick."""

    def __init__(self, *arguments: Any, purposes: Mapping[str, str], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._purposes = purposes

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._purposes)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._purposes:
            return None
        name = cmd_name.replace("-", "_")
        module = import_module(f"mdps.commands.{_MODULES.get(cmd_name, name)}")
        command: click.Command = getattr(module, name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(self._purposes.items()))
