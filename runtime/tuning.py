"""The detector that `mdps tune` fitted to the parts of a product: few calls of the network, statistics, a cascade."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mdps.runtime.errors import require
from mdps.runtime.graphs import DDAD, GUIDED, STEPS, GraphEntry
from mdps.runtime.preprocessing import Preprocessing
from mdps.runtime.records import Record
from mdps.runtime.settings import SamplerSettings, Settings

StatisticKind = Literal["position", "shared", "bank"]
Kind = Literal["map", "pixels", StatisticKind]
FeatureSource = Literal["photograph", "residual"]
Source = Literal[FeatureSource, "reconstruction"]

PHOTOGRAPH, FUSION = "photograph", "fusion"
"""Roles of a tuning's graphs beside its terms: features of the photograph, and the sum of the scaled terms."""


@dataclass(frozen=True)
class Term(Record):
    """One term of the fused map: a graph of the tuning, or for the kind "map" that of the bundle's score graph.

    `kind`: "map" is the reconstruction's own anomaly map, "pixels" its pixel residual in standard deviations of good
    parts; "position" is the Mahalanobis distance to a Gaussian of each position (PaDiM, Defard et al. 2021), "shared"
    that to one Gaussian of all positions, "bank" the distance to the nearest of a coreset of patches (PatchCore, Roth
    et al. 2022). The last three are `of` features of the "photograph", or of the "residual" between features of the
    observation and of its reconstruction. Raw values `low` and `high`, quantiles of the maps of good images that took
    no part in the fit, become 0 and 1. `weight` > 0 is that in the sum.
    """

    name: str
    kind: Kind
    of: Source
    low: float
    high: float
    weight: float

    def __post_init__(self) -> None:
        require(self.low < self.high, f"the scale of the term {self.name} is empty: {self.low} to {self.high}")
        require(self.weight > 0, f"the weight {self.weight} of the term {self.name} should be positive")
        require((self.of == "reconstruction") == (self.kind in ("map", "pixels")), f"{self.kind} is not of {self.of}")


@dataclass(frozen=True)
class Cascade(Record):
    """The published method judges again what the tuned detector scores from `low` to `high`.

    Its scores from `published_low` to `published_high` become `low` to `high`, those beyond are cut to them, so that
    one threshold is enough and no image leaves the band. Its map goes the same way, uncut: map and score are of one
    detector.
    """

    low: float
    high: float
    published_low: float
    published_high: float

    def __post_init__(self) -> None:
        require(self.low < self.high and self.published_low < self.published_high, "the bands should not be empty")


@dataclass(frozen=True)
class Tuning(Record):
    """A fused detector of one product, beside the settings of the bundle, which stay as published.

    `sampler` reconstructs for the terms that are not of the photograph, None where there are none. `photograph` makes
    the feature network's view [3, h, w] of a picture, None where no term reads it. `graphs` are those of the terms by
    name, PHOTOGRAPH where it is needed, and FUSION. `evidence` is a record for people.
    """

    sampler: SamplerSettings | None
    photograph: Preprocessing | None
    terms: tuple[Term, ...]
    graphs: dict[str, GraphEntry]
    cascade: Cascade | None = None
    evidence: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(bool(self.terms), "a tuning needs at least one term")
        names = [term.name for term in self.terms]
        require(len(set(names)) == len(names), f"two terms have one name: {names}")
        of_photograph = any(term.of == "photograph" for term in self.terms)
        require(of_photograph == (self.photograph is not None), "terms of the photograph, and only they, need one")
        reconstructed = any(term.of != "photograph" for term in self.terms)
        require(reconstructed == (self.sampler is not None), "terms of a reconstruction, and only they, need a sampler")
        wanted = {term.name for term in self.terms if term.kind != "map"} | {FUSION}
        wanted |= {PHOTOGRAPH} if of_photograph else set()
        require(set(self.graphs) == wanted, f"the graphs should be {sorted(wanted)}, they are {sorted(self.graphs)}")

    @property
    def scores(self) -> bool:
        """Whether the bundle's score graph is needed for the few calls, and not their samples alone."""
        several = self.sampler is not None and self.sampler.masked_pass is not None
        return several or any(term.kind == "map" for term in self.terms)

    def settings(self, published: Settings) -> Settings:
        """Return those of the tuned detector in a bundle with these; nothing of it skips a pass.

        The range of a mask is calibrated for the published method alone, so that it is asked for where that judges too.
        """
        sampler = replace(self.sampler or published.sampler, early_exit=0.0)
        mask = published.mask if self.cascade else replace(published.mask, range="per-image")
        return replace(published, sampler=sampler, mask=mask)

    def few_roles(self, published: Settings) -> tuple[str, ...]:
        """Return the graphs of the bundle that reconstruct; none where nothing does."""
        few = self.settings(published).roles if self.sampler else ()
        return few if self.scores else tuple(role for role in few if role in STEPS)

    def roles(self, published: Settings) -> tuple[str, ...]:
        """Return the graphs of the bundle that it runs, those of a cascade included."""
        again = published.roles if self.cascade else ()
        other = self.settings(published).sampler.gradient != published.sampler.gradient
        few = (DDAD if role == GUIDED and other else role for role in self.few_roles(published))
        return tuple(dict.fromkeys((*few, *again)))
