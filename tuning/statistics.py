"""Statistics of features of good parts, fitted by numpy, as modules that map features to distances.

Fits are in float64; torch's batched linear algebra is not used, which on some processors is wrong with two threads.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from mdps.export.score import Features
from mdps.models.backbones import Backbone
from mdps.runtime.errors import require
from mdps.runtime.tuning import FeatureSource, StatisticKind, Term

RIDGE = 0.01
"""Of the mean variance, added to every variance: a direction in which few good parts differ must not decide alone."""
POSITION_BYTES = 2**25
"""The room of the directions of a Gaussian a position; beyond it, those of least variance share their mean."""
DRAWN, KEPT, SEED = 20_000, 1_200, 0
"""Patches among which those of a bank are chosen, how many are, and the seed of the draw."""
BLURRED = 64
"""The side of the map in whose pixels a blur is given."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class View:
    """Features as a statistic sees them: of an image of side `size`, from `stages`, brought to `grid` x `grid`.

    A smaller image is enlarged to that size for the feature network, one whose side is a multiple of it averaged down.
    """

    size: int
    stages: tuple[int, ...]
    grid: int


@dataclass(frozen=True)
class Statistic:
    """A term to fit: kind and source as in `Term`, and the sigma of its blur in pixels of a map of 64 x 64."""

    kind: StatisticKind
    of: FeatureSource
    view: View
    blur: float


def fit(statistic: Statistic, features: Sequence[Tensor]) -> "Distance":
    """Return the module that maps features of B images to raw maps [B, 1, grid, grid], fitted on those of good images.

    `features` are the stages of the view, [N, C_k, h_k, w_k] each, of at least two images. UsageError where all are
    the same image.
    """
    on_grid = _on_grid(features, statistic.view.grid)
    require(len(on_grid) >= 2, "statistics of good parts need at least two images")
    patches = on_grid.flatten(2).numpy()
    if statistic.kind == "position":
        return Position(statistic, patches)
    return Shared(statistic, patches) if statistic.kind == "shared" else Bank(statistic, patches)


def fit_pixels(observations: Tensor, posterior_samples: Tensor, blur: float) -> "Pixels":
    """Return `Pixels` fitted on good images [N, 3, H, W] and their samples [N, N_s, 3, H, W]; raises as `fit`."""
    require(len(observations) >= 2, "statistics of good parts need at least two images")
    pixels = Pixels(observations.shape[-2:], blur)
    residual = pixels.residual(observations, posterior_samples).double()
    variance = residual.var(dim=0, keepdim=True)
    pixels.mean = residual.mean(dim=0, keepdim=True).float()
    pixels.deviation = (variance + _ridge(variance.numpy())).sqrt().float()
    return pixels


class PhotographFeatures(nn.Module):
    """image [B, 3, h, w] in [-1, 1] -> the features of some stages, 3 x 3 means, [B, C_k, h_k, w_k] each.

    `size` is that of `View`.
    """

    def __init__(self, backbone: Backbone, stages: Sequence[int], size: int) -> None:
        super().__init__()
        self.size = size
        lacking = sorted(set(stages) - set(backbone.stages))
        require(not lacking, f"the backbone {backbone.name} was loaded without its stages {lacking}")
        self.features = Features(backbone, backbone.mean, backbone.std, size, pool=3, unit=False).eval()
        self.chosen = [backbone.stages.index(stage) for stage in stages]

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        factor = min(image.shape[-2:]) // self.size
        features = self.features(F.avg_pool2d(image, factor) if factor > 1 else image)
        return tuple(features[index] for index in self.chosen)


class PhotographViews(nn.Module):
    """photograph [B, 3, h, w] in [-1, 1] -> features of it at several sizes, of each its stages, in order."""

    def __init__(self, backbone: Backbone, stages: Mapping[int, Sequence[int]]) -> None:
        super().__init__()
        self.sizes = nn.ModuleList(PhotographFeatures(backbone, chosen, size) for size, chosen in stages.items())

    def forward(self, photograph: Tensor) -> tuple[Tensor, ...]:
        return tuple(stage for features in self.sizes for stage in features(photograph))


