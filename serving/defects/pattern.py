"""Defects made of the part's own pattern: a track interrupted, two bridged, a spur on an edge, a piece moved.

The pattern is found near an edge of the image, by the level that parts dark from bright there best; from points of one
of the two, rays in sixteen directions say how wide it is. A surface without a pattern gets a mark of the same shape in
a tone of its own: a bar for a gap or a bridge, a jagged tooth for a spur, and a patch moved and shaded for a piece.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mdps.serving.defects.scene import Bools, Change, Floats, Point, Scene, Window, blend, grain, sample, split
from mdps.serving.defects.shapes import blob, box, polygon, ramp, turned

_TURNS = 16
_POINTS = 100
_BEYOND = 1e6
_CONTRAST = 24.0  # grey levels between dark and bright of a pattern


@dataclass(frozen=True)
class Pattern:
    """A window parted into a structure and the rest; `points` of the structure, and how far it goes from each.

    `reach` [points, 16]: pixels to the structure's end in directions of k / 16 turn; `_BEYOND` where the window ends.
    """

    window: Window
    structure: Bools
    points: NDArray[np.intp]
    reach: Floats

    def place(self, index: int) -> Point:
        """Return a point's (row, column) in the image."""
        row, column = self.points[index]
        return (float(row + self.window.rows.start), float(column + self.window.columns.start))


def _pattern(scene: Scene, length: float, rarer_share: float = 0.75) -> Pattern | None:
    """Look for a pattern near an edge; the structure is the rarer of the two in this share of cases."""
    window = scene.around(scene.somewhere(scene.ground.edges), max(12.0, 0.06 * scene.side, 1.5 * length))
    old = window.of(scene.image)
    grey = old.mean(axis=-1)
    level = split(grey)
    if level is None:
        return None
    bright = grey > level
    if grey[bright].mean() - grey[~bright].mean() < max(_CONTRAST, 4 * grain(old)):
        return None
    rarer = bright if bright.mean() < 0.5 else ~bright
    structure = rarer if scene.rng.random() < rarer_share else ~rarer
    places = np.argwhere(structure)
    points = places[scene.rng.integers(0, len(places), _POINTS)]
    return Pattern(window, structure, points, _rays(structure, points))


def _rays(structure: Bools, points: NDArray[np.intp]) -> Floats:
    far = max(structure.shape)
    steps = np.arange(1, far + 1)
    turns = np.arange(_TURNS) * (2 * math.pi / _TURNS)
    rows = points[:, 0, None, None] + np.rint(np.sin(turns)[:, None] * steps).astype(np.intp)
    columns = points[:, 1, None, None] + np.rint(np.cos(turns)[:, None] * steps).astype(np.intp)
    inside = (rows >= 0) & (rows < structure.shape[0]) & (columns >= 0) & (columns < structure.shape[1])
    seen = structure[rows.clip(0, structure.shape[0] - 1), columns.clip(0, structure.shape[1] - 1)]
    ended = inside & ~seen
    left = ~inside
    first, out = ended.argmax(axis=-1), left.argmax(axis=-1)
    ends = ended.any(axis=-1) & ~(left.any(axis=-1) & (out < first))
    return np.where(ends, first.astype(np.float32), np.float32(_BEYOND)).astype(np.float32)


