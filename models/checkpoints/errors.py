"""What can be wrong with a file of weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mdps.runtime.errors import UsageError


class CheckpointError(UsageError):
    """A checkpoint that cannot be read, is of an unknown kind, or leaves something open."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put the file's name in front of any CheckpointError of the block, so that inner functions need not carry it."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{path} {error}") from None
