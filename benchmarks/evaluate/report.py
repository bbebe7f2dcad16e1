"""What an evaluation leaves in a folder: JSON, a table, plots, pictures of best and worst images, one HTML report."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mdps.benchmarks.evaluate import METRICS, Evaluation, finite, mean_metrics
from mdps.benchmarks.evaluation_page import render
from mdps.benchmarks.evaluation_plots import best_threshold, image_curve, roc_plot, scores_plot
from mdps.benchmarks.gallery import Example, Gallery, picture
from mdps.benchmarks.kinds import HEADS as KINDS
from mdps.benchmarks.looks import Judge, covered_box
from mdps.runtime.atomic import new_folder, write_bytes, write_text, writing
from mdps.runtime.errors import UsageError
from mdps.runtime.preprocessing import read_image
from mdps.serving.overlay import HeatRange, png
from mdps.serving.report import flat

RESULTS, TABLE, REPORT = "results.json", "results.md", "report.html"
BEST, WORST, ROC, SCORES, COUNTS = "best", "worst", "roc.png", "scores.png", "counts.npz"


def to_json(evaluations: Sequence[Evaluation]) -> dict[str, Any]:
    """One category's object (see `Evaluation.to_json`), or for several {"categories": [objects], "mean": {metrics}}."""
    if len(evaluations) == 1:
        return evaluations[0].to_json()
    return {"categories": [one.to_json() for one in evaluations], "mean": mean_metrics(evaluations)}


def markdown(evaluations: Sequence[Evaluation]) -> str:
    """A table of the metrics, with their mean for several categories; below it kinds of defects, and the problems."""
    with_verdicts = any(one.threshold is not None for one in evaluations)
    heads = ["category", "images", *METRICS, *(["missed", "false alarms"] if with_verdicts else [])]
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)]]
    lines += [
        [one.category, str(one.images), *_cells(one.metrics), *_verdicts(one, with_verdicts)] for one in evaluations
    ]
    if len(evaluations) > 1:
        total, mean = str(sum(one.images for one in evaluations)), mean_metrics(evaluations)
        lines.append(["mean", total, *_cells(mean), *([""] * 2 if with_verdicts else [])])
    table = "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
    kinds = "\n".join(f"| {' | '.join(line)} |" for line in _kind_lines(evaluations))
    problems = [f"- {one.category}: {problem}" for one in evaluations for problem in one.problems]
    return "\n\n".join([table, *([kinds] if kinds else []), *(["\n".join(problems)] if problems else [])]) + "\n"


def _kind_lines(evaluations: Sequence[Evaluation]) -> list[list[str]]:
    """Metrics of each kind of defect, with their heads; empty where no category has several kinds."""
    lines = [
        [one.category, *(str(value).replace("|", "/") for value in found.cells())]
        for one in evaluations
        for found in one.kinds
    ]
    return [["category", *KINDS], ["---", "---", *["---:"] * (len(KINDS) - 1)], *lines] if lines else []


def _cells(metrics: dict[str, float] | dict[str, float | None]) -> list[str]:
    values = {name: None if (value := metrics[name]) is None else finite(value) for name in METRICS}
    form = {name: ".1f" if name.startswith("ms") else ".4f" for name in METRICS}
    return ["" if value is None else f"{value:{form[name]}}" for name, value in values.items()]


def _verdicts(evaluation: Evaluation, shown: bool) -> list[str]:
    counted = evaluation.verdicts()
    if counted is None:
        return ["", ""] if shown else []
    return [f"{counted['missed']} of {counted['defective']}", f"{counted['false_alarms']} of {counted['good']}"]


