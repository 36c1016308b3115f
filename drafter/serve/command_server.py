"""A server of kind `command`: one process session, recorded in the run's `servers/ROLE.json` for as long as it lives.

Starting and stopping happen under the lock of that folder, so what one process starts is recorded before another one
looks.
"""

import contextlib
import logging
import math
import os
import shlex
import socket
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from drafter import config, files, locks, process, signals
from drafter.config_servers import SECRET_NAME
from drafter.errors import ConfigError, ResumableError
from drafter.serve.vllm_command import environment

log = logging.getLogger("drafter")

QUICK_SECONDS = 10  # to stop a server that has nothing to finish: it was never ready, or hangs
LOCK_SECONDS = 10.0  # starting takes less, stopping may take longer
LONGEST_LINE = 100  # characters of another process's command line in a message
ANY_HOST = ("0.0.0.0", "::")


def record_path(run_config: config.Config, role: config.Role) -> Path:
    return run_config.run_dir / "servers" / f"{role}.json"


def read_record(run_config: config.Config, role: config.Role) -> dict[str, Any] | None:
    """What was noted of the process we started for this role; None for another run's, of which this is a copy."""
    path = record_path(run_config, role)
    record = files.read_note(path, pid=int, boot=str, home=str, ready=bool, command=list, log=str)
    return record if record and record["home"] == files.home(path.parent) else None


def running(run_config: config.Config, role: config.Role) -> dict[str, Any] | None:
    """The record of this role's process, if it still lives (its pid was not given to another process)."""
    record = read_record(run_config, role)
    return record if record and process.lives(record) else None


@contextlib.contextmanager
def _exclusive(run_config: config.Config, role: config.Role) -> Iterator[None]:
    """No other process starts or stops a server of this run meanwhile. Raises ConfigError when one does."""
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(locks.locked(record_path(run_config, role).parent, seconds=LOCK_SECONDS))
        except ConfigError:
            raise ConfigError(
                f"server {role}: another process is starting or stopping a server of the run {run_config.run.name}; "
                "wait until it is done, then run the same command again"
            ) from None
        yield


def start(
    run_config: config.Config, role: config.Role, line: list[str], log_file: Path | None = None, alone: bool = False
) -> bool:
    """Start the process unless it runs already with this command line. Returns whether it is this process's to stop.

    Raises ConfigError when its address is taken, its interpreter does not run, or another live process uses the
    role's server: with another command line, or at all when the caller wants it `alone`.
    """
    with _exclusive(run_config, role):
        if record := running(run_config, role):
            owner = _other_owner(record)
            if owner and (alone or record["command"] != line):
                raise ConfigError(
                    f"server {role} of this run is in use by process {owner['pid']} ({_words(owner['pid'])}); "
                    "wait until it has ended, or stop it"
                )
            if record["command"] == line:
                if not owner:
                    _write_record(run_config, role, record)
                return not owner
            log.info("server %s runs with other arguments: stopping it first", role)
        _end(run_config, role)  # also workers that outlived their server, before its record is overwritten
        if fault := address_fault(run_config, role):
            raise ConfigError(fault)
        path = log_file or record_path(run_config, role).with_suffix(".log")
        path.parent.mkdir(parents=True, exist_ok=True)
        pid = _launch(run_config, role, line, path)
    log.info("server %s: started process %d, log in %s", role, pid, path)
    return True


def _launch(run_config: config.Config, role: config.Role, line: list[str], path: Path) -> int:
    """Start the process and record it, or leave none behind."""
    child: subprocess.Popen | None = None
    try:
        with open(path, "ab") as output, signals.held():
            child = _open_process(run_config, role, line, output)
            facts = process.identity(child.pid) | {"command": line, "log": str(path), "ready": False}
            _write_record(run_config, role, facts)
    except BaseException:
        if child is not None:
            process.end_session(child.pid, 0)
            record_path(run_config, role).unlink(missing_ok=True)
        raise
    return child.pid


def _open_process(run_config: config.Config, role: config.Role, line: list[str], output: Any) -> subprocess.Popen:
    try:
        return subprocess.Popen(
            line,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(getattr(run_config.servers, role)),
            start_new_session=True,
        )
    except OSError as error:
        raise ConfigError(f"servers.{role}.python: {line[0]} does not run ({error.strerror})") from None


def _write_record(run_config: config.Config, role: config.Role, facts: dict[str, Any]) -> None:
    """Record the process as one that is used by this process."""
    path = record_path(run_config, role)
    files.write_json(path, facts | {"home": files.home(path.parent), "owner": process.identity(os.getpid())})


def _other_owner(record: dict[str, Any]) -> dict[str, Any] | None:
    """The live process, other than this one, that started the recorded server or uses it."""
    owner = record.get("owner")  # a record of an older version has none
    if isinstance(owner, dict) and process.lives(owner) and owner["pid"] != os.getpid():
        return owner
    return None


def mark_ready(run_config: config.Config, role: config.Role) -> None:
    """From now on the server gets `stop_seconds` to end, since it has requests to finish."""
    with contextlib.suppress(ConfigError), _exclusive(run_config, role):  # else it is being stopped
        record = running(run_config, role)
        if record and not record["ready"]:
            files.write_json(record_path(run_config, role), record | {"ready": True})


