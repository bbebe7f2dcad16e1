"""The exported graphs and the runtime's loop against the golden numbers: the ONNX path within the oracle's bounds."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mdps.export.bundle import BATCHED
from mdps.export.graph import WeightStore, write
from mdps.export.linearize import prepare_input_gradients
from mdps.export.step import Denoiser, GuidedStep, PlainStep, StepRules
from mdps.export.tracer import record
from mdps.models.checkpoints import CheckpointOptions, load_denoiser
from mdps.models.unet import UNet
from mdps.runtime.engines import named
from mdps.runtime.engines.onnxruntime import OrtSession
from mdps.runtime.graphs import Graphs
from mdps.runtime.sampler import posterior_sampling
from mdps.runtime.schedule import NoiseSchedule
from mdps.runtime.settings import PassSettings, SamplerSettings


class RecordedNoise:
    """Plays back the noises that made the golden states."""

    def __init__(self, first: np.ndarray, steps: np.ndarray) -> None:
        self.first, self.steps = first, steps

    def draw(self, pass_index: int, step_index: int, samples: int, images: int = 1) -> np.ndarray:
        return self.first if step_index < 0 else self.steps[step_index][None]


def sessions(network: UNet, mask_rule: Any, folder: Path) -> Graphs:
    prepare_input_gradients(network)
    rules, side = StepRules(mask_rule=mask_rule), network.config.image_size
    image = torch.rand(1, 3, side, side)
    example: dict[str, Any] = {
        "x_t": image, "observation": image.flip(-1), "mask": (image[:, :1] > 0.5).float(), "noise": image.flip(-2),
        "mask_noise": image.flip(-1, -2) if mask_rule == "replace" else None,
    }  # fmt: skip
    example |= {
        name: torch.tensor(v) for name, v in {"timestep": 9.0, "alpha_t": 0.5, "alpha_s": 0.6, "sigma_t": 0.1}.items()
    }
    weights = WeightStore(folder / "weights")
    plain = record(PlainStep(Denoiser(network, "eps"), rules), example, ["x_s", "eps"], BATCHED)
    example["guidance_scale"] = torch.tensor(1.0)
    guided = record(GuidedStep(Denoiser(network, "eps"), rules), example, ["x_s", "eps", "guidance_gradient"], BATCHED)
    write(plain, folder / "plain.onnx", weights)
    write(guided, folder / "guided.onnx", weights)
    engine = named("onnxruntime")
    return Graphs(OrtSession(folder / "guided.onnx", engine), OrtSession(folder / "plain.onnx", engine))


def states(
    steps: Graphs,
    arrays: Mapping[str, np.ndarray],
    name: str,
    y: np.ndarray,
    mask: np.ndarray,
    mode: Any,
    scale: float,
) -> np.ndarray:
    one = PassSettings(200, scale, steps=10) if mode == "paper" else PassSettings(200, scale, skip=20)
    rule: Any = "blend" if mode == "paper" else "replace"
    settings = SamplerSettings(mode, rule, "l2", "exact", 1.0, one, None, 1, 0)
    first = arrays[f"{name}_z"] if f"{name}_z" in arrays else arrays[f"{name}_init_noise"]
    noise = RecordedNoise(first, arrays[f"{name}_step_noise"])
    found = posterior_sampling(steps, NoiseSchedule.linear(), settings, y, mask, 0, noise)
    return np.concatenate([state.x for state in found])


@pytest.mark.parametrize("mode", ["reference", "paper"])
def test_all_passes_at_32(mode: str, small: Mapping[str, np.ndarray], small_denoiser: Any, tmp_path: Path) -> None:
    steps = sessions(small_denoiser.network, "blend" if mode == "paper" else "replace", tmp_path)
    everywhere = np.ones((1, 1, 32, 32), dtype=np.float32)
    for kind, mask, scale in (
        ("guided", everywhere, 100.0),
        ("unguided", everywhere, 0.0),
        ("masked", small["mask"], 100.0),
    ):
        found = states(steps, small, f"{mode}_{kind}", small["y"], mask, mode, scale)
        assert np.abs(found - small[f"{mode}_{kind}_states"]).max() < 2e-3, kind


def test_the_authors_checkpoint_at_64(shared: Path, tmp_path: Path) -> None:
    with np.load(shared / "golden" / "golden.npz") as arrays:
        golden = dict(arrays)
    network = load_denoiser(shared / "golden" / "checkpoint", CheckpointOptions(image_size=64)).network
    steps = sessions(network, "replace", tmp_path)
    everywhere = np.ones((1, 1, 64, 64), dtype=np.float32)
    _check_call(steps, golden)
    for index in (0, 1):
        y = golden["y"][index : index + 1]
        for name, mask in ((f"sample{index}", everywhere), (f"masked{index}", golden[f"masked{index}_mask"])):
            found = states(steps, golden, name, y, mask, "reference", 100.0)
            assert np.abs(found - golden[f"{name}_states"]).max() < 2e-3, name
    found = states(steps, golden, "unguided", golden["y"][:1], everywhere, "reference", 0.0)
    assert np.abs(found - golden["unguided_states"]).max() < 2e-3


def _check_call(steps: Graphs, golden: Mapping[str, np.ndarray]) -> None:
    """eps within 1e-4, each image's gradient within 1e-5, both images in one batch."""
    x_t, y = golden["call_x_t"], golden["y"]
    scalars = {
        "timestep": 180.0,
        "alpha_t": golden["call_alpha_bar"][0],
        "alpha_s": 0.9,
        "sigma_t": 0.1,
        "guidance_scale": 100.0,
    }
    feeds = {"x_t": x_t, "observation": y, "mask": np.ones_like(y[:, :1]), "noise": y, "mask_noise": y}
    feeds |= {name: np.asarray(value, dtype=np.float32) for name, value in scalars.items()}
    assert steps.guided is not None
    found = steps.guided.run(feeds)
    assert np.abs(found["eps"] - golden["call_eps"]).max() < 1e-4
    assert np.abs(found["guidance_gradient"] - golden["call_grad_per_image"]).max() < 1e-5


