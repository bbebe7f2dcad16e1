"""The thread that judges: batches, errors that stay with their image, work that is dropped."""

import asyncio
import itertools
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("starlette", reason="the extra [serve] is not installed")

from mdps.runtime.detector import Result
from mdps.runtime.errors import BackendError
from mdps.runtime.preprocessing import Observations
from mdps.serving.http.worker import Worker

BLANK = Result(
    0.0, 1.0, "pass", np.zeros((2, 2), np.float32), np.zeros((2, 2), bool), np.zeros((3, 2, 2), np.float32),
    np.zeros((3, 2, 2), np.float32), {"total": 1.0},
)  # fmt: skip


class FakeEngine:
    """Scores an observation by its mean; the mean 13 is an error; waits for `gate` before each batch."""

    def __init__(self, add=0.0):
        self.add, self.batches, self.gate = add, [], threading.Event()
        self.gate.set()

    def judge(self, observations):
        self.gate.wait(10)
        self.batches.append([float(mean) for mean in observations.images.mean(axis=(1, 2, 3))])
        if 13.0 in self.batches[-1]:
            raise BackendError("NaN")
        return [replace(BLANK, score=mean + self.add) for mean in self.batches[-1]]


def observation(value):
    return Observations(np.full((1, 3, 2, 2), value, np.float32))


def run(scenario, *, max_batch=4, max_wait=0.0, coming=lambda: 0):
    async def main():
        worker = Worker("test", max_batch=max_batch, max_wait=max_wait, coming=coming)
        try:
            return await scenario(worker)
        finally:
            await asyncio.to_thread(worker.stop)
            assert not worker.alive

    return asyncio.run(main())


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


def test_what_waits_becomes_one_batch_and_each_gets_its_own():
    engine = FakeEngine()

    async def scenario(worker):
        engine.gate.clear()
        items = [worker.submit(engine, observation(value)) for value in range(10)]
        engine.gate.set()
        return [(await item.future).result.score for item in items]

    assert run(scenario) == list(range(10))
    assert max(map(len, engine.batches)) == 4
    assert list(itertools.chain(*engine.batches)) == list(range(10))


def test_an_error_stays_with_its_image():
    engine = FakeEngine()

    async def scenario(worker):
        engine.gate.clear()
        first = worker.submit(engine, observation(1))
        await asyncio.sleep(0.05)  # it is being judged, the others wait together
        items = [worker.submit(engine, observation(value)) for value in (2, 13, 3)]
        engine.gate.set()
        await first.future
        return await asyncio.gather(*(item.future for item in items), return_exceptions=True)

    two, thirteen, three = run(scenario)
    assert (two.result.score, three.result.score) == (2, 3)
    assert isinstance(thirteen, BackendError)
    assert [2.0, 13.0, 3.0] in engine.batches


def test_dropped_work_is_never_done_and_its_memory_is_free_at_once():
    engine = FakeEngine()

    async def scenario(worker):
        engine.gate.clear()
        first = worker.submit(engine, observation(1))
        await asyncio.sleep(0.05)
        second, third = worker.submit(engine, observation(2)), worker.submit(engine, observation(3))
        second.future.cancel()
        second.drop()
        assert second.observation is None
        engine.gate.set()
        await first.future
        return (await third.future).result.score

    assert run(scenario) == 3
    assert 2.0 not in list(itertools.chain(*engine.batches))


def test_a_request_that_gave_up_while_it_was_judged_troubles_nobody():
    engine = FakeEngine()

    async def scenario(worker):
        engine.gate.clear()
        item = worker.submit(engine, observation(1))
        await asyncio.sleep(0.05)
        item.future.cancel()
        engine.gate.set()
        return (await worker.submit(engine, observation(2)).future).result.score

    assert run(scenario) == 2


def test_each_item_is_judged_by_the_engine_it_was_prepared_for():
    old, new = FakeEngine(), FakeEngine(add=100.0)

    async def scenario(worker):
        old.gate.clear()
        engines = [old, old, new, old, new, new]
        items = [worker.submit(engine, observation(value)) for value, engine in enumerate(engines)]
        old.gate.set()
        return [(await item.future).result.score for item in items]

    assert run(scenario) == [0, 1, 102, 3, 104, 105]


def test_one_client_alone_never_waits_and_those_on_their_way_are_waited_for():
    engine = FakeEngine()
    coming = [0]

    async def alone(worker):
        started = time.perf_counter()
        for _ in range(5):
            await worker.submit(engine, observation(1)).future
        return time.perf_counter() - started

    assert run(alone, max_wait=1.0, coming=lambda: coming[0]) < 1.0

    async def together(worker):
        coming[0] = 1
        first = worker.submit(engine, observation(1))
        await asyncio.sleep(0.02)
        second = worker.submit(engine, observation(2))
        coming[0] = 0
        return [await first.future, await second.future]

    assert [judgement.images for judgement in run(together, max_batch=2, max_wait=5.0, coming=lambda: coming[0])] == [
        2,
        2,
    ]


def test_a_batch_is_no_larger_than_its_first_deadline_allows():
    """On an engine that takes long whole batches come too late for all, and nobody is ever answered."""
    engine = FakeEngine()

    async def scenario(worker):
        worker.seconds = 100.0
        engine.gate.clear()
        first = worker.submit(engine, observation(1), time.monotonic() + 50)  # too late already, and still alone
        await until(lambda: worker._queue.empty())
        later = [worker.submit(engine, observation(value), time.monotonic() + 180) for value in (2, 3, 4)]
        engine.gate.set()
        return [(await item.future).result.score for item in (first, *later)]

    assert run(scenario) == [1, 2, 3, 4]
    assert engine.batches[:2] == [[1.0], [2.0, 3.0]]


def test_stopping_answers_what_is_queued():
    engine = FakeEngine()

    async def main():
        worker = Worker("test", max_batch=2, max_wait=0.0, coming=lambda: 0)
        engine.gate.clear()
        items = [worker.submit(engine, observation(value)) for value in range(7)]
        engine.gate.set()
        await asyncio.to_thread(worker.stop)
        return [(await item.future).result.score for item in items]

    assert asyncio.run(main()) == list(range(7))
