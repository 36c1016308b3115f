"""What every numbered script shares: arguments, logging, the manifest, the summary line, the exit code."""

import argparse
import contextlib
import errno
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from drafter import checked, contracts, files, locks, process, run_files, run_locks, signals, torchrun_env
from drafter.cli import Parser, positive
from drafter.config import Config, StageName, load, strict_yaml
from drafter.config.default import default_config
from drafter.errors import ConfigError, ContractError, Interrupted, ResumableError, StageError
from drafter.versions import versions

log = logging.getLogger("drafter")

MEND_MANIFEST = "remove it if the config.yaml beside it is today's, else the whole folder"

DISK_FULL = (*locks.DISK_FULL, errno.EFBIG)
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG)


class Stage:
    """One stage of one run: its config, its folder, its manifest."""

    def __init__(self, name: StageName, config: Config, args: argparse.Namespace):
        self.name = name
        self.config = config
        self.args = args
        self.folder = config.stage_dir(name)
        self.counts = contracts.Counts()
        self.facts: dict[str, Any] = {}  # what the manifest records beside counts: rates, tables, notes
        self.started = time.time()
        self._clock = time.monotonic()  # how long it takes; the wall clock may be set while it does
        self.held = contextlib.ExitStack()  # locks, until the call ends
        self._question: dict[str, Any] = {}
        self._before = 0.0  # seconds of earlier calls

    @property
    def manifest_path(self) -> Path:
        return self.folder / "manifest.json"

    def question(self, keys: Iterable[str]) -> dict[str, Any]:
        """The settings under dotted `keys` that decide what a row means; paths stand for their content."""
        return {"schema": contracts.SCHEMA} | {key: _content_of(self.config, key) for key in sorted(keys)}

    def require(self, upstream: StageName) -> dict:
        """Manifest of an earlier stage, after checking that it answered today's question.

        Raises ConfigError when the stage has not run, or was asked something else.
        """
        manifest = read_taken(self.config, upstream) or read_manifest(self.config.stage_dir(upstream))
        if manifest is None:
            raise ConfigError(
                f"stage {upstream} has not run: nothing in {self.config.stage_dir(upstream)}; "
                f"run it first, or take another run's with run.take.{upstream}=FOLDER"
            )
        self._refuse_changes(manifest, upstream)
        return manifest

    def lock(
        self,
        *reads: StageName,
        own: Callable[[str, list[Path]], contextlib.AbstractContextManager] | None = None,
    ) -> None:
        """Hold the stage's folder until the stage's summary is written, and the folders of the stages it `reads`.

        Nothing is read or written before. Raises ConfigError as `run_locks.stage` does, and for a folder that is
        taken from another run.
        """
        self._refuse_taken()
        self.held.enter_context(run_locks.stage(self.config, self.name, reads, own))

    def begin(self, keys: Iterable[str]) -> None:
        """Claim the stage folder for this question; the manifest is there before the first row.

        `keys` name the settings that change the meaning of a row. Raises ConfigError when the folder was
        made for another question, or is taken from another run.
        """
        self.refuse_another_question()
        self._before = (read_manifest(self.folder) or {"seconds": 0})["seconds"]
        self._question = self.question(keys)  # only now: a refusal must not write over the old manifest
        self.folder.mkdir(parents=True, exist_ok=True)
        files.write_text(self.folder / "config.yaml", self.config.dump())
        self._write_manifest("running")

    def refuse_another_question(self) -> None:
        """Raises ConfigError when the folder was made for another question, or is taken from another run."""
        self._refuse_taken()
        manifest = read_manifest(self.folder)
        if manifest is not None:
            self._refuse_changes(manifest, self.name)

    def _refuse_taken(self) -> None:
        if self.name in self.config.run.take:
            raise ConfigError(f"run.take: {self.folder} belongs to another run, which this one only reads")

    def _refuse_changes(self, manifest: dict, owner: str) -> None:
        if not isinstance(manifest.get("question"), dict):
            path = self.config.stage_dir(owner) / "manifest.json"
            raise ContractError(f"{path} is broken (question: there is none); {MEND_MANIFEST}")
        differing = [
            f"{key} (was {was!r}, is {now!r})"
            for key, was in manifest["question"].items()
            if (now := _content_of(self.config, key)) != was
        ]
        if differing:
            raise ConfigError(
                f"{owner} was made with another {', '.join(differing)}; "
                "use another run.name, or take finished stages from another run with run.take"
            )

    def finish(self) -> dict:
        """Write the final manifest and return the summary. Complete means nothing pending."""
        status = "complete" if self.counts.pending == 0 else "partial"
        return self._write_manifest(status)

    def _write_manifest(self, status: str, error: str | None = None) -> dict:
        manifest = {
            "stage": self.name,
            "status": status,
            **self.counts.to_record(),
            "seconds": round(self._before + time.monotonic() - self._clock, 3),
            "started": datetime.fromtimestamp(self.started, UTC).isoformat(timespec="seconds"),
            "updated": datetime.now(UTC).isoformat(timespec="seconds"),
            "question": self._question,
            "facts": self.facts,
            "versions": versions(),
        }
        if error:
            manifest["error"] = error
        if status == "running":
            manifest["process"] = process.identity(os.getpid())
        files.write_json(self.manifest_path, manifest)
        return manifest


