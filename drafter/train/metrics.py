"""Training metrics: one record a step in `metrics.jsonl`, and TensorBoard events if that package is installed."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from drafter import files, run_files
from drafter.train.batch import ANSWER, REASONING


def step_figures(sums: Tensor) -> dict[str, Any]:
    """Figures for each TTT step from the sums [K, 5] over anchors that the drafter's forward pass returns.

    accuracy: share of guesses equal to the token that the target wrote; conditional: given that all earlier ones were
    correct; expected_acceptance: 1 + the sum of P(all guesses up to k correct), the acceptance length that serving
    would show with as many speculative tokens. A token outside the draft vocabulary is a miss.
    """
    count, loss, right, prefix, before = sums.double().clamp(min=0).T
    asked = count.clamp(min=1)
    return {
        "guesses": [int(n) for n in count],
        "loss": _rounded(loss / asked),
        "accuracy": _rounded(right / asked),
        "conditional_accuracy": _rounded(prefix / before.clamp(min=1)),
        "expected_acceptance": round(1 + float((prefix / asked).sum()), 6),
    }


def region_figures(sums: Tensor) -> dict[str, Any]:
    """`step_figures` of sums [2, K, 5] over all anchors, and separately for reasoning and answer if both occur."""
    result = step_figures(sums.sum(0))
    if sums[REASONING, 0, 0] and sums[ANSWER, 0, 0]:
        result |= {"reasoning": step_figures(sums[REASONING]), "answer": step_figures(sums[ANSWER])}
    return result


def _rounded(values: Tensor) -> list[float]:
    return [round(float(value), 6) for value in values]


class Metrics:
    """Writes both outputs. A resumed run drops the records after its checkpoint, so that each step occurs once.

    `step` is the checkpoint's step, `validated` that of its last validation.
    """

    def __init__(self, folder: Path, step: int, validated: int):
        path, last = folder / run_files.METRICS, {"train": step, "validation": validated}
        if path.exists():
            files.write_text(path, "".join(f"{line}\n" for line in _up_to(path, last)))
        self._journal = files.Journal(path)
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            self._board = None
        else:
            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def write(self, kind: str, step: int, figures: dict[str, Any]) -> None:
        """`kind` is "train" or "validation"."""
        self._journal.append({"kind": kind, "step": step, **figures})
        if self._board is not None:
            for name, value in _scalars(figures):
                self._board.add_scalar(f"{kind}/{name}", value, step)

    def sync(self) -> None:
        """Make the records durable; called before a checkpoint is saved."""
        self._journal.sync()
        if self._board is not None:
            self._board.flush()

    def close(self) -> None:
        self._journal.close()
        if self._board is not None:
            self._board.close()


def _up_to(path: Path, last: dict[str, int]) -> Iterator[str]:
    """The lines of records up to the `last` step of their kind; broken lines are dropped."""
    for line in path.read_text(errors="replace").split("\n"):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            record = json.loads(line)
            if record["step"] <= last[record["kind"]]:
                yield line


def _scalars(figures: dict[str, Any], prefix: str = ""):
    for name, value in figures.items():
        if isinstance(value, dict):
            yield from _scalars(value, f"{prefix}{name}/")
        elif isinstance(value, list):
            yield from ((f"{prefix}{name}_{k}", v) for k, v in enumerate(value))
        elif isinstance(value, int | float):
            yield f"{prefix}{name}", value
