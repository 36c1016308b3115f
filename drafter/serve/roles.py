"""The vLLM roles of a run: start, wait until really ready, check, stop.

A role is a `systemd` unit, a `command` (the vLLM arguments are built here and the process group is ours) or
`external` (somebody else's). By hand: `python -m drafter.serve up|wait|status|down ROLE --config FILE`.

Exit codes of `status`: 0 it would serve this run now, 3 it is not running, 4 it runs and would not serve (it starts,
hangs, or was made for another run: `missing` says which). Of every verb: 2 the config or the machine must change,
3 the server did not come up or go down in time.
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

from drafter import files, gpu, model_folder, signals, stage
from drafter.config import Config, Role, Server
from drafter.errors import ConfigError, ResumableError
from drafter.serve import command_server, readiness, systemd
from drafter.serve.readiness import Cause, Unready
from drafter.serve.vllm_command import command

log = logging.getLogger("drafter")

GIVE_UP_RESTARTS = 2  # of a systemd unit that keeps dying while it boots

DOWN, UNFIT = 3, 4  # exit codes of `status`


def require_ready(config: Config, role: Role) -> None:
    """Raises ConfigError, with the command that brings the role up, unless it would serve a request now."""
    if reason := why_unready(config, role):
        if _elsewhere(config, role):
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
    """Bring a role up, with `drafter` (a native EAGLE-3 folder) when given, and down again whatever happens."""
    if drafter is not None and config.servers.model_dump()[role]["kind"] != "command":
        raise ConfigError(f"servers.{role}.kind: a drafter is a launch argument, so this role must be a `command`")
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
    """Start a role unless it runs already as asked, and wait until it is ready, or no longer `wanted`.

    `alone`: not beside another process of this run that uses the role's server. Raises ConfigError for what the user
    must change (no such unit, port taken, server in use), ResumableError when the server dies or is not ready in
    time. A `command` that failed leaves no process behind.
    """
    server = config.server(role)
    ours = False
    if server.kind == "systemd":
        if _relink(config, role) and systemd.is_active(server):
            log.info("%s writes for another run: restarting it for this one", server.unit)
            down(config, role)
        if not systemd.is_active(server):
            systemd.start(server)
    elif server.kind == "command":
        model_folder.read_architecture(config.target.model)  # before anything is made; vLLM would say it late
        line = command(config, role, drafter, num_speculative_tokens)
        ours = command_server.start(config, role, line, log_file, alone)
    try:
        wait(config, role, wanted)
    except BaseException:
        if ours:
            down(config, role)
        raise


def wait(config: Config, role: Role, wanted: Callable[[], bool] = lambda: True) -> None:
    """Until ready, at most `start_minutes`. Raises ResumableError, after showing the end of the server's log."""
    server = config.server(role)
    started = spoke = time.monotonic()
    restarts, shown = restarts_of(server), None
    while reason := why_unready(config, role):
        signals.raise_if_received()
        waited = time.monotonic() - started
        if not wanted():
            log.info("server %s: nobody waits for it any more", role)
            return
        if not alive(config, role) or restarts_of(server) - restarts >= GIVE_UP_RESTARTS:
            raise ResumableError(f"server {role} died while starting: {_show_tail(config, role)}")
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


def down(config: Config, role: Role, hangs: bool = False) -> None:
    """Stop a role and wait until its GPU memory is free. An `external` role is left alone, one that hangs is killed.

    Raises ResumableError naming the processes that still hold the memory.
    """
    server = config.server(role)
    if server.kind != "external":
        stop(config, role, hangs)
        wait_free(config, [role], server.stop_seconds)


