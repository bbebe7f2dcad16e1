"""Features and scoring as modules that trace to graphs: posterior samples and observation -> map, score, mask."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mdps.models.backbones import IMAGENET
from mdps.runtime.settings import ScoreSettings


class Features(nn.Module):
    """image [B, 3, H, W] in [-1, 1] -> unit feature vectors of each stage, [B, C_i, h_i, w_i].

    The backbone sees the image at `feature_size`, or at its own size if larger, in its own normalisation. Vectors are
    made unit length here, so that a cosine distance is one minus a dot product; without `unit` they keep their own.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self, backbone: nn.Module, mean: Sequence[float], std: Sequence[float], size: int | None, pool: int,
        unit: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.backbone, self.size, self.pool, self.unit = backbone, size, pool, unit
        self.register_buffer("mean", torch.tensor(mean).reshape(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).reshape(1, 3, 1, 1), persistent=False)

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        if self.size is not None and min(image.shape[-2:]) < self.size:
            size = [max(self.size, int(side)) for side in image.shape[-2:]]
            image = F.interpolate(image, size, mode="bilinear", align_corners=False)
        stages = self.backbone((image * 0.5 + 0.5 - self.mean) / self.std)
        if self.pool:
            stages = [F.avg_pool2d(f, self.pool, stride=1, padding=self.pool // 2) for f in stages]
        if not self.unit:
            return tuple(stages)
        return tuple(f * torch.rsqrt(torch.clamp((f * f).sum(dim=1, keepdim=True), min=1e-16)) for f in stages)


class Score(nn.Module):
    """Eqns. 20 to 22 of the paper, and the authors' variants of them."""

    std: Tensor
    gauss: Tensor

    def __init__(self, features: Features | None, settings: ScoreSettings) -> None:
        super().__init__()
        self.features, self.settings = features, settings
        self.register_buffer("std", torch.tensor(IMAGENET[1]).reshape(1, 1, 3, 1, 1), persistent=False)
        self.register_buffer("gauss", _gaussian(settings.smoothing_sigma, settings.smoothing_kernel), persistent=False)

    def forward(
        self, posterior_samples: Tensor, observation: Tensor, mask_lambda: Tensor, mask_low: Tensor, mask_high: Tensor,
        mask_frozen: Tensor, *observation_features: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Take posterior_samples [B, N_s, 3, H, W] and mask scalars []; return anomaly_map, anomaly_score, mask."""
        anomaly_map = self._smooth(self._difference(posterior_samples, observation, observation_features))
        mask = _mask(anomaly_map, mask_lambda, mask_low, mask_high, mask_frozen)
        return anomaly_map, self._image_score(anomaly_map), mask

    def _difference(self, samples: Tensor, observation: Tensor, observation_features: Sequence[Tensor]) -> Tensor:
        """Apply eqn. 20 for every sample, averaged over samples (eqn. 21): [B, 1, H, W]."""
        residual = (samples - observation.unsqueeze(1)).abs()
        if self.settings.pixel == "squared":
            residual = residual * residual
        if self.features is None:
            return (self.settings.eta * residual.sum(dim=2, keepdim=True)).mean(dim=1)
        feature = self._feature_distance(samples, observation_features)
        return (feature + self.settings.eta * self._pixel(residual, feature)).mean(dim=1)

    def _feature_distance(self, samples: Tensor, observation_features: Sequence[Tensor]) -> Tensor:
        assert self.features is not None
        batch, count, _, height, width = samples.shape
        distances = []
        for of_samples, of_observation in zip(self.features(samples.flatten(0, 1)), observation_features, strict=True):
            many = of_samples.reshape(batch, count, *of_samples.shape[1:])
            distance = 1 - (many * of_observation.unsqueeze(1)).sum(dim=2).flatten(0, 1).unsqueeze(1)
            distances.append(
                F.interpolate(distance, [height, width], mode="bilinear", align_corners=self.settings.align_corners)
            )
        total = distances[0]
        for distance in distances[1:]:
            total = total + distance
        return total.reshape(batch, count, 1, height, width)

    def _pixel(self, residual: Tensor, feature: Tensor) -> Tensor:
        """Return [B, N_s, 1, H, W]; "scaled" makes the largest difference equal the largest feature distance."""
        if self.settings.pixel != "scaled":
            return residual.sum(dim=2, keepdim=True)
        pixel = (residual * (0.5 / self.std)).mean(dim=2, keepdim=True)
        largest = pixel.amax(dim=(2, 3, 4), keepdim=True)
        return pixel * (feature.amax(dim=(2, 3, 4), keepdim=True) / torch.where(largest > 0, largest, 1.0))

    def _smooth(self, image: Tensor) -> Tensor:
        if self.settings.smoothing_sigma > 0:
            image = F.pad(image, [self.gauss.numel() // 2] * 4, mode="reflect")
            image = F.conv2d(F.conv2d(image, self.gauss.reshape(1, 1, -1, 1)), self.gauss.reshape(1, 1, 1, -1))
        return image * self.settings.map_scale if self.settings.map_scale != 1 else image

    def _image_score(self, anomaly_map: Tensor) -> Tensor:
        values = anomaly_map.flatten(1)
        if self.settings.image_score == "softmax_top_sum":
            return torch.softmax(values, dim=1).topk(self.settings.top).values.sum(dim=1)
        return values.topk(self.settings.top).values.mean(dim=1)


def _mask(anomaly_map: Tensor, factor: Tensor, low: Tensor, high: Tensor, frozen: Tensor) -> Tensor:
    """Apply eqn. 22; `frozen` > 0 takes the range given instead of the map's own."""
    low = torch.where(frozen > 0, low, anomaly_map.amin(dim=(1, 2, 3), keepdim=True))
    high = torch.where(frozen > 0, high, anomaly_map.amax(dim=(1, 2, 3), keepdim=True))
    return (anomaly_map > low + factor * (high - low)).to(anomaly_map.dtype)


def _gaussian(sigma: float, kernel: int) -> Tensor:
    if sigma == 0:
        return torch.ones(1)
    offsets = torch.arange(kernel, dtype=torch.float64) - kernel // 2
    weights = torch.exp(-(offsets**2) / (2 * sigma**2))
    return (weights / weights.sum()).float()
