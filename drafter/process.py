"""Processes: identity, sessions (each server and stage leads its own, so that all of it can be ended), commands."""

import contextlib
import ctypes
import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from drafter import signals
from drafter.errors import ConfigError, ResumableError

ROOT = Path(__file__).parents[1]
PARENT = "DRAFTER_PARENT"  # environment variable: the process that a child must not outlive
PR_SET_PDEATHSIG = 1
REMIND_SECONDS = 10
KILL_SECONDS = 30  # a process that survives SIGKILL for so long hangs in the kernel


def identity(pid: int) -> dict[str, Any]:
    """A record that no other process has, not even after its pid is reused or the machine has restarted."""
    return {"pid": pid, "birth": start_time(pid), "boot": boot_id()}


def lives(record: dict[str, Any]) -> bool:
    """Whether the process of an `identity` record is still alive."""
    if record.get("boot") != boot_id():
        return False
    known, pid = record.get("birth"), record.get("pid", 0)
    return leads_hidden_session(pid) if known is None else known == start_time(pid)


def start_time(pid: int) -> str | None:
    """Start time of a live process in clock ticks since boot; None when it is dead or hidden from this user."""
    fields = _fields(pid)
    return fields[19] if fields else None


def boot_id() -> str:
    """Identifies this boot of the machine: pids and start times are only valid within it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def members(session: int) -> list[int]:
    """Live processes of a session."""
    return [pid for pid, fields in _all() if int(fields[3]) == session]


def children(parent: int) -> list[int]:
    return [pid for pid, fields in _all() if int(fields[1]) == parent]


def descendants(ancestor: int) -> list[int]:
    """Children, their children, and so on, in any session."""
    parents = {pid: int(fields[1]) for pid, fields in _all()}
    found = [ancestor]
    for known in found:
        found += [pid for pid, parent in parents.items() if parent == known]
    return found[1:]


def leads_hidden_session(pid: int) -> bool:
    """Whether a process that /proc hides from this user (mount option hidepid) is alive and leads a session.

    For processes that we started: they can be signalled although /proc does not show them.
    """
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/stat").read_text()
        return False
    with contextlib.suppress(OSError, OverflowError):
        os.kill(pid, 0)
        return pid > 0 and os.getsid(pid) == pid
    return False


def _all() -> list[tuple[int, list[str]]]:
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [(pid, fields) for pid in pids if (fields := _fields(pid))]


def _fields(pid: int) -> list[str] | None:
    """/proc/PID/stat of a live process after the command name: state, parent, group, session, ...

    None for a dead process, and for another user's where /proc is mounted with hidepid. A zombie with more than one
    thread is alive: its last thread is still freeing memory and holds the ports.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    state, threads = fields[0], int(fields[17])
    return None if state == "Z" and threads <= 1 else fields


def import_path() -> dict[str, str]:
    """Environment in which Python imports this project first, and nothing from the current folder."""
    # An empty entry means the current folder.
    others = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), *others]), "PYTHONSAFEPATH": "1"}


def parent_here() -> dict[str, str]:
    """Environment of a child that must not outlive this process; takes effect once the child imports `drafter`."""
    return {PARENT: str(os.getpid())}


def follow_parent() -> None:
    """From now on this process gets SIGTERM when the process that started it dies, even by SIGKILL."""
    if parent := os.environ.pop(PARENT, None):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(parent):
            os.kill(os.getpid(), signal.SIGTERM)


def send(pids: Iterable[int], signum: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # processes started by sudo belong to root
            os.kill(pid, signum)


def _send_group(leader: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signum)


def end_session(leader: int, seconds: float) -> list[int]:
    """Ask the leader to stop, then its remaining processes; kill them after `seconds`. Returns those still alive.

    SIGTERM is repeated every REMIND_SECONDS, since vLLM loses a signal that arrives while it boots.
    """
    deadline = time.monotonic() + seconds
    asked: dict[bool, float] = {}  # whether the leader lived -> when
    while living := members(leader) or [leader] * leads_hidden_session(leader):
        with contextlib.suppress(ChildProcessError):  # started by another process
            os.waitpid(leader, os.WNOHANG)
        now, led = time.monotonic(), leader in living
        if now > deadline + KILL_SECONDS:
            break
        if now > deadline:
            send(living, signal.SIGKILL)
            _send_group(leader, signal.SIGKILL)  # reaches workers that /proc hides
        elif led not in asked or now >= asked[led] + REMIND_SECONDS:
            send([leader] if led else living, signal.SIGTERM)
            asked[led] = now
        time.sleep(0.1)
    return living


class NoProgram(ConfigError):
    """The program of a command does not exist, or this user may not run it."""


class TimedOut(ResumableError):
    """A command did not end in time and was killed."""


def run(line: list[str], timeout: float | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and capture its output as text. Its session never outlives the call.

    Ctrl-C on the terminal does not reach it. Bytes that are not UTF-8 are replaced. Raises NoProgram, TimedOut.
    """
    return run_all([line], timeout, **options)[0]


def run_all(
    lines: list[list[str]],
    timeout: float | None = None,
    ended: Callable[[int], None] = lambda _: None,
    **options: Any,
) -> list[subprocess.CompletedProcess[str]]:
    """`run` for several commands in parallel; if the call ends early, all of them are killed.

    `ended` is called with the position of each command in turn, as soon as it and those before it have ended.
    """
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    text = {"encoding": "utf-8", "errors": "replace"}
    started: list[subprocess.Popen] = []
    try:
        for line in lines:
            with signals.held():
                started.append(_start(line, start_new_session=True, **pipes, **text, **options))
        outputs = []
        for position, each in enumerate(started):
            outputs.append(each.communicate(timeout=timeout))
            ended(position)
    except subprocess.TimeoutExpired as error:
        _kill(started)
        raise TimedOut(f"{shlex.join(map(str, error.cmd))} has not ended after {timeout:g} s") from None
    except BaseException:
        _kill(started)
        raise
    return [
        subprocess.CompletedProcess(each.args, each.returncode, *output)
        for each, output in zip(started, outputs, strict=True)
    ]


def last_object(lines: Sequence[str | bytes]) -> dict[str, Any]:
    """The last line that is a JSON object, which a program may have written more after; {} without one."""
    for line in reversed(lines):
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(line)
            if isinstance(found, dict):
                return found
    return {}


def _start(line: list[str], **options: Any) -> subprocess.Popen:
    try:
        return subprocess.Popen(line, **options)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the line
        raise NoProgram(f"{line[0]}: {getattr(error, 'strerror', None) or error}") from None


def _kill(started: list[subprocess.Popen]) -> None:
    for each in started:
        send(members(each.pid), signal.SIGKILL)
    for each in started:
        with contextlib.suppress(subprocess.TimeoutExpired):
            each.wait(5)
        for pipe in (each.stdout, each.stderr):
            if pipe:
                pipe.close()
