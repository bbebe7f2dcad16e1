"""`mdps serve`: parses, calls, prints."""

import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mdps.commands.fields import fields
from mdps.commands.options import TRACEBACK
from mdps.commands.terminal import needs, spoken_warnings
from mdps.runtime.option import build
from mdps.serving.http.options import ServerOptions

if TYPE_CHECKING:
    from mdps.serving.http.server import Served

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_FEW = 16  # characters of a token that can be guessed


@click.command(
    epilog="""\b
Examples:
  mdps serve bundle
  mdps serve blue=bundles/a red=bundles/b --port 9000
  mdps serve bundle --host 0.0.0.0 --token-file token --tls-cert cert.pem --tls-key key.pem
  curl --data-binary @part.png 'http://127.0.0.1:8080/inspect?map=png'
\b
Exit code: 0 after SIGTERM, SIGHUP or Ctrl-C, when all accepted requests were answered."""
)
@click.argument("bundles", nargs=-1, required=True, metavar="[NAME=]BUNDLE...")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    help="File with the bearer token clients must send [default: the variable MDPS_TOKEN, if set].",
)
@fields(ServerOptions, without=["tuned"])
@click.option("--no-watch", is_flag=True, help="Do not load a bundle again when it changes: only say so.")
@click.option("--force", is_flag=True, help="Go on with a bundle that sees no defects on these parts.")
@click.option("--scores-only", is_flag=True, help="Scores and maps without verdicts: needs no calibration.")
@TRACEBACK
def serve(bundles: tuple[str, ...], **options: Any) -> None:
    """Judge images over HTTP, and show them on a page.

    Speaks the Open Inference Protocol v2 (Triton's and KServe's clients), takes image files at POST /inspect, and has
    a page for the person at the line at /. Metrics for Prometheus are at /metrics. Events go to stderr, a JSON object
    a line.
    """
    _keep_stderr()
    with needs("serve", "cpu"):
        from mdps.commands.messages import mention_plans
        from mdps.serving.http.server import run
    told = {"token": _token(options.pop("token_file")), "calibrated": not options.pop("scores_only")}
    watch_seconds = None if options.pop("no_watch") else ServerOptions.watch_seconds
    settings = replace(build(ServerOptions, options | told), watch_seconds=watch_seconds)
    if not settings.is_local and settings.token is None:
        _warn(f"whoever reaches {settings.host} can use this server: give a token with --token-file")
    served = _named(bundles)
    with suppress(OSError):  # a full disk behind stderr
        mention_plans(*(one.path for one in served))
    with spoken_warnings():
        run(served, settings)


def _keep_stderr() -> None:
    """Open a stderr where there is none: the next file opened would be number 2, and get the log."""
    if sys.stderr is None:
        while os.open(os.devnull, os.O_RDWR) < 2:
            pass
        sys.stderr = os.fdopen(2, "w")


def _warn(sentence: str) -> None:
    with suppress(OSError):  # a full disk behind stderr is no reason not to serve
        click.echo(f"Warning: {sentence}", err=True)


def _token(file: Path | None) -> str | None:
    if file is None:
        token = os.environ.get("MDPS_TOKEN")
        return None if token is None else token.strip()
    try:
        token = file.read_text(encoding="utf-8-sig").strip()  # Notepad and PowerShell put a mark in front
    except (OSError, UnicodeError) as error:
        raise click.UsageError(f"--token-file {file} cannot be read: {error}") from error
    if len(token) < _FEW:
        _warn(f"the token in {file} has fewer than {_FEW} characters and can be guessed")
    return token


def _named(bundles: Sequence[str]) -> "list[Served]":
    from mdps.serving.http.server import Served

    served = [_one(text, Served) for text in bundles]
    names = [bundle.name for bundle in served]
    for name in names:
        if not _NAME.fullmatch(name):
            raise click.UsageError(f"{name!r} cannot be part of an address: give a plain name as NAME=BUNDLE")
        if names.count(name) > 1:
            raise click.UsageError(f"two bundles are called {name}: tell them apart as NAME=BUNDLE")
    return served


def _one(text: str, served: "type[Served]") -> "Served":
    from mdps.runtime.manifest import Manifest

    name, mark, path = text.partition("=")
    if mark and not Path(text).exists():
        return served(name, Path(path))
    return served(Manifest.read(text, verify=False).name, Path(text))
