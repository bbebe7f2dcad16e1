"""Makes the detector inside the package of the demo's checkpoint: `python -m mdps.benchmarks.demo_detector`.

Its weights are rounded to half precision before the export, so that the gate compares what is shipped.
"""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from PIL import Image

from mdps.benchmarks import demo
from mdps.benchmarks.data.textures import TextureSet
from mdps.export import export_bundle
from mdps.export.halves import make_small
from mdps.models.checkpoints import load_denoiser, save_denoiser
from mdps.runtime.atomic import new_folder
from mdps.runtime.demo import FOLDER, PICTURES


def make(folder: Path = FOLDER) -> None:
    """Write bundle and pictures to `folder`, replacing those that are there."""
    textures = TextureSet(demo.PHOTO)
    with TemporaryDirectory() as work:
        bundle = _exported(Path(work))
        make_small(bundle)
        demo.calibrate_demo(bundle, Path(work) / "good", textures, threads=1)
        with new_folder(folder, replace=True) as new:
            (new / "bundle").mkdir()
            for path in bundle.iterdir():
                (new / "bundle" / path.name).write_bytes(path.read_bytes())
            for name, image in _pictures(textures).items():
                Image.fromarray(image).save(new / f"{name}.png")


def _exported(work: Path) -> Path:
    denoiser = load_denoiser(demo.CHECKPOINT)
    for parameter in denoiser.network.parameters():
        parameter.data = parameter.data.to(torch.float16).to(torch.float32)
    rounded = work / demo.CHECKPOINT.name
    save_denoiser(
        rounded, denoiser.network, denoiser.schedule, denoiser.prediction, denoiser.preprocessing, denoiser.extra
    )
    return export_bundle(rounded, work / "bricks", replace(demo.OPTIONS, engines=("onnxruntime",)))


def _pictures(textures: TextureSet) -> dict[str, np.ndarray]:
    """Return the first good test image and the first with a stain."""
    samples = textures.test()
    return {name: next(one.image for one in samples if one.kind == kind) for name, kind in PICTURES.items()}


if __name__ == "__main__":
    make()
