"""Whether a role's address is free, and who holds it: this run, another run, or a program that no run knows."""

import contextlib
import os
import shlex
import socket
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit

import psutil

from drafter import locks, run_files, run_locks
from drafter.config import ROOT, STAGES, Config, Role
from drafter.config.servers import SECRET_NAME
from drafter.serve import server_record

LONGEST_LINE = 100  # characters of another process's command line in a message
ANY_HOST = ("0.0.0.0", "::")


def elsewhere(config: Config, role: Role) -> str | None:
    """The address of this run's running server of a role when it is another one than the config's."""
    record, port = server_record.running(config, role), urlsplit(config.server(role).url).port or 80
    url = server_record.url(record) if record else None
    return url if url and urlsplit(url).port != port else None


def fault(config: Config, role: Role) -> str | None:
    """Why a server of this role cannot listen at its address, with the process that holds it and what to do.

    Binding the port is not enough: a vLLM that boots has bound it without listening, which SO_REUSEADDR ignores, and
    without SO_REUSEADDR a port whose connections are in TIME_WAIT looks taken. So command lines are searched too.
    """
    url = config.server(role).url
    why = f"servers.{role}.url: cannot listen at {url}"
    if there := holder(config, role):
        return f"{why} (Address already in use): it is held by {there}"
    address = urlsplit(url)
    try:
        family, kind, protocol, _, name = socket.getaddrinfo(
            address.hostname, address.port or 80, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(name)
    except OSError as error:
        return f"{why} ({error.strerror})"
    return None


def holder(config: Config, role: Role) -> str | None:
    """The process that serves or boots at a role's address, and what to do, for a message; None without one."""
    url = config.server(role).url
    for path in sorted(config.run.dir.glob("*/servers/*.json")):
        record = server_record.read_live(path)
        if record and _serves(record["command"], url):
            return _server_of_a_run(config, role, path, record)
    callers = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}  # their flags may name the port
    for each in psutil.process_iter(["pid", "cmdline"]):
        pid = each.info["pid"]
        if pid not in callers and _serves(each.info["cmdline"] or [], url) and _in_our_network(pid):
            return _other_process(config, role, pid)
    port = urlsplit(url).port or 80
    with contextlib.suppress(psutil.Error, OSError):
        for found in psutil.net_connections("tcp"):
            listens = found.status == psutil.CONN_LISTEN and found.laddr.port == port and found.pid
            if listens and found.laddr.ip in (*ANY_HOST, *_ip_addresses(urlsplit(url).hostname)):
                return _other_process(config, role, found.pid)
    return None


def _server_of_a_run(config: Config, role: Role, path: Path, record: dict[str, Any]) -> str:
    run_dir = path.parent.parent
    who = f"process {record['pid']}, the server {path.stem} of the run {run_dir.name}"
    if owner := server_record.owner(record):
        who += f", which process {owner['pid']} ({command_line(owner['pid'])}) uses"
    elif busy := run_locks.busy_folders(run_dir):
        who += f", which is running{locks.describe(busy[0])}"
    else:
        configs = [run_dir / name / run_files.CONFIG for name in STAGES]
        known = next((str(each) for each in configs if each.exists()), "CONFIG-OF-THAT-RUN")
        down = shlex.join(["python", "-m", "drafter.serve", "down", path.stem, "--config", known])
        return f"{who}, which no process uses now; {_another_port(config, role)}, or end it with `{down}`"
    return f"{who}; wait until it has ended{_or_another_port(config, role)}"


def _other_process(config: Config, role: Role, pid: int) -> str:
    """A process without a record in this `run.dir`: a server of another `run.dir`, an orphan, or another program."""
    who = f"process {pid} ({command_line(pid)})"
    if path := _record_of_our_server(pid):
        if (record := server_record.read_live(path)) and record["pid"] == pid:
            return _server_of_a_run(config, role, path, record)
        if _has_no_parent(pid):
            return f"{who}, an orphaned server of this project; `kill {pid}` ends it"
    return f"{who}, which no run here has recorded; wait until it has ended{_or_another_port(config, role)}"


def _record_of_our_server(pid: int) -> Path | None:
    """Where the record of a server is if this project started it: beside the log that it writes. None for others."""
    with contextlib.suppress(psutil.Error, OSError):
        paths = psutil.Process(pid).environ().get("PYTHONPATH", "").split(os.pathsep)
        log_file = Path(os.readlink(f"/proc/{pid}/fd/1").removesuffix(" (deleted)"))
        if str(ROOT) in paths and log_file.parent.name == "servers" and log_file.suffix == ".log":
            return log_file.with_suffix(".json")
    return None


def _has_no_parent(pid: int) -> bool:
    """Whether the process that started `pid` has ended."""
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(pid).parent()
        return parent is None or parent.pid == 1 or parent.name() == "systemd"
    return False


def _or_another_port(config: Config, role: Role) -> str:
    kind = config.server(role).kind
    return f", or {_another_port(config, role)}" if kind == "command" else ""


def _another_port(config: Config, role: Role) -> str:
    """The advice to use the next free port, with the argument that does it."""
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
    """Whether a process shares our network namespace, as one in a container does not. False if it cannot be read."""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/net") == os.readlink("/proc/self/ns/net")
    return False


def command_line(pid: int) -> str:
    """The command line of a process for a message: shortened, and with secrets masked."""
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
    return host in ANY_HOST or bool(_ip_addresses(address.hostname) & _ip_addresses(host))


def _ip_addresses(host: str | None) -> set[str]:
    """The IP addresses of a host; empty when the name does not resolve."""
    with contextlib.suppress(OSError, ValueError):
        return {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    return set()
