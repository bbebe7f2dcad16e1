"""Which denoiser belongs to which category: one file for all, or a folder with one a category."""

from pathlib import Path

from mdps.benchmarks.reproduce.paper import plain_name
from mdps.runtime.errors import UsageError

_SUFFIXES = (".safetensors", ".pt", ".pth", ".ckpt")
_RUN_FILE = "denoiser.safetensors"  # what `mdps train` leaves in its run folder


def checkpoint_of(ckpt: Path, category: str) -> Path | None:
    """The checkpoint of a category, or None where the folder `ckpt` has none for it.

    A folder holds `<category>.safetensors` (or another format's suffix) or run folders
    `<category>/denoiser.safetensors`; a run folder itself and a diffusers model count as one checkpoint. Raises
    UsageError where nothing is at `ckpt`.
    """
    if not ckpt.exists():
        raise UsageError(f"there is no checkpoint or folder of checkpoints {ckpt}: give --ckpt what `mdps train` left")
    if ckpt.is_file() or _is_diffusers(ckpt):
        return ckpt
    if (ckpt / _RUN_FILE).is_file():
        return ckpt / _RUN_FILE
    return next((path for path in map(_checkpoint, _of_category(ckpt, category)) if path is not None), None)


def _is_diffusers(folder: Path) -> bool:
    return (folder / "config.json").is_file() or (folder / "model_index.json").is_file()


def _of_category(folder: Path, category: str) -> list[Path]:
    """What is named after the category, its exact name before another spelling of it."""
    named = [path for path in sorted(folder.iterdir()) if plain_name(_stem(path)) == plain_name(category)]
    return sorted(named, key=lambda path: _stem(path) != category)


def _stem(path: Path) -> str:
    return path.stem if path.suffix in _SUFFIXES else path.name


def _checkpoint(path: Path) -> Path | None:
    if path.is_file():
        return path if path.suffix in _SUFFIXES else None
    if _is_diffusers(path):
        return path
    return path / _RUN_FILE if (path / _RUN_FILE).is_file() else None
