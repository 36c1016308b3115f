"""Disk usage of the runs, and which of their folders can be deleted.

`python -m drafter.disk du|clean [RUN/STAGE or RUN ...] --config FILE`. `clean` shows the folders that exported runs
no longer need, or exactly the named ones; `--yes` deletes them.
"""

import argparse
import logging
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from drafter import checked, files, locks, run_files, run_locks, stage, text
from drafter.config import ROOT, STAGES, Config, StageName
from drafter.errors import ConfigError, StageError

log = logging.getLogger("drafter")

# Folders that can go, and the stage that must be complete before.
FREED_BY = {"02_hidden_states": "05_export", "04_train": "05_export"}
FREED_LOG = "freed.jsonl"
# Shared by the runs
BESIDE_RUNS = (FREED_LOG, "smoke.json", "engine.json", "rehearsals.json", "boots.jsonl", "target_fingerprints.json")
IN_RUNS = (*STAGES, run_files.PIPELINE, locks.LOCK)  # a folder with one of these is a run


@dataclass(frozen=True)
class Held:
    """A stage folder of a run, or the rest of one whose deletion was interrupted."""

    run: Path
    stage: str
    bytes: int
    status: str
    proposed: bool
    why: str
    busy: bool  # a process works in it or reads it: never deleted

    @property
    def folder(self) -> Path:
        return self.run / self.stage

    @property
    def name(self) -> str:
        return f"{self.run.name}/{self.stage}"


