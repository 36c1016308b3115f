"""Servers of kind `command`: started as the leader of a process session, recorded, and ended with the whole session.

Starting and stopping hold the lock of the run's `servers` folder, so another process sees no server or its record.
"""

import contextlib
import logging
import math
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drafter import files, locks, process, signals
from drafter.config import Config, Role
from drafter.errors import ConfigError, ResumableError
from drafter.serve import address, server_record
from drafter.serve.server_record import record_path, running
from drafter.serve.vllm_command import environment

log = logging.getLogger("drafter")

QUICK_SECONDS = 10  # to stop a server that has no request to finish: it was never ready, or it hangs
LOCK_SECONDS = 10.0  # starting takes less, stopping may take longer


@contextlib.contextmanager
def _exclusive(config: Config, role: Role) -> Iterator[None]:
    """Be the only process that starts or stops a server of this run. Raises ConfigError when another one does."""
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(locks.locked(record_path(config, role).parent, seconds=LOCK_SECONDS))
        except ConfigError:
            raise ConfigError(
                f"server {role}: another process is starting or stopping a server of the run {config.run.name}; "
                "wait until it is done, then run the same command again"
            ) from None
        yield


def start(config: Config, role: Role, line: list[str], log_file: Path | None = None, alone: bool = False) -> bool:
    """Start the server unless it already runs with this command line. Returns whether this process must stop it.

    Raises ConfigError when the address is taken, the interpreter does not run, or another live process uses the
    role's server, be it with another command line or, when the caller wants it `alone`, at all.
    """
    with _exclusive(config, role):
        if record := running(config, role):
            owner = _other_owner(record)
            if owner and (alone or record["command"] != line):
                raise ConfigError(
                    f"server {role} of this run, at {server_record.url(record)}, is in use by process {owner['pid']} "
                    f"({address.command_line(owner['pid'])}); wait until it has ended, or stop it"
                )
            if record["command"] == line:
                if not owner:
                    server_record.write(record_path(config, role), record)
                return not owner
            log.info(
                f"server {role} of this run is at {server_record.url(record)} with other arguments, and no process "
                f"uses it: restarting it at {config.server(role).url}"
            )
        _end(config, role)  # also kills orphaned workers, before their record is overwritten
        if fault := address.fault(config, role):
            raise ConfigError(fault)
        path = log_file or record_path(config, role).with_suffix(".log")
        path.parent.mkdir(parents=True, exist_ok=True)
        pid = _launch(config, role, line, path)
    log.info("server %s: started process %d, log in %s", role, pid, path)
    return True


def _launch(config: Config, role: Role, line: list[str], path: Path) -> int:
    """Start the process and record it; when recording fails, no process is left."""
    child: subprocess.Popen | None = None
    try:
        with open(path, "ab") as output, signals.held():
            child = _open_process(config, role, line, output)
            facts = process.identity(child.pid) | {"command": line, "log": str(path), "ready": False}
            server_record.write(record_path(config, role), facts)
    except BaseException:
        if child is not None:
            process.end_session(child.pid, 0)
            record_path(config, role).unlink(missing_ok=True)
        raise
    return child.pid


def _open_process(config: Config, role: Role, line: list[str], output: Any) -> subprocess.Popen:
    try:
        return subprocess.Popen(
            line,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(config.server(role)),
            start_new_session=True,
        )
    except OSError as error:
        raise ConfigError(f"servers.{role}.python: {line[0]} does not run ({error.strerror})") from None


def _other_owner(record: dict[str, Any]) -> dict[str, Any] | None:
    """The live owner of the recorded server, unless it is this process."""
    owner = server_record.owner(record)
    return owner if owner and owner["pid"] != os.getpid() else None


def mark_ready(config: Config, role: Role) -> None:
    """Record that the server may have requests to finish: from now on it gets `stop_seconds` to end."""
    with contextlib.suppress(ConfigError), _exclusive(config, role):  # ConfigError: it is being stopped
        record = running(config, role)
        if record and not record["ready"]:
            files.write_json(record_path(config, role), record | {"ready": True})


def stop(config: Config, role: Role, hangs: bool = False, at_most: float = math.inf) -> bool:
    """End the recorded process and its session. Returns whether there was a record.

    Raises ResumableError naming processes that cannot be killed, whose record is kept, and ConfigError while another
    process starts or stops a server of this run.
    """
    if not record_path(config, role).exists():
        return False
    with _exclusive(config, role):
        return _end(config, role, hangs, at_most)


def _end(config: Config, role: Role, hangs: bool = False, at_most: float = math.inf) -> bool:
    record = server_record.read(record_path(config, role))
    # Workers may outlive the leader, whose start time is then None. A pid that was reused belongs to another process.
    if (
        record
        and record["boot"] == process.boot_id()
        and process.start_time(record["pid"]) in (None, record.get("birth"))
    ):
        patient = record["ready"] and not hangs
        seconds = min(config.server(role).stop_seconds, at_most, math.inf if patient else QUICK_SECONDS)
        log.info("server %s: stopping process %d (at most %.0f s)", role, record["pid"], seconds)
        began = time.monotonic()
        if left := process.end_session(record["pid"], seconds):
            raise ResumableError(f"server {role}: process {', '.join(map(str, left))} hangs and cannot be killed")
        log.info("server %s: stopped after %.1f s", role, time.monotonic() - began)
    record_path(config, role).unlink(missing_ok=True)
    return record is not None
