"""Several detectors on several categories: fitted, evaluated as a bundle is, one row each."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mdps.benchmarks.datasets import Category
from mdps.benchmarks.evaluate import METRICS, evaluate
from mdps.benchmarks.peers.judge import peer_judge
from mdps.benchmarks.peers.options import PeerSkippedError
from mdps.benchmarks.peers.recipes import PEERS
from mdps.runtime.atomic import write_text
from mdps.runtime.errors import require

FITTED = "fitted"

Row = dict[str, Any]
"""`judge`, `category`, and what `Evaluation.to_json` gives, or `skipped` with the reason."""


def compare(
    names: Sequence[str],
    categories: Sequence[Category],
    out: Path,
    *,
    every: int = 1,
    largest: int | None = 256,
    say: Callable[[str], None] = print,
    **options: Any,
) -> list[Row]:
    """Fit and evaluate each of `names` on each category; `options` are the fields of `PeerOptions`.

    Leaves in `out`: peers.json and peers.md (kept up to date after every row), a folder NAME/CATEGORY with what
    `mdps evaluate` writes, and fitted/, from which an interrupted comparison goes on. Raises as `peer_judge`, but for
    PeerSkippedError, which becomes a row.
    """
    unknown = [name for name in names if name not in PEERS]
    require(not unknown, f"there is no peer {', '.join(unknown)}: choose among {', '.join(PEERS)}")
    require(bool(names), f"no peer is named: choose among {', '.join(PEERS)}")
    rows: list[Row] = []
    for name in names:
        for category in categories:
            say(f"{category.name}: {PEERS[name].title}")
            row = _row(name, category, out, every, largest, options)
            say(f"{category.name}: {PEERS[name].title}: {row.get('skipped') or _summary(row)}")
            rows.append(row)
            write_text(out / "peers.json", json.dumps(rows, indent=1) + "\n")
            write_text(out / "peers.md", markdown(rows))
    return rows


def _row(name: str, category: Category, out: Path, every: int, largest: int | None, options: Mapping[str, Any]) -> Row:
    head = {"judge": PEERS[name].title, "category": category.name}
    try:
        judge = peer_judge(name, category, work=out / FITTED, **options)
    except PeerSkippedError as error:
        return {**head, "skipped": str(error)}
    found = evaluate(judge, category, out=out / name / category.name, largest=largest, every=every)
    return {**head, **found.to_json()}


def _summary(row: Row) -> str:
    return ", ".join(f"{name} {row[name]:.4f}" for name in ("image_auroc", "pixel_auroc") if row[name] is not None)


def markdown(rows: Sequence[Row]) -> str:
    """A table of the metrics, the budget of each fit, and who was skipped."""
    lines = [["judge", "category", "images", *METRICS, "fitted"], ["---", "---", *["---:"] * (len(METRICS) + 1), "---"]]
    lines += [_cells(row) for row in rows if "skipped" not in row]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return "\n\n".join([table, *_notes(rows)]) + "\n"


def _cells(row: Row) -> list[str]:
    form = {name: ".1f" if name.startswith("ms") else ".4f" for name in METRICS}
    metrics = ["" if row[name] is None else f"{row[name]:{form[name]}}" for name in METRICS]
    return [row["judge"], row["category"], str(row["images"]), *metrics, fitted(row["provenance"])]


def fitted(provenance: Mapping[str, Any]) -> str:
    """How long a detector was fitted, for people."""
    text = f"{provenance['train_images']} images, {provenance['fit_seconds']:.0f} s"
    return f"{text}, {provenance['steps']} steps" if "steps" in provenance else f"{text}, one pass"


def _notes(rows: Sequence[Row]) -> Iterator[str]:
    yield from (f"Skipped {row['judge']} on {row['category']}: {row['skipped']}" for row in rows if "skipped" in row)
    yield from (
        f"{row['judge']} on {row['category']}: {problem}" for row in rows for problem in row.get("problems", ())
    )
