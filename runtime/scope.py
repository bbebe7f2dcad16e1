"""The facts of a product's photographs that no picture tells."""

from dataclasses import dataclass
from typing import Annotated

from mdps.runtime.option import Option, check_ranges
from mdps.runtime.records import Record


@dataclass(frozen=True)
class Scope(Record):
    """A product's photographs: `mm_per_pixel` of the part, None where nobody has said it."""

    mm_per_pixel: Annotated[
        float | None,
        Option("Millimetres a pixel of a photograph, in which regions are told too.", low=0, above=True, seldom=True),
    ] = None

    def __post_init__(self) -> None:
        check_ranges(self)
