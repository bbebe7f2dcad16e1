"""Reads the denoisers that public code writes, and writes our own."""

from mdps.models.checkpoints.doubts import doubts
from mdps.models.checkpoints.errors import CheckpointError
from mdps.models.checkpoints.load import Denoiser, describe_checkpoint, load_denoiser
from mdps.models.checkpoints.own import save_denoiser
from mdps.models.checkpoints.report import CheckpointReport
from mdps.models.checkpoints.statements import NETWORK_OPTIONS, LoadOptions, Prediction

__all__ = [
    "NETWORK_OPTIONS",
    "CheckpointError",
    "CheckpointReport",
    "Denoiser",
    "LoadOptions",
    "Prediction",
    "describe_checkpoint",
    "doubts",
    "load_denoiser",
    "save_denoiser",
]
