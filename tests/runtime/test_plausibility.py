"""A denoiser that was read wrongly, or trained too little, is told from one that knows the good parts."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mdps.benchmarks.data.textures import TextureSet
from mdps.benchmarks.demo import CHECKPOINT, PHOTO
from mdps.models.checkpoints import load_denoiser
from mdps.models.unet import UNet
from mdps.runtime import load
from mdps.runtime.calibration import linear_error, noise_doubt, noise_error
from mdps.runtime.preprocessing import Preprocessing
from mdps.runtime.schedule import Step
from mdps.runtime.settings import paper_settings


class TorchDetector:
    """The network of a checkpoint, as a detector asks it for the noise."""

    def __init__(self, denoiser, noise="gaussian", prediction="eps"):
        self.network, self.prediction = denoiser.network, prediction
        self.schedule = denoiser.schedule
        self.settings = SimpleNamespace(sampler=replace(paper_settings((64, 64)).sampler, noise=noise))

    def predicted_noise(self, noised, step):
        with torch.no_grad():
            out = self.network(torch.from_numpy(noised), torch.tensor(step.timestep)).numpy()
        a = step.alpha_t
        return {
            "eps": out,
            "v": a**0.5 * out + (1 - a) ** 0.5 * noised,
            "x0": (noised - a**0.5 * out) / (1 - a) ** 0.5,
        }[self.prediction]


def remade(denoiser, **changes):
    network = UNet(replace(denoiser.config, **changes))
    network.load_state_dict(denoiser.network.state_dict())
    return replace(denoiser, network=network.eval())


@pytest.fixture(scope="module")
def demo():
    images = list(TextureSet(PHOTO).calibration())[:8]
    return load_denoiser(CHECKPOINT), np.stack([Preprocessing((64, 64))(image) for image in images])


def check_denoiser(denoiser, images):
    """A checkpoint read rightly is not doubted, and is wherever it is read as another function."""
    assert noise_doubt(TorchDetector(denoiser), images) == ""
    wrong = [TorchDetector(remade(denoiser, norm_groups=groups)) for groups in (16, 8, 1)]
    wrong += [TorchDetector(denoiser, prediction=prediction) for prediction in ("v", "x0")]
    wrong += [TorchDetector(replace(denoiser, network=UNet(denoiser.config).eval()))]  # nobody trained it
    for detector in wrong:
        doubt = noise_doubt(detector, images)
        assert "--norm-groups, --prediction or --schedule" in doubt
        assert "\n" not in doubt


def test_the_demos_denoiser(demo):
    check_denoiser(*demo)


def test_the_bottles_denoiser(shared):
    files = sorted((shared / "data" / "mvtec_bottle" / "test" / "good").glob("*.png"))[:8]
    images = np.stack([Preprocessing((64, 64))(file) for file in files])
    check_denoiser(load_denoiser(shared / "checkpoints" / "bottle_64_openai.pt"), images)


def test_other_parts_than_it_was_trained_on_are_doubted_too(demo):
    denoiser, images = demo
    stripes = np.stack([np.where(np.arange(64) % period < period // 2, 0.8, -0.8) for period in range(5, 13)])
    others = np.broadcast_to(stripes[:, None, None], images.shape).astype(np.float32)
    assert noise_doubt(TorchDetector(denoiser), others)


def test_one_image_is_enough_and_nearly_smooth_ones_are_no_reason(demo):
    denoiser, images = demo
    assert noise_doubt(TorchDetector(denoiser), images[:1]) == ""
    assert noise_doubt(TorchDetector(remade(denoiser, norm_groups=16)), images[:1])
    knows = SimpleNamespace(**vars(TorchDetector(denoiser)), predicted_noise=lambda x, s: x / (1 - s.alpha_t) ** 0.5)
    assert noise_doubt(knows, 0 * images) == ""  # where the filter's error is 0


def test_nothing_is_said_of_simplex_noise(demo):
    denoiser, images = demo
    assert noise_doubt(TorchDetector(remade(denoiser, norm_groups=8), noise="simplex"), images) == ""


def test_predicting_nothing_errs_by_one(demo):
    assert noise_error(lambda noised, step: 0 * noised, demo[1], Step(99.0, 0.7, 0.7, 0.0)) == pytest.approx(
        1, abs=0.02
    )


@pytest.mark.parametrize("size", [(64, 64), (32, 48)])
@pytest.mark.parametrize("alpha", [0.5, 0.9])
def test_the_filters_error_is_that_of_filtering(size, alpha):
    """Images of a known spectrum, noised and filtered with it."""
    rng = np.random.default_rng(0)
    frequency = np.hypot(np.fft.fftfreq(size[0])[:, None], np.fft.fftfreq(size[1])[None])
    power = 1 / (0.02 + frequency**2) / 40
    power[0, 0] = 0
    images = np.fft.ifft2(np.fft.fft2(rng.standard_normal((16, 3, *size))) * power**0.5).real
    noise = rng.standard_normal(images.shape)
    noised = alpha**0.5 * images + (1 - alpha) ** 0.5 * noise
    gain = (1 - alpha) ** 0.5 / (alpha * power + 1 - alpha)
    found = np.fft.ifft2(np.fft.fft2(noised) * gain).real
    measured = np.mean((found - noise) ** 2)
    assert linear_error(images.astype(np.float32), alpha) == pytest.approx(measured, rel=0.03)


def test_a_bundle_sees_the_noise_that_its_network_sees(tiny_bundle, small_network):
    rng = np.random.default_rng(0)
    noised = rng.standard_normal((3, 3, 32, 32)).astype(np.float32)
    with load(tiny_bundle, calibrated=False, warm_up=False) as detector, torch.no_grad():
        found = detector.predicted_noise(noised, Step(150.0, 0.8, 0.7, 0.1))
        wanted = small_network(torch.from_numpy(noised), torch.tensor(150.0)).numpy()
    np.testing.assert_allclose(found, wanted, atol=1e-4, rtol=0)
