"""The night: every stage in its turn, each with the server it needs, and the machine given back as it was.

A stage with nothing left to do is passed over, so the same command continues after any failure and does nothing
after the end.
"""

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from drafter import cli, errors, files, process, run_locks, signals
from drafter.config import ROOT, STAGES, Config, Role, StageName
from drafter.errors import ConfigError, Interrupted, StageError
from drafter.pipeline import deadline, events, other_rows, plan, supervise
from drafter.pipeline.production_units import Machine, only_logged
from drafter.pipeline.report import page as report
from drafter.pipeline.run_state import RunState
from drafter.pipeline.steps import STEPS, Step
from drafter.stage import Stage, read_manifest, read_taken

log = logging.getLogger("drafter")


class Pipeline:
    """One run of one config, from `steps[0]` to `steps[-1]`."""

    def __init__(
        self,
        config: Config,
        steps: tuple[Step, ...],
        limit: int | None,
        until: deadline.Deadline | None,
    ):
        self.config = config
        self.steps = steps
        self.limit = limit
        self.deadline = until
        self.state: dict = {"run": config.run.name, "status": "running", "stage": None, "stages": {}}
        self.state["asked"] = [step.stage for step in steps]
        self.machine = Machine(config)
        self.redo = False  # 02 may replace finished hidden states
        self.begun = False
        self.offline: set[StageName] = set()  # these ask their server nothing
        self._earlier: dict = {}  # how an earlier call ended, and where

    def run(self) -> int:
        """The recipe. Returns the exit code of the first stage that failed."""
        with contextlib.ExitStack() as held:
            # First of all, since another run on these units would change what the checks find.
            held.enter_context(self.machine.claimed())
            # A run that cannot begin leaves nothing, so its folder is locked only after the checks; a run that has
            # begun is checked under its lock, and its state is kept when this call is refused.
            is_new = not state_path(self.config).exists()
            first, done = self._checked() if is_new else (None, ())
            held.enter_context(run_locks.pipeline(self.config))
            self._remember()
            if (
                not is_new and not self.machine.restore_owed
            ):  # what a killed call owes is given back even when refused
                first, done = self._checked()
            held.enter_context(self._machine_given_back())
            worked = False
            for step in self.steps:
                signals.raise_if_received()
                if step in done or (step is not first and not self.pending(step)):
                    log.info("%s: nothing to do", step.stage)
                    self._note(step, status="complete")
                    continue
                if not worked:
                    if not first:
                        self._preflight()
                    if code := self._smoke():
                        return code
                worked = True
                if code := self._work(step):
                    return code
            if left := self._unfinished(STEPS):
                log.info("left: %s; the same command without --from and --only goes on there", ", ".join(left))
                if not worked:
                    self.state |= self._earlier
            elif not worked:
                log.info("run %s is finished: every stage has what it needs, nothing was done", self.config.run.name)
            self._finish("stopped" if left else "complete")
            log.info("report: %s", self.config.run_dir / "report.html")
            return 0

    def _checked(self) -> tuple[Step | None, tuple[Step, ...]]:
        """The first step with something to do and the done ones before it, once all that is knowable is right."""
        try:
            for number, step in enumerate(self.steps):
                if self.pending(step):
                    self._preflight()
                    return step, self.steps[:number]
            return None, self.steps
        except StageError:
            events.report(self.config, "failed")
            raise

    def _preflight(self) -> None:
        from drafter.pipeline import preflight  # needs torch, which a finished run does without

        preflight.refuse_findings(self.config, self._unfinished(self.steps))

    def _unfinished(self, steps: tuple[Step, ...]) -> list[StageName]:
        """Their stages that are not complete yet, as manifests say."""
        own = [step.stage for step in steps if step.stage not in self.config.run.take]
        manifests = {name: read_manifest(self.config.stage_dir(name)) for name in own}
        return [
            name
            for name, manifest in manifests.items()
            if not manifest
            or (manifest["status"] != "complete" and not deadline.is_settled(manifest, 0, self.deadline))
        ]

    def pending(self, step: Step) -> int:
        """What is left of a step, by its own offline plan: of one taken from another run, nothing.

        A step that never ended well has its end left, even when no row is: it may lack its input, and only its
        manifest makes it complete. Raises ConfigError when the step refuses its config, or did its work for another.
        """
        if read_taken(self.config, step.stage):
            return 0
        Stage(step.stage, self.config, None).refuse_another_question()  # also of what is finished
        planned = self.dry_run(step)
        if refused := planned.get("refused"):
            raise ConfigError(refused)
        if planned.get("stale") and not planned["pending"]:
            self.offline.add(step.stage)
        return planned["pending"] or len(self._unfinished((step,))) or int("stale" in planned)

    def dry_run(self, step: Step, *verbs: str) -> dict:
        return self.dry_runs((step,), *verbs)[0]

    def dry_runs(self, steps: tuple[Step, ...], *verbs: str) -> list[dict]:
        """What the steps say of themselves, offline; asked side by side, since most of each is imports."""
        lines = [[*self._command(step), *verbs, "--dry-run"] for step in steps]
        answers = process.run_all(lines, env=os.environ | process.import_path() | process.parent_here())
        for step, done in zip(steps, answers, strict=True):
            if done.returncode:
                message = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
                error = ConfigError if done.returncode == 2 else StageError
                raise error(f"{step.script} --dry-run: {message[0].removeprefix(f'{step.stage}: ')}")
        found = [json.loads(done.stdout.splitlines()[-1]) for done in answers]
        for step, each in zip(steps, found, strict=True):
            manifest = read_manifest(self.config.stage_dir(step.stage))
            if left := deadline.left_undone(manifest, each, self.deadline):
                log.info("%s: %s", step.stage, left)
                each |= {"pending": 0, "left": left}
            elif "04" in (other.number for other in self.steps) and (
                refused := other_rows.refused(self.config, each, self.limit)
            ):
                each["refused"] = refused
                each["findings"].append(refused)
        return found

    def _smoke(self) -> int:
        """Before a night that is to train and measure: the untrained warm start is served and must be accepted from.

        The night depends on that drafter, and on a server that is otherwise first started at its end.
        """
        by_number = {step.number: step for step in self.steps}
        asked = (
            self.config.acceptance.smoke and self.config.train.warm_start and {"04", "05", "06"} <= by_number.keys()
        )
        if not asked or not self.dry_run(by_number["05"], "--smoke")["pending"]:
            return 0
        self.machine.bring_up_only(None)
        code, summary = self._watch(by_number["05"], "--smoke")
        self.state["smoke"] = summary.get("smoke")
        if code:
            self._finish("failed", summary.get("error"))
        return code

    def _work(self, step: Step) -> int:
        """Servers as the step needs them, then the step, again after each repair of its server."""
        started, before = time.time(), self._seconds(step)

        def note(status: str, **facts) -> None:
            ended = time.time()
            self._note(step, status=status, seconds=round(before + ended - started, 1), ended=ended, **facts)

        self._note(step, status="running", started=started, seconds=before, exit_code=None)
        try:
            if step.machine:
                self.machine.bring_up_only(self._role(step))
            code, summary = self._watch(step)
        except Interrupted:
            with only_logged("pipeline.json"):  # a full disk is no reason to forget why this ends
                note("interrupted")
            raise
        except StageError as error:  # its server
            log.info("%s", error)
            code, summary = error.exit_code, {"error": str(error)}
        note("failed" if code else "complete", exit_code=code)
        self._report()
        if code:
            log.info("%s failed with exit code %d; %s", step.stage, code, errors.next_action(code))
            self._finish("failed", summary.get("error"))
        else:
            events.report(self.config, "stage_end", step.stage)
        return code

    def _seconds(self, step: Step) -> float:
        """What earlier calls have spent on a step, unless its folder was removed for another beginning."""
        spent = self.state["stages"].get(step.stage, {}).get("seconds", 0)
        return spent if read_manifest(self.config.stage_dir(step.stage)) else 0

    def _command(self, step: Step) -> list[str]:
        line = [sys.executable, str(ROOT / step.script), *self.config.arguments]
        if self.limit is not None:
            line += ["--limit", str(self.limit)]
        if self.redo and step.number == "02":
            line.append("--redo")
        return line

    def _launch(self, step: Step) -> list[str]:
        line = self._command(step)
        if step.number == "01b" and self.deadline:
            line += ["--deadline", self.deadline.argument]
        if step.number == "04":
            ranks = str(self.config.train.processes)
            line[1:1] = ["-m", "drafter.pipeline.torchrun", "--standalone", "--nproc-per-node", ranks]
        return line

    def _role(self, step: Step) -> Role | None:
        """The server a step needs; none where it only sums up anew, nor 01b once its deadline has passed."""
        is_past = step.number == "01b" and self.deadline is not None and time.time() >= self.deadline.at
        return None if is_past or step.stage in self.offline else step.role

    def _watch(self, step: Step, *verbs: str) -> tuple[int, dict]:
        """Run a step beside its server; its exit code and summary."""
        log_file = self.config.run_dir / "logs" / f"{step.stage}.log"
        return supervise.run_step(self.config, self._role(step), [*self._launch(step), *verbs], log_file)

    # The machine

    @contextlib.contextmanager
    def _machine_given_back(self) -> Iterator[None]:
        """Afterwards every server of ours is down, and every unit that was active before is active again."""
        try:
            self._expect()
            self.machine.snapshot()
            self._save()
            self.begun = True
            yield
        except Interrupted as stop:
            self._finish("interrupted", str(stop))
            raise
        except BaseException as error:
            self._finish("failed", str(error))
            raise
        finally:
            signals.mute()
            self.machine.restore()
            self._save()

    def _expect(self) -> None:
        """What the plan says before the first row, for the report to compare with what happened.

        A stage that has begun keeps its plan, unless more is asked of it now than that was for.
        """
        found, planned = RunState(self.config), plan.to_record(self.config, self.limit)
        for name in filter(found.manifest, STAGES):
            before, asked = found.plan.get(name, {"conversations": 0}), planned[name]["conversations"]
            if before.get("conversations", asked) >= asked:
                planned[name] = before
            elif self.state["stages"].get(name, {}).get("status") == "complete":
                self.state["stages"][name]["status"] = "begun"
        files.write_json(self.config.run_dir / "plan.json", planned)

    def _remember(self) -> None:
        """Take over what earlier calls did, and the production units that a killed one has not given back.

        Of a run that this is a copy of, the units are its own affair.
        """
        found = RunState(self.config)
        if not found.state:
            return
        self._earlier = {key: found.state[key] for key in ("status", "stage", "error") if key in found.state}
        if found.state.get("home") == files.inode_id(self.config.run_dir):
            killed = found.state["status"] == "running" and found.state.get("boot") == process.boot_id()
            self.machine.production = set(found.state.get("production", []))
            self.machine.restore_owed = killed or bool(self.machine.production)
        if "deadline" in found.state:
            self.state["deadline"] = found.state["deadline"]
        self.state["stages"] = {name: seen for name in STAGES if (seen := found.pipeline_record(name))}
        for name, seen in self.state["stages"].items():
            if seen.get("status") == "running":  # a call that was killed
                seen |= {"status": "interrupted", "seconds": round(found.seconds(name), 1)}

    # What is left for others to read

    def _note(self, step: Step, **facts) -> None:
        self.state["stage"] = step.stage
        self.state["stages"].setdefault(step.stage, {}).update(facts)
        self._save()

    def _finish(self, status: str, error: str | None = None) -> None:
        if self.state["status"] == "running":
            self.state["status"] = status
            if error:
                self.state["error"] = error
            with only_logged("pipeline.json"):  # a full disk must not keep anybody from being told
                self._save()
            self._report()
            if status in ("complete", "stopped"):
                events.report(self.config, "finish")
            else:
                seen = self.state["stages"].get(self.state["stage"], {})
                events.report(
                    self.config, status, "" if seen.get("status") == "complete" else self.state["stage"] or ""
                )

    def _report(self) -> None:
        with only_logged("report.html"):
            report.write(self.config)

    def _save(self) -> None:
        self.config.run_dir.mkdir(parents=True, exist_ok=True)
        if self.deadline:
            self.state["deadline"] = self.deadline._asdict()
        self.state |= process.identity(os.getpid()) | {
            "production": sorted(self.machine.production),
            "home": files.inode_id(self.config.run_dir),
            "updated": time.time(),
        }
        files.write_json(state_path(self.config), self.state)


def state_path(config: Config) -> Path:
    """The one file that says where the run is."""
    return config.run_dir / "pipeline.json"


def chosen(first: str | None, only: str | None) -> tuple[Step, ...]:
    at = cli.NUMBERS.index(only or first or cli.NUMBERS[0])
    return STEPS[at : at + 1 if only else None]
