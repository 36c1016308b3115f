"""The command, vLLM flags and environment in the files of a systemd unit."""

import os
import shlex
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drafter.config import ROOT, Server

FOLDERS = "/etc/systemd/system:/run/systemd/system:/usr/lib/systemd/system"
UNIT_FOLDERS = tuple(map(Path, os.environ.get("SYSTEMD_UNIT_PATH", FOLDERS).split(":")))  # systemd's own variable
KV_ADVICE = {"decode-context-parallel-size": "4", "watermark": "0.05"}  # of a server that answers 200 requests
SHIPPED = ROOT / "configs/systemd"


@dataclass
class UnitFile:
    """`flags`: name without dashes -> text, or True for a bare flag; empty if the unit starts another script."""

    path: Path
    command: list[str] = field(default_factory=list)
    flags: dict[str, str | bool] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    unread: list[Path] = field(default_factory=list)  # files, of the unit or of its environment
    user: str = "root"
    umask: int = 0o022
    folder: str = "/"


def read(unit: str) -> UnitFile | None:
    """The unit's file and its drop-ins, of which later ones win; None if the unit is not installed."""
    name = unit if unit.endswith(".service") else f"{unit}.service"
    path = next((folder / name for folder in UNIT_FOLDERS if (folder / name).is_file()), None)
    if path is None:
        return None
    return _read([path, *sorted(each for at in UNIT_FOLDERS for each in at.glob(f"{name}.d/*.conf"))])


def shipped(unit: str) -> UnitFile | None:
    """The unit of that name in `configs/systemd`, or None."""
    path = SHIPPED / f"{unit}.service"
    return _read([path]) if path.is_file() else None


def flags_of(server: Server) -> dict[str, Any] | None:
    """vLLM's flags of a role: from the config for a `command`, from the files for a unit; None if unknown."""
    if server.kind == "command":
        return dict(server.flags)
    found = read(server.systemd_unit) if server.kind == "systemd" else None
    return dict(found.flags) if found and found.flags else None


def _read(paths: list[Path]) -> UnitFile:
    found = UnitFile(paths[0])
    for path in paths:
        try:
            text = path.read_text(errors="replace")
        except OSError:
            found.unread.append(path)
            continue
        for key, value in _settings(text):
            if key == "ExecStart":  # an empty one in a drop-in resets it
                found.command = _words(value)
            elif key == "Environment":
                found.environment |= _assignments(_words(value))
            elif key == "User":
                found.user = value or "root"
            elif key == "UMask":
                found.umask = int(value or "022", 8)
            elif key == "WorkingDirectory":
                found.folder = value.removeprefix("-") or "/"
            elif key == "EnvironmentFile":
                _read_environment(Path(value.removeprefix("-")), found)
    words = flag_words(found.command)
    found.flags = {name: " ".join(values) if values else True for name, values in words.items()}
    return found


def _settings(text: str) -> list[tuple[str, str]]:
    lines = (line.strip() for line in text.replace("\\\n", " ").splitlines())
    pairs = (line.partition("=") for line in lines if line[:1] not in ("#", ";") and "=" in line)
    return [(key.strip(), value.strip()) for key, _, value in pairs]


def _words(value: str) -> list[str]:
    try:
        return shlex.split(value)
    except ValueError:  # an open quote
        return value.split()


def _assignments(words: list[str]) -> dict[str, str]:
    return {name: value for name, sign, value in (word.partition("=") for word in words) if sign}


def _read_environment(path: Path, found: UnitFile) -> None:
    try:
        with suppress(FileNotFoundError):
            found.environment |= _assignments([" ".join(_words(line)) for line in path.read_text().splitlines()])
    except (OSError, UnicodeDecodeError):
        found.unread.append(path)


def flag_words(command: list[str]) -> dict[str, list[str]]:
    """Name of each flag without dashes -> the words that follow it; of a repeated flag, the last ones."""
    found: dict[str, list[str]] = {}
    flag = ""
    for word in command:
        if word.startswith("--"):
            flag, given, value = word[2:].partition("=")
            flag = flag.replace("_", "-")
            found[flag] = [value] if given else []
        elif flag:
            found[flag].append(word)
    return found
