"""Servers: really ready or not at all, bounded waits, nothing left behind. A scripted vLLM, systemctl and nvidia-smi
stand on PATH; the real vLLM is served by the tests of the stages."""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from drafter import config, files, locks, process
from drafter.errors import ConfigError, ResumableError
from drafter.pipeline import preflight, supervise
from drafter.serve import (
    address,
    boot_times,
    client,
    command_server,
    readiness,
    roles,
    server_record,
    systemd,
    vllm_command,
)
from drafter.serve.readiness import Cause
from tests.conftest import CPU_CONFIG, free_port
from tests.fakes import FakeServer
from tests.serve.test_client import BROKEN_REPLIES, hostile  # noqa: F401 - the latter is a fixture

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def role(tmp_path, model):
    """Makes a config whose role `generate` is the scripted server."""
    made = []

    def make(fake="", **settings):
        settings = {
            "kind": "command",
            "url": f"http://127.0.0.1:{free_port()}",
            "python": str(SCRIPTS / "fake_vllm"),
            "start_minutes": 0.2,
            "stop_seconds": 1,
            "args": {"max-model-len": 1024},
            "env": {"FAKE": fake},
        } | settings
        others = [f"servers.{name}.url=http://127.0.0.1:{free_port()}" for name in ("extract", "evaluate")]
        overrides = [f"servers.generate={json.dumps(settings)}", f"run.dir={tmp_path}", *others]
        made.append(config.load(CPU_CONFIG, overrides))
        return made[-1]

    yield make
    for run_config in made:
        if run_config.servers.generate.kind == "command":
            roles.down(run_config, "generate")


def session(run_config) -> int:
    return json.loads((run_config.run_dir / "servers/generate.json").read_text())["pid"]


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """systemctl and nvidia-smi on PATH: `machine.units`, `machine.memory(MiB of GPU 0)`."""

    class Machine:
        units, gpus = tmp_path / "units", tmp_path / "gpus"

        def unit(self, run_config, fake=""):
            line = [str(SCRIPTS / "fake_vllm"), "-m", "vllm", "--served-model-name", "smollm2"]
            line += ["--max-model-len", "1024", "--host", "127.0.0.1"]
            line += ["--port", run_config.servers.generate.url.rpartition(":")[2]]
            path = self.units / "vllm-test"
            path.write_text(f"#!/bin/sh\nFAKE='{fake}' exec {' '.join(line)}\n")
            path.chmod(0o755)

        def memory(self, mib, processes=""):
            (self.gpus / "memory").write_text(f"0, {mib}\n")
            (self.gpus / "processes").write_text(processes)

        def calls(self):
            return (self.units / "calls.log").read_text().split("\n")

    machine = Machine()
    machine.units.mkdir()
    machine.gpus.mkdir()
    monkeypatch.setenv("PATH", f"{SCRIPTS}:{os.environ['PATH']}")
    monkeypatch.setenv("UNITS", str(machine.units))
    monkeypatch.setenv("GPU_STATE", str(machine.gpus))
    machine.memory(0)
    yield machine
    for pid_file in machine.units.glob("*.pid"):
        process.end_session(int(pid_file.read_text()), 0)


def test_a_server_that_loses_the_first_signal_is_asked_again(monkeypatch):
    """R02: vLLM forgets a SIGTERM that comes while it boots, and would be waited for until it is killed."""
    monkeypatch.setattr(process, "REMIND_SECONDS", 0.2)
    deaf = "signal.signal(15, lambda *_: signal.signal(15, signal.SIG_DFL)); print(1); time.sleep(60)"
    line = [sys.executable, "-uc", f"import signal, time; {deaf}"]
    started = subprocess.Popen(line, stdout=subprocess.PIPE, start_new_session=True)
    started.stdout.readline()
    process.end_session(started.pid, 30)
    assert process.start_time(started.pid) is None


def test_a_server_is_ready_after_a_completion_and_gone_after_down(role):
    run_config = role()
    roles.up(run_config, "generate")
    assert roles.status(run_config, "generate")["ready"]
    roles.require_ready(run_config, "generate")
    leader = session(run_config)
    roles.down(run_config, "generate")
    assert not process.members(leader)
    assert roles.status(run_config, "generate") | {"url": ""} == {
        "role": "generate",
        "kind": "command",
        "url": "",
        "alive": False,
        "ready": False,
        "missing": "not running",
    }


def test_up_twice_keeps_the_running_server_and_other_arguments_replace_it(role, tmp_path):
    run_config = role()
    roles.up(run_config, "generate")
    first = session(run_config)
    roles.up(run_config, "generate")
    assert session(run_config) == first
    roles.up(run_config, "generate", drafter=tmp_path)
    assert session(run_config) != first and not process.members(first)


def test_check_names_the_command_that_brings_the_role_up(role):
    run_config = role()
    with pytest.raises(ConfigError, match="python -m drafter.serve up generate --config .* --set run.dir="):
        roles.require_ready(run_config, "generate")


