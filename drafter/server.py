"""The vLLM roles of a run: start, wait until really ready, check, stop.

A role is a `systemd` unit, a `command` (the vLLM arguments are built here and the process group is ours) or
`external` (somebody else's). By hand: `python -m drafter.server up|wait|status|down ROLE --config FILE`.
"""

import argparse
import contextlib
import http.client
import json
import logging
import os
import shlex
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit

from drafter import artifacts, config, gpu, interrupts, process, stage
from drafter.errors import ConfigError, ResumableError
from drafter.launch import command, environment

log = logging.getLogger("drafter")

PROBE_SECONDS = 60  # a completion of one token that takes longer is a hang, also right after compiling kernels
TAIL_LINES = 40
GIVE_UP_RESTARTS = 2  # of a systemd unit that keeps dying while it boots
QUICK_SECONDS = 10  # to stop a `command` that has nothing to finish: it was never ready, or hangs

# What is asked of systemctl, before the unit's name: the rights that a prefix must give.
START = ("start", "--no-block")
STOP = ("stop",)
PROPERTIES = ("LoadState", "ActiveState", "NRestarts", "User", "Group", "UMask")
SHOW = ("show", *(part for name in PROPERTIES for part in ("-p", name)))
STATUS = ("status", "--no-pager", "--full", "-n", str(TAIL_LINES))


def check(run_config: config.Config, role: config.Role) -> None:
    """Raises ConfigError, with the command that brings the role up, unless it would serve a request now."""
    if reason := missing(run_config, role):
        raise ConfigError(f"server {role}: {reason}; bring it up with: {invocation(run_config, 'up', role)}")


def invocation(run_config: config.Config, verb: str, role: config.Role) -> str:
    return shlex.join(["python", "-m", "drafter.server", verb, role, *run_config.arguments])


@contextlib.contextmanager
def serving(
    run_config: config.Config,
    role: config.Role,
    drafter: Path | None = None,
    num_speculative_tokens: int = 3,
    log_file: Path | None = None,
) -> Iterator[None]:
    """Bring a role up, with `drafter` (a native EAGLE-3 folder) when given, and down again whatever happens."""
    if drafter is not None and run_config.servers.model_dump()[role]["kind"] != "command":
        raise ConfigError(f"servers.{role}.kind: a drafter is a launch argument, so this role must be a `command`")
    try:
        up(run_config, role, drafter, num_speculative_tokens, log_file)
        yield
    finally:
        down(run_config, role)


def up(
    run_config: config.Config,
    role: config.Role,
    drafter: Path | None = None,
    num_speculative_tokens: int = 3,
    log_file: Path | None = None,
    wanted: Callable[[], bool] = lambda: True,
) -> None:
    """Start a role unless it runs already as asked, and wait until it is ready, or no longer `wanted`.

    Raises ConfigError for what the user must change (no such unit, port taken), ResumableError when the server
    dies or is not ready in time. A `command` that failed leaves no process behind.
    """
    server = _settings(run_config, role)
    if server.kind == "systemd":
        if _relink(run_config, role) and _unit(server)["alive"]:
            log.info("%s writes for another run: restarting it for this one", server.unit)
            down(run_config, role)
        if not _unit(server)["alive"]:
            systemctl(server, *START, server.unit)
    elif server.kind == "command":
        _start(run_config, role, command(run_config, role, drafter, num_speculative_tokens), log_file)
    try:
        wait(run_config, role, wanted)
    except BaseException:
        if server.kind == "command":
            down(run_config, role)
        raise


def wait(run_config: config.Config, role: config.Role, wanted: Callable[[], bool] = lambda: True) -> None:
    """Until ready, at most `start_minutes`. Raises ResumableError, after showing the end of the server's log."""
    server = _settings(run_config, role)
    started = spoke = time.monotonic()
    restarts, shown = restarts_of(server), None
    while reason := missing(run_config, role):
        interrupts.check()
        waited = time.monotonic() - started
        if not wanted():
            log.info("server %s: nobody waits for it any more", role)
            return
        if not alive(run_config, role) or restarts_of(server) - restarts >= GIVE_UP_RESTARTS:
            raise ResumableError(f"server {role} died while starting: {_show_tail(run_config, role)}")
        if waited > server.start_minutes * 60:
            _show_tail(run_config, role)
            raise ResumableError(f"server {role} is not ready after {server.start_minutes:g} min: {reason}")
        if reason != shown or time.monotonic() - spoke >= 30:
            log.info("server %s is starting, %.0f s so far: %s", role, waited, reason)
            spoke, shown = time.monotonic(), reason
        time.sleep(min(1, 0.1 + waited / 10))
    if server.kind == "command":
        _mark_ready(run_config, role)
    log.info("server %s is ready after %.0f s", role, time.monotonic() - started)