def stop(config: Config, role: Role, hangs: bool = False, at_most: float = math.inf) -> bool:
    """End the processes of a role; its GPU memory may not be free yet. Returns False when there was nothing to stop.

    A `command` is killed after `at_most` seconds, or earlier when `stop_seconds` are over.
    Raises ResumableError naming processes that cannot be ended.
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
    """Wait until the GPU memory of these stopped roles is free, except where another role of this run is up.

    Raises ResumableError naming the processes that still hold the memory after `seconds`.
    """
    gpus = {index for role in roles for index in config.server(role).gpus}
    for other in set(get_args(Role)) - set(roles):
        settings = config.server(other)
        if settings.kind != "external" and gpus.intersection(settings.gpus) and alive(config, other):
            gpus -= set(settings.gpus)
    gpu.wait_free(sorted(gpus), seconds)


def alive(config: Config, role: Role) -> bool:
    """Whether the unit or process exists, ready or not. An external server counts as alive."""
    server = config.server(role)
    if server.kind == "systemd":
        return systemd.is_active(server)
    if server.kind == "command":
        return command_server.running(config, role) is not None
    return True


def status(config: Config, role: Role) -> dict[str, Any]:
    """One role as JSON types; `missing` is the sentence that says why it is not ready."""
    server = config.server(role)
    reason = why_unready(config, role)
    external = server.kind == "external"
    running = not (reason and reason.cause is Cause.NO_ANSWER) if external else alive(config, role)
    return {"role": role, "kind": server.kind, "url": server.url, "alive": running, "ready": not reason} | (
        {"missing": str(reason)} if reason else {}
    )


def why_unready(config: Config, role: Role, patience: float | None = None) -> Unready | None:
    """The first reason why the role would not serve a request now, or None when it is ready.

    `patience`: the seconds that a completion may take. Raises ConfigError or ResumableError when systemctl fails.
    """
    if alive(config, role):
        reason = readiness.why_unready(config, role, patience)
        if reason and (url := _elsewhere(config, role)):
            there = f"this run's server {role} runs at {url}: give this command --set servers.{role}.url={url}"
            return Unready(reason.cause, f"{there} ({reason})")
        return reason
    return Unready(Cause.NOT_RUNNING, "not running" + _instead(config, role))


def _elsewhere(config: Config, role: Role) -> str | None:
    """The address of this run's own server of a role, when it is up and listens at another one than the config's."""
    return command_server.elsewhere(config, role) if config.server(role).kind == "command" else None


def _instead(config: Config, role: Role) -> str:
    """What has the address of a role that is down: a server of another run or of none, or another program."""
    server = config.server(role)
    answers, held = readiness.found_at(server), command_server.at_address(config, role)
    if answers or held:
        return f"; at {server.url} is {': '.join(filter(None, (answers, held)))}"
    return ""


# Kind `systemd`


def _relink(config: Config, role: Role) -> bool:
    """Make `link` mean this run's hidden states; True when it meant others. A server follows it when it starts."""
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
            f"servers.{role}.link: {link} cannot become a link ({error.strerror}); move it away"
        ) from None
    return True


def restarts_of(server: Server) -> int:
    """How often systemd restarted the unit by itself; 0 for other kinds."""
    return systemd.restarts(server) if server.kind == "systemd" else 0


# Shared


def _show_tail(config: Config, role: Role) -> str:
    """Show the end of the role's log to the person watching; the server's own last line, for the error."""
    lines = tail(config, role).strip().splitlines() or ["its log is empty"]
    for line in lines:
        log.info("  %s| %s", role, line[:200])
    # A unit that systemd restarts has begun anew when its death is noticed.
    dead = max((at for at, line in enumerate(lines) if "Main process exited" in line), default=len(lines))
    return next((line for line in reversed(lines[:dead]) if " systemd[" not in line), lines[-1])[:200]


def tail(config: Config, role: Role) -> str:
    """The last lines of a role's log."""
    server = config.server(role)
    if server.kind == "systemd":
        return systemd.tail(server)
    if record := command_server.read_record(config, role):
        with contextlib.suppress(OSError):
            return "\n".join(Path(record["log"]).read_text(errors="replace").splitlines()[-systemd.TAIL_LINES :])
    return ""


def main(argv: list[str] | None = None) -> int:
    arguments = stage.tool_parser(__doc__, "python -m drafter.serve")
    arguments.add_argument("verb", choices=("up", "wait", "status", "down"))
    arguments.add_argument("role", choices=get_args(Role))

    def body(config: Config, args: argparse.Namespace) -> int:
        if args.verb != "status":
            {"up": up, "wait": wait, "down": down}[args.verb](config, args.role)
        found = status(config, args.role)
        print(json.dumps(found))
        return 0 if args.verb != "status" or found["ready"] else UNFIT if found["alive"] else DOWN

    return stage.run_tool("server", body, arguments, argv)
