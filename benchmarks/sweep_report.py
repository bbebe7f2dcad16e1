"""Table, plot and JSON of a sweep."""

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mdps.benchmarks.sweep import Setting, Sweep, Trial
from mdps.runtime.atomic import write_bytes, write_text

_SHOWN = 12  # of the first pass's weightings, the best
PARAMETERS: dict[str, Callable[[Setting], float | None]] = {
    "rho": lambda setting: setting.scale,
    "eta": lambda setting: setting.scoring.eta,
    "smoothing": lambda setting: setting.scoring.smoothing,
    "top": lambda setting: setting.scoring.top,
    "lambda": lambda setting: setting.mask_lambda,
}


def write_report(sweep: Sweep, out: Path) -> None:
    """sweep.json, sweep.md and sweep.png in the folder `out`, each whole or not at all."""
    write_text(out / "sweep.json", json.dumps(to_json(sweep), indent=1) + "\n")
    write_text(out / "sweep.md", markdown(sweep))
    write_bytes(out / "sweep.png", plot(sweep))


def to_json(sweep: Sweep) -> dict[str, Any]:
    """Every trial, the chosen and the default one, and those on the other data set."""
    return {
        "chosen": sweep.chosen.to_json(),
        "default": sweep.default.to_json(),
        "confirmed": sweep.confirmed and sweep.confirmed.to_json(),
        "images": sweep.images,
        "provenance": sweep.provenance,
        "trials": [trial.to_json() for trial in sweep.trials],
    }


def markdown(sweep: Sweep) -> str:
    """The chosen and the default setting, all masked passes, and the best weightings of the first pass."""
    provenance = sweep.provenance
    heading = [
        f"# Sweep on {provenance['category']}, {sweep.images} test images",
        f"`{provenance['command']}`" if provenance["command"] else "",
        f"Checkpoint {provenance['checkpoint']['name']}, sha256 {provenance['checkpoint']['sha256']}; seed "
        f"{provenance['seed']}. Smoothing in pixels of a 64 x 64 image, top in pixels of a 256 x 256 map.",
    ]
    parts = [*filter(None, heading), _table([("chosen", sweep.chosen), ("default", sweep.default)])]
    if sweep.confirmed is not None:
        on = sweep.confirmed
        parts += [
            f"## The same on {on.category}, {on.images} test images",
            _table([("chosen", on.chosen), ("default", on.default)]),
        ]
    ranked = sorted(sweep.masked, key=lambda trial: trial.merit, reverse=True)
    parts += ["## Both passes", _table([("", trial) for trial in ranked])]
    ranked = sorted(sweep.first, key=lambda trial: trial.merit, reverse=True)
    parts += [
        f"## First pass alone, the best {min(_SHOWN, len(ranked))} of {len(ranked)}",
        _table([("", trial) for trial in ranked[:_SHOWN]]),
    ]
    return "\n\n".join(parts) + "\n"


def _table(trials: Sequence[tuple[str, Trial]]) -> str:
    lines = [["", *PARAMETERS, "image AUROC %", "pixel AUROC %"], ["---", *["---:"] * 7]]
    for name, trial in trials:
        values = [_number(read(trial.setting)) for read in PARAMETERS.values()]
        lines.append([name, *values, f"{100 * trial.image_auroc:.2f}", f"{100 * trial.pixel_auroc:.2f}"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"


def plot(sweep: Sweep) -> bytes:
    """A PNG with a panel a parameter: the best over the other parameters, and the others as chosen, both AUROCs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.1 * len(PARAMETERS), 3.4), layout="constrained")
    panels = figure.subplots(1, len(PARAMETERS), sharey=True)
    for axes, (name, read) in zip(panels, PARAMETERS.items(), strict=True):
        trials = sweep.masked if name == "lambda" else sweep.first
        free = {name} if name == "lambda" else {name, "lambda"}  # the first pass knows no lambda
        for style, shown in (("-", _as_chosen(trials, sweep.chosen.setting, free)), (":", trials)):
            best = _best_by(shown, read)
            places = list(range(len(best)))
            for metric, colour in (("image_auroc", "tab:blue"), ("pixel_auroc", "tab:orange")):
                values = [100 * max(getattr(trial, metric) for trial in group) for group in best.values()]
                axes.plot(places, values, style, marker="o", color=colour, markersize=4)
            axes.set_xticks(places, [_number(value) for value in best])
        axes.set_xlabel(f"{name}, both passes" if name == "lambda" else name)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("AUROC %")
    panels[0].plot([], [], "-o", color="tab:blue", label="image")
    panels[0].plot([], [], "-o", color="tab:orange", label="pixel")
    panels[0].plot([], [], "k:", label="best of the others")
    panels[0].legend(fontsize=7)
    figure.suptitle(f"{sweep.provenance['category']}, {sweep.images} images; lines: the others as chosen", fontsize=9)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def _as_chosen(trials: Sequence[Trial], chosen: Setting, free: set[str]) -> list[Trial]:
    """The trials that differ from the chosen setting in the `free` parameters at most."""
    others = [read for name, read in PARAMETERS.items() if name not in free]
    return [trial for trial in trials if all(read(trial.setting) == read(chosen) for read in others)]


def _best_by(trials: Sequence[Trial], read: Callable[[Setting], float | None]) -> dict[float, list[Trial]]:
    """Trials by the value of a parameter, ascending."""
    found: dict[float, list[Trial]] = {}
    for trial in trials:
        value = read(trial.setting)
        if value is not None:
            found.setdefault(value, []).append(trial)
    return dict(sorted(found.items()))
