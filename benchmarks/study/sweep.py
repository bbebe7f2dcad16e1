"""A sweep of the settings that the paper leaves open: rho, the pixel weight eta, smoothing, top pixels, lambda.

Posterior samples are drawn once a rho; every weighting is tried on their terms. The mask's lambda changes the second
pass, so it is tried for the few best weightings and for the default one only.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from tqdm import tqdm

from mdps.benchmarks.data import category_of
from mdps.benchmarks.kit import Fields, Say, figure_png, quiet, table, write_report
from mdps.benchmarks.options import SweepOptions
from mdps.benchmarks.study import Bundles
from mdps.benchmarks.study.terms import Scoring, TermStore, TestSet, load_test_set, masks, scores
from mdps.runtime.errors import UsageError
from mdps.runtime.manifest import Manifest
from mdps.runtime.settings import Settings, paper_settings

PLAIN_TERMS: Mapping[str, Any] = {"eta": 0.0, "smoothing_sigma": 0.0, "mask_pass": True}


@dataclass(frozen=True)
class Setting:
    """One point of the sweep; `mask_lambda` None is the first pass alone."""

    scale: float
    scoring: Scoring
    mask_lambda: float | None = None


@dataclass(frozen=True)
class Trial:
    """A setting with its image and pixel AUROC."""

    setting: Setting
    image_auroc: float
    pixel_auroc: float

    @property
    def merit(self) -> tuple[float, float]:
        """The order of choice: the mean of both AUROCs, then the pixel one, as images are often all right."""
        return ((self.image_auroc + self.pixel_auroc) / 2, self.pixel_auroc)

    def to_json(self) -> dict[str, Any]:
        """The setting and both AUROCs, flat."""
        scoring = asdict(self.setting.scoring)
        own = {"rho": self.setting.scale, **scoring, "lambda": self.setting.mask_lambda}
        return own | {"image_auroc": self.image_auroc, "pixel_auroc": self.pixel_auroc}


@dataclass(frozen=True)
class Sweep(Fields):
    """All trials on one data set, the best of those with both passes, and the default setting's."""

    trials: tuple[Trial, ...]
    chosen: Trial
    default: Trial
    images: int
    provenance: dict[str, Any]
    confirmed: "Confirmation | None" = None

    @property
    def first(self) -> tuple[Trial, ...]:
        """The trials of the first pass alone."""
        return tuple(trial for trial in self.trials if trial.setting.mask_lambda is None)

    @property
    def masked(self) -> tuple[Trial, ...]:
        """The trials with both passes."""
        return tuple(trial for trial in self.trials if trial.setting.mask_lambda is not None)


@dataclass(frozen=True)
class Confirmation(Fields):
    """The setting chosen on one data set and the default one, on another."""

    category: str
    images: int
    chosen: Trial
    default: Trial
    provenance: dict[str, Any]


def run_sweep(
    ckpt: Path,
    dataset: Path,
    out: Path,
    options: SweepOptions,
    second: tuple[Path, Path] | None = None,
    say: Say = quiet,
) -> Sweep:
    """Sweeps, confirms on `second` (data set, checkpoint) if given, and writes sweep.json, .md and .png into `out`."""
    if second is not None:
        category_of(second[0], None)  # what is wrong with it is said now, not after the hours of the first
    found = sweep(ckpt, dataset, out, options, say)
    _write(found, out)
    if second is not None:
        found = replace(found, confirmed=confirm(second[1], second[0], out, options, found, say))
        _write(found, out)
    return found


def sweep(ckpt: Path, dataset: Path, out: Path, options: SweepOptions, say: Say = quiet) -> Sweep:
    """Tries all settings of `options` with the checkpoint on one category; terms are kept in `out` for another run.

    Raises UsageError for a data set of several categories without a choice, and as an export for the checkpoint.
    """
    bench = Bench.open(ckpt, dataset, out, options, say)
    default = bench.default
    first = list(bench.first_passes(default))
    finalists = _best(first, options.finalists, default)
    lambdas = sorted({*options.lambdas, _lambda(default)})
    say(f"masked passes: {len(finalists)} weightings x {len(lambdas)} lambdas")
    masked = [bench.try_masked(replace(one, mask_lambda=value)) for one in finalists for value in lambdas]
    defaults = next(trial for trial in masked if trial.setting == default)
    return Sweep(
        trials=(*first, *masked),
        chosen=max(masked, key=lambda trial: trial.merit),
        default=defaults,
        images=len(bench.data.labels),
        provenance=bench.provenance,
    )


def confirm(
    ckpt: Path, dataset: Path, out: Path, options: SweepOptions, found: Sweep, say: Say = quiet
) -> Confirmation:
    """The chosen setting and the default, both passes, on another data set with its checkpoint; raises as `sweep`."""
    bench = Bench.open(ckpt, dataset, out, replace(options, category=None), say)
    chosen, default = (bench.try_masked(trial.setting) for trial in (found.chosen, found.default))
    return Confirmation(bench.data.name, len(bench.data.labels), chosen, default, bench.provenance)


