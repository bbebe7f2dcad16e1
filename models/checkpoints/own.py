"""Our own format: safetensors with guided-diffusion's keys; one JSON entry `mdps` in the header says the rest."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save

from mdps.models.checkpoints.report import CheckpointError, shown
from mdps.models.checkpoints.statements import Prediction, Statement, parse_description, parse_prediction
from mdps.models.unet import UNet, UNetConfig
from mdps.runtime import atomic
from mdps.runtime.schedule import NoiseSchedule

FORMAT_VERSION = 1
METADATA_KEY = "mdps"


def save_denoiser(
    path: Path,
    network: UNet,
    schedule: NoiseSchedule,
    prediction: Prediction = "eps",
    preprocessing: dict[str, Any] | None = None,
    extra: dict[str, Any] | None = None,
) -> None:
    """Write a denoiser so that `load_denoiser` needs no options; an old file stays until the new one is complete.

    `preprocessing` and `extra` (training notes) are JSON objects. Raises OSError where the folder cannot be written.
    """
    description = {
        "format_version": FORMAT_VERSION,
        "network": network.config.to_json(),
        "schedule": schedule.to_json(),
        "prediction": parse_prediction(prediction, "prediction"),
        "preprocessing": preprocessing,
        "extra": extra or {},
    }
    tensors = {key: value.detach().cpu().contiguous() for key, value in network.state_dict().items()}
    atomic.write_bytes(path, save(tensors, metadata={METADATA_KEY: json.dumps(description)}))


def read_description(metadata: dict[str, str]) -> tuple[Statement, dict[str, Any]]:
    """Read the header and the `extra` notes; CheckpointError for a header that is damaged or too new."""
    try:
        obj = json.loads(metadata[METADATA_KEY])
        version = obj["format_version"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"has a damaged mdps header ({error}): save it again") from None
    if version != FORMAT_VERSION:
        raise CheckpointError(f"is of format version {shown(version)}, this mdps reads {FORMAT_VERSION}: update mdps")
    try:
        UNetConfig.from_json(obj["network"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"has a damaged mdps header ({error}): save it again") from None
    extra = obj.get("extra") or {}
    if not isinstance(extra, dict):
        raise CheckpointError("has a damaged mdps header (its extra notes are no object): save it again")
    return parse_description(obj, "file"), extra
