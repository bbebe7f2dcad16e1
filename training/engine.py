"""Where a run computes: device, precision and the processes that share its batches, by Hugging Face Accelerate."""

import os
from typing import Any

import torch
from torch import Tensor, nn

from mdps.runtime.errors import UsageError
from mdps.training.config import TrainingConfig


def choose_device(name: str) -> torch.device:
    """Return the device; `auto` is CUDA or else the CPU. UsageError for an absent CUDA or an unknown name.

    Where several processes run on one machine, each has the GPU of its local number.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"unknown device {name!r}; choose auto, cpu or cuda") from error
    if device.type == "cpu":
        return device
    if device.type != "cuda" or not torch.cuda.is_available():
        raise UsageError(f"device {name} was asked for, but torch finds no CUDA device here; use --device cpu or auto")
    index = int(os.environ.get("LOCAL_RANK", device.index or 0))
    if index >= torch.cuda.device_count():
        raise UsageError(f"there is no GPU number {index} here, torch finds {torch.cuda.device_count()}")
    return torch.device("cuda", index)


def process_count() -> int:
    """Count the processes of this run, as torchrun and our own launcher say in the environment."""
    return int(os.environ.get("WORLD_SIZE", 1))


def check_share(config: TrainingConfig, processes: int) -> None:
    """Raise UsageError unless the batch is the same for each of so many processes."""
    if config.batch % processes:
        raise UsageError(
            f"a batch of {config.batch} does not divide among {processes} processes; choose a multiple of {processes}"
        )


def first_process() -> bool:
    """Return whether this is the process of the run that writes and speaks."""
    return int(os.environ.get("RANK", 0)) == 0


class Engine:
    """One of the processes of a run: wraps the network, averages gradients, and lets all agree.

    UsageError where the precision cannot be had, or the batch is not the same for every process: the mean of their
    gradients would not be the batch's.
    """

    def __init__(self, config: TrainingConfig, device: torch.device) -> None:
        if config.precision == "fp16" and device.type == "cpu":
            raise UsageError("precision fp16 needs a GPU; on a CPU choose fp32 or bf16")
        check_share(config, process_count())
        self.device, self._clip = device, config.clip
        self._accelerator = _accelerator(config.precision, device)
        self.process: int = self._accelerator.process_index
        self.processes: int = self._accelerator.num_processes
        self.share = config.batch // self.processes

    @property
    def main(self) -> bool:
        """Whether this is the process that writes."""
        return self.process == 0

    def prepare(self, network: nn.Module, optimizer: torch.optim.Optimizer, compiled: bool) -> tuple[Any, Any]:
        """Return the network to call in training, in the run's precision, and the optimizer to step."""
        wrapped, stepping = self._accelerator.prepare(network, optimizer)
        # CUDA graphs do not go together with the hooks that average gradients.
        mode = "reduce-overhead" if self.processes == 1 else "default"
        return (torch.compile(wrapped, mode=mode) if compiled else wrapped), stepping

    def update(self, loss: Tensor, network: nn.Module, optimizer: Any) -> None:
        """Step the optimizer along the mean gradient of all processes' losses, float32 []."""
        optimizer.zero_grad()
        self._accelerator.backward(loss)
        if self._clip is not None:
            self._accelerator.clip_grad_norm_(network.parameters(), self._clip)
        optimizer.step()

    def sum(self, values: Tensor) -> Tensor:
        """Sum a tensor of one shape over all processes."""
        return values if self.processes == 1 else self._accelerator.reduce(values, "sum")

    def agree(self, stop: int, seconds: float) -> tuple[int, float]:
        """Return the signal number (0: none) and clock for all processes: anyone's signal, the first one's clock."""
        if self.processes == 1:
            return stop, seconds
        ours = torch.tensor([float(stop), seconds if self.main else 0.0], dtype=torch.float64, device=self.device)
        every = self._accelerator.gather(ours[None])
        return int(every[:, 0].max()), float(every[:, 1].sum())

    def wait(self) -> None:
        """Wait until all processes are here."""
        self._accelerator.wait_for_everyone()

    def close(self) -> None:
        """Take leave of the others."""
        self._accelerator.end_training()

    def scaler_state(self) -> dict[str, Any]:
        """Return the state that fp16 needs to resume; empty otherwise."""
        scaler = self._accelerator.scaler
        return dict(scaler.state_dict()) if scaler is not None else {}

    def restore_scaler(self, state: dict[str, Any]) -> None:
        """Restore what `scaler_state` returned."""
        if state and self._accelerator.scaler is not None:
            self._accelerator.scaler.load_state_dict(state)


def _accelerator(precision: str, device: torch.device) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    if device.type == "cuda":
        torch.cuda.set_device(device)
    # Accelerate keeps its settings for the whole process; another run in it may want others.
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        return Accelerator(cpu=device.type == "cpu", mixed_precision="no" if precision == "fp32" else precision)
    except ValueError as error:
        raise UsageError(f"precision {precision} cannot be had here: {error}") from error
