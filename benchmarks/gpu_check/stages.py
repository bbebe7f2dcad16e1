"""The graphs of a bundle one by one on an engine, also where a detector keeps what lies between them on the card."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdps.runtime.bundle import Bundle
from mdps.runtime.device.seam import Buffer, DeviceEngine, Driver, Stream
from mdps.runtime.engines import Engine, named
from mdps.runtime.graphs import Graphs
from mdps.runtime.loading import open_graphs
from mdps.runtime.manifest import Manifest
from mdps.runtime.session import Arrays, Session


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
Stages = Graphs[Runs]


@contextmanager
def open_stages(folder: Path, manifest: Manifest, engine: str, threads: int) -> Iterator[Stages]:
    """Open all graphs of the bundle, those too that no pass needs; raises as `load`."""
    row = named(engine)
    with ExitStack() as opened:
        if row.reads == "plans":
            yield _plans(folder, manifest, row, opened)
            return
        bundle = Bundle(folder, manifest, manifest.settings)
        sessions = open_graphs(bundle, opened, engine=engine, threads=threads)
        yield Graphs[Runs].of(dict(sessions.roles))


def _plans(folder: Path, manifest: Manifest, engine: Engine, opened: ExitStack) -> Stages:
    """The plans that there are; whether they fit card and release is asked as by `load`."""
    from mdps.runtime.device import cuda
    from mdps.runtime.engines.tensorrt import Loader, check_plan, load_library

    library, driver = load_library(engine), cuda.open_driver()
    opened.callback(driver.close)
    entries = manifest.plans_of(engine.name)
    for entry in entries.values():
        check_plan(entry, str(library.__version__), driver.card, folder, manifest)
    with driver.current():
        stream, loader = driver.stream(), Loader(engine, library, driver)
        engines = {role: loader.open(folder / entry.file) for role, entry in entries.items()}

    def close() -> None:
        with driver.current():
            for one in engines.values():
                one.close()

    opened.callback(close)
    return Graphs[Runs].of({role: PlanRuns(driver, stream, one) for role, one in engines.items()})
