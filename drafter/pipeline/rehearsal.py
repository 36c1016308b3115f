"""`--rehearse`: the night end to end on the first layers of the real target, in a run of its own beside the run.

The recipe, the servers' flags, the GPUs and the user's rights are the night's; the target is a shallow copy, the
counts are small, and no drafter is judged.
"""

import contextlib
import json
import logging
import shlex
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, cast, get_args

from drafter import files, locks, run_locks, text
from drafter.acceptance.comparison import NONE, RUN, WARM_START
from drafter.config import ROOT, Config, Role, load
from drafter.errors import ConfigError, Interrupted, StageError
from drafter.pipeline import rehearsal_page, rehearsal_record
from drafter.pipeline.production_units import Machine
from drafter.pipeline.run import STEPS, Pipeline
from drafter.pipeline.run_state import RunState
from drafter.pipeline.steps import Step
from drafter.serve import unit_command, unit_file
from drafter.serve.vllm_command import captured_layer_ids
from drafter.stage import as_stage_error
from drafter.target import shallow

log = logging.getLogger("drafter")

PAGE = "rehearsal.txt"
KEPT = (PAGE, "manifest.json", "config.yaml")  # and logs
OWED = ("pipeline.json", *(f"{role}.json" for role in get_args(Role)))  # what a killed rehearsal left running
PROMPTS, HELD_OUT = 8, 2  # of each source
LEAST_TOKENS, ACCEPTANCE_TOKENS = 32, 32  # of an answer
TRAIN_STEPS = 2


class Rehearsal(Pipeline):
    """Every step once, and 04 again from its first checkpoint; `owner` is the night's config."""

    def __init__(self, rehearsed: Config, owner: Config):
        super().__init__(rehearsed, STEPS, None, None)
        self.machine = self.record.machine = _Machine(rehearsed, owner)
        self.saved = False
        self.train_start_seconds = 0.0

    def pending(self, step: Step) -> int:
        return 1

    def preflight(self, first: Step) -> None:
        """Made of the night's config, before its production server is stopped."""

    def _work(self, step: Step) -> int:
        code = super()._work(step)
        if code or step.number != "04":
            return code
        self.train_start_seconds, self.saved = self.record.seconds(step), True
        return super()._work(step)

    def _command(self, step: Step) -> list[str]:
        line = super()._command(step)
        return line if self.saved or step.number != "04" else [*line, "--set", "train.max_steps=1"]


class _Machine(Machine):
    """The rehearsal's servers, all of them commands; the night's units stop for them and come back afterwards."""

    def __init__(self, rehearsed: Config, owner: Config):
        super().__init__(rehearsed)
        self.night = Machine(owner)

    def snapshot(self) -> None:
        self.night.production, self.night.restore_owed = self.production, self.restore_owed
        self.night.snapshot()
        self.night.bring_up_only(None)

    def restore(self) -> None:
        super().restore()
        self.night.restore()


def rehearse(config: Config) -> int:
    """Rehearse a config's night and print the page; the exit code is that of the piece that failed.

    Raises ConfigError when the night itself would be refused, or while it works; Interrupted, leaving nothing.
    """
    folder = config.run.dir / f"{config.run.name}-rehearsal"
    with contextlib.ExitStack() as held:
        held.enter_context(Machine(config).claimed())
        held.enter_context(_without_the_night(config))
        night = Pipeline(config, STEPS, None, None)
        night.preflight(STEPS[-1])
        how_started = _units(config)
        cut = shallow.cut(config.target.model, config.target.layer_ids)
        if cut.bytes > (free := files.free_bytes(config.run.dir)):
            raise ConfigError(
                f"run.dir: the rehearsal's copy of {cut.layers} layers takes {text.size(cut.bytes)}, and "
                f"{text.size(free)} are free in {config.run.dir}"
            )
        with run_locks.pipeline(load(config.origin.path, [*config.origin.overrides, f"run.name={folder.name}"])):
            _empty(folder, keep=OWED)  # once no stage of a killed rehearsal works in it
        try:
            code, page = _rehearsed(config, folder, cut, how_started)
        except BaseException as stop:
            _empty(folder, keep=OWED if files.read_note(folder / OWED[0]).get("production") else ())
            if isinstance(stop, Interrupted):
                log.info("%s: nothing is left of the rehearsal", stop)
            raise
        _empty(folder, keep=KEPT, logs=True)
        files.write_text(folder / PAGE, page)
    print(page, end="")
    return code


