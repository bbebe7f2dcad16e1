"""Everything a run must remember to go on as if it had never stopped, and its checkpoint file."""

import io
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mdps.models.unet import AttentionBlock, ResBlock, UNet
from mdps.runtime import atomic
from mdps.runtime.errors import MdpsError, UsageError
from mdps.training.config import TrainingConfig
from mdps.training.draw import memory_format

# A run may be continued with others. The length is among them: what is left of a run follows the new one's schedule.
LENGTH = ("steps", "epochs", "minutes")
FREE_SETTINGS = (*LENGTH, "log_every", "checkpoint_every", "checkpoint_minutes", "compile", "samples", "sample_every")


class TrainingState:
    """Network, moving average, optimizer, steps done and seconds spent. All chance follows from seed and step."""

    def __init__(self, config: TrainingConfig, device: torch.device) -> None:
        self.config, self.device = config, device
        torch.manual_seed(config.seed)
        network = silence_residuals(UNet(config.network)).to(device)
        self.network: UNet = network.to(memory_format=memory_format(device))
        self.ema = UNet(config.network).to(device).eval().requires_grad_(False)
        self.ema.load_state_dict(self.network.state_dict())
        self.optimizer = _optimizer(config, self.network, device)
        self.scaler: dict[str, Any] = {}  # of fp16
        self.step = 0
        self.seconds = 0.0

    def follow(self) -> None:
        """Move the average towards the network; faster in the first steps, when there is little to average."""
        decay = min(self.config.ema, (1 + self.step) / (10 + self.step))
        averages: list[torch.Tensor] = list(self.ema.parameters())
        weights: list[torch.Tensor] = [weight.detach() for weight in self.network.parameters()]
        torch._foreach_lerp_(averages, weights, 1 - decay)

    def require_finite(self) -> None:
        """Raise MdpsError if a weight is no number: such a network is not worth a checkpoint."""
        if not all(bool(torch.isfinite(weight).all()) for weight in self.network.parameters()):
            raise MdpsError(
                f"the weights are no numbers any more after step {self.step}; lower the learning rate, or train in "
                "fp32 if this was half precision"
            )

    def save(self, path: Path, fingerprint: str) -> None:
        """Write the checkpoint under a temporary name and rename it; it loads with `weights_only=True`."""
        content = {
            "config": json.dumps(self.config.to_json()),
            "images": fingerprint,
            "step": self.step,
            "seconds": self.seconds,
            "network": self.network.state_dict(),
            "ema": self.ema.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler,
        }
        buffer = io.BytesIO()
        torch.save(content, buffer)
        atomic.write_bytes(path, buffer.getvalue())

    def restore(self, path: Path, fingerprint: str) -> None:
        """Take over a checkpoint; UsageError if it cannot be read or its settings or images are not this run's."""
        content = _read(path)
        theirs = TrainingConfig.from_json(json.loads(content["config"]))
        _same_settings(path, theirs.to_json(), self.config.to_json())
        if content["images"] != fingerprint:
            raise UsageError(f"{path} was trained on other images; give the same ones, or another folder for the run")
        self.step, self.seconds = content["step"], content["seconds"]
        self.network.load_state_dict(content["network"])
        self.ema.load_state_dict(content["ema"])
        self.optimizer.load_state_dict(content["optimizer"])
        self.scaler = content.get("scaler") or {}


def silence_residuals(network: UNet) -> UNet:
    """Zero the last layer of every residual branch and of the network: a fresh network predicts zero (ADM's start)."""
    last: list[nn.Module] = [network.out[-1]]
    last += [m.out_layers[-1] for m in network.modules() if isinstance(m, ResBlock)]
    last += [m.proj_out for m in network.modules() if isinstance(m, AttentionBlock)]
    for parameter in (p for module in last for p in module.parameters()):
        nn.init.zeros_(parameter)
    return network


def _optimizer(config: TrainingConfig, network: nn.Module, device: torch.device) -> torch.optim.Optimizer:
    kinds: dict[str, type[torch.optim.Adam]] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    rate, decay = config.learning_rate, config.weight_decay
    return kinds[config.optimizer](network.parameters(), lr=rate, weight_decay=decay, fused=device.type == "cuda")


def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises whatever its unpickler meets in a damaged file
        raise UsageError(f"{path} cannot be read as a training checkpoint ({type(error).__name__})") from error
    missing = {"config", "images", "step", "seconds", "network", "ema", "optimizer"} - set(content)
    if missing:
        raise UsageError(f"{path} is no training checkpoint: it lacks {sorted(missing)[0]!r}")
    return content


def _same_settings(path: Path, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    for name in sorted(set(theirs) | set(ours)):
        if name not in FREE_SETTINGS and theirs.get(name) != ours.get(name):
            raise UsageError(
                f"{path} was begun with {name} = {theirs.get(name)}, not {ours.get(name)}; "
                "continue with the same settings, or choose another folder for the run"
            )