@dataclass(frozen=True)
class Bench:
    """A test set, a bundle that gives terms, and what was drawn for it already."""

    data: TestSet
    store: TermStore
    options: SweepOptions
    settings: Settings
    provenance: dict[str, Any]

    @classmethod
    def open(cls, ckpt: Path, dataset: Path, out: Path, options: SweepOptions, say: Say) -> "Bench":
        """Exports where needed and reads the images; raises as `sweep`."""
        category = category_of(dataset, options.category)
        bundle = Bundles(out / "bundles", options.choices, say).get(ckpt, category.name, PLAIN_TERMS)
        manifest = Manifest.read(bundle)
        if manifest.settings.score.pixel != "l1" or manifest.settings.mask.range != "per-image":
            raise UsageError("a sweep tries the paper's terms and masks: leave out the preset and the mask range")
        data = load_test_set(category, manifest.preprocessing, options.every, options.largest)
        store = TermStore(out / "terms", bundle, data, options.threads)
        return cls(data, store, options, manifest.settings, _provenance(manifest, data, options))

    @property
    def default(self) -> Setting:
        """The settings of an export without options, in the units of the sweep."""
        size = (int(self.data.observations.shape[2]), int(self.data.observations.shape[3]))
        usual = paper_settings(size)
        score = usual.score
        scoring = Scoring(score.eta, score.smoothing_sigma * 64 / min(size), Scoring.top_of(score.top, size))
        return Setting(usual.sampler.first_pass.guidance_scale, scoring, usual.mask.mask_lambda)

    def first_passes(self, default: Setting) -> Iterator[Trial]:
        """Every weighting of every scale, after the first pass; the default's among them."""
        options, usual = self.options, default.scoring
        etas, smoothings = {*options.etas, usual.eta}, {*options.smoothings, usual.smoothing}
        for scale in sorted({*options.scales, default.scale}):
            terms = self.store.get(scale)
            pairs = sorted(product(etas, smoothings))
            # disable=None: a bar on a terminal, nothing in a pipe
            for eta, smoothing in tqdm(pairs, desc=f"rho {scale:g}: weightings", disable=None):
                maps = terms.maps(Scoring(eta, smoothing, usual.top))
                pixel = self.data.pixel_auroc(maps)
                for top in sorted({*options.tops, usual.top}):
                    scoring = Scoring(eta, smoothing, top)
                    yield Trial(Setting(scale, scoring), self.data.image_auroc(scores(maps, scoring)), pixel)

    def try_masked(self, setting: Setting) -> Trial:
        """Both passes of a setting; what was drawn before is not drawn again."""
        first = self.store.get(setting.scale).maps(setting.scoring)
        maps = self.store.get(setting.scale, masks(first, _lambda(setting))).maps(setting.scoring)
        return Trial(setting, self.data.image_auroc(scores(maps, setting.scoring)), self.data.pixel_auroc(maps))


def _best(first: Sequence[Trial], count: int, default: Setting) -> list[Setting]:
    """The best weightings, and the default one; weightings that differ in the top pixels alone share their masks."""
    chosen: dict[tuple[float, float, float], Setting] = {}
    for trial in sorted(first, key=lambda trial: trial.merit, reverse=True):
        setting = trial.setting
        chosen.setdefault((setting.scale, setting.scoring.eta, setting.scoring.smoothing), setting)
    best = list(chosen.values())[:count]
    usual = replace(default, mask_lambda=None)
    return best if usual in best else [*best, usual]


def _lambda(setting: Setting) -> float:
    assert setting.mask_lambda is not None
    return setting.mask_lambda


def _provenance(manifest: Manifest, data: TestSet, options: SweepOptions) -> dict[str, Any]:
    return {
        "command": options.command,
        "category": data.name,
        "images": len(data.labels),
        "every": options.every,
        "checkpoint": manifest.checkpoint.to_json(),
        "settings": manifest.settings.to_json(),
        "seed": manifest.settings.sampler.seed,
        "versions": dict(manifest.versions),
    }


_SHOWN = 12  # of the first pass's weightings, the best
PARAMETERS: dict[str, Callable[[Setting], float | None]] = {
    "rho": lambda setting: setting.scale,
    "eta": lambda setting: setting.scoring.eta,
    "smoothing": lambda setting: setting.scoring.smoothing,
    "top": lambda setting: setting.scoring.top,
    "lambda": lambda setting: setting.mask_lambda,
}


def _write(found: Sweep, out: Path) -> None:
    write_report(out, "sweep", found.to_json(), markdown(found), plot(found))


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
    lines = []
    for name, trial in trials:
        values = [_number(read(trial.setting)) for read in PARAMETERS.values()]
        lines.append([name, *values, f"{100 * trial.image_auroc:.2f}", f"{100 * trial.pixel_auroc:.2f}"])
    return table(["", *PARAMETERS, "image AUROC %", "pixel AUROC %"], lines)


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
    return figure_png(figure, dpi=110)


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
