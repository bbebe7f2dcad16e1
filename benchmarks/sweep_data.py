"""The test set of a sweep, and the terms that were drawn for it."""

import hashlib
import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mdps.benchmarks.align import enlarged, truth_in_box
from mdps.benchmarks.datasets import Category, Sample, find_categories
from mdps.benchmarks.metrics import auroc
from mdps.benchmarks.reproduce.bundles import digest
from mdps.benchmarks.streaming import PixelMetrics
from mdps.benchmarks.sweep_terms import Array, Terms, draw
from mdps.runtime.atomic import write_bytes
from mdps.runtime.errors import ImageError, UsageError
from mdps.runtime.preprocessing import Preprocessing


@dataclass(frozen=True)
class TestSet:
    """Test images of one category as the network sees them, [n, 3, H, W] in [-1, 1], with labels and true masks."""

    name: str
    observations: Array
    labels: NDArray[np.bool_]
    truths: tuple[NDArray[np.bool_] | None, ...]
    key: str

    def image_auroc(self, scores: Array) -> float:
        """AUROC of scores [n]; UsageError where all images are good or all defective."""
        return auroc(self.labels, scores)

    def pixel_auroc(self, maps: Array) -> float:
        """AUROC of maps [n, H, W], enlarged to the masks as an evaluation does; NaN without defective pixels."""
        pixels = PixelMetrics()
        for truth, anomaly_map in zip(self.truths, maps, strict=True):
            if truth is not None:
                pixels.add(truth, enlarged(anomaly_map, truth.shape))
        return pixels.auroc()


def load_test_set(
    dataset: Path, category: str | None, preprocessing: Preprocessing, every: int, largest: int | None
) -> TestSet:
    """Every n-th test image of the category; UsageError where there are several and none is named."""
    found = _category(dataset, category)
    samples = found.test[::every]
    return TestSet(
        name=found.name,
        observations=np.stack([preprocessing(sample.path) for sample in samples]),
        labels=np.array([sample.defective for sample in samples]),
        truths=tuple(_truth(sample, preprocessing, largest) for sample in samples),
        key=digest([found.name, every, [sample.path.relative_to(found.root).as_posix() for sample in samples]]),
    )


def _truth(sample: Sample, preprocessing: Preprocessing, largest: int | None) -> NDArray[np.bool_] | None:
    """Inside what the map shows; None for a defective image without a usable mask, which counts as an image only."""
    try:
        whole = sample.truth()
    except ImageError:
        return None
    return truth_in_box(whole, preprocessing.covered_box((whole.shape[1], whole.shape[0])), largest)


def _category(dataset: Path, name: str | None) -> Category:
    categories = find_categories(dataset)
    chosen = [category for category in categories if name in (None, category.name)]
    if len(chosen) == 1:
        return chosen[0]
    names = ", ".join(category.name for category in categories)
    raise UsageError(f"a sweep is over one category, {dataset} has {names}: name one with --category")


class TermStore:
    """Terms of one bundle on one test set, by guidance scale and masks; drawn once and kept as files in `folder`."""

    def __init__(self, folder: Path, bundle: Path, data: TestSet, threads: int | None) -> None:
        self._folder, self._bundle, self._data, self._threads = folder, bundle, data, threads

    def get(self, scale: float, masked: Array | None = None) -> Terms:
        """Terms after the first pass, or after the second under masks [n, H, W]; raises as `draw`."""
        path = self._folder / f"{self._key(scale, masked)}.npz"
        if path.is_file():
            with np.load(path) as arrays:
                return Terms(arrays["features"], arrays["pixels"])
        terms = draw(self._bundle, scale, self._data.observations, masked, self._threads)
        buffer = io.BytesIO()
        np.savez(buffer, features=terms.features, pixels=terms.pixels)
        self._folder.mkdir(parents=True, exist_ok=True)
        write_bytes(path, buffer.getvalue())
        return terms

    def _key(self, scale: float, masked: Array | None) -> str:
        of_masks = "" if masked is None else hashlib.sha256(np.packbits(masked > 0).tobytes()).hexdigest()
        return digest([self._bundle.name, self._data.key, scale, of_masks])
