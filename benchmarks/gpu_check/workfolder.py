"""Where prepared things lie in a work folder, and what they are called."""

import re
from dataclasses import dataclass
from pathlib import Path

from mdps.runtime.engines import ENGINES
from mdps.runtime.errors import require

NETWORKS = ("demo", "authors")
"""The network that ships with mdps, at 64 x 64; the authors' of 33 M parameters with seeded weights, at 256 x 256."""
KIND = re.compile(r"traced|fp32|fp16|(?P<of>fp32|fp16)x(?P<samples>\d+)")
"""A bundle's precision, or with a torch program in fp32. fp16x16 is for 16 samples an image: a plan has its range."""
PHOTOGRAPHS = "demo:photographs"
PLANNED = [engine.name for engine in ENGINES if engine.reads == "plans"]
THINGS = (
    f"{PHOTOGRAPHS} (to calibrate and judge); of {' and '.join(NETWORKS)}, such as demo: demo:fp32, demo:fp16, "
    "demo:traced (bundles), demo:fp16x16 (for 16 samples an image), demo:oracle (the oracle's arrays), "
    f"{' and '.join(f'demo:fp16:{name}' for name in PLANNED)} (plans)"
)
"""All that can be prepared, in words."""


def parsed(thing: str) -> list[str]:
    """Network, kind and, for plans, engine; UsageError for what is none of THINGS."""
    network, _, made = thing.partition(":")
    kind, plans, engine = made.partition(":")
    is_bundle = KIND.fullmatch(kind) is not None and (not plans or engine in PLANNED)
    known = (network in NETWORKS and (is_bundle or made == "oracle")) or thing == PHOTOGRAPHS
    require(known, f"there is no {thing!r} to prepare: choose among {THINGS}")
    return thing.split(":")


@dataclass(frozen=True)
class Prepared:
    """A work folder."""

    folder: Path

    def checkpoint(self, network: str) -> Path:
        """The denoiser a network's bundles are made from."""
        return self.folder / f"{network}.safetensors"

    def bundle(self, network: str, kind: str) -> Path:
        """A network's bundle of a KIND."""
        return self.folder / f"{network}-{kind}"

    def reference(self, network: str) -> Path:
        """What the oracle computed with a network."""
        return self.folder / f"{network}-oracle.npz"

    @property
    def photographs(self) -> Path:
        """Pictures to calibrate the demo's network on, in good, and to judge, in test."""
        return self.folder / "photographs"

    def has(self, thing: str) -> bool:
        """Whether `thing` (see `prepare`) is there."""
        if thing == PHOTOGRAPHS:
            return self.photographs.is_dir()
        network, kind, *engine = thing.split(":")
        if kind == "oracle":
            return self.reference(network).is_file()
        bundle = self.bundle(network, kind)
        if not (bundle / "manifest.json").is_file():
            return False
        return not engine or self._has_plans(bundle, engine[0])

    def _has_plans(self, bundle: Path, engine: str) -> bool:
        from mdps.runtime.manifest import Manifest

        return bool(Manifest.read(bundle, verify=False).plans_of(engine))
