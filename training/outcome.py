"""How a run ended, by its log."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mdps.training.folder import LOG, Row

WINDOW = 100  # steps that a loss is the mean of: batches of eight differ by half of it and more


class Outcome(NamedTuple):
    """Steps and seconds of a run in all its sessions, and losses over its last hundred steps or so.

    `first_quarter_loss` is the mean squared error of the noise at the first quarter of the timesteps, where detection
    works; None where none of them was drawn.
    """

    steps: int
    seconds: float
    loss: float
    first_quarter_loss: float | None

    def notes(self) -> dict[str, Any]:
        """Return what a denoiser keeps of it, without the seconds, so that the same run gives the same file."""
        return {"steps": self.steps, "loss": self.loss, "first_quarter_loss": self.first_quarter_loss}


def outcome(out: Path) -> Outcome | None:
    """Return how the run in folder `out` ended or stands; None where its log has no line yet."""
    path = out / LOG
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    if not rows:
        return None
    last = rows[-1]
    weighted = _last(rows)
    quarter = [(steps, row["loss_by_quarter"][0]) for steps, row in weighted if row.get("loss_by_quarter")]
    return Outcome(
        last["step"],
        last["seconds"],
        _mean([(steps, row["loss"]) for steps, row in weighted]) or 0.0,
        _mean([(steps, loss) for steps, loss in quarter if loss is not None]),
    )


def _last(rows: Sequence[Row]) -> list[tuple[int, Row]]:
    """Return the last lines that cover the window, or all, each with the number of steps it is the mean of."""
    before = [0, *(row["step"] for row in rows[:-1])]
    weighted = [(row["step"] - start, row) for start, row in zip(before, rows, strict=True)]
    first = next((n for n in range(len(rows) - 1, -1, -1) if rows[-1]["step"] - before[n] >= WINDOW), 0)
    return weighted[first:]


def _mean(weighted: Sequence[tuple[int, float]]) -> float | None:
    total = sum(weight for weight, _ in weighted)
    return sum(weight * value for weight, value in weighted) / total if total else None
