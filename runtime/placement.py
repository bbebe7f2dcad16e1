"""On which card a bundle is loaded, and whether it fits there: asked before anything is opened."""

import warnings
from dataclasses import dataclass

from mdps.runtime.bundle import Bundle, LoadOptions
from mdps.runtime.cards import Card, cards, choose
from mdps.runtime.engines import ENGINES, Engine
from mdps.runtime.errors import BackendWarning, require
from mdps.runtime.machine import installed
from mdps.runtime.memory import check_room, estimate, gigabytes, measurement_key, remember


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
    manifest, roles = bundle.manifest, bundle.settings.roles
    files = {role: plan.file for role, plan in manifest.plans_of(engine.name).items()}
    samples = min(bundle.settings.sampler.samples, options.max_batch)
    one, whole = (estimate(manifest, roles, count, files) for count in (samples, options.max_batch))
    releases = " ".join(f"{name} {version}" for name, version in installed(*engine.wheels).items())
    key = measurement_key(manifest, card, f"{engine.name} {releases}", samples)
    check_room(card, one, key, str(bundle.path), cards())
    if card.free is not None and whole.total > card.free:
        warnings.warn(
            f"{options.max_batch} samples at once may need {gigabytes(whole.total)} GB (estimated), card {card.index} "
            f"({card.name}) has {gigabytes(card.free)} free: fewer images at once always fit",
            BackendWarning,
            stacklevel=4,
        )
    return key
