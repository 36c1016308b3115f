"""The systemd units of servers, through systemctl with the prefix of the config (`sudo -n`)."""

import contextlib
import os
import shlex
from pathlib import Path

from drafter import process
from drafter.config import Server
from drafter.errors import ConfigError, StageError

TAIL_LINES = 40
JOURNAL_SECONDS = 60  # journalctl searches a big journal

# What is asked of systemctl, before the unit's name.
FORGIVE = ("reset-failed",)
START = ("start", "--no-block")
STOP = ("stop",)
PROPERTIES = ("LoadState", "ActiveState", "Job", "NRestarts", "User", "Group", "UMask")
SHOW = ("show", "--no-pager", *(part for name in PROPERTIES for part in ("-p", name)))
# On a terminal a pager would run with the rights of the prefix, root's, and can start a shell.
NO_PAGER = {"SYSTEMD_PAGER": "", "SYSTEMD_PAGERSECURE": "1"}
JOURNAL = ("--no-pager", "--no-hostname", "-n", str(TAIL_LINES), "-u")  # of journalctl

ELSEWHERE = "systemd does not run here: set servers.<role>.kind to command, or run this on the host of the unit"
# After an update the rights of an older version may lack a line, or a word of one.
INSTALL_RIGHTS = "install this version's configs/systemd/sudoers, see docs/operations.md"
NO_RIGHT = f"this user needs the right to do so: {INSTALL_RIGHTS}, or set servers.<role>.systemctl"
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


def systemctl(server: Server, *arguments: str, timeout: float = 60) -> str:
    """Raises ConfigError when systemctl refuses (no right, no such unit), ResumableError when it does not end."""
    line = [*server.systemctl, *arguments]
    try:
        done = process.run(line, timeout, env=os.environ | NO_PAGER)
    except process.NoProgram as error:
        raise ConfigError(f"{error}; set servers.<role>.systemctl or another kind") from None
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())
        remedy = next((remedy for words, remedy in REMEDIES.items() if words in said), "")
        refused = server.systemctl if remedy == ELSEWHERE else line  # the same for every unit
        raise ConfigError(f"{shlex.join(refused)}: {'; '.join(filter(None, (said, remedy)))}")
    return done.stdout


def properties(server: Server) -> dict[str, str]:
    """What systemd says of the role's unit, its state and its user. Raises ConfigError when it is not installed."""
    found = dict(line.split("=", 1) for line in systemctl(server, *SHOW, server.unit).splitlines() if "=" in line)
    if found.get("LoadState") == "not-found":
        raise ConfigError(f"no systemd unit {server.unit}; install configs/systemd/{server.unit}.service")
    return found


def is_active(server: Server) -> bool:
    """Whether the unit runs, starts, or waits to start until another one has stopped. Raises ConfigError."""
    found = properties(server)
    queued = found.get("ActiveState") in ("inactive", "failed") and found.get("Job")
    return bool(queued) or found.get("ActiveState") in ("active", "activating", "reloading")


def restarts(server: Server) -> int:
    """How often systemd restarted the unit by itself. Raises ConfigError."""
    return int(properties(server).get("NRestarts") or 0)


def commands(server: Server) -> list[list[str]]:
    """Every command line that a night runs on the unit: the rights that a prefix must give."""
    verbs = (FORGIVE, START, STOP, SHOW)
    return [[*server.systemctl, *verb, server.unit] for verb in verbs] + [_journal(server)]


def start(server: Server) -> None:
    """Start the unit, however often it was started or died lately. Raises ConfigError.

    Beyond the unit's StartLimitBurst systemd would take the request, report success, and start nothing.
    """
    with contextlib.suppress(ConfigError):  # a unit that never ran has nothing to forgive
        systemctl(server, *FORGIVE, server.unit)
    systemctl(server, *START, server.unit)


def stop(server: Server) -> None:
    systemctl(server, *STOP, server.unit, timeout=server.stop_seconds + 60)


def tail(server: Server) -> str:
    """The last lines of the unit's journal, of earlier starts too: `systemctl status` shows the latest one's only."""
    try:
        return process.run(_journal(server), JOURNAL_SECONDS, env=os.environ | NO_PAGER).stdout
    except StageError as error:  # what it is asked for is another error's message
        return f"its journal cannot be read: {error}"


def _journal(server: Server) -> list[str]:
    asked = [
        Path(word).with_name("journalctl") if Path(word).name == "systemctl" else word for word in server.systemctl
    ]
    return [*map(str, asked), *JOURNAL, server.unit]
