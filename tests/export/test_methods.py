"""The other detectors as settings of the one sampler: against diffusers' schedulers, and exported through the gate."""

from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler, RePaintScheduler
from torch import Tensor, nn

from mdps.export import ExportOptions, export_bundle
from mdps.export.methods import METHODS, method
from mdps.export.single_file import export_single_file
from mdps.export.step import GuidedStep, PlainStep, StepRules
from mdps.models import oracle as oracles
from mdps.models.backbones import load_backbone
from mdps.models.checkpoints import CheckpointOptions
from mdps.models.oracle_setup import eps_of, features_of, oracle_of
from mdps.runtime import load
from mdps.runtime.bundle import Bundle
from mdps.runtime.calibration import Calibration
from mdps.runtime.engines import named
from mdps.runtime.errors import UsageError
from mdps.runtime.graphs import DDAD, Graphs
from mdps.runtime.loading import open_graphs
from mdps.runtime.manifest import Manifest
from mdps.runtime.noise import INITIAL, JUMP, KNOWN, NoiseBank
from mdps.runtime.sampler import posterior_sampling
from mdps.runtime.schedule import NoiseSchedule, plan_steps
from mdps.runtime.session import CopyingRun
from mdps.runtime.settings import PassSettings, SamplerSettings

SHAPE = (3, 8, 8)
SCHEDULE = NoiseSchedule.linear()
BETAS = {"beta_start": 1e-4, "beta_end": 0.02, "beta_schedule": "linear", "clip_sample": False}
BANK = NoiseBank(0, SHAPE)


def eps_of_gaussian(x: Tensor, a: Any) -> Tensor:
    """The exact denoiser where every pixel of the data is drawn from N(0.2, 0.3^2), and what its neighbours add.

    Without them nothing outside a mask could change what is found inside.
    """
    expected = (0.09 * a**0.5 * x + (1 - a) * 0.2) / (a * 0.09 + 1 - a)
    alone = (x - a**0.5 * expected) / (1 - a) ** 0.5
    return alone + 0.2 * (x.roll(3, -1) - x.roll(2, -2))


class GaussianDenoiser(nn.Module):
    def forward(self, x_t: Tensor, timestep: Tensor, alpha_t: Tensor) -> Tensor:
        return eps_of_gaussian(x_t, alpha_t)


class ModuleSession:
    """A step module as a session."""

    provider = "torch"
    outputs: tuple[str, ...]

    def __init__(self, sampler: SamplerSettings, guided: bool = False) -> None:
        rules = StepRules(sampler.mask_rule, sampler.guidance_norm, sampler.gradient)
        self.module = (GuidedStep if guided else PlainStep)(GaussianDenoiser(), rules)  # type: ignore[arg-type]
        names = ("x_t", "observation", "mask", "noise", "mask_noise", "timestep", "alpha_t", "alpha_s", "sigma_t")
        self.inputs = (*names, "guidance_scale") if guided else names
        self.outputs = ("x_s", "eps", "guidance_gradient") if guided else ("x_s", "eps")

    def run(self, feeds: Any, outputs: Any = None) -> dict[str, np.ndarray]:
        found = self.module(*(torch.tensor(feeds[name]) for name in self.inputs))
        return {name: value.numpy() for name, value in zip(self.outputs, found, strict=True)}

    def bind(self, feeds: Any) -> CopyingRun:
        return CopyingRun(self, feeds)

    def close(self) -> None:
        pass


def sample(
    sampler: SamplerSettings, y: np.ndarray, mask: np.ndarray, index: int, bank: Any = BANK, previous: Any = None
) -> np.ndarray:
    sessions = Graphs(ModuleSession(sampler, guided=True), ModuleSession(sampler))
    *_, last = posterior_sampling(sessions, SCHEDULE, sampler, y, mask, index, bank, previous)
    return last.x


def images(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, (count, *SHAPE)).astype(np.float32)


def half_mask(count: int) -> np.ndarray:
    mask = np.zeros((count, 1, 8, 8), dtype=np.float32)
    mask[..., 2:6] = 1
    return mask


