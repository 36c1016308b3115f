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
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit

import psutil

from drafter import files, locks, process, run_locks, signals
from drafter.config import ROOT, STAGES, Config, Role, Server
from drafter.config.servers import SECRET_NAME
from drafter.errors import ConfigError, ResumableError
from drafter.serve.vllm_command import environment

log = logging.getLogger("drafter")

QUICK_SECONDS = 10  # to stop a server that has nothing to finish: it was never ready, or hangs
LOCK_SECONDS = 10.0  # starting takes less, stopping may take longer
LONGEST_LINE = 100  # characters of another process's command line in a message
ANY_HOST = ("0.0.0.0", "::")


def record_path(config: Config, role: Role) -> Path:
    return config.run_dir / "servers" / f"{role}.json"


def read_record(config: Config, role: Role) -> dict[str, Any] | None:
    """What was noted of the process we started for this role; None for another run's, of which this is a copy."""
    path = record_path(config, role)
    record = files.read_note(path, pid=int, boot=str, home=str, ready=bool, command=list, log=str)
    return record if record and record["home"] == files.inode_id(path.parent) else None


def running(config: Config, role: Role) -> dict[str, Any] | None:
    """The record of this role's process, if it still lives (its pid was not given to another process)."""
    record = read_record(config, role)
    return record if record and process.lives(record) else None


def url_of(record: dict[str, Any]) -> str:
    """Where a recorded server listens, as its command line says."""
    given = dict(pairwise(record["command"]))
    host = given.get("--host", "127.0.0.1")
    return f"http://[{host}]:{given.get('--port')}" if ":" in host else f"http://{host}:{given.get('--port')}"


def elsewhere(config: Config, role: Role) -> str | None:
    """The address of this role's running server when it is not the config's."""
    record, port = running(config, role), urlsplit(config.server(role).url).port or 80
    return url_of(record) if record and urlsplit(url_of(record)).port != port else None


@contextlib.contextmanager
def _exclusive(config: Config, role: Role) -> Iterator[None]:
    """No other process starts or stops a server of this run meanwhile. Raises ConfigError when one does."""
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
    """Start the process unless it runs already with this command line. Returns whether it is this process's to stop.

    Raises ConfigError when its address is taken, its interpreter does not run, or another live process uses the
    role's server: with another command line, or at all when the caller wants it `alone`.
    """
    with _exclusive(config, role):
        if record := running(config, role):
            owner = _other_owner(record)
            if owner and (alone or record["command"] != line):
                raise ConfigError(
                    f"server {role} of this run, at {url_of(record)}, is in use by process {owner['pid']} "
                    f"({_words(owner['pid'])}); wait until it has ended, or stop it"
                )
            if record["command"] == line:
                if not owner:
                    _write_record(config, role, record)
                return not owner
            there, wanted = url_of(record), config.server(role).url
            log.info(
                "server %s of this run runs at %s with other arguments, and no process uses it: stopping it to start "
                "it anew at %s",
                role,
                there,
                wanted,
            )
        _end(config, role)  # also workers that outlived their server, before its record is overwritten
        if fault := address_fault(config, role):
            raise ConfigError(fault)
        path = log_file or record_path(config, role).with_suffix(".log")
        path.parent.mkdir(parents=True, exist_ok=True)
        pid = _launch(config, role, line, path)
    log.info("server %s: started process %d, log in %s", role, pid, path)
    return True


def _launch(config: Config, role: Role, line: list[str], path: Path) -> int:
    """Start the process and record it, or leave none behind."""
    child: subprocess.Popen | None = None
    try:
        with open(path, "ab") as output, signals.held():
            child = _open_process(config, role, line, output)
            facts = process.identity(child.pid) | {"command": line, "log": str(path), "ready": False}
            _write_record(config, role, facts)
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


def _write_record(config: Config, role: Role, facts: dict[str, Any]) -> None:
    """Record the process as one that is used by this process."""
    path = record_path(config, role)
    files.write_json(path, facts | {"home": files.inode_id(path.parent), "owner": process.identity(os.getpid())})


def _owner(record: dict[str, Any]) -> dict[str, Any] | None:
    """The live process that started the recorded server or uses it."""
    owner = record.get("owner")  # a record of an older version has none
    return owner if isinstance(owner, dict) and process.lives(owner) else None


def _other_owner(record: dict[str, Any]) -> dict[str, Any] | None:
    """The live owner of the recorded server, unless it is this process."""
    owner = _owner(record)
    return owner if owner and owner["pid"] != os.getpid() else None


def mark_ready(config: Config, role: Role) -> None:
    """From now on the server gets `stop_seconds` to end, since it has requests to finish."""
    with contextlib.suppress(ConfigError), _exclusive(config, role):  # else it is being stopped
        record = running(config, role)
        if record and not record["ready"]:
            files.write_json(record_path(config, role), record | {"ready": True})


def stop(config: Config, role: Role, hangs: bool = False, at_most: float = math.inf) -> bool:
    """End the recorded process and its session. Returns whether there was one.

    Raises ResumableError naming processes that cannot be ended; their record stays. ConfigError when another process
    is starting or stopping a server of this run.
    """
    if not record_path(config, role).exists():
        return False
    with _exclusive(config, role):
        return _end(config, role, hangs, at_most)


def _end(config: Config, role: Role, hangs: bool = False, at_most: float = math.inf) -> bool:
    record = read_record(config, role)
    # Workers may outlive the leader; but a pid that was given to another process since is not ours to end.
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
            raise ResumableError(f"server {role}: process {', '.join(map(str, left))} hangs and cannot be ended")
        log.info("server %s: stopped after %.1f s", role, time.monotonic() - began)
    record_path(config, role).unlink(missing_ok=True)
    return record is not None


