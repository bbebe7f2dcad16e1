"""The HTML page of evaluations: metrics, plots and pictures inside one file that loads nothing."""

import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from PIL import Image

from mdps import __version__
from mdps.benchmarks.evaluate import METRICS, Evaluation, ScoredImage, finite
from mdps.benchmarks.kinds import HEADS as KINDS
from mdps.serving.folder import Row
from mdps.serving.overlay import thumbnail
from mdps.serving.report import HEAD, SCRIPT, embedded, flat, image_table, plain_text, settings_table

_STYLE = (
    "<style>figure { margin: .6rem 0 } figure img { width: 100%; max-width: 900px } figcaption { color: #555 } "
    ".metrics th, .metrics td { overflow-wrap: normal }</style>"
)
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
    heads = "".join(f"<th>{name.replace('_', ' ')}</th>" for name in ("category", "images", *METRICS))
    lines = [_line(one.category, str(one.images), one.metrics) for one, _ in sections]
    if mean is not None:
        lines.append(_line("mean", str(sum(one.images for one, _ in sections)), mean))
    return f'<table class="metrics"><thead><tr>{heads}</tr></thead><tbody>{"".join(lines)}</tbody></table>'


def _line(name: str, images: str, metrics: Mapping[str, float | None]) -> str:
    cells = "".join(f"<td>{_number(name, metrics[name])}</td>" for name in METRICS)
    return f"<tr><td>{plain_text(name)}</td><td>{images}</td>{cells}</tr>"


def _number(name: str, value: float | None) -> str:
    if value is None or finite(value) is None:
        return "undefined"
    return f"{value:.1f}" if name.startswith("ms") else f"{value:.4f}"


def _section(evaluation: Evaluation, folder: Path) -> Iterator[str]:
    counted = evaluation.verdicts()
    if counted is not None:
        yield (
            f"<p>At the calibrated threshold {counted['threshold']:.5g}: {counted['missed']} of "
            f"{counted['defective']} defective images missed, {counted['false_alarms']} of {counted['good']} good ones "
            "called defective.</p>"
        )
    if evaluation.problems:
        yield f"<ul>{''.join(f'<li>{plain_text(problem)}</li>' for problem in evaluation.problems)}</ul>"
    if evaluation.kinds:
        heads = "".join(f"<th>{head}</th>" for head in KINDS)
        lines = ("".join(f"<td>{plain_text(cell)}</td>" for cell in found.cells()) for found in evaluation.kinds)
        body = "".join(f"<tr>{line}</tr>" for line in lines)
        yield f'<table class="metrics"><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>'
    for name in ("scores.png", "roc.png"):
        if (folder / name).is_file():
            yield f"<figure>{embedded((folder / name).read_bytes(), 'png', name)}</figure>"
    titles = {"worst": "Most wrong, or nearest to it", "best": "Judged right with the largest margin"}
    for name, heading in titles.items():
        yield f"<h3>{heading}</h3><p>Each picture: {_TILES}. One colour scale for all.</p>"
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
