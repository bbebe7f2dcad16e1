"""Fixtures shared by all tests."""

import json
import math
import os
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from numpy.typing import NDArray

# The same few examples on every machine, however slow; HYPOTHESIS_PROFILE=long looks further, at other ones each time.
_SLOW = (HealthCheck.too_slow, HealthCheck.function_scoped_fixture)
settings.register_profile("few", derandomize=True, deadline=None, max_examples=20, suppress_health_check=_SLOW)
settings.register_profile("long", deadline=None, max_examples=1000, suppress_health_check=_SLOW)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "few"))

# What a load remembers of its machine stays out of the user's cache.
os.environ.setdefault("MDPS_CACHE", tempfile.mkdtemp(prefix="mdps-cache-"))

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def fake_card() -> Any:
    """The module tests/fake_card.py: a driver and engines without a card."""
    import importlib.util
    import sys

    spec = importlib.util.spec_from_file_location("fake_card", Path(__file__).with_name("fake_card.py"))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with golden numbers and real data: `MDPS_SHARED`, or `shared` beside the checkout."""
    folder = Path(os.environ.get("MDPS_SHARED", ROOT.parent / "shared"))
    if not (folder / "golden").is_dir():
        reason = "no shared folder: set MDPS_SHARED to the folder that holds golden/ and data/"
        if os.environ.get("MDPS_CI"):  # a run that decides must not pass because its proof was missing
            pytest.fail(reason)
        pytest.skip(reason)
    return folder


def _formula_array(key: str, shape: Sequence[int]) -> NDArray[np.float32]:
    z = np.random.RandomState(zlib.crc32(key.encode())).standard_normal(shape).astype(np.float32)
    if len(shape) > 1:
        return z / np.float32(math.sqrt(math.prod(shape[1:])))
    return np.float32(1) + np.float32(0.1) * z if key.endswith("weight") else np.float32(0.05) * z


@pytest.fixture(scope="session")
def formula_weights() -> Callable[[Mapping[str, Sequence[int]]], dict[str, NDArray[np.float32]]]:
    """Weights by the formula of the golden numbers: {key without "module.": shape} -> {key: float32 array}."""
    return lambda shapes: {key: _formula_array(key, shape) for key, shape in shapes.items()}


@pytest.fixture(scope="session")
def small_weights(formula_weights: Callable[..., dict[str, NDArray[np.float32]]]) -> dict[str, NDArray[np.float32]]:
    """State dict (authors' keys, no prefix) of the 32 x 32 network that made tests/data/small.npz."""
    layout = json.loads((ROOT / "tests" / "data" / "authors.json").read_text(encoding="utf-8"))
    weights = formula_weights(layout["state_dict"])
    return weights | {"out.2.weight": weights["out.2.weight"] * np.float32(0.3)}


@pytest.fixture(scope="session")
def small() -> Mapping[str, NDArray[np.float32]]:
    """Golden arrays of both modes at 32 x 32 (tests/data/small.npz)."""
    with np.load(ROOT / "tests" / "data" / "small.npz") as arrays:
        return dict(arrays)


@pytest.fixture(scope="session")
def small_denoiser(small_weights: dict[str, NDArray[np.float32]], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The loaded 32 x 32 network of tests/data/small.npz, read through the authors' format."""
    return load_small(write_small_checkpoint(small_weights, tmp_path_factory.mktemp("small") / "checkpoint"))


@pytest.fixture(scope="session")
def small_checkpoint(small_weights: dict[str, NDArray[np.float32]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as a file in the authors' format."""
    return write_small_checkpoint(small_weights, tmp_path_factory.mktemp("small-checkpoint") / "checkpoint")


@pytest.fixture
def small_network(small_denoiser: Any) -> Any:
    """The network alone."""
    return small_denoiser.network


def write_small_checkpoint(weights: Mapping[str, NDArray[np.float32]], path: Path) -> Path:
    import torch

    torch.save({f"module.{key}": torch.from_numpy(np.asarray(value)) for key, value in weights.items()}, path)
    return path


def load_small(path: Path) -> Any:
    from mdps.models.checkpoints import CheckpointOptions, load_denoiser

    return load_denoiser(path, CheckpointOptions(image_size=32))


@pytest.fixture(scope="session")
def tiny_bundle(small_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of the 32 x 32 network with the seeded tiny backbone, uncalibrated, three steps a pass."""
    from mdps.export import ExportOptions, export_bundle
    from mdps.models.checkpoints import CheckpointOptions

    options = ExportOptions(backbone="random_tiny", noise_level=198, steps=3, load=CheckpointOptions(image_size=32))
    return export_bundle(small_checkpoint, tmp_path_factory.mktemp("bundles") / "tiny", options)


@pytest.fixture
def make_category(tmp_path: Path, write_category: Callable[..., Path]) -> Callable[..., Path]:
    """Writes a category as `write_category` does, in a folder of its name below tmp_path."""
    return lambda name="disc", **how: write_category(tmp_path / "data" / name, **how)


@pytest.fixture(scope="session")
def write_category() -> Callable[..., Path]:
    """Writes a category in MVTec AD's layout to a folder: smooth grey images, bright discs as defects, masks."""
    from PIL import Image

    def write(
        root: Path, good: int = 3, defective: int = 4, size: tuple[int, int] = (40, 40), masks: bool = True
    ) -> Path:
        rng = np.random.default_rng(0)
        rows, columns = np.mgrid[: size[1], : size[0]]
        for index in range(-1, good + defective):  # the first is what makes the folder a category: an image to train on
            kind = "spot" if index >= good else "good"
            pixels = 90 + 30 * np.sin(columns / 7 + index) + rng.normal(0, 6, rows.shape)
            centre = rng.uniform(0.3, 0.7, 2) * (size[1], size[0])
            disc = (rows - centre[0]) ** 2 + (columns - centre[1]) ** 2 < rng.uniform(3, 7) ** 2
            files = {root / ("test" if index >= 0 else "train") / kind / f"{max(index, 0):03d}.png": pixels}
            if kind == "spot":
                files = {path: pixels + 25 * disc * rng.uniform(0, 4) for path in files}
                if masks:
                    files[root / "ground_truth" / kind / f"{index:03d}_mask.png"] = disc * 255.0
            for path, values in files.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(np.clip(values, 0, 255).astype(np.uint8)).save(path)
        return root

    return write


@pytest.fixture(scope="session")
def line_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibrated bundle of a random 16 x 16 network that judges an image in milliseconds, for tests of the server."""
    return make_line_bundle(tmp_path_factory.mktemp("line"))


def make_line_bundle(folder: Path) -> Path:
    """Makes it, also for tests/hostile/fuzz."""
    import torch

    from mdps.export import ExportOptions, export_bundle
    from mdps.models.checkpoints import save_denoiser
    from mdps.models.unet import UNet, UNetConfig
    from mdps.runtime.manifest import Manifest
    from mdps.runtime.schedule import NoiseSchedule
    from mdps.serving.calibrate import calibrate_folder

    torch.manual_seed(0)
    small = {"channel_mult": (1, 1), "num_res_blocks": 1, "attention_factors": (2,), "num_heads": 2, "norm_groups": 4}
    network = UNet(UNetConfig(image_size=16, model_channels=16, **small)).eval()
    for parameter in network.parameters():  # its last layer begins as zeros
        parameter.data += 0.05 * torch.randn_like(parameter)
    save_denoiser(folder / "line.safetensors", network, NoiseSchedule.linear(), "eps")
    options = ExportOptions(backbone="random_tiny", noise_level=198, steps=2)
    bundle = export_bundle(folder / "line.safetensors", folder / "line", options)
    good = folder / "good"
    good.mkdir()
    for index, picture in enumerate(line_pictures(20)):
        (good / f"{index:02}.png").write_bytes(picture)
    calibration = calibrate_folder(bundle, good, 0.1, threads=1)
    # What a random network finds is not what its tests are about.
    Manifest.read(bundle).with_calibration("default", replace(calibration, fitness=None)).write(bundle)
    return bundle


def line_pictures(count: int, seed: int = 0) -> list[bytes]:
    """Different PNG files of 24 x 24 pixels; some fail and some pass the line's bundle."""
    import io

    from PIL import Image

    pictures = []
    for pixels in np.random.default_rng(seed).integers(40, 210, (count, 24, 24, 3), dtype=np.uint8):
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG")
        pictures.append(buffer.getvalue())
    return pictures


@pytest.fixture(scope="session")
def line_images() -> list[bytes]:
    """Forty pictures that the line's bundle was not calibrated on."""
    return line_pictures(40, seed=1)


UNET_VARIANTS: dict[str, dict[str, Any]] = {
    "biggan": {},
    "scale_shift": {"scale_shift_norm": True, "num_head_channels": 16},
    "strided_new_attention": {"resblock_updown": False, "new_attention_order": True},
    "pooled_one_head": {"resblock_updown": False, "conv_resample": False, "num_heads": 1},
    "asymmetric_strided": {"resblock_updown": False, "asymmetric_padding": True},
    "shifted_frequencies": {"frequency_shift": 1.0, "norm_eps": 1e-6, "num_res_blocks": 2},
}


@pytest.fixture(params=UNET_VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    """Each supported variant of the U-Net by name."""
    return str(request.param)


@pytest.fixture(scope="session")
def make_network() -> Callable[..., Any]:
    """Makes a frozen 16 x 16 network of a variant, seeded, its norms away from 1 and 0."""
    import torch

    from mdps.models.unet import UNet, UNetConfig

    def make(variant: str, mult: tuple[int, ...] = (1, 2)) -> Any:
        fields = {"num_res_blocks": 1, "attention_factors": (2,)} | UNET_VARIANTS[variant]
        torch.manual_seed(0)
        network = UNet(UNetConfig(image_size=16, model_channels=32, channel_mult=mult, **fields))
        for parameter in network.parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)
        return network.eval().requires_grad_(False)

    return make


@pytest.fixture(scope="session")
def tiny_config() -> Any:
    """A training run of eight steps of four 8 x 8 images, everything on that costs no time."""
    from mdps.models.unet import UNetConfig
    from mdps.training import TrainingConfig

    network = UNetConfig(
        image_size=8,
        model_channels=8,
        channel_mult=(1, 1),
        num_res_blocks=1,
        attention_factors=(2,),
        num_heads=2,
        norm_groups=4,
        scale_shift_norm=True,
        dropout=0.1,  # so that the generator torch uses inside the network matters too
    )
    return TrainingConfig(
        network,
        steps=8,
        batch=4,
        optimizer="adamw",
        learning_rate=4e-4,
        decay="cosine",
        warmup=2,
        ema=0.999,
        low_share=0.7,
        flip_horizontal=True,
        shift=1,
        log_every=1,
        checkpoint_every=2,
        samples=0,
    )


@pytest.fixture
def tiny_images() -> NDArray[np.uint8]:
    """Six of them."""
    return np.random.default_rng(0).integers(0, 256, (6, 8, 8, 3), dtype=np.uint8)
