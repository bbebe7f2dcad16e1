"""One table of the paper over whatever categories are present: `mdps reproduce`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mdps.benchmarks.data import find_categories
from mdps.benchmarks.data.samples import Category
from mdps.benchmarks.kit import Fields, Say, given, quiet, write_report
from mdps.benchmarks.options import ReproduceOptions
from mdps.benchmarks.peers import PEERS
from mdps.benchmarks.peers.predict import peer_predictor
from mdps.benchmarks.reproduce.paper import OWN_METHODS, SAMPLES, TABLES, method_label, paper_table, variants
from mdps.benchmarks.reproduce.tables import (
    Difference,
    Row,
    averages,
    compare,
    differences_table,
    measured_table,
    plot,
    published_rows,
    published_table,
)
from mdps.benchmarks.study import LAST, Bundles, Runner, Variant, plain_name
from mdps.benchmarks.study.outcomes import Outcome
from mdps.runtime.atomic import new_folder
from mdps.runtime.errors import UsageError, require
from mdps.runtime.manifest import Manifest

_SUFFIXES = (".safetensors", ".pt", ".pth", ".ckpt")
_RUN_FILE = "denoiser.safetensors"  # what `mdps train` leaves in its run folder


def checkpoint_of(ckpt: Path, category: str) -> Path | None:
    """The checkpoint of a category, or None where the folder `ckpt` has none for it.

    A folder holds `<category>.safetensors` (or another format's suffix) or run folders
    `<category>/denoiser.safetensors`; a run folder itself and a diffusers model count as one checkpoint. Raises
    UsageError where nothing is at `ckpt`.
    """
    if not ckpt.exists():
        raise UsageError(f"there is no checkpoint or folder of checkpoints {ckpt}: give --ckpt what `mdps train` left")
    alone = ckpt if ckpt.is_file() else _checkpoint(ckpt)
    return alone or next(filter(None, map(_checkpoint, _of_category(ckpt, category))), None)


def _of_category(folder: Path, category: str) -> list[Path]:
    """Return what is named after the category, its exact name before another spelling of it."""
    named = [path for path in sorted(folder.iterdir()) if plain_name(_stem(path)) == plain_name(category)]
    return sorted(named, key=lambda path: _stem(path) != category)


def _stem(path: Path) -> str:
    return path.stem if path.suffix in _SUFFIXES else path.name


def _checkpoint(path: Path) -> Path | None:
    if path.is_file():
        return path if path.suffix in _SUFFIXES else None
    if (path / "config.json").is_file() or (path / "model_index.json").is_file():  # a diffusers model
        return path
    return path / _RUN_FILE if (path / _RUN_FILE).is_file() else None


FIGURES = {
    "ablation": "Ablation of guidance, mask, metric and number of samples (the paper's figure prints no numbers)",
    "rho": "Guidance scale rho (the paper shows pictures, no numbers)",
}


@dataclass(frozen=True)
class Reproduction(Fields):
    """Rows of a table, measured and published, the differences of the ablation, and what was asked for."""

    table: str
    caption: str
    rows: tuple[Row, ...]
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]
    settings: dict[str, Any]

    @property
    def measured(self) -> tuple[Row, ...]:
        """The rows that were measured here."""
        return tuple(row for row in self.rows if row.kind == "measured")

    def markdown(self) -> str:
        """The tables for people."""
        heading = f"# {'Table ' if self.table.isdigit() else ''}{self.table}: {self.caption}"
        parts = [heading, *(f"`{self.settings['command']}`" for _ in [0] if self.settings["command"])]
        parts.append(measured_table(self.rows, timed=self.table == "3"))
        if self.differences:
            parts += ["## Differences on the same images", differences_table(list(self.differences))]
        if len(self.measured) < len(self.rows):
            parts += ["## Published, not measured here", published_table(self.rows)]
        parts += [*self.notes, *_provenance_lines(self.measured)]
        return "\n\n".join(parts) + "\n"


def reproduce(dataset: Path, ckpt: Path, out: Path, options: ReproduceOptions, say: Say = quiet) -> Reproduction:
    """Measures a table on the categories in `dataset` and writes reproduce.json, .md and .png into `out`.

    `ckpt` is one checkpoint or a folder with one a category. A run that was stopped goes on where it was: what `out`
    holds already is not computed again. Raises UsageError for what is asked wrongly, and as an export.
    """
    wanted = _variants(options)
    categories = _chosen(find_categories(dataset), options.categories)
    job = _Job(options, wanted, _runner(out, options, say))
    rows = [row for category in categories for row in job.rows(category, checkpoint_of(ckpt, category.name))]
    require(bool(rows), f"{ckpt} has no checkpoint for {', '.join(category.name for category in categories)}")
    found = job.finished(rows, [category.name for category in categories])
    write_report(out, "reproduce", found.to_json(), found.markdown(), plot(found.table, found.measured))
    return found


def _variants(options: ReproduceOptions) -> tuple[Variant, ...]:
    """Return the rows that our sampler makes; UsageError for an unknown table or peer."""
    table = options.table
    require(table in TABLES, f"there is no table {table!r}; there are {', '.join(TABLES)}")
    for name in options.peers:
        require(name in PEERS, f"there is no peer {name!r}; there are {', '.join(PEERS)}")
    samples = SAMPLES.get(table, (1,)) if options.samples is None else options.samples
    methods = OWN_METHODS.get(table, ()) if options.methods is None else options.methods
    return variants(table, samples, methods, options.scales)


def _runner(out: Path, options: ReproduceOptions, say: Say) -> Runner:
    out.mkdir(parents=True, exist_ok=True)
    return Runner(
        work=out,
        bundles=Bundles(out / "bundles", options.choices, say),
        every=options.every,
        largest=options.largest,
        engine=options.engine,
        threads=options.threads,
        batch=options.batch,
        say=say,
    )


def run_peer(runner: Runner, name: str, category: Category, size: tuple[int, int], options: dict[str, Any]) -> Outcome:
    """Return the outcome of a detector of anomalib on pictures resized to `size` (H, W); raises as `peer_predictor`."""
    folder = runner.place(category, ["peer", name, size, options])
    if not folder.is_dir():
        runner.say(f"{category.name}: {name}")
        predictor = peer_predictor(
            name, category, work=runner.work / "peers", size=size, false_alarm_rate=None, **options
        )
        with new_folder(folder) as new:
            runner.evaluate(predictor, category, new, LAST)
    return Outcome.load(folder, LAST)


def _chosen(categories: Sequence[Category], names: Sequence[str]) -> list[Category]:
    known = {category.name: category for category in categories}
    for name in names:
        require(name in known, f"the data set has no category {name!r}; it has {', '.join(known)}")
    return [known[name] for name in names] if names else list(categories)


class _Job:
    """Collects rows, differences and the reasons why something is missing."""

    def __init__(self, options: ReproduceOptions, wanted: Sequence[Variant], runner: Runner) -> None:
        self._options, self._wanted, self._runner = options, wanted, runner
        self._paper = paper_table(options.table)
        self._differences: list[Difference] = []
        self._reasons: dict[str, str] = {}
        self._notes: list[str] = []

    def rows(self, category: Category, checkpoint: Path | None) -> Iterator[Row]:
        """Every method on one category; nothing where it has no checkpoint."""
        if checkpoint is None:
            self._notes.append(f"{category.name}: no checkpoint of that name")
            return
        outcomes: dict[str, Outcome] = {}
        for variant in self._wanted:
            outcomes[variant.method] = self._runner.run(variant, category, checkpoint)
            yield self._row(category.name, variant.method, variant.label, outcomes[variant.method])
        for peer in self._options.peers:
            yield from self._peer(peer, category, checkpoint)
        if self._options.table == "ablation":
            self._differences += compare(category.name, outcomes)

    def finished(self, rows: list[Row], names: list[str]) -> Reproduction:
        """All rows with their means and the published ones."""
        paper = self._paper
        rows = [*rows, *averages(rows, paper)]
        published = [] if paper is None else published_rows(paper, names, rows, self._reasons)
        return Reproduction(
            table=self._options.table,
            caption=FIGURES[self._options.table] if paper is None else paper.caption,
            rows=(*rows, *published),
            differences=tuple(self._differences),
            notes=tuple(dict.fromkeys(self._notes)),
            settings=given(self._options),
        )

    def _peer(self, name: str, category: Category, checkpoint: Path) -> Iterator[Row]:
        options = self._options
        bundle = self._runner.bundles.get(checkpoint, category.name, {})
        size = Manifest.read(bundle).preprocessing.network_size
        fit = {"minutes": options.peer_minutes, "textures": options.textures, "device": options.device}
        for shared in ("seed", "backbone", "backbone_weights"):  # the same features where both take some
            if options.choices.get(shared) is not None:
                fit[shared] = options.choices[shared]
        try:
            outcome = run_peer(self._runner, name, category, size, fit)
        except UsageError as error:  # it lacks something here: anomalib, a folder, a larger image
            self._reasons[name] = str(error)
            self._notes.append(f"{method_label(name)} did not run on {category.name}: {error}")
            return
        yield self._row(category.name, name, PEERS[name].title, outcome)

    def _row(self, category: str, method: str, label: str, outcome: Outcome) -> Row:
        paper = self._paper
        row = None if paper is None else paper.category(category)
        return Row(
            category=category,
            method=method,
            label=label,
            kind="measured",
            images=outcome.images,
            metrics=outcome.metrics,
            intervals=outcome.intervals(),
            paper={} if paper is None or row is None else paper.published(row, method),
            problems=outcome.problems,
            provenance=outcome.provenance,
        )


def _provenance_lines(rows: Sequence[Row]) -> list[str]:
    """The checkpoints behind the rows, once each, and what a reader must know of them."""
    hashes: dict[str, str] = {}
    for row in rows:
        checkpoint = row.provenance.get("checkpoint")
        if isinstance(checkpoint, Mapping):
            hashes[row.category] = f"{row.category}: checkpoint {checkpoint['name']}, sha256 {checkpoint['sha256']}"
    problems = dict.fromkeys(f"- {row.category}, {problem}" for row in rows for problem in row.problems)
    return ["  \n".join(hashes.values()), "\n".join(problems)] if problems else ["  \n".join(hashes.values())]