def usage(folder: Path) -> int:
    """Bytes allocated below a folder, without files that vanish meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total


def survey(config: Config) -> list[Held]:
    """Every stage folder below `run.dir`, the largest first, each with whether `clean` proposes it and why."""
    held = []
    runs = runs_in(config.run.dir)
    needed = _needed(runs)
    for run in runs:
        left = [path.name for name in FREED_BY for path in sorted(run.glob(f"{name}.*{files.PART}"))]
        for name in [*STAGES, *left]:
            folder = run / name
            if folder.is_dir() and not folder.is_symlink():
                busy = in_use(run, name)
                proposed, why = (False, busy) if busy else _judge(run, name, config, needed)
                held.append(Held(run, name, usage(folder), _status(folder), proposed, why, bool(busy)))
    return sorted(held, key=lambda each: -each.bytes)


def runs_in(folder: Path) -> list[Path]:
    """The runs in `run.dir`, by name."""
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    return [path for path in found if not path.is_symlink() and any((path / name).exists() for name in IN_RUNS)]


def other_entries(run_dir: Path) -> Iterator[str]:
    """A line for each entry of `run.dir` that is no run, and for each link instead of a stage folder."""
    runs = runs_in(run_dir)
    for path in sorted(run_dir.iterdir()) if run_dir.is_dir() else ():
        if path not in runs and path.name not in BESIDE_RUNS:
            yield f"not part of a run, left alone: {path}"
    for path in (run / name for run in runs for name in STAGES):
        if path.is_symlink():
            yield f"a link, left alone: {path} -> {path.readlink()}"


def _status(folder: Path) -> str:
    try:
        return (stage.read_manifest(folder) or {}).get("status", "no manifest")
    except StageError:
        return "unreadable"


def _judge(run: Path, name: str, config: Config, needed: dict[Path, str]) -> tuple[bool, str]:
    """Whether to propose a stage folder that is not in use, and why."""
    if name.endswith(files.PART):
        return True, "left by an interrupted clean"
    if name not in FREED_BY:
        return False, "small and the result"
    try:
        own = _run_settings(run / name)
    except (StageError, OSError):
        return False, "its config.yaml cannot be read"
    if name in own.get("keep", ()) or name in config.run.keep:
        return False, "kept by run.keep"
    if (run / name).resolve() in {path.resolve() for path in config.run.take.values()}:
        return False, "taken by this config"
    if taker := needed.get((run / name).resolve()):
        return False, f"taken by run {taker}, which is not complete"
    if _status(run / FREED_BY[name]) != "complete":
        return False, "the run is not exported"
    return True, "the run is exported"


def _needed(runs: list[Path]) -> dict[Path, str]:
    """Folders that unfinished runs take from others, each with the name of such a run."""
    found: dict[Path, str] = {}
    for run in runs:
        taken: dict[str, str] = {}
        for name in STAGES:
            try:
                taken |= _run_settings(run / name).get("take", {})
            except (StageError, OSError) as error:
                log.info("%s; the folders that its run takes from others are unknown", error)
        own = (name for name in STAGES if name not in taken)
        if any(_status(run / name) != "complete" for name in own):
            found |= {(ROOT / folder).resolve(): run.name for folder in taken.values()}
    return found


def _run_settings(folder: Path) -> dict[str, Any]:
    """Section `run` of the config that a stage was made with; {} without a config. Raises ContractError."""
    return (stage.read_resolved(folder) or {"run": {}})["run"]


def in_use(run: Path, name: str) -> str:
    """Which process works in the run or reads this folder, for a message; empty when there is none."""
    for place in run_locks.busy_folders(run):
        return f"the run is running{locks.describe(place)}"
    return "another process reads it" if locks.in_use(run / name, readers=True) else ""


def select_named(held: list[Held], folders: list[str], run_dir: Path) -> list[Held]:
    """The same folders, of which exactly the named ones are proposed: RUN/STAGE, or RUN for all stages of a run.

    A folder in use is never proposed. Raises ConfigError for an unknown name.
    """
    names = {folder.rstrip("/") for folder in folders}
    if unknown := names - {each.name for each in held} - {each.run.name for each in held}:
        raise ConfigError(
            f"no run and no stage folder (RUN/STAGE) in {run_dir}: {', '.join(sorted(unknown))}; nothing was freed"
        )
    return [
        each if each.busy else replace(each, proposed=named, why="named" if named else "not named")
        for each in held
        for named in [bool(names & {each.name, each.run.name})]
    ]


def clean(held: list[Held], freed_log: Path) -> int:
    """Delete the proposed folders that are still not in use. Returns the bytes freed."""
    freed = 0
    for each in (each for each in held if each.proposed):
        try:
            _free(each)
        except ConfigError as error:
            log.info("%s is kept: %s", each.folder, error)
            continue
        freed += each.bytes
        with files.Journal(freed_log) as journal:
            now = datetime.now(UTC).isoformat(timespec="seconds")
            journal.append({"freed": str(each.folder), "bytes": each.bytes, "at": now})
        log.info("freed %s, %s", each.folder, text.size(each.bytes))
    return freed


def freed(run_dir: Path) -> list[StageName]:
    """The stages of a run whose folders `clean` deleted and no later call has made again."""
    paths = [
        Path(record["freed"]) for record in checked.records_or_empty(run_dir.parent / FREED_LOG, run_files.Freed)
    ]
    names = {path.name for path in paths if path.parent.name == run_dir.name}
    return [name for name in STAGES if name in names and not (run_dir / name).exists()]


def _free(each: Held) -> None:
    """Raises ConfigError when a process works there or reads it."""
    with run_locks.removing(each.run, each.stage):
        doomed = each.folder
        if doomed.suffix != files.PART:
            # The rest of an interrupted deletion must not look like a stage folder.
            doomed = doomed.rename(doomed.with_name(f"{doomed.name}.{os.getpid()}{files.PART}"))
            files.fsync_dir(each.run)
        shutil.rmtree(doomed)


def table(held: list[Held]) -> str:
    rows = [("run", "stage", "size", "status", "clean", "because")]
    rows += [
        (
            each.run.name,
            each.stage,
            text.size(each.bytes),
            each.status,
            "free" if each.proposed else "keep",
            each.why,
        )
        for each in held
    ]
    return f"{text.table(rows)}\n" + f"{text.size(sum(each.bytes for each in held))} in all"


def main(argv: list[str] | None = None) -> int:
    arguments = stage.tool_parser(__doc__, "python -m drafter.disk")
    arguments.add_argument("verb", choices=("du", "clean"))
    arguments.add_argument("folders", nargs="*", metavar="RUN[/STAGE]", help="exactly these folders, exported or not")
    arguments.add_argument("--yes", action="store_true", help="delete what clean shows")
    return stage.run_tool("disk", _command, arguments, argv)


def _command(config: Config, args: argparse.Namespace) -> None:
    held = survey(config)
    if args.folders:
        held = select_named(held, args.folders, config.run.dir)
    print(table(held))
    for line in other_entries(config.run.dir):
        print(line)
    if args.verb == "du":
        return
    named = {folder.rstrip("/") for folder in args.folders}
    for each in held:
        if each.busy and named & {each.name, each.run.name}:
            print(f"keeps {each.folder}: {each.why}")
    if args.yes:
        print(f"{text.size(clean(held, config.run.dir / FREED_LOG))} freed")
        return
    would = [each for each in held if each.proposed]
    for each in would:
        print(f"would free {each.folder}, {text.size(each.bytes)}")
    print(f"{text.size(sum(each.bytes for each in would))} would be freed with --yes")


if __name__ == "__main__":
    raise SystemExit(main())
