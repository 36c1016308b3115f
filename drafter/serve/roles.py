"""The vLLM roles of a run: start, wait until really ready, check, stop.

A role is a `systemd` unit, a `command` (this program builds the vLLM command line and owns the process session) or
`external` (started by others). Manually: `python -m drafter.serve up|wait|status|down ROLE --config FILE`;
`check ROLE` compares a unit's flags with what the run needs, and asks and starts nothing.

Exit codes of `status`: 0 ready to serve this run, 3 not running, 4 running but not ready (it is starting, hangs, or
serves another run: `missing` in the output says which). Of every verb: 2 the config or the machine must change, 3 the
server did not start or stop in time.
"""

import argparse
import contextlib
import json
import logging
import math
import os
import shlex
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, get_args

from drafter import cli, files, gpu, model_folder, signals, stage
from drafter.config import Config, Role, Server
from drafter.errors import ConfigError, ResumableError
from drafter.serve import address, boot_times, command_server, readiness, server_record, systemd, unit_check
from drafter.serve.readiness import Cause, Unready
from drafter.serve.vllm_command import command

log = logging.getLogger("drafter")

GIVE_UP_RESTARTS = 2  # of a systemd unit that keeps dying while it boots

UNFIT_SECONDS = 3  # an older server may answer while it gives its address to the new one

DOWN, UNFIT = 3, 4  # exit codes of `status`
NEEDS_COMMAND = "a drafter is a launch argument of vLLM, so this role must be a `command`"


def require_ready(config: Config, role: Role) -> None:
    """Raises ConfigError, with the command that brings the role up, unless the server is ready."""
    if reason := why_unready(config, role):
        if _other_url(config, role):
            raise ConfigError(f"server {role}: {reason}")
        raise ConfigError(f"server {role}: {reason}; bring it up with: {invocation(config, 'up', role)}")


def invocation(config: Config, verb: str, role: Role) -> str:
    return shlex.join(["python", "-m", "drafter.serve", verb, role, *config.arguments])


@contextlib.contextmanager
def serving(
    config: Config,
    role: Role,
    drafter: Path | None = None,
    num_speculative_tokens: int = 3,
    log_file: Path | None = None,
) -> Iterator[None]:
    """Bring a role up, with `drafter` (a folder that vLLM serves) when given, and always down at the end."""
    if drafter is not None and config.server(role).kind != "command":
        raise ConfigError(f"servers.{role}.kind: {NEEDS_COMMAND}")
    up(config, role, drafter, num_speculative_tokens, log_file, alone=True)
    try:
        yield
    finally:
        down(config, role)


def up(
    config: Config,
    role: Role,
    drafter: Path | None = None,
    num_speculative_tokens: int = 3,
    log_file: Path | None = None,
    wanted: Callable[[], bool] = lambda: True,
    alone: bool = False,
) -> None:
    """Start a role unless it already runs with these arguments, and wait until it is ready or no longer `wanted`.

    `alone`: refuse while another process uses the role's server. Raises ConfigError for what the user must change (no
    such unit, port taken, server in use) and ResumableError when the server dies or is not ready in time. A `command`
    that fails leaves no process.
    """
    server = config.server(role)
    started, boots = False, server.kind != "external" and not alive(config, role)
    if server.kind == "systemd":
        if _relink(config, role) and systemd.is_active(server):
            log.info("%s writes to another run's folder: restarting it for this run", server.unit)
            down(config, role)
        if not systemd.is_active(server):
            systemd.start(server)
    elif server.kind == "command":
        model_folder.read_architecture(config.target.model)  # a wrong model folder fails here instead of late in vLLM
        line = command(config, role, drafter, num_speculative_tokens)
        started = command_server.start(config, role, line, log_file, alone)
    try:
        began = time.monotonic()
        if wait(config, role, wanted) and boots:
            boot_times.record(config, role, time.monotonic() - began)
    except BaseException:
        if started:
            down(config, role)
        raise