@pytest.mark.parametrize("kind", ["gaussian", "simplex"])
def test_anoddpm_is_ancestral_sampling_of_diffusers(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """DDPM with the posterior's variance ("fixed_small") is DDIM at eta 1 and a stride of one."""
    sampler = method("anoddpm", (8, 8)).sampler
    y, bank = images(2), NoiseBank(0, SHAPE, kind)
    theirs = DDPMScheduler(variance_type="fixed_small", **BETAS)
    theirs.set_timesteps(1000)
    x = theirs.add_noise(torch.tensor(y), torch.tensor(bank.draw(0, INITIAL, 1)), torch.tensor([249]))
    for n, t in enumerate(range(249, -1, -1)):
        noise = torch.from_numpy(np.tile(bank.draw(0, n, 1), (2, 1, 1, 1)))
        monkeypatch.setattr("diffusers.schedulers.scheduling_ddpm.randn_tensor", lambda *_, z=noise, **__: z)
        eps = eps_of_gaussian(x.double(), float(theirs.alphas_cumprod[t])).float()
        x = theirs.step(eps, t, x).prev_sample
    found = sample(sampler, y, np.ones_like(y[:, :1]), 0, bank)
    np.testing.assert_allclose(found, x.numpy(), atol=2e-4)
    assert np.abs(found - y).max() > 0.1


class _Played:
    """RePaint's noises as ours: its known part is noised before the way back, ours after it."""

    def __init__(self, made: list[Tensor], back: list[Tensor], steps: Any) -> None:
        self.made, self.back, self.steps = made, back, steps

    def draw(self, pass_index: int, step_index: int, samples: int, images: int = 1) -> np.ndarray:
        if step_index == INITIAL or step_index < KNOWN:
            return (
                BANK.draw(pass_index, step_index, samples) if step_index == INITIAL else self.made[step_index].numpy()
            )
        if step_index >= JUMP:
            return self.back[step_index - JUMP].numpy()
        before = self.steps[step_index - KNOWN - 1]
        z = self.made[step_index - KNOWN - 1]  # diffusers takes one noise for step and known part
        if before.again:
            ratio = before.alpha_t / before.alpha_s
            total = (1 - before.alpha_t) ** 0.5
            z = (
                (ratio * (1 - before.alpha_s)) ** 0.5 * z + (1 - ratio) ** 0.5 * self.back[step_index - KNOWN - 1]
            ) / total
        return z.numpy().astype(np.float32)


def test_resampling_is_repaint_of_diffusers(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = method("autoddpm", (8, 8)).sampler
    y, mask, previous = images(1), half_mask(1), images(1, seed=5)
    _, steps = plan_steps(SCHEDULE, "paper", sampler.passes[1], 1.0)
    assert len(steps) == 49 * 5 + 1
    draw = np.random.default_rng(1)
    made, back = ([torch.from_numpy(draw.normal(size=(1, *SHAPE)).astype(np.float32)) for _ in steps] for _ in "ab")

    theirs = RePaintScheduler(eta=1.0, **BETAS)
    theirs.set_timesteps(1000, jump_length=1, jump_n_sample=5)
    start = torch.from_numpy(np.where(mask > 0, previous, y))
    a = float(SCHEDULE.alphas_cumprod[49])
    x = a**0.5 * start + (1 - a) ** 0.5 * torch.tensor(BANK.draw(1, INITIAL, 1))
    noises: list[Tensor] = []
    monkeypatch.setattr("diffusers.schedulers.scheduling_repaint.randn_tensor", lambda *_, **__: noises.pop())
    known = torch.from_numpy(1 - mask)
    for n, step in enumerate(steps):
        t = int(step.timestep)
        noises.append(made[n])
        x = theirs.step(eps_of_gaussian(x, step.alpha_t), t, x, torch.from_numpy(y), known).prev_sample
        if step.again:
            noises.append(back[n])
            x = theirs.undo_step(x, t)
    found = sample(sampler, y, mask, 1, _Played(made, back, steps), previous)
    np.testing.assert_allclose(found, x.numpy(), atol=5e-4)
    np.testing.assert_array_equal(found[..., :2], y[..., :2])
    assert np.abs(found[..., 2:6] - y[..., 2:6]).max() > 0.1


def test_ddad_is_its_publications_update() -> None:
    """Conditioned noise, predicted image and DDIM step as printed, at the times of its code."""
    sampler, y = method("ddad", (8, 8)).sampler, images(2)
    alpha = np.cumprod(1 - np.linspace(1e-4, 0.02, 1000))
    x = alpha[250] ** 0.5 * y + (1 - alpha[250]) ** 0.5 * BANK.draw(0, INITIAL, 1)
    times = list(range(0, 250, 25))
    for n, (t, s) in enumerate(zip(reversed(times), [*reversed(times[:-1]), -1], strict=True)):
        a, a_s = alpha[t], alpha[s] if s >= 0 else 1.0
        eps = eps_of_gaussian(torch.from_numpy(x), a).numpy()
        y_t = a**0.5 * y + (1 - a) ** 0.5 * eps
        eps = eps - 4 * (1 - a) ** 0.5 * (y_t - x)
        sigma = ((1 - a_s) / (1 - a) * (1 - a / a_s)) ** 0.5
        noise = BANK.draw(0, n, 1) if s >= 0 else 0
        x = a_s**0.5 * (x - (1 - a) ** 0.5 * eps) / a**0.5 + (1 - a_s - sigma**2) ** 0.5 * eps + sigma * noise
    np.testing.assert_allclose(sample(sampler, y, np.ones_like(y[:, :1]), 0), x, atol=2e-4)


@pytest.mark.parametrize("rule", ["blend", "replace", "inpaint"])
def test_diffusionad_is_its_publications_update(rule: Any) -> None:
    """norm_guided_one_step_denoising_eval of its code, without its clamp: at the times 249 and 99, under no mask."""
    sampler, y = replace(method("diffusionad", (8, 8)).sampler, mask_rule=rule), images(2)
    alpha = np.cumprod(1 - np.linspace(1e-4, 0.02, 1000))
    noisier, normal = alpha[249], alpha[99]

    def denoised(x: np.ndarray, a: float, eps: np.ndarray) -> np.ndarray:
        return x / a**0.5 - (1 / a - 1) ** 0.5 * eps

    x = noisier**0.5 * y + (1 - noisier) ** 0.5 * BANK.draw(0, INITIAL, 1)
    x0 = denoised(x, noisier, eps_of_gaussian(torch.from_numpy(x), noisier).numpy())
    first = sample(sampler, y, np.ones_like(y[:, :1]), 0)
    np.testing.assert_allclose(first, x0, atol=2e-4)

    x = normal**0.5 * y + (1 - normal) ** 0.5 * BANK.draw(1, INITIAL, 1)
    eps = eps_of_gaussian(torch.from_numpy(x), normal).numpy()
    towards = normal**0.5 * x0 + (1 - normal) ** 0.5 * eps
    wanted = denoised(x, normal, eps - (1 - normal) ** 0.5 * 1 * (towards - x))
    found = sample(sampler, y, half_mask(2), 1, previous=first)
    np.testing.assert_allclose(found, wanted, atol=2e-4)
    unguided = sample(replace(sampler, masked_pass=replace(sampler.passes[1], guidance_scale=0.0)), y, half_mask(2), 1,
                      previous=first)  # fmt: skip
    assert np.abs(found - unguided).max() > 0.1
    with pytest.raises(UsageError, match="none were given"):
        sample(sampler, y, half_mask(2), 1)


def test_the_map_of_the_noise_error_is_that_error() -> None:
    settings = method("noise-error", (8, 8))
    y, z, a = images(2), BANK.draw(0, INITIAL, 1), SCHEDULE.alphas_cumprod[49]
    x0 = sample(settings.sampler, y, np.ones_like(y[:, :1]), 0)
    eps = eps_of_gaussian(torch.from_numpy(a**0.5 * y + (1 - a) ** 0.5 * z), a).numpy()
    found = settings.score.eta * ((y - x0) ** 2).sum(axis=1)
    np.testing.assert_allclose(found, ((z - eps) ** 2).mean(axis=1), rtol=1e-2, atol=1e-4)
    cosine, options = NoiseSchedule.cosine(), ExportOptions(method="noise-error", noise_level=80)
    b = cosine.alphas_cumprod[79]
    assert options.settings((8, 8), schedule=cosine).score.eta == pytest.approx(b / (1 - b) / 3)
    assert replace(options, eta=2.0).settings((8, 8), schedule=cosine).score.eta == 2.0
    with pytest.raises(UsageError, match="noise level 1001 is beyond"):
        replace(options, noise_level=1001).settings((8, 8))


def test_a_pair_has_a_noise_and_its_negative() -> None:
    settings = method("noise-pair", (8, 8))
    bank, y = NoiseBank.of(settings.sampler, (8, 8)), images(1)
    first = next(
        posterior_sampling(
            Graphs(None, ModuleSession(settings.sampler)), SCHEDULE, settings.sampler, y, half_mask(1), 0, bank
        )
    ).x
    np.testing.assert_allclose(first.mean(axis=0), SCHEDULE.alphas_cumprod[199] ** 0.5 * y[0], atol=1e-6)
    assert np.abs(first[0] - first[1]).max() > 0.5
    with pytest.raises(UsageError, match="come in pairs"):
        ExportOptions(method="noise-pair", samples=3).settings((8, 8))
    assert ExportOptions(method="noise-pair", samples=4).settings((8, 8)).sampler.samples == 4


@pytest.mark.parametrize("name", ["autoddpm", "ddad", "diffusionad"])
def test_a_result_depends_on_neither_batch_nor_order(name: str) -> None:
    sampler = method(name, (8, 8)).sampler
    sampler = replace(sampler, samples=2, first_pass=replace(sampler.first_pass, **_few(sampler.first_pass)))
    index = len(sampler.passes) - 1
    y, m, previous = images(4), half_mask(4), images(8, seed=3)
    m[1] = 1  # an image whose mask is full has no known part
    together = sample(sampler, y, m, index, previous=previous).reshape(4, 2, *SHAPE)
    order = [2, 0, 3, 1]
    shuffled = previous.reshape(4, 2, *SHAPE)[order].reshape(8, *SHAPE)
    found = sample(sampler, y[order], m[order], index, previous=shuffled).reshape(4, 2, *SHAPE)
    np.testing.assert_allclose(found, together[order], atol=1e-5)
    for i in range(4):
        alone = sample(sampler, y[i : i + 1], m[i : i + 1], index, previous=previous[2 * i : 2 * i + 2])
        np.testing.assert_allclose(alone, together[i], atol=1e-5)


def _few(one: PassSettings) -> dict[str, Any]:
    return {"steps": 10} if one.steps else {}


def test_a_stitched_pass_starts_from_both_and_needs_them() -> None:
    sampler = method("autoddpm", (8, 8)).sampler
    y, mask, previous = images(1), half_mask(1), images(1, seed=5)
    sessions = Graphs(None, ModuleSession(sampler))
    first = next(posterior_sampling(sessions, SCHEDULE, sampler, y, mask, 1, BANK, previous)).x
    a, z = SCHEDULE.alphas_cumprod[49], BANK.draw(1, INITIAL, 1)
    np.testing.assert_allclose(first, a**0.5 * (mask * previous + (1 - mask) * y) + (1 - a) ** 0.5 * z, atol=1e-6)
    with pytest.raises(UsageError, match="none were given"):
        sample(sampler, images(1), half_mask(1), 1)


def test_no_method_but_mdps_calls_for_a_backward_pass() -> None:
    for name in METHODS:
        sampler = method(name, (64, 64)).sampler
        backward = any(one.guidance_scale for one in sampler.passes) and sampler.gradient == "exact"
        assert backward == (name == "mdps"), name
        assert method(name, (64, 64)).mode == ("paper" if name == "mdps" else name)
    with pytest.raises(
        UsageError, match="mdps, ddim, anoddpm, autoddpm, ddad, one-call, noise-pair, diffusionad, noise"
    ):
        method("ddpm", (64, 64))


OPTIONS = ExportOptions(backbone="random_tiny", load=CheckpointOptions(image_size=32))
SHORT = {"ddim": {"steps": 5}, "anoddpm": {"steps": 25}, "autoddpm": {"steps": 20}, "ddad": {}}
MNN = {"engine": "mnn"} if find_spec("MNN") else {}
FEW = dict.fromkeys(("one-call", "noise-pair", "diffusionad", "noise-error"), MNN)


@pytest.fixture(scope="module", params=SHORT | FEW)
def exported(request: pytest.FixtureRequest, small_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of each method with few steps, which has passed the gate."""
    options = replace(OPTIONS, method=request.param, **(SHORT | FEW)[request.param])
    return export_bundle(small_checkpoint, tmp_path_factory.mktemp("methods") / request.param, options)


def picture(seed: int) -> np.ndarray:
    return np.random.RandomState(seed).randint(0, 256, (40, 40, 3), dtype=np.uint8)


def test_each_method_is_exported_judges_and_repeats(exported: Path) -> None:
    manifest = Manifest.read(exported)
    assert manifest.settings.mode == exported.name
    assert {"plain_step", "score"} <= set(manifest.graphs)
    assert ("guided_step" in manifest.graphs) == (exported.name in ("ddad", "diffusionad"))
    assert ("ddad_step" in manifest.graphs) == ("guided_step" not in manifest.graphs)
    assert ("features" in manifest.graphs) == (exported.name not in ("anoddpm", "noise-error"))
    with load(exported, calibrated=False) as detector:
        one, two = detector(picture(1)), detector.batch([picture(2), picture(1)])[1]
    assert abs(one.score - two.score) < 1e-5
    assert np.abs(one.anomaly_map - two.anomaly_map).max() < 1e-5
    assert one.score > 0
    if exported.name == "autoddpm":
        assert 0 < one.mask.mean() < 1
        outside = np.broadcast_to(~one.mask, one.observation.shape)
        np.testing.assert_array_equal(one.posterior_sample[outside], one.observation[outside])


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino", "mnn"])
def test_each_method_gives_the_same_on_every_engine_as_in_torch(
    exported: Path, engine: str, small_denoiser: Any
) -> None:
    pytest.importorskip("MNN" if engine == "mnn" else engine)
    manifest = Manifest.read(exported)
    if not manifest.serves(named(engine)):
        pytest.skip("exported without this engine's own files")
    with load(exported, calibrated=False, engine=engine, warm_up=False) as detector:
        found = detector(picture(1))
    wanted_map, wanted_score = in_torch(manifest, small_denoiser, torch.from_numpy(found.observation[None]))
    assert found.score == pytest.approx(wanted_score, rel=1e-3)
    np.testing.assert_allclose(found.anomaly_map, wanted_map, atol=2e-3 * wanted_map.max())


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino", "mnn"])
def test_ddads_step_of_any_bundle_is_its_publications_update(exported: Path, engine: str, small_network: Any) -> None:
    """On every engine, under half a mask, with the network in torch."""
    pytest.importorskip("MNN" if engine == "mnn" else engine)
    bundle = Bundle.read(exported)
    if DDAD not in bundle.manifest.graphs or not bundle.manifest.serves(named(engine)):
        pytest.skip("no such step, or no files of this engine's own")
    x, y, z = (
        torch.from_numpy(np.random.default_rng(seed).normal(size=(2, 3, 32, 32)).astype(np.float32))
        for seed in range(3)
    )
    mask, a, b, sigma, w = torch.zeros(2, 1, 32, 32), 0.6, 0.7, 0.1, 4.0
    mask[..., :16] = 1
    scalars = {"timestep": 99.0, "alpha_t": a, "alpha_s": b, "sigma_t": sigma, "guidance_scale": w}
    feeds = {"x_t": x, "observation": y, "mask": mask, "noise": z} | {k: torch.tensor(v) for k, v in scalars.items()}
    feeds["mask_noise"] = torch.zeros_like(z)
    with ExitStack() as opened:
        session = open_graphs(bundle, opened, engine=engine).need(DDAD)
        found = session.run({name: feeds[name].numpy() for name in session.inputs})
    if bundle.settings.sampler.mask_rule != "blend":
        x = mask * x + (1 - mask) * a**0.5 * y
    with torch.no_grad():
        eps = small_network(x, torch.tensor(99.0))[:, :3]
    conditioned = eps - w * (1 - a) ** 0.5 * (a**0.5 * y + (1 - a) ** 0.5 * eps - x)
    if bundle.settings.sampler.mask_rule == "blend":
        conditioned = mask * conditioned + (1 - mask) * (x - a**0.5 * y) / (1 - a) ** 0.5
    x0 = (x - (1 - a) ** 0.5 * conditioned) / a**0.5
    wanted = b**0.5 * x0 + (1 - b - sigma**2) ** 0.5 * conditioned + sigma * z
    np.testing.assert_allclose(found["x_s"], wanted, atol=1e-3 * float(wanted.abs().max()))


def in_torch(manifest: Manifest, denoiser: Any, y: Tensor) -> tuple[np.ndarray, float]:
    """Map [H, W] and score by the oracle, which shares no code with the runtime."""
    settings, schedule = manifest.settings, manifest.schedule
    stages, sampler = settings.score.stages, settings.sampler
    backbone = load_backbone(settings.score.backbone, None, stages) if stages else None
    bank, passes = NoiseBank.of(sampler, manifest.preprocessing.network_size), []
    for index, one in enumerate(sampler.passes):
        steps = range(len(plan_steps(schedule, sampler.time_index, one, sampler.eta_ddim)[1]))
        drawn = [
            [torch.tensor(bank.draw(index, kind + n, sampler.samples)) for n in steps] for kind in (0, KNOWN, JUMP)
        ]
        first = torch.tensor(bank.draw(index, INITIAL, sampler.samples))
        passes.append((oracle_of(settings, schedule.betas, index), oracles.Noise(first, *drawn)))
    with torch.no_grad():
        eps = eps_of(denoiser.network, denoiser.prediction, schedule)
        anomaly_map, score, _, _ = oracles.mdps(eps, features_of(backbone, settings), y, passes)
    return anomaly_map[0, 0].numpy(), float(score[0])


def test_a_single_file_holds_a_method_or_says_that_it_does_not(exported: Path, tmp_path: Path) -> None:
    manifest = Manifest.read(exported)
    samples = manifest.settings.sampler.samples
    calibration = Calibration(0.5, 0.05, 0.05, 20, 0.0, 1.5, 0.0, 1.25, samples, 0)
    manifest.with_calibration("default", calibration).write(exported)
    if exported.name == "autoddpm":
        with pytest.raises(UsageError, match="AutoDDPM"):
            export_single_file(exported, tmp_path / "one.onnx")
    else:  # compares with the bundle before it gives the file its name
        assert export_single_file(exported, tmp_path / "one.onnx").is_file()


def test_the_traced_backend_inpaints_and_resamples_under_ddads_gradient(small_checkpoint: Path, tmp_path: Path) -> None:
    options = replace(
        OPTIONS, method="autoddpm", gradient="ddad", guidance_backend="traced", guidance_scale=1.0, steps=8
    )
    bundle = export_bundle(small_checkpoint, tmp_path / "traced", options)
    assert Manifest.read(bundle).graphs["guided_step"].session == "traced"


def test_simplex_noise_is_what_a_checkpoint_trained_on_it_gets(small_denoiser: Any, tmp_path: Path) -> None:
    from mdps.models.checkpoints import save_denoiser

    path, said = tmp_path / "denoiser.safetensors", []
    save_denoiser(path, small_denoiser.network, SCHEDULE, extra={"training": {"noise": "simplex"}})
    options = ExportOptions(method="anoddpm", steps=5, backbone="random_tiny")
    bundle = export_bundle(path, tmp_path / "a", options, say=said.append)
    assert Manifest.read(bundle).settings.sampler.noise == "simplex"
    assert not [line for line in said if "Warning" in line]
    with load(bundle, calibrated=False) as detector:
        assert detector(picture(0)).score > 0
    export_bundle(path, tmp_path / "b", replace(options, noise="gaussian"), say=said.append)
    assert "was trained on simplex noise" in next(line for line in said if "Warning" in line)


def test_a_checkpoint_that_does_not_know_simplex_noise_is_warned_of(small_checkpoint: Path, tmp_path: Path) -> None:
    said: list[str] = []
    export_bundle(
        small_checkpoint, tmp_path / "a", replace(OPTIONS, method="anoddpm", steps=5, noise="simplex"), say=said.append
    )
    assert "cannot tell simplex noise from defects" in next(line for line in said if "Warning" in line)
