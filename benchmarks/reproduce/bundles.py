"""Bundles of a reproduction: exported once into the work folder, found again by the hash of what they are made from."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from mdps import __version__
from mdps.benchmarks.reproduce.paper import plain_name
from mdps.export import ExportOptions, export_bundle
from mdps.export.presets import PRESETS
from mdps.models.checkpoints import describe_checkpoint
from mdps.runtime.manifest import FILE_NAME

Say = Callable[[str], None]


class Bundles:
    """The bundles in `folder`, made from `choices`: the options of `mdps export` under their names, None for unset."""

    def __init__(self, folder: Path, choices: Mapping[str, Any], say: Say) -> None:
        self._folder, self._choices, self._say = folder, dict(choices), say
        self._hashes: dict[Path, str] = {}

    def get(self, checkpoint: Path, category: str, changes: Mapping[str, Any]) -> Path:
        """The bundle of a checkpoint with `changes` of the choices; raises as `export_bundle`.

        A preset without a category ("mvtec") is that category's ("mvtec/bottle").
        """
        options = ExportOptions.of(self._of_category(category) | dict(changes))
        key = digest([__version__, self.checkpoint_hash(checkpoint), plain(options)])
        bundle = self._folder / key
        if not (bundle / FILE_NAME).is_file():
            export_bundle(checkpoint, bundle, options, force=True, say=self._say)
        return bundle

    def checkpoint_hash(self, checkpoint: Path) -> str:
        """SHA-256 of the checkpoint, read once."""
        if checkpoint not in self._hashes:
            self._hashes[checkpoint] = describe_checkpoint(checkpoint).sha256
        return self._hashes[checkpoint]

    def _of_category(self, category: str) -> dict[str, Any]:
        preset = self._choices.get("preset")
        if preset is None or "/" in preset:
            return self._choices
        of_all = f"{preset}/"
        names = {plain_name(name.removeprefix(of_all)): name for name in PRESETS if name.startswith(of_all)}
        return self._choices | {"preset": names.get(plain_name(category), of_all + category)}


def digest(value: object) -> str:
    """Sixteen hexadecimal digits that stand for a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def plain(value: Any) -> Any:
    """JSON values of options, to hash and to record."""
    if hasattr(value, "to_json"):
        return plain(value.to_json())
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
