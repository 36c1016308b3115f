"""The pipeline: every stage in order, each with the server it needs; at the end the machine is restored.

A stage with nothing left to do is skipped, so the same command continues after any failure, and does nothing once the
run is complete.
"""

import argparse
import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator

from drafter import cli, errors, process, run_files, run_locks, signals
from drafter.config import ROOT, Config, Role, StageName
from drafter.errors import ConfigError, ContractError, Interrupted, StageError
from drafter.pipeline import deadline, events, other_rows, rehearsal_record, supervise
from drafter.pipeline.production_units import Machine, only_logged
from drafter.pipeline.run_record import RunRecord, state_path
from drafter.pipeline.steps import STEPS, Step
from drafter.stage import Stage, read_manifest, read_taken

log = logging.getLogger("drafter")


class Pipeline:
    """One call for a run: the steps from `steps[0]` to `steps[-1]`."""

    def __init__(
        self, config: Config, steps: tuple[Step, ...], limit: int | None, until: deadline.Deadline | None
    ) -> None:
        self.config, self.steps, self.limit, self.deadline = config, steps, limit, until
        self.machine = Machine(config)
        self.record = RunRecord(config, self.machine, steps, until)
        self.redo = False  # 02 may replace finished hidden states
        self.begun = False
        self.worked = False
        self.offline: set[StageName] = set()  # stages that send their server no request

    def run(self) -> int:
        """The recipe. Returns the exit code of the first stage that failed.

        Before: claim the units, check everything that can be checked, lock the run, record what to restore, and once
        for a warm start that was never served here, test it. Then each step of STEPS with its server. After: stop our
        servers, start the units that were active before.
        """
        with contextlib.ExitStack() as held:
            # First, since another run on these units changes what the checks find.
            held.enter_context(self.machine.claimed())
            first, done = self._lock_and_check(held)
            held.enter_context(self._restored_afterwards())
            for step in self.steps:
                signals.raise_if_received()
                if step in done or (step is not first and not self.pending(step)):
                    log.info("%s: nothing to do", step.stage)
                    self.record.note(step, status="complete")
                elif code := self._before_the_first(first, step) or self._work(step):
                    return code
            self._conclude()
            return 0

    def _lock_and_check(self, held: contextlib.ExitStack) -> tuple[Step | None, tuple[Step, ...]]:
        """Lock the run. Returns the first pending step and the done ones before it; (None, ()) if still unknown.

        A new run is checked before its folder is created, an existing one under its lock. When an earlier call has
        left units to restore, the checks come later, so that a refusal restores them too.
        """
        is_new = not state_path(self.config).exists()
        checked = self._checked() if is_new else None
        held.enter_context(run_locks.pipeline(self.config))
        self.record.take_over()
        if not is_new and not self.machine.restore_owed:
            checked = self._checked()
        return checked or (None, ())

    def _checked(self) -> tuple[Step | None, tuple[Step, ...]]:
        """The first pending step and the done ones before it, after preflight."""
        try:
            for number, step in enumerate(self.steps):
                if self.pending(step):
                    self.preflight(step)
                    return step, self.steps[:number]
            return None, self.steps
        except StageError:
            events.report(self.config, "failed")
            raise

    def preflight(self, first: Step) -> None:
        """Check every stage that will work: what is unfinished, and `first`, which may be asked for more rows."""
        from drafter.pipeline import preflight  # needs torch, which a finished run does not

        working = set(self._unfinished(self.steps))
        if first.stage not in self.offline:
            working.add(first.stage)
            working |= {step.stage for step in self.steps if (first.number, step.number) == ("01b", "02")}
        ordered = [step.stage for step in self.steps if step.stage in working - self.config.run.take.keys()]
        preflight.refuse_findings(self.config, ordered)

    def _before_the_first(self, checked: Step | None, step: Step) -> int:
        """Before the first step: preflight if not made yet, the prompts, the smoke test. Returns an exit code."""
        if self.worked:
            return 0
        self.worked = True
        if not checked:
            self.preflight(step)
        if line := rehearsal_record.advice(self.config):
            log.info("%s", line)
        return self._prepare_prompts() or self._smoke_test()

    def _prepare_prompts(self) -> int:
        """Fetch and mix prompts of the hub before any server starts, so that a failure there costs no boot."""
        step = self.steps[0]
        if step.number != "01b" or step.stage in self.config.run.take or not self.dry_run(step).get("unprepared"):
            return 0
        log_file = self.config.run_dir / "logs" / f"{step.stage}.log"
        code, summary = supervise.run_step(self.config, None, [*self._command(step), "--prepare"], log_file)
        if code:
            self.record.finish("failed", summary.get("error"))
        return code

    def _smoke_test(self) -> int:
        """If 04 to 06 are asked for, serve a warm start that was never served here: its drafts must be accepted.

        All stages depend on that drafter, and the role `evaluate` would otherwise first be started at the end.
        """
        steps = {step.number: step for step in self.steps}
        asked = self.config.acceptance.smoke and self.config.train.warm_start and {"04", "05", "06"} <= steps.keys()
        if not asked or not self.dry_run(steps["05"], "--smoke")["pending"]:
            return 0
        self.machine.bring_up_only(None)
        code, summary = self._watch(steps["05"], "--smoke")
        self.record.state["smoke"] = summary.get("smoke")
        if code:
            self.record.finish("failed", summary.get("error"))
        return code

    def _work(self, step: Step) -> int:
        """Start the step's server, stop the others, and run the step to its end. Returns its exit code."""
        started, before = time.time(), self.record.seconds(step)

        def note(status: str, **facts) -> None:
            ended = time.time()
            self.record.note(step, status=status, seconds=round(before + ended - started, 1), ended=ended, **facts)

        self.record.note(step, status="running", started=started, seconds=before, exit_code=None)
        try:
            role = self._role(step)
            if role or (step.machine and not step.role):  # one that asks its server nothing leaves the others alone
                self.machine.bring_up_only(role)
            code, summary = self._watch(step)
        except Interrupted:
            with only_logged(run_files.PIPELINE):  # on a full disk the interruption is still what ends the call
                note("interrupted")
            raise
        except StageError as error:  # its server failed
            log.info("%s", error)
            code, summary = error.exit_code, {"error": str(error)}
        note("failed" if code else "complete", exit_code=code)
        self.record.write_report()
        if code:
            log.info("%s failed with exit code %d; %s", step.stage, code, errors.next_action(code))
            self.record.finish("failed", summary.get("error"))
        else:
            events.report(self.config, "stage_end", step.stage)
        return code

    def _conclude(self) -> None:
        if left := self._unfinished(STEPS):
            log.info("left: %s; the same command without --from and --only goes on there", ", ".join(left))
            if not self.worked:
                self.record.state |= self.record.earlier
        elif not self.worked:
            log.info("run %s is complete, nothing to do", self.config.run.name)
        self.record.finish("stopped" if left else "complete")

    @contextlib.contextmanager
    def _restored_afterwards(self) -> Iterator[None]:
        """Afterwards every server that we started is down, and every unit that was active before is active again."""
        try:
            self.record.write_plan(self.limit)
            self.machine.snapshot()
            self.record.save()
            self.begun = True
            yield
        except Interrupted as stop:
            self.record.finish("interrupted", str(stop))
            raise
        except BaseException as error:
            self.record.finish("failed", str(error))
            raise
        finally:
            signals.mute()
            self.machine.restore()
            self.record.save()

    # What is left to do

    def _unfinished(self, steps: tuple[Step, ...]) -> list[StageName]:
        """The stages of these steps whose manifests are not complete."""
        own = [step.stage for step in steps if step.stage not in self.config.run.take]
        manifests = {name: read_manifest(self.config.stage_dir(name)) for name in own}
        return [
            name
            for name, manifest in manifests.items()
            if not manifest
            or (manifest["status"] != "complete" and not deadline.is_settled(manifest, 0, self.deadline))
        ]

    def pending(self, step: Step) -> int:
        """How much of a step is left, by its own dry run; 0 for a stage that is taken from another run.

        A step without a complete manifest has at least its end left. Raises ConfigError when the step refuses its
        config or its folder was made with other settings.
        """
        if read_taken(self.config, step.stage):
            return 0
        Stage(step.stage, self.config, argparse.Namespace()).refuse_another_question()  # also when it is finished
        planned = self.dry_run(step)
        if refused := planned.get("refused"):
            raise ConfigError(refused)
        if planned.get("stale") and not planned["pending"]:
            self.offline.add(step.stage)
        return planned["pending"] or len(self._unfinished((step,))) or int("stale" in planned)

    def dry_run(self, step: Step, *flags: str) -> dict:
        return self.dry_runs((step,), *flags)[0]

    def dry_runs(
        self, steps: tuple[Step, ...], *flags: str, ended: Callable[[int], None] = lambda _: None
    ) -> list[dict]:
        """The summaries of the steps' own --dry-run; in parallel, since most of their time is imports.

        `ended` is called with the position of each step whose dry run has ended.
        """
        lines = [[*self._command(step), *flags, "--dry-run"] for step in steps]
        answers = process.run_all(lines, ended=ended, env=os.environ | process.import_path() | process.parent_here())
        for step, done in zip(steps, answers, strict=True):
            if done.returncode:
                message = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
                error = ConfigError if done.returncode == 2 else StageError
                raise error(f"{step.script} --dry-run: {message[0].removeprefix(f'{step.stage}: ')}")
        summaries = [process.last_object(done.stdout.splitlines()) for done in answers]
        trains = "04" in (step.number for step in self.steps)
        for step, summary in zip(steps, summaries, strict=True):
            if not isinstance(summary.get("pending"), int):
                raise ContractError(f"{step.script} --dry-run printed no plan")
            manifest = read_manifest(self.config.stage_dir(step.stage))
            if left := deadline.left_undone(manifest, summary, self.deadline):
                log.info("%s: %s", step.stage, left)
                summary |= {"pending": 0, "left": left}
            elif trains and (refused := other_rows.refused(self.config, summary, self.limit)):
                summary["refused"] = refused
                summary["findings"].append(refused)
        return summaries

    # How a step is started

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
        """The server that a step needs: none if it only writes its counts again, or is 01b after its deadline."""
        is_past = step.number == "01b" and self.deadline is not None and time.time() >= self.deadline.at
        return None if is_past or step.stage in self.offline else step.role

    def _watch(self, step: Step, *flags: str) -> tuple[int, dict]:
        """Run a step beside its server. Returns its exit code and summary."""
        log_file = self.config.run_dir / "logs" / f"{step.stage}.log"
        return supervise.run_step(self.config, self._role(step), [*self._launch(step), *flags], log_file)


def chosen(first: str | None, only: str | None) -> tuple[Step, ...]:
    """The steps that --from and --only ask for."""
    at = cli.NUMBERS.index(only or first or cli.NUMBERS[0])
    return STEPS[at : at + 1 if only else None]
