"""Writes a test set that lies a little off: `python -m mdps.benchmarks.shifted CATEGORY --out FOLDER`.

Every test image is shifted by up to 5 % of its sides and turned by up to 5 degrees about its centre, its ground truth
alike; what comes into view is like the picture's edge. The folder is laid out like MVTec AD, for `mdps evaluate`; the
same images give the same set. Training images are links to their files.
"""

import math
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mdps.benchmarks.data import category_of
from mdps.benchmarks.data.made import SEED, command, link, refuse_used, save
from mdps.runtime.atomic import writing
from mdps.runtime.errors import require
from mdps.runtime.preprocessing import read_image

SHIFT, TURN = 0.05, 5.0  # of a side; degrees

Pixels = NDArray[np.uint8]


def shifted(image: Pixels, shift: tuple[float, float], turn: float, nearest: bool = False) -> Pixels:
    """Return the image turned clockwise about its centre by `turn` degrees, then shifted by (x, y) pixels."""
    height, width = image.shape[:2]
    edge = math.ceil(0.25 * math.hypot(height, width))
    padded = np.pad(image, ((edge, edge), (edge, edge), (0, 0))[: image.ndim], mode="edge")
    cosine, sine = math.cos(math.radians(turn)), math.sin(math.radians(turn))
    x, y = width / 2 + shift[0], height / 2 + shift[1]  # where the centre comes to lie
    back = (
        *(cosine, sine, width / 2 + edge - cosine * x - sine * y),
        *(-sine, cosine, height / 2 + edge + sine * x - cosine * y),
    )
    how = Image.Resampling.NEAREST if nearest else Image.Resampling.BICUBIC
    return np.asarray(Image.fromarray(padded).transform((width, height), Image.Transform.AFFINE, back, how))


def write(folder: Path, out: Path) -> int:
    """Write the set of the category in `folder` to `out`; return how many images it tests.

    UsageError for a folder in use or a category without images, ImageError for a defective one without ground truth.
    """
    category = category_of(folder)
    require(bool(category.test and category.train), f"{folder} should hold images in train and in test")
    refuse_used(out)
    with writing(out):
        link(category.train, out / "train" / "good")
        for index, sample in enumerate(category.test):
            rng = np.random.default_rng([SEED, index])
            image, truth = np.array(read_image(sample.path)), sample.truth()
            across, down, turn = rng.uniform(-1, 1, 3)
            shift = (SHIFT * across * image.shape[1], SHIFT * down * image.shape[0])
            save(shifted(image, shift, TURN * turn), out / "test" / sample.kind / f"{index:03d}.png")
            if sample.defective:
                mask = shifted(truth.astype(np.uint8) * 255, shift, TURN * turn, nearest=True)
                save(mask, out / "ground_truth" / sample.kind / f"{index:03d}_mask.png")
    return len(category.test)


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    return command("shifted", __doc__, write, "shifted and turned", argv)


if __name__ == "__main__":
    sys.exit(main())
