"""`mdps calibrate`: parses, calls, prints."""

from pathlib import Path
from typing import Any

import click

from mdps.commands.fields import fields, settings
from mdps.commands.options import AS_JSON, BUNDLE, FALSE_ALARM_RATE, ONE_FILE, TRACEBACK
from mdps.commands.terminal import print_values, spoken_warnings
from mdps.runtime.bundle import LoadOptions
from mdps.runtime.option import build
from mdps.runtime.scope import Scope
from mdps.tuning.options import TuneOptions


@click.command(
    epilog="""\b
Examples:
  mdps calibrate bundle good/
  mdps calibrate bundle good_blue/ --product blue --false-alarm-rate 0.005
  mdps calibrate bundle good/ --set mm-per-pixel=0.05
  mdps calibrate bundle good/ --align"""
)
@BUNDLE
@click.argument("good_folder", type=click.Path(path_type=Path))
@FALSE_ALARM_RATE
@fields(TuneOptions, only=["align"])
@fields(LoadOptions, without=["early_exit", "tuned"])
@settings(Scope, of="a fact of the product's photographs, which the bundle keeps")
@AS_JSON
@TRACEBACK
def calibrate(
    bundle: Path,
    good_folder: Path,
    false_alarm_rate: float,
    align: bool,
    as_json: bool,
    settings: dict[str, Any],
    **options: Any,
) -> None:
    """Set the threshold and the map ranges from images of good parts, and store them in the bundle.

    Then put defects of many kinds into these images, and say how many are found.

    Use images that took no part in training, and never those of a test. All of them are used or none: one that cannot
    be read ends the command, which names it and changes nothing.
    """
    from mdps.commands.messages import describe_calibration, mention_plans, next_predict
    from mdps.runtime.manifest import Manifest
    from mdps.serving.calibrate import calibrate_folder

    mention_plans(bundle)
    asked = build(LoadOptions, options)
    before = Manifest.read(bundle, verify=False).calibrations.get(asked.product)
    with spoken_warnings():
        calibration = calibrate_folder(bundle, good_folder, false_alarm_rate, asked, settings, align=align)
    if (bundle / ONE_FILE).is_file():
        click.echo(f"Warning: {bundle / ONE_FILE} keeps its threshold until `mdps single-file {bundle}`", err=True)
    if as_json:
        print_values(calibration.to_json(), as_json)
        return
    print_values(describe_calibration(calibration, before), as_json)
    if not calibration.doubt:
        click.echo(next_predict(bundle, asked))
