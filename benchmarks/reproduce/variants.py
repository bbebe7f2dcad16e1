"""What each table varies: other settings of the passes on one bundle, or another bundle."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mdps.benchmarks.reproduce.paper import method_label
from mdps.runtime.errors import UsageError
from mdps.runtime.records import Record
from mdps.runtime.settings import PassSettings, Settings

TABLES = ("1", "2", "3", "4", "5", "ablation", "rho")
OWN_METHODS = {"1": ("anoddpm", "autoddpm"), "2": ("anoddpm", "autoddpm"), "3": ("autoddpm",)}
SAMPLES = {"1": (1, 16), "2": (1, 16), "5": (1, 2, 4, 8, 16), "ablation": (1, 16)}
# Another method has settings of its own; what is chosen for MDPS says nothing of them.
_PUBLISHED: Mapping[str, Any] = dict.fromkeys(
    (
        "preset", "gradient", "guidance_norm", "guidance_scale", "masked_guidance_scale", "noise_level", "steps",
        "mask_pass", "mask_lambda", "mask_range", "stages", "eta", "pixel", "smoothing_sigma", "top",
    )
)  # fmt: skip


@dataclass(frozen=True)
class Changes(Record):
    """Settings of the passes that differ from the bundle's: they need no other graphs. None leaves a value alone."""

    guidance_scale: float | None = None
    samples: int | None = None
    steps: int | None = None
    seed: int | None = None
    early_exit: float | None = None

    def __call__(self, settings: Settings) -> Settings:
        """`settings` with these: guidance scale and steps of both passes, the rest of the sampler."""
        sampler = settings.sampler
        if self.steps is not None:
            first = with_steps(sampler.first_pass, self.steps)
            masked = sampler.masked_pass and with_steps(sampler.masked_pass, self.steps)
            sampler = replace(sampler, first_pass=first, masked_pass=masked)
        if self.guidance_scale is not None:
            first = replace(sampler.first_pass, guidance_scale=self.guidance_scale)
            masked = sampler.masked_pass and replace(sampler.masked_pass, guidance_scale=self.guidance_scale)
            sampler = replace(sampler, first_pass=first, masked_pass=masked)
        if self.samples is not None:
            sampler = replace(sampler, samples=self.samples)
        if self.seed is not None:
            sampler = replace(sampler, seed=self.seed)
        if self.early_exit is not None:
            sampler = replace(sampler, early_exit=self.early_exit)
        return replace(settings, sampler=sampler)


def with_steps(one: PassSettings, steps: int) -> PassSettings:
    """A pass of N = `steps`; by the paper's index from the largest noise level below its own that N divides."""
    if one.skip is not None:
        return replace(one, skip=-(-one.noise_level // steps))
    return replace(one, steps=steps, noise_level=max(steps, one.noise_level - one.noise_level % steps))


@dataclass(frozen=True)
class Variant:
    """One row of a table on our denoiser.

    `export`: fields of ExportOptions that differ. `first_pass`: the row shows the first pass of the run, so without a
    mask; it costs nothing where the same run is in the table already.
    """

    method: str
    label: str
    changes: Changes = Changes()
    export: Mapping[str, Any] = field(default_factory=dict)
    first_pass: bool = False


def variants(
    table: str, samples: tuple[int, ...], methods: tuple[str, ...], scales: tuple[float, ...]
) -> tuple[Variant, ...]:
    """The rows of a table that our own sampler makes, in its order; `methods` are other detectors on our denoiser."""
    if table == "4":
        return METRICS
    if table == "rho":
        return tuple(Variant(f"rho_{scale:g}", f"rho = {scale:g}", Changes(guidance_scale=scale)) for scale in scales)
    if table == "ablation":
        return (*ABLATION, *METRICS[:2], *(_samples(count) for count in samples if count > 1))
    if table not in TABLES:
        raise UsageError(f"there is no table {table!r}; there are {', '.join(TABLES)}")
    others = tuple(Variant(name, method_label(name), export={**_PUBLISHED, "method": name}) for name in methods)
    return (*(_samples(count) for count in samples), *others)


def _samples(count: int) -> Variant:
    return Variant(f"mdps_{count}", f"MDPS, N_s = {count}", Changes(samples=count))


# Table 4. Without stages no features are compared, with eta 0 no pixels.
METRICS = (
    Variant("pixel_only", method_label("pixel_only"), Changes(samples=1), {"stages": (), "eta": 1.0, "pixel": "l1"}),
    Variant("perceptual_only", method_label("perceptual_only"), Changes(samples=1), {"eta": 0.0}),
    Variant("both", method_label("both"), Changes(samples=1)),
)
# The paper's section "Effectiveness of MDPS". Without guidance and mask what is left is DDIM.
ABLATION = (
    Variant("full", "MDPS", Changes(samples=1)),
    Variant("no_mask", "without mask", Changes(samples=1), first_pass=True),
    Variant("no_posterior", "without posterior (rho = 0)", Changes(guidance_scale=0.0, samples=1)),
    Variant("vanilla", "vanilla DDIM", Changes(guidance_scale=0.0, samples=1), first_pass=True),
)