def test_every_public_format_at_32(shared: Path, formula_weights: Any, tmp_path: Path) -> None:
    """eps and gradient of the exported step for each format's own numbers, one image at a time."""
    import json

    for description in sorted((shared / "golden" / "formats").glob("*.json")):
        layout = json.loads(description.read_text())
        if "state_dict" not in layout:
            continue
        folder = tmp_path / description.stem
        folder.mkdir()
        weights = {k: torch.from_numpy(np.asarray(v)) for k, v in formula_weights(layout["state_dict"]).items()}
        torch.save(weights, folder / "checkpoint")
        arguments = layout["constructor"]
        heads = arguments.get("num_heads", arguments.get("n_heads", 4))
        head_channels = arguments.get("num_head_channels", arguments.get("n_head_channels", -1))
        options = CheckpointOptions(
            image_size=32,
            num_heads=heads if head_channels == -1 else None,
            num_head_channels=None if head_channels == -1 else head_channels,
            new_attention_order=arguments.get("use_new_attention_order", False),
        )
        steps = sessions(load_denoiser(folder / "checkpoint", options).network, "blend", folder)
        with np.load(description.with_suffix(".npz")) as arrays:
            numbers = dict(arrays)
        for index, timestep in enumerate(numbers["t"]):
            _check_format(steps, numbers, index, float(timestep), description.stem)


def _check_format(steps: Graphs, numbers: Mapping[str, np.ndarray], index: int, timestep: float, name: str) -> None:
    one = slice(index, index + 1)
    y = numbers["observation"][one]
    scalars = {"timestep": timestep, "alpha_t": numbers["alphas_cumprod"][index], "alpha_s": 0.99, "sigma_t": 0.0}
    feeds = {"x_t": numbers["x_t"][one], "observation": y, "mask": np.ones_like(y[:, :1]), "noise": y}
    feeds |= {k: np.asarray(v, dtype=np.float32) for k, v in (scalars | {"guidance_scale": 1.0}).items()}
    assert steps.guided is not None
    found = steps.guided.run(feeds)
    assert np.abs(found["eps"] - numbers["eps"][one]).max() < 1e-4, name
    assert np.abs(found["guidance_gradient"] - numbers["guidance_gradient"][one]).max() < 1e-5, name
