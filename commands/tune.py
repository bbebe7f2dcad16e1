"""`mdps tune`: parses, calls, prints."""

from pathlib import Path
from typing import Any

import click

from mdps.commands.fields import fields, settings
from mdps.commands.options import AS_JSON, BUNDLE, FALSE_ALARM_RATE, TRACEBACK
from mdps.commands.terminal import needs, print_values, say, spoken_warnings
from mdps.runtime.bundle import LoadOptions
from mdps.runtime.option import build
from mdps.tuning.options import TuneOptions

_BAR = "{percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"


@click.command(
    epilog="""\b
Examples:
  mdps tune bundle good/
  mdps tune bundle good_blue/ --product blue --budget-ms 50
\b
Run it again after a stop: it goes on. `mdps tune --set help` lists what is seldom set."""
)
@BUNDLE
@click.argument("good_folder", type=click.Path(path_type=Path))
@fields(TuneOptions)
@FALSE_ALARM_RATE
@fields(LoadOptions, only=["product", "threads", "engine"])
@settings(TuneOptions, of="what is seldom needed")
@AS_JSON
@TRACEBACK
def tune(
    bundle: Path, good_folder: Path, false_alarm_rate: float, as_json: bool, settings: dict[str, Any], **options: Any
) -> None:
    """Choose the detector that fits these parts within a time, by defects put into images of good ones.

    Tries statistics of good parts, reconstructions of few calls and sums of both, and stores the best in the bundle,
    calibrated. A part of the images is held out for that. Best are images that took no part in training; never give
    those of a test.
    """
    from mdps.commands.messages import describe_calibration, next_predict
    from mdps.runtime.manifest import Manifest

    with needs("export", "cpu"):
        from tqdm import tqdm

        from mdps.tuning.tune import report_of
        from mdps.tuning.tune import tune as search
    names = {name: options.pop(name) for name in ("product", "threads", "engine")}
    how, asked = build(TuneOptions, options | settings), build(LoadOptions, names)
    before = Manifest.read(bundle, verify=False).calibrations.get(asked.product)
    with spoken_warnings(), tqdm(total=1.0, bar_format=_BAR, disable=None) as bar:

        def progress(said: str, share: float) -> None:
            bar.set_postfix_str(said)
            bar.update(share - bar.n)

        found = search(bundle, good_folder, how, asked, false_alarm_rate, progress)
    say(f"wrote {report_of(bundle, how)}")
    if as_json:
        print_values(found.to_json(), as_json)
        return
    print_values(found.told() | describe_calibration(found.calibration, before), as_json)
    if not found.calibration.doubt:
        click.echo(next_predict(bundle, asked))
