"""The settings a run began with, for resuming it."""

import json
from pathlib import Path

from mdps.models.unet_config import UNetConfig
from mdps.runtime.errors import UsageError
from mdps.runtime.preprocessing import Preprocessing
from mdps.training.config import NETWORKS, TrainingConfig
from mdps.training.folder import CONFIG, check_folder


def resumed_settings(
    out: Path,
    *,
    recipe: str | None = None,
    image_size: int | None = None,
    crop_size: int | None = None,
    base: int | None = None,
) -> tuple[TrainingConfig, Preprocessing]:
    """Return the settings and preprocessing of the run in folder `out`, as its config.json has them.

    UsageError where there is no run to go on with, where its config.json cannot be read, and where one of the others is
    given and is not the run's: `recipe` ("paper" or "small"), the sides `image_size` and `crop_size` (0: no crop) in
    pixels, `base` channels.
    """
    check_folder(out, resume=True)
    path = out / CONFIG
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        config = TrainingConfig.from_json(content["training"])
        preprocessing = Preprocessing.from_json(content["preprocessing"], f"{path}, preprocessing")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} does not say what the run was begun with ({type(error).__name__}); put the file back, or choose "
            "another folder for the run"
        ) from error
    given = {"image-size": image_size, "crop-size": crop_size, "base": base}
    theirs = (preprocessing.image_size[0], preprocessing.crop_size or 0, config.network.model_channels)
    for (name, ours), value in zip(given.items(), theirs, strict=True):
        if ours is not None and ours != value:
            raise UsageError(f"{out} was begun with --{name} {value}, not {ours}; leave --{name} out")
    if recipe is not None and config.network != _network(recipe, config.network):
        raise UsageError(
            f"{out} was begun with another network than that of --recipe {recipe}; leave --recipe out, and --resume "
            "takes the run's own"
        )
    return config, preprocessing


def _network(recipe: str, like: UNetConfig) -> UNetConfig | None:
    """Return the network of the recipe in the size of another; None where it cannot have that."""
    try:
        return NETWORKS[recipe](like.image_size, like.model_channels)
    except UsageError:
        return None
