"""One stage beside its server: started, watched, stopped; the server repaired while the stage waits for it."""

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
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path

from drafter import process, signals
from drafter.config import Config, Role, Server
from drafter.errors import Interrupted, ResumableError, StageError
from drafter.pipeline.run_state import BEGINS
from drafter.serve import roles
from drafter.serve.readiness import Cause, Unready

log = logging.getLogger("drafter")

SAVE_SECONDS = 120  # a stage that was asked to stop has this long to save
LOOK_SECONDS = {"command": 0.5, "systemd": 5}  # between two looks at a server; sudo logs each one


def run_step(config: Config, role: Role | None, line: list[str], log_file: Path) -> tuple[int, dict]:
    """Run a stage's command to its end, again after an outage that outlasted its patience.

    Its exit code, and the summary it printed. Raises ResumableError when its server was repaired too often, and
    Interrupted, both after the stage has saved.
    """
    # Another's server is the stage's to wait for, and nobody's to restart.
    ours = role and config.server(role).kind != "external"
    keeper = Keeper(config, role) if ours else None
    try:
        while True:
            code, summary = _watch(line, log_file, keeper)
            if code != ResumableError.exit_code or not keeper or not (reason := roles.why_unready(config, role)):
                return code, summary
            keeper.repair(Unready(reason.cause, f"is unhealthy ({reason})"))
    finally:
        if keeper:
            keeper.health.stop()


class Keeper:
    """The server of a stage: whether it lives and its engine answers; restarted at most `restarts` times."""

    def __init__(self, config: Config, role: Role):
        self.config, self.role = config, role
        self.settings: Server = config.server(role)
        self.repairs = 0
        self.looked = time.monotonic()
        self.last_output = 0.0  # when the stage last wrote a line
        self.health = HealthThread(config, role, lambda: self.last_output)

    def hear(self) -> None:
        """The stage wrote a line."""
        self.last_output = time.time()

    def trouble(self) -> Unready | None:
        """What is wrong with the server, if anything."""
        if time.monotonic() - self.looked >= LOOK_SECONDS[self.settings.kind]:
            self.looked = time.monotonic()
            try:
                if not roles.alive(self.config, self.role):
                    return Unready(Cause.NOT_RUNNING, "died")
            except StageError as error:  # systemctl failed, which does not mean that the server is down
                log.info("server %s: %s", self.role, error)
        unhealthy = self.health.unhealthy
        return Unready(unhealthy.cause, f"is unhealthy ({unhealthy})") if unhealthy else None

    def repair(self, trouble: Unready, stage: subprocess.Popen | None = None) -> None:
        """Restart the server, again when it dies while starting, until it is ready or the stage has ended.

        Raises ResumableError once that happened too often.
        """
        self.health.stop()
        while True:
            self.repairs += 1
            name, allowed = self.role, self.settings.restarts
            if self.repairs > allowed:
                raise ResumableError(f"server {name} {trouble}, after {allowed} restarts; see its log, run again")
            log.info("server %s %s: restart %d of at most %d", name, trouble, self.repairs, allowed)
            try:
                roles.down(self.config, name, hangs=trouble.cause is not Cause.NOT_RUNNING)
                roles.up(self.config, name, wanted=lambda: stage is None or stage.poll() is None)
                break
            except ResumableError as error:
                trouble = Unready(Cause.UNKNOWN, f"did not come back ({error})")
        self.health = HealthThread(self.config, name, lambda: self.last_output)


class HealthThread:
    """Asks the engine for a completion now and then, in a thread: an API can be healthy over one that hangs.

    A busy server may let it wait in its queue, so it is `unhealthy` only when the stage writes no line either; one
    that does not even accept a request may be starting again by itself, and has `start_minutes`.
    """

    def __init__(self, config: Config, role: Role, last_output: Callable[[], float]):
        self.config, self.role, self.last_output = config, role, last_output
        self.settings: Server = config.server(role)
        self.unhealthy: Unready | None = None
        self._over = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def stop(self) -> None:
        self._over.set()

    def _run(self) -> None:
        patience, well = self.settings.hang_minutes * 60, time.time()
        while not self._over.wait(patience / 10):
            try:
                reason = roles.why_unready(self.config, self.role, patience)
            except Exception as error:  # this thread must not end before it was told to: then no hang is noticed
                log.info("server %s: its health check failed: %s", self.role, error)
                reason = Unready(Cause.UNKNOWN, str(error) or repr(error))
            now = time.time()
            if reason is None:
                well = now
                continue
            well = max(well, self.last_output())
            if now - well > (patience if reason.cause is Cause.HANGS else self.settings.start_minutes * 60):
                self.unhealthy = reason
                return