@pytest.mark.parametrize(
    "answer",
    [b"SSH-2.0\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nx", b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 100000],
)
def test_a_program_that_is_no_vllm_server_is_reported(role, answer):
    """R01: another program at the address, or a proxy that cuts replies."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def reply():
            with contextlib.suppress(OSError):
                while True:
                    with listener.accept()[0] as connection:
                        connection.recv(4096)
                        connection.sendall(answer)

        threading.Thread(target=reply, daemon=True).start()
        run_config = role(kind="external", url=f"http://127.0.0.1:{listener.getsockname()[1]}")
        assert "not as an OpenAI-compatible server" in str(roles.why_unready(run_config, "generate"))


class Drip(BaseHTTPRequestHandler):
    """Answers like a server, but `slow`, a part of the reply to a path, comes byte by byte and never ends."""

    slow = ("/health", "headers")

    def log_message(self, *_):
        pass

    def do_GET(self):
        body = json.dumps({"data": [{"id": "smollm2", "max_model_len": 1024}]}).encode()
        self.send_response(200)
        if self.path == self.slow[0] and self.slow[1] == "headers":
            self.end_slowly(b"x-more: ")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.path == self.slow[0]:
            self.end_slowly(b"")
        self.wfile.write(body)

    do_POST = do_GET

    def end_slowly(self, begun):
        self.flush_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(begun)
            while True:
                self.wfile.write(b"a")
                time.sleep(0.05)
        raise ConnectionAbortedError


@pytest.fixture
def dripping(role, monkeypatch):
    """Makes a config whose role is a server that drips."""
    monkeypatch.setattr(readiness, "ASK_SECONDS", 0.3)
    monkeypatch.setattr(readiness, "PROBE_SECONDS", 0.3)
    monkeypatch.setattr(socketserver.BaseServer, "handle_error", lambda *_: None)
    with ThreadingHTTPServer(("127.0.0.1", 0), Drip) as listener:
        listener.daemon_threads, listener.block_on_close = True, False
        threading.Thread(target=listener.serve_forever, daemon=True).start()

        def make(path, part, **settings):
            monkeypatch.setattr(Drip, "slow", (path, part))
            return role(kind="external", url=f"http://127.0.0.1:{listener.server_port}", **settings)

        yield make
        listener.shutdown()


@pytest.mark.parametrize("part", ["headers", "body"])
@pytest.mark.parametrize("path", ["/health", "/v1/models", "/v1/completions"])
def test_a_reply_that_drips_is_a_hang_within_the_time_of_one_answer(dripping, path, part):
    """R01: a timeout of the socket is one of each read, and a byte now and then holds a night for ever."""
    started = time.monotonic()
    found = roles.why_unready(dripping(path, part), "generate")
    assert found.cause is Cause.HANGS and str(found).endswith("it accepts a request and does not answer")
    assert time.monotonic() - started < 2


def test_the_pulse_of_a_dripping_server_stops(dripping, tmp_path):
    """R01"""
    health = supervise.HealthThread(dripping("/v1/completions", "body", hang_minutes=0.005), "generate", lambda: 0.0)
    while health.unhealthy is None:
        time.sleep(0.05)
    assert health.unhealthy.cause is Cause.HANGS


def test_a_reworded_sentence_changes_no_decision(dripping, tmp_path, monkeypatch):
    """Seam M5: a hang is noticed, and an external server is alive or not, by the cause and not by the text."""
    run_config = dripping("/v1/completions", "body", hang_minutes=0.005)
    real = readiness.why_unready

    def reworded(*arguments):
        found = real(*arguments)
        return found and readiness.Unready(found.cause, "other words")

    monkeypatch.setattr(readiness, "why_unready", reworded)
    health = supervise.HealthThread(run_config, "generate", lambda: 0.0)
    while health.unhealthy is None:
        time.sleep(0.05)
    assert health.unhealthy == readiness.Unready(Cause.HANGS, "other words")
    assert roles.status(run_config, "generate")["alive"] is True
    gone = config.load(CPU_CONFIG, [*run_config.origin.overrides, "servers.generate.url=http://127.0.0.1:15201"])
    assert roles.status(gone, "generate")["alive"] is False


def test_the_health_thread_goes_on_after_an_unforeseen_error(dripping, tmp_path, monkeypatch):
    """Seam H5: an error of the health check is logged, and a hang that follows is noticed."""
    run_config = dripping("/v1/completions", "body", hang_minutes=0.005)
    real, failures = roles.why_unready, [ValueError("first"), TypeError("second")]

    def failing(*arguments):
        if failures:
            raise failures.pop(0)
        return real(*arguments)

    monkeypatch.setattr(roles, "why_unready", failing)
    health = supervise.HealthThread(run_config, "generate", lambda: 0.0)
    while health.unhealthy is None:
        time.sleep(0.05)
    assert health.unhealthy.cause is Cause.HANGS and not failures


def test_status_has_an_exit_code_for_a_script(role, dripping, capsys):
    run_config = role()
    call = ["status", "generate", "--config", str(CPU_CONFIG)]
    for override in run_config.origin.overrides:
        call += ["--set", override]
    assert roles.main(call) == 3, "not running"
    roles.up(run_config, "generate")
    assert roles.main(call) == 0
    assert roles.main([*call, "--set", "target.served_name=other"]) == 4, "running, and would not serve this run"
    roles.down(run_config, "generate")
    assert roles.main([*call, "--set", "servers.generate.kind=external"]) == 3
    url = dripping("/health", "body").servers.generate.url
    assert roles.main([*call, "--set", f"servers.generate={{kind: external, url: '{url}'}}"]) == 4
    assert roles.main([*call, "--set", "run.nam=x"]) == 2
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(each["alive"], each["ready"]) for each in said] == [
        (False, False), (True, True), (True, False), (False, False), (True, False),
    ]  # fmt: skip


def test_a_boot_failure_ends_the_wait_at_once_with_the_end_of_the_log(role, caplog):
    """R01"""
    caplog.set_level("INFO")
    run_config = role("boot_failure")
    started = time.monotonic()
    with pytest.raises(ResumableError, match="died while starting: CUDA out of memory"):
        roles.up(run_config, "generate")
    assert time.monotonic() - started < 6
    assert "loading weights" in caplog.text


def test_a_healthy_server_with_a_hanging_engine_is_not_ready_and_is_not_left_behind(role, monkeypatch):
    """R01"""
    monkeypatch.setattr(readiness, "PROBE_SECONDS", 1)
    run_config = role("hang", start_minutes=0.1)
    with pytest.raises(ResumableError, match="not ready after 0.1 min: .* hangs"):
        roles.up(run_config, "generate")
    assert not roles.alive(run_config, "generate")


@pytest.mark.parametrize(
    ("fake", "override", "reason"),
    [
        ("no_token_ids", "run.seed=0", "no token ids"),
        ("", "target.served_name=other", "serves smollm2, not target.served_name other"),
        ("", "generate.max_tokens=2000", "max_model_len is 1024, this run needs 2001"),
    ],
)
def test_a_server_that_cannot_serve_this_run_is_refused(role, fake, override, reason):
    run_config = role(fake)
    command_server.start(run_config, "generate", roles.command(run_config, "generate"))
    changed = config.load(CPU_CONFIG, [*run_config.origin.overrides, override])
    while (found := roles.why_unready(changed, "generate")).cause is Cause.NO_ANSWER:
        time.sleep(0.1)
    assert found.cause is Cause.UNFIT and reason in str(found)


def test_only_starts_are_recorded_as_such(role):
    run_config = role()
    for _ in range(2):
        roles.up(run_config, "generate")
    [seconds] = boot_times.seconds_of(run_config)
    assert 0 < seconds <= 60
    failing = role("boot_failure")
    with pytest.raises(ResumableError):
        roles.up(failing, "generate")
    assert boot_times.seconds_of(failing) == [seconds]


def test_a_server_that_is_up_and_unfit_is_not_waited_for(role, monkeypatch):
    """A wrong served name was waited for until `start_minutes` were over, an hour by default."""
    run_config = role(start_minutes=60)
    roles.up(run_config, "generate")
    other = config.load(CPU_CONFIG, [*run_config.origin.overrides, "target.served_name=other"])
    monkeypatch.setattr(roles, "UNFIT_SECONDS", 0.5)
    with pytest.raises(ConfigError, match="serves smollm2, not target.served_name other; correct the server or the"):
        roles.wait(other, "generate")


@pytest.mark.parametrize("fake", ["stubborn", "orphan", "stubborn orphan"])
def test_down_ends_every_process_of_the_server(role, fake):
    run_config = role(fake)
    roles.up(run_config, "generate")
    leader = session(run_config)
    assert len(process.members(leader)) == (2 if "orphan" in fake else 1)
    roles.down(run_config, "generate")
    assert not process.members(leader)


def test_what_outlived_a_killed_server_is_ended_before_the_next_starts(role):
    """R02: its workers hold the GPUs, and its record, the only one that knows of them, is written over."""
    run_config = role(fake="orphan")
    roles.up(run_config, "generate")
    leader = session(run_config)
    os.kill(leader, signal.SIGKILL)
    while process.start_time(leader):
        time.sleep(0.01)
    assert process.members(leader)
    roles.up(run_config, "generate")
    assert not process.members(leader) and session(run_config) != leader


def test_a_record_from_before_a_reboot_is_no_process_of_ours(role, tmp_path):
    run_config = role()
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    path = run_config.run_dir / "servers/generate.json"
    path.parent.mkdir(parents=True)
    record = {"pid": bystander.pid, "birth": "1", "boot": process.boot_id(), "home": files.inode_id(path.parent)}
    path.write_text(json.dumps(record | {"ready": True, "command": [], "log": "log"}))
    assert not roles.alive(run_config, "generate")
    roles.down(run_config, "generate")
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


def test_a_copied_run_has_no_server_and_leaves_the_originals_alone_and_a_moved_one_keeps_its_own(role):
    run_config = role()
    roles.up(run_config, "generate")
    leader = session(run_config)
    copy = config.load(CPU_CONFIG, [*run_config.origin.overrides, "run.name=copy"])
    shutil.copytree(run_config.run_dir, copy.run_dir)
    assert not roles.alive(copy, "generate")
    roles.down(copy, "generate")
    assert process.members(leader) and roles.why_unready(run_config, "generate") is None
    moved = config.load(CPU_CONFIG, [*run_config.origin.overrides, "run.name=moved"])
    run_config.run_dir.rename(moved.run_dir)
    assert roles.alive(moved, "generate")
    roles.down(moved, "generate")
    assert not process.members(leader)


@pytest.mark.parametrize("fake", ["slow stubborn", "hang stubborn"])
def test_a_server_that_was_never_ready_or_hangs_is_not_given_the_time_of_one_with_work_to_finish(
    role, monkeypatch, fake
):
    monkeypatch.setattr(command_server, "QUICK_SECONDS", 0.5)
    run_config = role(fake, stop_seconds=300)
    command_server.start(run_config, "generate", roles.command(run_config, "generate"))
    time.sleep(0.3)
    started = time.monotonic()
    roles.down(run_config, "generate", hangs="hang" in fake)
    assert time.monotonic() - started < 5 and not roles.alive(run_config, "generate")


def test_a_taken_port_is_reported_with_its_holder_before_anything_is_started(role, tmp_path):
    first = role()
    roles.up(first, "generate")
    second = role(url=first.servers.generate.url)
    second = config.load(CPU_CONFIG, [*second.origin.overrides, "run.name=other"])
    with pytest.raises(ConfigError, match="cannot listen at .* in use"):
        roles.up(second, "generate")
    url = first.servers.generate.url
    found = str(roles.why_unready(second, "generate"))
    pid = session(first)
    owner, other_port = os.getpid(), "--set servers.generate.url=http://127.0.0.1:"
    known = f"process {pid}, the server generate of the run smollm2_cpu, which process {owner} ("
    assert found.startswith(f"not running; at {url} is a server of smollm2: {known}")
    assert re.search(rf"\) uses; wait until it has ended, or take another port: {other_port}\d+$", found)
    assert roles.status(second, "generate")["alive"] is False
    elsewhere = config.load(CPU_CONFIG, [*second.origin.overrides, f"run.dir={tmp_path / 'elsewhere'}"])
    assert known in (found := str(roles.why_unready(elsewhere, "generate"))) and "kill" not in found


def test_a_caller_whose_flags_name_the_port_is_no_server_at_it(role):
    """A script that starts the pipeline with `--port` and a path that contains vllm was taken for a server."""
    run_config = role()
    port = run_config.servers.generate.url.rpartition(":")[2]
    ask = "import sys; from drafter import config; from drafter.serve import address; "
    ask += "print(address.fault(config.load(sys.argv[1], sys.argv[2:]), 'generate'))"
    line = [sys.executable, "-c", ask, CPU_CONFIG, *run_config.origin.overrides]
    wrapper = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[4:]).returncode)"
    done = subprocess.run(
        [sys.executable, "-c", wrapper, "/opt/vllm/start.py", "--port", port, *map(str, line)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "None\n"


def test_only_an_unused_server_of_ours_is_proposed_to_be_ended(role, tmp_path):
    """The advice for another run's working server was `down`, and for any other process `kill`."""
    first = role()
    leader = serving_elsewhere(first)
    assert leader.stdout.readline() == "serving\n"
    pid, record = session(first), server_record.record_path(first, "generate")
    second = config.load(CPU_CONFIG, [*first.origin.overrides, "run.name=other"])
    try:
        said = address.fault(second, "generate")
        assert f"process {pid}, " in said and f"which process {leader.pid} (" in said
        assert "uses; wait until it has ended, or take another port: --set servers.generate.url=" in said
        assert "down" not in said.partition("; wait")[2] and "kill" not in said
    finally:
        leader.kill()
        leader.communicate()
    with locks.locked(first.run_dir / "01b_synthetic"):
        said = address.fault(second, "generate")
        assert "which is running" in said and "drafter.serve down" not in said
    config_file = first.run_dir / "01b_synthetic/config.yaml"
    config_file.write_text(first.dump())
    said = address.fault(second, "generate")
    end = f"python -m drafter.serve down generate --config {config_file}"
    assert "which no process uses now; take another port: --set servers.generate.url=" in said
    assert said.endswith(f", or end it with `{end}`")
    kept = record.read_text()
    record.unlink()
    said = address.fault(second, "generate")
    assert said.endswith(f"an orphaned server of this project; `kill {pid}` ends it")
    record.write_text(kept)
    assert roles.main(end.split()[3:]) == 0 and not process.members(pid)
    assert address.fault(second, "generate") is None