def stop(run_config: config.Config, role: config.Role, hangs: bool = False, at_most: float = math.inf) -> bool:
    """End the recorded process and its session. Returns whether there was one.

    Raises ResumableError naming processes that cannot be ended; their record stays. ConfigError when another process
    is starting or stopping a server of this run.
    """
    if not record_path(run_config, role).exists():
        return False
    with _exclusive(run_config, role):
        return _end(run_config, role, hangs, at_most)


def _end(run_config: config.Config, role: config.Role, hangs: bool = False, at_most: float = math.inf) -> bool:
    record = read_record(run_config, role)
    # Workers may outlive the leader; but a pid that was given to another process since is not ours to end.
    if record and record["boot"] == process.boot() and process.birth(record["pid"]) in (None, record.get("birth")):
        patient = record["ready"] and not hangs
        seconds = min(getattr(run_config.servers, role).stop_seconds, at_most, math.inf if patient else QUICK_SECONDS)
        log.info("server %s: stopping process %d, killed after %.0f s", role, record["pid"], seconds)
        if left := process.end_session(record["pid"], seconds):
            raise ResumableError(f"server {role}: process {', '.join(map(str, left))} hangs and cannot be ended")
    record_path(run_config, role).unlink(missing_ok=True)
    return record is not None


# Who has the address


def address_fault(run_config: config.Config, role: config.Role) -> str | None:
    """Why a server of this role could not listen at its address, and what ends the process that has it.

    A server that boots has bound its port and does not listen yet, which a trial with SO_REUSEADDR does not see, and
    one without takes connections that wait to expire for a server. So command lines are looked at as well.
    """
    server: config.Server = getattr(run_config.servers, role)
    why = f"servers.{role}.url: cannot listen at {server.url}"
    if there := at_address(run_config, server):
        return f"{why} (Address already in use): it is held by {there}"
    address = urlsplit(server.url)
    try:
        family, kind, protocol, _, name = socket.getaddrinfo(
            address.hostname, address.port or 80, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
            probe.bind(name)
    except OSError as error:
        return f"{why} ({error.strerror})"
    return None


def at_address(run_config: config.Config, server: config.Server) -> str | None:
    """The process that serves at an address, or boots to do so, and what ends it; None where none is seen."""
    for path in sorted(run_config.run.dir.glob("*/servers/*.json")):
        there = False
        with contextlib.suppress(OSError):  # of another user's run
            record = files.read_note(path, pid=int, boot=str, home=str, command=list)
            there = record and record["home"] == files.home(path.parent) and process.lives(record)
        if there and _serves(record["command"], server.url):
            return (
                f"process {record['pid']}, the server {path.stem} of the run {path.parent.parent.name}; "
                f"`down {path.stem}` with that run's config ends it"
            )
    for each in psutil.process_iter(["pid", "cmdline"]):
        pid = each.info["pid"]
        if pid != os.getpid() and _serves(each.info["cmdline"] or [], server.url) and _in_our_network(pid):
            return _unrecorded(pid)
    port = urlsplit(server.url).port or 80
    with contextlib.suppress(psutil.Error, OSError):
        for found in psutil.net_connections("tcp"):
            listens = found.status == psutil.CONN_LISTEN and found.laddr.port == port and found.pid
            if listens and found.laddr.ip in (*ANY_HOST, *_numbers(urlsplit(server.url).hostname)):
                return _unrecorded(found.pid)
    return None


def _in_our_network(pid: int) -> bool:
    """Whether a process has this one's ports: one in a container has its own. False where that cannot be read."""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/net") == os.readlink("/proc/self/ns/net")
    return False


def _unrecorded(pid: int) -> str:
    return f"process {pid} ({_words(pid)}), which no run here has recorded; `kill {pid}` ends it"


def _words(pid: int) -> str:
    """A process's command line, shortened for a message and without secrets."""
    with contextlib.suppress(psutil.Error, OSError):
        if words := psutil.Process(pid).cmdline():
            for place, word in enumerate(words):
                flag, equals, _ = word.partition("=")
                if SECRET_NAME.search(flag):
                    words[place] = f"{flag}{equals}{'...' if equals else ''}"
                elif place and SECRET_NAME.search(words[place - 1]):
                    words[place] = "..."
            text = " ".join(shlex.join(words).split())
            return text if len(text) <= LONGEST_LINE else f"{text[:LONGEST_LINE]}..."
    return "its command line is hidden"


def _serves(line: list[str], url: str) -> bool:
    """Whether this is the command line of a vLLM server for the address."""
    address = urlsplit(url)
    flags = [word for part in line if isinstance(part, str) for word in part.split("=", 1)]
    given = dict(pairwise(flags))
    if not any("vllm" in word for word in flags) or given.get("--port") != str(address.port or 80):
        return False
    host = given.get("--host", ANY_HOST[0])
    return host in ANY_HOST or bool(_numbers(address.hostname) & _numbers(host))


def _numbers(host: str | None) -> set[str]:
    """The numeric addresses of a host."""
    with contextlib.suppress(OSError, ValueError):
        return {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    return set()
