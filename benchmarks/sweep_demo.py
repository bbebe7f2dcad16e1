"""How the demo's guidance scale and pixel weight were chosen: `python -m mdps.benchmarks.sweep_demo`.

A sweep over defects of another seed than the demo's; prints its table.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mdps.benchmarks.demo import CHECKPOINT, PHOTO
from mdps.benchmarks.sweep import SweepOptions, run_sweep
from mdps.benchmarks.sweep_report import markdown
from mdps.benchmarks.textures import TextureSet

SEED = 1  # the demo's test has seed 0
OPTIONS = SweepOptions(scales=(20.0, 50.0, 100.0), etas=(0.3, 1.0, 2.0, 4.0, 8.0), smoothings=(0.0,), tops=(500.0,))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        dataset = write_test(Path(folder) / PHOTO)
        found = run_sweep(CHECKPOINT, dataset, Path(folder) / "sweep", OPTIONS, say=_say)
        print(markdown(found))


def write_test(folder: Path) -> Path:
    """The test images and masks as a category laid out like MVTec AD, whose one training image is never read."""
    textures = TextureSet(PHOTO, seed=SEED)
    for sample in textures.test():
        _save(folder / "test" / sample.kind / f"{sample.name}.png", sample.image)
        if sample.kind != "good":
            mask = np.where(sample.mask, np.uint8(255), np.uint8(0))
            _save(folder / "ground_truth" / sample.kind / f"{sample.name}_mask.png", mask)
    _save(folder / "train" / "good" / "000.png", textures.calibration()[0])
    return folder


def _save(path: Path, pixels: NDArray[np.uint8]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def _say(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    main()