def _content_of(config: Config, key: str) -> Any:
    """A setting's value, or for a path the fingerprint of what is there."""
    if key == "schema":
        return contracts.SCHEMA
    node: Any = config
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else getattr(node, part, None)
    if isinstance(node, Path):
        return files.fingerprint_path(node)
    return None if node is None else config.value(key)  # an earlier version may have had other settings


def read_manifest(folder: Path) -> dict | None:
    """A stage's manifest, or None when the stage has not begun. Raises ContractError on a broken file."""
    try:
        found = checked.load(folder / "manifest.json", run_files.Manifest, remedy=MEND_MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return {"status": "unknown", "facts": {}, "seconds": 0} | found


def read_resolved(folder: Path) -> dict | None:
    """The config that a stage was made with, or None when there is none. Raises ContractError on a broken file."""
    path = folder / "config.yaml"
    try:
        return checked.validate(run_files.Resolved, strict_yaml.load(path.read_text()))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (yaml.YAMLError, ValueError, RecursionError, ContractError) as error:
        raise ContractError(f"{path} is broken ({' '.join(str(error).split())})") from None


def read_taken(config: Config, name: StageName) -> dict | None:
    """Manifest of a stage taken from another run, None of the run's own. Raises ConfigError unless it is finished."""
    folder = config.run.take.get(name)
    if folder is None:
        return None
    manifest = read_manifest(folder)
    if manifest is None or manifest.get("stage", name) != name or manifest["status"] not in ("complete", "partial"):
        raise ConfigError(f"run.take: no finished {name} in {folder}")
    return manifest


def tool_parser(description: str, prog: str | None = None) -> Parser:
    """The arguments every command takes."""
    result = Parser(prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--config", metavar="FILE", help="default: the small model's, for a GPU where there is one")
    result.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="overrides")
    return result


def parser(description: str) -> Parser:
    """The arguments every script takes. What describes the run is config; verbs are flags."""
    result = tool_parser(description)
    result.add_argument("--limit", type=positive, metavar="N", help="handle at most N rows")
    result.add_argument("--dry-run", action="store_true", help="offline: say what would be done and what is missing")
    return result


def run_tool(
    name: str,
    body: Callable[[Config, argparse.Namespace], int | None],
    arguments: Parser,
    argv: list[str] | None,
) -> int:
    """Run a command that is no stage: it prints for a person, an error is one line, the exit codes are a stage's.

    `body` may return one of its own.
    """
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    sys.stdout.reconfigure(errors="backslashreplace")  # a file's name may be no text
    try:
        with signals.listening(*signals.wanted()):
            args = arguments.parse_intermixed_args(argv)  # options before, between and after the names
            code = body(load(args.config or default_config(), args.overrides), args)
            sys.stdout.flush()
            return code or 0
    except BrokenPipeError:  # whoever reads has seen enough
        return 1
    except (StageError, OSError) as error:
        known = error if isinstance(error, StageError) else of_the_machine(error)
        if known is None:
            raise
        print(f"{name}: {known}", file=sys.stderr)
        return known.exit_code
    except Interrupted as stop:
        return stop.exit_code


def run_stage(
    name: StageName,
    body: Callable[[Stage], dict],
    arguments: argparse.ArgumentParser,
    argv: list[str] | None = None,
) -> int:
    """Run a stage's story: one JSON line on stdout, talk on stderr, and the exit code that says who acts next."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    for noisy in ("httpx", "httpx2", "httpcore", "openai"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    signals.listen(*signals.wanted())
    stage: Stage | None = None
    try:
        args = arguments.parse_args(argv)
        stage = Stage(name, load(args.config or default_config(), args.overrides), args)
        if not args.dry_run:
            run_locks.refuse_beside_pipeline(stage.config.run_dir, name)
        summary, code = body(stage), 0
        if args.dry_run:
            try:
                stage.refuse_another_question()
            except ConfigError as error:
                summary["findings"].append(str(error))
            if fault := locks.fault(stage.config.run_dir):
                summary["findings"].append(fault)
        for finding in summary.get("findings", ()):
            say("finding: %s", finding)
        if summary.get("pending", 0) and not summary.get("deadline"):
            code = 0 if args.dry_run else ResumableError.exit_code
    except StageError as error:
        if stage is not None and args.dry_run and not stage.config.target.model.exists():
            # Without the model a plan ends here; what is missing is a finding, the config may be right elsewhere.
            summary, code = {"stage": name, "dry_run": True, "pending": 1, "findings": [str(error)]}, 0
        else:
            summary, code = _failure(stage, name, str(error)), error.exit_code
    except Interrupted as stop:
        summary, code = _failure(stage, name, str(stop), "interrupted"), stop.exit_code
    except BrokenPipeError:
        return 1
    except Exception as error:
        if known := of_the_machine(error):
            summary, code = _failure(stage, name, str(known)), known.exit_code
        else:
            traceback.print_exc()
            summary, code = _failure(stage, name, f"our bug: {error!r}"), 1
    finally:
        if stage is not None:
            stage.held.close()  # only now, or the next call's manifest would be overwritten
    if "error" in summary:
        print(f"{name}: {summary['error']}", file=sys.stderr)
    if is_main_process():
        summarise(summary, code)
    return code


def summarise(summary: dict, code: int) -> None:
    """The line of data at the end. Of a failure a person at a terminal has just been told in words."""
    if not code or not sys.stdout.isatty():
        # torchrun has an exit code of its own, so the summary carries ours.
        print(json.dumps(summary | {"exit_code": code}), flush=True)


def of_the_machine(error: Exception) -> StageError | None:
    """What a full disk, a forbidden or impossible path or a broken disk means for who acts next; else None."""
    number = error.errno if isinstance(error, OSError) else None
    if number in DISK_FULL:
        return ResumableError(f"{error.strerror}; free some space and run the same command again")
    if number in FORBIDDEN:
        return ConfigError(f"{error.filename or 'a file'}: {error.strerror}")
    if number == errno.EIO:
        return ContractError(f"{error.filename or 'a file'}: {error.strerror}")
    return None


def _failure(stage: Stage | None, name: str, message: str, status: str = "failed") -> dict:
    summary = {"stage": name, "status": status, "error": message}
    if stage is not None and stage._question:
        with contextlib.suppress(OSError, StageError):
            summary = stage._write_manifest(status, message)
    return summary


def say(message: str, *args: Any) -> None:
    """Talk to the person watching (stderr)."""
    log.info(message, *args)


def is_main_process() -> bool:
    """True outside torchrun and on its rank 0."""
    return torchrun_env.get("RANK", 0) == 0
