"""Ctrl-C and SIGTERM end a run after the step at hand, with a checkpoint."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

from mdps.runtime.errors import MdpsError


class StoppedError(MdpsError):
    """The run was asked to stop and has written a checkpoint to go on from."""

    exit_code = 130


class StopSignal:
    """Within the block, SIGINT and SIGTERM are noted in `number` (0: none yet); a second SIGINT interrupts at once.

    Python lets only the main thread watch signals; in another one nothing changes.
    """

    WATCHED = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.number = 0
        self._interrupts = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in self.WATCHED}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.number = number
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            raise KeyboardInterrupt
