"""The night: every stage in its turn, each with the server it needs, and the machine given back as it was.

`run_pipeline.sh` makes the environment and calls this. A stage with nothing left to do is passed over, so the same
command continues after any failure and does nothing after the end.
"""

import contextlib
import json
import logging
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import get_args

from drafter import artifacts, config, default_model, gpu, plan, process, report, server, status
from drafter.errors import ConfigError, Interrupted, ResumableError, StageError
from drafter.stage import Parser, of_the_machine, positive, read_manifest

log = logging.getLogger("drafter")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAVE_SECONDS = 120  # a stage that was asked to stop has this long to save


@dataclass(frozen=True)
class Step:
    number: str
    stage: config.StageName
    script: str
    role: config.Role | None = None  # the server it talks to
    machine: bool = True  # needs the GPUs: no other role may hold them meanwhile


STEPS = (
    Step("01b", "01b_synthetic", "01b_generate_synthetic.py", role="generate"),
    Step("02", "02_hidden_states", "02_extract_hidden_states.py", role="extract"),
    Step("04", "04_train", "04_train.py"),
    Step("05", "05_export", "05_export_checkpoint.py", machine=False),
    Step("06", "06_acceptance", "06_measure_acceptance.py"),  # brings `evaluate` up itself, once a drafter
)


