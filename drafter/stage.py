"""What the numbered scripts and the tools share: arguments, logging, the manifest, the summary line, exit codes."""

import argparse
import contextlib
import errno
import io
import json
import logging
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError

from drafter import checked, contracts, files, locks, process, run_files, run_locks, signals, torchrun_env
from drafter.cli import Parser, add_json, add_set, positive
from drafter.config import Config, StageName, load, strict_yaml
from drafter.config.default import default_config
from drafter.errors import ConfigError, ContractError, Interrupted, ResumableError, StageError
from drafter.versions import versions

log = logging.getLogger("drafter")

REMEDY = "delete it if the config.yaml beside it is the current config, else delete the whole folder"

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
        self.facts: dict[str, Any] = {}  # recorded in the manifest beside the counts: rates, tables, notes
        self.started = time.time()
        self._clock = time.monotonic()  # the wall clock may be set while the stage runs
        self.held = contextlib.ExitStack()  # locks, held until the call ends
        self._question: dict[str, Any] = {}
        self._before = 0.0  # seconds of earlier calls

    @property
    def manifest_path(self) -> Path:
        return self.folder / run_files.MANIFEST

    def question(self, keys: Iterable[str]) -> dict[str, Any]:
        """The settings under dotted `keys` that decide what a row means; a path is replaced by a fingerprint."""
        return {"schema": contracts.SCHEMA} | {key: _content_of(self.config, key) for key in sorted(keys)}

    def require(self, upstream: StageName) -> dict:
        """Manifest of an earlier stage, after checking that it was made with the same settings.

        Raises ConfigError when the stage has not run, or ran with other settings.
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
        """Lock the stage's folder and those of the stages it `reads` until the summary is written.

        Call it before anything is read or written. Raises ConfigError as `run_locks.stage` does, and for a stage that
        is taken from another run.
        """
        self._refuse_taken()
        self.held.enter_context(run_locks.stage(self.config, self.name, reads, own))

    def begin(self, keys: Iterable[str]) -> None:
        """Write the config and the first manifest, which precede the first row.

        `keys` name the settings that decide what a row means. Raises ConfigError when the folder was made with other
        values of them, or is taken from another run.
        """
        self.refuse_another_question()
        self._before = (read_manifest(self.folder) or {"seconds": 0})["seconds"]
        self._question = self.question(keys)  # only now: a refusal must not overwrite the old manifest
        self.folder.mkdir(parents=True, exist_ok=True)
        files.write_text(self.folder / run_files.CONFIG, self.config.dump())
        self._write_manifest("running")

    def refuse_another_question(self) -> None:
        """Raises ConfigError when the folder was made with other settings, or is taken from another run."""
        self._refuse_taken()
        manifest = read_manifest(self.folder)
        if manifest is not None:
            self._refuse_changes(manifest, self.name)

    def _refuse_taken(self) -> None:
        if self.name in self.config.run.take:
            raise ConfigError(f"run.take: {self.folder} belongs to another run and is only read here")

    def _refuse_changes(self, manifest: dict, owner: StageName) -> None:
        if not isinstance(manifest.get("question"), dict):
            path = self.config.stage_dir(owner) / run_files.MANIFEST
            raise ContractError(f"{path} is broken (no question); {REMEDY}")
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
        """Write the final manifest, "complete" when nothing is pending, and return it as the summary."""
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
    """A setting's value, or for a path the fingerprint of the file or folder."""
    if key == "schema":
        return contracts.SCHEMA
    node: Any = config
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else getattr(node, part, None)
    if isinstance(node, Path):
        return files.fingerprint_path(node)
    return None if node is None else config.value(key)  # None: a setting of another version


