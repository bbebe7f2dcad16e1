"""Writes a test set of large missing parts: `python -m mdps.benchmarks.missing CATEGORY --out FOLDER`.

A third of the part in each good test image gives way to its background (of the picture, where nothing stands out from
one, to an even tone). The folder is laid out like MVTec AD, for `mdps evaluate`; the same images give the same set.
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
from mdps.serving.defects.scene import Ground, Scene
from mdps.serving.defects.surface import broken_off

SHARE = 1 / 3
_VISIBLE = 3  # grey levels


def without(image: NDArray[np.uint8], rng: np.random.Generator) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Return the image [H, W, 3] with a third of its part gone, and which pixels [H, W] of the part that changed."""
    ground = Ground(image)
    change = broken_off(Scene(ground, image, rng, "large"), rng.uniform(0, 2 * math.pi), SHARE)
    new = np.rint(np.clip(change.pixels, 0, 255)).astype(np.uint8)
    new = np.where(_enlarged(ground.nearby, image)[..., None], new, image)  # the background stays as it was
    seen = np.abs(new.astype(np.int16) - image).max(axis=-1) >= _VISIBLE
    return new, _enlarged(ground.part, image) & seen


def _enlarged(cells: NDArray[np.bool_], image: NDArray[np.uint8]) -> NDArray[np.bool_]:
    height, width = image.shape[:2]
    return np.asarray(Image.fromarray(cells).resize((width, height), Image.Resampling.NEAREST))


def write(folder: Path, out: Path) -> int:
    """Write the set of the category in `folder` to `out`; return how many of its images have a part missing.

    Good images are links to their files. UsageError for a folder in use or a category without good test images.
    """
    category = category_of(folder)
    good = [sample.path for sample in category.test if not sample.defective]
    require(bool(good and category.train), f"{folder} should hold images in train/good and in test/good")
    refuse_used(out)
    with writing(out):
        link(category.train, out / "train" / "good")
        link(good, out / "test" / "good")
        for index, path in enumerate(good):
            image, mask = without(np.array(read_image(path)), np.random.default_rng([SEED, index]))
            save(image, out / "test" / "missing" / f"{index:03d}.png")
            save(mask, out / "ground_truth" / "missing" / f"{index:03d}_mask.png")
    return len(good)


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    return command("missing", __doc__, write, "with a part missing", argv)


if __name__ == "__main__":
    sys.exit(main())
