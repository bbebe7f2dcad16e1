"""A fitted detector that scores pictures, kept on disk under what determines it."""

import hashlib
import importlib.util
import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mdps.benchmarks.looks import Box, Look
from mdps.benchmarks.peers.options import PeerOptions
from mdps.benchmarks.peers.recipes import PEERS, settings_of
from mdps.runtime.atomic import new_folder, write_text
from mdps.runtime.errors import ImageError, UsageError, require
from mdps.runtime.preprocessing import Preprocessing, read_image
from mdps.runtime.versions import versions


class Split(Protocol):
    """What is read of a `datasets.Category`."""

    @property
    def name(self) -> str: ...
    @property
    def train(self) -> tuple[Path, ...]: ...
    @property
    def validation(self) -> tuple[Path, ...]: ...


class PeerJudge:
    """Scores pictures with anomalib's un-normalised `pred_score` and `anomaly_map`, one at a time.

    Maps are float32 [h, w] in the size the pictures were resized to.
    """

    crop: Box | None = None
    threshold: float | None = None

    def __init__(self, name: str, module: Any, options: PeerOptions, provenance: Mapping[str, Any]) -> None:
        self.name = PEERS[name].title
        self.provenance = provenance
        self._module = module.eval().to(options.device)
        self._device = options.device
        self._read = Preprocessing(options.size)

    @property
    def notes(self) -> tuple[str, ...]:
        """That the fit was shorter than the published one, where it was."""
        steps, published = self.provenance.get("steps", 0), self.provenance.get("published_steps", 0)
        if steps >= published:
            return ()
        return (f"{self.name} was fitted for {steps:,} of its {published:,} published steps: it can do better",)

    def covered(self, size: tuple[int, int]) -> Box:
        """All of a picture of `size` (W, H)."""
        return (0.0, 0.0, float(size[0]), float(size[1]))

    def __call__(self, paths: Sequence[Path]) -> Iterator[tuple[float, NDArray[np.float32]]]:
        """(anomaly score, map [h, w]) of each picture in order; ImageError naming a file that cannot be read."""
        for path in paths:
            look = self._look(path)
            yield look.score, look.anomaly_map

    def looks(self, paths: Sequence[Path]) -> Iterator[Look | str]:
        """The same with the time from the decoded picture to the map; a sentence for a file that cannot be read."""
        for path in paths:
            try:
                yield self._look(path)
            except ImageError as error:
                yield str(error)

    def _look(self, path: Path) -> Look:
        import torch

        picture = read_image(path)
        start = time.perf_counter()
        image = torch.from_numpy((self._read(picture) + 1) / 2)[None].to(self._device)
        with torch.inference_mode():
            found = self._module(image)
        anomaly_map: NDArray[np.float32] = found.anomaly_map.float().cpu().numpy()
        score = float(found.pred_score.reshape(()))
        ms = (time.perf_counter() - start) * 1000
        return Look(score, anomaly_map.reshape(anomaly_map.shape[-2:]), ms)


def peer_judge(name: str, category: Split, *, work: Path, **options: Any) -> PeerJudge:
    """The detector `name` of PEERS, fitted to `category.train`, or read back from `work` where it was fitted before.

    `options` are the fields of `PeerOptions`. Raises UsageError for an unknown name or where anomalib is missing,
    PeerSkippedError where the detector needs something that is not on this machine.
    """
    require(name in PEERS, f"there is no peer {name!r}: choose among {', '.join(PEERS)}")
    if importlib.util.find_spec("anomalib") is None:
        raise UsageError("the peers run in anomalib, which is not installed: pip install 'mdps[peers]'")
    chosen = _settled(PeerOptions(**options))
    identity = _identity(name, category, chosen)
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
    folder = work / f"{name}-{key}"
    if not (folder / "fitted.json").is_file():
        _fit(name, category, chosen, identity, folder)
    return _open(name, chosen, folder)


def _settled(options: PeerOptions) -> PeerOptions:
    """With a device in place of `auto`; UsageError where the machine has not the one asked for."""
    import torch

    cuda = torch.cuda.is_available()
    if options.device.startswith("cuda") and not cuda:
        raise UsageError(f"--device {options.device} was asked for, and torch sees no GPU here: use cpu or auto")
    return replace(options, device="cuda" if cuda else "cpu") if options.device == "auto" else options


def _identity(name: str, category: Split, options: PeerOptions) -> dict[str, Any]:
    """All that a fit depends on. PeerSkippedError as from `settings_of`."""
    from mdps.benchmarks.peers.weights import sha256_of

    files = [path for path in (options.backbone_weights, options.teacher) if path is not None and path.is_file()]
    recipe = PEERS[name]
    return {
        "peer": name,
        "category": category.name,
        "train_sha256": _digest(category.train),
        "validation_sha256": _digest(category.validation),
        "image_size": list(options.size),
        "backbone": options.backbone if recipe.stages else None,
        "files": [sha256_of(path) for path in files],
        "settings": settings_of(name, options),
        "budget_minutes": options.minutes if recipe.iterative else None,
        "budget_steps": options.steps if recipe.iterative else None,
        "textures": str(options.textures) if name == "draem" else None,
        "seed": options.seed,
        "device": options.device.partition(":")[0],
        "anomalib": version("anomalib"),
    }


def _digest(paths: Sequence[Path]) -> str:
    """Of the files' bytes in their order."""
    from mdps.benchmarks.peers.weights import sha256_of

    return hashlib.sha256("".join(sha256_of(path) for path in paths).encode()).hexdigest()


def _fit(name: str, category: Split, options: PeerOptions, identity: Mapping[str, Any], folder: Path) -> None:
    import torch

    from mdps.benchmarks.peers.fitting import build, fit, quiet
    from mdps.benchmarks.peers.weights import sha256_of

    require(bool(category.train), f"{category.name} has no training images: {name} cannot be fitted")
    scratch = folder.with_name(f"{folder.name}.unfinished")
    scratch.mkdir(parents=True, exist_ok=True)
    with quiet():
        module, facts = build(name, options, scratch)
        facts |= fit(name, module, category.train, category.validation, options, scratch)
    with new_folder(folder, replace=True) as new:
        torch.save(module.state_dict(), new / "fitted.pt")
        facts |= {
            "fitted_sha256": sha256_of(new / "fitted.pt"),
            "versions": versions("anomalib", "lightning", "torch", "timm"),
        }
        write_text(new / "fitted.json", json.dumps({**identity, **facts}, indent=1) + "\n")
    shutil.rmtree(scratch)


def _open(name: str, options: PeerOptions, folder: Path) -> PeerJudge:
    import torch

    from mdps.benchmarks.peers.fitting import build, quiet

    with quiet(), tempfile.TemporaryDirectory() as scratch:
        module, _ = build(name, options, Path(scratch))
    module.load_state_dict(torch.load(folder / "fitted.pt", map_location="cpu", weights_only=True))
    return PeerJudge(name, module, options, json.loads((folder / "fitted.json").read_text(encoding="utf-8")))
