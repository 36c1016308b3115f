"""What runs hold on the data volume, and what of it can go.

By hand: `python -m drafter.artifacts du|clean --config FILE`. `clean` proposes; `--yes` frees.
"""

import argparse
import logging
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from drafter import artifacts, config, stage
from drafter.errors import ConfigError, StageError

log = logging.getLogger("drafter")

# What a later stage no longer needs, and the stage whose completion makes it so.
FREED_BY = {"02_hidden_states": "05_export", "04_train": "05_export"}


@dataclass(frozen=True)
class Held:
    """One stage folder of one run."""

    run: Path
    stage: config.StageName
    bytes: int
    status: str
    proposed: bool
    why: str

    @property
    def folder(self) -> Path:
        return self.run / self.stage


def usage(folder: Path) -> int:
    """Bytes allocated below a folder; files that vanish meanwhile count nothing."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total


def survey(run_config: config.Config) -> list[Held]:
    """Every stage folder below `run.dir`, the largest first, each with what `clean` thinks of it."""
    held = []
    for run in (
        sorted(path for path in run_config.run.dir.iterdir() if path.is_dir()) if run_config.run.dir.exists() else []
    ):
        for name in config.STAGES:
            if (run / name).is_dir():
                status = _status(run / name)
                proposed, why = _judge(run, name, run_config)
                held.append(Held(run, name, usage(run / name), status, proposed, why))
    return sorted(held, key=lambda each: -each.bytes)


def _status(folder: Path) -> str:
    try:
        return (stage.read_manifest(folder) or {}).get("status", "no manifest")
    except StageError:
        return "unreadable"


def _judge(run: Path, name: str, run_config: config.Config) -> tuple[bool, str]:
    """Whether a stage folder may go, and why or why not."""
    if name not in FREED_BY:
        return False, "small and the result"
    if is_running(run, name):
        return False, "the run is running"
    try:
        kept = _kept(run, name)
    except (StageError, OSError):
        return False, "its config.yaml cannot be read"
    if name in kept or name in run_config.run.keep:
        return False, "kept by run.keep"
    if (run / name).resolve() in {path.resolve() for path in run_config.run.take.values()}:
        return False, "taken by this config"
    if _status(run / FREED_BY[name]) != "complete":
        return False, "the run is not exported"
    return True, "the run is exported"


def _kept(run: Path, name: str) -> list[str]:
    """`run.keep` of the config the stage itself was made with."""
    return (stage.read_resolved(run / name) or {"run": {}})["run"].get("keep", [])


def is_running(run: Path, name: str) -> bool:
    """Whether the pipeline, or the stage by hand, works there now."""
    shares = (run / name / ".shares").glob("*")  # of stage 02, which several hosts may work on
    return any(artifacts.in_use(folder) for folder in (run, run / name, *shares))


def chosen(held: list[Held], also: tuple[str, ...] = ()) -> Iterator[Held]:
    """What `clean` frees: what was proposed and the folders named in `also` (RUN/STAGE), never of a running run."""
    for each in held:
        named = f"{each.run.name}/{each.stage}" in also
        if (each.proposed or named) and not is_running(each.run, each.stage):
            yield each


def clean(held: list[Held], freed_log: Path, also: tuple[str, ...] = ()) -> int:
    """Free what is `chosen`; bytes freed."""
    freed = 0
    for each in chosen(held, also):
        shutil.rmtree(each.folder)
        freed += each.bytes
        with artifacts.Journal(freed_log) as journal:
            now = datetime.now(UTC).isoformat(timespec="seconds")
            journal.append({"freed": str(each.folder), "bytes": each.bytes, "at": now})
        log.info("freed %s, %s", each.folder, artifacts.size(each.bytes))
    return freed


def table(held: list[Held]) -> str:
    rows = [("run", "stage", "GiB", "status", "clean", "because")]
    rows += [
        (
            each.run.name,
            each.stage,
            f"{each.bytes / artifacts.GIB:.3f}",
            each.status,
            "free" if each.proposed else "keep",
            each.why,
        )
        for each in held
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, f"{artifacts.size(sum(each.bytes for each in held))} in all"])


def main(argv: list[str] | None = None) -> int:
    arguments = stage.tool_parser(__doc__, "python -m drafter.artifacts")
    arguments.add_argument("verb", choices=("du", "clean"))
    arguments.add_argument("folders", nargs="*", metavar="RUN/STAGE", help="clean these too, exported or not")
    arguments.add_argument("--yes", action="store_true", help="really free what clean proposes")
    return stage.run_tool("artifacts", _command, arguments, argv)


def _command(run_config: config.Config, args: argparse.Namespace) -> None:
    held = survey(run_config)
    unknown = set(args.folders) - {f"{each.run.name}/{each.stage}" for each in held}
    if unknown:
        raise ConfigError(f"no such folder below {run_config.run.dir}: {', '.join(sorted(unknown))}")
    print(table(held))
    if args.verb == "clean" and args.yes:
        freed = clean(held, run_config.run.dir / "freed.jsonl", tuple(args.folders))
        print(f"{artifacts.size(freed)} freed")
    elif args.verb == "clean":
        would = list(chosen(held, tuple(args.folders)))
        for each in would:
            print(f"would free {each.folder}, {artifacts.size(each.bytes)}")
        print(f"{artifacts.size(sum(each.bytes for each in would))} would be freed with --yes")
