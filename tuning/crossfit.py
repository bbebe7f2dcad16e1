"""Terms fitted to all good images, and raw maps of these images by terms that were fitted to the others.

So none is kept from the fit for the sake of the scales and the threshold, which need images that a term has not seen.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mdps.tuning.candidates import Candidate, Raw
from mdps.tuning.photographs import SEED, Seen
from mdps.tuning.search import Search
from mdps.tuning.statistics import Distance, Pixels

FOLDS, FEW = 4, 500
"""Parts of the images, of which each in turn is left out of a fit: at least 4, and FEW over the number of images.

The fewer images a Gaussian is of, the farther from it others lie, so that of few images few are left out at once.
"""

Module = TypeVar("Module", bound=Distance | Pixels)


def crossfitted(search: Search, candidate: Candidate, seen: Seen) -> tuple[Candidate, list[Distance | Pixels | None]]:
    """Return the candidate with maps of these images by terms fitted to others of them, and terms fitted to all.

    The maps of a fold are by terms of the other folds; those of defects stay those of the search. A map of the bundle's
    score graph is fitted to nothing: its module is None.
    """
    raws, modules = [], []
    for raw in candidate.raws:
        search.progress(f"fitting to all {len(seen.images)} images: {raw.name}", 1.0)
        inputs = search.inputs(raw, seen)
        raws.append(replace(raw, good=out_of_fold(search, raw, inputs)))
        modules.append(search.fit(raw, inputs))
    return replace(candidate, raws=tuple(raws)), modules


@torch.inference_mode()
def out_of_fold(search: Search, raw: Raw, inputs: list[Tensor]) -> NDArray[np.float32]:
    """Return raw maps [n, h, w] of n images, given the inputs [n, ...] of the term's module."""
    found: NDArray[np.float32] | None = None
    for rows, others in folds(len(inputs[0])):
        module = search.fit(raw, [one[others] for one in inputs])
        made = (module(*(one[rows] for one in inputs)) if module else inputs[0][rows])[:, 0].numpy()
        found = np.empty((len(inputs[0]), *made.shape[1:]), np.float32) if found is None else found
        found[rows] = made
    assert found is not None
    return found


def folds(count: int) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield the rows of each fold and all others, drawn by one seed."""
    order = np.random.default_rng(SEED).permutation(count)
    parts = min(max(FOLDS, FEW // count), count // 2)
    for part in range(parts):
        inside = np.arange(count) % parts == part
        yield order[inside], order[~inside]
