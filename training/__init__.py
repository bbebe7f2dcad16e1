"""Fits a denoiser to images of good parts."""

from mdps.training.config import TrainingConfig, paper_network, paper_recipe, small_network, small_recipe
from mdps.training.fit import fit
from mdps.training.sources import ArraySource, CropSource, FolderSource, Source

__all__ = [
    "ArraySource",
    "CropSource",
    "FolderSource",
    "Source",
    "TrainingConfig",
    "fit",
    "paper_network",
    "paper_recipe",
    "small_network",
    "small_recipe",
]