def down(run_config: config.Config, role: config.Role, hangs: bool = False) -> None:
    """Stop a role and wait until its GPU memory is free. An `external` role is left alone, one that hangs is killed.

    Raises ResumableError naming the processes that still hold the memory.
    """
    server = _settings(run_config, role)
    if server.kind == "external":
        return
    if server.kind == "systemd":
        systemctl(server, *STOP, server.unit, timeout=server.stop_seconds + 60)
    else:
        _stop(run_config, role, hangs)
    gpu.wait_free(server.gpus, server.stop_seconds)


def alive(run_config: config.Config, role: config.Role) -> bool:
    """Whether the unit or process exists, ready or not. An external server counts as alive."""
    server = _settings(run_config, role)
    if server.kind == "systemd":
        return _unit(server)["alive"]
    if server.kind == "command":
        return _recorded(run_config, role) is not None
    return True


def status(run_config: config.Config, role: config.Role) -> dict[str, Any]:
    server = _settings(run_config, role)
    reason = missing(run_config, role)
    running = alive(run_config, role)
    return {"role": role, "kind": server.kind, "url": server.url, "alive": running, "ready": not reason} | (
        {"missing": reason} if reason else {}
    )


# Readiness


def missing(run_config: config.Config, role: config.Role, patience: float | None = None) -> str | None:
    """The first thing that stands between the role and a served request, or None when it is ready.

    Ready means: alive, /health is 200, the served name is listed with enough context, the GPUs hold the model,
    and one real completion came back with token ids within `patience` seconds (an API can be healthy over a dead
    engine).
    """
    server = _settings(run_config, role)
    if not alive(run_config, role):
        return "not running" + _instead(run_config, server)
    try:
        _request(server, "/health", seconds=10)
        listed = {model["id"]: model for model in _request(server, "/v1/models", seconds=10)["data"]}
        if (name := run_config.target.served_name) not in listed:
            return f"{server.url} serves {', '.join(listed)}, not target.served_name {name}"
        needed, offered = context_needed(run_config, role), listed[name].get("max_model_len")
        if offered is not None and offered < needed:
            return f"its max_model_len is {offered}, this run needs {needed}"
        folder = run_config.stage_dir("02_hidden_states")
        if server.link and server.link.resolve() != folder.resolve():
            return f"{server.link} does not lead to {folder}: the server writes for another run"
        if reason := gpu.not_loaded(server.gpus, run_config.target.model):
            return reason
        body = {"model": name, "prompt": "Hello", "max_tokens": 1, "temperature": 0, "return_token_ids": True}
        reply = _request(server, "/v1/completions", body, patience or PROBE_SECONDS)
        if not reply["choices"][0]["token_ids"]:
            return "its completions carry no token ids (vLLM's return_token_ids)"
    except urllib.error.HTTPError as error:
        return f"{urlsplit(error.url).path} answers {error.code}"
    except (urllib.error.URLError, ConnectionError) as error:
        why = getattr(error, "reason", error)
        # What a server of ours does as long as it loads its model is no fault.
        loads = server.kind != "external" and isinstance(why, ConnectionRefusedError)
        return f"no answer at {server.url} " + ("yet" if loads else f"({why})")
    except TimeoutError:
        return f"{server.url} hangs: it accepts a request and does not answer"
    except (ValueError, LookupError, TypeError, RecursionError, http.client.HTTPException):
        return f"{server.url} answers, but not as an OpenAI-compatible server does"
    return None


