"""What a user may choose about the other detectors."""

from mdps.benchmarks.options import PeerOptions as PeerOptions
from mdps.runtime.errors import UsageError


class PeerSkippedError(UsageError):
    """A detector that cannot run with what is on this machine; the text is the reason its row gives."""