def wait(config: Config, role: Role, wanted: Callable[[], bool] = lambda: True) -> bool:
    """Wait until ready, at most `start_minutes`. Returns whether it is, or False if it is no longer `wanted`.

    Raises ConfigError for a server that is up and unfit for this run, else ResumableError, after logging the end of
    the server's log.
    """
    server = config.server(role)
    started = spoke = time.monotonic()
    restarts, shown, fit = restarts_of(server), None, started
    while reason := why_unready(config, role):
        signals.raise_if_received()
        waited = time.monotonic() - started
        if not wanted():
            log.info("server %s: no longer needed, not waiting for it", role)
            return False
        if not alive(config, role) or restarts_of(server) - restarts >= GIVE_UP_RESTARTS:
            raise ResumableError(f"server {role} died while starting: {_show_tail(config, role)}")
        if reason.cause is not Cause.UNFIT:
            fit = time.monotonic()
        elif time.monotonic() - fit > UNFIT_SECONDS:
            raise ConfigError(f"server {role}: {reason}; {readiness.remedy(server)}")
        if waited > server.start_minutes * 60:
            _show_tail(config, role)
            raise ResumableError(f"server {role} is not ready after {server.start_minutes:g} min: {reason}")
        if reason != shown or time.monotonic() - spoke >= 30:
            log.info("server %s is starting, %.0f s so far: %s", role, waited, reason)
            spoke, shown = time.monotonic(), reason
        time.sleep(min(1, 0.1 + waited / 10))
    if server.kind == "command":
        command_server.mark_ready(config, role)
    log.info("server %s is ready after %.0f s", role, time.monotonic() - started)
    return True


def down(config: Config, role: Role, hangs: bool = False) -> None:
    """Stop a role and wait until its GPU memory is free; an `external` role is left running.

    A `command` that `hangs` is soon killed. Raises ResumableError naming the processes that still hold the memory.
    """
    server = config.server(role)
    if server.kind != "external":
        stop(config, role, hangs)
        wait_free(config, [role], server.stop_seconds)


def stop(config: Config, role: Role, hangs: bool = False, at_most: float = math.inf) -> bool:
    """End the processes of a role; its GPU memory may not be free yet. Returns False when there was nothing to stop.

    A `command` is killed after `at_most` seconds, or after `stop_seconds` if that is shorter. Raises ResumableError
    naming processes that cannot be killed.
    """
    server = config.server(role)
    if server.kind == "external":
        return False
    if server.kind == "command":
        return command_server.stop(config, role, hangs, at_most)
    log.info("server %s: stopping %s", role, server.unit)
    systemd.stop(server)
    return True


def wait_free(config: Config, roles: Collection[Role], seconds: float) -> None:
    """Wait until the GPU memory of these stopped roles is free, except on GPUs of a role that is still up.

    Raises ResumableError naming the processes that still hold the memory after `seconds`.
    """
    gpus = {index for role in roles for index in config.server(role).gpus}
    for other in set(get_args(Role)) - set(roles):
        settings = config.server(other)
        if settings.kind != "external" and gpus.intersection(settings.gpus) and alive(config, other):
            gpus -= set(settings.gpus)
    gpu.wait_free(sorted(gpus), seconds)


def alive(config: Config, role: Role) -> bool:
    """Whether the unit is active or the process lives, ready or not. An external server counts as alive."""
    server = config.server(role)
    if server.kind == "systemd":
        return systemd.is_active(server)
    if server.kind == "command":
        return server_record.running(config, role) is not None
    return True


def status(config: Config, role: Role) -> dict[str, Any]:
    """A role's state as JSON types; `missing` says why it is not ready."""
    server = config.server(role)
    reason = why_unready(config, role)
    external = server.kind == "external"
    running = not (reason and reason.cause is Cause.NO_ANSWER) if external else alive(config, role)
    return {"role": role, "kind": server.kind, "url": server.url, "alive": running, "ready": not reason} | (
        {"missing": str(reason)} if reason else {}
    )


