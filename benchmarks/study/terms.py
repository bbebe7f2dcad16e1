"""The two terms of the map (eqn. 20 of the paper) apart, so that one set of samples serves every weighting.

Terms of a test set are drawn once and kept.
"""

import hashlib
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter
from tqdm import tqdm

from mdps.benchmarks.data.samples import Category, Sample, enlarged, truth_in_box
from mdps.benchmarks.kit import digest, write_arrays
from mdps.benchmarks.metrics import auroc
from mdps.benchmarks.metrics.pixels import PixelMetrics
from mdps.benchmarks.study import Changes
from mdps.runtime.bundle import Bundle
from mdps.runtime.errors import ImageError
from mdps.runtime.graphs import SCORE
from mdps.runtime.loading import open_pipeline
from mdps.runtime.manifest import Manifest
from mdps.runtime.pipeline import Pipeline
from mdps.runtime.preprocessing import Preprocessing
from mdps.runtime.sampler import posterior_sampling
from mdps.runtime.settings import gaussian_kernel, top_pixels

Array = NDArray[np.float32]
_PIXELS = 8 * 64 * 64  # of posterior samples at once: a guided step keeps all its activations in memory


@dataclass(frozen=True)
class Scoring:
    """How terms become maps and scores, in units that mean the same at every image size.

    `smoothing` is the Gaussian's sigma in pixels of a 64 x 64 image; `top` how many pixels of a 256 x 256 map the image
    score averages, 500 in the paper.
    """

    eta: float
    smoothing: float
    top: float

    @staticmethod
    def top_of(pixels: int, size: tuple[int, int]) -> float:
        """`top` for a count of pixels of a map of `size`."""
        return 500 * pixels / top_pixels(*size)

    def sigma(self, size: tuple[int, int]) -> float:
        """The sigma in pixels of a map of `size` (H, W): what `--smoothing-sigma` of an export takes."""
        return self.smoothing * min(size) / 64

    def pixels(self, size: tuple[int, int]) -> int:
        """How many pixels of a map of `size` count: what `--top` of an export takes."""
        return max(1, min(size[0] * size[1], round(top_pixels(*size) * self.top / 500)))


@dataclass(frozen=True)
class Terms:
    """Mean over the posterior samples of the feature distance and the L1 difference: float32 [n, H, W] each."""

    features: Array
    pixels: Array

    def maps(self, scoring: Scoring) -> Array:
        """Anomaly maps [n, H, W], as the score graph of a bundle with these settings gives them."""
        maps: Array = self.features + np.float32(scoring.eta) * self.pixels
        return _smooth(maps, scoring.sigma((maps.shape[1], maps.shape[2])))


def scores(maps: Array, scoring: Scoring) -> Array:
    """Image scores [n]: the mean of each map's largest pixels."""
    count = scoring.pixels((maps.shape[1], maps.shape[2]))
    largest = np.partition(maps.reshape(len(maps), -1), -count, axis=1)[:, -count:]
    return np.asarray(largest.mean(axis=1), dtype=np.float32)


def masks(maps: Array, mask_lambda: float) -> Array:
    """Eqn. 22 with each map's own range: 1 where above min + lambda (max - min), else 0; float32 [n, H, W]."""
    low, high = maps.min(axis=(1, 2), keepdims=True), maps.max(axis=(1, 2), keepdims=True)
    return np.asarray(maps > low + np.float32(mask_lambda) * (high - low), dtype=np.float32)


def draw(bundle: Path, scale: float, observations: Array, masked: Array | None, threads: int | None) -> Terms:
    """Terms of `observations` [n, 3, H, W] after a pass at guidance scale `scale`: the first, or under masks [n, H, W].

    `bundle` has no pixel term and no smoothing: what its score graph calls the map is the feature term.
    """
    manifest = Manifest.read(bundle)
    settings = Changes(guidance_scale=scale)(manifest.settings)
    if masked is None:
        settings = replace(settings, sampler=replace(settings.sampler, masked_pass=None))
    at_once = max(1, _PIXELS // (observations.shape[2] * observations.shape[3]))
    step = max(1, at_once // settings.sampler.samples)
    found = []
    with ExitStack() as opened:
        pipeline = open_pipeline(Bundle(bundle, manifest, settings), opened, threads=threads, max_batch=at_once)
        # disable=None: a bar on a terminal, nothing in a pipe
        for start in tqdm(range(0, len(observations), step), desc=f"rho {scale:g}", disable=None):
            part = slice(start, start + step)
            found.append(_terms(pipeline, observations[part], None if masked is None else masked[part]))
    return Terms(np.concatenate([a for a, _ in found]), np.concatenate([b for _, b in found]))


def _terms(pipeline: Pipeline, y: Array, masked: Array | None) -> tuple[Array, Array]:
    mask, index = (np.ones_like(y[:, :1]), 0) if masked is None else (masked[:, None], 1)
    *_, last = posterior_sampling(
        pipeline.graphs, pipeline.schedule, pipeline.settings.sampler, y, mask, index, pipeline.noise, reuse=True
    )
    samples = last.x.reshape(len(y), -1, *y.shape[1:])
    graph = pipeline.graphs.features
    features = {} if graph is None else graph.run({"image": y})
    none = dict.fromkeys(("mask_lambda", "mask_low", "mask_high", "mask_frozen"), np.float32(0))
    feeds = {"posterior_samples": samples, "observation": y, **features}
    feeds |= {name: np.asarray(value) for name, value in none.items()}
    score = pipeline.graphs.need(SCORE)
    found = score.run({name: feeds[name] for name in score.inputs if name in feeds})
    return found["anomaly_map"][:, 0], np.abs(samples - y[:, None]).sum(axis=2).mean(axis=1)


def _smooth(maps: Array, sigma: float) -> Array:
    if sigma == 0:
        return maps
    radius = gaussian_kernel(sigma) // 2  # "mirror" is what torch calls reflect
    return np.asarray(gaussian_filter(maps, sigma, mode="mirror", radius=radius, axes=(1, 2)), dtype=np.float32)


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


def load_test_set(found: Category, preprocessing: Preprocessing, every: int, largest: int | None) -> TestSet:
    """Read every n-th test image of a category."""
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
        write_arrays(path, features=terms.features, pixels=terms.pixels)
        return terms

    def _key(self, scale: float, masked: Array | None) -> str:
        of_masks = "" if masked is None else hashlib.sha256(np.packbits(masked > 0).tobytes()).hexdigest()
        return digest([self._bundle.name, self._data.key, scale, of_masks])
