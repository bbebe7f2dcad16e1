"""Files of an evaluation: JSON, a table, plots, pictures of best and worst images, one HTML report."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike, NDArray
from PIL import Image
from sklearn.metrics import precision_recall_curve, roc_curve

from mdps import __version__
from mdps.benchmarks.evaluate.gallery import Example, Gallery, picture
from mdps.benchmarks.evaluate.predictions import Judge, covered_box
from mdps.benchmarks.evaluate.results import HEADS, METRICS, Evaluation, ScoredImage, finite, mean_metrics
from mdps.benchmarks.kit import figure_png, table
from mdps.benchmarks.metrics.found import HEADS as REGION_HEADS
from mdps.benchmarks.metrics.found import cells
from mdps.runtime.atomic import new_folder, write_bytes, write_text, writing
from mdps.runtime.errors import UsageError
from mdps.runtime.overlay import HeatRange, png, thumbnail
from mdps.runtime.preprocessing import read_image
from mdps.serving.folder import Row
from mdps.serving.report import HEAD, SCRIPT, embedded, flat, image_table, plain_text, settings_table

_STYLE = (
    "<style>figure { margin: .6rem 0 } figure img { width: 100%; max-width: 900px } figcaption { color: #555 } "
    ".metrics th, .metrics td { overflow-wrap: normal }</style>"
)
# without a threshold and with one
_HEADINGS = {
    "worst": ("Defective images with the lowest scores, good ones with the highest", "Most wrong, or nearest to it"),
    "best": (
        "Defective images with the highest scores, good ones with the lowest",
        "Judged right with the largest margin",
    ),
}
_TILES = "image, reconstruction where the detector makes one, anomaly map, contour of the true defect"


def render(
    sections: Sequence[tuple[Evaluation, Path]], *, title: str, mean: Mapping[str, float | None] | None = None
) -> str:
    """The page of evaluations whose plots and pictures lie in the folders beside them.

    One category's page also lists every image.
    """
    parts = [HEAD.format(title=escape(title)), _STYLE, f"<h1>{plain_text(title)}</h1>", _metrics(sections, mean)]
    for evaluation, folder in sections:
        parts += [f"<h2>{plain_text(evaluation.category)}</h2>", *_section(evaluation, folder)]
    if len(sections) == 1:
        parts += ["<h2>Images</h2>", image_table(_rows(sections[0][0]), lambda row: ""), SCRIPT]
    parts += [settings_table({**dict(flat(sections[0][0].provenance)), "mdps": __version__}), "</body></html>\n"]
    return "\n".join(parts)


def _metrics(sections: Sequence[tuple[Evaluation, Path]], mean: Mapping[str, float | None] | None) -> str:
    lines = [_line(one.category, one.images, one.metrics) for one, _ in sections]
    if mean is not None:
        lines.append(_line("mean", sum(one.images for one, _ in sections), mean))
    return _table([name.replace("_", " ") for name in ("category", "images", *METRICS)], lines)


def _line(name: str, images: int, metrics: Mapping[str, float | None]) -> list[str]:
    return [name, str(images), *(cell or "undefined" for cell in metric_cells(metrics))]


def _table(heads: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    head = "".join(f"<th>{name}</th>" for name in heads)
    body = "".join(f"<tr>{''.join(f'<td>{plain_text(cell)}</td>' for cell in line)}</tr>" for line in lines)
    return f'<table class="metrics"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _section(evaluation: Evaluation, folder: Path) -> Iterator[str]:
    counted = evaluation.verdicts()
    if counted is not None:
        yield (
            f"<p>At the calibrated threshold {counted['threshold']:.5g}: {counted['missed']} of "
            f"{counted['defective']} defective images missed, {counted['false_alarms']} of {counted['good']} good ones "
            "called defective.</p>"
        )
    if said := [f"<li>{plain_text(sentence)}</li>" for sentence in evaluation.said()]:
        yield f"<ul>{''.join(said)}</ul>"
    if evaluation.defect_types:
        yield _table(HEADS, evaluation.kinds())
    if evaluation.regions:
        yield _table(REGION_HEADS, cells(evaluation.regions))
    for name in ("scores.png", "roc.png"):
        if (folder / name).is_file():
            yield f"<figure>{embedded((folder / name).read_bytes(), 'png', name)}</figure>"
    for name, headings in _HEADINGS.items():
        yield f"<h3>{headings[counted is not None]}</h3><p>Each picture: {_TILES}. One colour scale for all.</p>"
        yield from map(_figure, sorted((folder / name).glob("*.png"), key=_rank))


def _rank(path: Path) -> int:
    found = re.match(r"\d+", path.name)
    return int(found.group()) if found else 0


def _figure(path: Path) -> str:
    with Image.open(path) as image:
        data = thumbnail(image, 1040)
    return (
        f"<figure>{embedded(data, 'jpeg')}<figcaption>{plain_text(path.stem.replace('_', ' '))}</figcaption></figure>"
    )


def _rows(evaluation: Evaluation) -> list[Row]:
    """For the table of images: the broken ones first, then from the highest score down."""
    rows = [
        Row(one.path, one.score, evaluation.threshold, _verdict(one, evaluation.threshold), ms=one.ms, error=one.error)
        for one in evaluation.rows
    ]
    return sorted(rows, key=lambda row: (row.score is not None, -(row.score or 0.0)))


def _verdict(row: ScoredImage, threshold: float | None) -> str | None:
    if row.score is None:
        return "error"
    if threshold is None:
        return None
    return "fail" if row.score > threshold else "pass"


Curve = tuple[NDArray[np.float64], NDArray[np.float64]]
"""False-positive rates and true-positive rates, both [n] and rising."""


def image_curve(labels: ArrayLike, scores: ArrayLike) -> Curve:
    """The ROC curve of images of both kinds."""
    false, true, _ = roc_curve(labels, scores, drop_intermediate=False)
    return false, true


def best_threshold(labels: ArrayLike, scores: ArrayLike) -> float:
    """The score above or at which F1 is largest, for images of both kinds; half-way to the next lower score.

    The middle is what a detector with "score > threshold" would be given, and the margins of the images mean something.
    """
    precision, recall, thresholds = precision_recall_curve(labels, scores)
    f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-12)
    chosen = thresholds[int(np.argmax(f1[:-1]))]
    values = np.asarray(scores, dtype=np.float64)
    below = values[values < chosen]
    return float((chosen + below.max()) / 2) if below.size else float(chosen) - 1e-12


def roc_plot(curves: Sequence[tuple[str, Curve]]) -> bytes:
    """PNG of the named curves, the whole and its upper left corner."""
    figure = Figure(figsize=(9.6, 4.4), layout="constrained")
    whole, corner = figure.subplots(1, 2)
    for axes in (whole, corner):
        for name, (false, true) in curves:
            axes.plot(false, true, label=name)
        axes.set_xlabel("false-positive rate")
        axes.grid(alpha=0.3)
    whole.plot([0, 1], [0, 1], color="0.7", linewidth=1, linestyle="--")
    whole.set(ylabel="true-positive rate", xlim=(-0.01, 1.01), ylim=(-0.01, 1.01), title="ROC")
    corner.set(xlim=(-0.002, 0.2), ylim=(0.6, 1.005), title="its upper left corner")
    whole.legend(loc="lower right")
    return figure_png(figure, dpi=110)


def scores_plot(
    good: Sequence[float], defective: Sequence[float], lines: Sequence[tuple[str, float]], title: str
) -> bytes:
    """PNG of both kinds' score histograms on the same bins, a vertical line at each named threshold."""
    figure = Figure(figsize=(9.6, 3.4), layout="constrained")
    axes = figure.subplots()
    together = [*good, *defective, *(value for _, value in lines)]
    bins = np.linspace(min(together), max(together) + 1e-9, 41).tolist()
    for scores, name, colour in ((good, "good", "tab:green"), (defective, "defective", "tab:red")):
        if scores:
            axes.hist(scores, bins=bins, alpha=0.6, color=colour, label=f"{len(scores)} {name}")
    for (name, value), style in zip(lines, ("-", "--"), strict=False):
        axes.axvline(value, color="black", linestyle=style, label=f"{name} {value:.4g}")
    axes.set(xlabel="anomaly score", ylabel="images", title=title)
    axes.legend()
    return figure_png(figure, dpi=110)


