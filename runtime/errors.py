"""Errors as one sentence that a user can act on; `exit_code` is the code the command line leaves with."""

from collections.abc import Sequence


class MdpsError(Exception):
    """Base of every error this project raises on purpose; its text is one sentence for the user."""

    exit_code = 1


class UsageError(MdpsError):
    """Wrong arguments, paths or options."""

    exit_code = 2


class BundleError(UsageError):
    """A bundle that is missing, damaged, or made by another version."""


class CalibrationError(UsageError):
    """A verdict or a frozen mask range was asked of a bundle that was not calibrated for it."""


class ImageError(MdpsError):
    """An image that cannot be read, or is not what the detector takes."""

    exit_code = 3


class BackendError(MdpsError):
    """The engine library is missing, refuses a graph or provider, or computed something that is no number."""


class BackendWarning(UserWarning):
    """Something of an engine is not as it could be, such as a choice that is not remembered; results are unaffected."""


def first_line(text: str, otherwise: str = "no reason given") -> str:
    """The first line of what a library says, short enough for a sentence of ours."""
    return (text.strip().splitlines() or [otherwise])[0].rstrip(".: ")[:300]


def require(condition: bool, sentence: str) -> None:
    """Raise UsageError with `sentence` unless `condition` holds."""
    if not condition:
        raise UsageError(sentence)


def refuse_unreadable(faults: Sequence[str], images: int, what: str) -> None:
    """Raise ImageError, naming up to five, where there are faults: `what` uses all of so many `images` or none."""
    if faults:
        more = f"; and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise ImageError(
            f"{len(faults)} of {images} images cannot be read, and {what} uses all of them or none: "
            f"{'; '.join(faults[:5])}{more}"
        )
