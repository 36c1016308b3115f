"""Servers that are systemd units, controlled by the config's `systemctl` command (such as `sudo -n systemctl`)."""

import contextlib
import os
import shlex
from pathlib import Path

from drafter import process
from drafter.config import Server
from drafter.errors import ConfigError, StageError

TAIL_LINES = 40
JOURNAL_SECONDS = 60  # journalctl is slow on a big journal

# Arguments of systemctl, before the unit's name.
RESET = ("reset-failed",)
START = ("start", "--no-block")
STOP = ("stop",)
PROPERTIES = ("LoadState", "ActiveState", "Job", "NRestarts", "User", "Group", "UMask")
SHOW = ("show", "--no-pager", *(part for name in PROPERTIES for part in ("-p", name)))
# On a terminal a pager would run as root under sudo, and a pager can start a shell.
NO_PAGER = {"SYSTEMD_PAGER": "", "SYSTEMD_PAGERSECURE": "1"}
JOURNAL = ("--no-pager", "--no-hostname", "-n", str(TAIL_LINES), "-u")  # of journalctl

ELSEWHERE = "systemd does not run here: set servers.<role>.kind to command, or run this on the unit's host"
# The sudoers file of an older version may lack a line, or a word of one.
INSTALL_RIGHTS = "install this version's configs/systemd/sudoers, see docs/operations.md"
NO_RIGHT = f"this user needs permission for it: {INSTALL_RIGHTS}, or set servers.<role>.systemctl"
REMEDIES = {  # by a text in the output of systemctl or sudo
    "not been booted with systemd": ELSEWHERE,
    "Failed to connect to bus": ELSEWHERE,
    "systemctl: command not found": ELSEWHERE,
    "a password is required": NO_RIGHT,
    "not allowed": NO_RIGHT,
    "sudoers": NO_RIGHT,
    "Access denied": NO_RIGHT,
    "authentication required": NO_RIGHT,
}


def systemctl(server: Server, *arguments: str, timeout: float = 60) -> str:
    """The output of systemctl. Raises ConfigError when it fails (no permission, no such unit), TimedOut."""
    line = [*server.systemctl, *arguments]
    try:
        done = process.run(line, timeout, env=os.environ | NO_PAGER)
    except process.NoProgram as error:
        raise ConfigError(f"{error}; set servers.<role>.systemctl or another kind") from None
    if done.returncode:
        output = " ".join((done.stderr or done.stdout).split())
        remedy = next((remedy for words, remedy in REMEDIES.items() if words in output), "")
        refused = server.systemctl if remedy == ELSEWHERE else line  # one finding, not one for each unit
        raise ConfigError(f"{shlex.join(refused)}: {'; '.join(filter(None, (output, remedy)))}")
    return done.stdout


def properties(server: Server) -> dict[str, str]:
    """State and user of the role's unit as systemd reports them. Raises ConfigError when it is not installed."""
    lines = systemctl(server, *SHOW, server.systemd_unit).splitlines()
    found = {name: value for name, sign, value in (line.partition("=") for line in lines) if sign}
    if found.get("LoadState") == "not-found":
        raise ConfigError(f"no systemd unit {server.unit}; install configs/systemd/{server.unit}.service")
    return found


def is_active(server: Server) -> bool:
    """Whether the unit runs, starts, or is queued until another one has stopped. Raises ConfigError."""
    found = properties(server)
    queued = found.get("ActiveState") in ("inactive", "failed") and found.get("Job")
    return bool(queued) or found.get("ActiveState") in ("active", "activating", "reloading")


def restarts(server: Server) -> int:
    """How often systemd has restarted the unit on its own. Raises ConfigError."""
    return int(properties(server).get("NRestarts") or 0)


def commands(server: Server) -> list[list[str]]:
    """Every command line that a run uses on the unit; sudo must permit each of them."""
    verbs = (RESET, START, STOP, SHOW)
    return [[*server.systemctl, *verb, server.systemd_unit] for verb in verbs] + [_journal(server)]


def start(server: Server) -> None:
    """Start the unit, even if it reached its start limit. Raises ConfigError.

    Beyond StartLimitBurst systemd would accept the request, report success, and start nothing.
    """
    with contextlib.suppress(ConfigError):  # fails for a unit that never ran, which needs no reset
        systemctl(server, *RESET, server.systemd_unit)
    systemctl(server, *START, server.systemd_unit)


def stop(server: Server) -> None:
    systemctl(server, *STOP, server.systemd_unit, timeout=server.stop_seconds + 60)


def tail(server: Server) -> str:
    """The last lines of the unit's journal, earlier starts included (`systemctl status` shows only the latest)."""
    try:
        return process.run(_journal(server), JOURNAL_SECONDS, env=os.environ | NO_PAGER).stdout
    except StageError as error:  # this text is part of another error's message
        return f"its journal cannot be read: {error}"


def _journal(server: Server) -> list[str]:
    asked = [
        Path(word).with_name("journalctl") if Path(word).name == "systemctl" else word for word in server.systemctl
    ]
    return [*map(str, asked), *JOURNAL, server.systemd_unit]
