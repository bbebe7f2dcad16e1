"""A tuned detector: the terms of its map on one scale, and where they leave doubt the published method."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mdps.runtime.errors import BackendError, BundleError, ImageError
from mdps.runtime.pipeline import Array, Clock, Inspection, Inspector, Pipeline, check_finite, check_range, joined
from mdps.runtime.preprocessing import Observations, Views
from mdps.runtime.schedule import Step
from mdps.runtime.session import Arrays, Session
from mdps.runtime.settings import Settings
from mdps.runtime.tuning import FUSION, PHOTOGRAPH, Cascade, Tuning

SAMPLES = "posterior_samples"


@dataclass(frozen=True)
class Fused:
    """`Inspector` of a tuning, one image after another.

    `sessions` are those of its graphs, `few` makes its reconstruction where a term needs one, `published` judges as the
    bundle does without a tuning, where there is a cascade. `settings` are those of `Tuning.settings`.
    Raises BundleError where a graph asks for what the others do not give.
    """

    tuning: Tuning
    sessions: Mapping[str, Session]
    settings: Settings
    few: Pipeline | None = None
    published: Inspector | None = None

    def __post_init__(self) -> None:
        known = {"observation"} | ({SAMPLES} if self.few else set())
        if PHOTOGRAPH in self.sessions:
            known |= set(self.sessions[PHOTOGRAPH].outputs)
        given = {PHOTOGRAPH: {"photograph"}, FUSION: {term.name for term in self.tuning.terms}}
        for role, session in self.sessions.items():
            if unknown := set(session.inputs) - given.get(role, known):
                raise BundleError(
                    f"the graph {self.tuning.graphs[role].file} asks for {sorted(unknown)[0]!r}, which this tuning "
                    "does not have: run `mdps tune` again"
                )

    def inspect(
        self, observations: Views, mask_range: tuple[float, float] | None, exit_limit: float | None = None
    ) -> Inspection:
        """Inspect; `mask_range` and `exit_limit` are of the published method: the tuned one needs none and has none."""
        if self.published is not None:
            check_range(self.published.settings, mask_range)
        given = Observations.of(observations)
        found = joined([self._one(given[index : index + 1], mask_range) for index in range(len(given))])
        check_finite(found.anomaly_map, found.anomaly_score)
        return found

    def first_maps(self, observations: Views) -> Array:
        """Maps of the first pass of the published method, whose mask range is calibrated on them; else its own."""
        if self.published is not None:
            return self.published.first_maps(observations)
        return self.inspect(observations, None).anomaly_map

    def predicted_noise(self, noised: Array, step: Step) -> Array:
        denoiser = self.few or self.published
        if denoiser is None:
            raise BackendError("this tuned detector has no denoiser: its terms are of the photograph alone")
        return denoiser.predicted_noise(noised, step)

    @property
    def on_card(self) -> bool:
        return False

    @property
    def engines(self) -> dict[str, str]:
        loaded = [one.engines for one in (self.published, self.few) if one is not None]
        tuned = {f"tuned {role}": session.provider for role, session in self.sessions.items()}
        return {role: provider for engines in (*loaded, tuned) for role, provider in engines.items()}

    def close(self) -> None:
        for one in (self.few, self.published, *self.sessions.values()):
            if one is not None:
                one.close()

    def _one(self, given: Observations, mask_range: tuple[float, float] | None) -> Inspection:
        clock = Clock("photograph", "published")
        found, sample = self._fused(given, clock)
        other, cascade = None, self.tuning.cascade
        if cascade and self.published and cascade.low <= float(found["anomaly_score"][0]) <= cascade.high:
            with clock("published"):
                other = self.published.inspect(given, mask_range)
            found = _mapped(other, cascade)
            sample = other.posterior_samples[: len(sample)]
        anomaly_map, score = found["anomaly_map"], found["anomaly_score"]
        return Inspection(
            anomaly_map=anomaly_map,
            anomaly_score=score,
            mask=found["mask"],
            first_map=anomaly_map,
            first_score=score,
            posterior_samples=sample,
            times=clock.times,
            early_exit=np.zeros(1, np.bool_),
            tuned=np.asarray([other is None]),
        )

    def _fused(self, given: Observations, clock: Clock) -> tuple[Arrays, Array]:
        """Return what the fusion says of one image, and the first sample of its reconstruction, or none."""
        feeds: Arrays = {"observation": given.images}
        maps: Arrays = {}
        if PHOTOGRAPH in self.sessions:
            if given.photographs is None:
                raise ImageError("this tuned detector reads photographs too: give it what its `observe` returns")
            with clock("photograph"):
                feeds |= self.sessions[PHOTOGRAPH].run({"photograph": given.photographs})
        if self.few is not None:
            feeds[SAMPLES], maps = self._reconstructed(self.few, given, clock)
        with clock("score"):
            for role, session in self.sessions.items():
                if role not in (PHOTOGRAPH, FUSION):
                    maps[role] = session.run({name: feeds[name] for name in session.inputs}, ["map"])["map"]
            fusion = self.sessions[FUSION]
            found = fusion.run({name: maps[name] for name in fusion.inputs}, ["anomaly_map", "anomaly_score", "mask"])
        return found, feeds[SAMPLES][:, 0] if SAMPLES in feeds else given.images[:0]

    def _reconstructed(self, few: Pipeline, given: Observations, clock: Clock) -> tuple[Array, Arrays]:
        """Samples [1, N_s, 3, H, W], and the maps of the terms that are the reconstruction's own."""
        if not self.tuning.scores:
            with clock("first_pass"):
                return few.first_samples(given)[None], {}
        found = few.inspect(given, None)
        for name, spent in found.times.items():
            clock.times[name] += spent
        own = [term.name for term in self.tuning.terms if term.kind == "map"]
        return found.posterior_samples[None], dict.fromkeys(own, found.anomaly_map)


def _mapped(found: Inspection, cascade: Cascade) -> Arrays:
    """Return what the published method found, on the scale of the tuned one; see `Cascade`."""
    factor = np.float32((cascade.high - cascade.low) / (cascade.published_high - cascade.published_low))
    low, published_low = np.float32(cascade.low), np.float32(cascade.published_low)
    anomaly_map, score = (factor * (one - published_low) + low for one in (found.anomaly_map, found.anomaly_score))
    return {
        "anomaly_map": anomaly_map,
        "anomaly_score": np.clip(score, low, np.float32(cascade.high)),
        "mask": (anomaly_map > 1).astype(np.float32),
    }
