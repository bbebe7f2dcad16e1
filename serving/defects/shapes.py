"""Shapes of defects: how opaque, from 0 to 1, a defect is at each pixel of a window; their edges are anti-aliased."""

import math
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

from mdps.serving.defects.scene import Floats, Point, Window

_FINE = 4  # lines are drawn this many times larger and then averaged


def blob(window: Window, radius: float, rng: np.random.Generator, soft: float = 0.5, rough: float = 0.35) -> Floats:
    """Return an uneven ellipse around the window's place; `soft` is the width of its edge in pixels."""
    down, across = window.grid
    turn, slim = rng.uniform(0, math.pi), rng.uniform(0.55, 1.0)
    along = down * math.sin(turn) + across * math.cos(turn)
    beside = (down * math.cos(turn) - across * math.sin(turn)) / slim
    angle = np.arctan2(beside, along)
    edge = np.full_like(angle, 1 - rough / 2)
    for waves in range(2, 7):
        edge += rough / waves * rng.uniform(0, 1) * np.cos(waves * angle + rng.uniform(0, 2 * math.pi))
    return ramp((edge * radius - np.hypot(along, beside)) / max(soft, 0.5))


def box(window: Window, height: float, width: float, turn: float) -> Floats:
    """Return a rectangle around the window's place, turned by an angle."""
    along, beside = turned(window, turn)
    return np.minimum(ramp(width / 2 - np.abs(along)), ramp(height / 2 - np.abs(beside)))


def turned(window: Window, turn: float) -> tuple[Floats, Floats]:
    """Return the pixels' distances from the place along a direction and across it."""
    down, across = window.grid
    sine, cosine = np.float32(math.sin(turn)), np.float32(math.cos(turn))
    return down * sine + across * cosine, down * cosine - across * sine


def ramp(distance: Floats) -> Floats:
    """Return 1 inside, 0 outside, and a smooth step a pixel wide to each side of the edge."""
    inside = np.clip(distance / 2 + 0.5, 0, 1)
    return np.asarray(inside * inside * (3 - 2 * inside), dtype=np.float32)


def line(window: Window, strokes: Sequence[tuple[Sequence[Point], float]]) -> Floats:
    """Return polylines of (row, column) points in the image, each with a width in pixels."""
    canvas, pen = _canvas(window)
    for points, width in strokes:
        pen.line(_moved(window, points), fill=255, width=max(1, round(width * _FINE)), joint="curve")
    return _reduced(canvas)


def polygon(window: Window, points: Sequence[Point]) -> Floats:
    """Return a filled polygon of (row, column) points in the image."""
    canvas, pen = _canvas(window)
    pen.polygon(_moved(window, points), fill=255)
    return _reduced(canvas)


def _canvas(window: Window) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    rows, columns = window.rows, window.columns
    canvas = Image.new("L", ((columns.stop - columns.start) * _FINE, (rows.stop - rows.start) * _FINE))
    return canvas, ImageDraw.Draw(canvas)


def _moved(window: Window, points: Sequence[Point]) -> list[Point]:
    top, left = window.rows.start, window.columns.start
    return [((column - left + 0.5) * _FINE, (row - top + 0.5) * _FINE) for row, column in points]


def _reduced(canvas: Image.Image) -> Floats:
    return np.asarray(canvas.reduce(_FINE), dtype=np.float32) / 255


def clouds(window: Window, cell: float, rng: np.random.Generator, octaves: int = 4) -> Floats:
    """Return smooth noise of mean 0 and deviation 1, its largest waves `cell` pixels long."""
    height, width = window.rows.stop - window.rows.start, window.columns.stop - window.columns.start
    total = np.zeros((height, width), dtype=np.float32)
    for octave in range(octaves):
        step = max(1.0, cell / 2**octave)
        coarse = rng.normal(0, 0.6**octave, (math.ceil(height / step) + 1, math.ceil(width / step) + 1))
        picture = Image.fromarray(coarse.astype(np.float32))
        total += np.asarray(picture.resize((width, height), Image.Resampling.BICUBIC))
    return np.asarray((total - total.mean()) / max(1e-3, float(total.std())))
