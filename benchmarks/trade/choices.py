"""The ways of spending time that are compared, each a variant that `reproduce.runner` runs once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mdps.benchmarks.options import PRECISIONS
from mdps.benchmarks.reproduce.variants import Changes, Variant
from mdps.runtime.engines import ENGINES

EXACT, FREE, DDAD = "exact", "jacobian-free", "ddad"
GRADIENTS = (EXACT, FREE, DDAD)
ENGINE_OF = {f"{row.arithmetic}-steps": row.name for row in ENGINES if row.arithmetic}
"""The precisions that are an engine's, not the bundle's."""
OTHER_SEED = 1


@dataclass(frozen=True)
class Choice:
    """One way: a gradient, N steps a pass, one pass or two, and what is reduced ("" or one of PRECISIONS).

    `scale` is the gradient's guidance scale, None for the bundle's own; `seed` None for the bundle's own. `early_exit`
    is the share of `SamplerSettings`, 0 for none.
    """

    gradient: str
    steps: int
    mask_pass: bool = True
    precision: str = ""
    scale: float | None = None
    seed: int | None = None
    early_exit: float = 0.0

    @property
    def name(self) -> str:
        """For programs: such as "exact_10", "jacobian-free_5_one_pass"."""
        parts = [self.gradient, str(self.steps), "" if self.mask_pass else "one_pass", self.precision]
        parts += ["" if self.seed is None else f"seed_{self.seed}", f"exit_{self.early_exit:g}" * bool(self.early_exit)]
        return "_".join(part for part in parts if part)

    @property
    def label(self) -> str:
        """For people."""
        parts = [self.gradient, f"N = {self.steps}", "" if self.mask_pass else "no mask pass"]
        parts += [PRECISIONS.get(self.precision, ""), "" if self.seed is None else f"seed {self.seed}"]
        parts.append(f"early exit {self.early_exit:g}" * bool(self.early_exit))
        return ", ".join(part for part in parts if part)

    @property
    def engine(self) -> str | None:
        """What computes it, None for the study's own engine."""
        return ENGINE_OF.get(self.precision)

    @property
    def variant(self) -> Variant:
        """What the runner runs; with one pass, the first of a run of two."""
        export: dict[str, Any] = {"gradient": self.gradient}
        export |= {"reduced": self.precision} if self.precision and self.engine is None else {}
        export |= {"calibrated": self.steps} if self.early_exit else {}
        if self.scale is not None:
            # The export tries its graphs out: at the scale of another gradient they would rightly be refused.
            export |= {"guidance_scale": self.scale, "masked_guidance_scale": self.scale}
        changes = Changes(self.scale, steps=self.steps, seed=self.seed, early_exit=self.early_exit or None)
        return Variant(self.name, self.label, changes, export, first_pass=not self.mask_pass)


def choices(
    steps: Sequence[int],
    equal_time: Mapping[str, Sequence[int]],
    scales: Mapping[str, float],
    precisions: Sequence[str],
    exits: Sequence[float] = (),
) -> tuple[Choice, ...]:
    """All of them, the reference first: exact with the most of `steps` and both passes.

    `equal_time`: the steps of each gradient that take as long as the exact gradient's. `scales`: guidance scales of
    gradients whose own the bundle's is not.
    """
    most = max(steps)
    found = [Choice(EXACT, most)]
    for gradient in GRADIENTS:
        for count in sorted({*steps, *equal_time.get(gradient, ())}, reverse=True):
            found += [Choice(gradient, count, both, scale=scales.get(gradient)) for both in (True, False)]
    found += [Choice(EXACT, most, precision=precision) for precision in precisions]
    found += [Choice(EXACT, most, early_exit=share) for share in exits]
    found.append(Choice(EXACT, most, seed=OTHER_SEED))
    return tuple(dict.fromkeys(found))
