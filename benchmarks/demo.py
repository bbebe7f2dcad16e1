"""The demo: the checkpoint that ships with mdps, exported, calibrated, and shown photographs with defects put in."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mdps.benchmarks.data.textures import Sample, TextureSet
from mdps.benchmarks.kit import Fields, Say, quiet
from mdps.benchmarks.metrics import auroc, pixel_auroc
from mdps.export import ExportOptions, export_bundle
from mdps.runtime import load
from mdps.runtime.atomic import is_temporary, new_folder, writing
from mdps.runtime.errors import MdpsError, UsageError
from mdps.runtime.manifest import FILE_NAME
from mdps.serving.calibrate import calibrate_folder
from mdps.serving.folder import REPORT, Row, predict
from mdps.serving.report import report_run

CHECKPOINT = Path(__file__).parent / "demo" / "denoiser.safetensors"
PHOTO = "brick"
# Chosen by a sweep over defects of another seed than those the demo is measured on: results/demo_checkpoint.md.
OPTIONS = ExportOptions(guidance_scale=20.0, eta=2.0)
FALSE_ALARM_RATE = 0.05  # 48 good images can promise no less than one in 49
_BUNDLE, _GOOD, _TEST = "bundle", "calibration", "images"


@dataclass(frozen=True)
class DemoResult(Fields):
    """Results of the demo: AUROC over images and over pixels, the median ms from file to verdict, and the report."""

    image_auroc: float
    pixel_auroc: float
    ms_per_image: float
    images: int
    report: str


def run_demo(out: Path, *, threads: int | None = None, say: Say = quiet) -> DemoResult:
    """Runs all of it in the folder `out`, which then holds the bundle, the images, the results and `report.html`.

    UsageError where `out` holds something else, as folders in it would be replaced; MdpsError where it is not writable.
    """
    _refuse_foreign(out)
    textures = TextureSet(PHOTO)
    samples = textures.test()
    say(f"exporting {CHECKPOINT.name}")
    bundle = export_demo(out / _BUNDLE)
    say("calibrating on good parts")
    calibrate_demo(bundle, out / _GOOD, textures, threads)
    say(f"inspecting {len(samples)} images")
    rows = inspect_demo(bundle, samples, out, threads)
    return measure(samples, rows, out)


def _refuse_foreign(out: Path) -> None:
    if (out / _BUNDLE / FILE_NAME).is_file() or not out.exists():
        return
    if not out.is_dir() or any(not is_temporary(path) for path in out.iterdir()):
        raise UsageError(f"--out {out} holds something that is not an earlier demo: choose a new folder")


def export_demo(bundle: Path) -> Path:
    """Exports the shipped checkpoint to the folder `bundle`, replacing what is there."""
    if not CHECKPOINT.is_file():
        raise MdpsError(f"{CHECKPOINT} is missing: install mdps again")
    export_bundle(CHECKPOINT, bundle, OPTIONS, force=True)
    return bundle


def calibrate_demo(bundle: Path, folder: Path, textures: TextureSet, threads: int | None = None) -> None:
    """Writes good images, from a part of the photograph the test never sees, into `folder` and calibrates on them."""
    _save(folder, ((f"{index:03d}", image) for index, image in enumerate(textures.calibration())))
    calibrate_folder(bundle, folder, FALSE_ALARM_RATE, threads=threads)


def save_photographs(folder: Path) -> None:
    """Writes what the demo calibrates on to `folder`/good and what it inspects to `folder`/test, replacing it.

    Raises UsageError without scikit-image, MdpsError where `folder` cannot be written.
    """
    textures = TextureSet(PHOTO)
    good = ((f"good/{index:03d}", image) for index, image in enumerate(textures.calibration()))
    _save(folder, [*good, *((f"test/{sample.kind}/{sample.name}", sample.image) for sample in textures.test())])


def inspect_demo(bundle: Path, samples: Sequence[Sample], out: Path, threads: int | None = None) -> list[Row]:
    """Writes the test images into `out` and judges them one at a time, as a line does; a row each, in their order."""
    images = _save(out / _TEST, ((f"{sample.kind}/{sample.name}", sample.image) for sample in samples))
    with load(bundle, threads=threads, force=True) as detector:
        rows = predict(detector, images, out, batch=1, force=True)
        report_run(detector, bundle, rows, out)
    return rows


def measure(samples: Sequence[Sample], rows: Sequence[Row], out: Path) -> DemoResult:
    """Metrics of the rows against the exact masks of the samples, in the same order."""
    failed = [row for row in rows if row.score is None]
    if failed:
        raise MdpsError(f"{failed[0].path} could not be judged: {failed[0].error}")
    maps = np.stack([np.load(out / str(row.map), allow_pickle=False) for row in rows])
    return DemoResult(
        image_auroc=auroc([sample.kind != "good" for sample in samples], [row.score or 0.0 for row in rows]),
        pixel_auroc=pixel_auroc(np.stack([sample.mask for sample in samples]), maps),
        ms_per_image=median(row.ms or 0.0 for row in rows),
        images=len(rows),
        report=str(out / REPORT),
    )


def _save(folder: Path, images: Iterable[tuple[str, NDArray[np.uint8]]]) -> list[Path]:
    """Writes named images uint8 [H, W, 3] as PNG files; the folder is replaced whole."""
    names = []
    with writing(folder), new_folder(folder, replace=True) as new:
        for name, image in images:
            path = new / f"{name}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(path)
            names.append(f"{name}.png")
    return [folder / name for name in names]