def test_a_stage_that_looks_for_its_server_at_another_address_is_given_the_right_one(role, caplog):
    """It was told to bring the server up, which stopped the healthy one at the other address."""
    up = role()
    roles.up(up, "generate")
    url, port = up.servers.generate.url, free_port()
    by_hand = config.load(CPU_CONFIG, [*up.origin.overrides, f"servers.generate.url=http://127.0.0.1:{port}"])
    with pytest.raises(ConfigError) as error:
        roles.require_ready(by_hand, "generate")
    said = f"this run's server generate is at {url}: give this command --set servers.generate.url={url} ("
    assert str(error.value).startswith(f"server generate: {said}") and "bring it up" not in str(error.value)
    there = config.load(CPU_CONFIG, [*by_hand.origin.overrides, f"servers.generate.url={url}"])
    assert roles.why_unready(there, "generate") is None
    with caplog.at_level("INFO"):
        roles.up(by_hand, "generate")
    moved = f"server generate of this run is at {url} with other arguments, and no process uses it: restarting it"
    assert moved in caplog.text and f"restarting it at http://127.0.0.1:{port}" in caplog.text


def test_a_stop_logs_how_long_it_may_take_and_how_long_it_took(role, caplog):
    """`killed after 300 s` was said of every server that stopped at once."""
    run_config = role(stop_seconds=300)
    roles.up(run_config, "generate")
    pid = session(run_config)
    with caplog.at_level("INFO"):
        roles.down(run_config, "generate")
    said = [record.message for record in caplog.records if "stop" in record.message]
    assert said[0] == f"server generate: stopping process {pid} (at most 300 s)"
    assert re.fullmatch(r"server generate: stopped after \d+\.\d s", said[1]) and len(said) == 2


