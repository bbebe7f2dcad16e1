"""Run a bundle on folders for the commands: judge them with a report, or calibrate on them."""

import hashlib
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from mdps.runtime import Calibration, Detector, LoadOptions, calibrate, load
from mdps.runtime.bundle import LoadFields
from mdps.runtime.errors import ImageError
from mdps.runtime.manifest import FILE_NAME, Manifest
from mdps.runtime.odd_pictures import odd_pictures
from mdps.runtime.preprocessing import Preprocessing
from mdps.serving.earlier import REPORT
from mdps.serving.folder import predict
from mdps.serving.inputs import find_images
from mdps.serving.overlay import HeatRange
from mdps.serving.report import write_report
from mdps.serving.rows import Row, writing


def inspect_folder(
    detector: Detector,
    bundle: Path,
    inputs: Sequence[Path],
    out: Path,
    *,
    batch: int,
    force: bool = False,
    on_row: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """`predict` with the heat range of the detector's calibration, then the report of all rows in `out`.

    Warns of images that are odd for the network (more than 8 bits, tiny, of different aspects), before it judges any.
    Raises what `predict` and `write_report` raise.
    """
    images = find_images(inputs, exclude=out)
    warn_of_odd(images, detector.preprocessing)
    rows = predict(
        detector, images, out, batch=batch, force=force, heat_range=heat_range(detector.calibration), on_row=on_row
    )
    title = f"Inspection with {detector.manifest.name}"
    write_report(out, REPORT, rows, run_settings(detector, bundle), title)
    return rows


def warn_of_odd(images: Sequence[Path], preprocessing: Preprocessing) -> None:
    """A warning for each sentence that `odd_pictures` has to say."""
    for sentence in odd_pictures(images, preprocessing):
        warnings.warn(sentence, stacklevel=2)


def heat_range(calibration: Calibration | None) -> HeatRange | None:
    """From the coolest pixel of good parts, with the hottest of theirs at half heat; None without a calibration."""
    if calibration is None:
        return None
    return HeatRange(calibration.map_low, 2 * calibration.map_high - calibration.map_low)


def run_settings(detector: Detector, bundle: Path) -> dict[str, str]:
    """All a reader needs to repeat a run: names, hashes (the manifest's covers every file's) and settings, as text."""
    manifest_hash = hashlib.sha256((bundle / FILE_NAME).read_bytes()).hexdigest()
    return {"manifest.sha256": manifest_hash, **dict(flat(detector.provenance))}


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Pairs of a dotted name and a text for every value of nested mappings; nothing for None."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", str(value)


def _read_all(images: Sequence[Path], preprocessing: Preprocessing) -> None:
    faults = []
    for image in images:
        try:
            preprocessing(image)
        except ImageError as error:
            faults.append(str(error))
    if faults:
        more = f"; and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise ImageError(
            f"{len(faults)} of {len(images)} images cannot be read, and a calibration uses all of them or none: "
            f"{'; '.join(faults[:5])}{more}"
        )


def calibrate_folder(
    bundle: Path,
    good: Path,
    false_alarm_rate: float,
    options: LoadOptions | None = None,
    **fields: Unpack[LoadFields],
) -> Calibration:
    """Calibrate the product that is asked for on all images of a folder, and store the result in the manifest.

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
    preprocessing = Manifest.read(bundle, verify=False).preprocessing
    with writing(bundle / FILE_NAME), tempfile.TemporaryFile(dir=bundle):
        pass  # where no other file can be made beside it, it cannot be replaced
    _read_all(images, preprocessing)
    with load(bundle, asked) as detector:
        warn_of_odd(images, detector.preprocessing)
        calibration = calibrate(detector, images, false_alarm_rate=false_alarm_rate)
    manifest = Manifest.read(bundle, verify=False).with_calibration(detector.product, calibration)
    with writing(bundle / FILE_NAME):
        manifest.write(bundle)
    return calibration