class ResidualFeatures(nn.Module):
    """observation [B, 3, H, W], posterior_samples [B, N_s, 3, H, W] -> features of the one less the others' mean."""

    def __init__(self, features: PhotographFeatures) -> None:
        super().__init__()
        self.features = features

    def forward(self, observation: Tensor, posterior_samples: Tensor) -> tuple[Tensor, ...]:
        ours = self.features(observation)
        theirs = self.features(posterior_samples.flatten(0, 1))
        shape = posterior_samples.shape[:2]
        return tuple(a - b.reshape(*shape, *b.shape[1:]).mean(dim=1) for a, b in zip(ours, theirs, strict=True))


def residual_features(backbone: Backbone, view: View) -> ResidualFeatures:
    """Return the module of the residual of features."""
    return ResidualFeatures(PhotographFeatures(backbone, view.stages, view.size))


class Residual(nn.Module):
    """observation and posterior_samples -> the raw map of a distance `of` "residual"."""

    def __init__(self, backbone: Backbone, distance: "Distance") -> None:
        super().__init__()
        self.features, self.distance = residual_features(backbone, distance.statistic.view), distance

    def forward(self, observation: Tensor, posterior_samples: Tensor) -> Tensor:
        raw: Tensor = self.distance(*self.features(observation, posterior_samples))
        return raw


class Distance(nn.Module, ABC):
    """Stages of features -> raw map [B, 1, grid, grid], blurred."""

    def __init__(self, statistic: Statistic) -> None:
        super().__init__()
        self.statistic = statistic
        self.blur = Blur((statistic.view.grid, statistic.view.grid), statistic.blur)

    def forward(self, *stages: Tensor) -> Tensor:
        grid = self.statistic.view.grid
        squared = self.squared(_on_grid(stages, grid))
        blurred: Tensor = self.blur(torch.sqrt(torch.clamp(squared, min=0.0)).reshape(-1, 1, grid, grid))
        return blurred

    @abstractmethod
    def squared(self, features: Tensor) -> Tensor:
        """Return squared distances [B, grid * grid] of features [B, C, grid, grid]."""


