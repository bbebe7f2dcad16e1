"""The whole job on real photographs: a public-format checkpoint of bottles, exported, run on MVTec AD's bottle."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mdps.benchmarks.metrics import auroc, pixel_auroc
from mdps.export import ExportOptions, export_bundle
from mdps.models import oracle as o
from mdps.models.checkpoints import load_denoiser
from mdps.runtime import load
from mdps.runtime.detector import Result
from mdps.runtime.errors import BackendError
from mdps.runtime.preprocessing import Preprocessing


@pytest.fixture(scope="module")
def checkpoint(shared: Path) -> Path:
    return shared / "checkpoints" / "bottle_64_openai.pt"


@pytest.fixture(scope="module")
def bundle(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_bundle(checkpoint, tmp_path_factory.mktemp("bottle") / "bundle")


def judge(bundle: Path, paths: Sequence[Path]) -> list[Result]:
    with load(bundle, calibrated=False) as detector:
        return [result for start in range(0, len(paths), 8) for result in detector.batch(paths[start : start + 8])]


def scores(paths: Sequence[Path], results: Sequence[Result]) -> tuple[float, float]:
    """Image and pixel AUROC, the maps enlarged to the size of the ground truth's masks."""
    masks = np.stack([mask_of(path) for path in paths])
    size = masks.shape[:0:-1]
    maps = [Image.fromarray(result.anomaly_map).resize(size, Image.Resampling.BILINEAR) for result in results]
    return auroc([m.any() for m in masks], [r.score for r in results]), pixel_auroc(
        masks, np.stack([np.asarray(m) for m in maps])
    )


def mask_of(path: Path) -> np.ndarray:
    if path.parent.name == "good":
        with Image.open(path) as image:
            return np.zeros((image.height, image.width), dtype=bool)
    file = path.parents[2] / "ground_truth" / path.parent.name / f"{path.stem}_mask.png"
    with Image.open(file) as mask:
        return np.asarray(mask.convert("L")) >= 128


def test_every_fourth_test_image(bundle: Path, shared: Path) -> None:
    paths = sorted((shared / "data" / "mvtec_bottle" / "test").glob("*/*.png"))[::4]
    image, pixel = scores(paths, judge(bundle, paths))
    assert len(paths) == 21
    assert image >= 0.99
    assert pixel >= 0.98


@pytest.mark.slow
def test_all_test_images(bundle: Path, shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = sorted((shared / "data" / "mvtec_bottle" / "test").glob("*/*.png"))
    image, pixel = scores(paths, judge(bundle, paths))
    with capsys.disabled():
        print(f"\nmvtec_bottle, {len(paths)} images at 64 x 64: image AUROC {image:.4f}, pixel AUROC {pixel:.4f}")
    assert image >= 0.995
    assert pixel >= 0.984


def test_the_squared_norm_diverges_at_the_scale_that_the_norm_was_tuned_for(checkpoint: Path, shared: Path) -> None:
    """rho = 100 with the squared norm, as the paper prints it, leaves the range of images; with the norm it stays."""
    denoiser = load_denoiser(checkpoint)
    observe = Preprocessing(image_size=(64, 64))
    y = torch.from_numpy(observe(shared / "data" / "mvtec_bottle" / "test" / "good" / "000.png"))[None]
    generator = torch.Generator().manual_seed(0)
    first, *noises = (torch.randn(1, 3, 64, 64, generator=generator) for _ in range(11))
    largest = {}
    for name, oracle in {
        "norm": o.Oracle(o.linear_schedule()),
        "squared": o.Oracle(o.linear_schedule(), squared_norm=True),
        "squared, rho 5": o.Oracle(o.linear_schedule(), squared_norm=True, guidance_scale=5.0),
    }.items():
        *_, x0 = o.posterior_sampling(denoiser.network, y, torch.ones(1, 1, 64, 64), first, noises, oracle)
        largest[name] = float(x0.abs().max())
    assert largest["norm"] < 1.5
    assert largest["squared, rho 5"] < 1.5
    assert not largest["squared"] < 100  # written so that NaN counts as diverged


def test_an_export_that_diverges_says_so(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="--guidance-norm l2"):
        export_bundle(checkpoint, tmp_path / "bundle", ExportOptions(guidance_norm="squared"))
    assert not list(tmp_path.iterdir())
