"""`mdps calibrate`: parses, calls, prints."""

from pathlib import Path
from typing import Any

import click

from mdps.commands.options import (
    AS_JSON,
    BACKEND,
    BUNDLE,
    DEVICE,
    FALSE_ALARM_RATE,
    PRODUCT,
    PROVIDER,
    SAMPLES,
    THREADS,
    TRACEBACK,
)
from mdps.commands.single_file import ONE_FILE
from mdps.commands.terminal import print_values, spoken_warnings


@click.command(
    epilog="""\b
Examples:
  mdps calibrate bundle good/
  mdps calibrate bundle good_blue/ --product blue --false-alarm-rate 0.005"""
)
@BUNDLE
@click.argument("good_folder", type=click.Path(path_type=Path))
@FALSE_ALARM_RATE
@SAMPLES
@PRODUCT
@THREADS
@BACKEND
@PROVIDER
@DEVICE
@AS_JSON
@TRACEBACK
def calibrate(bundle: Path, good_folder: Path, false_alarm_rate: float, as_json: bool, **options: Any) -> None:
    """Set the threshold and the map ranges from images of good parts, and store them in the bundle.

    Use images that took no part in training, and never those of a test. All of them are used or none: one that cannot
    be read ends the command, which names it and changes nothing.
    """
    from mdps.commands.messages import describe_calibration, mention_plans, next_predict
    from mdps.runtime.manifest import Manifest
    from mdps.serving.run import calibrate_folder

    mention_plans(bundle)
    before = Manifest.read(bundle, verify=False).calibrations.get(options["product"])
    with spoken_warnings():
        calibration = calibrate_folder(bundle, good_folder, false_alarm_rate, **options)
    if (bundle / ONE_FILE).is_file():
        click.echo(f"Warning: {bundle / ONE_FILE} keeps its threshold until `mdps single-file {bundle}`", err=True)
    if as_json:
        print_values(calibration.to_json(), as_json)
        return
    print_values(describe_calibration(calibration, before), as_json)
    click.echo(next_predict(bundle, options))
