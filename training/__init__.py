"""Fits a denoiser to images of good parts."""

from mdps.training.begun import begun
from mdps.training.config import (
    NETWORKS,
    RECIPES,
    TrainingConfig,
    paper_network,
    paper_recipe,
    small_network,
    small_recipe,
)
from mdps.training.engine import choose_device, first_process
from mdps.training.fit import fit
from mdps.training.framing import framing
from mdps.training.launch import fit_in_processes
from mdps.training.outcome import Outcome, outcome
from mdps.training.sources import ArraySource, CropSource, FileSource, FolderSource, Source
from mdps.training.stop import StoppedError

__all__ = [
    "NETWORKS",
    "RECIPES",
    "ArraySource",
    "CropSource",
    "FileSource",
    "FolderSource",
    "Outcome",
    "Source",
    "StoppedError",
    "TrainingConfig",
    "begun",
    "choose_device",
    "first_process",
    "fit",
    "fit_in_processes",
    "framing",
    "outcome",
    "paper_network",
    "paper_recipe",
    "small_network",
    "small_recipe",
]
