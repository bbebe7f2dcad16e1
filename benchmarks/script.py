"""What the programs of this folder that are no commands of `mdps` share: `python -m mdps.benchmarks.NAME`."""

import sys
from collections.abc import Callable

from mdps.runtime.errors import MdpsError


def exit_code(work: Callable[[], object]) -> int:
    """Do `work`; a mistake of the user's is one sentence on stderr and the error's exit code."""
    try:
        work()
    except MdpsError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0
