"""How the demo's guidance scale and pixel weight were chosen: `python -m mdps.benchmarks.sweep_demo`.

Judges defects of another seed than the demo's by the first pass alone and prints a Markdown table of image and pixel
AUROC. The samples of a guidance scale are drawn once; the weights eta are tried on their maps.
"""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from mdps.benchmarks.demo import CHECKPOINT, PHOTO
from mdps.benchmarks.metrics import auroc, pixel_auroc
from mdps.benchmarks.textures import Sample, TextureSet
from mdps.export import ExportOptions, export_bundle
from mdps.runtime.loading import open_pipeline
from mdps.runtime.manifest import Manifest
from mdps.runtime.preprocessing import to_unit
from mdps.runtime.settings import Settings

SEED = 1  # the demo's test has seed 0
SCALES, WEIGHTS = (20.0, 50.0, 100.0), (0.3, 1.0, 2.0, 4.0, 8.0)
Maps = NDArray[np.float32]


def main() -> None:
    samples = TextureSet(PHOTO, seed=SEED).test()
    print("| rho | eta | image AUROC | pixel AUROC |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        bundle = export_bundle(CHECKPOINT, Path(folder) / "bundle", ExportOptions(eta=0.0, mask_pass=False))
        for scale in SCALES:
            for weight, image, pixel in evaluate(bundle, samples, scale):
                print(f"| {scale:g} | {weight:g} | {image:.4f} | {pixel:.4f} |", flush=True)


def evaluate(bundle: Path, samples: list[Sample], scale: float) -> Iterator[tuple[float, float, float]]:
    """(eta, image AUROC, pixel AUROC) for every weight, from one set of posterior samples."""
    manifest = Manifest.read(bundle)
    first = replace(manifest.settings.sampler.first_pass, guidance_scale=scale)
    settings = replace(manifest.settings, sampler=replace(manifest.settings.sampler, first_pass=first))
    observations = np.stack([to_unit(sample.image) for sample in samples])
    features, pixels = _terms(bundle, manifest, settings, observations)
    labels, masks = [sample.kind != "good" for sample in samples], np.stack([sample.mask for sample in samples])
    for weight in WEIGHTS:
        maps = features + np.float32(weight) * pixels
        yield weight, auroc(labels, _top_mean(maps, settings.score.top)), pixel_auroc(masks, maps)


def _terms(bundle: Path, manifest: Manifest, settings: Settings, observations: Maps) -> tuple[Maps, Maps]:
    """The feature and the pixel term of every image's map, [n, H, W] each."""
    features, pixels = [], []
    with ExitStack() as opened:
        pipeline = open_pipeline(bundle, manifest, settings, opened)
        # disable=None: a bar on a terminal, nothing in a pipe
        for start in tqdm(range(0, len(observations), 8), disable=None):
            y = observations[start : start + 8]
            found = pipeline.inspect(y, None)
            features.append(found.anomaly_map[:, 0])  # the bundle's own eta is 0
            pixels.append(np.abs(found.posterior_samples - y).sum(axis=1))
    return np.concatenate(features), np.concatenate(pixels)


def _top_mean(maps: Maps, top: int) -> NDArray[np.float32]:
    largest = np.sort(maps.reshape(len(maps), -1), axis=1)[:, -top:]
    return np.asarray(largest.mean(axis=1), dtype=np.float32)


if __name__ == "__main__":
    main()
