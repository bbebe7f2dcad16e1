"""An engine of ours beside the oracle's arrays, stage by stage, and then timed as in `mdps bench`."""

from pathlib import Path
from typing import Any

from mdps.benchmarks.bench.competitor import Outcome
from mdps.benchmarks.bench.ours import Ours
from mdps.benchmarks.bench.spec import Spec
from mdps.benchmarks.gpu_check.reference import Reference, compare_stages, compare_whole
from mdps.benchmarks.gpu_check.stages import open_stages
from mdps.runtime.manifest import Manifest


class Checked(Ours):
    """As `Ours`; the facts have `findings` too, an entry an output, and runs on a card its own times."""

    facts: dict[str, Any]

    def __init__(self, spec: Spec) -> None:
        assert spec.reference is not None
        folder, reference = Path(spec.bundle), Reference.read(Path(spec.reference))
        manifest = Manifest.read(folder)
        reference.check_same(manifest)  # before an engine is loaded for nothing
        precision, samples = manifest.precision, spec.samples or 1
        with open_stages(folder, manifest, spec.variant, spec.threads) as stages:
            found = compare_stages(reference, stages, manifest.settings, precision, samples)
        super().__init__(spec)
        found += compare_whole(reference, self.detector, precision, samples)
        self.facts["findings"] = [one.to_json() for one in found]
        self._by_events = self.detector.on_card

    def run(self) -> Outcome:
        """As `Ours.run`; where the whole loop stays on the card, events on it time passes and scoring too."""
        found = self.detector.inspect(self._observations, mask_range=(0.0, 1.0))
        passes = found.times["first_pass"] + found.times["masked_pass"]
        device = sum(found.times.values()) if self._by_events else None
        return Outcome(float(found.anomaly_score[0]), passes, device)