# Who has the address


def address_fault(config: Config, role: Role) -> str | None:
    """Why a server of this role could not listen at its address, which process has it, and what to do.

    A server that boots has bound its port and does not listen yet, which a trial with SO_REUSEADDR does not see, and
    one without takes connections that wait to expire for a server. So command lines are looked at as well.
    """
    server: Server = config.server(role)
    why = f"servers.{role}.url: cannot listen at {server.url}"
    if there := at_address(config, role):
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


def at_address(config: Config, role: Role) -> str | None:
    """The process that serves at a role's address, or boots to do so, and what to do; None where none is seen."""
    server: Server = config.server(role)
    for path in sorted(config.run.dir.glob("*/servers/*.json")):
        record = _live_record(path)
        if record and _serves(record["command"], server.url):
            return _of_a_run(config, role, path, record)
    callers = {
        os.getpid(),
        *(parent.pid for parent in psutil.Process().parents()),
    }  # their flags may name the port too
    for each in psutil.process_iter(["pid", "cmdline"]):
        pid = each.info["pid"]
        if pid not in callers and _serves(each.info["cmdline"] or [], server.url) and _in_our_network(pid):
            return _of_no_run_here(config, role, pid)
    port = urlsplit(server.url).port or 80
    with contextlib.suppress(psutil.Error, OSError):
        for found in psutil.net_connections("tcp"):
            listens = found.status == psutil.CONN_LISTEN and found.laddr.port == port and found.pid
            if listens and found.laddr.ip in (*ANY_HOST, *_numbers(urlsplit(server.url).hostname)):
                return _of_no_run_here(config, role, found.pid)
    return None


def _live_record(path: Path) -> dict[str, Any] | None:
    """A run's record of a server whose process lives; of another user's run it may not be readable."""
    with contextlib.suppress(OSError):
        record = files.read_note(path, pid=int, boot=str, home=str, command=list)
        if record and record["home"] == files.inode_id(path.parent) and process.lives(record):
            return record
    return None


def _of_a_run(config: Config, role: Role, path: Path, record: dict[str, Any]) -> str:
    run_dir = path.parent.parent
    who = f"process {record['pid']}, the server {path.stem} of the run {run_dir.name}"
    if owner := _owner(record):
        who += f", which process {owner['pid']} ({_words(owner['pid'])}) uses"
    elif busy := _busy(run_dir):
        who += f", which is at work{locks.describe(busy[0])}"
    else:
        configs = [run_dir / name / "config.yaml" for name in STAGES]
        known = next((str(each) for each in configs if each.exists()), "CONFIG-OF-THAT-RUN")
        down = shlex.join(["python", "-m", "drafter.serve", "down", path.stem, "--config", known])
        return f"{who}, which no process uses now; {_another_port(config, role)}, or end it with `{down}`"
    return f"{who}; wait until it has ended{_or_another_port(config, role)}"


def _busy(run_dir: Path) -> list[Path]:
    """The places of a run, itself or its stages, that processes work in now."""
    stages = [place for name in STAGES for place in run_locks.workers(run_dir / name)]
    return [run_dir] * locks.in_use(run_dir) + stages


def _of_no_run_here(config: Config, role: Role, pid: int) -> str:
    who = f"process {pid} ({_words(pid)})"
    if path := _record_of_our_server(pid):
        if (record := _live_record(path)) and record["pid"] == pid:
            return _of_a_run(config, role, path, record)
        if _has_no_parent(pid):
            return f"{who}, a server of this project that no run records any more; `kill {pid}` ends it"
    return f"{who}, which no run here has recorded; wait until it has ended{_or_another_port(config, role)}"


def _record_of_our_server(pid: int) -> Path | None:
    """Where a server that this project started was recorded, beside the log that it writes; None for others."""
    with contextlib.suppress(psutil.Error, OSError):
        paths = psutil.Process(pid).environ().get("PYTHONPATH", "").split(os.pathsep)
        log_file = Path(os.readlink(f"/proc/{pid}/fd/1").removesuffix(" (deleted)"))
        if str(ROOT) in paths and log_file.parent.name == "servers" and log_file.suffix == ".log":
            return log_file.with_suffix(".json")
    return None


def _has_no_parent(pid: int) -> bool:
    """Whether the process that started it is dead."""
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(pid).parent()
        return parent is None or parent.pid == 1 or parent.name() == "systemd"
    return False


def _or_another_port(config: Config, role: Role) -> str:
    kind = config.server(role).kind
    return f", or {_another_port(config, role)}" if kind == "command" else ""


def _another_port(config: Config, role: Role) -> str:
    """The argument that moves a role to the next free port."""
    address = urlsplit(config.server(role).url)
    others = {urlsplit(config.server(each).url).port for each in get_args(Role)}
    host, port = address.hostname or "127.0.0.1", address.port or 80
    free = (each for each in range(port + 1, 65536) if each not in others and _is_free(host, each))
    name = f"[{host}]" if ":" in host else host
    return f"take another port: --set servers.{role}.url={address.scheme}://{name}:{next(free, 'PORT')}"


def _is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.suppress(OSError), socket.create_server((host, port), family=family):
        return True
    return False


def _in_our_network(pid: int) -> bool:
    """Whether a process has this one's ports: one in a container has its own. False where that cannot be read."""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/net") == os.readlink("/proc/self/ns/net")
    return False


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
