"""What the commands say of a bundle before they load it."""

import click
from click.core import ParameterSource

from mdps.serving.terminal import say


def mention_plans(*bundles: object) -> None:
    """A line on stderr for each bundle with engine plans that the current command's defaults would leave unused.

    Nothing where --backend or --provider was given: then the processor was chosen. A folder that is no bundle is left
    to `load`.
    """
    from mdps.runtime.errors import MdpsError
    from mdps.runtime.manifest import Manifest
    from mdps.runtime.plans import plans_of

    context = click.get_current_context()
    if any(context.get_parameter_source(name) is not ParameterSource.DEFAULT for name in ("backend", "provider")):
        return
    for bundle in bundles:
        try:
            plans = plans_of(Manifest.read(str(bundle), verify=False))
        except (MdpsError, OSError):
            continue
        if backends := list(dict.fromkeys(plan.backend for plan in plans)):
            say(
                f"{bundle} has plans for {' and '.join(backends)}, but this runs on the CPU: add "
                f"--backend {' or '.join(backends)} to use them"
            )
