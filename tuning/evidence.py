"""The record of a search that goes into a tuning: what was tried, on what, and what came of it."""

from typing import Any

from mdps.runtime.machine import versions
from mdps.tuning.candidates import HIGH, LOW, Tried
from mdps.tuning.options import TuneOptions
from mdps.tuning.photographs import SEED, Split
from mdps.tuning.search import HEDGE, Search

MOST, DETAILED = 60, 12  # candidates that are told, and those told by kind
_LIBRARIES = ("torch", "timm", "numpy", "pillow", "onnxruntime")


def evidence(search: Search, chosen: Tried, options: TuneOptions, parts: Split) -> dict[str, Any]:
    """Return it as values of JSON, of bounded size; the candidates are those of the highest values."""
    ranked = sorted(search.tried, key=lambda one: -one.value)
    told = list(dict.fromkeys([*ranked[:MOST], chosen]))
    return {
        "chosen": chosen.candidate.name,
        "value": round(chosen.value, 4),
        "formula": "(image + pixel AUROC) / 2, its mean over the kinds averaged with that over their worst quarter",
        "budget_ms": options.budget_ms,
        "ties": f"within one standard error: fewest terms, the best; both sizes if worse by at most {HEDGE}",
        "scale": [LOW, HIGH],
        "seed": SEED,
        "images": {"fit": len(parts.fit), "scale": len(parts.scale), "defects put in": len(parts.bearing)},
        "defects": len(search.images.truth.kinds),
        "seconds": round(search.work.seconds, 1),
        "tried": len(search.tried),
        "candidates": [
            row(one, options.budget_ms, detailed=index < DETAILED or one is chosen) for index, one in enumerate(told)
        ],
        "left_out": search.left_out,
        "versions": versions(*_LIBRARIES),
    }


def row(one: Tried, budget_ms: float, *, detailed: bool) -> dict[str, Any]:
    """Return a candidate as it is told."""
    found: dict[str, Any] = {
        "name": one.candidate.name,
        "value": round(one.value, 4),
        "ms": round(one.ms, 1),
        "eligible": one.ms <= budget_ms,
    }
    return found | ({"kinds": {kind: [at.image, at.pixel] for kind, at in one.kinds.items()}} if detailed else {})
