"""Calibrate a bundle on a folder of images of good parts."""

import hashlib
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from mdps.runtime import Calibration, CalibrationWarning, Detector, LoadOptions, calibrate
from mdps.runtime.alignment import Alignment
from mdps.runtime.atomic import writing
from mdps.runtime.bundle import Bundle, LoadFields
from mdps.runtime.errors import ImageError, refuse_unreadable, require
from mdps.runtime.image_files import find_images, odd_pictures
from mdps.runtime.loading import load_bundle
from mdps.runtime.manifest import FILE_NAME, Manifest
from mdps.runtime.preprocessing import Preprocessing
from mdps.runtime.registration import align as alignment_of
from mdps.serving.defects import KINDS
from mdps.serving.fitness import measure, told

FEWEST, MOST = 2, 16  # defects of a kind
_OF_ALL = (
    "images that `mdps tune` fitted the detector to count by what their whole photograph scored, so that the threshold "
    "may be higher than the places that are inspected need: calibrate on others"
)


def _read_all(images: Sequence[Path], preprocessing: Preprocessing) -> None:
    faults = []
    for image in images:
        try:
            preprocessing(image)
        except ImageError as error:
            faults.append(str(error))
    refuse_unreadable(faults, len(images), "a calibration")


def calibrate_folder(
    bundle: Path,
    good: Path,
    false_alarm_rate: float,
    options: LoadOptions | None = None,
    scope: Mapping[str, Any] | None = None,
    *,
    align: bool = False,
    **fields: Unpack[LoadFields],
) -> Calibration:
    """Calibrate the product that is asked for on all images of a folder, and store the result in the manifest.

    `scope` has the fields of the product's `Scope` that are stored anew with it.

    Its fitness too: defects are put into the same images. Warns where the detector does not see them.

    With `align` the parts are aligned from now on, without it no longer; only a tuning keeps what it was made with.
    `options` and `fields` are those of `load`; a bundle's early exit and calibration play no part.
    That all files can be read and the manifest written is seen to before any of the computing.

    Raises:
        UsageError: wrong paths, a bundle that cannot be used.
        ImageError: files that cannot be read, up to five by name: a calibration on fewer images than asked for would
            be a silent one.
        MdpsError: the manifest cannot be written.
    """
    asked = replace(options or LoadOptions(), **fields)
    asked = replace(asked, early_exit=0.0, calibrated=False, warm_up=False)
    images = find_images([good])
    manifest = Manifest.read(bundle)
    shown = replace(manifest.scope(asked.product), **(scope or {}))
    with writing(bundle / FILE_NAME), tempfile.TemporaryFile(dir=bundle):
        pass  # where no other file can be made beside it, it cannot be replaced
    _read_all(images, manifest.preprocessing)
    manifest = manifest.with_alignment(asked.product, _alignment(bundle, manifest, asked.product, images, align))
    manifest = manifest.with_scope(asked.product, shown)
    with load_bundle(Bundle.of(bundle, manifest, asked), asked) as detector:
        for sentence in odd_pictures(images, None if detector.tiles else detector.preprocessing):
            warnings.warn(sentence, stacklevel=2)
        calibration = calibrated(detector, images, false_alarm_rate)
    if calibration.doubt:
        warnings.warn(calibration.doubt, CalibrationWarning, stacklevel=2)
    alignment = manifest.alignments.get(detector.product)
    manifest = Manifest.read(bundle, verify=False).with_alignment(detector.product, alignment)
    manifest = manifest.with_scope(detector.product, shown).with_calibration(detector.product, calibration)
    with writing(bundle / FILE_NAME):
        manifest.write(bundle)
    return calibration


def _alignment(bundle: Path, manifest: Manifest, product: str, images: Sequence[Path], asked: bool) -> Alignment | None:
    """Return how the parts are to be aligned: a tuned detector was fitted to parts that lay as its own shows them."""
    if product in manifest.tunings:
        own = manifest.alignments.get(product)
        require(
            own is not None or not asked,
            f"{bundle} was tuned for the product {product!r} to parts that were not aligned: run `mdps tune --align`",
        )
        return own
    return alignment_of(images) if asked else None


def fingerprint(image: Path) -> str:
    """Return a name for the contents of a file: a tuning keeps those of the images that it was fitted to."""
    return hashlib.sha256(image.read_bytes()).hexdigest()[:12]


def _known(images: Sequence[Path], evidence: Mapping[str, Any]) -> dict[int, float]:
    """Return the scores of those images that a tuned detector was fitted to, by their place.

    It gives them lower ones than it will give to further good parts. So `mdps tune` keeps what the same terms gave that
    were fitted to others.
    """
    fitted = evidence.get("fitted", {})
    names = enumerate(map(fingerprint, images)) if fitted else ()
    return {index: fitted[name] for index, name in names if name in fitted}


def defects_a_kind(images: int) -> int:
    """Return how many defects of a kind are shown: all kinds together take no longer than the good images did."""
    return min(max(images // len(KINDS), FEWEST), MOST)


def calibrated(detector: Detector, images: Sequence[Path], false_alarm_rate: float) -> Calibration:
    """Return the calibration with its fitness, and show on a terminal how far it is."""
    scores: list[float] = []
    evidence = detector.tuning.evidence if detector.tuning else {}
    if evidence and detector.scope.restricts:
        evidence = {key: value for key, value in evidence.items() if key != "found"}
        warnings.warn(_OF_ALL, CalibrationWarning, stacklevel=3)
    with tqdm(total=len(images), desc="good images", unit="image", disable=None) as bar:

        def took(found: NDArray[np.float32]) -> None:
            scores.extend(found.tolist())
            bar.update(len(found))
            if bar.n == len(images):
                bar.close()  # a warning should have a line of its own

        known = _known(images, evidence)
        calibration = calibrate(detector, images, false_alarm_rate=false_alarm_rate, each=took, known=known)
    if found := evidence.get("found"):  # a tuning put them into images that it was not yet fitted to
        kinds, sizes, defective, pixels = zip(*found, strict=True)
        fitness = told(list(zip(kinds, sizes, strict=True)), defective, pixels, calibration.threshold, scores)
        return replace(calibration, fitness=fitness)
    detector.calibration = calibration  # its mask range is that under which defects are judged
    per_kind = defects_a_kind(len(images))
    with tqdm(total=per_kind * len(KINDS), desc="images with defects put in", unit="image", disable=None) as bar:
        fitness = measure(
            detector, calibration.threshold, images,
            good_scores=scores, per_kind=per_kind, progress=lambda done, _: bar.update(done - bar.n),
        )  # fmt: skip
    return replace(calibration, fitness=fitness)
