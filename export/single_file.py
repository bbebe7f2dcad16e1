"""A calibrated bundle as one ONNX file: compose it, prove it against the bundle, put it in its place."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto

from mdps.export.detector_graph import compose
from mdps.runtime.atomic import write_bytes
from mdps.runtime.bundle import Bundle, LoadOptions
from mdps.runtime.calibration import CalibrationWarning
from mdps.runtime.detector import Detector
from mdps.runtime.engines.interface import open_session
from mdps.runtime.errors import BackendError, require
from mdps.runtime.loading import load
from mdps.runtime.manifest import FileEntry, Manifest
from mdps.runtime.session import Session

FILE_NAME = "detector.onnx"
MAX_BYTES = 2**31 - 1  # of one protobuf message, and so of an ONNX file that holds its weights
TOLERANCES = {"fp32": 1e-4, "fp16": 1e-2}
"""Tolerances of the file's map and score, by the bundle's precision: in fp16 every node's result is rounded, and the
engine does not arrange the file's nodes as it does the bundle's."""


def export_single_file(
    bundle: Path | str,
    out: Path | str | None = None,
    *,
    product: str = "default",
    say: Callable[[str], None] = lambda _: None,
) -> Path:
    """Write a calibrated bundle as one ONNX file and return its path: `out`, by default `detector.onnx` in the bundle.

    A file in the bundle is listed in its manifest. Before it gets its name the file has judged a picture as the bundle
    does, to the TOLERANCES. Warns where the calibration found that the bundle sees no defects. Raises CalibrationError
    without a calibration of `product`, UsageError for a bundle that is traced, in bf16, beyond 2 GB, stitches
    (AutoDDPM), judges in tiles or has an early exit or a cascade, BackendError where file and bundle disagree; then
    nothing is written.
    """
    bundle = Path(bundle)
    out = bundle / FILE_NAME if out is None else Path(out)
    _refuse(Bundle.of(bundle, Manifest.read(bundle, verify=False), LoadOptions(product=product)), product)
    require(
        not out.is_dir() and out.parent.is_dir(), f"{out} cannot be written: give the name of a file, such as x.onnx"
    )
    with (
        load(bundle, product=product, warm_up=False, force=True) as detector,
        TemporaryDirectory(prefix=".mdps-tmp-", dir=out.parent) as folder,
    ):
        if detector.doubt:
            warnings.warn(detector.doubt, CalibrationWarning, stacklevel=2)
        say(f"composing {out.name}")
        written = Path(folder) / FILE_NAME
        write_bytes(written, _serialized(compose(bundle, detector)))
        say("comparing with the bundle")
        _compare(written, detector)
        _put(written, out, bundle)
    return out


def _refuse(loaded: Bundle, product: str) -> None:
    bundle, manifest, sampler = loaded.path, loaded.manifest, loaded.settings.sampler
    require(
        loaded.tuning is None or loaded.tuning.cascade is None,
        f"{bundle} has the published method judge again what its tuned detector leaves in doubt (a cascade), which the "
        "single file does not hold: deploy the bundle's folder, or tune it without",
    )
    require(
        manifest.tiles is None,
        f"{bundle} judges photographs in tiles, which a single file does not put together: deploy the bundle's folder",
    )
    again = any(one.start == "stitched" or one.resamples > 1 for one in sampler.passes)
    require(
        not again and sampler.mask_rule != "inpaint",
        f"{bundle} stitches, inpaints or resamples (AutoDDPM), which the single file does not hold: "
        "deploy the bundle's folder, or export another --method",
    )
    require(
        not manifest.aligned(product),
        f"{bundle} aligns the parts of the product {product!r}, which the single file does not: deploy the bundle's "
        "folder, or calibrate it without --align",
    )
    require(
        not manifest.scope(product).restricts,
        f"{bundle} inspects only some places of the product {product!r}, which the single file does not know: deploy "
        "the bundle's folder, or calibrate it with --set inspect=none --set ignore=none",
    )
    require(
        not sampler.early_exit,
        f"{bundle} lets images skip the masked pass (early_exit), which the single file does not hold: set it to 0 "
        "in the manifest, or deploy the bundle's folder",
    )
    require(
        all(graph.session != "traced" for graph in manifest.graphs.values()),
        f"{bundle} computes its guidance in a torch program, which no ONNX file can hold: "
        "export the checkpoint again with --guidance-backend onnx",
    )
    require(
        manifest.precision in TOLERANCES,
        f"{bundle} computes in {manifest.precision}, which the single file's engine does not on a CPU: "
        f"export the checkpoint again with --precision {' or '.join(reversed(TOLERANCES))}",
    )


def _serialized(model: ModelProto) -> bytes:
    size = model.ByteSize()
    require(
        size <= MAX_BYTES,
        f"{FILE_NAME} would have {size / 1e9:.1f} GB, and an ONNX file holds at most 2 GB: "
        "calibrate with fewer --samples, whose noises are in the file, or deploy the bundle's folder instead",
    )
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString(deterministic=True))


def _compare(file: Path, detector: Detector) -> None:
    """Raise BackendError unless the file says of a picture what the bundle says.

    A mask pixel right on its threshold may fall to either side, and all after it then differs. That is rare, and a file
    that is wrong is wrong on every picture: so one of a few must agree.
    """
    session, tolerance = open_session(file), TOLERANCES[detector.manifest.precision]
    try:
        errors = []
        for seed in range(3):
            errors.append(_difference(session, detector, _picture(detector, seed)))
            if max(errors[-1].values()) <= tolerance:
                return
    finally:
        session.close()
    found = ", ".join(f"{name} by {error:.2g}" for name, error in errors[0].items())
    raise BackendError(
        f"{FILE_NAME} disagrees with its bundle ({found}), so it was not written: export the bundle again"
    )


def _picture(detector: Detector, seed: int) -> NDArray[np.uint8]:
    """Return noise in stripes from top to bottom, the same whichever way an image library resizes first."""
    left, top, width, height = detector.preprocessing.roi or (0, 0, 75, 50)
    stripes = np.random.RandomState(seed).randint(0, 256, (1, left + width, 3), dtype=np.uint8)
    return np.repeat(stripes, top + height, axis=0)


def _difference(session: Session, detector: Detector, image: NDArray[np.uint8]) -> dict[str, float]:
    wanted, found = detector(image), session.run({"image": image})
    return {
        "anomaly_map": float(np.abs(found["anomaly_map"] - wanted.anomaly_map).max()),
        "anomaly_score": abs(float(found["anomaly_score"]) - wanted.score),
    }


def _put(written: Path, out: Path, bundle: Path) -> None:
    """Give the file its name; in a bundle also its entry, in an order that leaves a bundle that loads at any moment."""
    if out.resolve().parent != bundle.resolve():
        written.replace(out)
        return
    manifest = Manifest.read(bundle, verify=False)
    others = {name: entry for name, entry in manifest.files.items() if name != out.name}
    graphs = [manifest.graphs, *(tuning.graphs for tuning in manifest.tunings.values())]
    require(
        all(graph.file != out.name for some in graphs for graph in some.values()),
        f"{out} is a graph of the bundle: choose another --out",
    )
    entry = FileEntry.of(written)
    replace(manifest, files=others).write(bundle)
    written.replace(out)
    replace(manifest, files={**others, out.name: entry}).write(bundle)
