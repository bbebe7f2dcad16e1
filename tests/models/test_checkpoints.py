"""Loaders against what the public code of each format computed, and every way a file can be wrong."""

import collections
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from mdps.models.checkpoints import (
    CheckpointError,
    CheckpointOptions,
    Denoiser,
    describe_checkpoint,
    load_denoiser,
    save_denoiser,
)
from mdps.models.unet import UNet, UNetConfig
from mdps.runtime.errors import UsageError
from mdps.runtime.schedule import NoiseSchedule

State = dict[str, torch.Tensor]

FORMATS = {
    "authors": (CheckpointOptions(image_size=32), "authors"),
    "ddad": (CheckpointOptions(image_size=32), "authors"),
    "anoddpm_strided": (CheckpointOptions(), "anoddpm"),
    "diffusionad": (CheckpointOptions(image_size=32), "diffusionad"),
    "openai_learned_sigma": (CheckpointOptions(image_size=32, num_head_channels=32), "openai"),
    "openai_pooled_legacy_attention": (CheckpointOptions(image_size=32, num_heads=1), "openai"),
    "openai_strided_new_attention": (CheckpointOptions(image_size=32, num_heads=4, new_attention_order=True), "openai"),
}


def wrap(name: str, state: State) -> dict[str, Any]:
    """The file layout that the golden JSON of that format states."""
    if name in ("authors", "ddad"):
        return {f"module.{key}": value for key, value in state.items()}
    if name == "anoddpm_strided":
        args: dict[str, Any] = collections.defaultdict(str)
        args.update(
            img_size=[32, 32], num_heads=1, num_head_channels=32, T=1000, beta_schedule="cosine", channel_mults=""
        )
        last = {key: value + 1 for key, value in state.items()}
        return {
            "n_epoch": 3,
            "model_state_dict": last,
            "optimizer_state_dict": {},
            "ema": state,
            "args": args,
            "loss": 0.1,
        }
    if name == "diffusionad":
        other = {"conv.weight": torch.zeros(1)}
        return {"n_epoch": 3, "unet_model_state_dict": state, "seg_model_state_dict": other, "args": {"T": 1000}}
    return dict(state)


