"""A group of commands that imports one only to run it, so that the list of all is quick."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import click


class LazyGroup(click.Group):
    """A group of `purposes`, a sentence a command: each is the function of its name in the module of its name."""

    def __init__(self, *arguments: Any, purposes: Mapping[str, str], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._purposes = purposes

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._purposes)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._purposes:
            return None
        name = cmd_name.replace("-", "_")
        command: click.Command = getattr(import_module(f"mdps.commands.{name}"), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(self._purposes.items()))