def started_by_hand(run_config) -> subprocess.Popen:
    """A server of the role's own command line that no run has recorded."""
    line = roles.command(run_config, "generate")
    return subprocess.Popen(line, env=vllm_command.environment(run_config.servers.generate), start_new_session=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_a_server_that_boots_and_no_run_has_recorded_is_named_with_what_to_do(role, tmp_path, host):
    """Seam K1: it has bound its port and does not listen yet, which a trial with SO_REUSEADDR does not see."""
    mark = tmp_path / "mark"
    run_config = role(f"mark={mark} slow", url=f"http://{host}:{free_port()}")
    orphan = started_by_hand(run_config)
    try:
        while not mark.exists():
            time.sleep(0.01)
        with pytest.raises(
            ConfigError, match=f"cannot listen at .* in use.* held by process {orphan.pid} "
        ) as caught:
            roles.up(run_config, "generate")
        advice = "which no run here has recorded; wait until it has ended, or take another port: --set servers."
        assert advice in str(caught.value) and "kill" not in str(caught.value)
        assert str(caught.value) in list(preflight.ports(run_config))
        assert advice in str(roles.why_unready(run_config, "generate"))
        assert orphan.poll() is None
    finally:
        orphan.kill()
        orphan.wait()
    assert not list(preflight.ports(run_config))


def test_a_server_listens_and_is_asked_at_the_ipv6_loopback(role):
    """Seam B18: port check, --host, readiness and client."""
    run_config = role(url=f"http://[::1]:{free_port()}")
    line = roles.command(run_config, "generate")
    assert line[line.index("--host") + 1] == "::1"
    assert not list(preflight.ports(run_config))
    roles.up(run_config, "generate")

    async def listed() -> dict:
        async with client.Client(run_config.servers.generate, concurrency=1, outage_minutes=0.1) as one:
            return await one.get("/v1/models", 5)

    assert asyncio.run(listed())["data"][0]["id"] == "smollm2"
    assert f"process {session(run_config)}, " in address.fault(run_config, "generate")


def test_no_proxy_of_the_environment_is_used_by_the_health_check(role, hostile):  # noqa: F811
    """Seam B01"""
    run_config = role()
    roles.up(run_config, "generate")
    assert roles.why_unready(run_config, "generate") is None


def test_a_server_in_a_container_has_ports_of_its_own(role, tmp_path):
    """Seam K1: the command line of one that boots there is no reason to refuse the address here."""
    if os.getuid() or not shutil.which("unshare"):
        pytest.skip("needs root and unshare")
    mark = tmp_path / "mark"
    run_config = role(f"mark={mark} slow")
    line = ["unshare", "-n", *roles.command(run_config, "generate")]
    other = subprocess.Popen(line, env=vllm_command.environment(run_config.servers.generate), start_new_session=True)
    try:
        while not mark.exists():
            assert other.poll() is None
            time.sleep(0.01)
        assert address.fault(run_config, "generate") is None
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize("kind", BROKEN_REPLIES)
def test_a_malformed_reply_is_a_reason_and_never_an_error_of_the_health_check(role, kind):
    """Seam H5"""

    class Broken(FakeServer):
        def _reply(self, call):
            return BROKEN_REPLIES[kind]

    with Broken() as listener:
        found = roles.why_unready(role(kind="external", url=listener.url), "generate")
    assert found.cause in (Cause.ERROR, Cause.NO_ANSWER)


def test_another_program_that_listens_at_the_address_is_named(role):
    """Seam K1"""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        run_config = role(url=f"http://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(
            ConfigError, match=rf"in use\): it is held by process {os.getpid()} \({re.escape(sys.executable)} "
        ):
            roles.up(run_config, "generate")


def test_no_secret_is_in_a_record_a_message_or_a_log(role, tmp_path, monkeypatch, caplog, capsys):
    """Seam M12: the server's key comes by its environment; another program's command line is shown without it."""
    caplog.set_level("INFO")
    monkeypatch.setenv("TEST_KEY", "geheim-1")
    monkeypatch.setenv("MY_TOKEN", "geheim-2")
    run_config = role(api_key_env="TEST_KEY")
    roles.up(run_config, "generate")
    seen = (run_config.run_dir / "servers/generate.json").read_text() + caplog.text
    seen += Path(f"/proc/{session(run_config)}/cmdline").read_text()
    roles.down(run_config, "generate")
    line = [*roles.command(run_config, "generate"), "--api-key", "geheim-3", "--hf-token=geheim-4"]
    other = subprocess.Popen(line, env=vllm_command.environment(run_config.servers.generate), start_new_session=True)
    try:
        monkeypatch.setattr(address, "LONGEST_LINE", 10_000)
        while not (fault := address.fault(run_config, "generate")):
            time.sleep(0.01)
        assert f"process {other.pid} (" in fault and "--api-key ... --hf-token=...)" in fault
    finally:
        other.kill()
        other.wait()
    assert "geheim" not in seen + fault + "".join(capsys.readouterr())


@pytest.mark.parametrize("made", ["servers", "servers/.lock/x", "servers/generate.log/x", "servers/generate.json/x"])
@pytest.mark.parametrize("verb", ["up", "status", "down"])
def test_what_is_in_the_place_of_a_servers_files_is_one_line(role, capsys, made, verb):
    """Seam B19: left by an older installation, or by another user; one clear line and no traceback."""
    run_config = role()
    place = run_config.run_dir / made
    place.parent.mkdir(parents=True)
    place.touch()
    call = [verb, "generate", "--config", str(CPU_CONFIG)]
    for override in run_config.origin.overrides:
        call += ["--set", override]
    code = roles.main(call)
    said = capsys.readouterr().err.strip().splitlines()
    if code not in (0, 3):
        assert code == 2 and len(said) == 1 and str(run_config.run_dir / "servers") in said[0]
    assert verb != "up" or code == 2 or made == "servers/.lock/x"
    shutil.rmtree(run_config.run_dir)


def test_records_that_this_user_may_not_read_stop_nothing(role, tmp_path):
    """Seam B19: those of another user's run beside ours."""
    run_config = role()
    (tmp_path / "other/servers/generate.json").mkdir(parents=True)
    assert address.fault(run_config, "generate") is None


HOLD = """
import sys, time
from drafter import config; from drafter.serve import roles as server
run_config = config.load(sys.argv[1], sys.argv[2:])
with server.serving(run_config, "generate"):
    print("serving", flush=True)
    sys.stdin.readline()
"""


def serving_elsewhere(run_config) -> subprocess.Popen:
    """Another process that serves the role, until its input ends."""
    line = [sys.executable, "-c", HOLD, str(CPU_CONFIG), *run_config.origin.overrides]
    return subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=config.ROOT)


