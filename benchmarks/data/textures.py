"""The demo's data: crops of a real photograph of a texture, half of the test crops with a defect put in.

The photographs (`brick`, `grass`, `gravel`; public domain, CC0) come inside the scikit-image wheel, so nothing is
downloaded. Each is reduced to two thirds and cut into three upright strips that share no pixel: the model learns from
the right one, the middle one calibrates, the left one is the test. Crops of one strip may overlap each other.
"""

import importlib.util
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mdps.benchmarks import defects
from mdps.runtime import atomic
from mdps.runtime.errors import UsageError

PHOTOS = ("brick", "grass", "gravel")
SIZE = 64  # crops are SIZE x SIZE
REDUCED = 341  # the 512-pixel photographs at two thirds: a crop shows some four bricks side by side
# Columns. The view narrows towards the middle: the right strip, mirrored, holds every slant of the left one.
TEST, CALIBRATION, TRAINING = slice(0, 105), slice(105, 177), slice(177, REDUCED)

Grey = NDArray[np.uint8]


@dataclass(frozen=True)
class Sample:
    """One test crop: image uint8 [64, 64, 3] (three equal channels), mask bool [64, 64], kind `good` or a defect's."""

    name: str
    kind: str
    image: NDArray[np.uint8]
    mask: NDArray[np.bool_]


def photograph(name: str) -> Grey:
    """A photograph reduced to uint8 [341, 341]; UsageError if the name is unknown or scikit-image is not installed."""
    if name not in PHOTOS:
        raise UsageError(f"there is no photograph {name!r}; choose one of {', '.join(PHOTOS)}")
    package = importlib.util.find_spec("skimage")  # its folder only: importing skimage takes a second
    if package is None or not package.submodule_search_locations:
        raise UsageError("the demo's photographs come with scikit-image, which is missing: pip install scikit-image")
    path = Path(package.submodule_search_locations[0]) / "data" / f"{name}.png"
    if not path.is_file():
        raise UsageError(f"scikit-image is installed without {path}: pip install --force-reinstall scikit-image")
    with Image.open(path) as image:
        return np.asarray(image.convert("L").resize((REDUCED, REDUCED), Image.Resampling.BILINEAR))


def as_rgb(grey: Grey) -> NDArray[np.uint8]:
    """Grey [.., H, W] as three equal channels [.., H, W, 3]."""
    return np.repeat(grey[..., None], 3, axis=-1)


class TextureSet:
    """Good and defective 64 x 64 crops of one photograph, the same for the same seed.

    Every method draws from a generator of its own, so the test set does not depend on how many crops were asked for
    before it.
    """

    def __init__(self, photo: str = "brick", seed: int = 0) -> None:
        self.photo, self.seed = photo, seed
        self._picture = photograph(photo)

    @cached_property
    def _others(self) -> list[Grey]:
        return [photograph(name) for name in PHOTOS if name != self.photo]

    @property
    def training_area(self) -> NDArray[np.uint8]:
        """The strip that good training crops are cut from, uint8 [341, 164, 3]."""
        return as_rgb(self._picture[:, TRAINING])

    def training(self, count: int) -> NDArray[np.uint8]:
        """`count` good crops of the training strip, uint8 [count, 64, 64, 3]."""
        return as_rgb(self._crops(self._picture[:, TRAINING], count, self._generator(0)))

    def calibration(self, count: int = 48) -> NDArray[np.uint8]:
        """`count` good crops of the calibration strip, uint8 [count, 64, 64, 3]."""
        return as_rgb(self._crops(self._picture[:, CALIBRATION], count, self._generator(1)))

    def test(self, good: int = 30, each: int = 10) -> list[Sample]:
        """`good` good crops of the test strip, then `each` crops with a defect of each of the five kinds."""
        rng = self._generator(2)
        area = self._picture[:, TEST]
        clean = np.zeros((SIZE, SIZE), dtype=bool)
        crops = self._crops(area, good, rng)
        samples = [Sample(f"{i:03d}", "good", as_rgb(crop), clean) for i, crop in enumerate(crops)]
        for kind in defects.KINDS:
            samples += [self._defective(kind, i, area, rng) for i in range(each)]
        return samples

    def write(self, folder: Path, training: int = 200, calibration: int = 48) -> None:
        """Write the set as PNG files in MVTec AD's layout: `train/good`, `calibration/good`, `test/<kind>`,
        `ground_truth/<kind>/NAME_mask.png`; the folder appears whole or not at all."""
        with atomic.new_folder(folder) as new:
            for part, images in (("train", self.training(training)), ("calibration", self.calibration(calibration))):
                for i, image in enumerate(images):
                    _save(new / part / "good" / f"{i:03d}.png", image)
            for sample in self.test():
                _save(new / "test" / sample.kind / f"{sample.name}.png", sample.image)
                if sample.kind != "good":
                    mask = sample.mask.astype(np.uint8) * 255
                    _save(new / "ground_truth" / sample.kind / f"{sample.name}_mask.png", mask)

    def _defective(self, kind: str, index: int, area: Grey, rng: np.random.Generator) -> Sample:
        other = self._others[int(rng.integers(len(self._others)))]
        crop, foreign = self._crops(area, 1, rng)[0], self._crops(other, 1, rng)[0]
        image, mask = defects.put(kind, crop, foreign, rng)
        return Sample(f"{index:03d}", kind, as_rgb(image), mask)

    def _crops(self, area: Grey, count: int, rng: np.random.Generator) -> Grey:
        rows = rng.integers(0, area.shape[0] - SIZE + 1, count)
        columns = rng.integers(0, area.shape[1] - SIZE + 1, count)
        windows = np.lib.stride_tricks.sliding_window_view(area, (SIZE, SIZE))
        return np.asarray(windows[rows, columns])

    def _generator(self, part: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, PHOTOS.index(self.photo), part])


def _save(path: Path, image: NDArray[np.uint8]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path)
