"""Hostile manifests, checkpoints and requests, found by tests/hostile/fuzz or by reading: each is one sentence."""

import io
import json
import tracemalloc

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from mdps.models.checkpoints import CheckpointError, describe_checkpoint, load_denoiser, save_denoiser
from mdps.models.unet import UNet, UNetConfig
from mdps.runtime.errors import BundleError, ImageError, UsageError
from mdps.runtime.manifest import FILE_NAME, Manifest
from mdps.runtime.pictures import read_image
from mdps.runtime.schedule import NoiseSchedule
from mdps.runtime.settings import ScoreSettings

DEPTHS = (60, 400, 900, 950, 970, 980, 985, 990, 995, 5000)  # the last that can be read at all lies among them
CONFIG = UNetConfig(8, model_channels=8, channel_mult=(1,), num_res_blocks=1, attention_factors=(), norm_groups=4)
SIDECAR = {"network": CONFIG.to_json()}


def nested(depth):
    return "[" * depth + "]" * depth


# Manifests


@pytest.fixture
def manifest(line_bundle):
    return json.loads((line_bundle / FILE_NAME).read_text(encoding="utf-8"))


def refused_manifest(obj, folder):
    text = obj if isinstance(obj, str) else json.dumps(obj)
    (folder / FILE_NAME).write_text(text, encoding="utf-8")
    with pytest.raises(BundleError) as raised:
        Manifest.read(folder)
    assert str(folder) in str(raised.value)
    return str(raised.value)


def test_a_whole_number_beyond_every_float_is_named(manifest, tmp_path):
    manifest["settings"]["sampler"]["eta_ddim"] = 10**400
    assert "eta_ddim should be a finite number" in refused_manifest(manifest, tmp_path)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("key", ["name", "network"])
def test_a_manifest_of_any_depth_is_a_sentence(manifest, tmp_path, key, depth):
    text = json.dumps(manifest | {key: {"x": "HERE"}}).replace('"HERE"', nested(depth))
    assert len(refused_manifest(text, tmp_path)) < 400


def test_a_file_name_too_long_for_the_disk_is_a_sentence(manifest, tmp_path):
    manifest["files"]["x" * 300] = {"sha256": "0" * 64, "bytes": 0}
    for name in list(manifest["files"])[:-1]:
        del manifest["files"][name]
    manifest["graphs"] = {}
    assert "cannot be read: File name too long" in refused_manifest(manifest, tmp_path)


def test_a_folder_name_too_long_for_the_disk_is_a_sentence():
    with pytest.raises(BundleError, match="too long"):
        Manifest.read("x" * 300)


def test_half_a_character_could_not_be_written_again_and_is_refused(manifest, tmp_path):
    assert "surrogates not allowed" in refused_manifest(json.dumps(manifest | {"name": "\ud800"}), tmp_path)


def test_a_key_that_is_there_twice_is_refused(manifest, tmp_path):
    text = json.dumps(manifest)[:-1] + ', "name": "another"}'
    assert "has the key 'name' twice" in refused_manifest(text, tmp_path)


def test_a_schedule_with_a_negative_end_is_refused_and_not_rooted():
    described = {"kind": "scaled_linear", "beta_start": -0.1, "beta_end": 0.02, "steps": 10}
    with pytest.raises(BundleError, match="between 0 and 1"):
        NoiseSchedule.from_json(described)


def test_a_beta_just_below_one_can_be_described():
    schedule = NoiseSchedule((0.1, 0.9999999999999999))
    assert NoiseSchedule.from_json(schedule.to_json()) == schedule


@pytest.mark.parametrize("make", [NoiseSchedule.linear, NoiseSchedule.scaled_linear, NoiseSchedule.cosine])
def test_a_schedule_of_endless_steps_is_refused_before_it_is_built(make):
    with pytest.raises(UsageError, match="million"):
        make(10**12)


def test_an_image_size_beyond_every_picture_is_refused(manifest, tmp_path):
    manifest["preprocessing"]["image_size"] = [2**31, 2**31]
    assert "image_size (2147483648, 2147483648)" in refused_manifest(manifest, tmp_path)


def test_a_negative_kernel_is_refused(manifest):
    with pytest.raises(BundleError, match="smoothing_kernel"):
        ScoreSettings.from_json(manifest["settings"]["score"] | {"smoothing_kernel": -1})


# Checkpoints


@pytest.fixture
def state():
    torch.manual_seed(0)
    return UNet(CONFIG).state_dict()


