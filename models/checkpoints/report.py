"""The facts about a checkpoint, and where each of them comes from."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class CheckpointReport:
    """`inferred` from tensor shapes; `given` as {name: {"value", "by"}}; `assumed` because the format publishes it.

    `needed` are the options without which the checkpoint cannot be loaded; `ignored` counts tensors of the file that
    do not belong to the denoiser. All values are JSON values.
    """

    format: str
    path: str
    sha256: str
    parameters: int
    inferred: dict[str, Any]
    given: dict[str, Any]
    assumed: dict[str, Any]
    needed: list[str]
    ignored: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return all fields by name."""
        return asdict(self)

    def assumptions(self) -> str:
        """Return `assumed` on one line, empty where nothing is."""
        return ", ".join(f"{name} = {_show(value)}" for name, value in self.assumed.items())

    def __str__(self) -> str:
        """Return a few lines for a terminal."""
        lines = [
            f"file        {self.path}",
            f"format      {self.format}",
            f"sha256      {self.sha256}",
            f"parameters  {self.parameters:,}",
        ]
        lines += _section("from the tensors", {name: _show(value) for name, value in self.inferred.items()})
        lines += _section("given", {name: f"{_show(v['value'])}  ({v['by']})" for name, v in self.given.items()})
        lines += _section("assumed (check these)", {name: _show(value) for name, value in self.assumed.items()})
        if self.needed:
            lines += ["still needed", *(f"  {item}" for item in self.needed)]
        if self.ignored:
            lines.append(f"{self.ignored} tensors do not belong to the denoiser and were ignored")
        return "\n".join(lines)


def _section(title: str, values: dict[str, str]) -> list[str]:
    return [title, *(f"  {name} = {value}" for name, value in values.items())] if values else []


def _show(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_show(item)}" for key, item in value.items() if key != "betas")
    if isinstance(value, list | tuple):
        return ", ".join(_show(item) for item in value) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
