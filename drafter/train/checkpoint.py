"""Step folders of stage 04: save them, find the complete ones, read them back.

`step-%08d/` gets its name by a rename, so it is always complete: `drafter.safetensors` (fp32 masters under native
names), `config.json` (native), `optimizer.safetensors` (moments as whole tensors, so that any number of ranks can
resume) and `state.json`.
"""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from drafter import checked, files
from drafter.errors import ContractError
from drafter.train import checkpoint_file

WEIGHTS, CONFIG, OPTIMIZER, STATE = "drafter.safetensors", "config.json", "optimizer.safetensors", "state.json"
FILES = (WEIGHTS, CONFIG, OPTIMIZER, STATE)
REMEDY = "delete its step folder to resume from the step before it"
NAME = re.compile(r"step-(\d{8})")


def step_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def step_number(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def tensors_in_file_order(weights: dict[str, Tensor], moments: dict[str, Tensor]) -> list[Tensor]:
    """The tensors in the order in which `save_step` writes them."""
    return [*checkpoint_file.in_file_order(weights).values(), *checkpoint_file.in_file_order(moments).values()]


def save_step(
    path: Path,
    weights: dict[str, Tensor],
    config: dict[str, Any],
    moments: dict[str, Tensor],
    state: dict[str, Any],
    wholes: Iterator[Tensor] | None = None,
) -> None:
    """Write one step folder completely or not at all. An OSError (disk full) leaves every earlier step as it was.

    `wholes`: for sharded tensors, an iterator over `tensors_in_file_order`, gathered.
    """
    wholes = iter(tensors_in_file_order(weights, moments)) if wholes is None else wholes
    with files.publish(path) as part:
        part.mkdir()
        facts = {"folder": path.name, "config": checked.checksum(config)}
        for name, tensors in ((WEIGHTS, weights), (OPTIMIZER, moments)):
            checkpoint_file.write_tensors(part / name, checkpoint_file.in_file_order(tensors), wholes, facts)
        (part / CONFIG).write_text(json.dumps(config, indent=1) + "\n")
        (part / STATE).write_text(json.dumps(checked.sealed(state), indent=1) + "\n")


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Replace the state of a step folder."""
    files.write_json(path / STATE, checked.sealed(state))


def complete_steps(folder: Path) -> list[Path]:
    """Complete step folders, oldest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if NAME.fullmatch(path.name) and not missing_files(path)]
    return sorted(found, key=step_number)


def missing_files(path: Path) -> list[str]:
    return [name for name in FILES if not (path / name).is_file()]


def best_step(folder: Path) -> Path:
    """The complete step with the best validation, the newest of equals; if none was validated, the newest step.

    Raises ContractError when there is no complete step.
    """
    steps = complete_steps(folder)
    if not steps:
        raise ContractError(f"no complete step in {folder}")

    def merit(path: Path) -> tuple[bool, float, int]:
        state = read_state(path, "step")
        validated = state["validated"] == state["step"]
        return validated, state["expected_acceptance"] if validated else 0.0, step_number(path)

    return max(steps, key=merit)


def read_state(path: Path, *needed: str) -> dict[str, Any]:
    """Raises ContractError when the state is broken or a key of `needed` is not a number."""
    check_complete(path)
    state = _read_json(path / STATE)
    state.setdefault("validated", state.get("step"))  # an earlier version saved nothing unvalidated
    for key in ("expected_acceptance", "step", "validated", *needed):
        if key not in state:
            raise _broken(path / STATE, f"{key} is missing")
        if not isinstance(state[key], int | float):
            raise _broken(path / STATE, f"{key} is {state[key]!r}")
    if NAME.fullmatch(path.name) and state["step"] != step_number(path):
        raise _broken(path / STATE, f"it belongs to step {state['step']}")
    return state


def read_draft(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights under native names (fp32; `d2t` int64, `t2d` bool) and the native config of a step folder.

    Raises ContractError naming the missing file and the nearest complete step.
    """
    check_complete(path)
    return _read_tensors(path, WEIGHTS), _read_json(path / CONFIG)


def read_moments(path: Path) -> dict[str, Tensor]:
    """AdamW's moments as `<native name>.exp_avg` and `.exp_avg_sq`, fp32."""
    check_complete(path)
    return _read_tensors(path, OPTIMIZER)


def check_complete(path: Path) -> None:
    missing = missing_files(path)
    if not missing:
        return
    others = complete_steps(path.parent) + complete_steps(path)
    number = step_number(path) if NAME.fullmatch(path.name) else 0
    nearest = min(others, key=lambda other: abs(step_number(other) - number), default=None)
    hint = (
        f"; the nearest complete step is {nearest}" if nearest else "; there is no complete step in the same folder"
    )
    raise ContractError(f"{path} is not a complete checkpoint: {missing[0]} is missing{hint}")


def prune_steps(folder: Path, keep: int) -> None:
    """Remove all steps but the last `keep` ones and the best one."""
    steps = complete_steps(folder)
    kept = {*steps[-keep:], best_step(folder)} if steps else set()
    for path in steps:
        if path not in kept:
            doomed = path.with_name(path.name + files.PART)
            path.rename(doomed)  # so that a step's name never holds a half-removed folder
            shutil.rmtree(doomed)


def _read_json(path: Path) -> dict[str, Any]:
    return checked.load(path, dict[str, Any], remedy=REMEDY)


def _broken(path: Path, why: object) -> ContractError:
    return ContractError(f"{path} is broken ({why}); {REMEDY}")


def _read_tensors(folder: Path, name: str) -> dict[str, Tensor]:
    path = folder / name
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            facts = file.metadata() or {}
    except SafetensorError as error:
        raise _broken(path, error) from None
    if "sums" in facts:  # written by an earlier version
        intact = facts["sums"] == checkpoint_file.additive_sums(tensors)
    else:
        intact = facts.get("xxh3") == checkpoint_file.checksums(tensors)
    if facts and not (intact and facts.get("folder") == folder.name):
        raise _broken(path, "its tensors do not match their checksums, or belong to another step")
    if facts.get("config", config := checked.checksum(_read_json(folder / CONFIG))) != config:
        raise _broken(folder / CONFIG, f"{name} was saved with another one")
    return {name: t.to(torch.float32) if t.is_floating_point() else t for name, t in tensors.items()}