def refused_checkpoint(path, sentence):
    with pytest.raises(CheckpointError, match=sentence) as raised:
        load_denoiser(path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 500


def saved(state, folder, sidecar=SIDECAR):
    path = folder / "a.pt"
    torch.save(state, path)
    (folder / "a.pt.json").write_text(sidecar if isinstance(sidecar, str) else json.dumps(sidecar))
    return path


def test_the_small_network_itself_loads(state, tmp_path):
    assert load_denoiser(saved(state, tmp_path)).config.norm_groups == 4


def test_a_dictionary_that_holds_itself_is_looked_at_once(state, tmp_path):
    for holder in ({}, dict(state)):
        holder["model"] = holder
        path = saved(holder, tmp_path)
        if state.keys() <= holder.keys():
            assert describe_checkpoint(path).parameters
        else:
            refused_checkpoint(path, "no denoiser of a known layout")


def test_dictionaries_that_share_their_contents_are_not_searched_again_and_again(tmp_path):
    inner = {}
    for _ in range(40):
        inner = dict.fromkeys(("ema", "model", "network", "unet", "params", "state_dict"), inner)
    refused_checkpoint(saved(inner, tmp_path), "no denoiser of a known layout")


@pytest.mark.parametrize("number", ["999999999999", "9" * 5000])
def test_a_block_with_a_huge_number_costs_nothing(state, tmp_path, number):
    for key in (f"input_blocks.{number}.0.in_layers.2.weight", f"output_blocks.{number}.0.in_layers.2.weight"):
        refused_checkpoint(saved(state | {key: torch.zeros(1)}, tmp_path), "has the tensor")


def test_a_tensor_without_values_is_damage(state, tmp_path):
    for shape in ((32, 0), (0, 2**40)):
        path = saved(state | {"time_embed.0.weight": torch.zeros(shape)}, tmp_path)
        refused_checkpoint(path, r"time_embed\.0\.weight of shape")


@pytest.mark.parametrize(
    "kind",
    [
        lambda value: torch.empty(value.shape, device="meta"),
        lambda value: value.to_sparse(),
        lambda value: torch.quantize_per_tensor(value, 0.1, 0, torch.qint8),
        lambda value: value.to(torch.int8),
        lambda value: value.to(torch.complex64),
        lambda value: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
    ],
    ids=["meta", "sparse", "quantised", "int8", "complex", "nested"],
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_that_are_no_plain_numbers_are_named(state, tmp_path, kind):
    path = saved(state | {"out.2.weight": kind(state["out.2.weight"])}, tmp_path)
    refused_checkpoint(path, r"has 'out\.2\.weight' as .* and not as plain numbers")


def test_a_small_file_that_names_terabytes_is_refused_before_they_are_made(state, tmp_path):
    """One value with a stride of zero is a matrix of any size; as float32 it would have to be stored."""
    endless = torch.zeros(1, dtype=torch.half).as_strided((2**20, 2**20), (0, 0))
    refused_checkpoint(saved(state | {"out.2.weight": endless}, tmp_path), "names .* bytes of weights")


@pytest.mark.parametrize(
    "changes",
    [
        {"norm_groups": 0},
        {"norm_groups": -4},
        {"num_head_channels": 0},
        {"num_heads": 0, "attention_factors": [1]},
        {"norm_eps": float("nan")},
        {"norm_eps": 10**400},
        {"dropout": 5.0},
        {"frequency_shift": 1e308},
        {"image_size": 0},
        {"image_size": 10**30},
        {"channel_mult": [10**400]},
        {"channel_mult": [float("inf")]},
        {"attention_resolutions": "1e999", "image_size": 8},
        {"model_channels": {"x": ["y" * 3000]}},
        {"x" * 3000: 1},
    ],
    ids=lambda changes: ", ".join(f"{key[:20]}={str(value)[:12]}" for key, value in changes.items()),
)
def test_what_a_sidecar_cannot_mean_is_named(state, tmp_path, changes):
    refused_checkpoint(
        saved(state, tmp_path, {"network": CONFIG.to_json() | changes}), "sidecar|is said|image size|heads"
    )


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_sidecar_of_any_depth_is_a_sentence(state, tmp_path, depth):
    refused_checkpoint(saved(state, tmp_path, '{"network": {"image_size": ' + nested(depth) + "}}"), "sidecar")


@pytest.mark.parametrize(
    "arguments",
    [{"T": 10**12}, {"T": 10**400}, {"T": torch.zeros(3)}, {"T": -1}, {"img_size": torch.zeros(3)}, {"num_heads": {}}],
    ids=lambda arguments: f"{arguments}"[:25],
)
def test_arguments_that_are_no_arguments_are_a_sentence(state, tmp_path, arguments):
    held = {"ema": state, "args": {"beta_schedule": "linear", "img_size": 8} | arguments}
    refused_checkpoint(saved(held, tmp_path, {"network": {"norm_groups": 4}}), "arguments")


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_header_of_our_own_of_any_depth_is_a_sentence(state, tmp_path, depth):
    path = tmp_path / "a.safetensors"
    save_file(state, path, {"mdps": nested(depth)})
    refused_checkpoint(path, "mdps header")


@pytest.mark.parametrize("extra", [[1], "x", 3])
def test_notes_that_are_no_object_are_damage(state, tmp_path, extra):
    path, network = tmp_path / "a.safetensors", UNet(CONFIG)
    save_denoiser(path, network, NoiseSchedule.linear(), extra=extra)
    refused_checkpoint(path, "mdps header")


DIFFUSERS = {"_class_name": "UNet2DModel", "block_out_channels": [8], "down_block_types": ["DownBlock2D"]}
DIFFUSERS |= {"up_block_types": ["UpBlock2D"], "norm_num_groups": 4, "layers_per_block": 1}


@pytest.mark.parametrize(
    "changes",
    [
        {"block_out_channels": 3},
        {"block_out_channels": []},
        {"down_block_types": [["DownBlock2D"]]},
        {"up_block_types": 7},
        {"layers_per_block": None},
        {"layers_per_block": "2"},
        {"norm_eps": "small"},
        {"norm_eps": 10**400},
        {"norm_num_groups": 0},
        {"attention_head_dim": [8]},
        {"sample_size": [[8]]},
        {"_class_name": "x" * 3000},
    ],
    ids=lambda changes: ", ".join(f"{key}={str(value)[:12]}" for key, value in changes.items()),
)
def test_wrong_types_in_a_config_of_diffusers_are_named(tmp_path, changes):
    (tmp_path / "config.json").write_text(json.dumps(DIFFUSERS | changes))
    save_file({"conv_in.weight": torch.zeros(8, 3, 3, 3)}, tmp_path / "diffusion_pytorch_model.safetensors")
    refused_checkpoint(tmp_path, f"{next(iter(changes))}|is a diffusers")


@pytest.mark.parametrize("way", ["down", "up"])
def test_a_block_of_the_other_way_is_named(tmp_path, way):
    other = {"down": "UpBlock2D", "up": "DownBlock2D"}[way]
    (tmp_path / "config.json").write_text(json.dumps(DIFFUSERS | {f"{way}_block_types": [other]}))
    tensors = {"conv_in.weight": torch.zeros(8, 3, 3, 3), "conv_out.weight": torch.zeros(3, 8, 3, 3)}
    save_file(tensors, tmp_path / "diffusion_pytorch_model.safetensors")
    refused_checkpoint(tmp_path, f"{other}.* on its way {way}")


def test_projections_of_unlike_shapes_are_damage(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(DIFFUSERS))
    block = "mid_block.attentions.0."
    tensors = {block + "to_q.weight": torch.zeros(8, 8), block + "to_k.weight": torch.zeros(8, 7)}
    tensors |= {block + "to_v.weight": torch.zeros(8, 8), "conv_in.weight": torch.zeros(8, 3, 3, 3)}
    save_file(tensors | {"conv_out.weight": torch.zeros(3)}, tmp_path / "diffusion_pytorch_model.safetensors")
    refused_checkpoint(tmp_path, "unlike shapes")


def test_a_scheduler_of_endless_steps_is_a_sentence(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(DIFFUSERS))
    (tmp_path / "scheduler_config.json").write_text(json.dumps({"num_train_timesteps": 10**12}))
    tensors = {"conv_in.weight": torch.zeros(8, 3, 3, 3), "conv_out.weight": torch.zeros(3, 8, 3, 3)}
    save_file(tensors, tmp_path / "diffusion_pytorch_model.safetensors")
    refused_checkpoint(tmp_path, "million")


# Pictures and requests


@pytest.mark.parametrize("end", [b"!", b","])
def test_damage_where_a_second_picture_would_begin_is_an_image_error(end):
    buffer = io.BytesIO()
    levels = np.random.RandomState(0).randint(0, 255, (6, 5, 3), dtype=np.uint8)
    Image.fromarray(levels).save(buffer, "GIF")
    whole = buffer.getvalue()
    assert whole[-1:] == b";"
    with pytest.raises(ImageError, match="truncated or damaged"):
        read_image(whole[:-1] + end)


def infer(data, **changes):
    from mdps.serving.http.tensors import output_names, parse

    tensor = {"name": "image", "shape": [4, 5, 3], "datatype": "UINT8", "data": data} | changes
    text = json.dumps({"inputs": [tensor]}) if not isinstance(data, bytes) else data.decode()
    return parse(text.encode(), None, max_pixels=10**6, outputs=output_names(True))


def test_one_long_text_among_the_levels_does_not_fill_the_memory():
    """numpy would give each of the 20,000 values the room of the longest."""
    pytest.importorskip("starlette", reason="the extra [serve] is not installed")
    from mdps.serving.http.refusals import Refusal

    tracemalloc.start()
    try:
        with pytest.raises(Refusal, match="whole numbers"):
            infer(["x" * 100_000, *[""] * 20_000])
        assert tracemalloc.get_traced_memory()[1] < 20 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_name_of_any_depth_is_refused(depth):
    pytest.importorskip("starlette", reason="the extra [serve] is not installed")
    from mdps.serving.http.refusals import Refusal

    text = json.dumps({"inputs": [{"name": "HERE", "shape": [1], "datatype": "BYTES", "data": [""]}]})
    with pytest.raises(Refusal):
        infer(text.replace('"HERE"', nested(depth)).encode())


@pytest.mark.parametrize("data", [[True] * 60, [1.0] * 60, ["7"] * 60, [[0] * 30, [0] * 29], [-1] * 60, [256] * 60, []])
def test_levels_are_whole_numbers_from_0_to_255(data):
    pytest.importorskip("starlette", reason="the extra [serve] is not installed")
    from mdps.serving.http.refusals import Refusal

    with pytest.raises(Refusal):
        infer(data)
