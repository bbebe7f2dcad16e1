"""A histogram of scores with the threshold, as inline SVG."""

from collections.abc import Sequence

import numpy as np

_WIDTH, _HEIGHT, _FOOT, _BINS = 720, 160, 22, 48


def histogram(scores: Sequence[float], threshold: float | None) -> str:
    """SVG text: bars of how many images have which score; a vertical line stands at the threshold."""
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