@pytest.mark.parametrize("same", [True, False])
def test_a_server_that_another_process_of_the_run_uses_is_neither_replaced_nor_shared_nor_stopped(role, same):
    """Seam K1: two 06 on one run."""
    run_config = role()
    other = serving_elsewhere(run_config)
    try:
        assert other.stdout.readline() == "serving\n"
        leader = session(run_config)
        drafter = {} if same else {"drafter": CPU_CONFIG.parent}
        refused = f"in use by process {other.pid} \\(.*; wait until it has ended, or stop it"
        with pytest.raises(ConfigError, match=refused), roles.serving(run_config, "generate", **drafter):
            pass
        assert process.start_time(leader) and roles.why_unready(run_config, "generate") is None
    finally:
        other.communicate("\n", timeout=60)
    assert other.returncode == 0 and not process.members(leader)
    roles.up(run_config, "generate")


def test_what_a_killed_process_served_is_taken_over(role):
    """Seam K1: its record names the server, and nobody uses it any more."""
    run_config = role()
    other = serving_elsewhere(run_config)
    assert other.stdout.readline() == "serving\n"
    leader = session(run_config)
    other.kill()
    other.communicate()
    with roles.serving(run_config, "generate"):
        assert session(run_config) == leader
    assert not process.members(leader)