def _instead(run_config: config.Config, server: config.Server) -> str:
    """What answers at the address of a role that is down: another run's server, or another program."""
    for path in run_config.run.dir.glob("*/servers/*.json"):
        record = artifacts.read_note(path, pid=int, boot=str, home=str, command=list)
        there = record and record["home"] == artifacts.home(path.parent) and process.lives(record)
        if there and ("--port", str(urlsplit(server.url).port or 80)) in pairwise(record["command"]):
            return f"; at {server.url} is the server {path.stem} of the run {path.parent.parent.name}"
    try:
        served = ", ".join(model["id"] for model in _request(server, "/v1/models", seconds=2)["data"])
        return f"; at {server.url} is a server that this run did not start, of {served}"
    except (urllib.error.HTTPError, TimeoutError, ValueError, LookupError, TypeError, RecursionError):
        return f"; at {server.url} is another program"
    except (urllib.error.URLError, ConnectionError, http.client.HTTPException):
        return ""


def context_needed(run_config: config.Config, role: config.Role) -> int:
    """Smallest `max_model_len` this run can work with: every role adds at least one token to a prompt."""
    return (
        1
        + {
            "generate": run_config.generate.max_tokens,
            "extract": run_config.target.max_seq_len,
            "evaluate": run_config.acceptance.max_tokens,
        }[role]
    )


def _request(server: config.Server, path: str, body: dict | None = None, seconds: float = 10) -> Any:
    headers = {"content-type": "application/json"}
    if server.api_key_env:
        headers["authorization"] = f"Bearer {os.environ.get(server.api_key_env, '')}"
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(server.url.rstrip("/") + path, data, headers)
    # A proxy from the environment must never stand before a server of this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=seconds) as reply:
        text = reply.read()
    return json.loads(text) if text else None


# Kind `command`


def _record_path(run_config: config.Config, role: config.Role) -> Path:
    return run_config.run_dir / "servers" / f"{role}.json"


def _read_record(run_config: config.Config, role: config.Role) -> dict | None:
    """What was noted of the process we started for this role; None for another run's, of which this is a copy."""
    path = _record_path(run_config, role)
    record = artifacts.read_note(path, pid=int, boot=str, home=str, ready=bool, command=list, log=str)
    return record if record and record["home"] == artifacts.home(path.parent) else None


def _recorded(run_config: config.Config, role: config.Role) -> dict | None:
    """The process we started for this role, if it still lives (its pid was not given to another process)."""
    record = _read_record(run_config, role)
    return record if record and process.lives(record) else None


def _mark_ready(run_config: config.Config, role: config.Role) -> None:
    record = _recorded(run_config, role)
    if record and not record["ready"]:
        artifacts.write_json(_record_path(run_config, role), record | {"ready": True})


def _start(run_config: config.Config, role: config.Role, line: list[str], log_file: Path | None) -> None:
    server = _settings(run_config, role)
    if record := _recorded(run_config, role):
        if record["command"] == line:
            return
        log.info("server %s runs with other arguments: stopping it first", role)
    _stop(run_config, role)  # also what outlived a dead one: once the new one is recorded, nobody would end it
    config.read_architecture(run_config.target.model)  # a model that is not there would be vLLM's to find out
    address = urlsplit(server.url)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
        try:
            probe.bind((address.hostname, address.port or 80))
        except OSError as error:
            raise ConfigError(f"servers.{role}.url: cannot listen at {server.url} ({error.strerror})") from None
    path = log_file or _record_path(run_config, role).with_suffix(".log")
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as output, interrupts.held():
        started = subprocess.Popen(
            line,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(server),
            start_new_session=True,
        )
        try:
            _record(run_config, role, process.identity(started.pid) | {"command": line, "log": str(path)})
        except BaseException:
            process.end_session(started.pid, 0)  # unrecorded, nobody would ever stop it
            raise
    log.info("server %s: started process %d, log in %s", role, started.pid, path)


def _record(run_config: config.Config, role: config.Role, facts: dict) -> None:
    path = _record_path(run_config, role)
    path.parent.mkdir(parents=True, exist_ok=True)
    artifacts.write_json(path, facts | {"home": artifacts.home(path.parent), "ready": False})


def _stop(run_config: config.Config, role: config.Role, hangs: bool = False) -> None:
    """Raises ResumableError naming processes that cannot be ended; the record of them stays."""
    record = _read_record(run_config, role)
    # Workers may outlive the leader; but a pid that was given to somebody else since is not ours to end.
    if record and record["boot"] == process.boot() and process.birth(record["pid"]) in (None, record.get("birth")):
        patient = record["ready"] and not hangs
        seconds = _settings(run_config, role).stop_seconds
        if left := process.end_session(record["pid"], seconds if patient else min(seconds, QUICK_SECONDS)):
            raise ResumableError(f"server {role}: process {', '.join(map(str, left))} hangs and cannot be ended")
    _record_path(run_config, role).unlink(missing_ok=True)


