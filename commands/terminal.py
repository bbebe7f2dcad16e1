"""The command line's manners: errors as one sentence, exit codes, values for people or for programs."""

import errno
import importlib.util
import io
import json
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import click

SOME_FAILED = 3  # exit code of a run in which some images could not be judged
_INTERRUPTED = 130  # what a shell reports for the signal
# What a disk, a folder or a quota answers: nothing that a report of it would mend.
_DISKS = {
    errno.ENOSPC: "written",
    errno.EROFS: "written",
    getattr(errno, "EDQUOT", errno.ENOSPC): "written",  # not on Windows
    errno.EFBIG: "written",
    errno.EPIPE: "written",
    errno.EACCES: "opened",
    errno.EPERM: "opened",
}


BEFORE = {"--backend": "--engine", "--provider": "--engine"}
"""Options of earlier versions and their successors, for whoever still types them."""
_ALLOCATION = re.compile(r"bad_alloc|can't allocate memory|not enough memory|out of memory|start new thread", re.I)
_NO_MEMORY = (
    "the memory that this process may take is used up: lower --samples, --batch, --max-batch or --image-size, choose "
    "another --engine, or close what else is running"
)


@contextmanager
def needs(*extras: str) -> Iterator[None]:
    """Turn a missing package into a sentence that says which extras bring it.

    Never `cpu` where an onnxruntime is there: it may be [gpu]'s, which the wheel of [cpu] would overwrite.
    """
    from mdps.runtime.memory import check_libraries

    check_libraries(extras[0])
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "mdps":
            raise
        if importlib.util.find_spec("onnxruntime") is not None:
            extras = tuple(extra for extra in extras if extra != "cpu")
        raise click.ClickException(
            f"this command needs {error.name}, which is not installed: pip install 'mdps[{','.join(extras)}]'"
        ) from error


@contextmanager
def spoken_warnings() -> Iterator[None]:
    """Print each warning as one line on stderr, without the place in the source that Python would name."""
    with warnings.catch_warnings():  # puts back what is set here
        warnings.showwarning = lambda message, *_, **__: click.echo(f"Warning: {message}", err=True)
        yield


def say(text: str) -> None:
    """Print progress on stderr: stdout is for results."""
    click.echo(text, err=True)


def print_values(values: Mapping[str, Any], as_json: bool) -> None:
    """Print one JSON object on one line, or a line a value with inner keys below their own."""
    click.echo(json.dumps(values) if as_json else "\n".join(_lines(values, "")))


def _lines(value: Any, indent: str) -> Iterator[str]:
    pairs = value.items() if isinstance(value, Mapping) else (("-", item) for item in value)
    for key, item in pairs:
        label = key if key == "-" else f"{key}:"
        if isinstance(item, Mapping) or (isinstance(item, list | tuple) and not _is_short(item)):
            yield f"{indent}{label}"
            yield from _lines(item, indent + "  ")
        else:
            yield f"{indent}{label} {_plain(item)}"


def _is_short(items: Sequence[Any]) -> bool:
    return all(isinstance(item, int | float) for item in items) and len(items) <= 8


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


def run(command: click.Command, arguments: Sequence[str] | None = None, name: str | None = None) -> int:
    """Run a command and return its exit code; an error becomes one sentence on stderr."""
    state: dict[str, bool] = {}
    _print_any_name()
    try:
        result = command.main(args=arguments, prog_name=name or command.name, obj=state, standalone_mode=False)
        _flush()
        return result if isinstance(result, int) else 0
    except click.ClickException as error:
        if isinstance(error, click.NoSuchOption) and (after := BEFORE.get(error.option_name)):
            error = click.UsageError(f"No such option '{error.option_name}': it is {after} now.", error.ctx)
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        return _INTERRUPTED
    except BrokenPipeError:
        _drop_stdout()  # the reader has left
        return 1  # as click does where it meets the same
    except Exception as error:
        if state.get("traceback"):
            traceback.print_exc()
        return _explain(error, state)


def _flush() -> None:
    sys.stdout.flush()


def _drop_stdout() -> None:
    """Point stdout at the null device, or Python would complain when it flushes at exit."""
    with suppress(OSError, ValueError):  # a test's stdout is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_any_name() -> None:
    """Let stdout escape what its encoding lacks: one name of a file must not end a run (cp1252 on Windows)."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def _explain(error: Exception, state: Mapping[str, bool]) -> int:
    from mdps.runtime.errors import MdpsError

    if isinstance(error, MdpsError):
        click.echo(f"Error: {error}", err=True)
        return error.exit_code
    if isinstance(error, OSError) and error.errno in _DISKS:
        click.echo(f"Error: {_of_disk(error)}", err=True)
        return 1
    if _of_memory(error):
        click.echo(f"Error: {_NO_MEMORY}", err=True)
        return 1
    kind = type(error).__name__
    hint = "" if state.get("traceback") else "; run it again with --traceback to see where, and report it"
    click.echo(f"Error: unexpected {kind}: {error}{hint}", err=True)
    return 1


def _of_memory(error: Exception) -> bool:
    """Whether a library found no memory: Python, C++, an allocator of torch, a thread that could not start."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and bool(_ALLOCATION.search(str(error))))


def _of_disk(error: OSError) -> str:
    what, remedy = error.filename, "make room or choose another place"
    if what is None:
        printing = (click.echo.__code__, _flush.__code__)
        of_stdout = any(frame.f_code in printing for frame, _ in traceback.walk_tb(error.__traceback__))
        what = "standard output" if of_stdout else "a file"
    done = _DISKS[error.errno or errno.ENOSPC]
    return f"{what} cannot be {done}: {error.strerror}; {remedy if done == 'written' else 'check who may use it'}"
