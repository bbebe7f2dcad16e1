"""Whether a denoiser removes noise from good images as a trained one does, which no comparison of graphs shows.

A network read with another number of norm groups, or taken to predict something else, still gives pictures. What it
makes of noised good images is compared with a Wiener filter for their mean spectrum, the best that is linear.
Trained networks err a sixth as much or less, misread ones three quarters as much or more (docs/use/running.md,
"Is it the right denoiser?").
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mdps.runtime.pipeline import Inspection
from mdps.runtime.preprocessing import Preprocessing
from mdps.runtime.schedule import NoiseSchedule, Step
from mdps.runtime.settings import Settings

Array = NDArray[np.float32]
IMAGES = 8
SIGNAL = 0.5  # alpha of the x_t it is tried on: below it a wrong `prediction` shows less, above it wrong norms do
LIMIT = 0.5  # of the filter's error
NEGLIGIBLE = 0.01  # mean squared error that is right whatever the images: of nearly smooth ones the filter's is smaller


class Judge(Protocol):
    """The members of a `Detector` that a calibration asks for."""

    preprocessing: Preprocessing
    engine: str

    @property
    def settings(self) -> Settings:
        """Those it judges with."""

    @property
    def schedule(self) -> NoiseSchedule:
        """The one its denoiser was trained on."""

    def inspect(
        self, observations: Array, *, mask_range: tuple[float, float] | None = None, early_exit: bool = True
    ) -> Inspection:
        """Return the arrays behind results."""

    def first_maps(self, observations: Array) -> Array:
        """Return the maps of the first pass alone."""

    def predicted_noise(self, noised: Array, step: Step) -> Array:
        """Return what the first pass's denoiser takes for the noise."""


def noise_doubt(detector: Judge, images: Array) -> str:
    """Return a sentence where the denoiser fails on good images [B, 3, H, W] in [-1, 1]; empty where it does not.

    Empty too for networks of simplex noise, for which nothing was measured.
    """
    if detector.settings.sampler.noise != "gaussian":
        return ""
    step = _step(detector.schedule)
    error, linear = noise_error(detector, images, step), linear_error(images, step.alpha_t)
    if error <= max(NEGLIGIBLE, LIMIT * linear):
        return ""
    return (
        f"the denoiser does not know these parts: the noise it sees in them is off by {error:.2g} (mean square), where "
        f"a linear filter is by {linear:.2g} and a trained denoiser by less than half of that; the export may have "
        "assumed wrong --norm-groups, --prediction or --schedule, or it was trained too little or on other parts"
    )


def noise_error(detector: Judge, images: Array, step: Step) -> float:
    """Return the mean squared error of the predicted noise; predicting none gives 1."""
    rng, errors = np.random.default_rng(0), []
    for image in images:
        noise = rng.standard_normal((1, *image.shape), dtype=np.float32)
        noised = np.float32(step.alpha_t**0.5) * image + np.float32((1 - step.alpha_t) ** 0.5) * noise
        errors.append(np.square(detector.predicted_noise(noised, step) - noise).mean())
    return float(np.mean(errors))


def linear_error(images: Array, alpha: float) -> float:
    """Return that of the Wiener filter for the images' mean spectrum, taken to be equal in all directions."""
    height, width = images.shape[2:]
    spectrum = np.fft.fft2(images - images.mean(axis=(2, 3), keepdims=True))
    power = (np.abs(spectrum) ** 2).mean(axis=(0, 1)) / (height * width)
    rows, columns = np.meshgrid(np.fft.fftfreq(height), np.fft.fftfreq(width), indexing="ij")
    ring = np.rint(np.hypot(rows, columns) * min(height, width)).astype(int)
    power = (np.bincount(ring.ravel(), power.ravel()) / np.maximum(np.bincount(ring.ravel()), 1))[ring]
    return float((alpha * power / (alpha * power + 1 - alpha)).mean())


def _step(schedule: NoiseSchedule) -> Step:
    alphas = schedule.alphas_cumprod
    nearest = int(np.abs(alphas - SIGNAL).argmin())
    return Step(float(nearest), float(alphas[nearest]), float(alphas[nearest]), 0.0)
