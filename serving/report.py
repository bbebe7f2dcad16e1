"""One HTML file that shows a run: verdicts, scores, pictures and settings, with nothing loaded from anywhere."""

import base64
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mdps import __version__
from mdps.runtime.atomic import write_bytes, writing
from mdps.runtime.detector import Detector
from mdps.runtime.manifest import FILE_NAME
from mdps.runtime.overlay import thumbnail
from mdps.runtime.regions import Region
from mdps.serving.folder import REPORT, Row

MOST_PICTURES = 500
MOST_ROWS = 10_000
MOST_REGIONS = 8
_VERDICTS = ("fail", "pass", "error")
_WIDTH, _HEIGHT, _FOOT, _BINS = 720, 160, 22, 48  # of the histogram

# The policy lets the page load nothing: what it shows is in it.
HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'; \
script-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1080px; padding: 0 1rem; color: #222 }}
h1 {{ font-size: 1.4rem }}
table {{ border-collapse: collapse; width: 100% }}
th, td {{ text-align: left; padding: .35rem .6rem; border-bottom: 1px solid #ddd; vertical-align: top;
  overflow-wrap: anywhere }}
th button {{ font: inherit; font-weight: 600; border: 0; background: none; cursor: pointer; padding: 0 }}
th[aria-sort=ascending] button::after {{ content: " \\25b2" }}
th[aria-sort=descending] button::after {{ content: " \\25bc" }}
td img {{ display: block; max-width: 520px; width: 100% }}
.pass {{ color: #17692d }} .fail {{ color: #b00020; font-weight: 600 }} .error {{ color: #8a5300; font-weight: 600 }}
.settings td:first-child {{ width: 14rem; color: #555 }}
svg {{ width: 100%; max-width: 720px; font: 12px system-ui, sans-serif }}
svg rect {{ fill: #6b8cae }} svg line {{ stroke: #b00020; stroke-width: 2 }}
</style></head><body>
"""

SCRIPT = """<script>
for (const button of document.querySelectorAll("th button")) button.addEventListener("click", () => {
  const head = button.parentElement, body = document.querySelector("#images tbody"), at = head.cellIndex;
  const down = head.getAttribute("aria-sort") !== "descending", sign = down ? -1 : 1;
  for (const other of head.parentElement.children) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const key = row => row.cells[at].dataset.key ?? row.cells[at].textContent;
  const numeric = at > 1, number = text => text === "" ? -Infinity : Number(text);
  const order = (a, b) => numeric ? number(key(a)) - number(key(b)) : key(a).localeCompare(key(b));
  body.append(...[...body.rows].sort((a, b) => sign * order(a, b)));
});
</script>"""


def report_run(detector: Detector, bundle: Path, rows: Sequence[Row], out: Path) -> Path:
    """`write_report` of a run of a detector, with all that is needed to repeat it."""
    title = f"Inspection with {detector.manifest.name}"
    return write_report(out, rows, run_settings(detector, bundle), title, detector.doubt)


def write_report(
    folder: Path, rows: Sequence[Row], settings: Mapping[str, str], title: str = "Inspection", doubt: str = ""
) -> Path:
    """Write `report.html` into `folder`, whose `overlays/` hold the rows' pictures, and return its path.

    Images are listed from the highest score down, after those that could not be judged. Only the 500 highest have
    pictures and only 10,000 rows are listed, so that a browser opens the page; it says what it leaves out.

    Args:
        settings: what the run was made with (bundle, hashes, samples, ..), shown as it is.
        doubt: a sentence that warns of all verdicts, shown above them.

    Raises:
        MdpsError: the file cannot be written.
    """
    path = folder / REPORT
    page = render(rows, settings, title, lambda row: _picture(folder, row), doubt)
    with writing(path):
        write_bytes(path, page.encode("utf-8", "replace"))
    return path


def run_settings(detector: Detector, bundle: Path) -> dict[str, str]:
    """All a reader needs to repeat a run: names, hashes (the manifest's covers every file's) and settings, as text."""
    manifest_hash = hashlib.sha256((bundle / FILE_NAME).read_bytes()).hexdigest()
    provenance, calibration = detector.provenance, detector.calibration
    if calibration is not None and calibration.fitness is not None:
        provenance["calibration"] = calibration.to_json() | {"fitness": calibration.fitness.summary}
    return {"manifest.sha256": manifest_hash, **dict(flat(provenance))}


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Pairs of a dotted name and a text for every value of nested mappings; nothing for None."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", str(value)


def render(
    rows: Sequence[Row], settings: Mapping[str, str], title: str, picture: Callable[[Row], str], doubt: str = ""
) -> str:
    """The page as text; `picture` gives a row's picture as HTML."""
    ranked = sorted(rows, key=lambda row: (row.verdict != "error", -math.inf if row.score is None else -row.score))
    threshold = next((row.threshold for row in rows if row.threshold is not None), None)
    scores = [row.score for row in rows if row.score is not None]
    parts = [
        HEAD.format(title=escape(title)),
        f"<h1>{escape(title)}</h1>",
        f'<p class="fail" role="alert">Warning: {plain_text(doubt)}</p>' if doubt else "",
        f"<p>{_counts(rows)}</p>",
        histogram(scores, threshold),
        *(f"<p><em>{note}</em></p>" for note in _left_out(rows)),
        _legend(threshold) if any(row.map for row in rows) else "",
        image_table(ranked[:MOST_ROWS], picture),
        settings_table({**settings, "mdps": __version__}),
        SCRIPT,
        "</body></html>\n",
    ]
    return "\n".join(parts)


def _counts(rows: Sequence[Row]) -> str:
    counted = {verdict: sum(row.verdict == verdict for row in rows) for verdict in _VERDICTS}
    parts = [f'<span class="{verdict}">{count} {verdict}</span>' for verdict, count in counted.items() if count]
    unjudged = len(rows) - sum(counted.values())
    if unjudged:
        parts.append(f"{unjudged} without verdict")
    return f"{len(rows)} images: {', '.join(parts)}" if parts else "0 images"


def _left_out(rows: Sequence[Row]) -> list[str]:
    scored = sum(row.score is not None for row in rows)
    notes = []
    if scored > MOST_PICTURES:
        notes.append(f"Only the {MOST_PICTURES} images with the highest scores, of {scored}, are shown with pictures.")
    if len(rows) > MOST_ROWS:
        notes.append(f"Only {MOST_ROWS} of {len(rows)} images are listed; results.csv has all.")
    return notes


def _legend(threshold: float | None) -> str:
    """Say what decides, what the tiles of a picture are, and what their colours mean."""
    if threshold is None:
        decides = "Without a calibration there is no threshold and no verdict: a larger score is worse."
        scale = "Each picture has a scale of its own: colours say where, not how much."
    else:
        decides = f"The score alone decides: an image fails where it exceeds the threshold, {threshold:.5g}."
        scale = (
            "All pictures share one scale, whose middle (orange) is the hottest pixel of the good parts it was "
            "calibrated on."
        )
    return (
        f"<p>{decides}</p><p>Each picture, from the left:</p><ol>"
        "<li>the image, as the network sees it;</li>"
        "<li>the reconstruction, unless the detector makes none: the part as it would be if it were good (nothing but "
        "noise: a network that was not trained, or not on such images);</li>"
        "<li>the anomaly map as heat over the darkened image: black is none, then red, yellow, and white the most. "
        f"{scale}"
        "</li>"
        "<li>the image with the mask's contour in green: what the second pass was free to repaint, or of a tuned "
        "detector where the map exceeds nearly all of good parts. It decides nothing: a pass may carry contours "
        "too.</li></ol>"
    )


def image_table(ranked: Sequence[Row], picture: Callable[[Row], str]) -> str:
    """A table of the rows that SCRIPT sorts by a click; `picture` gives a row's picture as HTML. One a page."""
    heads = "".join(f"<th><button>{name}</button></th>" for name in ("path", "verdict", "score", "ms"))
    body, pictures = [], 0
    for row in ranked:
        show = row.map is not None and pictures < MOST_PICTURES
        pictures += show
        body.append(_row(row, picture(row) if show else ""))
    return f'<table id="images"><thead><tr>{heads}<th></th></tr></thead><tbody>{"".join(body)}</tbody></table>'


def _row(row: Row, picture: str) -> str:
    verdict = row.verdict or ""
    found = _listed(row.regions or ()) + plain_text(row.error or row.fault or "")
    return (
        f"<tr><td>{plain_text(row.path)}</td><td class='{verdict}'>{verdict}</td>"
        f"{_number(row.score, '.5g')}{_number(row.ms, '.0f')}<td>{picture}{found}</td></tr>\n"
    )


def _listed(regions: Sequence[Region]) -> str:
    """Return where the highest regions are and how large, and how many more there are."""
    told = [f"<li>{_told(region)}</li>" for region in regions[:MOST_REGIONS]]
    if len(regions) > MOST_REGIONS:
        told.append(f"<li>and {len(regions) - MOST_REGIONS} more</li>")
    return f"<ol>{''.join(told)}</ol>" if told else ""


def _told(region: Region) -> str:
    left, top, width, height = region.box
    told = f"{width} x {height} pixels at ({left}, {top}), {region.area} pixels², peak {region.peak:.4g}"
    if region.mm_per_pixel is None:
        return told
    across, down = width * region.mm_per_pixel, height * region.mm_per_pixel
    return f"{told}; {across:.3g} x {down:.3g} mm, {region.area * region.mm_per_pixel**2:.3g} mm²"


def _number(value: float | None, form: str) -> str:
    return '<td data-key=""></td>' if value is None else f'<td data-key="{value!r}">{value:{form}}</td>'


def plain_text(text: str) -> str:
    """Escaped, and with bytes that are no text (names of files may have them) as question marks."""
    return escape(text.encode("utf-8", "replace").decode("utf-8"))


def settings_table(settings: Mapping[str, str]) -> str:
    """Return a table of a run's settings, under its own heading."""
    lines = "".join(f"<tr><td>{escape(key)}</td><td>{plain_text(value)}</td></tr>" for key, value in settings.items())
    return f'<h2>Settings</h2><table class="settings">{lines}</table>'


def _picture(folder: Path, row: Row) -> str:
    with Image.open(folder / str(row.overlay)) as image:
        return embedded(thumbnail(image), "jpeg")


def embedded(data: bytes, kind: str, alt: str = "") -> str:
    """A picture inside the page, from the bytes of a file of `kind` (jpeg, png)."""
    coded = base64.b64encode(data).decode("ascii")
    return f'<img alt="{escape(alt)}" loading="lazy" src="data:image/{kind};base64,{coded}">'


def histogram(scores: Sequence[float], threshold: float | None) -> str:
    """Return an SVG of how many images have which score, with a vertical line at the threshold."""
    if not scores:
        return ""
    low, high = _span([*scores, *([] if threshold is None else [threshold])])
    counts, edges = np.histogram(scores, bins=_BINS, range=(low, high))
    scale = _WIDTH / (high - low)
    most = int(counts.max())
    parts = [_bar(float(left - low) * scale, int(n), most) for left, n in zip(edges[:-1], counts, strict=True)]
    if threshold is not None:
        parts.append(_line((threshold - low) * scale, f"threshold {threshold:.4g}"))
    parts += [_label(0, "start", f"{low:.4g}"), _label(_WIDTH, "end", f"{high:.4g}")]
    box = f'viewBox="0 0 {_WIDTH} {_HEIGHT + _FOOT}"'
    return f'<svg {box} role="img" aria-label="histogram of scores">{"".join(parts)}</svg>'


def _span(values: list[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    margin = 0.02 * (high - low) or max(abs(low) * 0.02, 1e-6)
    return low - margin, high + margin


def _bar(x: float, count: int, most: int) -> str:
    height = _HEIGHT * 0.85 * count / most
    width = _WIDTH / _BINS - 1
    place = f'x="{x:.1f}" y="{_HEIGHT - height:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f"<rect {place}><title>{count}</title></rect>"


def _line(x: float, text: str) -> str:
    anchor, shift = ("end", -5) if x > _WIDTH / 2 else ("start", 5)
    return (
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{_HEIGHT}"/>'
        f'<text x="{x + shift:.1f}" y="14" text-anchor="{anchor}">{text}</text>'
    )


def _label(x: float, anchor: str, text: str) -> str:
    return f'<text x="{x}" y="{_HEIGHT + 16}" text-anchor="{anchor}">{text}</text>'
