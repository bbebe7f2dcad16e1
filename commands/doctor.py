"""`mdps doctor`: parses, calls, prints."""

import click

from mdps.commands.options import AS_JSON, TRACEBACK
from mdps.commands.terminal import print_values


@click.command()
@AS_JSON
@TRACEBACK
def doctor(as_json: bool) -> int:
    """Try every engine, and list cards, processors and versions."""
    from mdps.runtime.doctor import diagnose

    diagnosis = diagnose()
    print_values(diagnosis.to_json(), as_json)
    return 0 if diagnosis.works else 1
