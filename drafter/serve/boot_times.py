"""How long each server took to become ready: a line for each start in `run.dir`, for the plans of later runs."""

import json
import time
from contextlib import suppress

from drafter import checked
from drafter.config import Config, Role
from drafter.run_files import Boot

NAME = "boots.jsonl"
NEWEST = 20  # starts that a plan looks at


def record(config: Config, role: Role, seconds: float) -> None:
    """Nothing depends on it, so a full disk does not stop a server."""
    line = {"role": role, "model": str(config.target.model), "seconds": round(seconds, 1), "at": round(time.time())}
    with suppress(OSError), open(config.run.dir / NAME, "a") as file:
        file.write(json.dumps(line) + "\n")


def seconds_of(config: Config) -> list[float]:
    """The newest starts of servers of this target, in ascending order."""
    found = [
        each
        for each in checked.records_or_empty(config.run.dir / NAME, Boot)
        if each["model"] == str(config.target.model)
    ]
    return sorted(each["seconds"] for each in found[-NEWEST:])
