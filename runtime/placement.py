"""On which card a bundle is loaded, and whether it fits there: asked before anything is opened."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mdps.runtime.cards import Card, cards, choose
from mdps.runtime.choice import BackendWarning
from mdps.runtime.errors import require
from mdps.runtime.manifest import Manifest
from mdps.runtime.memory import CardSituation, check_room, estimate, gigabytes, remember
from mdps.runtime.ort import ON_CARDS
from mdps.runtime.plans import plans_of
from mdps.runtime.session import PLAN_BACKENDS
from mdps.runtime.settings import Settings
from mdps.runtime.versions import installed

_LIBRARIES = ("onnxruntime-gpu", "tensorrt", "tensorrt-rtx-cu13-libs", "torch")


@dataclass(frozen=True)
class BundleCard:
    """The card of one bundle: CUDA's number of it, the card where the machine lists it, what its need is kept under."""

    ordinal: int = 0
    card: Card | None = None
    situation: CardSituation | None = None

    def loaded(self) -> None:
        """After loading and warming up: what the card has less than before is what this bundle takes."""
        if self.card is None or self.card.free is None or self.situation is None:
            return
        for now in cards():
            if now.uuid == self.card.uuid and now.free is not None:
                remember(self.situation, self.card.free - now.free)


def on_card(backend: str, provider: str) -> bool:
    """Whether this backend computes on an NVIDIA card."""
    return backend in PLAN_BACKENDS or provider in ON_CARDS


def place(
    path: Path,
    manifest: Manifest,
    settings: Settings,
    *,
    backend: str,
    provider: str,
    device: str | int | None,
    max_batch: int,
) -> BundleCard:
    """The card `device` (see `cards.choose`) with room for this bundle; nothing is asked where none computes.

    Raises UsageError for a card that is not there, or where none computes, BackendError without room; warns with a
    BackendWarning where one image fits and `max_batch` samples do not.
    """
    if not on_card(backend, provider):
        require(
            device is None,
            f"the card {device!r} was given, but {backend} on {provider} computes on none: choose the provider cuda or "
            "tensorrt of onnxruntime, or the backend tensorrt or tensorrt-rtx",
        )
        return BundleCard()
    chosen = choose(device)
    if chosen.card is None:
        return BundleCard(chosen.ordinal)
    files = _plans(manifest, backend, str(path))
    samples = min(settings.sampler.samples, max_batch)
    one, whole = (estimate(manifest, settings.roles, count, files) for count in (samples, max_batch))
    release = " ".join(f"{name} {version}" for name, version in installed(*_LIBRARIES).items())
    situation = CardSituation.of(manifest, chosen.card, f"{backend} {provider} {release}", samples)
    check_room(chosen.card, one, situation, str(path), cards())
    if chosen.card.free is not None and whole.total > chosen.card.free:
        warnings.warn(
            f"{max_batch} samples at once may need {gigabytes(whole.total)} GB (estimated), card {chosen.card.index} "
            f"({chosen.card.name}) has {gigabytes(chosen.card.free)} free: fewer images at once always fit",
            BackendWarning,
            stacklevel=3,
        )
    return BundleCard(chosen.ordinal, chosen.card, situation)


def _plans(manifest: Manifest, backend: str, where: str) -> Mapping[str, str]:
    return {entry.role: entry.file for entry in plans_of(manifest, where) if entry.backend == backend}
