"""Folders of diffusers' UNet2DModel against diffusers itself."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mdps.models.checkpoints import CheckpointError, load_denoiser

State = dict[str, torch.Tensor]


def assert_sentence(error: Exception, path: Path) -> None:
    text = str(error)
    assert str(path) in text
    assert "\n" not in text
    assert len(text) < 400


DIFFUSERS_CONFIGS: dict[str, dict[str, Any]] = {
    "attention": {
        "down_block_types": ["DownBlock2D", "AttnDownBlock2D"],
        "up_block_types": ["AttnUpBlock2D", "UpBlock2D"],
    },
    "ddpm": {
        "down_block_types": ["DownBlock2D", "AttnDownBlock2D", "DownBlock2D"],
        "up_block_types": ["UpBlock2D", "AttnUpBlock2D", "UpBlock2D"],
        "block_out_channels": [32, 64, 96],
        "flip_sin_to_cos": False,
        "freq_shift": 1,
        "downsample_padding": 0,
        "norm_eps": 1e-6,
        "attention_head_dim": None,
    },
    "adm": {
        "down_block_types": ["ResnetDownsampleBlock2D", "AttnDownBlock2D"],
        "up_block_types": ["AttnUpBlock2D", "ResnetUpsampleBlock2D"],
        "downsample_type": "resnet",
        "upsample_type": "resnet",
        "resnet_time_scale_shift": "scale_shift",
        "attn_norm_num_groups": 16,
        "norm_num_groups": 16,
        "attention_head_dim": 16,
        "layers_per_block": 2,
    },
    "plain": {
        "down_block_types": ["DownBlock2D", "DownBlock2D"],
        "up_block_types": ["UpBlock2D", "UpBlock2D"],
        "out_channels": 6,
    },
}


def diffusers_model(**config: Any) -> Any:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(1)
    settings = {"sample_size": 16, "block_out_channels": [32, 64], "layers_per_block": 1, **config}
    return diffusers.UNet2DModel(**settings).eval()


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("name", DIFFUSERS_CONFIGS)
def test_diffusers_network_computes_what_diffusers_computes(name: str, safe: bool, tmp_path: Path) -> None:
    model = diffusers_model(**DIFFUSERS_CONFIGS[name])
    model.save_pretrained(tmp_path / "net", safe_serialization=safe)
    denoiser = load_denoiser(tmp_path / "net")
    assert denoiser.report.format == "diffusers"
    assert denoiser.config.image_size == 16
    x, t = torch.randn(2, 3, 16, 16), torch.tensor([180.0, 40.0])
    with torch.no_grad():
        expected = model(x, t).sample[:, :3]
        np.testing.assert_allclose(denoiser.network(x, t).numpy(), expected.numpy(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["linear", "scaled_linear", "squaredcos_cap_v2"])
def test_diffusers_pipeline_brings_schedule_and_prediction(kind: str, tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    diffusers_model(**DIFFUSERS_CONFIGS["plain"]).save_pretrained(tmp_path / "pipeline" / "unet")
    scheduler = diffusers.DDIMScheduler(beta_schedule=kind, num_train_timesteps=300, prediction_type="v_prediction")
    scheduler.save_pretrained(tmp_path / "pipeline" / "scheduler")
    denoiser = load_denoiser(tmp_path / "pipeline")
    assert denoiser.prediction == "v"
    np.testing.assert_allclose(denoiser.schedule.alphas_cumprod, scheduler.alphas_cumprod.numpy(), atol=1e-5, rtol=0)
    assert denoiser.report.assumed == {}
    from_file = load_denoiser(tmp_path / "pipeline" / "unet" / "diffusion_pytorch_model.safetensors")
    assert from_file.config == denoiser.config


def test_diffusers_names_of_before_2023(tmp_path: Path) -> None:
    model = diffusers_model(**DIFFUSERS_CONFIGS["attention"])
    model.save_pretrained(tmp_path)
    old = {".to_q.": ".query.", ".to_k.": ".key.", ".to_v.": ".value.", ".to_out.0.": ".proj_attn."}
    state = load_file(tmp_path / "diffusion_pytorch_model.safetensors")
    for new, former in old.items():
        state = {key.replace(new, former): value for key, value in state.items()}
    save_file(state, tmp_path / "diffusion_pytorch_model.safetensors")
    x, t = torch.randn(1, 3, 16, 16), torch.tensor([180.0])
    with torch.no_grad():
        np.testing.assert_allclose(load_denoiser(tmp_path).network(x, t).numpy(), model(x, t).sample.numpy(), atol=1e-5)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_class_embeds": 10}, "num_class_embeds"),
        ({"class_embed_type": "timestep"}, "class_embed_type"),
        ({"add_attention": False}, "add_attention"),
        ({"mid_block_scale_factor": 1.4}, "mid_block_scale_factor"),
        ({"center_input_sample": True}, "center_input_sample"),
        ({"time_embedding_type": "fourier"}, "time_embedding_type"),
        ({"act_fn": "gelu"}, "act_fn"),
        ({"encoder_hid_dim": 3}, "encoder_hid_dim"),
        ({"resnet_time_scale_shift": "scale_shift"}, "attn_norm_num_groups"),
        ({"down_block_types": ["SkipDownBlock2D", "DownBlock2D"]}, "SkipDownBlock2D"),
        ({"down_block_types": ["AttnDownBlock2D", "DownBlock2D"]}, "different levels"),
        ({"down_block_types": ["ResnetDownsampleBlock2D", "AttnDownBlock2D"]}, "changes resolution"),
        ({"block_out_channels": [32]}, "differ in length"),
        ({"_class_name": "UNet2DConditionModel"}, "UNet2DConditionModel"),
        ({"norm_num_groups": 24}, "24"),
        ({"layers_per_block": 2}, "lacks whole blocks"),
    ],
)
def test_unsupported_diffusers_networks_are_refused_by_name(
    change: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    diffusers_model(**DIFFUSERS_CONFIGS["attention"]).save_pretrained(tmp_path / "net")
    config = tmp_path / "net" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with pytest.raises(CheckpointError, match=sentence) as raised:
        load_denoiser(tmp_path / "net")
    assert_sentence(raised.value, tmp_path / "net")


@pytest.mark.parametrize("missing", ["config.json", "diffusion_pytorch_model.safetensors"])
def test_incomplete_diffusers_folder(missing: str, tmp_path: Path) -> None:
    diffusers_model(**DIFFUSERS_CONFIGS["plain"]).save_pretrained(tmp_path / "net")
    (tmp_path / "net" / missing).unlink()
    with pytest.raises(CheckpointError, match=missing):
        load_denoiser(tmp_path / "net")
    if missing == "config.json":
        with pytest.raises(CheckpointError, match=missing):
            load_denoiser(tmp_path / "net" / "diffusion_pytorch_model.safetensors")
