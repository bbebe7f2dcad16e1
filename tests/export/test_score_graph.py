"""The score module and its graph against the oracle and the golden maps."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from mdps.export.graph import WeightStore, trace, write
from mdps.export.score import Features, Score
from mdps.export.tracer import record
from mdps.models import oracle as o
from mdps.models.backbones import load_backbone
from mdps.runtime.engines.interface import open_session
from mdps.runtime.settings import ScoreSettings, paper_settings, reference_settings

ALPHAS = o.linear_schedule()
SIZE = 64
PAPER = replace(paper_settings((SIZE, SIZE)).score, feature_size=96, top=17)
REFERENCE = replace(reference_settings(7, 50, 100, 200, 200, 20, 0.12).score, top=17)
SCALARS = {"mask_lambda": 0.1, "mask_low": 0.2, "mask_high": 0.9, "mask_frozen": 0.0}


class Recorded(nn.Module):
    """Stands for a backbone: gives the features that were put in, whatever the image."""

    def __init__(self, features: list[Tensor]) -> None:
        super().__init__()
        self.features = features

    def forward(self, image: Tensor) -> list[Tensor]:
        return self.features


def unit(features: list[Tensor], settings: ScoreSettings) -> tuple[Tensor, ...]:
    module = Features(Recorded(features), (0, 0, 0), (1, 1, 1), None, settings.pool)
    result: tuple[Tensor, ...] = module(torch.zeros(1, 3, 8, 8))
    return result


def oracle_for(settings: ScoreSettings) -> o.Oracle:
    make = o.reference if settings.pool == 3 else o.Oracle
    oracle = make(ALPHAS, eta=settings.eta, top=settings.top, mask_lambda=0.1)
    return oracle if settings.pixel == "scaled" else replace(oracle, pixel=settings.pixel)


def oracle_map(y: Tensor, samples: Tensor, settings: ScoreSettings) -> Tensor:
    """Map of images [B] from samples [B, N_s], features by hand, each sample alone."""
    backbone = load_backbone("random_tiny", stages=settings.stages)
    mean, std = (torch.tensor(v).reshape(1, 3, 1, 1) for v in (backbone.mean, backbone.std))

    def features(image: Tensor) -> list[Tensor]:
        if settings.feature_size:
            image = nn.functional.interpolate(image, [settings.feature_size] * 2, mode="bilinear")
        return list(backbone(((image + 1) / 2 - mean) / std))

    oracle = oracle_for(settings)
    maps = [
        torch.stack(
            [o.difference(y[b : b + 1], s[None], features(y[b : b + 1]), features(s[None]), oracle) for s in many]
        )
        for b, many in enumerate(samples)
    ]
    return torch.stack(maps).mean(dim=1)[:, 0]


@pytest.fixture(params=[PAPER, REFERENCE, replace(PAPER, pixel="squared")], ids=["paper", "reference", "squared"])
def settings(request: pytest.FixtureRequest) -> ScoreSettings:
    result: ScoreSettings = request.param
    return result


@pytest.fixture
def features(settings: ScoreSettings) -> Features:
    backbone = load_backbone("random_tiny", stages=settings.stages)
    return Features(backbone, backbone.mean, backbone.std, settings.feature_size, settings.pool).eval()


def images(batch: int, samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(batch * 10 + samples)
    y = torch.rand(batch, 3, SIZE, SIZE, generator=generator) * 2 - 1
    return y, (y[:, None] + 0.3 * torch.randn(batch, samples, 3, SIZE, SIZE, generator=generator)).clamp(-1, 1)


@pytest.mark.parametrize("exporter", [record, trace])
def test_the_graph_equals_the_oracle_at_every_batch(
    exporter: Any, settings: ScoreSettings, features: Features, tmp_path: Path
) -> None:
    y, samples = images(2, 3)
    names = [f"observation_features_{i + 1}" for i in range(len(settings.stages))]
    axes = dict.fromkeys(["observation", *names], ("batch",)) | {"posterior_samples": ("batch", "samples")}
    inputs = {"posterior_samples": samples, "observation": y}
    inputs |= {name: torch.tensor(value) for name, value in SCALARS.items()} | dict(
        zip(names, features(y), strict=True)
    )
    model = exporter(Score(features, settings), inputs, ["anomaly_map", "anomaly_score", "mask"], axes)
    write(model, tmp_path / "score.onnx", WeightStore(tmp_path / "weights"))
    graph = onnxruntime.InferenceSession(tmp_path / "score.onnx", providers=["CPUExecutionProvider"])
    for batch, count in ((1, 1), (1, 4), (3, 2)):
        y, samples = images(batch, count)
        feeds = {"posterior_samples": samples, "observation": y, **dict(zip(names, features(y), strict=True))}
        feeds |= {name: torch.tensor(value) for name, value in SCALARS.items()}
        found, score, mask = graph.run(None, {name: value.numpy() for name, value in feeds.items()})
        wanted = oracle_map(y, samples, settings)
        oracle = oracle_for(settings)
        assert np.abs(found - wanted.numpy()).max() < 1e-5
        assert np.abs(score - o.image_score(wanted, oracle).numpy()).max() < 1e-6
        assert np.abs(mask - o.mask_of(wanted, oracle).numpy()).mean() < 1e-3


def test_paper_map_of_the_golden_features(small: Mapping[str, np.ndarray]) -> None:
    t = {name: torch.from_numpy(np.asarray(array)) for name, array in small.items()}
    settings = replace(PAPER, top=8)
    of_y, of_x0 = ([t[f"paper_features_{who}_stage{k}"] for k in (1, 2, 3)] for who in ("y", "x0"))
    module = Score(Features(Recorded(of_x0), (0, 0, 0), (1, 1, 1), None, 0), settings)
    scalars = [torch.tensor(value) for value in SCALARS.values()]
    found, score, mask = module(t["paper_guided_states"][None, -1:], t["y"], *scalars, *unit(of_y, settings))
    assert (found - t["paper_map_eta_0.3"]).abs().max() < 1e-5
    assert (score - t["paper_score_top_8"]).abs().max() < 1e-6
    assert torch.equal(mask, t["paper_mask_lambda_0.1"])


@pytest.mark.parametrize("index", [0, 1])
def test_reference_map_of_the_golden_features(index: int, shared: Path) -> None:
    with np.load(shared / "golden" / "golden.npz") as arrays:
        t = {name: torch.from_numpy(array) for name, array in arrays.items()}
    settings = replace(REFERENCE, top=500)
    of_y, of_x0 = ([t[f"map{index}_features_{who}_stage{k}"] for k in (2, 3)] for who in ("y", "x0"))
    module = Score(Features(Recorded(of_x0), (0, 0, 0), (1, 1, 1), None, 3), settings)
    scalars = [torch.tensor(value) for value in SCALARS.values()]
    sample, y = t[f"sample{index}_states"][None, -1:], t["y"][index : index + 1]
    found, score, _ = module(sample, y, *scalars, *unit(of_y, settings))
    assert (found - t[f"map{index}"]).abs().max() < 1e-5
    assert (score - t[f"score{index}_official"]).abs().max() < 1e-6


def test_a_frozen_mask_range_replaces_the_maps_own(settings: ScoreSettings, features: Features) -> None:
    y, samples = images(1, 1)
    scalars = [torch.tensor(v) for v in (SCALARS | {"mask_frozen": 1.0}).values()]
    found, _, mask = Score(features, settings)(samples, y, *scalars, *features(y))
    assert torch.equal(mask, (found > 0.2 + 0.1 * (0.9 - 0.2)).float())


def test_equal_images_have_no_pixel_term() -> None:
    settings = replace(PAPER, stages=())
    y, _ = images(1, 1)
    found, score, mask = Score(None, settings)(y[:, None], y, *[torch.tensor(v) for v in SCALARS.values()])
    assert torch.equal(found, torch.zeros(1, 1, SIZE, SIZE))
    assert float(score) == 0
    assert not mask.any()  # nothing stands out of a flat map
    reference = load_backbone("random_tiny", stages=(2, 3))
    features = Features(reference, reference.mean, reference.std, None, 3)
    found, _, _ = Score(features, REFERENCE)(y[:, None], y, *[torch.tensor(v) for v in SCALARS.values()], *features(y))
    assert torch.isfinite(found).all()


def test_a_map_of_pixels_alone_is_their_weighted_difference() -> None:
    y, samples = images(2, 3)
    for pixel, power in (("l1", 1), ("squared", 2)):
        settings = replace(PAPER, stages=(), pixel=pixel, eta=0.3)
        found, _, _ = Score(None, settings)(samples, y, *[torch.tensor(v) for v in SCALARS.values()])
        each = 0.3 * ((samples - y[:, None]).abs() ** power).sum(dim=2, keepdim=True)
        torch.testing.assert_close(found, (each[:, 0] + each[:, 1] + each[:, 2]) / 3)


@pytest.mark.parametrize(("old", "new"), [(3, 5), (16, 64), (25, 64), (20, 49), (7, 61)])
def test_a_graph_enlarges_to_the_size_that_torch_does(old: int, new: int, tmp_path: Path) -> None:
    """The inference of shapes cuts old * scale down, and in float32 3 times 5/3 is 4.99..: no map of 5 goes beside."""

    class Enlarge(nn.Module):
        def forward(self, x: Tensor, large: Tensor) -> tuple[Tensor]:
            enlarged = nn.functional.interpolate(x, [new, new], mode="bilinear", align_corners=False)
            return (torch.cat([enlarged, large], dim=1),)

    inputs = {"x": torch.rand(2, 1, old, old), "large": torch.rand(2, 1, new, new)}
    model = record(Enlarge(), inputs, ["y"], dict.fromkeys(inputs, ("batch",)))
    write(model, tmp_path / "a.onnx", WeightStore(tmp_path / "a.weights"))
    session = open_session(tmp_path / "a.onnx")
    found = session.run({name: tensor.numpy() for name, tensor in inputs.items()})["y"]
    np.testing.assert_allclose(found, Enlarge()(**inputs)[0], atol=1e-5)
    session.close()