def _narrow(
    pattern: Pattern, scene: Scene, least: float, most: float, longer: float
) -> tuple[Point, float, float] | None:
    """Draw a place amid the structure where it is between `least` and `most` wide and `longer` times as long.

    Its (row, column), its width, and the direction across it.
    """
    half = _TURNS // 2
    widths = pattern.reach[:, :half] + pattern.reach[:, half:] + 1
    axis = widths.argmin(axis=1)
    every = np.arange(len(axis))
    width, long = widths[every, axis], widths[every, (axis + half // 2) % half]
    chosen = np.flatnonzero((width >= least) & (width <= most) & (long >= longer * width))
    if not len(chosen):
        return None
    index = int(scene.rng.choice(chosen))
    turn = float(axis[index]) * 2 * math.pi / _TURNS
    ahead, back = (float(pattern.reach[index, axis[index] + k]) for k in (0, half))
    row, column = pattern.place(index)
    middle = (ahead - back) / 2
    return (row + middle * math.sin(turn), column + middle * math.cos(turn)), float(width[index]), turn


def gap(scene: Scene) -> Change | None:
    """Interrupt a track by what lies to both sides of it."""
    length = scene.length()
    pattern = _pattern(scene, length)
    found = _narrow(pattern, scene, 1.0, 0.12 * scene.side, 1.5) if pattern else None
    if found is None:
        return scene.plainly(lambda plain: _bar(plain, length, plain.rng.uniform(0.5, 1)))
    centre, width, turn = found
    window = scene.around(centre, 0.5 * (length + width) + 4)
    across, along = turned(window, turn)
    slant = across * scene.rng.normal(0, 0.4) + scene.rng.normal(0, 0.15, across.shape).astype(np.float32)
    alpha = ramp((length / 2 - np.abs(along + slant)) * 2) * ramp(width / 2 + 1.5 - np.abs(across))
    return blend(window, scene.image, alpha, _between(scene, window, centre, turn, width / 2 + 2))


def _between(scene: Scene, window: Window, centre: Point, turn: float, far: float) -> Floats:
    """Return what lies `far` to both sides of a line through `centre` across `turn`, one side blent into the other."""
    across, along = turned(window, turn)
    sides = []
    for side in (-far, far):
        rows = centre[0] + side * math.sin(turn) + along * math.cos(turn)
        columns = centre[1] + side * math.cos(turn) - along * math.sin(turn)
        sides.append(sample(scene.image, rows, columns))
    share = np.clip(across / (2 * far) + 0.5, 0, 1)[..., None]
    return np.asarray(sides[0] * (1 - share) + sides[1] * share, dtype=np.float32)


def bridge(scene: Scene) -> Change | None:
    """Join two neighbouring structures of one tone by a bar of that tone."""
    length = scene.length()
    pattern = _pattern(scene, length, 0.25)  # it goes through the space between tracks
    found = _narrow(pattern, scene, 2.0, max(4.0, 1.5 * length), 0.0) if pattern else None
    if found is None:
        return scene.plainly(lambda plain: _bar(plain, length, plain.rng.uniform(0.15, 0.4)))
    centre, width, turn = found
    thick = max(1.5, scene.rng.uniform(0.2, 0.6) * length)
    window = scene.around(centre, 0.5 * (width + thick) + 4)
    across, along = turned(window, turn)
    uneven = scene.rng.normal(0, 0.2, across.shape).astype(np.float32)
    alpha = ramp((thick / 2 - np.abs(along) + uneven) * 1.5) * ramp(width / 2 + 1.5 - np.abs(across))
    ends = _between(scene, window, centre, turn, width / 2 + 1.5)
    tone = np.median(ends[alpha > 0.5].reshape(-1, 3), axis=0) if (alpha > 0.5).any() else ends
    return blend(window, scene.image, alpha, np.asarray(np.broadcast_to(tone, ends.shape), dtype=np.float32))


def spur(scene: Scene) -> Change | None:
    """Let an edge grow a jagged tooth of its structure's tone, or bite one out of it."""
    length = scene.length()
    pattern = _pattern(scene, length)
    index = _edge(pattern, scene) if pattern else None
    if pattern is None or index is None:
        turn = scene.rng.uniform(0, 2 * math.pi)
        return scene.plainly(lambda plain: _tooth(plain, plain.somewhere(), turn, length, None))
    turn = float(pattern.reach[index].argmin()) * 2 * math.pi / _TURNS
    row, column = pattern.place(index)
    inside = _pixel(scene, (row - 1.5 * math.sin(turn), column - 1.5 * math.cos(turn)))
    return _tooth(scene, (row, column), turn, length, inside)


def _edge(pattern: Pattern, scene: Scene) -> int | None:
    """Draw a point at the edge of the structure with more of it behind."""
    nearest = pattern.reach.argmin(axis=1)
    every = np.arange(len(nearest))
    behind = pattern.reach[every, (nearest + _TURNS // 2) % _TURNS]
    chosen = np.flatnonzero((pattern.reach[every, nearest] < 1) & (behind >= 1))
    return int(scene.rng.choice(chosen)) if len(chosen) else None


def _tooth(scene: Scene, foot: Point, turn: float, length: float, tone: Floats | None) -> Change:
    rng, half = scene.rng, length * scene.rng.uniform(0.25, 0.6)
    window = scene.around(foot, 1.2 * length + 3)
    outline = [(-1.0, -half), (length * rng.uniform(0.2, 0.7), -half * rng.uniform(0.3, 1))]
    outline += [(length, half * rng.normal(0, 0.4)), (length * rng.uniform(0.2, 0.7), half * rng.uniform(0.3, 1))]
    outline += [(-1.0, half)]
    sine, cosine = math.sin(turn), math.cos(turn)
    points = [(foot[0] + out * sine + by * cosine, foot[1] + out * cosine - by * sine) for out, by in outline]
    old = window.of(scene.image)
    new = old + scene.tone(old) if tone is None else np.broadcast_to(tone, old.shape)
    return blend(window, scene.image, polygon(window, points), np.asarray(new, dtype=np.float32))


def moved(scene: Scene) -> Change | None:
    """Take a small piece of the pattern out, and put it back a few pixels away."""
    length, rng = scene.length(), scene.rng
    pattern = _pattern(scene, length)
    turn, far = rng.uniform(0, 2 * math.pi), max(2.0, rng.uniform(0.3, 0.8) * length)
    index = _edge(pattern, scene) if pattern else None
    if pattern is None or index is None:
        return scene.plainly(lambda plain: _displaced(plain, length, turn, far))
    centre = pattern.place(index)
    window = scene.around(centre, length + far + 2)
    old = window.of(scene.image)
    grey = old.mean(axis=-1)
    level = split(pattern.window.of(scene.image).mean(axis=-1)) or 0.0
    bright = bool(_pixel(scene, centre).mean() > level)
    structure = (grey > level) == bright
    if structure.all():
        return _displaced(scene, length, turn, far)
    piece = blob(window, max(1.5, length / 2), rng)
    rest = np.median(old[~structure], axis=0)
    taken = old + (piece * _grown(structure))[..., None] * (rest - old)
    down, across = round(far * math.sin(turn)), round(far * math.cos(turn))
    laid = _rolled((piece * structure)[..., None], down, across)
    return Change(window, np.asarray(taken + laid * (_rolled(old, down, across) - taken), dtype=np.float32))


def _pixel(scene: Scene, place: Point) -> Floats:
    return sample(scene.image, np.asarray(place[0]), np.asarray(place[1]))


def _rolled(values: Floats, down: int, across: int) -> Floats:
    return np.roll(values, (down, across), axis=(0, 1))


def _grown(structure: Bools) -> Bools:
    """Return it with a pixel more all around, where edges are blent."""
    wide = np.pad(structure, 1)
    height, width = structure.shape
    return np.asarray(np.any([wide[i : i + height, j : j + width] for i in range(3) for j in range(3)], axis=0))


def _bar(scene: Scene, length: float, slim: float) -> Change:
    centre = scene.somewhere()
    window = scene.around(centre, 0.75 * length + 3)
    alpha = box(window, max(1.5, slim * length), length, scene.rng.uniform(0, math.pi))
    old = window.of(scene.image)
    return blend(window, scene.image, alpha, old + scene.tone(old))


def _displaced(scene: Scene, length: float, turn: float, far: float) -> Change:
    window = scene.around(scene.somewhere(scene.ground.edges), 0.8 * length + 2)
    down, across = (axis + at for axis, at in zip(window.grid, window.place, strict=True))
    new = sample(scene.image, down + far * math.sin(turn), across + far * math.cos(turn))
    alpha = blob(window, length / 2, scene.rng)
    return blend(window, scene.image, alpha, new + 0.5 * scene.tone(window.of(scene.image)))


MAKERS: dict[str, Callable[[Scene], Change | None]] = {"gap": gap, "bridge": bridge, "spur": spur, "moved": moved}
