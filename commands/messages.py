"""Messages of the commands about a bundle and its calibration."""

from typing import Any

import click
from click.core import ParameterSource

from mdps.commands.terminal import say
from mdps.runtime.bundle import LoadOptions
from mdps.runtime.calibration import Calibration
from mdps.runtime.errors import MdpsError
from mdps.runtime.manifest import Manifest

_MODES = {"paper": "mdps, as the paper has it", "reference": "mdps, as the authors' code has it"}


def describe_calibration(found: Calibration, before: Calibration | None) -> dict[str, Any]:
    """Describe a calibration that was just stored in the place of `before`."""
    old = "" if before is None else f" (replaces {before.threshold:.5g}, of {images(before)})"
    return {
        "threshold": f"{found.threshold:.5g}{old}",
        "calibrated on": images(found),
        "false alarms": false_alarms(found),
        **({"found of defects put into good images": found.fitness.summary} if found.fitness else {}),
    }


def describe_bundle(manifest: Manifest, folder: object) -> dict[str, Any]:
    """Describe a bundle, and whether it gives verdicts."""
    height, width = manifest.preprocessing.network_size
    sampler = manifest.settings.sampler
    engine = f" --engine {manifest.plans[0].engine}" if manifest.plans else ""
    tiles = f" tiles of photographs at a scale of {manifest.tiles.scale:g}" if manifest.tiles else ""
    known = {
        product: f"threshold {found.threshold:.5g} of {images(found)}, false alarms {false_alarms(found)}"
        f"{found.doubt and f'; {found.doubt}'}"
        for product, found in manifest.calibrations.items()
    }
    return {
        "bundle": manifest.name,
        "images": f"{width} x {height}{tiles}",
        "method": _MODES.get(manifest.settings.mode, manifest.settings.mode),
        "passes": 1 if sampler.masked_pass is None else 2,
        "made from": manifest.checkpoint.name,
        "calibrated": known or f"no, it gives no verdicts yet; next: mdps calibrate {folder} GOOD_FOLDER{engine}",
    }


def false_alarms(calibration: Calibration) -> str:
    """Return the promised rate, with the one that was asked for where they differ."""
    promised, asked = calibration.expected_false_alarm_rate, calibration.false_alarm_rate
    more = "" if promised <= asked + 1e-9 else f", which so few images can promise; {100 * asked:.3g} % was asked for"
    return f"at most {100 * promised:.3g} % of further good parts{more}"


def images(calibration: Calibration) -> str:
    """Return the number of images in words."""
    return f"{calibration.images} good image{'' if calibration.images == 1 else 's'}"


def next_predict(bundle: object, options: LoadOptions) -> str:
    """Return the command to run after a calibration with these options, without those that are defaults."""
    asked = options.command_line("samples", "product", "threads", "engine", "device")
    return f"next: mdps predict {bundle} IMAGES --out results{asked}"


def mention_plans(*bundles: object) -> None:
    """Print a line on stderr for each bundle with engine plans that the command's defaults leave unused.

    Nothing where --engine was given: then the processor was chosen. A folder that is no bundle is left to `load`.
    """
    if click.get_current_context().get_parameter_source("engine") is not ParameterSource.DEFAULT:
        return
    for bundle in bundles:
        try:
            plans = Manifest.read(str(bundle), verify=False).plans
        except (MdpsError, OSError):
            continue
        if engines := list(dict.fromkeys(plan.engine for plan in plans)):
            say(
                f"{bundle} has plans for {' and '.join(engines)}, but this runs on the CPU: add "
                f"--engine {' or '.join(engines)} to use them"
            )
