"""Reads the denoisers that public code writes, and writes our own. torch is imported when it is needed."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mdps.models.checkpoints.report import CheckpointError, CheckpointReport, crops_of, run_warnings
from mdps.models.checkpoints.statements import NETWORK_OPTIONS, CheckpointOptions, Prediction

if TYPE_CHECKING:
    from mdps.models.checkpoints.load import Denoiser, describe_checkpoint, load_denoiser
    from mdps.models.checkpoints.own import save_denoiser

__all__ = [
    "NETWORK_OPTIONS",
    "CheckpointError",
    "CheckpointOptions",
    "CheckpointReport",
    "Denoiser",
    "Prediction",
    "crops_of",
    "describe_checkpoint",
    "load_denoiser",
    "run_warnings",
    "save_denoiser",
]
_WITH_TORCH = {"Denoiser": "load", "describe_checkpoint": "load", "load_denoiser": "load", "save_denoiser": "own"}


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)