def in_words(found: dict[str, Any]) -> str:
    """A role's `status` as a line for a terminal."""
    missing = f" ({found['missing']})" if found["alive"] and not found["ready"] else ""
    state = "ready" if found["ready"] else "running, but not ready" if found["alive"] else "not running"
    return f"server {found['role']} ({found['url']}): {state}{missing}"


def why_unready(config: Config, role: Role, patience: float | None = None) -> Unready | None:
    """The first reason why the role is not ready, or None when it is.

    `patience`: seconds that a completion may take. Raises ConfigError or ResumableError when systemctl fails.
    """
    if alive(config, role):
        reason = readiness.why_unready(config, role, patience)
        if reason and (url := _other_url(config, role)):
            there = f"this run's server {role} is at {url}: give this command --set servers.{role}.url={url}"
            return Unready(reason.cause, f"{there} ({reason})")
        return reason
    server = config.server(role)
    found = filter(None, (readiness.found_at(server), address.holder(config, role)))
    occupied = ": ".join(found)
    return Unready(Cause.NOT_RUNNING, "not running" + (f"; at {server.url} is {occupied}" if occupied else ""))


def _other_url(config: Config, role: Role) -> str | None:
    """The URL of this run's running server of a `command` role, when it is not the config's."""
    return address.elsewhere(config, role) if config.server(role).kind == "command" else None


def _relink(config: Config, role: Role) -> bool:
    """Point `link` to this run's hidden states. Returns whether it pointed elsewhere: the unit must then restart."""
    link, folder = config.server(role).link, config.stage_dir("02_hidden_states")
    if link is None or link.resolve() == folder.resolve():
        return False
    folder.mkdir(parents=True, exist_ok=True)
    new = link.with_name(f"{link.name}{files.PART}")
    new.unlink(missing_ok=True)
    new.symlink_to(folder)
    try:
        os.replace(new, link)
    except OSError as error:
        raise ConfigError(
            f"servers.{role}.link: {link} cannot be replaced by a link ({error.strerror}); move it away"
        ) from None
    return True


def restarts_of(server: Server) -> int:
    """How often systemd restarted the unit by itself; 0 for other kinds."""
    return systemd.restarts(server) if server.kind == "systemd" else 0


def _show_tail(config: Config, role: Role) -> str:
    """Log the end of the server's log. Returns the server's own last line, for an error message."""
    lines = tail(config, role).strip().splitlines() or ["its log is empty"]
    for line in lines:
        log.info("  %s| %s", role, line[:200])
    # By now systemd may have restarted the unit: the cause of its death is before the lines of the new start.
    dead = max((at for at, line in enumerate(lines) if "Main process exited" in line), default=len(lines))
    return next((line for line in reversed(lines[:dead]) if " systemd[" not in line), lines[-1])[:200]


def tail(config: Config, role: Role) -> str:
    """The last lines of a role's log."""
    server = config.server(role)
    if server.kind == "systemd":
        return systemd.tail(server)
    if record := server_record.read(server_record.record_path(config, role)):
        with contextlib.suppress(OSError):
            return "\n".join(Path(record["log"]).read_text(errors="replace").splitlines()[-systemd.TAIL_LINES :])
    return ""


def main(argv: list[str] | None = None) -> int:
    arguments = stage.tool_parser(__doc__, "python -m drafter.serve")
    arguments.add_argument("verb", choices=("up", "wait", "status", "down", "check"))
    arguments.add_argument("role", choices=get_args(Role))
    cli.add_json(arguments)

    def body(config: Config, args: argparse.Namespace) -> int:
        if args.verb == "check":
            page, fits = unit_check.report(config, args.role)
            print("\n".join(page))
            return 0 if fits else ConfigError.exit_code
        if args.verb != "status":
            verbs: dict[str, Callable[[Config, Role], object]] = {"up": up, "wait": wait, "down": down}
            verbs[args.verb](config, args.role)
        found = status(config, args.role)
        print(json.dumps(found) if stage.wants_json(args) else in_words(found))
        return 0 if args.verb != "status" or found["ready"] else UNFIT if found["alive"] else DOWN

    return stage.run_tool("server", body, arguments, argv)
