"""The systemd units of servers, through systemctl with the prefix of the config (`sudo -n`)."""

import shlex
import subprocess

from drafter import config, process
from drafter.errors import ConfigError, ResumableError

TAIL_LINES = 40

# What is asked of systemctl, before the unit's name: the rights that a prefix must give.
START = ("start", "--no-block")
STOP = ("stop",)
PROPERTIES = ("LoadState", "ActiveState", "NRestarts", "User", "Group", "UMask")
SHOW = ("show", *(part for name in PROPERTIES for part in ("-p", name)))
STATUS = ("status", "--no-pager", "--full", "-n", str(TAIL_LINES))

ELSEWHERE = "systemd does not run here: set servers.<role>.kind to command, or run this on the host of the unit"
NO_RIGHT = "this user needs the right to do so, see docs/operations.md (sudoers, servers.<role>.systemctl)"
REMEDIES = {  # by what systemctl or sudo says
    "not been booted with systemd": ELSEWHERE,
    "Failed to connect to bus": ELSEWHERE,
    "systemctl: command not found": ELSEWHERE,
    "a password is required": NO_RIGHT,
    "not allowed": NO_RIGHT,
    "sudoers": NO_RIGHT,
    "Access denied": NO_RIGHT,
    "authentication required": NO_RIGHT,
}


def systemctl(server: config.Server, *arguments: str, timeout: float = 60) -> str:
    """Raises ConfigError when systemctl refuses (no right, no such unit)."""
    line = [*server.systemctl, *arguments]
    try:
        done = process.run(line, timeout)
    except FileNotFoundError:
        raise ConfigError(f"no {line[0]} on this machine; set servers.<role>.systemctl or another kind") from None
    except subprocess.TimeoutExpired:
        raise ResumableError(f"{shlex.join(line)} has not come back after {timeout:.0f} s") from None
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())
        remedy = next((f"; {remedy}" for words, remedy in REMEDIES.items() if words in said), "")
        raise ConfigError(f"{shlex.join(line)}: {said}{remedy}")
    return done.stdout


def properties(server: config.Server) -> dict[str, str]:
    """What systemd says of the role's unit, its state and its user. Raises ConfigError when it is not installed."""
    found = dict(line.split("=", 1) for line in systemctl(server, *SHOW, server.unit).splitlines() if "=" in line)
    if found.get("LoadState") == "not-found":
        raise ConfigError(f"no systemd unit {server.unit}; install configs/systemd/{server.unit}.service")
    return found


def is_active(server: config.Server) -> bool:
    """Whether the unit runs or starts. Raises ConfigError."""
    return properties(server).get("ActiveState") in ("active", "activating", "reloading")


def restarts(server: config.Server) -> int:
    """How often systemd restarted the unit by itself. Raises ConfigError."""
    return int(properties(server).get("NRestarts") or 0)


def start(server: config.Server) -> None:
    systemctl(server, *START, server.unit)


def stop(server: config.Server) -> None:
    systemctl(server, *STOP, server.unit, timeout=server.stop_seconds + 60)


def tail(server: config.Server) -> str:
    """The last lines of the unit's journal."""
    # `status` exits 3 for a stopped unit: its output is wanted all the same.
    return process.run([*server.systemctl, *STATUS, server.unit], 60).stdout