def _watch(line: list[str], log_file: Path, keeper: Keeper | None) -> tuple[int, dict]:
    """Run a stage's command to its end; the stage waits through an outage while its server is repaired."""
    log.info("%s: %s", log_file.stem, shlex.join(line))
    with contextlib.suppress(OSError):  # the reader below reports it
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with open(log_file, "a") as kept:
            kept.write(f"{datetime.now():%H:%M:%S} {BEGINS}{shlex.join(line)}\n")
    said: list[bytes] = []
    readers: list[threading.Thread] = []
    stage: subprocess.Popen | None = None
    try:
        with signals.held():
            stage = subprocess.Popen(
                line,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=os.environ | process.import_path() | process.parent_here(),
                start_new_session=True,
            )
        readers = [
            threading.Thread(target=_copy_lines, args=(stage.stderr, log_file, keeper and keeper.hear), daemon=True),
            threading.Thread(target=lambda: said.extend(stage.stdout), daemon=True),
        ]
        for reader in readers:
            reader.start()
        while stage.poll() is None:
            time.sleep(0.2)
            signals.raise_if_received()
            if keeper and (trouble := keeper.trouble()) and stage.poll() is None:
                keeper.repair(trouble, stage)
    except BaseException as stop:
        if stage is not None:
            _ask_to_stop(stage, stop)
        raise
    finally:
        if stage is not None:
            process.end_session(stage.pid, 5)
        for reader in readers:
            reader.join(5)
    summary = _last_json(said)
    if stage.returncode < 0:
        name = signal.Signals(-stage.returncode).name
        summary = {"error": f"killed by {name}" + (", perhaps for want of memory" if name == "SIGKILL" else "")}
        return 128 - stage.returncode, summary  # as a shell says it
    return summary.get("exit_code", stage.returncode), summary


def _ask_to_stop(stage: subprocess.Popen, stop: BaseException) -> None:
    """Let a stage save and end; of one that does not, nothing stays, sessions of its children included."""
    interrupted = isinstance(stop, Interrupted) and stop.exit_code == 128 + signal.SIGINT
    family = [process.identity(pid) for pid in process.descendants(stage.pid)]
    process.send([stage.pid], signal.SIGINT if interrupted else signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        stage.wait(SAVE_SECONDS)
        return
    process.send([each["pid"] for each in family if process.lives(each)], signal.SIGKILL)


def _copy_lines(source: Iterable[bytes], log_file: Path, heard: Callable[[], None] | None = None) -> None:
    """Show a stage's output as it comes, and keep it in its log.

    Where the log or the terminal cannot be written, that is reported once and the reading goes on: a stage whose
    output is not read stops at a full pipe.
    """
    fault: OSError | None = None
    reported = False
    with contextlib.ExitStack() as files:
        try:
            kept = files.enter_context(open(log_file, "ab", buffering=0))
        except OSError as error:
            kept, fault = None, error
        for line in source:
            if heard:
                heard()
            try:
                if kept:
                    kept.write(line if line.endswith(b"\n") else line + b"\n")
            except OSError as error:  # tried again with the next line: a disk may have room again
                fault = error
            if fault and not reported:
                log.info("%s cannot be written (%s); the stage's output is only shown", log_file, fault.strerror)
                reported = True
            with contextlib.suppress(OSError):
                sys.stderr.buffer.write(line)
                sys.stderr.buffer.flush()


def _last_json(lines: list[bytes]) -> dict:
    for line in reversed(lines):
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict):
                return found
    return {}
