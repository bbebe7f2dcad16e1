"""Defects that any surface may have."""

import math

import numpy as np

from mdps.serving.defects.scene import Change, Floats, Point, Scene, blend, grain, sample
from mdps.serving.defects.shapes import blob, box, clouds, line, ramp, turned


def cut_paste(scene: Scene) -> Change:
    """Lay a turned patch of this image or the other one elsewhere (CutPaste), its tone changed a little."""
    length, rng = scene.length(), scene.rng
    window = scene.around(scene.somewhere(), 0.75 * length + 2)
    slim, turn = math.exp(rng.uniform(-1.1, 0)), rng.uniform(0, math.pi)
    alpha = box(window, slim * length, length, turn) if rng.random() < 0.5 else blob(window, length / 2, rng)
    source = scene.image if rng.random() < 0.5 else scene.other
    place = scene.somewhere(scene.ground.part)
    row, column = (at * new / old for at, new, old in zip(place, source.shape, scene.image.shape, strict=False))
    along, beside = turned(window, rng.choice((0, 0.5, 1, 1.5)) * math.pi + rng.normal(0, 0.2))
    shade = rng.normal(0, 6) + scene.tone(window.of(scene.image)) * max(0.0, 1 - 1 / scene.strength)
    return blend(window, scene.image, alpha, sample(source, row + beside, column + along) + np.float32(shade))


def texture(scene: Scene) -> Change:
    """Lay a foreign texture, made of coloured noise, over an uneven blob; some of it lets the surface through."""
    length, rng = scene.length(), scene.rng
    window = scene.around(scene.somewhere(), 0.8 * length + 2)
    old = window.of(scene.image)
    noise = clouds(window, rng.uniform(0.1, 0.6) * length, rng)
    contrast = scene.tone(old, 80.0) * 0.6
    new = np.median(old.reshape(-1, 3), axis=0) + scene.tone(old, 80.0) * 0.5 + noise[..., None] * contrast
    alpha = blob(window, length / 2, rng, soft=1, rough=0.6) * np.float32(rng.uniform(0.4, 1))
    return blend(window, scene.image, alpha, new)


def scratch(scene: Scene) -> Change:
    """Draw a thin line, slightly curved, brighter or darker than what it runs over."""
    length, rng = scene.length(1.6), scene.rng
    centre, turn, bend = scene.somewhere(), rng.uniform(0, math.pi), rng.normal(0, 0.12)
    steps = np.linspace(-0.5, 0.5, 13)
    along, beside = steps * length, (4 * steps**2 - 0.5) * bend * length
    rows = centre[0] + along * math.sin(turn) + beside * math.cos(turn)
    columns = centre[1] + along * math.cos(turn) - beside * math.sin(turn)
    window = scene.around(centre, 0.6 * length + 3)
    width = rng.uniform(0.8, 2.2) * max(1.0, scene.side / 400)
    alpha = line(window, [(list(zip(rows, columns, strict=True)), width)])
    fade = 1 - rng.uniform(0, 0.6) * np.abs(turned(window, turn)[0] / max(1.0, 0.5 * length)).clip(0, 1)
    old = window.of(scene.image)
    return blend(window, scene.image, alpha * fade, old + scene.tone(old, 140.0, 20.0))


def _branch(scene: Scene, start: Point, turn: float, length: float, width: float) -> list[tuple[list[Point], float]]:
    rng, points, step = scene.rng, [start], max(1.5, length / 14)
    strokes: list[tuple[list[Point], float]] = []
    for index in range(max(2, round(length / step))):
        turn += rng.normal(0, 0.35)
        towards = turn + rng.normal(0, 0.5)
        points.append((points[-1][0] + step * math.sin(towards), points[-1][1] + step * math.cos(towards)))
        if width > 0.7 and index and rng.random() < 0.18:
            side = turn + rng.choice((-1, 1)) * rng.uniform(0.5, 1.1)
            strokes += _branch(scene, points[-1], side, length * rng.uniform(0.2, 0.45), width * 0.65)
    return [(points, width), *strokes]


def crack(scene: Scene) -> Change:
    """Draw a jagged line with branches, a pixel or two wide, darker than what it runs through."""
    length, rng = scene.length(1.6), scene.rng
    centre, turn = scene.somewhere(), rng.uniform(0, 2 * math.pi)
    window = scene.around(centre, 0.8 * length + 3)
    start = (centre[0] - 0.5 * length * math.sin(turn), centre[1] - 0.5 * length * math.cos(turn))
    width = rng.uniform(0.9, 2.0) * max(1.0, scene.side / 300)
    alpha = line(window, _branch(scene, start, turn, length, width))
    old = window.of(scene.image)
    depth = np.abs(scene.tone(old, 120.0, 24.0))
    # What is dark itself shows a crack by the light on its edges.
    return blend(window, scene.image, alpha, old + (depth if old.mean() < depth.mean() else -depth))


def stain(scene: Scene) -> Change:
    """Change the tone of a blob with a soft edge; the surface shows through."""
    length, rng = scene.length(), scene.rng
    window = scene.around(scene.somewhere(), length + 3)
    old = window.of(scene.image)
    alpha = blob(window, length / 2, rng, soft=max(0.5, rng.uniform(0.05, 0.4) * length))
    flat = rng.uniform(0, 0.6) * alpha[..., None] * (np.median(old.reshape(-1, 3), axis=0) - old)
    return blend(window, scene.image, alpha, old + scene.tone(old) + flat)


