"""One HTML file about a tuning: what was chosen and why, all that was tried over its time, defects found and missed."""

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from mdps.runtime.atomic import write_bytes, writing
from mdps.runtime.calibration import Calibration
from mdps.runtime.overlay import heat_range, own_range, strip, thumbnail
from mdps.runtime.preprocessing import to_unit
from mdps.serving.defects import SIZES
from mdps.serving.report import HEAD, embedded, flat, settings_table
from mdps.tuning.candidates import Tried
from mdps.tuning.outcome import Outcome, Shown

MOST_ROWS = 60
_WIDTH, _HEIGHT, _LEFT, _FOOT = 720, 300, 40, 36
_STYLE = (
    "<style>svg circle{fill:#6b8cae}svg circle.over{fill:#ccc}svg circle.chosen{fill:#b00020}"
    "figure{display:inline-block;margin:.3rem;vertical-align:top;width:250px}figcaption{font-size:12px}</style>"
)


def write_report(path: Path, outcome: Outcome, title: str) -> None:
    """Write the page; MdpsError where it cannot be written."""
    with writing(path):
        write_bytes(path, page(outcome, title).encode("utf-8", "replace"))


def page(outcome: Outcome, title: str) -> str:
    """Return the page as text."""
    told = {name: value for name, value in outcome.evidence.items() if name not in ("candidates", "fitted")}
    if fitness := outcome.calibration.fitness:
        told["found of defects put in"] = fitness.summary
    return "\n".join(
        [
            HEAD.format(title=escape(title)),
            _STYLE,
            f"<h1>{escape(title)}</h1>",
            *(f"<p>{escape(sentence)}</p>" for sentence in _words(outcome)),
            "<h2>Accuracy over time</h2>",
            plot(outcome.search.tried, outcome.chosen, outcome.budget_ms),
            "<p>Blue: within the budget (the line), grey: beyond it, red: chosen. The value is that of the table.</p>",
            "<h2>Candidates</h2>",
            _table(outcome),
            "<h2>Synthetic defects, found and missed</h2>",
            "<p>Each: the part with the defect, the anomaly map as heat, and in green the outline of the defect.</p>",
            _gallery(outcome.shown, outcome.calibration),
            settings_table(dict(flat(told))),
            "</body></html>\n",
        ]
    )


def _words(outcome: Outcome) -> list[str]:
    """Say what was chosen, why, and how far it can be trusted."""
    chosen, search = outcome.chosen, outcome.search
    best = max(search.tried, key=lambda one: one.value)
    words = [
        f"Chosen: {chosen.candidate.name}. It takes {outcome.ms:.0f} ms an image here, of {outcome.budget_ms:g} "
        f"allowed, and is worth {chosen.value:.3f}: {outcome.evidence['formula']}."
    ]
    if best.candidate is not chosen.candidate:
        why = "equal within the error" if best.ms <= outcome.budget_ms else f"at {best.ms:.0f} ms beyond the budget"
        words.append(f"The highest value has {best.candidate.name}, {best.value:.3f}: {why}.")
    if search.left_out:
        words.append(f"No time was left for: {'; '.join(search.left_out)}.")
    words.append(f"Cascade: {outcome.evidence['cascade']['said']}.")
    words += [outcome.calibration.doubt] if outcome.calibration.doubt else []
    return [*words, "No test image was read. Real defects may be other than those that were put in: measure your own."]


