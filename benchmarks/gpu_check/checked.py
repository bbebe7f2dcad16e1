"""A backend of ours beside the oracle's arrays, stage by stage, and then timed as in `mdps bench`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mdps.benchmarks.bench.ours import Ours
from mdps.benchmarks.bench.spec import Spec
from mdps.benchmarks.gpu_check.reference import Reference, compare
from mdps.runtime.manifest import Manifest
from mdps.runtime.session import BACKENDS, Session, open_session


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
        with _plain_step(spec, manifest) as plain:
            found = compare(reference, self.detector, precision, samples, plain)
        self.facts["findings"] = [one.to_json() for one in found]


@contextmanager
def _plain_step(spec: Spec, manifest: Manifest) -> Iterator[Session | None]:
    """The plain step where it is a graph of the bundle: the passes of the check are guided and open no other."""
    graph = manifest.graphs.get("plain_step")
    if graph is None or spec.variant not in BACKENDS:
        yield None
        return
    file = Path(spec.bundle) / graph.variants.get(spec.variant, graph.file)
    session = open_session(file, spec.device, spec.threads, spec.variant)
    try:
        yield session
    finally:
        session.close()
