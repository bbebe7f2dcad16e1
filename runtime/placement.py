"""On which card a bundle is loaded, and whether it fits there: asked before anything is opened."""

import hashlib
import warnings
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from mdps.runtime.bundle import Bundle, LoadOptions
from mdps.runtime.cards import Card, cards, choose
from mdps.runtime.engines import ENGINES, Engine
from mdps.runtime.errors import BackendError, BackendWarning, require
from mdps.runtime.machine import installed
from mdps.runtime.manifest import Manifest
from mdps.runtime.memory import Need, estimate, gigabytes
from mdps.runtime.user_cache import cache_file, readable_entries, write_newest

FILE_NAME = "card_memory.json"


@dataclass(frozen=True)
class Placement:
    """The card of one bundle, and what the memory it takes is remembered under; None where that cannot be measured."""

    card: Card
    key: str | None = None

    def loaded(self) -> None:
        """Remember what this bundle takes, after loading and warming up: what the card has less than before."""
        if self.key is None or self.card.free is None:
            return
        for now in cards():
            if now.uuid == self.card.uuid and now.free is not None:
                remember(self.key, self.card.free - now.free)


def place(bundle: Bundle, options: LoadOptions, engine: Engine) -> Placement | None:
    """Choose the card (see `cards.choose`) with room for this bundle; None where none computes.

    Raises UsageError for a card that is not there, or where none computes, BackendError without room; warns with a
    BackendWarning where one image fits and `max_batch` samples do not.
    """
    if not engine.on_card:
        others = ", ".join(one.name for one in ENGINES if one.on_card)
        require(
            options.device is None,
            f"the card {options.device!r} was given, but the engine {engine.name} computes on none: choose one of "
            f"{others}",
        )
        return None
    card = choose(options.device)
    return Placement(card, _checked(bundle, options, engine, card) if card.uuid else None)


def _checked(bundle: Bundle, options: LoadOptions, engine: Engine, card: Card) -> str:
    """See that there is room, and say what a measurement goes by."""
    manifest, roles = bundle.manifest, bundle.roles
    files = {role: plan.file for role, plan in manifest.plans_of(engine.name).items()}
    samples = min(bundle.settings.sampler.samples, options.max_batch)
    one, whole = (estimate(manifest, roles, count, files) for count in (samples, options.max_batch))
    releases = " ".join(f"{name} {version}" for name, version in installed(*engine.wheels).items())
    key = measurement_key(manifest, card, f"{engine.name} {releases}", samples)
    check_free(card, one, key, str(bundle.path), cards())
    if card.free is not None and whole.total > card.free:
        warnings.warn(
            f"{options.max_batch} samples at once may need {gigabytes(whole.total)} GB (estimated), card {card.index} "
            f"({card.name}) has {gigabytes(card.free)} free: fewer images at once always fit",
            BackendWarning,
            stacklevel=4,
        )
    return key


def measurement_key(manifest: Manifest, card: Card, engine: str, samples: int) -> str:
    """One word for this bundle on this kind of card with `engine`, its name and releases: another where any differs."""
    return hashlib.sha256(repr((manifest.files_sha256, card.name, engine, samples)).encode()).hexdigest()


def check_free(card: Card, need: Need, key: str, bundle: str, others: Iterable[Card] = ()) -> None:
    """BackendError where the card has less free memory than was measured, or else is estimated, to be needed.

    Nothing where the card does not say how much it has free. `others` are cards that could be taken instead.
    """
    if card.free is None:
        return
    measured = _measured().get(key)
    wanted = need.total if measured is None else measured
    if wanted <= card.free:
        return
    how = f"estimated: {need.details()}"
    if measured is not None:
        how = f"measured on this kind of card, see {cache_file(FILE_NAME)}"
    roomy = [other for other in others if other.index != card.index and (other.free or 0) >= wanted]
    instead = f"choose {roomy[0]}, which has {gigabytes(roomy[0].free or 0)}, " if roomy else ""
    raise BackendError(
        f"{bundle} needs {gigabytes(wanted)} GB ({how}), card {card.index} ({card.name}) has {gigabytes(card.free)} "
        f"free of {gigabytes(card.total or 0)}: {instead}close what else is on it (`nvidia-smi` lists that), or load "
        "with fewer samples or images at once"
    )


def remember(key: str, taken: int) -> None:
    """Write down what a loaded and warmed up bundle took; nothing where that is not possible or no sensible number."""
    if taken <= 0:
        return
    with suppress(OSError):
        write_newest(FILE_NAME, _measured(), key, taken)


def _measured() -> dict[str, int]:
    return {key: value for key, value in readable_entries(FILE_NAME).items() if type(value) is int and value > 0}