def plot(tried: Sequence[Tried], chosen: Tried, budget_ms: float) -> str:
    """Return an SVG of the candidates' values over their time, on a scale of logarithms."""
    times = [math.log10(max(one.ms, 0.01)) for one in tried]
    low, high = min(*times, math.log10(budget_ms)) - 0.1, max(*times, math.log10(budget_ms)) + 0.1
    bottom = min(one.value for one in tried)
    top = max(max(one.value for one in tried), bottom + 1e-3)

    def x(ms: float) -> float:
        return _LEFT + (math.log10(max(ms, 0.01)) - low) / (high - low) * (_WIDTH - _LEFT)

    def y(value: float) -> float:
        return 10 + (top - value) / (top - bottom) * (_HEIGHT - 20)

    ordered = sorted(tried, key=lambda one: one is chosen)
    dots = [
        f'<circle cx="{x(one.ms):.1f}" cy="{y(one.value):.1f}" r="{6 if one is chosen else 3}" '
        f'class="{"chosen" if one is chosen else "over" if one.ms > budget_ms else ""}">'
        f"<title>{escape(one.candidate.name)}: {one.value:.3f}, {one.ms:.0f} ms</title></circle>"
        for one in ordered
    ]
    budget = x(budget_ms)
    marks = [
        f'<line x1="{budget:.1f}" x2="{budget:.1f}" y1="0" y2="{_HEIGHT}"/>',
        *(f'<text x="0" y="{y(value) + 4:.1f}">{value:.2f}</text>' for value in (bottom, (bottom + top) / 2, top)),
        *(
            f'<text x="{x(ms):.1f}" y="{_HEIGHT + 16}" text-anchor="middle">{ms:g} ms</text>'
            for ms in (10.0**power * step for power in range(-1, 6) for step in (1, 2, 5))
            if low <= math.log10(ms) <= high
        ),
    ]
    box = f'viewBox="0 0 {_WIDTH} {_HEIGHT + _FOOT}"'
    return f'<svg {box} role="img" aria-label="value over time">{"".join([*marks, *dots])}</svg>'


def _table(outcome: Outcome) -> str:
    ranked = sorted(outcome.search.tried, key=lambda one: -one.value)
    shown = list(dict.fromkeys([*ranked[:MOST_ROWS], outcome.chosen]))
    rows = "".join(_row(one, outcome) for one in shown)
    left = (
        f"<p><em>{len(ranked) - len(shown)} of lower values are not listed.</em></p>"
        if len(ranked) > len(shown)
        else ""
    )
    heads = "".join(f"<th>{name}</th>" for name in ("candidate", "value", "image", "pixel", "worst kind", "ms"))
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>{left}"


def _row(one: Tried, outcome: Outcome) -> str:
    kinds = one.kinds.values()
    image, pixel = (sum(getattr(kind, name) for kind in kinds) / len(kinds) for name in ("image", "pixel"))
    worst = min(one.kinds, key=lambda kind: one.kinds[kind].mean)
    name = escape(one.candidate.name)
    name = f"<b>{name}</b>" if one is outcome.chosen else name
    over = " (over)" if one.ms > outcome.budget_ms else ""
    cells: list[Any] = [name, f"{one.value:.3f}", f"{image:.3f}", f"{pixel:.3f}"]
    cells += [f"{escape(worst)}, {one.kinds[worst].mean:.2f}", f"{one.ms:.1f}{over}"]
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>\n"


def _gallery(shown: Shown, calibration: Calibration) -> str:
    """Return the pictures of all defects, by kind and size."""
    parts = []
    for kind in dict.fromkeys(shown.defects.kinds):
        rows = [index for index, name in enumerate(shown.defects.kinds) if name == kind]
        rows.sort(key=lambda index: SIZES.index(shown.defects.sizes[index]))
        found = sum(float(shown.scores[index]) > calibration.threshold for index in rows)
        figures = "".join(_figure(shown, index, calibration) for index in rows)
        parts.append(f"<h3>{escape(kind)}: {found} of {len(rows)} found</h3>{figures}")
    return "\n".join(parts)


def _figure(shown: Shown, index: int, calibration: Calibration) -> str:
    defects, score = shown.defects, float(shown.scores[index])
    found = score > calibration.threshold
    image, mask, anomaly_map = defects.seen.images[index], defects.masks[index], shown.maps[index]
    picture = strip(to_unit(image), None, anomaly_map, mask, heat_range(calibration) or own_range(anomaly_map))
    verdict = '<span class="pass">found</span>' if found else '<span class="fail">missed</span>'
    caption = f"{defects.sizes[index]}: {verdict}, {score:.3g} of {calibration.threshold:.3g}"
    return f"<figure>{embedded(thumbnail(picture, 250), 'jpeg')}<figcaption>{caption}</figcaption></figure>"
