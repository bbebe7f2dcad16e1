"""Other detectors through anomalib: fitted to the same good images, judged on the same test images by the same code."""

from mdps.benchmarks.peers.judge import PeerJudge, peer_judge
from mdps.benchmarks.peers.options import PeerOptions, PeerSkippedError
from mdps.benchmarks.peers.recipes import PEERS

__all__ = ["PEERS", "PeerJudge", "PeerOptions", "PeerSkippedError", "peer_judge"]