RESULTS, TABLE, REPORT = "results.json", "results.md", "report.html"
BEST, WORST, ROC, SCORES, COUNTS = "best", "worst", "roc.png", "scores.png", "counts.npz"


def to_json(evaluations: Sequence[Evaluation]) -> dict[str, Any]:
    """One category's object (see `Evaluation.to_json`), or for several {"categories": [objects], "mean": {metrics}}."""
    if len(evaluations) == 1:
        return evaluations[0].to_json()
    return {"categories": [one.to_json() for one in evaluations], "mean": mean_metrics(evaluations)}


ERRORS = ("missed", "false alarms")
"""Heads of what `error_cells` gives."""


def markdown(evaluations: Sequence[Evaluation]) -> str:
    """A table of the metrics, with their mean for several categories; below it kinds of defects, and the problems."""
    heads = ["category", "input", "images", *METRICS, *ERRORS]
    lines = [
        [
            one.category, input_cell(one.provenance), str(one.images),
            *metric_cells(one.metrics), *error_cells(one.verdicts()),
        ]
        for one in evaluations
    ]  # fmt: skip
    if len(evaluations) > 1:
        total, mean = str(sum(one.images for one in evaluations)), mean_metrics(evaluations)
        lines.append(["mean", "", total, *metric_cells(mean), *error_cells(None)])
    parts = [table(heads, lines, left=(0, 1))]
    if types := [[one.category, *cells] for one in evaluations for cells in one.kinds()]:
        parts.append(table(["category", *HEADS], types, left=(0, 1)))
    if found := [[one.category, *line] for one in evaluations if one.regions for line in cells(one.regions)]:
        parts.append(table(["category", *REGION_HEADS], found, left=(0, 1)))
    said = [f"- {one.category}: {sentence}" for one in evaluations for sentence in one.said()]
    return "\n\n".join([*parts, *(["\n".join(said)] if said else [])]) + "\n"


