"""Every way a checkpoint file can be wrong is one sentence that names the file, and no code of it runs."""

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from mdps.models.checkpoints import CheckpointError, CheckpointOptions, load_denoiser
from mdps.models.unet import UNet, UNetConfig

State = dict[str, torch.Tensor]


@pytest.fixture
def openai_state() -> State:
    torch.manual_seed(0)
    config = UNetConfig(image_size=16, model_channels=32, channel_mult=(1, 2), num_res_blocks=1, attention_factors=(2,))
    return UNet(config).state_dict()


@pytest.fixture
def small_state(small_weights: dict[str, NDArray[np.float32]]) -> State:
    return {key: torch.from_numpy(value.copy()) for key, value in small_weights.items()}


def assert_sentence(error: Exception, path: Path) -> None:
    text = str(error)
    assert str(path) in text
    assert "\n" not in text
    assert len(text) < 400


class Malicious:
    """Unpickling makes the file that `proof` names."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.proof),)


@pytest.mark.parametrize("zipped", [True, False])
def test_malicious_pickle_is_refused_and_does_not_run(zipped: bool, small_state: State, tmp_path: Path) -> None:
    path, proof = tmp_path / "evil.pt", tmp_path / "proof"
    torch.save({**small_state, "x": Malicious(proof)}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match="needs code to open") as raised:
        load_denoiser(path)
    assert_sentence(raised.value, path)
    assert not proof.exists()
    torch.load(path, weights_only=False)
    assert proof.is_dir()  # the file was dangerous


def test_plain_malicious_pickle_is_refused(tmp_path: Path) -> None:
    path, proof = tmp_path / "evil.pkl", tmp_path / "proof"
    path.write_bytes(pickle.dumps(Malicious(proof)))
    with pytest.raises(CheckpointError) as raised:
        load_denoiser(path)
    assert_sentence(raised.value, path)
    assert not proof.exists()


def resnet_state() -> State:
    return {"conv1.weight": torch.zeros(64, 3, 7, 7), "layer1.0.conv1.weight": torch.zeros(64, 64, 3, 3)}


def _damage(name: str, state: State, path: Path) -> None:
    whole = path.with_name("whole")
    torch.save(state, whole)
    data = whole.read_bytes()
    whole.unlink()
    key = "input_blocks.1.0.in_layers.2.weight"
    contents: dict[str, bytes] = {
        "empty": b"",
        "half": data[: len(data) // 2],
        "web page": b"<!DOCTYPE html><html><body>404</body></html>",
        "lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n",
        "text": b"hello",
        "safetensors header": (40).to_bytes(8, "little") + b"{not json" + b" " * 100,
        "safetensors length": (2**31).to_bytes(8, "little") + b"{}",
        "garbled": data[:2000] + bytes(200) + data[2200:],
    }
    states: dict[str, Any] = {
        "resnet": resnet_state(),
        "no tensors": {},
        "a tensor": torch.zeros(3),
        "a list": [torch.zeros(3)],
        "missing": {k: v for k, v in state.items() if k != key},
        "missing first": {k: v for k, v in state.items() if k != "input_blocks.0.0.weight"},
        "missing time": {k: v for k, v in state.items() if k != "time_embed.0.weight"},
        "missing block": {k: v for k, v in state.items() if not k.startswith("output_blocks.3.")},
        "no blocks": {k: v for k, v in state.items() if "put_blocks" not in k},
        "shape": state | {"out.0.weight": torch.zeros(7)},
        "flat": state | {"time_embed.0.weight": torch.zeros(7)},
        "scalar": state | {key: torch.tensor(1.0)},
        "surplus": state | {"input_blocks.1.1.transformer.weight": torch.zeros(3)},
        "classes": state | {"label_emb.weight": torch.zeros(10, 128)},
        "nan": state | {"out.0.weight": torch.full((32,), torch.nan)},
        "inf": state | {"out.2.bias": torch.full((3,), torch.inf)},
        "grey": state | {"input_blocks.0.0.weight": torch.zeros(32, 1, 3, 3)},
    }
    if name in contents:
        path.write_bytes(contents[name])
    elif name in states:
        torch.save(states[name], path)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("absent", "does not exist"),
        ("empty", "is empty"),
        ("half", "cut off or damaged"),
        ("web page", "web page"),
        ("lfs", "Git LFS pointer"),
        ("text", "known kind"),
        ("safetensors header", "safetensors"),
        ("safetensors length", "safetensors"),
        ("garbled", "damaged"),
        ("resnet", "no denoiser of a known layout.*conv1.weight"),
        ("no tensors", "no tensors"),
        ("a tensor", "holds a Tensor"),
        ("a list", "holds a list"),
        ("missing", "lacks the tensor input_blocks.1.0.in_layers.2.weight"),
        ("missing first", "lacks the tensor input_blocks.0.0.weight"),
        ("missing time", "lacks the tensor time_embed.0.weight"),
        ("missing block", "lacks whole blocks"),
        ("no blocks", "lacks whole blocks|no denoiser"),
        ("shape", r"out.0.weight of shape \[7\]"),
        ("flat", r"time_embed.0.weight of shape \[7\]"),
        ("scalar", "of shape"),
        ("surplus", "input_blocks.1.1.transformer.weight"),
        ("classes", "class-conditional"),
        ("nan", "not numbers in out.0.weight"),
        ("inf", "not numbers in out.2.bias"),
        ("grey", "takes 1 and gives 3"),
    ],
)
def test_wrong_file_is_one_sentence(name: str, sentence: str, openai_state: State, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    _damage(name, openai_state, path)
    with pytest.raises(CheckpointError, match=sentence) as raised:
        load_denoiser(path, CheckpointOptions(image_size=16, num_heads=4))
    assert_sentence(raised.value, path)


@pytest.mark.parametrize("kind", ["torch", "legacy", "safetensors"])
def test_damage_anywhere_is_a_sentence_or_harmless(kind: str, tmp_path: Path) -> None:
    """Cut at and garbled from many places, a file of any container raises CheckpointError or still loads."""
    path, rng = tmp_path / "model.bin", np.random.default_rng(0)
    config = UNetConfig(8, model_channels=32, channel_mult=(1,), num_res_blocks=1, attention_factors=())
    state = UNet(config).state_dict()
    if kind == "safetensors":
        save_file(state, path)
    else:
        torch.save(state, path, _use_new_zipfile_serialization=kind == "torch")
    data = path.read_bytes()
    for _ in range(40):
        place = int(min(rng.exponential(3000), len(data) - 1)) if rng.random() < 0.7 else int(rng.integers(len(data)))
        garbled = data[:place] + rng.bytes(8) + data[place + 8 :]
        path.write_bytes(data[:place] if rng.random() < 0.4 else garbled)
        try:
            load_denoiser(path, CheckpointOptions(image_size=8, num_heads=4))
        except CheckpointError as error:
            assert_sentence(error, path)


def test_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"folder without config\.json"):
        load_denoiser(tmp_path)


def test_half_a_safetensors_file(openai_state: State, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(openai_state, path)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match="no intact safetensors"):
        load_denoiser(path)


def test_half_precision_weights_become_float32(openai_state: State, tmp_path: Path) -> None:
    torch.save({key: value.half() for key, value in openai_state.items()}, tmp_path / "half.pt")
    denoiser = load_denoiser(tmp_path / "half.pt", CheckpointOptions(image_size=16, num_heads=4))
    assert {p.dtype for p in denoiser.network.parameters()} == {torch.float32}


def test_names_with_spaces_and_umlauts(openai_state: State, tmp_path: Path) -> None:
    folder = tmp_path / "Prüfling & Söhne (neu)"
    folder.mkdir()
    torch.save(openai_state, folder / "gute teile.pt")
    load_denoiser(folder / "gute teile.pt", CheckpointOptions(image_size=16, num_heads=4))
    shutil.rmtree(folder)