class Pipeline:
    """One run of one config, from `steps[0]` to `steps[-1]`."""

    def __init__(self, run_config: config.Config, steps: tuple[Step, ...], limit: int | None, deadline: str | None):
        self.config = run_config
        self.steps = steps
        self.limit = limit
        self.deadline = deadline
        self.state: dict = {"run": run_config.run.name, "status": "running", "stage": None, "stages": {}}

    def run(self) -> int:
        """The recipe. Returns the exit code of the first stage that failed."""
        with artifacts.locked(self.config.run_dir), self._machine_given_back():
            worked = False
            for step in self.steps:
                if not self.pending(step):
                    log.info("%s: nothing to do", step.stage)
                    self._note(step, status="complete")
                    continue
                if not worked:
                    from drafter import preflight  # needs torch, which a finished run does without

                    preflight.check(self.config, self._unfinished())
                    if code := self._smoke():
                        return code
                worked = True
                if code := self._work(step):
                    return code
            if not worked:
                log.info("run %s is finished: every stage has what it needs, nothing was done", self.config.run.name)
            self._finish("complete")
            return 0

    def _unfinished(self) -> list[config.StageName]:
        """Stages that are not complete yet, as their manifests say."""
        own = [step.stage for step in self.steps if step.stage not in self.config.run.take]
        manifests = {name: read_manifest(self.config.stage_dir(name)) for name in own}
        return [name for name, manifest in manifests.items() if not manifest or manifest["status"] != "complete"]

    def pending(self, step: Step) -> int:
        """What is left of a step, by its own offline plan: of one taken from another run, nothing.

        Raises ConfigError when the step refuses its config.
        """
        taken = self.config.run.take.get(step.stage)
        if taken and not read_manifest(taken):
            raise ConfigError(f"run.take: no finished {step.stage} in {taken}")
        return 0 if taken else self.plan(step)["pending"]

    def plan(self, step: Step, *verbs: str) -> dict:
        done = subprocess.run([*self._command(step), *verbs, "--dry-run"], capture_output=True, text=True)
        if done.returncode:
            message = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
            error = ConfigError if done.returncode == 2 else StageError
            raise error(f"{step.script} --dry-run: {message[0].removeprefix(f'{step.stage}: ')}")
        return json.loads(done.stdout.splitlines()[-1])

    def _smoke(self) -> int:
        """Before a night that is to train and measure: the untrained warm start is served and must be accepted from.

        The night depends on that drafter, and on a server that is otherwise first started at its end.
        """
        by_number = {step.number: step for step in self.steps}
        asked = (
            self.config.acceptance.smoke and self.config.train.warm_start and {"04", "05", "06"} <= by_number.keys()
        )
        if not asked or not self.plan(by_number["05"], "--smoke")["pending"]:
            return 0
        self._only(None)
        code, summary = self._watch(by_number["05"], "--smoke")
        self.state["smoke"] = summary.get("smoke")
        if code:
            self._finish("failed", summary.get("error"))
        return code

    def _work(self, step: Step) -> int:
        """Servers as the step needs them, then the step, again after each repair of its server."""
        started = time.time()
        self._note(step, status="running", started=started)
        if step.machine:
            self._only(step.role)
        repairs = 0
        while True:
            code, summary = self._watch(step)
            if code != ResumableError.exit_code or not step.role or not server.missing(self.config, step.role):
                break
            repairs += 1
            if repairs > getattr(self.config.servers, step.role).restarts:
                break
            log.info("server %s is sick: restart %d", step.role, repairs)
            server.down(self.config, step.role)
            server.up(self.config, step.role)
        status = "failed" if code else "complete"
        self._note(step, status=status, seconds=round(time.time() - started, 1), exit_code=code)
        self._report()
        if code:
            self._event("failure", step)
            log.info("%s failed with exit code %d; the same command continues there", step.stage, code)
            self._finish("failed", summary.get("error"))
        else:
            self._event("stage_end", step)
        return code

    def _command(self, step: Step) -> list[str]:
        line = [sys.executable, str(config.ROOT / step.script), *self.config.arguments]
        if self.limit is not None:
            line += ["--limit", str(self.limit)]
        return line

    def _launch(self, step: Step) -> list[str]:
        line = self._command(step)
        if step.number == "01b" and self.deadline:
            line += ["--deadline", self.deadline]
        if step.number == "04":
            ranks = str(self.config.train.processes)
            line[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
        return line

    def _watch(self, step: Step, *verbs: str) -> tuple[int, dict]:
        """Run a step to its end, restarting its server when that dies; the exit code and summary of the step."""
        log_file = self.config.run_dir / "logs" / f"{step.stage}.log"
        log_file.parent.mkdir(parents=True, exist_ok=True)
        line = [*self._launch(step), *verbs]
        log.info("%s: %s", step.stage, shlex.join(line))
        worker = subprocess.Popen(
            line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        said: list[bytes] = []
        readers = [
            threading.Thread(target=_copy_lines, args=(worker.stderr, log_file), daemon=True),
            threading.Thread(target=lambda: said.extend(worker.stdout), daemon=True),
        ]
        for reader in readers:
            reader.start()
        try:
            repairs = 0
            while worker.poll() is None:
                time.sleep(0.5)
                if step.role and not server.alive(self.config, step.role):
                    repairs += 1
                    self._repair(step.role, repairs)
        except BaseException as stop:
            # torchrun would give its ranks 30 s; the ranks save and end by themselves, and torchrun with them.
            ranks = process.children(worker.pid) if step.number == "04" else []
            process.send(ranks or [worker.pid], signal.SIGINT if _signum(stop) == signal.SIGINT else signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.wait(SAVE_SECONDS)
            raise
        finally:
            process.end_session(worker.pid, 5)
            for reader in readers:
                reader.join(5)
        summary = _last_json(said)
        killed = 128 - worker.returncode if worker.returncode < 0 else worker.returncode  # as a shell says it
        return summary.get("exit_code", killed), summary

    def _repair(self, role: config.Role, repairs: int) -> None:
        """The stage waits through the outage meanwhile. Raises ResumableError when this happened too often."""
        allowed = getattr(self.config.servers, role).restarts
        if repairs > allowed:
            raise ResumableError(f"server {role} died {repairs} times; see its log, then run the same command again")
        log.info("server %s died: restart %d of at most %d", role, repairs, allowed)
        server.down(self.config, role)
        server.up(self.config, role)

    # Servers

    def _only(self, wanted: config.Role | None) -> None:
        """The wanted role up, every other one that holds the machine down."""
        keep = self._unit(wanted) if wanted else None
        for role in get_args(config.Role):
            own = getattr(self.config.servers, role)
            if role == wanted or own.kind == "external" or (keep and self._unit(role) == keep):
                continue
            if server.alive(self.config, role):
                server.down(self.config, role)
        if wanted:
            server.up(self.config, wanted)

    def _unit(self, role: config.Role) -> str | None:
        return getattr(self.config.servers, role).unit

    @contextlib.contextmanager
    def _machine_given_back(self) -> Iterator[None]:
        """Afterwards every server of ours is down, and every unit that was active before is active again."""
        self._expect()
        self.state["production"] = sorted({*self._remember(), *self._active_units()})
        self._save()
        try:
            yield
        except Interrupted as stop:
            self._finish("interrupted", str(stop))
            raise
        except BaseException as error:
            self._finish("failed", str(error))
            raise
        finally:
            _ignore_signals()
            self._give_back()

    def _expect(self) -> None:
        """What the plan says before the first row, for the report to compare with what happened."""
        path = self.config.run_dir / "plan.json"
        if not path.exists():
            artifacts.write_json(path, plan.to_record(self.config))

    def _remember(self) -> list[str]:
        """Take over what earlier calls did; the production units that one which was killed has not given back."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            earlier = json.loads(state_path(self.config).read_text())
            self.state["stages"] = earlier["stages"]
            return earlier["production"]
        return []

    def _active_units(self) -> list[str]:
        roles = [role for role in get_args(config.Role) if getattr(self.config.servers, role).kind == "systemd"]
        return [self._unit(role) for role in roles if server.alive(self.config, role)]

    def _give_back(self) -> None:
        production = set(self.state["production"])
        for role in get_args(config.Role):
            own = getattr(self.config.servers, role)
            if own.kind == "external" or own.unit in production:
                continue
            with _only_logged(f"stopping server {role}"):
                if server.alive(self.config, role) or own.kind == "command":
                    server.down(self.config, role)
        for role in get_args(config.Role):
            own = getattr(self.config.servers, role)
            if own.unit in production:
                with _only_logged(f"giving back {own.unit}"):
                    server.systemctl(own, "start", "--no-block", own.unit)
                    production.discard(own.unit)
                    log.info("%s is starting again, as it was before", own.unit)
        self._expect()
        self.state["production"] = sorted(production)
        self._save()

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
            self._save()
            self._report()
            self._event("finish" if status == "complete" else status)

    def _report(self) -> None:
        with _only_logged("report.html"):
            report.write(self.config)

    def _save(self) -> None:
        self.state |= {"pid": os.getpid(), "updated": time.time()}
        artifacts.write_json(state_path(self.config), self.state)

    def _event(self, event: str, step: Step | None = None) -> None:
        """Tell `run.on_event`; whatever it does, the night goes on."""
        if not self.config.run.on_event:
            return
        facts = {"EVENT": event, "STAGE": step.stage if step else "", "RUN": self.config.run.name}
        with _only_logged("run.on_event"):
            subprocess.run(self.config.run.on_event, shell=True, env=os.environ | facts, timeout=60, check=True)


def state_path(run_config: config.Config) -> Path:
    """The one file that says where the run is."""
    return run_config.run_dir / "pipeline.json"


@contextlib.contextmanager
def _only_logged(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        log.info("%s: %s", what, error)


def _copy_lines(source, log_file: Path) -> None:
    """Show a stage's talk as it comes, and keep it."""
    with open(log_file, "ab") as kept:
        for line in source:
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()
            kept.write(line)
            kept.flush()


def _last_json(lines: list[bytes]) -> dict:
    for line in reversed(lines):
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict):
                return found
    return {}


def _signum(stop: BaseException) -> int | None:
    return stop.exit_code - 128 if isinstance(stop, Interrupted) else None


def _ignore_signals() -> None:
    """Once is enough: saving and giving back must finish."""
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


def _interrupt(signum: int, _frame) -> None:
    _ignore_signals()
    raise Interrupted(signum)


def chosen(first: str | None, only: str | None) -> tuple[Step, ...]:
    """Raises ConfigError for a number that is no stage's."""
    numbers = [step.number for step in STEPS]
    for number in (first, only):
        if number and number not in numbers:
            raise ConfigError(f"no stage {number}: choose from {', '.join(numbers)}")
    if only:
        return tuple(step for step in STEPS if step.number == only)
    return STEPS[numbers.index(first) if first else 0 :]


def default_config() -> Path:
    return config.ROOT / "configs" / ("smollm2_gpu.yaml" if gpu.memory_used() else "smollm2_cpu.yaml")


def parser() -> Parser:
    result = Parser(prog="run_pipeline.sh", description=__doc__.splitlines()[0])
    result.add_argument("config", nargs="*", metavar="[status] [CONFIG]", help="default: SmolLM2 on this machine")
    result.add_argument("--from", dest="first", metavar="NN", help="start at this stage (01b, 02, 04, 05, 06)")
    result.add_argument("--only", metavar="NN", help="this stage alone")
    result.add_argument("--limit", type=positive, metavar="N", help="at most N rows a stage")
    result.add_argument("--deadline", metavar="HH:MM", help="when 01b stops generating")
    result.add_argument("--plan", action="store_true", help="disk, time and cost, then nothing")
    result.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="overrides")
    result.add_argument("--dry-run", action="store_true", help="offline: what each stage would do, what is missing")
    return result


def main(argv: list[str] | None = None) -> int:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    for signum in SIGNALS:
        signal.signal(signum, _interrupt)
    pipeline: Pipeline | None = None
    try:
        args = parser().parse_args(argv)
        plan.parse_deadline(args.deadline, datetime.now())  # a wrong one is told now, not once 01b begins
        words = [word for word in args.config if word != "status"]
        if len(words) > 1:
            raise ConfigError(f"one config a run, not {' and '.join(words)}")
        run_config = config.load(words[0] if words else default_config(), args.overrides)
        if "status" in args.config:
            print("\n".join(status.lines(run_config)))
            return 0
        pipeline = Pipeline(run_config, chosen(args.first, args.only), args.limit, args.deadline)
        if args.plan:
            print(plan.show(run_config, deadline=args.deadline))
            return 0
        if args.dry_run:
            from drafter import preflight

            stages = [pipeline.plan(step) for step in pipeline.steps]
            found = preflight.findings(run_config, [step.stage for step in pipeline.steps])
            for finding in found:
                log.info("finding: %s", finding)
            print(json.dumps({"run": run_config.run.name, "dry_run": True, "findings": found, "stages": stages}))
            return 0
        if run_config.target.model == default_model.FOLDER:
            default_model.ensure()
        code, summary = pipeline.run(), pipeline.state
    except Interrupted as stop:
        code, summary = stop.exit_code, pipeline.state if pipeline else {"status": "interrupted"}
    except (StageError, OSError) as error:
        known = error if isinstance(error, StageError) else of_the_machine(error)
        if known is None:
            raise
        print(f"run_pipeline.sh: {known}", file=sys.stderr)
        failed = {"status": "failed", "error": str(known)}
        code, summary = known.exit_code, (pipeline.state if pipeline else {}) | failed
    print(json.dumps(summary | {"exit_code": code}))
    return code


if __name__ == "__main__":
    raise SystemExit(main())
