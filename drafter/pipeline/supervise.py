"""Run one stage and watch its server, which is restarted while the stage waits for it."""

import contextlib
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
CHECK_SECONDS = {"command": 0.5, "systemd": 5}  # between two checks that a server lives; sudo logs each one


def run_step(config: Config, role: Role | None, line: list[str], log_file: Path) -> tuple[int, dict]:
    """Run a stage's command to its end, and again after an outage that was longer than the stage waits.

    Returns its exit code and the summary that it printed. Raises ResumableError when its server was restarted too
    often, and Interrupted, both after the stage has saved.
    """
    # An external server is never restarted: the stage only waits for it.
    keeper = Keeper(config, role) if role and config.server(role).kind != "external" else None
    try:
        while True:
            code, summary = _watch(line, log_file, keeper)
            if code != ResumableError.exit_code or not keeper:
                return code, summary
            if not (reason := roles.why_unready(config, keeper.role)):
                return code, summary
            keeper.repair(Unready(reason.cause, f"is unhealthy ({reason})"))
    finally:
        if keeper:
            keeper.health.stop()


class Keeper:
    """Watches the server of a stage and restarts it at most `restarts` times."""

    def __init__(self, config: Config, role: Role):
        self.config, self.role = config, role
        self.settings: Server = config.server(role)
        self.repairs = 0
        self.checked = time.monotonic()
        self.last_output = 0.0  # when the stage last wrote a line
        self.health = HealthThread(config, role, lambda: self.last_output)

    def hear(self) -> None:
        """Note that the stage wrote a line."""
        self.last_output = time.time()

    def trouble(self) -> Unready | None:
        """Why the server must be restarted, or None."""
        if time.monotonic() - self.checked >= CHECK_SECONDS[self.settings.kind]:
            self.checked = time.monotonic()
            try:
                if not roles.alive(self.config, self.role):
                    return Unready(Cause.NOT_RUNNING, "died")
            except StageError as error:  # systemctl failed, which does not mean that the server is down
                log.info("server %s: %s", self.role, error)
        unhealthy = self.health.unhealthy
        return Unready(unhealthy.cause, f"is unhealthy ({unhealthy})") if unhealthy else None

    def repair(self, trouble: Unready, stage: subprocess.Popen | None = None) -> None:
        """Restart the server, repeatedly if it dies while starting, until it is ready or the stage has ended.

        Raises ResumableError after `restarts` restarts.
        """
        self.health.stop()
        while True:
            self.repairs += 1
            name, allowed = self.role, self.settings.restarts
            if self.repairs > allowed:
                raise ResumableError(
                    f"server {name} {trouble}, after {allowed} restarts; see its log, then run again"
                )
            log.info("server %s %s: restart %d of at most %d", name, trouble, self.repairs, allowed)
            try:
                roles.down(self.config, name, hangs=trouble.cause is not Cause.NOT_RUNNING)
                roles.up(self.config, name, wanted=lambda: stage is None or stage.poll() is None)
                break
            except ResumableError as error:
                trouble = Unready(Cause.UNKNOWN, f"did not come back ({error})")
        self.health = HealthThread(self.config, name, lambda: self.last_output)


class HealthThread:
    """Asks the engine for a completion at intervals: /health can be 200 while the engine hangs.

    A busy server may queue the request, so the server is `unhealthy` only if the stage writes no line either. One
    that does not accept the request may be restarting by itself and gets `start_minutes`.
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
        patience, healthy_at = self.settings.hang_minutes * 60, time.time()
        while not self._over.wait(patience / 10):
            try:
                reason = roles.why_unready(self.config, self.role, patience)
            except Exception as error:  # without this thread a hang would go unnoticed
                log.info("server %s: its health check failed: %s", self.role, error)
                reason = Unready(Cause.UNKNOWN, str(error) or repr(error))
            now = time.time()
            if reason is None:
                healthy_at = now
                continue
            healthy_at = max(healthy_at, self.last_output())
            if now - healthy_at > (patience if reason.cause is Cause.HANGS else self.settings.start_minutes * 60):
                self.unhealthy = reason
                return


def _watch(line: list[str], log_file: Path, keeper: Keeper | None) -> tuple[int, dict]:
    """Run a stage's command to its end; restart its server when needed, while the stage waits for it."""
    log.info("%s: %s", log_file.stem, shlex.join(line))
    with contextlib.suppress(OSError):  # _copy_lines reports it
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with open(log_file, "a") as kept:
            kept.write(f"{datetime.now():%H:%M:%S} {BEGINS}{shlex.join(line)}\n")
    stdout: list[bytes] = []
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
            threading.Thread(target=lambda: stdout.extend(stage.stdout or ()), daemon=True),
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
    summary = process.last_object(stdout)
    code = stage.wait()
    if code < 0:
        name = signal.Signals(-code).name
        summary = {"error": f"killed by {name}" + (", perhaps because memory ran out" if name == "SIGKILL" else "")}
        return 128 - code, summary  # as a shell reports it
    return summary.get("exit_code", code), summary


def _ask_to_stop(stage: subprocess.Popen, stop: BaseException) -> None:
    """Ask a stage to save and end; kill it and all its descendants if it does not."""
    interrupted = isinstance(stop, Interrupted) and stop.exit_code == 128 + signal.SIGINT
    family = [process.identity(pid) for pid in process.descendants(stage.pid)]
    process.send([stage.pid], signal.SIGINT if interrupted else signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        stage.wait(SAVE_SECONDS)
        return
    process.send([each["pid"] for each in family if process.lives(each)], signal.SIGKILL)


def _copy_lines(source: Iterable[bytes], log_file: Path, heard: Callable[[], None] | None = None) -> None:
    """Show a stage's output as it comes and append it to its log.

    If the log or the terminal cannot be written, report it once and go on reading, since a stage blocks on a full
    pipe.
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
            except OSError as error:  # the next line is tried again: the disk may have room by then
                fault = error
            if fault and not reported:
                log.info("%s cannot be written (%s); the stage's output is only shown", log_file, fault.strerror)
                reported = True
            with contextlib.suppress(OSError):
                sys.stderr.buffer.write(line)
                sys.stderr.buffer.flush()
