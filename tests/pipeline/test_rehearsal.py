"""The rehearsal: the night on the target's first layers, over scripted stages and servers and on real vLLM."""
# ruff: noqa: F811 - a fixture of another module is an argument

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

from drafter import config, process
from drafter.pipeline import plan, rehearsal_record
from drafter.serve import unit_command, unit_file
from tests.conftest import CPU_CONFIG, free_port
from tests.pipeline.test_run import SCRIPTS, STAGES, Night, night, wait_for  # noqa: F401 - a fixture among them


def folder_of(night: Night):
    return night.run_dir.with_name("smollm2_cpu-rehearsal")


def left_in(night: Night) -> list[str]:
    """Everything below the run's folder but what runs share."""
    runs = night.folder / "runs"
    return sorted(str(path.relative_to(runs)) for path in runs.rglob("*") if path.parent != runs or path.is_dir())


def pieces(page: str) -> dict[str, str]:
    """Name -> passed, failed or not covered."""
    found = {}
    for line in page.splitlines()[1:]:
        for status in ("passed", "failed", "not covered"):
            name, found_status, _ = line.partition(f" {status} ")
            if line.startswith("  ") and found_status:
                found[name.strip()] = status
    return found


def unit_of_the_team(night: Night, monkeypatch, active: bool = True) -> None:
    """The role `generate` is a unit whose file is where systemd looks."""
    files = night.folder / "unit files"
    files.mkdir()
    service = f"[Service]\nUser=root\nEnvironment=FAKE= TEAM=yes\nExecStart={SCRIPTS / 'fake_vllm'} -m vllm \\\n"
    (files / "vllm-team.service").write_text(f"{service}  --served-model-name other --port 1 --max-model-len 1024\n")
    monkeypatch.setenv("SYSTEMD_UNIT_PATH", str(files))
    night.production(active)


ALL = ["target", "server generate", "01b_synthetic", "server extract", "02_hidden_states", "04_train", "05_export"]


def test_every_stage_runs_on_the_first_layers_and_a_page_and_manifests_stay(night):
    code, page, err = night.run("--rehearse")
    assert code == 0, err
    assert pieces(page) == dict.fromkeys([*ALL, "06_acceptance"], "passed") | {"server evaluate": "not covered"}
    assert "4 of 30 layers" in page and "not covered: memory of all 30 layers" in page
    kept = folder_of(night)
    assert (kept / "rehearsal.txt").read_text() == page
    names = {path.name for path in kept.rglob("*") if path.is_file() and path.suffix != ".log"}
    assert names == {"rehearsal.txt", "manifest.json", "config.yaml"}
    assert not night.run_dir.exists() and night.leftovers() == []
    asked = config.load(kept / "04_train/config.yaml")
    assert (asked.target.layer_ids, asked.train.max_steps, asked.run.rehearsal) == ((1, 2, 3, 4), 2, True)
    assert asked.prompts[0].count == 10 and asked.acceptance.held_out == 2
    assert err.count("04_train.py --config") == 2 and err.count("--set train.max_steps=1") == 1


def test_what_stops_the_rehearsal_is_said_as_the_night_would_say_it(night):
    code, page, err = night.run("--rehearse", _02_hidden_states="fail")
    assert code == 1, err
    assert "  02_hidden_states  failed       the states are wrong\n" in page and page.splitlines()[0].endswith(
        "FAILED"
    )
    after = ["04_train", "05_export", "06_acceptance"]
    assert pieces(page) == dict.fromkeys(ALL[:4], "passed") | {ALL[4]: "failed"} | dict.fromkeys(after, "not covered")
    assert (folder_of(night) / "logs/02_hidden_states.log").exists(), "the line may name its log"
    assert not (folder_of(night) / "target").exists() and night.leftovers() == []


def test_a_server_that_does_not_start_is_a_failed_piece(night):
    night.server_fakes["extract"] = "boot_failure"
    code, page, err = night.run("--rehearse")
    assert code == 3, err
    assert "server extract    failed       server extract died while starting: CUDA out of memory" in page
    assert pieces(page)["02_hidden_states"] == "not covered" and pieces(page)["01b_synthetic"] == "passed"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing_and_production_is_back(night, monkeypatch, number):
    unit_of_the_team(night, monkeypatch)
    running = night.start("--rehearse", _01b_synthetic="forever")
    wait_for(folder_of(night) / "01b_synthetic/working")
    assert not night.production_active()
    running.send_signal(number)
    out, err = running.communicate(timeout=30)
    assert (running.returncode, out) == (128 + number, "") and "nothing is left of the rehearsal" in err, err
    assert left_in(night) == [] and night.leftovers() == [] and night.production_active()


