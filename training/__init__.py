"""Fits a denoiser to images of good parts. What needs torch is imported when it is asked for."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mdps.training.config import (
    NETWORKS,
    RECIPES,
    TrainingConfig,
    framing,
    paper_network,
    paper_recipe,
    small_network,
    small_recipe,
)
from mdps.training.crops import CropsOfFiles, CropsSource
from mdps.training.folder import Outcome, outcome, resumed_settings
from mdps.training.sources import ArraySource, FileSource, Source

if TYPE_CHECKING:
    from mdps.training.engine import choose_device, first_process
    from mdps.training.launch import fit_in_processes
    from mdps.training.loop import StoppedError, fit

__all__ = [
    "NETWORKS",
    "RECIPES",
    "ArraySource",
    "CropsOfFiles",
    "CropsSource",
    "FileSource",
    "Outcome",
    "Source",
    "StoppedError",
    "TrainingConfig",
    "choose_device",
    "first_process",
    "fit",
    "fit_in_processes",
    "framing",
    "outcome",
    "paper_network",
    "paper_recipe",
    "resumed_settings",
    "small_network",
    "small_recipe",
]
_WITH_TORCH = {
    "StoppedError": "loop",
    "choose_device": "engine",
    "first_process": "engine",
    "fit": "loop",
    "fit_in_processes": "launch",
}


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)
