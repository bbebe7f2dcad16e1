"""Runs `fit` in several processes of this machine. Across machines torchrun does it."""

import multiprocessing
import os
import signal
import socket
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.multiprocessing.spawn import ProcessExitedException, SpawnContext, start_processes

from mdps.runtime.errors import MdpsError, UsageError
from mdps.runtime.machine import available_cpus
from mdps.training.config import TrainingConfig
from mdps.training.engine import check_share
from mdps.training.folder import DENOISER
from mdps.training.loop import Given, StopSignal, fit

GRACE = 20.0  # seconds that the others have after one has failed


def fit_in_processes(count: int, images: Given, out: Path, config: TrainingConfig, **options: Any) -> Path:
    """Run `fit(images, out, config, **options)` by `count` processes, each taking an equal share of every batch.

    Raises what `fit` raises, and UsageError where this is one of several processes already.
    """
    if "WORLD_SIZE" in os.environ:
        raise UsageError("torchrun has started the processes already; leave out --processes")
    check_share(config, count)
    errors = multiprocessing.get_context("spawn").SimpleQueue()
    work = (count, _free_port(), errors, images, out, config, options)
    with Relay() as relay:
        running: SpawnContext = start_processes(  # type: ignore[no-untyped-call]
            _work, work, count, join=False, start_method="spawn"
        )
        relay.to([process.pid for process in running.processes])
        try:
            while not running.join(grace_period=GRACE):
                pass
        except ProcessExitedException as error:
            if errors.empty():
                raise MdpsError(
                    f"training process {error.error_index} ended ({error.signal_name or error.exit_code}) without a "
                    "reason; the last checkpoint is whole: go on with --resume"
                ) from error
            raise errors.get() from error
    return out / DENOISER


def _work(
    rank: int,
    count: int,
    port: int,
    errors: Any,
    images: Given,
    out: Path,
    config: TrainingConfig,
    options: dict[str, Any],
) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
    threads = int(os.environ.get("OMP_NUM_THREADS", max(1, available_cpus() // count)))
    os.environ.update({name: str(value) for name, value in (place | {"OMP_NUM_THREADS": threads}).items()})
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    torch.set_num_threads(threads)
    warnings.showwarning = _say
    try:
        fit(images, out, config, **options)
    except MdpsError as error:
        errors.put(error)
        sys.exit(error.exit_code)


def _say(message: Any, *_: Any, **__: Any) -> None:
    print(f"Warning: {message}", file=sys.stderr, flush=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Relay(StopSignal):
    """Within the block SIGINT and SIGTERM go on to the processes, which stop together; this one waits for them.

    The block begins before the processes do: a signal between their start and `to` would else end this one alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self._pids: list[int] = []

    def to(self, pids: list[int]) -> None:
        """Send signals to these processes from now on, and one that came before."""
        self._pids = pids
        if self.number:
            self._send()

    def _note(self, number: int, _: FrameType | None) -> None:
        self.number = number
        self._send()

    def _send(self) -> None:
        for pid in self._pids:
            with suppress(ProcessLookupError):  # one that has ended meanwhile
                os.kill(pid, signal.SIGTERM)