def test_the_units_own_command_is_rehearsed_and_production_comes_back(night, monkeypatch):
    unit_of_the_team(night, monkeypatch)
    code, page, err = night.run("--rehearse")
    assert code == 0, err
    assert "the command of vllm-team as its user root" in page
    assert night.production_active() and night.leftovers() == []
    asked = config.load(folder_of(night) / "01b_synthetic/config.yaml").servers.generate
    assert (asked.kind, asked.unit, asked.args) == ("command", None, {"max-model-len": "1024"})


def test_production_that_a_killed_rehearsal_stopped_is_given_back_by_the_next(night, monkeypatch):
    unit_of_the_team(night, monkeypatch)
    running = night.start("--rehearse", _01b_synthetic="forever")
    wait_for(folder_of(night) / "01b_synthetic/working")
    running.kill()
    wait_for(folder_of(night) / "01b_synthetic/saved")
    running.communicate()
    assert not night.production_active()
    code, _, err = night.run("--rehearse")
    assert code == 0 and night.production_active(), err


def test_a_rehearsal_beside_a_working_night_is_refused_and_changes_nothing(night):
    running = night.start("--only", "05", _05_export="forever")
    wait_for(night.run_dir / "05_export/working")
    code, out, err = night.run("--rehearse")
    assert (code, out) == (
        2,
        "",
    ) and f"another process is working in {night.run_dir} (run_pipeline.sh, process" in err
    assert not folder_of(night).exists()
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=30)


def test_a_night_beside_a_working_rehearsal_is_refused(night):
    running = night.start("--rehearse", _01b_synthetic="forever")
    wait_for(folder_of(night) / "01b_synthetic/working")
    code, _, err = night.run("--only", "05")
    assert code == 2 and f"another process is working in {night.run_dir} (run_pipeline.sh --rehearse, process" in err
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=30)
    assert left_in(night) == []


@pytest.mark.vllm
@pytest.mark.timeout(1500)
def test_the_default_run_is_rehearsed_whole_on_real_vllm(tmp_path, model):
    line = ["./run_pipeline.sh", str(CPU_CONFIG), "--rehearse", "--set", f"run.dir={tmp_path}"]
    for role in ("generate", "extract", "evaluate"):
        line += ["--set", f"servers.{role}.url=http://127.0.0.1:{free_port()}"]
    env = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run(line, cwd=config.ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert pieces(done.stdout) == dict.fromkeys([*ALL, "server evaluate", "06_acceptance"], "passed")
    assert "4 of 30 layers" in done.stdout and "8 rows, all layers compared" in done.stdout


FULL = 'mount -t tmpfs -o size=64m none "$1" && shift && exec "$@"'


@pytest.mark.skipif(bool(os.getuid()) or not shutil.which("unshare"), reason="needs root and unshare")
def test_a_disk_without_room_for_the_copy_is_one_line(night):
    runs = night.folder / "runs"
    runs.mkdir()
    line = ["unshare", "-m", "sh", "-c", FULL, "sh", str(runs), sys.executable, str(SCRIPTS / "pipeline.py")]
    line += [str(CPU_CONFIG), "--rehearse", "--set", f"run.dir={runs}"]
    done = subprocess.run(line, capture_output=True, text=True, env=night.environment())
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 2 and "the rehearsal's copy of 4 layers takes" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rehearse", "--from", "04"], "--rehearse covers the whole run: leave out --from"),
        (["--rehearse", "--limit", "8"], "leave out --limit"),
        (["--rehearse", "--plan"], "not allowed with"),
        (["status", "--rehearse"], "leave out --rehearse"),
        (["--rehearse", "--set", "servers.extract.kind=external"], "servers.extract.kind: an external server has"),
        (["--rehearse", "--set", "servers.extract={kind: systemd, unit: none, url: 'http://a'}"], "no file of none"),
    ],
)
def test_what_cannot_be_rehearsed_is_said_in_one_line(night, arguments, said):
    code, out, err = night.run(*arguments)
    assert (code, len(err.splitlines()), out, said in err) == (2, 1, "", True), err
    assert left_in(night) == []


# The record of a rehearsal


def rehearsed(tmp_path, *overrides: str) -> config.Config:
    return config.load(CPU_CONFIG, [f"run.dir={tmp_path}", *overrides])


MEASURED = {"run": "x-rehearsal", "layers": 4, "start_seconds": 41.0, "train_start_seconds": 33.0}
MEASURED |= {"export_seconds": 12.0}


