"""Where prepared things lie in a work folder, and what they are called."""

import re
from dataclasses import dataclass
from pathlib import Path

NETWORKS = ("demo", "authors")
"""The network that ships with mdps, at 64 x 64; the authors' of 33 M parameters with seeded weights, at 256 x 256."""
KIND = re.compile(r"traced|fp32|fp16|(?P<of>fp32|fp16)x(?P<samples>\d+)")
"""A bundle's precision, or with a torch program in fp32. fp16x16 is for 16 samples an image: a plan has its range."""
PHOTOGRAPHS = "demo:photographs"
PLAN_BACKENDS = ("tensorrt-rtx", "tensorrt")


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
        network, kind, *backend = thing.split(":")
        if kind == "oracle":
            return self.reference(network).is_file()
        bundle = self.bundle(network, kind)
        if not (bundle / "manifest.json").is_file():
            return False
        return not backend or self._has_plans(bundle, backend[0])

    def _has_plans(self, bundle: Path, backend: str) -> bool:
        from mdps.runtime.manifest import Manifest
        from mdps.runtime.plans import plans_of

        return any(entry.backend == backend for entry in plans_of(Manifest.read(bundle, verify=False)))
