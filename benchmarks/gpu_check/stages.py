"""The graphs of a bundle one by one on a backend, also where a detector keeps what lies between them on the card."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdps.runtime.device.seam import Buffer, DeviceEngine, Driver, Stream
from mdps.runtime.loading import open_pipeline
from mdps.runtime.manifest import Manifest
from mdps.runtime.ort import ON_CARDS
from mdps.runtime.ort_card import role_card
from mdps.runtime.plans import plans_of
from mdps.runtime.session import PLAN_BACKENDS, Arrays, Session, open_session


@dataclass(frozen=True)
class Stages:
    """A session a graph; None for one that the bundle has not."""

    guided: "Runs | None"
    plain: "Runs | None"
    features: "Runs | None"
    score: "Runs"


class PlanRuns:
    """A plan as a session: every array goes up, and every result comes back."""

    def __init__(self, driver: Driver, stream: Stream, engine: DeviceEngine) -> None:
        self._driver, self._stream, self._engine = driver, stream, engine
        self.inputs = tuple(port.name for port in engine.inputs)

    def run(self, feeds: Mapping[str, NDArray[Any]], outputs: Sequence[str] | None = None) -> Arrays:
        """All outputs, whose axis of any length is as long as the inputs' first one."""
        fed = {name: np.ascontiguousarray(feeds[name], dtype=np.float32) for name in self.inputs}
        fed = {name: array.reshape(feeds[name].shape) for name, array in fed.items()}  # a scalar stays one
        count = next(len(array) for array in fed.values() if array.ndim)
        found = {
            port.name: np.empty([count if n is None else n for n in port.shape], dtype=np.float32)
            for port in self._engine.outputs
        }
        with self._driver.current():
            places = {name: Buffer(self._driver.allocate(array.nbytes), array.shape)
                      for name, array in (fed | found).items()}  # fmt: skip
            for name, array in fed.items():
                self._driver.upload(places[name].address, array, self._stream)
            self._engine.bind(places).enqueue(self._stream)
            for name, array in found.items():
                self._driver.download(array, places[name].address, self._stream)
            self._driver.synchronise(self._stream)
        return dict(found)


Runs = Session | PlanRuns


@contextmanager
def open_stages(folder: Path, manifest: Manifest, backend: str, provider: str, threads: int) -> Iterator[Stages]:
    """All graphs of the bundle; raises as `load`."""
    with ExitStack() as opened:
        if backend in PLAN_BACKENDS:
            yield _plans(folder, manifest, backend, opened)
            return
        pipeline = open_pipeline(
            folder, manifest, manifest.settings, opened, backend=backend, provider=provider, threads=threads
        )
        plain: Session | None = pipeline.steps.plain
        graph = manifest.graphs.get("plain_step")
        if plain is None and graph is not None:  # no pass needs it, but it is there
            card = role_card(manifest, "plain_step", 0) if provider in ON_CARDS else None
            plain = open_session(folder / graph.variants.get(backend, graph.file), provider, threads, backend, card)
            opened.callback(plain.close)
        yield Stages(pipeline.steps.guided, plain, pipeline.features, pipeline.score)


def _plans(folder: Path, manifest: Manifest, backend: str, opened: ExitStack) -> Stages:
    """The plans that there are; whether they fit card and release is asked as by `load`."""
    from mdps.runtime.device import cuda
    from mdps.runtime.trt import Loader, check_plan, load_library

    library, driver = load_library(backend), cuda.open_driver()
    opened.callback(driver.close)
    entries = [entry for entry in plans_of(manifest, str(folder)) if entry.backend == backend]
    for entry in entries:
        check_plan(entry, str(library.__version__), driver.card, folder, manifest)
    with driver.current():
        stream, loader = driver.stream(), Loader(backend, library, driver)
        engines = {entry.role: loader.open(folder / entry.file) for entry in entries}

    def close() -> None:
        with driver.current():
            for engine in engines.values():
                engine.close()

    opened.callback(close)
    runs = {role: PlanRuns(driver, stream, engine) for role, engine in engines.items()}
    return Stages(runs.get("guided_step"), runs.get("plain_step"), runs.get("features"), runs["score"])
