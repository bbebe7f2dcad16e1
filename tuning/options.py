"""Options of `mdps tune`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from mdps.runtime.errors import require
from mdps.runtime.option import Option


@dataclass(frozen=True)
class TuneOptions:
    """How a bundle is tuned. UsageError for a value out of its range.

    `report` None writes it beside the bundle, `work` likewise keeps what a run needs to go on after a stop.
    """

    budget_ms: Annotated[float, Option("Milliseconds that an image may take on this machine.", low=0, above=True)] = (
        100.0
    )
    align: Annotated[
        bool, Option("Move each part to where a reference view shows it, first; for parts that lie shifted or turned.")
    ] = False
    report: Annotated[Path | None, Option("Where the page goes [default: BUNDLE.tune.html].", seldom=True)] = None
    work: Annotated[
        Path | None, Option("Folder that lets a stopped run go on [default: BUNDLE.tune].", seldom=True)
    ] = None
    minutes: Annotated[float, Option("After which no more candidates are begun.", low=0, above=True, seldom=True)] = (
        15.0
    )
    cascade: Annotated[
        bool, Option("The published method may judge again what is near the threshold.", seldom=True)
    ] = True
    per_kind: Annotated[int, Option("Defects of each kind that candidates are tried on.", low=1, seldom=True)] = 9
    backbone_weights: Annotated[
        Path | None, Option("Weights of the bundle's feature network [default: installed or cached].", seldom=True)
    ] = None

    def __post_init__(self) -> None:
        require(self.budget_ms > 0, f"the budget of {self.budget_ms:g} ms should be positive")
        require(self.minutes > 0, f"{self.minutes:g} minutes should be positive")
        require(self.per_kind >= 1, f"{self.per_kind} defects a kind should be at least one")
