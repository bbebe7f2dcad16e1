"""Statistics of good parts against scipy, scikit-learn and numpy, which share no code with them."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter
from scipy.spatial.distance import mahalanobis
from sklearn.neighbors import NearestNeighbors
from torch import Tensor

from mdps.models.backbones import load_backbone
from mdps.runtime.errors import UsageError
from mdps.runtime.tuning import Term
from mdps.tuning import statistics
from mdps.tuning.statistics import (
    PhotographFeatures,
    Statistic,
    View,
    fit,
    fit_pixels,
    fusion,
    residual_features,
)

GRID = 4
VIEW = View(size=32, stages=(1, 2), grid=GRID)
Made = Callable[[int], list[Tensor]]


def statistic(kind: str, blur: float = 0.0) -> Statistic:
    return Statistic(kind, "photograph", VIEW, blur)  # type: ignore[arg-type]


@pytest.fixture
def make() -> Made:
    """Make stages of images: 4 channels at 8 x 8 and 5 at 2 x 2, correlated, each position with a mean of its own."""
    stream = torch.Generator().manual_seed(0)
    mixing = [torch.randn(c, c, generator=stream) for c in (4, 5)]
    means = [3 * torch.randn(c, side, side, generator=stream) for c, side in ((4, 8), (5, 2))]

    def images(count: int) -> list[Tensor]:
        return [
            m + torch.einsum("cd,ndhw->nchw", mix, torch.randn(count, *m.shape, generator=stream))
            for m, mix in zip(means, mixing, strict=True)
        ]

    return images


def on_grid(stages: list[Tensor]) -> np.ndarray:
    """Two by two means of the first stage, the second enlarged, [N, 9, 4, 4] in float64."""
    down = stages[0].double().reshape(-1, 4, GRID, 2, GRID, 2).mean(dim=(3, 5))
    up = torch.nn.functional.interpolate(stages[1].double(), scale_factor=2, mode="bilinear")
    return torch.cat([down, up], dim=1).numpy()


def mahalanobis_map(new: np.ndarray, mean: np.ndarray, covariance: Callable[[int, int], np.ndarray]) -> np.ndarray:
    return np.array([
        [[mahalanobis(one[:, i, j], mean[:, i, j], np.linalg.inv(covariance(i, j))) for j in range(GRID)]
         for i in range(GRID)] for one in new
    ])[:, None]  # fmt: skip


@pytest.mark.parametrize("count", [6, 40], ids=["fewer than channels", "more"])
def test_a_position_has_the_gaussian_of_its_own_features(make: Made, count: int) -> None:
    good, new = make(count), make(3)
    values = on_grid(good)
    ridge = 0.01 * values.var(axis=0, ddof=1).mean()
    expected = mahalanobis_map(
        on_grid(new), values.mean(axis=0), lambda i, j: np.cov(values[:, :, i, j].T) + ridge * np.eye(9)
    )
    np.testing.assert_allclose(fit(statistic("position"), good)(*new), expected, rtol=1e-3)


def test_a_gaussian_that_is_too_large_keeps_its_top_directions(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "POSITION_BYTES", 4 * GRID * GRID * 9 * 3)
    good, new = make(40), make(3)
    values = on_grid(good)
    ridge = 0.01 * values.var(axis=0, ddof=1).mean()

    def covariance(i: int, j: int) -> np.ndarray:
        variances, directions = np.linalg.eigh(np.cov(values[:, :, i, j].T))
        variances = np.array([variances[:6].mean()] * 6 + list(variances[6:])) + ridge
        return directions * variances @ directions.T

    module = fit(statistic("position"), good)
    assert module.directions.shape == (GRID * GRID, 9, 3)
    np.testing.assert_allclose(module(*new), mahalanobis_map(on_grid(new), values.mean(axis=0), covariance), rtol=1e-3)


def test_one_gaussian_is_of_all_positions(make: Made) -> None:
    good, new = make(10), make(3)
    patches = on_grid(good).transpose(0, 2, 3, 1).reshape(-1, 9)
    covariance = np.cov(patches.T)
    covariance += 0.01 * np.trace(covariance) / 9 * np.eye(9)
    mean = np.broadcast_to(patches.mean(axis=0)[:, None, None], (9, GRID, GRID))
    expected = mahalanobis_map(on_grid(new), mean, lambda i, j: covariance)
    np.testing.assert_allclose(fit(statistic("shared"), good)(*new), expected, rtol=1e-3)


def whitened(stages: list[Tensor], good: list[Tensor]) -> np.ndarray:
    patches = on_grid(good).transpose(0, 2, 3, 1).reshape(-1, 9)
    covariance = np.cov(patches.T)
    covariance += 0.01 * np.trace(covariance) / 9 * np.eye(9)
    root = np.linalg.cholesky(np.linalg.inv(covariance))  # another root than the module's: distances are the same
    return (on_grid(stages).transpose(0, 2, 3, 1).reshape(-1, 9) - patches.mean(axis=0)) @ root


def test_a_bank_finds_the_nearest_whitened_patch(make: Made) -> None:
    good, new = make(10), make(3)
    neighbours = NearestNeighbors(n_neighbors=1).fit(whitened(good, good))
    expected = neighbours.kneighbors(whitened(new, good))[0].reshape(3, 1, GRID, GRID)
    bank = fit(statistic("bank"), good)
    np.testing.assert_allclose(bank(*new), expected, rtol=1e-3)
    np.testing.assert_allclose(bank(*good), 0, atol=0.02)  # all patches are in it


def test_a_coreset_leaves_no_patch_farther_than_the_greedy_choice_does(
    make: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statistics, "KEPT", 20)
    monkeypatch.setattr(statistics, "DRAWN", 120)
    good = make(10)
    module, points = fit(statistic("bank"), good), whitened(good, good)
    drawn = points[np.random.default_rng(0).permutation(160)[:120]]
    chosen = [0]
    for _ in range(19):
        apart = np.linalg.norm(drawn[:, None] - drawn[chosen][None], axis=2).min(axis=1)
        chosen.append(int(apart.argmax()))
    nearest = NearestNeighbors(n_neighbors=1).fit(drawn[chosen]).kneighbors(points)[0]
    assert module.bank.shape == (10, 20)
    np.testing.assert_allclose(module(*good).reshape(-1), nearest[:, 0], atol=0.02)


def test_the_bank_is_the_same_each_time(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "KEPT", 20)
    good = make(10)
    assert torch.equal(fit(statistic("bank"), good).bank, fit(statistic("bank"), good).bank)


def test_a_blur_counts_pixels_of_a_map_of_64(make: Made) -> None:
    good, new = make(10), make(3)
    raw = fit(statistic("position"), good)(*new).numpy()
    expected = [gaussian_filter(one[0].astype(np.float64), 0.75) for one in raw]  # "reflect", cut at four sigma
    blurred = fit(statistic("position", blur=12.0), good)(*new)
    np.testing.assert_allclose(blurred[:, 0], expected, rtol=1e-5)


def test_pixels_are_in_standard_deviations_of_good_residuals() -> None:
    stream = torch.Generator().manual_seed(0)
    observations, samples = (torch.randn(*shape, generator=stream) for shape in ((20, 3, 6, 8), (20, 2, 3, 6, 8)))
    residual = np.abs(samples.numpy() - observations.numpy()[:, None]).sum(axis=2).mean(axis=1)
    residual = np.array([gaussian_filter(one, 0.25) for one in residual])  # 2 pixels of 64 are a quarter of one of 8
    variance = residual.var(axis=0, ddof=1)
    expected = (residual - residual.mean(axis=0)) / np.sqrt(variance + 0.01 * variance.mean())
    module = fit_pixels(observations, samples, blur=2.0)
    np.testing.assert_allclose(module(observations, samples)[:, 0], expected, rtol=1e-3, atol=1e-4)


def test_features_of_the_photograph_are_means_of_the_backbones_own() -> None:
    backbone, image = load_backbone("random_tiny", stages=(1, 2, 3)), torch.rand(2, 3, 48, 48) * 2 - 1
    mean, std = (torch.tensor(values).reshape(1, 3, 1, 1) for values in (backbone.mean, backbone.std))
    own = backbone(((image + 1) / 2 - mean) / std)
    for index, found in zip((0, 2), PhotographFeatures(backbone, (1, 3), 48)(image), strict=True):
        wanted = torch.nn.functional.pad(own[index], [1] * 4).unfold(2, 3, 1).unfold(3, 3, 1).mean(dim=(-1, -2))
        torch.testing.assert_close(found, wanted)


def test_the_residual_of_features_is_averaged_over_samples() -> None:
    backbone = load_backbone("random_tiny", stages=(1, 2))
    y, samples = torch.rand(2, 3, 16, 16) * 2 - 1, torch.rand(2, 3, 3, 16, 16) * 2 - 1
    features = PhotographFeatures(backbone, (2,), 32)
    enlarged = [torch.nn.functional.interpolate(x, [32, 32], mode="bilinear") for x in (y, *samples.unbind(1))]
    ours, *theirs = (features(x)[0] for x in enlarged)
    (found,) = residual_features(backbone, replace(VIEW, stages=(2,)))(y, samples)
    torch.testing.assert_close(found, ours - sum(theirs) / 3)


def test_fusion_is_the_weighted_sum_on_one_scale() -> None:
    terms = [Term("map", "map", "reconstruction", 0.5, 1.0, 2.0), Term("a", "bank", "photograph", 1.0, 4.0, 0.5)]
    first, second = torch.rand(2, 1, 8, 8), 5 * torch.rand(2, 1, 4, 4)
    enlarged = torch.nn.functional.interpolate(second, [8, 8], mode="bilinear")
    expected = 2 * (first - 0.5) / 0.5 + 0.5 * (enlarged - 1) / 3
    fused, score, mask = fusion(terms, (8, 8), top=5)(first, second)
    torch.testing.assert_close(fused, expected)
    torch.testing.assert_close(score, expected.flatten(1).sort(descending=True).values[:, :5].mean(dim=1))
    assert torch.equal(mask, (expected > 1).float())
    assert 0 < mask.mean() < 1


@pytest.mark.parametrize("kind", ["position", "shared", "bank"])
def test_equal_images_have_no_statistics(make: Made, kind: str) -> None:
    same = [torch.ones_like(stage) for stage in make(3)]
    with pytest.raises(UsageError, match="all the same"):
        fit(statistic(kind), same)
    with pytest.raises(UsageError, match="two images"):
        fit(statistic(kind), make(1))


def test_a_stage_that_was_not_loaded_is_named() -> None:
    with pytest.raises(UsageError, match=r"without its stages \[3\]"):
        PhotographFeatures(load_backbone("random_tiny", stages=(1, 2)), (2, 3), 32)
