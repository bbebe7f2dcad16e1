"""The bundle's checkpoint exported anew: as another detector, for another size of image, or as one file; each once."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mdps.export import ExportOptions, export_bundle
from mdps.export.methods import method
from mdps.export.single_file import export_single_file
from mdps.models.checkpoints import NETWORK_OPTIONS, CheckpointOptions, Denoiser, load_denoiser, save_denoiser
from mdps.models.unet import UNet
from mdps.runtime.engines import ENGINES
from mdps.runtime.errors import UsageError
from mdps.runtime.manifest import Manifest
from mdps.runtime.preprocessing import Preprocessing
from mdps.runtime.settings import Settings


@dataclass(frozen=True)
class Reexporter:
    """Exports into `folder` what `manifest` was made from. Methods raise as `export_bundle`, UsageError without ckpt.

    `backbone_weights` as at the bundle's own export.
    """

    manifest: Manifest
    ckpt: Path | None
    backbone_weights: Path | None
    folder: Path
    say: Callable[[str], None]

    def method(self, name: str) -> Path:
        """The bundle of a method of `export.methods`, with this bundle's feature network, samples and seed."""
        old, seen = self.manifest.settings, self.manifest.preprocessing
        features: dict[str, Any] = {"backbone_weights": self.backbone_weights}
        if method(name, seen.network_size).score.stages:  # the others compare pixels
            features |= {key: getattr(old.score, key) for key in ("backbone", "stages", "feature_size")}
        options = ExportOptions(
            method=name, samples=old.sampler.samples, seed=old.sampler.seed, crop=seen.crop, crop_size=seen.crop_size,
            roi=seen.roi, precision=self.manifest.precision, engine=self._engine, load=known_of(self.manifest),
            **features,
        )  # fmt: skip
        return self._export(self._checkpoint(), name, options)

    def size(self, side: int) -> Path:
        """The bundle at `side` x `side`: the same weights and settings, as many pixels of the map in proportion."""
        path = self.folder / f"{side}.safetensors"
        denoiser = load_denoiser(self._checkpoint(), known_of(self.manifest))
        save_resized(denoiser, side, path)
        options = _Alike(
            backbone_weights=self.backbone_weights, precision=self.manifest.precision, engine=self._engine,
            like=self.manifest,
        )  # fmt: skip
        return self._export(path, str(side), options)

    def one_file(self, bundle: Path) -> Path:
        """That bundle as one ONNX file, which its export compares with it; raises as `export_single_file`."""
        return export_single_file(bundle, self.folder / "detector.onnx", say=self.say)

    @property
    def _engine(self) -> str | None:
        """With the files of such an engine where the bundle has them."""
        own = (engine for engine in ENGINES if engine.reads == "own")
        return next((engine.name for engine in own if self.manifest.serves(engine)), None)

    def _checkpoint(self) -> Path:
        if self.ckpt is None:
            raise UsageError("no checkpoint: give --ckpt")
        return self.ckpt

    def _export(self, ckpt: Path, name: str, options: ExportOptions) -> Path:
        self.say(f"exporting {name}")
        return export_bundle(ckpt, self.folder / name, options)


@dataclass(frozen=True)
class _Alike(ExportOptions):
    """The settings of the bundle `like`, at another size."""

    like: Manifest | None = None

    def settings(self, size: tuple[int, int], *_: object, **__: object) -> Settings:
        assert self.like is not None
        old, (height, width) = self.like.settings, self.like.preprocessing.network_size
        top = max(1, round(old.score.top * size[0] * size[1] / (height * width)))
        return replace(old, score=replace(old.score, top=top))


def known_of(manifest: Manifest) -> CheckpointOptions:
    """How to read the bundle's checkpoint, from all that the bundle knows of it."""
    known: dict[str, Any] = {name: manifest.network[name] for name in NETWORK_OPTIONS if name in manifest.network}
    if known.get("num_head_channels") is not None:  # it decides; the number of heads is then a default
        known.pop("num_heads", None)
    return CheckpointOptions(**known, schedule=manifest.schedule, prediction=manifest.prediction)


def save_resized(denoiser: Denoiser, side: int, path: Path) -> None:
    """The same weights for images of `side` x `side`: all layers take any size, so nothing else changes."""
    network = UNet(replace(denoiser.config, image_size=side))
    network.load_state_dict(denoiser.network.state_dict())
    seen = Preprocessing(image_size=(side, side)).to_json()
    save_denoiser(path, network, denoiser.schedule, denoiser.prediction, seen, denoiser.extra)
