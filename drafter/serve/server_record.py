"""What a run records of each server process that it starts, for as long as the process lives: `servers/ROLE.json`."""

import contextlib
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

from drafter import files, process
from drafter.config import Config, Role


def record_path(config: Config, role: Role) -> Path:
    return config.run_dir / "servers" / f"{role}.json"


def write(path: Path, facts: dict[str, Any]) -> None:
    """Record a server as used by this process."""
    files.write_json(path, facts | {"home": files.inode_id(path.parent), "owner": process.identity(os.getpid())})


def read(path: Path) -> dict[str, Any] | None:
    """The record at `path`; None when there is none, and in a copied run, whose servers are the original's."""
    record = files.read_note(path, pid=int, boot=str, home=str, ready=bool, command=list, log=str)
    return record if record and record["home"] == files.inode_id(path.parent) else None


def read_live(path: Path) -> dict[str, Any] | None:
    """The record at `path` when its process still lives; None also for a record that this user may not read."""
    with contextlib.suppress(OSError):
        record = read(path)
        return record if record and process.lives(record) else None
    return None


def running(config: Config, role: Role) -> dict[str, Any] | None:
    """The record of this run's server of the role, while its process lives."""
    return read_live(record_path(config, role))


def owner(record: dict[str, Any]) -> dict[str, Any] | None:
    """Identity of the live process that started the recorded server or uses it now; None without one."""
    found = record.get("owner")
    return found if isinstance(found, dict) and process.lives(found) else None


def url(record: dict[str, Any]) -> str:
    """Where a recorded server listens, as its command line says."""
    given = dict(pairwise(record["command"]))
    host = given.get("--host", "127.0.0.1")
    return f"http://[{host}]:{given.get('--port')}" if ":" in host else f"http://{host}:{given.get('--port')}"