def test_processes_that_start_a_role_at_once_start_one_server(role):
    """Seam K1: the record is written before another process looks."""
    run_config = role()
    others = [serving_elsewhere(run_config) for _ in range(4)]
    answers = [other.communicate("\n", timeout=100)[0] for other in others]
    assert "serving\n" in answers
    assert address.holder(run_config, "generate") is None, "an orphan is left"


def test_a_start_waits_for_no_lock_and_says_so(role, monkeypatch):
    """Seam K1"""
    monkeypatch.setattr(command_server, "LOCK_SECONDS", 0.1)
    run_config = role()
    with (
        locks.locked(run_config.run_dir / "servers"),
        pytest.raises(ConfigError, match="another process is starting or stopping a server of the run smollm2_cpu"),
    ):
        roles.up(run_config, "generate")


def test_a_missing_model_is_reported_before_anything_is_started(role):
    run_config = config.load(CPU_CONFIG, [*role().origin.overrides, "target.model=/nowhere", "run.name=other"])
    with pytest.raises(ConfigError, match="no model at /nowhere"):
        roles.up(run_config, "generate")
    assert not run_config.run_dir.exists()


def test_a_drafter_needs_a_role_that_is_ours_to_start(role, tmp_path):
    with (
        pytest.raises(ConfigError, match="must be a `command`"),
        roles.serving(role(kind="external"), "generate", drafter=tmp_path),
    ):
        pass