def test_a_config_counts_as_rehearsed_until_what_it_was_rehearsed_with_changes(tmp_path, model):
    run = rehearsed(tmp_path)
    assert "--rehearse" in rehearsal_record.advice(run)
    rehearsal_record.write(run, MEASURED)
    assert rehearsal_record.advice(run) is None
    for same in ("run.name=other", "train.lr=1.0e-4", "generate.max_tokens=80"):
        assert rehearsal_record.advice(rehearsed(tmp_path, same)) is None
    for other in ("servers.evaluate.args.seed=7", "train.processes=2", "target.layer_ids=[2, 15, 26, 30]"):
        assert rehearsal_record.advice(rehearsed(tmp_path, other))
    for broken in ("", "[]", "{}", json.dumps({rehearsal_record.key(run): {"layers": "four"}})):
        (tmp_path / rehearsal_record.NAME).write_text(broken)
        assert rehearsal_record.advice(run)


def test_the_plan_counts_with_what_was_rehearsed(tmp_path, model):
    run = rehearsed(tmp_path)
    before = plan.to_record(run)
    rehearsal_record.write(run, MEASURED)
    after = plan.to_record(run)
    typical = {name: after[name]["seconds"]["typical"] - before[name]["seconds"]["typical"] for name in STAGES}
    assert typical["01b_synthetic"] == pytest.approx(41 - 36), "a start takes no less than with fewer layers"
    assert typical["04_train"] == pytest.approx(33)
    assert after["05_export"]["seconds"]["typical"] == 12
    assert "at least the 41 s of x-rehearsal with 4 layers" in plan.show(run, None, None, None)


# Units


UNIT = """
[Service]
User=nobody
UMask=0027
WorkingDirectory=/tmp
Environment=GREETING=hello
Environment="TWO=a b"
EnvironmentFile=-/nowhere/env
ExecStart={python} -c 'import json, os, sys; \\
    seen = [sys.argv[1:], os.environ["GREETING"], os.getuid(), os.umask(0), os.getcwd(), os.environ["USER"]]; \\
    print(json.dumps(seen))' \\
    --model /data/model --port 8001 --max_num_seqs=32 --language-model-only --stop a b \\
    --speculative-config '{{"draft_model_config": {{"hf_config": {{"eagle_aux_hidden_state_layer_ids": [2, 30]}}}}}}'
"""


@pytest.mark.skipif(bool(os.getuid()), reason="needs root, who may become the unit's user")
def test_a_units_program_runs_in_its_environment_as_its_user_with_other_flags(tmp_path, monkeypatch):
    python = next(path for path in ("/usr/bin/python3", "/usr/local/bin/python3") if os.path.exists(path))
    (tmp_path / "x.service").write_text(UNIT.format(python=python))
    monkeypatch.setattr(unit_file, "UNIT_FOLDERS", (tmp_path,))
    args = unit_command.role_args(unit_file.read("x"))
    ids = {"draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [2, 30]}}}
    flags = {"max-num-seqs": "32", "language-model-only": True, "stop": ["a", "b"], "speculative-config": ids}
    assert args == flags
    line = [sys.executable, "-m", "drafter.serve.unit_command", "x", "-m", "vllm", "--model", "/shallow"]
    env = os.environ | process.import_path() | {"SYSTEMD_UNIT_PATH": str(tmp_path), "GREETING": "no", "MINE": "no"}
    done = subprocess.run(line, capture_output=True, text=True, env=env, cwd=config.ROOT)
    assert done.returncode == 0, done.stderr
    nobody = 65534
    assert json.loads(done.stdout) == [["--model", "/shallow"], "hello", nobody, 0o027, "/tmp", "nobody"]


def test_the_model_of_vllm_serve_is_given_where_that_takes_it(tmp_path, monkeypatch):
    script = tmp_path / "vllm"
    script.write_text('#!/bin/sh\necho "$@"\n')
    script.chmod(0o755)
    user = "root" if not os.getuid() else __import__("pwd").getpwuid(os.getuid()).pw_name
    (tmp_path / "x.service").write_text(f"[Service]\nUser={user}\nExecStart={script} serve /data/model --port 1\n")
    line = [
        sys.executable,
        "-m",
        "drafter.serve.unit_command",
        "x",
        "-m",
        "vllm",
        "--port",
        "7",
        "--model",
        "/shallow",
    ]
    env = os.environ | process.import_path() | {"SYSTEMD_UNIT_PATH": str(tmp_path)}
    done = subprocess.run(line, capture_output=True, text=True, env=env)
    assert done.stdout == "serve /shallow --port 7\n", done.stderr
