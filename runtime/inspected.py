"""Maps and scores of the inspected places alone."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mdps.runtime.pipeline import Array, Inspection
from mdps.runtime.settings import ScoreSettings
from mdps.runtime.tuning import Cascade


def restricted(
    found: Inspection, inside: NDArray[np.bool_], score: ScoreSettings, cascade: Cascade | None
) -> Inspection:
    """Return the same with the lowest value inside given to all pixels outside, and scores of the pixels inside.

    Maps and scores of the first pass stay. A tuned detector's score is its hottest pixel, another's is by `score`; what
    a `cascade` judged again stays in its band.
    """
    values = found.anomaly_map[:, 0, inside]
    tuned = np.zeros(len(values), np.bool_) if found.tuned is None else found.tuned
    scores = [one.max() if own else image_score(one, score) for one, own in zip(values, tuned, strict=True)]
    if cascade:
        bands = zip(scores, tuned, strict=True)
        scores = [one if own else float(np.clip(one, cascade.low, cascade.high)) for one, own in bands]
    coldest = values.min(axis=1)[:, None, None, None]
    return replace(
        found,
        anomaly_map=np.where(inside, found.anomaly_map, coldest),
        anomaly_score=np.asarray(scores, dtype=np.float32),
        mask=np.where(inside, found.mask, np.float32(0)),
    )


def image_score(values: Array, settings: ScoreSettings) -> float:
    """Return the score of any pixels [n] of a map, by as many of them as the score graph counts of a whole one."""
    count = min(settings.top, values.size)
    top = np.partition(values, -count)[-count:]
    if settings.image_score == "top_mean":
        return float(top.mean())
    largest = values.max()
    return float(np.exp(top - largest).sum() / np.exp(values - largest).sum(dtype=np.float64))