def test_arguments_and_environment_reach_vllm_as_it_spells_them(role):
    args = {"max-model-len": 64, "enforce-eager": True, "enable-prefix-caching": False, "limit": {"image": 0}}
    line = roles.command(role(args=args), "generate")
    assert line[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert line[-6:] == [
        "--max-model-len",
        "64",
        "--enforce-eager",
        "--no-enable-prefix-caching",
        "--limit",
        '{"image": 0}',
    ]


def test_an_interpreter_that_does_not_run_is_one_line(role, tmp_path):
    notes = tmp_path / "notes"
    notes.write_text("no program")
    notes.chmod(0o755)
    for python, why in (("/nowhere/python", "No such file or directory"), (str(notes), "Exec format error")):
        with pytest.raises(ConfigError) as caught:
            roles.up(role(python=python), "generate")
        assert str(caught.value) == f"servers.generate.python: {python} does not run ({why})"


def test_a_server_runs_on_the_gpus_it_is_waited_for_on(role):
    seen = vllm_command.environment(role(gpus=[1, 3]).servers.generate)
    assert (seen["CUDA_VISIBLE_DEVICES"], seen["CUDA_DEVICE_ORDER"]) == ("1,3", "PCI_BUS_ID")
    own = vllm_command.environment(role(gpus=[1], env={"CUDA_VISIBLE_DEVICES": "GPU-58ca22cc"}).servers.generate)
    assert own["CUDA_VISIBLE_DEVICES"] == "GPU-58ca22cc", "the config's own words come last"


def test_the_extract_role_captures_the_targets_layers_and_their_neighbours_when_asked(tmp_path):
    def captured(*overrides):
        line = roles.command(config.load(CPU_CONFIG, [f"run.dir={tmp_path}", *overrides]), "extract")
        speculative, transfer = (
            json.loads(line[line.index(f"--{name}-config") + 1]) for name in ("speculative", "kv-transfer")
        )
        extra = transfer["kv_connector_extra_config"]
        assert extra["shared_storage_path"] == str(tmp_path / "smollm2_cpu/02_hidden_states")
        return speculative["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"]

    assert captured() == [2, 15, 27, 30]
    assert captured("extract.neighbour_ids=true") == [2, 3, 15, 16, 27, 28, 30]


# systemd


def test_a_unit_is_started_waited_for_and_stopped(role, machine):
    run_config = role(kind="systemd", unit="vllm-test")
    machine.unit(run_config)
    roles.up(run_config, "generate")
    roles.require_ready(run_config, "generate")
    roles.down(run_config, "generate")
    assert not roles.alive(run_config, "generate")
    assert [call for call in machine.calls() if not call.startswith("show")][:3] == [
        "reset-failed vllm-test",
        "start vllm-test",
        "stop vllm-test",
    ]


def test_a_unit_that_fails_to_boot_shows_its_journal(role, machine, caplog):
    """R01"""
    caplog.set_level("INFO")
    run_config = role(kind="systemd", unit="vllm-test")
    machine.unit(run_config, "boot_failure")
    with pytest.raises(ResumableError, match="CUDA out of memory"):
        roles.up(run_config, "generate")
    assert "loading weights" in caplog.text


def test_a_unit_that_systemd_restarts_again_and_again_is_given_up(role, machine, monkeypatch):
    """R01"""
    monkeypatch.setattr(readiness, "PROBE_SECONDS", 1)
    run_config = role(kind="systemd", unit="vllm-test", start_minutes=1)
    machine.unit(run_config, "hang")
    died = "python[7]: CUDA out of memory\nsystemd[1]: vllm-test.service: Main process exited\npython[8]: loading\n"
    (machine.units / "vllm-test.log").write_text("".join(f"Nov 30 02:13:04 {line}\n" for line in died.splitlines()))
    restarts = machine.units / "vllm-test.restarts"
    restarts.write_text("7")  # of weeks gone by

    def restart_twice_during_the_wait():
        while sum(call.startswith("show") for call in machine.calls()) < 3:  # the second asks how often it was before
            time.sleep(0.05)
        restarts.write_text("9")

    (machine.units / "calls.log").touch()
    threading.Thread(target=restart_twice_during_the_wait, daemon=True).start()
    with pytest.raises(ResumableError, match="died while starting: .* CUDA out of memory"):  # not after start_minutes
        roles.up(run_config, "generate")


def test_a_units_folder_is_linked_to_the_run_and_another_run_restarts_it(role, machine, tmp_path):
    link = tmp_path / "extract"
    first = role(kind="systemd", unit="vllm-test", link=str(link))
    machine.unit(first)
    roles.up(first, "generate")
    assert link.resolve() == (tmp_path / "smollm2_cpu/02_hidden_states").resolve()
    other = config.load(CPU_CONFIG, [*first.origin.overrides, "run.name=other"])
    assert "writes to another run's folder" in str(roles.why_unready(other, "generate"))
    roles.up(other, "generate")
    assert link.resolve() == (tmp_path / "other/02_hidden_states").resolve()
    changes = [call.split()[0] for call in machine.calls() if call.startswith("st")]
    assert changes == ["start", "stop", "start"]


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        ("exec sleep 60", "its journal cannot be read: .*journalctl .* has not ended after 0.3 s"),
        (r"printf 'CUDA \377 error'", "CUDA � error"),
        (None, "its journal cannot be read: .*journalctl: No such file or directory"),
    ],
)
def test_a_journal_that_cannot_be_read_does_not_hide_that_the_server_died(
    role, machine, tmp_path, monkeypatch, body, shown
):
    """Seam M5: it is on a big disk and slow, holds bytes that are no text, or there is no journalctl."""
    monkeypatch.setattr(systemd, "JOURNAL_SECONDS", 0.3)
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "systemctl").symlink_to(SCRIPTS / "systemctl")
    if body:
        (programs / "journalctl").write_text(f"#!/bin/sh\n{body}\n")
        (programs / "journalctl").chmod(0o755)
    run_config = role(kind="systemd", unit="vllm-test", systemctl=[str(programs / "systemctl")])
    machine.unit(run_config, "boot_failure")
    with pytest.raises(ResumableError, match=f"died while starting: {shown}"):
        roles.up(run_config, "generate")