def metric_cells(metrics: Mapping[str, float | None]) -> list[str]:
    """Return the metrics as texts in the order of METRICS, empty where undefined."""
    values = {name: None if (value := metrics[name]) is None else finite(value) for name in METRICS}
    form = {name: ".1f" if name.startswith("ms") else ".4f" for name in METRICS}
    return ["" if value is None else f"{value:{form[name]}}" for name, value in values.items()]


def error_cells(counted: Mapping[str, Any] | None) -> list[str]:
    """Return verdicts as texts under ERRORS, empty where there are none."""
    if counted is None:
        return ["", ""]
    return [f"{counted['missed']} of {counted['defective']}", f"{counted['false_alarms']} of {counted['good']}"]


def input_cell(provenance: Mapping[str, Any]) -> str:
    """Return image size, feature network and its weights, as far as the provenance says."""
    sides = " x ".join(map(str, provenance.get("image_size", ())))
    features = (provenance.get("backbone") or "", (provenance.get("backbone_sha256") or "")[:8])
    return ", ".join(filter(None, (sides, " ".join(filter(None, features)))))


def check_folder(out: Path) -> None:
    """UsageError where `out` cannot be a folder: before the hours of judging, not after them."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {out} cannot be used as a folder: {error.strerror or error}") from error


def write_evaluation(evaluation: Evaluation, gallery: Gallery, predictor: Judge, out: Path) -> None:
    """Everything of one category into the folder `out`, each file whole or not at all.

    results.json (with a row an image), results.md, report.html (self-contained), roc.png, scores.png, counts.npz (what
    a bootstrap resamples), best/ and worst/ (image, reconstruction where the predictor makes one, map, true contour).
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
        _write_pictures(gallery, evaluation.threshold, lines[0][1] if lines else max(scores), predictor, out)
        _write_tables([evaluation], out)
        write_text(out / REPORT, render([(evaluation, out)], title=f"{evaluation.category}, {evaluation.predictor}"))


