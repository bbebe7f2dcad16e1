"""How much of a card's memory a bundle takes: estimated from its manifest, or measured when it was loaded before.

The estimate has three parts. Weights: the bytes of the files, once for each graph that is opened, for an engine keeps a
copy a graph. Activations: what lives at once in a step, from the widths and sizes of the network's levels; against
the real step graphs, node by node, it is between 1 and 2.2 times of what they need. Libraries: CUDA's context, the
handles and workspaces of cuDNN and cuBLAS, a round number that no estimate gives. A measurement replaces all three.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mdps.runtime.cards import Card
from mdps.runtime.errors import BackendError
from mdps.runtime.graphs import GUIDED, STEPS
from mdps.runtime.manifest import Manifest
from mdps.runtime.user_cache import cache_folder, write_newest

FILE_NAME = "card_memory.json"
LIBRARIES = 600 * 10**6
_GUIDED_MAPS, _PLAIN_MAPS = 13, 8  # maps of a level's width and size that live at once: a block, and a level
_HALF = 0.75  # of the activations in half precision: norms and what lies beside a cast stay float32
_FLOAT = 4


@dataclass(frozen=True)
class Need:
    """Bytes. `activations` are those of `samples` posterior samples at once."""

    weights: int
    activations: int
    libraries: int = LIBRARIES

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.activations + self.libraries


def estimate(manifest: Manifest, roles: Iterable[str], samples: int, files: Mapping[str, str] | None = None) -> Need:
    """Estimate the memory of the graphs `roles` for `samples` at once; `files` names files other than the graphs.

    Such a file, an engine plan, holds its weights itself.
    """
    given, roles = files or {}, tuple(roles)
    weights = sum(_weights(manifest, role, given.get(role)) for role in roles)
    shares = [_step(manifest, role) for role in roles if role in STEPS]
    if len(shares) < len(roles):
        shares.append(_scoring(manifest))
    return Need(weights, samples * sum(shares))


def live(manifest: Manifest, role: str, file: str) -> int:
    """Return the bytes of one sample that live at once in the graph `role`: what its export recorded for `file`.

    Of an older bundle it is the estimate.
    """
    recorded = manifest.network.get("live_bytes")
    found = recorded.get(file) if isinstance(recorded, dict) else None
    if isinstance(found, int) and found > 0:
        return found
    try:
        return _step(manifest, role) if role in STEPS else _scoring(manifest)
    except (TypeError, ValueError, LookupError):  # `network` is free of form, so it may not describe a network
        return _scoring(manifest)


def _scoring(manifest: Manifest) -> int:
    """Return an upper bound for features and score: one image with a hundred channels."""
    height, width = manifest.preprocessing.network_size
    return 100 * _FLOAT * max(height * width, (manifest.settings.score.feature_size or 0) ** 2)


def _weights(manifest: Manifest, role: str, file: str | None) -> int:
    sizes = {name: entry.bytes for name, entry in manifest.files.items()}
    if file is not None:
        return sizes.get(file, 0)
    graph = manifest.graphs.get(role)
    own = sizes.get(graph.file, 0) if graph else 0
    if graph is not None and graph.session == "traced":
        return own
    shared = "denoiser.weights" if role in STEPS else "features.weights"
    return own + sizes.get(shared, 0)


def _step(manifest: Manifest, role: str) -> int:
    network = {"model_channels": 64, "channel_mult": [1, 2, 4], "num_res_blocks": 2} | manifest.network
    floats = step_bytes(network, manifest.preprocessing.network_size, guided=role == GUIDED)
    return round(floats * (_HALF if manifest.precision != "fp32" else 1))


def weight_bytes(network: Mapping[str, Any]) -> int:
    """Return about how many bytes the weights of a network take in float32, from its configuration."""
    blocks: int = network["num_res_blocks"]
    squares = sum((mult * network["model_channels"]) ** 2 for mult in network["channel_mult"])
    # 3 x 3 convolutions: two a block on the way down, on the way up the first has the skip beside it; two resamplers.
    return int(1.2 * _FLOAT * squares * (18 * blocks + 29 * (blocks + 1) + 36))


def step_bytes(network: Mapping[str, Any], size: tuple[int, int], *, guided: bool) -> int:
    """Return the bytes of a sample in float32 that live at once in a step at `size` (H, W), from its configuration."""
    height, width = size
    blocks: int = 2 * network["num_res_blocks"] + 1  # of a level, down and up
    pixels = [height * width / 4**level for level in range(len(network["channel_mult"]))]
    maps = sum(
        mult * network["model_channels"] * count for mult, count in zip(network["channel_mult"], pixels, strict=True)
    )
    heads = network.get("num_heads") or 1
    attention = [heads * (height * width / factor**2) ** 2 for factor in network.get("attention_factors", ())]
    floats: float
    if guided:  # what the gradient goes back through is kept
        floats = _GUIDED_MAPS * blocks * maps + 2 * blocks * sum(attention)
    else:
        floats = _PLAIN_MAPS * maps + 2 * max(attention, default=0)
    return round(_FLOAT * floats)


def measurement_key(manifest: Manifest, card: Card, engine: str, samples: int) -> str:
    """One word for this bundle on this kind of card with `engine`, its name and releases: another where any differs."""
    return hashlib.sha256(repr((manifest.files_sha256, card.name, engine, samples)).encode()).hexdigest()


def check_room(card: Card, need: Need, key: str, bundle: str, others: Iterable[Card] = ()) -> None:
    """BackendError where the card has less free memory than was measured, or else is estimated, to be needed.

    Nothing where the card does not say how much it has free. `others` are cards that could be taken instead.
    """
    if card.free is None:
        return
    measured = _read().get(key)
    wanted = need.total if measured is None else measured
    if wanted <= card.free:
        return
    parts = {"weights": need.weights, "activations": need.activations, "libraries": need.libraries}
    how = (
        "estimated: " + ", ".join(f"{name} {gigabytes(size)}" for name, size in parts.items())
        if measured is None
        else f"measured on this kind of card, see {_file()}"
    )
    roomy = [other for other in others if other.index != card.index and (other.free or 0) >= wanted]
    instead = f"choose {roomy[0]}, which has {gigabytes(roomy[0].free or 0)}, " if roomy else ""
    raise BackendError(
        f"{bundle} needs {gigabytes(wanted)} GB ({how}), card {card.index} ({card.name}) has {gigabytes(card.free)} "
        f"free of {gigabytes(card.total or 0)}: {instead}close what else is on it (`nvidia-smi` lists that), or load "
        "with fewer samples or images at once"
    )


def remember(key: str, taken: int) -> None:
    """Write down what a loaded and warmed up bundle took; nothing where that is not possible or no sensible number."""
    if taken <= 0:
        return
    with suppress(OSError):
        write_newest(_file(), _read(), key, taken)


def _read() -> dict[str, int]:
    try:
        entries = json.loads(_file().read_bytes())
        return {key: value for key, value in entries.items() if type(value) is int and value > 0}
    except (OSError, ValueError, AttributeError, RecursionError):  # it is measured again
        return {}


def _file() -> Path:
    return cache_folder() / FILE_NAME


def gigabytes(count: int) -> str:
    """With one digit behind the point."""
    return f"{count / 1e9:.1f}"