def missing(scene: Scene) -> Change:
    """Take away a piece of the part, often at its outline; a large one is up to a third of the part.

    The background is what shows there; on a surface, which has none, the median of the surroundings, off a little.
    """
    if scene.size == "large" and scene.ground.background is not None and scene.rng.random() < 0.5:
        return broken_off(scene, scene.rng.uniform(0, 2 * math.pi), scene.rng.uniform(0.1, 0.33))
    length, rng = scene.length(), scene.rng
    cells = scene.ground.outline if rng.random() < 0.5 else scene.ground.part
    window = scene.around(scene.somewhere(cells), 0.8 * length + 2)
    alpha = blob(window, length / 2, rng, rough=0.7)
    return blend(window, scene.image, alpha, _behind(scene, window.of(scene.image)))


def _behind(scene: Scene, old: Floats) -> Floats:
    """Return what shows where a piece of the part is gone, with a grain of its own."""
    noise = scene.rng.normal(0, min(4.0, 0.5 * grain(old)), old.shape[:2]).astype(np.float32)[..., None]
    if scene.ground.background is not None:
        return np.asarray(scene.ground.background + noise, dtype=np.float32)
    return np.asarray(np.median(old.reshape(-1, 3), axis=0) + scene.tone(old, 80.0) + noise, dtype=np.float32)


def broken_off(scene: Scene, turn: float, share: float) -> Change:
    """Take this share of the part away: all that lies beyond a ragged line across the direction `turn`."""
    rows, columns = np.nonzero(scene.ground.part)
    height, width = scene.image.shape[:2]
    cell = height / scene.ground.part.shape[0]
    distance = (rows + 0.5) * cell * math.sin(turn) + (columns + 0.5) * cell * math.cos(turn)
    limit = float(np.quantile(distance, 1 - share))
    window = scene.around((0.0, 0.0), max(height, width))
    beyond = turned(window, turn)[0] - limit
    beyond = beyond + clouds(window, 0.15 * scene.side, scene.rng) * 0.015 * scene.side
    return blend(window, scene.image, ramp(beyond), _behind(scene, window.of(scene.image)))


def shading(scene: Scene) -> Change:
    """Make a broad area, three times as wide as other defects, a little brighter or darker.

    Its edge is soft, or a step on one side, as where a magnet's face was not ground.
    """
    length, rng = scene.length(3), scene.rng
    window = scene.around(scene.somewhere(), length + 3)
    alpha = blob(window, length / 2, rng, soft=max(1.0, rng.uniform(0.1, 0.5) * length), rough=0.2)
    if rng.random() < 0.3:
        alpha = alpha * ramp(turned(window, rng.uniform(0, 2 * math.pi))[0])
    old = window.of(scene.image)
    return blend(window, scene.image, alpha, old + 0.7 * scene.faint(old, 40.0, 3.0))


def speck(scene: Scene) -> Change:
    """Put in specks of few pixels: one, some over a medium area, or many over a large one."""
    length, rng = scene.length(), scene.rng
    count = {"small": (1, 2), "medium": (2, 5), "large": (5, 12)}[scene.size]
    centre = scene.somewhere()
    window = scene.around(centre, 0.5 * length + 0.02 * scene.side + 3)
    alpha = np.zeros((window.rows.stop - window.rows.start, window.columns.stop - window.columns.start), np.float32)
    for _ in range(rng.integers(*count)):
        spread = length / 4 if count[1] > 2 else 0.0
        at = tuple(np.asarray(centre) + rng.normal(0, 1, 2).clip(-2, 2) * spread)
        radius = max(0.9, rng.uniform(0.002, 0.007) * scene.side)
        down, across = window.grid
        far = np.hypot(down + centre[0] - at[0], across + centre[1] - at[1])
        alpha = np.maximum(alpha, ramp((radius - far) * 1.5))
    old = window.of(scene.image)
    return blend(window, scene.image, alpha, old + scene.tone(old, 160.0, 30.0))


def smear(scene: Scene) -> Change:
    """Blur a blob along one direction, with a little of what did it left behind."""
    length, rng = scene.length(), scene.rng
    window = scene.around(scene.somewhere(scene.ground.edges), 0.8 * length + 2)
    alpha, turn = blob(window, length / 2, rng, soft=1), rng.uniform(0, math.pi)
    down, across = (axis + at for axis, at in zip(window.grid, window.place, strict=True))
    reach = max(2.0, rng.uniform(0.2, 0.6) * length) * min(2.0, scene.strength)
    steps = np.linspace(-reach, reach, int(min(24, 2 * reach + 1)))
    new = sum(sample(scene.image, down + s * math.sin(turn), across + s * math.cos(turn)) for s in steps)
    trace = 0.35 * scene.tone(window.of(scene.image)) if scene.ground.levels is None else 0
    return blend(window, scene.image, alpha, np.asarray(new / np.float32(len(steps)) + trace))


def shift(scene: Scene) -> Change:
    """Displace a region by some pixels."""
    length, rng = scene.length(), scene.rng
    window = scene.around(scene.somewhere(scene.ground.edges), 0.8 * length + 2)
    alpha = blob(window, length / 2, rng) if rng.random() < 0.5 else box(window, length, length, rng.uniform(0, 1.6))
    turn, far = rng.uniform(0, 2 * math.pi), max(1.5, rng.uniform(0.1, 0.5) * length * scene.strength)
    down, across = (axis + at for axis, at in zip(window.grid, window.place, strict=True))
    return blend(
        window, scene.image, alpha, sample(scene.image, down + far * math.sin(turn), across + far * math.cos(turn))
    )