@contextlib.contextmanager
def _without_the_night(config: Config) -> Iterator[None]:
    """Raises ConfigError while the config's own run is working. A folder made for its lock is removed afterwards."""
    is_new = not config.run_dir.exists()
    with locks.locked(config.run_dir, f"{run_locks.PIPELINE} --rehearse"):
        try:
            yield
        finally:
            if is_new:
                files.remove(config.run_dir)


def _rehearsed(config: Config, folder: Path, cut: shallow.Cut, how_started: dict[Role, str]) -> tuple[int, str]:
    """Make the copies and run the recipe: the exit code, and the page."""
    began = time.monotonic()
    shallow.copy(cut, folder / "target")
    copied = time.monotonic() - began
    log.info("%d of %d layers copied to %s: %s", cut.layers, cut.of, folder / "target", text.size(cut.bytes))
    rehearsed = _config(config, folder, cut)
    recipe, error = Rehearsal(rehearsed, config), None
    try:
        code = recipe.run()
    except (StageError, OSError) as fault:
        if (known := as_stage_error(fault)) is None:
            raise
        code, error = known.exit_code, str(known)
    if code:
        error = error or recipe.record.state.get("error") or f"exit code {code}"
    elif boots := rehearsal_page.starts(rehearsed):
        found = RunState(rehearsed)
        rehearsal_record.write(
            config,
            {
                "run": folder.name,
                "layers": cut.layers,
                "start_seconds": max(max(each) for each in boots.values()),
                "train_start_seconds": recipe.train_start_seconds,
                "export_seconds": found.manifest("05_export")["seconds"],
            },
        )
    head = [
        f"rehearsal of {config.run.name}, {datetime.now():%Y-%m-%d %H:%M}: {'FAILED' if code else 'passed'}",
        f"  {'target':<17} {'passed':<11}  {cut.layers} of {cut.of} layers, {text.size(cut.bytes)}, copied in "
        f"{copied:.0f} s",
    ]
    pieces = rehearsal_page.lines(rehearsed, cut, how_started, error)
    where = [f"logs: {folder}"]
    return code, "\n".join([*head, *pieces, *where]) + "\n"


