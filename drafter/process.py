"""Process sessions: a server or a stage is started as the leader of its own, so that all of it can be ended."""

import contextlib
import os
import signal
import time
from pathlib import Path

REMIND_SECONDS = 10


def birth(pid: int) -> str | None:
    """Start time of a live process in clock ticks since boot: with the pid, an identity. None when it is dead."""
    fields = _fields(pid)
    return fields[19] if fields and fields[0] != "Z" else None


def boot() -> str:
    """Identity of this start of the machine: pids and births mean nothing after the next."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def members(session: int) -> list[int]:
    """Live processes of a session."""
    return [pid for pid, fields in _all() if fields[0] != "Z" and int(fields[3]) == session]


def children(parent: int) -> list[int]:
    return [pid for pid, fields in _all() if fields[0] != "Z" and int(fields[1]) == parent]


def _all() -> list[tuple[int, list[str]]]:
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [(pid, fields) for pid in pids if (fields := _fields(pid))]


def _fields(pid: int) -> list[str] | None:
    """/proc/PID/stat after the command's name: state, parent, group, session, ..."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def send(pids: list[int], signum: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)


def end_session(leader: int, seconds: float) -> None:
    """Ask the leader to stop, then what outlives it; kill what is left after `seconds`.

    Asked again every REMIND_SECONDS: vLLM loses a signal that comes while it boots.
    """
    deadline = time.monotonic() + seconds
    asked: dict[bool, float] = {}  # whether the leader lived -> when
    while living := members(leader):
        with contextlib.suppress(ChildProcessError):  # not our child when another process started it
            os.waitpid(leader, os.WNOHANG)
        now, led = time.monotonic(), leader in living
        if now > deadline:
            send(living, signal.SIGKILL)
        elif led not in asked or now >= asked[led] + REMIND_SECONDS:
            send([leader] if led else living, signal.SIGTERM)
            asked[led] = now
        time.sleep(0.1)
