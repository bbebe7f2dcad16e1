"""A card that is none: memory of numpy, work that waits in queues until somebody waits for it, graphs as lists of work.

`FakeDriver` and `FakeEngine` stand in for `Driver` and `DeviceEngine` where no card is. New memory is NaN, host arrays
are read and written when the work is done and not when it is asked for, and a call outside `current()` fails, so
that faults of order, of lifetimes and of threads show. What it cannot show is whether a real card takes the calls.
"""

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import onnxruntime

from mdps.runtime.cards import Card
from mdps.runtime.errors import BackendError
from mdps.runtime.session import Port


class FakeEvent:
    def __init__(self):
        self.asked = self.happened = 0
        self.time = 0


@dataclass(frozen=True, eq=False)
class Job:
    """Work of a stream; `needs` is an event it waits for and how often that must have been recorded, `makes` one."""

    work: Callable[[], object] | None
    needs: tuple[FakeEvent, int] | None
    makes: tuple[FakeEvent, int] | None


class FakeStream:
    def __init__(self, handle):
        self.handle = handle
        self.queue = deque()


class FakeDriver:
    """`eager`: streams after the first one run ahead as far as events let them, as an upload does on a card."""

    def __init__(self, card=None, captures=True, eager=False, memory=2**40):
        self.card = card or Card(ordinal=0, name="Fake 4090", compute_capability="8.6")
        self.captures, self.eager, self.left = captures, eager, memory
        self.blocks, self.starts, self.pinned_sizes = {}, [], []
        self.streams, self.graphs, self.launches, self.asked = [], [], [], []
        self.time = 0
        self.closed = False
        self.refuses_capture = False
        self._recording = {}
        self._inside = threading.local()

    # the seam
    @contextmanager
    def current(self):
        self._check_open()
        self._inside.depth = getattr(self._inside, "depth", 0) + 1
        try:
            yield
        finally:
            self._inside.depth -= 1

    def free_memory(self):
        self._check()
        return self.left

    def allocate(self, nbytes):
        self._check(waits=True)
        if nbytes > self.left:
            raise BackendError(f"{self.card} has no room for {nbytes} bytes more")
        self.left -= nbytes
        start = 4096 + max((s + len(b) for s, b in self.blocks.items()), default=0) // 256 * 256
        self.blocks[start] = np.full(nbytes, 0xFF, dtype=np.uint8)  # NaN, as float32
        self.starts.append(start)
        return start

    def pinned(self, nbytes):
        self._check(waits=True)
        self.pinned_sizes.append(nbytes)
        return np.full(nbytes, 0xFF, dtype=np.uint8)

    def stream(self):
        self._check()
        self.streams.append(FakeStream(0x5000 + len(self.streams)))
        return self.streams[-1]

    def event(self):
        self._check()
        return FakeEvent()

    def upload(self, to, array, stream):
        assert array.flags.c_contiguous
        self.ask(stream, "upload", lambda: self._put(to, array.reshape(-1).view(np.uint8)))

    def download(self, into, source, stream):
        def work():
            into.reshape(-1).view(np.uint8)[...] = self.bytes_at(source, into.nbytes)

        self.ask(stream, "download", work)

    def copy(self, to, source, nbytes, stream):
        assert to + nbytes <= source or source + nbytes <= to, "the places overlap"
        self.ask(stream, "copy", lambda: self._put(to, self.bytes_at(source, nbytes).copy()))

    def record(self, event, stream):
        event.asked += 1
        version = event.asked

        def work():
            event.happened, event.time = version, self.time

        self.ask(stream, "record", work, makes=(event, version))

    def wait(self, stream, event):
        self.ask(stream, "wait", None, needs=(event, event.asked))

    def finish(self, event):
        self._check(waits=True)
        self.asked.append("finish")
        self._until(event, event.asked)

    def milliseconds(self, start, end):
        self._check()
        for event in (start, end):
            assert event.happened == event.asked > 0, "an event has not happened"
        return float(end.time - start.time)

    def begin_capture(self, stream):
        self._check()
        assert stream.handle not in self._recording
        self._recording[stream.handle] = []

    def end_capture(self, stream):
        self._check()
        work = self._recording.pop(stream.handle)
        if self.refuses_capture:
            raise BackendError("the card refused cuStreamEndCapture: it does not like it")
        self.graphs.append(work)
        return len(self.graphs) - 1

    def launch(self, graph, stream):
        self.launches.append(graph)
        self.ask(stream, "launch", lambda: [work() for work in self.graphs[graph]])

    def synchronise(self, stream):
        self._check(waits=True)
        self._drain(stream)

    def close(self):
        self.closed = True

    # what engines and tests ask of it
    def ask(self, stream, kind, work, needs=None, makes=None):
        self._check()
        self.asked.append(kind)
        if stream.handle in self._recording:
            assert kind in ("copy", "engine"), f"{kind} in a recording"
            self._recording[stream.handle].append(work)
            return
        stream.queue.append(Job(work, needs, makes))
        if self.eager:
            for other in self.streams[1:]:
                self._run_ahead(other)

    def bytes_at(self, address, nbytes):
        start = self.starts[bisect_right(self.starts, address) - 1]
        block = self.blocks[start]
        assert start <= address <= address + nbytes <= start + len(block), "outside of what was allocated"
        return block[address - start : address - start + nbytes]

    def array(self, buffer):
        return self.bytes_at(buffer.address, buffer.nbytes).view(np.float32).reshape(buffer.shape)

    def _put(self, address, data):
        self.bytes_at(address, len(data))[...] = data

    def _check_open(self):
        if self.closed:
            raise BackendError("this card was closed: load the bundle again")

    def _check(self, waits=False):
        self._check_open()
        assert getattr(self._inside, "depth", 0), "the card's context is not that of this thread"
        if waits and self._recording:
            raise BackendError("the card refused it: not permitted when a stream is capturing")

    def _step(self, stream):
        needs = stream.queue[0].needs
        if needs is not None:
            self._until(*needs)
        job = stream.queue.popleft()
        self.time += 1
        if job.work is not None:
            job.work()

    def _run_ahead(self, stream):
        while stream.queue:
            needs = stream.queue[0].needs
            if needs is not None and needs[0].happened < needs[1]:
                return
            self._step(stream)

    def _until(self, event, version):
        """Runs the stream that records the event, up to there."""
        while event.happened < version:
            stream = next(s for s in self.streams if any(job.makes == (event, version) for job in s.queue))
            self._step(stream)

    def _drain(self, stream):
        while stream.queue:
            self._step(stream)