class Position(Distance):
    """Mahalanobis distance to a Gaussian of each position.

    Where all directions u_j and their variances l_j take too much room, the top ones keep theirs and all others have
    their mean r, so that the square of the distance is |x|^2 / r - sum_j (u_j x)^2 (1/r - 1/l_j).
    """

    mean: Tensor
    directions: Tensor
    precision: Tensor

    def __init__(self, statistic: Statistic, patches: NDArray[np.float32]) -> None:
        super().__init__(statistic)
        _, channels, positions = patches.shape
        mean = patches.mean(axis=0, dtype=np.float64)
        ridge = _ridge(patches.var(axis=0, ddof=1, dtype=np.float64))
        count = max(1, min(channels, POSITION_BYTES // (4 * positions * channels)))
        self.full = count == channels
        rows = [_directions(patches[:, :, p] - mean[:, p], count, ridge) for p in range(positions)]
        self.register_buffer("mean", _float(mean.reshape(1, channels, positions)))
        self.register_buffer("directions", _float(np.stack([directions for directions, _ in rows])))
        self.register_buffer("precision", _float(np.array([precision for _, precision in rows])[None]))

    def squared(self, features: Tensor) -> Tensor:
        centred = (features.flatten(2) - self.mean).transpose(1, 2)
        along = torch.matmul(centred.transpose(0, 1), self.directions)  # [positions, B, directions]
        squared = (along * along).sum(dim=2).transpose(0, 1)
        return squared if self.full else (centred * centred).sum(dim=2) * self.precision - squared


class Shared(Distance):
    """Mahalanobis distance to one Gaussian of all positions: the length of whitened features."""

    weight: Tensor
    bias: Tensor

    def __init__(self, statistic: Statistic, patches: NDArray[np.float32]) -> None:
        super().__init__(statistic)
        mean, whitening = _whitening(patches)
        self.register_buffer("weight", _float(whitening[:, :, None, None]))
        self.register_buffer("bias", _float(-whitening @ mean))

    def squared(self, features: Tensor) -> Tensor:
        whitened = F.conv2d(features, self.weight, self.bias)
        return (whitened * whitened).sum(dim=1)


class Bank(Distance):
    """Distance to the nearest of a coreset of whitened patches, |p|^2 - 2 p b + |b|^2.

    The whitening has one more output, always 1, by which |b|^2 is in the product.
    """

    weight: Tensor
    bias: Tensor
    bank: Tensor

    def __init__(self, statistic: Statistic, patches: NDArray[np.float32]) -> None:
        super().__init__(statistic)
        mean, whitening = _whitening(patches)
        stream = np.random.default_rng(SEED)
        flat = patches.transpose(0, 2, 1).reshape(-1, len(mean))
        drawn = flat[stream.permutation(len(flat))[:DRAWN]]
        bank = _coreset(((drawn - mean) @ whitening.T).astype(np.float32), KEPT).astype(np.float64)
        channels = len(mean)
        weight, bias = np.zeros((channels + 1, channels)), np.ones(channels + 1)
        weight[:channels], bias[:channels] = whitening, -whitening @ mean
        self.register_buffer("weight", _float(weight[:, :, None, None]))
        self.register_buffer("bias", _float(bias))
        self.register_buffer("bank", _float(np.vstack([-2 * bank.T, (bank**2).sum(axis=1)])))

    def squared(self, features: Tensor) -> Tensor:
        whitened = F.conv2d(features, self.weight, self.bias).flatten(2).transpose(1, 2)
        nearest = torch.matmul(whitened, self.bank).amin(dim=2)
        return nearest + (whitened * whitened).sum(dim=2) - 1


class Pixels(nn.Module):
    """observation, posterior_samples -> the blurred pixel residual in standard deviations of good parts, [B, 1, H, W].

    The residual is |y - x0| summed over channels, averaged over samples.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, size: Sequence[int], blur: float) -> None:
        super().__init__()
        self.blur = Blur(size, blur)
        self.register_buffer("mean", torch.zeros(1, 1, *size))
        self.register_buffer("deviation", torch.ones(1, 1, *size))

    def residual(self, observation: Tensor, posterior_samples: Tensor) -> Tensor:
        """Return it blurred, [B, 1, H, W]."""
        summed = (posterior_samples - observation.unsqueeze(1)).abs().sum(dim=2)
        blurred: Tensor = self.blur(summed.mean(dim=1, keepdim=True))
        return blurred

    def forward(self, observation: Tensor, posterior_samples: Tensor) -> Tensor:
        return (self.residual(observation, posterior_samples) - self.mean) / self.deviation


class Blur(nn.Module):
    """A Gaussian over maps [B, 1, h, w] as a product from either side, which mirrors the map at its edges.

    `sigma` counts pixels of a map whose longer side has BLURRED of them.
    """

    rows: Tensor
    columns: Tensor

    def __init__(self, size: Sequence[int], sigma: float) -> None:
        super().__init__()
        self.sigma = sigma * max(size) / BLURRED
        self.register_buffer("rows", _float(_gaussian(size[0], self.sigma)))
        self.register_buffer("columns", _float(_gaussian(size[1], self.sigma).T))

    def forward(self, raw: Tensor) -> Tensor:
        return torch.matmul(torch.matmul(self.rows, raw), self.columns) if self.sigma else raw


class Fusion(nn.Module):
    """Raw maps of the terms -> their weighted sum on one scale [B, 1, H, W], its score [B], and where it exceeds 1."""

    def __init__(self, terms: Sequence[Term], size: tuple[int, int], top: int) -> None:
        super().__init__()
        self.size, self.top = list(size), top
        self.factors = [term.weight / (term.high - term.low) for term in terms]
        self.offset = sum(term.low * factor for term, factor in zip(terms, self.factors, strict=True))

    def forward(self, *raw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        total: Tensor | None = None
        for one, factor in zip(raw, self.factors, strict=True):
            if list(one.shape[-2:]) != self.size:
                one = F.interpolate(one, self.size, mode="bilinear", align_corners=False)
            total = one * factor if total is None else total + one * factor
        assert total is not None
        fused = total - self.offset
        return fused, fused.flatten(1).topk(self.top).values.mean(dim=1), (fused > 1.0).to(fused.dtype)


def fusion(terms: Sequence[Term], size: tuple[int, int], top: int) -> Fusion:
    """Return the sum of the terms' raw maps, in their order, at `size` (H, W); the score is that of `top` pixels."""
    return Fusion(terms, size, top)


def _on_grid(stages: Sequence[Tensor], grid: int) -> Tensor:
    """Return stages [B, C_k, h_k, w_k] as [B, sum of C_k, grid, grid]."""
    resized = [_resized(stage, grid) for stage in stages]
    return torch.cat(resized, dim=1) if len(resized) > 1 else resized[0]


def _resized(stage: Tensor, grid: int) -> Tensor:
    height, width = stage.shape[-2:]
    if height == width and height % grid == 0:
        return stage if height == grid else F.avg_pool2d(stage, height // grid)
    return F.interpolate(stage, [grid, grid], mode="bilinear", align_corners=False)


def _ridge(variance: Array) -> float:
    ridge = RIDGE * float(variance.mean())
    require(ridge > 0, "the good images are all the same: statistics need photographs of different parts")
    return ridge


def _directions(centred: Array, count: int, ridge: float) -> tuple[Array, float]:
    """Return the top directions [C, count] of rows [N, C], scaled as `Position` needs them, and 1 / r; 0 with all."""
    values, vectors = np.linalg.eigh(centred.T @ centred / (len(centred) - 1))
    variances = np.maximum(values, 0) + ridge
    if count == len(variances):
        return vectors / np.sqrt(variances), 0.0
    precision = 1 / variances[:-count].mean()
    return vectors[:, -count:] * np.sqrt(np.maximum(precision - 1 / variances[-count:], 0)), float(precision)


def _whitening(patches: NDArray[np.float32]) -> tuple[Array, Array]:
    """Return the mean [C] of patches [N, C, P] and the matrix [C, C] that makes their covariance, with ridge, one."""
    channels = patches.shape[1]
    mean = patches.mean(axis=(0, 2), dtype=np.float64)
    covariance = np.zeros((channels, channels))
    for image in patches:
        centred = image - mean[:, None]
        covariance += centred @ centred.T
    covariance /= patches.shape[0] * patches.shape[2] - 1
    values, vectors = np.linalg.eigh(covariance)
    return mean, (vectors / np.sqrt(np.maximum(values, 0) + _ridge(np.diag(covariance)))).T


def _coreset(points: NDArray[np.float32], count: int) -> NDArray[np.float32]:
    """Return `count` of the points, each the farthest from those before it; the first is the first."""
    if len(points) <= count:
        return points
    lengths = (points * points).sum(axis=1)
    chosen, nearest = [0], np.full(len(points), np.inf, np.float32)
    while len(chosen) < count:
        last = chosen[-1]
        nearest = np.minimum(nearest, lengths - 2 * (points @ points[last]) + lengths[last])
        nearest[last] = -np.inf
        chosen.append(int(nearest.argmax()))
    return points[chosen]


def _gaussian(side: int, sigma: float) -> Array:
    """Return the matrix [side, side] that blurs a row of pixels, mirrored beyond its ends."""
    matrix = np.eye(side)
    if sigma == 0:
        return matrix
    radius = int(4 * sigma + 0.5)
    weights = np.exp(-0.5 * (np.arange(-radius, radius + 1) / sigma) ** 2)
    mirrored = np.pad(matrix, ((radius, radius), (0, 0)), mode="symmetric")
    return np.asarray(sum(w * mirrored[k : k + side] for k, w in enumerate(weights / weights.sum())))


def _float(values: NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