def read_manifest(folder: Path) -> dict | None:
    """A stage's manifest, or None when the stage has not begun. Raises ContractError on a broken file."""
    try:
        found = checked.load(folder / run_files.MANIFEST, run_files.Manifest, remedy=REMEDY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return {"status": "unknown", "facts": {}, "seconds": 0} | found


def read_resolved(folder: Path) -> dict | None:
    """The config that a stage was made with, or None without one. Raises ContractError on a broken file."""
    path = folder / run_files.CONFIG
    try:
        return checked.validate(run_files.Resolved, strict_yaml.load(path.read_text()))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (yaml.YAMLError, ValueError, RecursionError, ContractError) as error:
        raise ContractError(f"{path} is broken ({' '.join(str(error).split())})") from None


def read_taken(config: Config, name: StageName) -> dict | None:
    """Manifest of a stage that run.take names, else None. Raises ConfigError unless that stage is finished."""
    folder = config.run.take.get(name)
    if folder is None:
        return None
    manifest = read_manifest(folder)
    if manifest is None or manifest.get("stage", name) != name or manifest["status"] not in ("complete", "partial"):
        raise ConfigError(f"run.take: no finished {name} in {folder}")
    return manifest


def tool_parser(description: str, prog: str | None = None) -> Parser:
    """The arguments of every command."""
    result = Parser(prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--config", metavar="FILE", help="default: the small model's, for a GPU where there is one")
    add_set(result)
    return result


def parser(description: str) -> Parser:
    """The arguments of every numbered script. Settings of the run are config; actions are flags."""
    result = tool_parser(description)
    result.add_argument("--limit", type=positive, metavar="N", help="handle at most N rows")
    result.add_argument("--dry-run", action="store_true", help="offline: show what would be done and what is missing")
    add_json(result)
    return result


def run_command(name: str, body: Callable[[], int | None], conclude: Callable[[int], None] = lambda _: None) -> int:
    """Run `body`; an error becomes one line on stderr. Returns the exit code, after `conclude` was called with it."""
    log_to_stderr()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a file name need not be valid text
    with signals.listening(*signals.wanted()):
        try:
            code = body() or 0
            sys.stdout.flush()
        except BrokenPipeError:  # the reader of our output has closed it
            return 1
        except (StageError, OSError) as error:
            known = as_stage_error(error)
            if known is None:
                raise
            print(f"{name}: {known}", file=sys.stderr)
            code = known.exit_code
        except Interrupted as stop:
            code = stop.exit_code
        conclude(code)
        return code


def run_tool(
    name: str, body: Callable[[Config, argparse.Namespace], int | None], arguments: Parser, argv: list[str] | None
) -> int:
    """Run a command that is no stage, with the config that its arguments name."""

    def with_config() -> int | None:
        args = arguments.parse_intermixed_args(argv)  # options before, between and after the names
        return body(load(args.config or default_config(), args.overrides), args)

    return run_command(name, with_config)


def run_stage(
    name: StageName,
    body: Callable[[Stage], dict],
    arguments: argparse.ArgumentParser,
    argv: list[str] | None = None,
) -> int:
    """Run a stage: its summary on stdout, the log on stderr, and an exit code that says who must act."""
    log_to_stderr()
    signals.listen(*signals.wanted())
    stage: Stage | None = None
    args: argparse.Namespace | None = None
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
        if stage is not None and stage.args.dry_run and not stage.config.target.model.exists():
            # A dry run cannot go on without the model. That is a finding, since the config may be right elsewhere.
            summary, code = {"stage": name, "dry_run": True, "pending": 1, "findings": [str(error)]}, 0
        else:
            summary, code = _failure(stage, name, str(error)), error.exit_code
    except Interrupted as stop:
        summary, code = _failure(stage, name, str(stop), "interrupted"), stop.exit_code
    except BrokenPipeError:
        return 1
    except Exception as error:
        if known := as_stage_error(error):
            summary, code = _failure(stage, name, str(known)), known.exit_code
        else:
            traceback.print_exc()
            summary, code = _failure(stage, name, f"our bug: {error!r}"), 1
    finally:
        if stage is not None:
            stage.held.close()  # after the manifest, which the next call may overwrite
    if "error" in summary:
        print(f"{name}: {summary['error']}", file=sys.stderr)
    if is_main_process():
        if wants_json(args):
            # torchrun exits with its own code, so the summary carries the stage's.
            print(json.dumps(summary | {"exit_code": code}), flush=True)
        elif not code:
            print(in_words(summary), flush=True)
    return code


def wants_json(args: argparse.Namespace | None) -> bool:
    """Programs read stdout through a pipe and get JSON; a terminal gets it with --json only."""
    return not sys.stdout.isatty() or (args is not None and args.json)


def in_words(summary: dict) -> str:
    """A stage's summary as a line for a terminal."""
    if summary.get("dry_run"):
        return f"{summary['stage']}: {summary['pending']} to do"
    parts = [summary.get("status", "done"), f"{summary.get('out', 0)} of {summary.get('in', 0)} done"]
    parts += [f"{count} {reason.replace('_', ' ')}" for reason, count in summary.get("rejected", {}).items()]
    parts += [f"{summary['pending']} left"] if summary.get("pending") else []
    return f"{summary['stage']}: {', '.join(parts)}"


def as_stage_error(error: Exception) -> StageError | None:
    """The error itself, or what a full disk, a forbidden or impossible path or a broken disk means; else None."""
    if isinstance(error, StageError):
        return error
    if isinstance(error, SafetensorError) and (named := re.search(r"\(os error (\d+)\)", str(error))):
        error = OSError(int(named[1]), os.strerror(int(named[1])))  # the library gives the system's error as text
    if not isinstance(error, OSError):
        return None
    number = error.errno
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


def log_to_stderr() -> None:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")


def say(message: str, *args: Any) -> None:
    """Log a message for the user (stderr)."""
    log.info(message, *args)


def is_main_process() -> bool:
    """True outside torchrun and on its rank 0."""
    return torchrun_env.get("RANK", 0) == 0