class FakeEngine:
    """Runs an ONNX graph on the CPU when the work of its stream is done."""

    def __init__(self, driver, path, largest=None, captures=True):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        self.driver, self.captures = driver, captures
        self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.inputs = [_port(node) for node in self.session.get_inputs()]
        self.outputs = [_port(node) for node in self.session.get_outputs()]
        self.provider = f"fake {path.stem}"
        self.largest = largest or {}
        self.bindings, self.closed, self.runs = [], False, 0

    def bind(self, buffers):
        self.driver._check(waits=True)
        for port in (*self.inputs, *self.outputs):
            shape = buffers[port.name].shape
            assert len(shape) == len(port.shape), (port, shape)
            assert all(want in (None, have) for want, have in zip(port.shape, shape, strict=True)), (port, shape)
            assert buffers[port.name].address % 256 == 0
            assert all(have <= most for have, most in zip(shape, self.largest.get(port.name, shape), strict=True))
        self.bindings.append(dict(buffers))
        return FakeBound(self, dict(buffers))

    def close(self):
        self.driver._check()
        self.closed = True


class FakeBound:
    def __init__(self, engine, buffers):
        self.engine, self.buffers = engine, buffers

    def enqueue(self, stream):
        self.engine.driver.ask(stream, "engine", self._run)

    def _run(self):
        engine = self.engine
        assert not engine.closed
        engine.runs += 1
        feeds = {port.name: engine.driver.array(self.buffers[port.name]) for port in engine.inputs}
        values = engine.session.run([port.name for port in engine.outputs], feeds)
        for port, value in zip(engine.outputs, values, strict=True):
            engine.driver.array(self.buffers[port.name])[...] = value


def _port(node):
    return Port(node.name, np.dtype(np.float32), tuple(n if isinstance(n, int) else None for n in node.shape))