def _config(config: Config, folder: Path, cut: shallow.Cut) -> Config:
    """The night's config on the copies, with counts that are small and packs that are full."""
    path, overrides = config.origin
    target, train, acceptance = config.target, config.train, config.acceptance
    ids = cut.layer_ids(target.layer_ids)
    held_out = 0 if acceptance.prompts else HELD_OUT
    rows = PROMPTS * len(config.prompts)
    tokens = max(LEAST_TOKENS, -(-2 * target.max_seq_len * train.processes // rows))  # twice what fills the packs

    def drafter(source: Path | None, name: str) -> str | None:
        if source and not (folder / "drafters" / name).exists():
            shallow.copy_drafter(source, folder / "drafters" / name, ids[:-1])
        return str(folder / "drafters" / name) if source else None

    known = (NONE, WARM_START, RUN)
    drafters = [
        label if label in known else drafter(ROOT / label, str(number))
        for number, label in enumerate(acceptance.drafters)
    ]
    changes: dict[str, Any] = {
        "run.name": folder.name, "run.take": {}, "run.on_event": None, "run.rehearsal": True,
        "target.model": str(folder / "target"), "target.layer_ids": ids,
        "generate.max_tokens": min(config.generate.max_tokens, tokens), "generate.min_rows": 0,
        "train.warm_start": drafter(train.warm_start, "warm_start"), "train.max_steps": TRAIN_STEPS,
        "train.epochs": TRAIN_STEPS, "train.save_every": 1, "train.patience": None,
        "export.reference": drafter(config.export.reference, "reference"), "export.step": None,
        "acceptance.drafters": drafters, "acceptance.smoke": False, "acceptance.max_prompts": HELD_OUT,
        "acceptance.held_out": max(1, held_out * len(config.prompts)),
        "acceptance.max_tokens": min(acceptance.max_tokens, ACCEPTANCE_TOKENS),
    }  # fmt: skip
    for number, source in enumerate(config.prompts):
        changes[f"prompts.{number}.count"] = min(source.count or PROMPTS + held_out, PROMPTS + held_out)
    asked = [*overrides, *(f"{key}={json.dumps(value)}" for key, value in changes.items())]
    rehearsed = load(path, asked)
    return load(path, [*asked, *_of_units(config, rehearsed, folder)])


def _units(config: Config) -> dict[Role, str]:
    """How each role is started that is a unit in the night. Raises ConfigError for one that cannot be rehearsed."""
    found: dict[Role, str] = {}
    for role in get_args(Role):
        server = config.server(role)
        if server.kind == "external":
            raise ConfigError(
                f"servers.{role}.kind: an external server has the whole model, and a rehearsal must start one of its "
                "first layers: rehearse where it is a unit or a command"
            )
        if server.kind == "systemd":
            unit = unit_file.read(server.systemd_unit)
            if unit is None or not unit.command:
                raise ConfigError(f"servers.{role}.unit: no file of {server.unit} in {unit_file.UNIT_FOLDERS[0]}")
            try:
                as_its_user = unit_command.can_switch_user(unit)
            except KeyError:
                raise ConfigError(f"servers.{role}.unit: {server.unit} runs as {unit.user}: no such user") from None
            who = f"its user {unit.user}" if as_its_user else f"this user, who may not become {unit.user}"
            found[role] = f"the command of {server.unit} as {who}"
    return found


def _of_units(config: Config, rehearsed: Config, folder: Path) -> Iterator[str]:
    """Overrides that make each unit's role a command with the unit's own flags, for the copies."""
    for role in get_args(Role):
        server = config.server(role)
        if server.kind != "systemd":
            continue
        interpreter = folder / f"{role}-unit"
        words = shlex.join([sys.executable, "-P", "-m", unit_command.__name__, server.systemd_unit])
        interpreter.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        interpreter.chmod(0o755)
        unit = cast(unit_file.UnitFile, unit_file.read(server.systemd_unit))  # `_units` refuses one without a file
        flags = unit_command.role_args(unit)
        changes = {
            "kind": "command", "unit": None, "link": None, "python": str(interpreter),
            "args": _renamed(flags, captured_layer_ids(rehearsed), str(rehearsed.stage_dir("02_hidden_states"))),
        }  # fmt: skip
        yield from (f"servers.{role}.{key}={json.dumps(value)}" for key, value in changes.items())


def _renamed(value: Any, layer_ids: list[int], folder: str) -> Any:
    """A unit's flags with the rehearsal's layers, and its folder of hidden states."""
    if not isinstance(value, dict):
        return value
    names = {"eagle_aux_hidden_state_layer_ids": layer_ids, "layer_ids": layer_ids, "shared_storage_path": folder}
    return {key: names[key] if key in names else _renamed(each, layer_ids, folder) for key, each in value.items()}


def _empty(folder: Path, keep: tuple[str, ...], logs: bool = False) -> None:
    """Remove a rehearsal's folder but for files of these names and, if asked, logs."""
    for place in ("target", "drafters"):
        files.remove(folder / place)
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir() and not path.is_symlink():
            with contextlib.suppress(OSError):  # something in it is kept
                path.rmdir()
        elif path.name not in keep and not (logs and path.suffix == ".log"):
            path.unlink()
    with contextlib.suppress(OSError):
        folder.rmdir()