def write_summary(evaluations: Sequence[Evaluation], out: Path) -> None:
    """results.json, results.md and report.html of several categories, whose own folders lie in `out` already."""
    with writing(out):
        _write_tables(evaluations, out)
        sections = [(one, out / one.category) for one in evaluations]
        title = f"{len(evaluations)} categories, {evaluations[0].predictor}"
        write_text(out / REPORT, render(sections, title=title, mean=mean_metrics(evaluations)))


def _write_tables(evaluations: Sequence[Evaluation], out: Path) -> None:
    full = to_json(evaluations)
    for one, entry in zip(evaluations, full.get("categories", [full]), strict=True):
        entry |= {"judge": one.predictor}
        entry |= {"kinds": [found.to_json() for found in one.defect_types], "rows": [row.to_json() for row in one.rows]}
    write_text(out / RESULTS, json.dumps(full, indent=1) + "\n")
    made_with = "\n".join(f"- {key}: {value}" for key, value in flat(evaluations[0].provenance))
    write_text(out / TABLE, f"# {evaluations[0].predictor}\n\n{markdown(evaluations)}\n## Made with\n\n{made_with}\n")


def _write_plots(
    evaluation: Evaluation,
    labels: Sequence[bool],
    scores: Sequence[float],
    lines: Sequence[tuple[str, float]],
    out: Path,
) -> None:
    images = image_curve(labels, scores) if len(set(labels)) == 2 else None
    found = (("images", "image_auroc", images), ("pixels", "pixel_auroc", evaluation.counts.curve()))
    curves = [(f"{name}, {evaluation.metrics[key]:.4f}", curve) for name, key, curve in found if curve is not None]
    if curves:
        write_bytes(out / ROC, roc_plot(curves))
    else:
        (out / ROC).unlink(missing_ok=True)
    good, bad = ([s for s, label in zip(scores, labels, strict=True) if label is kind] for kind in (False, True))
    write_bytes(out / SCORES, scores_plot(good, bad, lines, evaluation.category))


def _write_pictures(gallery: Gallery, calibrated: float | None, threshold: float, predictor: Judge, out: Path) -> None:
    heat = gallery.heat_range()
    for name, examples in ((BEST, gallery.best(threshold)), (WORST, gallery.worst(threshold))):
        with new_folder(out / name, replace=True) as folder:
            for rank, example in enumerate(examples, 1):
                called = _extreme(example, name) if calibrated is None else _verdict_on(example, calibrated)
                file = f"{rank}_{example.kind}_{example.path.stem}_score_{example.prediction.score:.4g}_{called}.png"
                write_bytes(folder / file, _strip(example, predictor, heat))


def _verdict_on(example: Example, threshold: float) -> str:
    wrong = "missed" if example.defective else "false_alarm"
    return "right" if example.margin(threshold) > 0 else wrong


def _extreme(example: Example, folder: str) -> str:
    """Return the reason why an image without a verdict is shown in this folder."""
    if example.defective:
        return "defective_highest" if folder == BEST else "defective_lowest"
    return "good_lowest" if folder == BEST else "good_highest"


def _strip(example: Example, predictor: Judge, heat: HeatRange) -> bytes:
    return png(picture(example, covered_box(predictor, read_image(example.path).size), heat))