def check_folder(out: Path) -> None:
    """UsageError where `out` cannot be a folder: before the hours of judging, not after them."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {out} cannot be used as a folder: {error.strerror or error}") from error


def write_evaluation(evaluation: Evaluation, gallery: Gallery, judge: Judge, out: Path) -> None:
    """Everything of one category into the folder `out`, each file whole or not at all.

    results.json (with a row an image), results.md, report.html (self-contained), roc.png, scores.png, counts.npz (what
    a bootstrap resamples), best/ and worst/ (image, reconstruction where the judge makes one, map, true contour).
    Raises UsageError where `out` cannot be a folder, MdpsError where a file cannot be written.
    """
    check_folder(out)
    rows = [row for row in evaluation.rows if row.score is not None]
    both = len({row.defective for row in rows}) == 2
    labels, scores = [row.defective for row in rows], [row.score or 0.0 for row in rows]
    lines = [("threshold of the calibration", evaluation.threshold)] if evaluation.threshold is not None else []
    if both:
        lines.append(("threshold of the largest F1 here", best_threshold(labels, scores)))
    with writing(out):
        evaluation.counts.save(out / COUNTS)
        _write_plots(evaluation, labels, scores, lines, out)
        _write_pictures(gallery, lines[0][1] if lines else max(scores), judge, out)
        _write_tables([evaluation], out)
        write_text(out / REPORT, render([(evaluation, out)], title=f"{evaluation.category}, {evaluation.judge}"))


def write_summary(evaluations: Sequence[Evaluation], out: Path) -> None:
    """results.json, results.md and report.html of several categories, whose own folders lie in `out` already."""
    with writing(out):
        _write_tables(evaluations, out)
        sections = [(one, out / one.category) for one in evaluations]
        title = f"{len(evaluations)} categories, {evaluations[0].judge}"
        write_text(out / REPORT, render(sections, title=title, mean=mean_metrics(evaluations)))


def _write_tables(evaluations: Sequence[Evaluation], out: Path) -> None:
    full = to_json(evaluations)
    for one, entry in zip(evaluations, full.get("categories", [full]), strict=True):
        entry |= {"judge": one.judge, "verdicts": one.verdicts()}
        entry |= {"kinds": [found.to_json() for found in one.kinds], "rows": [row.to_json() for row in one.rows]}
    write_text(out / RESULTS, json.dumps(full, indent=1) + "\n")
    made_with = "\n".join(f"- {key}: {value}" for key, value in flat(evaluations[0].provenance))
    write_text(out / TABLE, f"# {evaluations[0].judge}\n\n{markdown(evaluations)}\n## Made with\n\n{made_with}\n")


def _write_plots(
    evaluation: Evaluation,
    labels: Sequence[bool],
    scores: Sequence[float],
    lines: Sequence[tuple[str, float]],
    out: Path,
) -> None:
    curves = (
        [(f"images, {evaluation.metrics['image_auroc']:.4f}", image_curve(labels, scores))]
        if len(set(labels)) == 2
        else []
    )
    pixels = evaluation.counts.curve()
    if pixels is not None:
        curves.append((f"pixels, {evaluation.metrics['pixel_auroc']:.4f}", pixels))
    if curves:
        write_bytes(out / ROC, roc_plot(curves))
    else:
        (out / ROC).unlink(missing_ok=True)
    good, bad = ([s for s, label in zip(scores, labels, strict=True) if label is kind] for kind in (False, True))
    write_bytes(out / SCORES, scores_plot(good, bad, lines, evaluation.category))


def _write_pictures(gallery: Gallery, threshold: float, judge: Judge, out: Path) -> None:
    heat = gallery.heat_range()
    for name, examples in ((BEST, gallery.best(threshold)), (WORST, gallery.worst(threshold))):
        with new_folder(out / name, replace=True) as folder:
            for rank, example in enumerate(examples, 1):
                write_bytes(folder / f"{rank}_{_caption(example, threshold)}.png", _strip(example, judge, heat))


def _caption(example: Example, threshold: float) -> str:
    wrong = "missed" if example.defective else "false_alarm"
    verdict = "right" if example.margin(threshold) > 0 else wrong
    return f"{example.kind}_{example.path.stem}_score_{example.look.score:.4g}_{verdict}"


def _strip(example: Example, judge: Judge, heat: HeatRange) -> bytes:
    return png(picture(example, covered_box(judge, read_image(example.path).size), heat))