def test_nothing_that_is_asked_of_systemd_opens_a_pager(role, machine, tmp_path):
    """Seam M10: a pager runs with the rights of the prefix, root's, and can start a shell."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("systemctl", "journalctl"):
        (programs / name).write_text(
            f'#!/bin/sh\necho "$SYSTEMD_PAGER|$SYSTEMD_PAGERSECURE|$*" >> {tmp_path}/asked\n'
        )
        (programs / name).chmod(0o755)
    own = role(kind="systemd", unit="vllm-test", systemctl=[str(programs / "systemctl")]).servers.generate
    for ask in (systemd.is_active, systemd.restarts, systemd.start, systemd.stop, systemd.tail):
        ask(own)
    for line in (tmp_path / "asked").read_text().splitlines():
        pager, secure, words = line.split("|")
        assert (pager, secure) == ("", "1")
        assert words.split()[0] in ("start", "stop", "reset-failed") or "--no-pager" in words.split()
    assert all("--no-pager" in line for line in systemd.commands(own) if "show" in line or "journalctl" in line[0])


ELSEWHERE, NO_RIGHT = (
    "kind to command, or run this on the unit's host",
    "needs permission for it: .*docs/operations.md",
)


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("sudo: a password is required", NO_RIGHT),
        ("sudo: sorry, user you is not allowed to execute '/usr/bin/systemctl' as root on box", NO_RIGHT),
        ("Failed to stop vllm-test.service: Interactive authentication required.", NO_RIGHT),
        ("System has not been booted with systemd as init system (PID 1). Can't operate.\nFailed to", ELSEWHERE),
        ("Failed to connect to bus: No such file or directory", ELSEWHERE),
        (None, "no systemd unit vllm-test; install"),
    ],
)
def test_what_the_user_must_change_about_systemd_is_one_line(role, machine, said, remedy):
    if said:
        (machine.units / "refuse").write_text(said)
    with pytest.raises(ConfigError, match=f"^[^\n]*{remedy}[^\n]*$"):
        roles.up(role(kind="systemd", unit="vllm-test"), "generate")


@pytest.fixture
def manager(tmp_path, monkeypatch):
    """A real systemd user manager, in a mount namespace that makes it believe the machine was booted with systemd."""
    program = Path("/lib/systemd/systemd")
    if os.getuid() or not program.exists() or not shutil.which("unshare"):
        pytest.skip("needs root, systemd and unshare (Debian: apt install systemd)")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    pretend = (
        f"mount -t tmpfs none /run && mkdir -p /run/systemd/system && exec {program} --user --log-target=console"
    )
    with open(tmp_path / "log", "w") as output:
        started = subprocess.Popen(["unshare", "-m", "sh", "-c", pretend], stdout=output, stderr=output)
    try:
        for _ in range(100):
            if not subprocess.run(["systemctl", "--user", "show", "-p", "Version"], capture_output=True).returncode:
                break
            time.sleep(0.05)
        else:
            pytest.skip(f"systemd does not run here: {(tmp_path / 'log').read_text()[-200:]}")
        yield tmp_path / "systemd/user"
    finally:
        started.terminate()
        started.wait(10)


def test_real_systemd_starts_restarts_and_stops_a_unit(role, manager):
    """R01, R02: what the scripted systemctl of the other tests answers is what systemd answers."""
    run_config = role(kind="systemd", unit="vllm-test", systemctl=["systemctl", "--user"])
    with pytest.raises(ConfigError, match="no systemd unit vllm-test"):
        roles.up(run_config, "generate")
    line = f"{SCRIPTS / 'fake_vllm'} -m vllm --served-model-name smollm2 --max-model-len 1024"
    line += f" --host 127.0.0.1 --port {run_config.servers.generate.url.rpartition(':')[2]}"
    service = "[Unit]\nStartLimitIntervalSec=7200\nStartLimitBurst=2\n"
    service += f"[Service]\nExecStart={sys.executable} {line}\nRestart=on-failure\nRestartSec=0.1\nUMask=0002\n"
    manager.mkdir(parents=True, exist_ok=True)
    (manager / "vllm-test.service").write_text(service)
    ask = run_config.servers.generate
    systemd.systemctl(ask, "daemon-reload")
    roles.up(run_config, "generate")
    assert systemd.properties(ask)["UMask"] == "0002" and systemd.restarts(ask) == 0
    assert not list(preflight.units(run_config)), "an active unit is asked to start, which changes nothing"
    main = int(systemd.systemctl(ask, "show", "-p", "MainPID", "--value", "vllm-test"))
    os.kill(main, 9)
    while systemd.restarts(ask) == 0:
        time.sleep(0.05)
    roles.wait(run_config, "generate")
    roles.down(run_config, "generate")
    assert not roles.alive(run_config, "generate") and process.start_time(main) is None
    assert not list(preflight.units(run_config))
    roles.up(run_config, "generate")  # beyond the start limit
    roles.down(run_config, "generate")


def test_real_systemd_keeps_a_start_waiting_for_what_conflicts_and_it_counts_as_alive(role, manager):
    """R02: the two units share the GPUs, and one that stops takes its time."""
    run_config = role(kind="systemd", unit="vllm-second", systemctl=["systemctl", "--user"])
    ask = run_config.servers.generate
    manager.mkdir(parents=True, exist_ok=True)
    slow = "[Service]\nExecStart=sleep 60\nExecStop=sleep 1\n"
    (manager / "vllm-first.service").write_text(slow)
    (manager / "vllm-second.service").write_text(
        f"[Unit]\nConflicts=vllm-first.service\nAfter=vllm-first.service\n{slow}"
    )
    systemd.systemctl(ask, "daemon-reload")
    systemd.systemctl(ask, "start", "vllm-first")
    systemd.start(ask)
    assert systemd.properties(ask)["ActiveState"] == "inactive" and systemd.is_active(ask)
    while systemd.properties(ask)["ActiveState"] == "inactive":
        assert systemd.is_active(ask)
    assert systemd.is_active(ask)


# GPU memory


def test_a_server_is_not_ready_before_the_gpus_hold_the_model(role, machine):
    run_config = role(gpus=[0])
    command_server.start(run_config, "generate", roles.command(run_config, "generate"))
    while (found := roles.why_unready(run_config, "generate")).cause is Cause.NO_ANSWER:
        time.sleep(0.1)
    assert found.cause is Cause.LOADING and "GPU 0 does not hold its 0." in str(found)
    machine.memory(300)
    assert roles.why_unready(run_config, "generate") is None


def test_memory_that_stays_after_down_is_reported_with_its_processes(role, machine):
    run_config = role(gpus=[0])
    machine.memory(80_000, "4242, VLLM::Worker_TP0, 79000\n")
    with pytest.raises(ResumableError, match=r"GPU 0: 83.89 GB\), held by process 4242 VLLM::Worker_TP0"):
        roles.down(run_config, "generate")
    machine.memory(500)


@pytest.mark.parametrize(
    ("alive", "ready", "words"),
    [(True, True, "ready"), (True, False, "running, but not ready (loading)"), (False, False, "not running")],
)
def test_a_terminal_reads_the_state_of_a_server_in_words(alive, ready, words):
    found = {"role": "generate", "url": "http://here:1", "alive": alive, "ready": ready}
    found |= {} if ready else {"missing": "loading"}
    assert roles.in_words(found) == f"server generate (http://here:1): {words}"
