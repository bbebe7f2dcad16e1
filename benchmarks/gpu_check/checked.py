"""A backend of ours beside the oracle's arrays, stage by stage, and then timed as in `mdps bench`."""

from pathlib import Path
from typing import Any

from mdps.benchmarks.bench.ours import Ours
from mdps.benchmarks.bench.spec import Spec
from mdps.benchmarks.gpu_check.reference import Reference, compare
from mdps.runtime.manifest import Manifest


class Checked(Ours):
    """As `Ours`; the facts have `findings` too, an entry an output."""

    facts: dict[str, Any]

    def __init__(self, spec: Spec) -> None:
        assert spec.reference is not None
        manifest, reference = Manifest.read(spec.bundle), Reference.read(Path(spec.reference))
        reference.check_same(manifest)  # before an engine is loaded for nothing
        super().__init__(spec)
        precision = str(manifest.network.get("precision", "fp32"))
        samples = self.detector.settings.sampler.samples
        self.facts["findings"] = [one.to_json() for one in compare(reference, self.detector, precision, samples)]