def gradient(
    network: torch.nn.Module, x_t: torch.Tensor, t: torch.Tensor, a: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    """Gradient of the norm of x0_hat - y of each image with respect to x_t, by autograd."""
    x = x_t.clone().requires_grad_(True)
    a = a.reshape(-1, 1, 1, 1)
    x0_hat = (x - (1 - a).sqrt() * network(x, t)) / a.sqrt()
    norms = (x0_hat - y).flatten(1).norm(dim=1)
    return torch.autograd.grad(norms.sum(), x)[0]


def check(denoiser: Denoiser, golden: Mapping[str, NDArray[np.float32]]) -> None:
    x_t, t, y, a = (torch.from_numpy(golden[key]) for key in ("x_t", "t", "observation", "alphas_cumprod"))
    with torch.no_grad():
        eps = denoiser.network(x_t, t)
    np.testing.assert_allclose(eps.numpy(), golden["eps"], atol=1e-4, rtol=0)
    grad = gradient(denoiser.network, x_t, t, a, y)
    np.testing.assert_allclose(grad.numpy(), golden["guidance_gradient"], atol=1e-5, rtol=0)


@pytest.fixture
def state_of(shared: Path, formula_weights: Callable[..., dict[str, NDArray[np.float32]]]) -> Callable[[str], State]:
    def make(name: str) -> State:
        shapes = json.loads((shared / "golden" / "formats" / f"{name}.json").read_text())["state_dict"]
        return {key: torch.from_numpy(value) for key, value in formula_weights(shapes).items()}

    return make


@pytest.fixture
def small_state(small_weights: dict[str, NDArray[np.float32]]) -> State:
    return {key: torch.from_numpy(value.copy()) for key, value in small_weights.items()}


@pytest.fixture
def openai_state() -> State:
    torch.manual_seed(0)
    config = UNetConfig(image_size=16, model_channels=32, channel_mult=(1, 2), num_res_blocks=1, attention_factors=(2,))
    return UNet(config).state_dict()


@pytest.mark.parametrize("name", FORMATS)
def test_format_computes_what_its_public_code_computes(
    name: str, shared: Path, state_of: Callable[[str], State], tmp_path: Path
) -> None:
    options, label = FORMATS[name]
    path = tmp_path / "checkpoint"
    torch.save(wrap(name, state_of(name)), path)
    denoiser = load_denoiser(path, options)
    assert denoiser.report.format == label
    assert not denoiser.network.training
    assert not any(parameter.requires_grad for parameter in denoiser.network.parameters())
    check(denoiser, np.load(shared / "golden" / "formats" / f"{name}.npz"))


@pytest.mark.parametrize("name", FORMATS)
def test_safetensors_of_the_same_keys_load_the_same(
    name: str, shared: Path, state_of: Callable[[str], State], tmp_path: Path
) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({f"model.diffusion_model.{key}": value for key, value in state_of(name).items()}, path)
    options = CheckpointOptions(num_head_channels=32, image_size=32) if name == "anoddpm_strided" else FORMATS[name][0]
    check(load_denoiser(path, options), np.load(shared / "golden" / "formats" / f"{name}.npz"))


def test_reference_checkpoint_reproduces_its_denoiser_call(shared: Path) -> None:
    golden = np.load(shared / "golden" / "golden.npz")
    denoiser = load_denoiser(shared / "golden" / "checkpoint", CheckpointOptions(image_size=64))
    np.testing.assert_allclose(denoiser.schedule.alphas_cumprod, golden["alpha_bar_0_to_999"], atol=1e-6, rtol=0)
    x_t, t, y = (torch.from_numpy(np.atleast_1d(golden[key])) for key in ("call_x_t", "call_t", "y"))
    with torch.no_grad():
        eps = denoiser.network(x_t, t)
    np.testing.assert_allclose(eps.numpy(), golden["call_eps"], atol=1e-4, rtol=0)
    a = torch.tensor(float(np.asarray(golden["call_alpha_bar"]).reshape(-1)[0]))
    np.testing.assert_allclose(
        gradient(denoiser.network, x_t, t, a, y).numpy(), golden["call_grad_per_image"], atol=1e-5, rtol=0
    )


def small_step(network: torch.nn.Module, small: Mapping[str, NDArray[np.float32]]) -> NDArray[np.float32]:
    """First step of the unguided reference pass: x_180 -> x_160, on the numbers that travel with the clone."""
    alphas = NoiseSchedule.linear().alphas_cumprod
    a_t, a_s = float(alphas[180]), float(alphas[160])
    sigma = ((1 - a_s) / (1 - a_t) * (1 - a_t / a_s)) ** 0.5
    x = torch.from_numpy(small["reference_unguided_states"][:1])
    with torch.no_grad():
        eps = network(x, torch.tensor(180.0))
    x0 = (x - (1 - a_t) ** 0.5 * eps) / a_t**0.5
    noise = torch.from_numpy(small["reference_unguided_step_noise"][:1])
    return (a_s**0.5 * x0 + (1 - a_s - sigma**2) ** 0.5 * eps + sigma * noise).numpy()


def test_authors_format_without_the_shared_folder(
    small_state: State, small: Mapping[str, NDArray[np.float32]], tmp_path: Path
) -> None:
    torch.save(wrap("authors", small_state), tmp_path / "3000")
    network = load_denoiser(tmp_path / "3000", CheckpointOptions(image_size=32)).network
    np.testing.assert_allclose(small_step(network, small), small["reference_unguided_states"][1:2], atol=1e-4, rtol=0)


def test_the_golden_numbers_detect_a_loader_that_only_renames(
    small_state: State, small: Mapping[str, NDArray[np.float32]], tmp_path: Path
) -> None:
    torch.save(small_state, tmp_path / "3000")
    denoiser = load_denoiser(tmp_path / "3000", CheckpointOptions(image_size=32))
    renamed = denoiser.network.state_dict() | {"time_embed.0.weight": small_state["time_embedding.1.weight"]}
    wrong = UNet(denoiser.config)
    wrong.load_state_dict(renamed)
    off = np.abs(small_step(wrong, small) - small["reference_unguided_states"][1:2]).max()
    assert off > 1e-3


@pytest.mark.parametrize(
    "prefix",
    ["module.", "model.", "_orig_mod.", "ema_model.", "diffusion_model.", "model._orig_mod.module.", "denoiser."],
)
def test_prefixes_are_stripped_in_any_nesting(prefix: str, small_state: State, tmp_path: Path) -> None:
    torch.save(small_state, tmp_path / "plain.pt")
    state = {prefix + key: value for key, value in small_state.items()}
    if prefix != "_orig_mod.":  # there the whole module was compiled, so nothing can stand beside it
        state["loss.vgg.weight"] = torch.zeros(2)
    torch.save({"epoch": 1, "state_dict": state, "hyper_parameters": {"lr": 0.1}}, tmp_path / "wrapped.ckpt")
    plain = load_denoiser(tmp_path / "plain.pt").network.state_dict()
    denoiser = load_denoiser(tmp_path / "wrapped.ckpt")
    assert denoiser.report.format == "authors in lightning"
    assert denoiser.report.ignored == int(prefix != "_orig_mod.")
    assert all(torch.equal(value, plain[key]) for key, value in denoiser.network.state_dict().items())


def test_compiled_submodules_lose_their_prefix(openai_state: State, tmp_path: Path) -> None:
    torch.save(
        {key.replace("middle_block.", "middle_block._orig_mod."): v for key, v in openai_state.items()},
        tmp_path / "c.pt",
    )
    load_denoiser(tmp_path / "c.pt", CheckpointOptions(image_size=16, num_heads=4))


def test_averaged_weights_are_preferred(small_state: State, tmp_path: Path) -> None:
    last = {f"model.{key}": value + 1 for key, value in small_state.items()}
    averaged = {f"ema_model.module.{key}": value for key, value in small_state.items()}
    torch.save({"state_dict": last | averaged}, tmp_path / "a.ckpt")
    loaded = load_denoiser(tmp_path / "a.ckpt").network.state_dict()
    assert torch.equal(loaded["input_blocks.0.0.weight"], small_state["down.0.0.weight"])


def test_two_networks_are_not_guessed_between(small_state: State, tmp_path: Path) -> None:
    twice = {f"{name}.{key}": value for name in ("student", "teacher") for key, value in small_state.items()}
    torch.save(twice, tmp_path / "two.pt")
    with pytest.raises(CheckpointError, match="several networks"):
        load_denoiser(tmp_path / "two.pt")


def test_learned_variance_is_dropped(state_of: Callable[[str], State], tmp_path: Path) -> None:
    torch.save(state_of("openai_learned_sigma"), tmp_path / "s.pt")
    denoiser = load_denoiser(tmp_path / "s.pt", CheckpointOptions(image_size=32, num_head_channels=32))
    assert denoiser.config.out_channels == 3
    assert denoiser.report.inferred["learned_variance"] is True


def assert_sentence(error: Exception, path: Path) -> None:
    text = str(error)
    assert str(path) in text
    assert "\n" not in text
    assert len(text) < 400


# What the tensors cannot say


def test_published_defaults_are_reported_as_assumed(small_state: State, tmp_path: Path) -> None:
    torch.save(wrap("authors", small_state), tmp_path / "3000")
    report = load_denoiser(tmp_path / "3000").report
    assert report.assumed["num_heads"] == 4
    assert report.assumed["image_size"] == 256
    assert report.assumed["norm_groups"] == 32
    assert report.assumed["prediction"] == "eps"
    assert report.assumed["schedule"] == NoiseSchedule.linear().to_json()
    assert report.inferred["channel_mult"] == [1, 2]


def test_arguments_in_the_file_win_over_published_defaults(state_of: Callable[[str], State], tmp_path: Path) -> None:
    torch.save(wrap("anoddpm_strided", state_of("anoddpm_strided")), tmp_path / "a.pt")
    denoiser = load_denoiser(tmp_path / "a.pt")
    assert denoiser.config.image_size == 32
    assert denoiser.config.num_head_channels == 32
    assert denoiser.schedule == NoiseSchedule.cosine()
    assert set(denoiser.report.assumed) == {"new_attention_order", "norm_groups", "prediction"}


def test_anoddpm_stretches_its_linear_betas(state_of: Callable[[str], State], tmp_path: Path) -> None:
    """However many steps, the betas of its code sum to the same noise."""
    for steps, ends in ((1000, (1e-4, 0.02)), (500, (2e-4, 0.04))):
        saved = wrap("anoddpm_strided", state_of("anoddpm_strided"))
        saved["args"].update(T=steps, beta_schedule="linear")
        torch.save(saved, tmp_path / "a.pt")
        schedule = load_denoiser(tmp_path / "a.pt").schedule
        assert (schedule.betas[0], schedule.betas[-1], len(schedule)) == (*ends, steps)
    saved["args"].update(beta_schedule="sigmoid")
    torch.save(saved, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="sigmoid"):
        load_denoiser(tmp_path / "a.pt")


def test_openai_without_a_sidecar_names_the_options_to_give(openai_state: State, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save(openai_state, path)
    with pytest.raises(UsageError, match=r"model\.pt .*--num-heads or --num-head-channels, and --image-size"):
        load_denoiser(path)
    assert describe_checkpoint(path).needed == ["--num-heads or --num-head-channels", "--image-size"]
    assert "still needed" in str(describe_checkpoint(path))


def test_sidecar_supplies_and_options_win(openai_state: State, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save(openai_state, path)
    network = {"image_size": 16, "num_head_channels": 32, "use_new_attention_order": True, "attention_resolutions": "8"}
    sidecar = {"network": network, "schedule": {"kind": "cosine", "steps": 500}, "prediction": "v"}
    path.with_suffix(".json").write_text(json.dumps(sidecar))
    denoiser = load_denoiser(path)
    assert denoiser.config.num_head_channels == 32
    assert denoiser.config.new_attention_order
    assert denoiser.schedule == NoiseSchedule.cosine(500)
    assert denoiser.prediction == "v"
    stated = load_denoiser(path, CheckpointOptions(num_heads=2, prediction="x0", schedule=NoiseSchedule.linear(10)))
    assert stated.config.num_head_channels is None
    assert stated.config.num_heads == 2
    assert stated.prediction == "x0"
    assert len(stated.schedule) == 10
    assert stated.report.given["num_heads"] == {"value": 2, "by": "options"}
    assert stated.report.given["image_size"] == {"value": 16, "by": "sidecar model.json"}


def test_the_norm_groups_of_a_raw_file_are_assumed_or_given(openai_state: State, tmp_path: Path) -> None:
    """No tensor shows them, and another number is another function."""
    torch.save(openai_state, tmp_path / "model.pt")
    known = {"image_size": 16, "num_heads": 4}
    assert describe_checkpoint(tmp_path / "model.pt").assumed["norm_groups"] == 32
    assumed = load_denoiser(tmp_path / "model.pt", CheckpointOptions(**known))
    assert assumed.config.norm_groups == 32
    assert "norm_groups = 32" in assumed.report.assumptions()
    given = load_denoiser(tmp_path / "model.pt", CheckpointOptions(**known, norm_groups=16))
    assert given.config.norm_groups == 16
    assert given.report.given["norm_groups"] == {"value": 16, "by": "options"}
    assert "norm_groups" not in given.report.assumed
    noise = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    assert not torch.allclose(given.network(noise, torch.tensor(9.0)), assumed.network(noise, torch.tensor(9.0)))


def test_norm_groups_that_divide_no_level_are_asked_for_by_name(tmp_path: Path) -> None:
    config = UNetConfig(image_size=16, model_channels=20, channel_mult=(1, 2), num_res_blocks=1, norm_groups=5)
    torch.save(UNet(config).state_dict(), tmp_path / "model.pt")
    known = {"image_size": 16, "num_heads": 4}
    remedy = r"give --norm-groups \(1 or 2 or 4 or 5 or 10 or 20\)"
    with pytest.raises(CheckpointError, match=remedy) as raised:
        load_denoiser(tmp_path / "model.pt", CheckpointOptions(**known))
    assert_sentence(raised.value, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=f"20 channels, which 8 normalisation groups do not divide: {remedy}"):
        load_denoiser(tmp_path / "model.pt", CheckpointOptions(**known, norm_groups=8))
    assert load_denoiser(tmp_path / "model.pt", CheckpointOptions(**known, norm_groups=5)).config.norm_groups == 5


BETAS = {
    "linear": NoiseSchedule.linear(500, 2e-4, 0.04),
    "scaled_linear": NoiseSchedule.scaled_linear(),
    "cosine": NoiseSchedule.cosine(500),
    "given": NoiseSchedule((0.1, 0.3, 0.2)),
}


@pytest.mark.parametrize("kind", BETAS)
@pytest.mark.parametrize("prefix", ["", "model.", "diffusion.model."])
def test_betas_kept_beside_the_network_are_its_schedule(
    kind: str, prefix: str, openai_state: State, tmp_path: Path
) -> None:
    """As Lightning modules and GaussianDiffusion keep them, with constants that follow from them."""
    betas = torch.tensor(BETAS[kind].betas, dtype=torch.float64).float()
    owner = prefix.removesuffix("model.")
    constants = {"betas": betas, "alphas_cumprod": (1 - betas).cumprod(0), "sqrt_recip_alphas_cumprod": betas}
    state = {prefix + key: value for key, value in openai_state.items()}
    torch.save({"model": state | {owner + key: value for key, value in constants.items()}}, tmp_path / "model.pt")
    denoiser = load_denoiser(tmp_path / "model.pt", CheckpointOptions(image_size=16, num_heads=4))
    assert denoiser.schedule.to_json()["kind"] == kind
    np.testing.assert_allclose(denoiser.schedule.betas, BETAS[kind].betas, rtol=1e-15 if kind != "given" else 1e-7)
    assert denoiser.report.given["schedule"]["by"] == "file"
    assert denoiser.report.ignored == 3
    chosen = CheckpointOptions(image_size=16, num_heads=4, schedule=NoiseSchedule.linear(10))
    assert len(load_denoiser(tmp_path / "model.pt", chosen).schedule) == 10


def test_betas_of_another_network_are_not_read(openai_state: State, tmp_path: Path) -> None:
    state = {f"model.{key}": value for key, value in openai_state.items()}
    torch.save(state | {"teacher.betas": torch.full((7,), 0.5)}, tmp_path / "model.pt")
    denoiser = load_denoiser(tmp_path / "model.pt", CheckpointOptions(image_size=16, num_heads=4))
    assert denoiser.report.assumed["schedule"] == NoiseSchedule.linear().to_json()


@pytest.mark.parametrize(
    ("betas", "sentence"),
    [
        (torch.full((3, 2), 0.1), r"the shape \[3, 2\]"),
        (torch.tensor([0.1, 1.5]), "between 0 and 1"),
        (torch.tensor([0.1, float("nan")]), "between 0 and 1"),
        (torch.tensor([]), "at least one beta"),
        (torch.arange(3), "int64"),
    ],
)
def test_betas_that_are_no_schedule_are_named(
    betas: torch.Tensor, sentence: str, openai_state: State, tmp_path: Path
) -> None:
    torch.save(openai_state | {"betas": betas}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=sentence) as raised:
        load_denoiser(tmp_path / "model.pt", CheckpointOptions(image_size=16, num_heads=4))
    assert_sentence(raised.value, tmp_path / "model.pt")
    assert "betas" in str(raised.value)


def test_our_field_names_serve_in_a_sidecar(openai_state: State, tmp_path: Path) -> None:
    torch.save(openai_state, tmp_path / "model.pt")
    config = UNetConfig(image_size=16, model_channels=32, channel_mult=(1, 2), num_res_blocks=1, attention_factors=(2,))
    (tmp_path / "model.pt.json").write_text(json.dumps({"network": config.to_json()}))
    assert load_denoiser(tmp_path / "model.pt").config == config


@pytest.mark.parametrize(
    ("sidecar", "sentence"),
    [
        ("{", "no JSON"),
        ("[]", "describes no denoiser"),
        ('{"loss": 1}', "describes no denoiser"),
        ('{"network": {"image_sise": 16}}', "image_sise"),
        ('{"network": {"image_size": "big"}}', "image_size = 'big'"),
        ('{"network": {"num_classes": 1000}}', "num_classes = 1000"),
        (
            '{"network": {"image_size": 16, "num_heads": 4, "model_channels": 64}}',
            "model_channels = 64, while the tensors",
        ),
        ('{"network": {"num_heads": 4, "image_size": 16, "channel_mult": "1,4"}}', "channel_mult"),
        ('{"schedule": {"kind": "sigmoid"}}', "schedule"),
        ('{"prediction": "noise"}', "prediction 'noise'"),
    ],
)
def test_wrong_sidecar_is_one_sentence(sidecar: str, sentence: str, openai_state: State, tmp_path: Path) -> None:
    torch.save(openai_state, tmp_path / "model.pt")
    (tmp_path / "model.json").write_text(sidecar)
    with pytest.raises(CheckpointError, match=sentence) as raised:
        load_denoiser(tmp_path / "model.pt")
    assert_sentence(raised.value, tmp_path / "model.pt")


@pytest.mark.parametrize(
    "wrong",
    [
        {"image_size": 0},
        {"norm_groups": 0},
        {"num_heads": -1},
        {"num_heads": 2, "num_head_channels": 3},
        {"prediction": "noise"},
    ],
)
def test_impossible_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        CheckpointOptions(**wrong)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (CheckpointOptions(image_size=15, num_heads=4), "--image-size"),
        (CheckpointOptions(image_size=16, num_heads=5), "--num-heads"),
    ],
)
def test_options_that_do_not_fit_name_themselves(
    options: CheckpointOptions, sentence: str, openai_state: State, tmp_path: Path
) -> None:
    torch.save(openai_state, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=sentence):
        load_denoiser(tmp_path / "model.pt", options)


def test_real_checkpoint_with_its_sidecar(shared: Path) -> None:
    denoiser = load_denoiser(shared / "checkpoints" / "bottle_64_openai.pt")
    assert denoiser.report.parameters == 1_914_723
    assert denoiser.config.image_size == 64
    assert denoiser.config.num_head_channels == 32
    json.dumps(denoiser.report.to_json())


# Our own format


def test_own_format_needs_no_options(openai_state: State, tmp_path: Path) -> None:
    torch.save(openai_state, tmp_path / "model.pt")
    first = load_denoiser(
        tmp_path / "model.pt", CheckpointOptions(image_size=16, num_head_channels=32, new_attention_order=True)
    )
    schedule, notes, prep = NoiseSchedule.cosine(100), {"images": 209}, {"image_size": [16, 16], "crop": "none"}
    save_denoiser(tmp_path / "own.safetensors", first.network, schedule, "v", prep, notes)
    (tmp_path / "own.json").write_text('{"loss": [1, 2]}')  # a training log, say: the header needs no help
    again = load_denoiser(tmp_path / "own.safetensors")
    assert again.report.format == "mdps"
    assert again.report.assumed == {}
    assert (again.config, again.schedule, again.prediction) == (first.config, schedule, "v")
    assert (again.preprocessing, again.extra) == (prep, notes)
    x, t = torch.randn(1, 3, 16, 16), torch.tensor(7.0)
    torch.testing.assert_close(first.network(x, t), again.network(x, t), atol=1e-5, rtol=0)
    weights = again.network.state_dict()
    assert all(torch.equal(value, weights[key]) for key, value in first.network.state_dict().items())
    assert [p.name for p in tmp_path.iterdir() if "tmp" in p.name] == []


@pytest.mark.parametrize(
    "entry", ["{", "{}", '{"format_version": 99}', '{"format_version": 1, "network": {"image_size": 16, "colour": 1}}']
)
def test_own_format_with_a_wrong_header(entry: str, openai_state: State, tmp_path: Path) -> None:
    save_file(openai_state, tmp_path / "own.safetensors", metadata={"mdps": entry})
    with pytest.raises(CheckpointError) as raised:
        load_denoiser(tmp_path / "own.safetensors")
    assert_sentence(raised.value, tmp_path / "own.safetensors")
