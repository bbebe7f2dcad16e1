"""Errors of a file of weights."""

import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mdps.runtime.errors import UsageError

_LONGEST = 400


class CheckpointError(UsageError):
    """A checkpoint that cannot be read, is of an unknown kind, or leaves something open."""


def shown(value: object) -> str:
    """Quote what a file says in a sentence: on one line and short, however large, deep or odd it is."""
    try:
        return " ".join(reprlib.repr(value).split())
    except (ValueError, RuntimeError):  # numbers of more than 4,300 digits; values that refer to themselves
        return f"some {type(value).__name__}"


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put the file's name in front of any CheckpointError of the block, so that inner functions need not carry it."""
    try:
        yield
    except CheckpointError as error:
        sentence = " ".join(str(error).split())  # may quote names of the file, of any length
        if len(sentence) > _LONGEST:
            sentence = f"{sentence[: _LONGEST // 2]} ... {sentence[-_LONGEST // 2 :]}"
        raise CheckpointError(f"{path} {sentence}") from None
