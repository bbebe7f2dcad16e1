"""Reconstructions by samplers of few calls, as the runtime makes them, with their maps and their time."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

from mdps.runtime.bundle import Bundle, LoadOptions
from mdps.runtime.graphs import GraphEntry
from mdps.runtime.loading import open_pipeline
from mdps.runtime.manifest import Manifest
from mdps.runtime.settings import SamplerSettings
from mdps.runtime.tuning import FUSION, Term, Tuning
from mdps.tuning.candidates import guided, samplers
from mdps.tuning.statistics import View

Array = NDArray[np.float32]
DDAD = "ddad_step"


@dataclass(frozen=True)
class Reconstruction:
    """Samples [n, N_s, 3, H, W] of images, the maps [n, H, W] that the bundle's score graph makes, and ms an image."""

    samples: Array
    maps: Array
    ms: float
    score_ms: float


@dataclass(frozen=True)
class Reconstructor:
    """Reconstructs observations by each of `samplers`, those that the graphs of the bundle can."""

    bundle: Path
    manifest: Manifest
    options: LoadOptions

    @property
    def samplers(self) -> dict[str, SamplerSettings]:
        known = samplers(self.manifest.settings.sampler, len(self.manifest.schedule))
        return {name: one for name, one in known.items() if not guided(one) or self._guides}

    @property
    def _guides(self) -> bool:
        return DDAD in self.manifest.graphs or self.manifest.settings.sampler.gradient == "ddad"

    @property
    def lacking(self) -> list[str]:
        """Those that the bundle has no graph for."""
        known = samplers(self.manifest.settings.sampler, len(self.manifest.schedule))
        return [name for name in known if name not in self.samplers]

    @property
    def view(self) -> View:
        """Features of the residual: of the observation at the size that the bundle's feature network sees it."""
        side = max(*self.manifest.preprocessing.network_size, min(224, self.manifest.settings.score.feature_size or 0))
        return View(side, (1, 2, 3), side // 8)

    def run(self, sampler: SamplerSettings, *sets: Array) -> list[Reconstruction]:
        """Reconstruct sets of observations [n, 3, H, W], one image after another."""
        term = Term("map", "map", "reconstruction", 0.0, 1.0, 1.0)
        tuning = Tuning(sampler, None, (term,), {FUSION: GraphEntry("none")})
        settings = tuning.settings(self.manifest.settings)
        with ExitStack() as opened:
            bundle = Bundle(self.bundle, self.manifest, settings, tuning)
            pipeline = open_pipeline(bundle, opened, self.options)
            rows = [[pipeline.inspect(image[None], None) for image in images] for images in sets]
        times = [row.times for images in rows for row in images]
        ms = median(sum(spent for name, spent in one.items() if name != "score") for one in times)
        score = median(one["score"] for one in times)
        return [
            Reconstruction(
                np.stack([row.posterior_samples for row in images]),
                np.concatenate([row.anomaly_map[:, 0] for row in images]), ms, score,
            )
            for images in rows
        ]  # fmt: skip
