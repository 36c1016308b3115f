"""The position that a checkpoint records, and whether training can be resumed from it."""

from dataclasses import asdict, dataclass
from typing import Any

from drafter.config import Config
from drafter.errors import ConfigError
from drafter.stage import Stage
from drafter.train import checkpoint
from drafter.train.dataset import Dataset


@dataclass(slots=True)
class Position:
    """What a checkpoint records besides tensors."""

    step: int = 0
    tokens: int = 0
    best: float = 0.0  # expected acceptance of the best validation
    stale: int = 0  # validations since then
    validated: int = -1  # step of the last validation; -1: none yet
    expected_acceptance: float = 0.0  # of that validation
    seconds_per_step: float = 0.0


def resume_identity(config: Config, dataset: Dataset) -> dict[str, Any]:
    """Facts that must not change between a checkpoint and the run that resumes from it."""
    return {
        "rows": len(dataset.train),
        "plan": dataset.schedule.fingerprint,
        "packs_per_step": dataset.schedule.packs_per_step,
        "trainable": sorted(config.train.trainable),
    }


def check_resumable(stage: Stage, dataset: Dataset) -> None:
    """Raises ConfigError naming the facts that differ from those of the last checkpoint."""
    if not (done := checkpoint.complete_steps(stage.folder)):
        return
    state, asked = checkpoint.read_state(done[-1], *asdict(Position())), len(dataset.schedule.steps)
    differing = [
        f"{key} (was {state.get(key)!r}, is {value!r})"
        for key, value in resume_identity(stage.config, dataset).items()
        if state.get(key) != value
    ]
    if differing:
        raise ConfigError(
            f"04_train was begun with other {', '.join(differing)}; use another run.name, or delete "
            f"{stage.folder} to train from the start"
        )
    if state["step"] > asked:
        raise ConfigError(
            f"{state['step']} steps are trained already, but only {asked} are asked for: raise train.epochs or "
            "train.max_steps, or use another run.name"
        )