# Kind `systemd`


def systemctl(server: config.Server, *arguments: str, timeout: float = 60) -> str:
    """Raises ConfigError when systemctl refuses (no right, no such unit)."""
    line = [*server.systemctl, *arguments]
    try:
        done = process.run(line, timeout)
    except FileNotFoundError:
        raise ConfigError(f"no {line[0]} on this machine; set servers.<role>.systemctl or another kind") from None
    except subprocess.TimeoutExpired:
        raise ResumableError(f"{shlex.join(line)} has not come back after {timeout:.0f} s") from None
    if done.returncode:
        raise ConfigError(f"{shlex.join(line)}: {' '.join((done.stderr or done.stdout).split())}")
    return done.stdout


def properties(server: config.Server) -> dict[str, str]:
    """What systemd says of the role's unit, its state and its user."""
    return dict(line.split("=", 1) for line in systemctl(server, *SHOW, server.unit).splitlines() if "=" in line)


def _unit(server: config.Server) -> dict[str, Any]:
    """State of the role's unit. Raises ConfigError when it is not installed."""
    state = properties(server)
    if state.get("LoadState") == "not-found":
        raise ConfigError(f"no systemd unit {server.unit}; install configs/systemd/{server.unit}.service")
    return {
        "alive": state.get("ActiveState") in ("active", "activating", "reloading"),
        "restarts": int(state.get("NRestarts") or 0),
    }


def _relink(run_config: config.Config, role: config.Role) -> bool:
    """Make `link` mean this run's hidden states; True when it meant others. A server follows it when it starts."""
    link, folder = _settings(run_config, role).link, run_config.stage_dir("02_hidden_states")
    if link is None or link.resolve() == folder.resolve():
        return False
    folder.mkdir(parents=True, exist_ok=True)
    new = link.with_name(f"{link.name}{artifacts.PART}")
    new.unlink(missing_ok=True)
    new.symlink_to(folder)
    try:
        os.replace(new, link)
    except OSError as error:
        raise ConfigError(
            f"servers.{role}.link: {link} cannot become a link ({error.strerror}); move it away"
        ) from None
    return True


def restarts_of(server: config.Server) -> int:
    """How often systemd restarted the unit by itself; 0 for other kinds."""
    return _unit(server)["restarts"] if server.kind == "systemd" else 0


# Shared


def _settings(run_config: config.Config, role: config.Role) -> config.Server:
    return getattr(run_config.servers, role)


def _show_tail(run_config: config.Config, role: config.Role) -> str:
    """Show the end of the role's log to the person watching; the last line is returned, for the error."""
    lines = tail(run_config, role).strip().splitlines() or ["its log is empty"]
    for line in lines:
        log.info("  %s| %s", role, line[:200])
    return lines[-1][:200]


def tail(run_config: config.Config, role: config.Role) -> str:
    """The last lines of a role's log."""
    server = _settings(run_config, role)
    if server.kind == "systemd":
        # `status` exits 3 for a stopped unit: its output is wanted all the same.
        return process.run([*server.systemctl, *STATUS, server.unit], 60).stdout
    if record := _read_record(run_config, role):
        with contextlib.suppress(FileNotFoundError):
            return "\n".join(Path(record["log"]).read_text(errors="replace").splitlines()[-TAIL_LINES:])
    return ""


def main(argv: list[str] | None = None) -> int:
    arguments = stage.tool_parser(__doc__, "python -m drafter.server")
    arguments.add_argument("verb", choices=("up", "wait", "status", "down"))
    arguments.add_argument("role", choices=get_args(config.Role))

    def body(run_config: config.Config, args: argparse.Namespace) -> None:
        if args.verb != "status":
            {"up": up, "wait": wait, "down": down}[args.verb](run_config, args.role)
        print(json.dumps(status(run_config, args.role)))

    return stage.run_tool("server", body, arguments, argv)


if __name__ == "__main__":
    raise SystemExit(main())
