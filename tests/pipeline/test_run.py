"""The night: the real pipeline end to end on real vLLM, and its manners over scripted stages and servers."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from drafter import cli, config, files, locks, process
from drafter.errors import ConfigError
from drafter.pipeline import command, deadline, production_units, run_state, supervise
from drafter.pipeline import run as pipeline
from drafter.serve import roles as server
from drafter.train import checkpoint
from tests.conftest import CPU_CONFIG, free_port

SCRIPTS = Path(__file__).parents[1] / "scripts"
STAGES = list(config.STAGES)


class Night:
    """The pipeline over scripted stages; its servers are the scripted vLLM, alone or as a systemd unit."""

    def __init__(self, folder: Path):
        self.folder, self.fakes, self.units = folder, folder / "fakes", folder / "units"
        self.run_dir = folder / "runs/smollm2_cpu"
        self.fakes.mkdir()
        self.units.mkdir()
        for name in STAGES:
            (self.fakes / f"{name}.py").symlink_to(SCRIPTS / "fake_stage.py")
        self.ports = {role: free_port() for role in ("generate", "extract", "evaluate")}
        self.overrides = [f"run.dir={folder / 'runs'}"]
        self.server_fakes = {role: "" for role in self.ports}
        self.preflight = False

    def scripted(self, role: str, *starts: str) -> None:
        """The words of each start of a role's server, the last ones again and again."""
        path = self.folder / f"{role}.script"
        path.write_text("\n".join(starts))
        self.server_fakes[role] = f"script={path}"

    def production(self, active: bool) -> None:
        """The role `generate` is the team's unit."""
        line = [str(SCRIPTS / "fake_vllm"), "-m", "vllm", "--served-model-name", "smollm2", "--host", "127.0.0.1"]
        line += ["--max-model-len", "1024", "--port", str(self.ports["generate"])]
        unit = self.units / "vllm-team"
        unit.write_text(f"#!/bin/sh\nexec {' '.join(line)}\n")
        unit.chmod(0o755)
        self.overrides += ["servers.generate.kind=systemd", "servers.generate.unit=vllm-team"]
        if active:
            subprocess.run(["systemctl", "start", "vllm-team"], env=self.environment(), check=True)

    def production_active(self) -> bool:
        pid = self.units / "vllm-team.pid"
        return pid.exists() and process.start_time(int(pid.read_text())) is not None

    def environment(self, **stages: str) -> dict:
        fake_stage = " ".join(f"{name[1:]}={word}" for name, word in stages.items())
        path = f"{SCRIPTS}:{os.environ['PATH']}"
        return (
            os.environ
            | {"PATH": path, "UNITS": str(self.units), "GPU_STATE": str(self.folder)}
            | {
                "FAKES": str(self.fakes),
                "FAKE_STAGE": fake_stage,
                "PREFLIGHT": "yes" if self.preflight else "",
                "PYTHONPATH": f"{config.ROOT}",
            }
        )

    def start(self, *arguments: str, **stages: str) -> subprocess.Popen:
        line = [sys.executable, str(SCRIPTS / "pipeline.py"), str(CPU_CONFIG), *arguments]
        for role, port in self.ports.items():
            line += ["--set", f"servers.{role}.url=http://127.0.0.1:{port}"]
            line += ["--set", f"servers.{role}.python={SCRIPTS / 'fake_vllm'}"]
            line += ["--set", f"servers.{role}.stop_seconds=2", "--set", f"servers.{role}.start_minutes=0.2"]
            line += ["--set", f"servers.{role}.env={{FAKE: {self.server_fakes[role]!r}}}"]
        for override in self.overrides:
            line += ["--set", override]
        return subprocess.Popen(
            line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self.environment(**stages)
        )

    def run(self, *arguments: str, **stages: str) -> tuple[int, str, str]:
        started = self.start(*arguments, **stages)
        out, err = started.communicate(timeout=90)
        return started.returncode, out, err

    def done(self) -> list[str]:
        return [name for name in STAGES if (self.run_dir / name / "done").exists()]

    def state(self) -> dict:
        return json.loads(pipeline.state_path(config.load(CPU_CONFIG, self.overrides)).read_text())

    def leftovers(self) -> list[str]:
        """Processes of the scripted servers and stages that still live, the team's own aside."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                line = (entry / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
            ours = any(f"--port {port}" in line for port in self.ports.values()) or str(self.fakes) in line
            if ours and not (self.production_active() and f"--port {self.ports['generate']}" in line):
                found.append(line)
        return found


@pytest.fixture
def night(tmp_path, model):
    night = Night(tmp_path)
    (tmp_path / "memory").write_text("")
    yield night
    for pid_file in night.units.glob("*.pid"):
        process.end_session(int(pid_file.read_text()), 0)
    assert night.leftovers() == []


def test_the_untrained_warm_start_is_served_before_a_run_that_depends_on_it(tmp_path, model, monkeypatch):
    """X02: a drafter that the engine loads and accepts nothing from costs minutes, not the night."""
    called = []
    monkeypatch.setattr(pipeline.Pipeline, "dry_run", lambda _self, step, *verbs: {"pending": not called})
    monkeypatch.setattr(production_units.Machine, "bring_up_only", lambda _self, role: called.append(role))
    refused = (1, {"error": "accepts nothing", "smoke": None})
    monkeypatch.setattr(
        pipeline.Pipeline, "_watch", lambda _s, step, *verbs: called.append((step.number, *verbs)) or refused
    )

    def smoke(numbers: tuple[str, ...], *overrides: str) -> tuple[int, str]:
        run = config.load(CPU_CONFIG, [f"run.dir={tmp_path}", *overrides])
        night = pipeline.Pipeline(run, tuple(s for s in pipeline.STEPS if s.number in numbers), None, None)
        return night._smoke_test(), night.record.state["status"]

    warm, night = f"train.warm_start={tmp_path}", ("02", "04", "05", "06")
    for numbers, overrides in ((night, []), (("04",), [warm]), (night, [warm, "acceptance.smoke=false"])):
        assert smoke(numbers, *overrides) == (0, "running") and not called
    assert smoke(night, warm) == (1, "failed")
    assert called == [None, ("05", "--smoke")], "the machine is freed for it"
    assert smoke(night, warm) == (0, "running")


@pytest.mark.vllm
@pytest.mark.timeout(1500)
def test_prompts_become_a_measured_drafter_on_real_vllm_and_a_second_run_does_nothing(tmp_path, model):
    """The default config on 16 rows: every stage, three vLLM roles, acceptance from vLLM's own counters."""
    sets = [f"run.dir={tmp_path}", "generate.max_tokens=96", "train.epochs=4"]
    sets += [f"servers.{role}.url=http://127.0.0.1:{free_port()}" for role in ("generate", "extract", "evaluate")]

    def run(*arguments: str) -> subprocess.CompletedProcess:
        line = ["./run_pipeline.sh", *arguments, *(part for each in sets for part in ("--set", each))]
        env = os.environ | {"PYTHON": sys.executable}
        return subprocess.run(line, cwd=config.ROOT, env=env, capture_output=True, text=True)

    first = run("--limit", "16")
    assert first.returncode == 0, first.stderr[-4000:]
    summary = json.loads(first.stdout)
    assert summary["status"] == "complete" and list(summary["stages"]) == STAGES

    run_dir = tmp_path / "smollm2_cpu"
    manifests = {name: json.loads((run_dir / name / "manifest.json").read_text()) for name in STAGES}
    assert all(each["status"] == "complete" and each["pending"] == 0 for each in manifests.values())
    assert manifests["02_hidden_states"]["out"] == manifests["01b_synthetic"]["out"] == 16
    assert {path.name for path in (run_dir / "05_export/model").iterdir()} >= {"model.safetensors", "config.json"}
    measured = json.loads((run_dir / "06_acceptance/acceptance.json").read_text())
    drafter = next(m for m in measured["measurements"] if m["drafter"] == "run")
    assert drafter["drafts"] > 0 and drafter["acceptance_length"] >= 1
    assert "Acceptance length" in (run_dir / "report.html").read_text()
    assert sum(path.stat().st_size for path in run_dir.rglob("*") if path.is_file()) < 2 * 2**30
    assert not list(run_dir.glob("servers/*.json")), "no server is left"

    files = {path: path.stat().st_mtime_ns for path in run_dir.glob("0*/**/*") if path.is_file()}
    second = run("--limit", "16")
    assert second.returncode == 0 and "is complete, nothing to do" in second.stderr
    assert files == {path: path.stat().st_mtime_ns for path in run_dir.glob("0*/**/*") if path.is_file()}
    shown = run("status").stdout
    assert "run smollm2_cpu: complete" in shown and all(name in shown for name in STAGES)


def wait_for(path: Path, seconds: float = 40) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.1)


def test_the_whole_chain_runs_and_a_second_run_does_nothing_and_says_so(night):
    night.preflight = True
    code, out, err = night.run()
    assert code == 0, err
    assert night.done() == STAGES
    assert json.loads(out)["status"] == "complete" and night.leftovers() == []
    code, out, err = night.run()
    assert code == 0 and "is complete, nothing to do" in err and "is starting" not in err


def hour(moment: datetime) -> str:
    return f"{moment:%H:%M}"


def test_every_start_of_01b_is_handed_the_moment_that_the_pipeline_resolved_and_noted(night):
    """Seam H1: each start took the hour for the next one, also after it had passed."""
    given = hour(datetime.now() + timedelta(hours=2))
    code, _, err = night.run("--only", "01b", "--deadline", given, _01b_synthetic="outage")
    assert code == 0, err
    noted = night.state()["deadline"]
    handed = re.findall(r"01b_synthetic.py --config .* --deadline (\S+)", err)
    assert len(handed) == 2 and {datetime.fromisoformat(each).timestamp() for each in handed} == {noted["at"]}
    assert noted["given"] == given and hour(datetime.fromtimestamp(noted["at"])) == given


def test_the_same_command_after_the_deadline_goes_on_with_the_next_stage_and_a_later_deadline_asks_for_more(night):
    """Seam H1: repeated in the morning, the night's command generated until the next night."""
    given = hour(datetime.now() + timedelta(hours=2))
    assert night.run("--deadline", given, _01b_synthetic="late", _02_hidden_states="fail")[0] == 1

    def pass_hours(hours: int) -> None:
        """As if the run had begun so much earlier."""
        for path in (night.run_dir / "pipeline.json", night.run_dir / "01b_synthetic/manifest.json"):
            record = json.loads(path.read_text())
            noted, key = (record, "deadline") if "facts" not in record else (record["facts"], "deadline")
            if "given" in str(noted[key]):
                noted, key = noted[key], "at"
            noted[key] -= hours * 3600
            path.write_text(json.dumps(record))

    pass_hours(7)
    for again in (["--deadline", given], []):
        code, _, err = night.run(*again, _01b_synthetic="late")
        assert code == 0 and "01b_synthetic.py --config" not in err, err
        assert "1 requests left by the deadline" in err and "a later --deadline sends them" in err
        assert night.done() == STAGES[1:] and night.state()["status"] == "complete"
    shown = night.run("status")[1]
    assert "run smollm2_cpu: complete" in shown
    pass_hours(24)
    code, _, err = night.run("--deadline", given)
    assert code == 0 and "01b_synthetic.py --config" not in err, "a finished run does nothing"
    code, _, err = night.run("--deadline", hour(datetime.now() + timedelta(hours=3)))
    assert code == 0 and night.done() == STAGES, "a new deadline"


def test_01b_needs_no_server_once_its_deadline_has_passed(night):
    """Seam H1: the trial of the first night outlasted it, and 01b began with the next night's."""
    passed = (datetime.now() - timedelta(hours=1)).isoformat(timespec="seconds")
    code, _, err = night.run("--only", "01b", "--deadline", passed, _01b_synthetic="late")
    assert code == 0, err
    assert "server generate" not in err and not (night.run_dir / "servers").exists()


@pytest.mark.parametrize(
    ("hours", "ended", "meant"),
    [(-1, False, 0), (7, False, 0), (11, True, 0), (13, False, 24), (13, True, 0), (100, True, 0)],
)
def test_the_same_hour_means_the_recorded_moment_for_twelve_hours_or_once_01b_ended_by_it(
    tmp_path, model, hours, ended, meant
):
    """Seam H1: `hours` after the deadline."""
    run = config.load(CPU_CONFIG, [f"run.dir={tmp_path}"])
    at = datetime(2026, 12, 1, 1, 0)
    state = {"status": "failed", "stages": {}, "deadline": {"given": "01:00", "at": at.timestamp()}}
    files.write_json(pipeline.state_path(run), state)
    if ended:
        manifest = {"status": "partial", "pending": 5, "facts": {"deadline": at.timestamp()}}
        files.write_json(run.stage_dir("01b_synthetic") / "manifest.json", manifest)
    now = at + timedelta(hours=hours)
    assert deadline.resolve(run, "01:00", now).moment == at + timedelta(hours=meant)
    assert deadline.resolve(run, "01:30", now).moment == cli.next_time("01:30", now)
    assert deadline.resolve(run, None, now) is None


def test_a_failing_stage_keeps_its_exit_code_and_the_rerun_continues_there(night):
    """R02"""
    code, _, err = night.run(_02_hidden_states="fail")
    assert code == 1 and "the states are wrong" in err
    assert night.done() == ["01b_synthetic"] and night.leftovers() == []
    assert night.state()["status"] == "failed" and night.state()["stage"] == "02_hidden_states"
    code, _, err = night.run()
    assert code == 0 and night.done() == STAGES
    assert "01b_synthetic: nothing to do" in err


def test_the_exit_code_of_training_is_not_torchruns(night):
    code, _, _ = night.run("--from", "04", _04_train="resumable")
    assert code == 3


def test_a_refusal_of_a_stages_dry_run_is_reported_before_anything_starts(night):
    code, _, err = night.run("--only", "02", _02_hidden_states="knows")
    assert code == 2 and "the reference drafter has no lm_head" in err
    assert not (night.run_dir / "servers").exists()


def test_finished_states_are_replaced_only_by_a_pipeline_that_may(night):
    """Seam U1: the refusal comes before a server is started, and --redo reaches stage 02."""
    code, _, err = night.run("--only", "02", _02_hidden_states="redo")
    assert code == 2 and "3 finished rows; add --redo" in err and not (night.run_dir / "servers").exists()
    assert night.run("--only", "02", "--redo", _02_hidden_states="redo")[0] == 0
    assert night.done() == ["02_hidden_states"]


def train_on(night, row_set: str) -> Path:
    """As if 04 had a checkpoint of these rows."""
    folder = night.run_dir / "04_train"
    manifest = json.loads((folder / "manifest.json").read_text())
    files.write_json(folder / "manifest.json", manifest | {"facts": {"row_set": row_set}})
    for name in checkpoint.FILES:
        (folder / "step-00000001").mkdir(exist_ok=True)
        (folder / "step-00000001" / name).touch()
    return folder


def test_a_finished_stage_whose_manifest_has_other_rows_is_concluded_again_without_a_server(night):
    """Seam U4: the plain command never recovered from a call with other prompts."""
    assert night.run("--only", "01b")[0] == 0 and night.run("--only", "02")[0] == 0
    code, _, err = night.run(_01b_synthetic="stale", _02_hidden_states="stale")
    assert code == 0 and night.done() == STAGES, err
    assert "01b_synthetic.py --config" in err and "02_hidden_states.py --config" in err and "is starting" not in err


@pytest.mark.parametrize(("stage", "word"), [("01b_synthetic", "more"), ("02_hidden_states", "stale")])
def test_rows_that_training_was_not_begun_with_are_refused_before_anything_starts(night, stage, word):
    """Seam U4: 04 refused them, hours after 01b and 02 had begun to make them."""
    assert night.run()[0] == 0
    folder, asked = train_on(night, "first"), {f"_{stage}": word}
    stamps = {path: path.stat().st_mtime_ns for path in night.run_dir.glob("0*/manifest.json")}
    code, _, err = night.run(**asked)
    assert code == 2 and ".py --config" not in err and "is starting" not in err, err
    [line] = [line for line in err.splitlines() if line.startswith("run_pipeline.sh: ")]
    assert "04_train was begun with other rows than these prompts give" in line
    assert f"use another run.name, or delete {folder} to train from the start" in line
    assert stamps == {path: path.stat().st_mtime_ns for path in night.run_dir.glob("0*/manifest.json")}
    assert night.run("--only", stage.partition("_")[0], **asked)[0] == 0, "04 is not asked"
    train_on(night, "other")
    assert night.run(**asked)[0] == 0, "these are the rows it was begun with"


def test_the_page_of_a_dry_run_shows_that_training_was_begun_with_other_rows(night):
    """Seam U4"""
    assert night.run("--only", "04")[0] == 0
    train_on(night, "first")
    night.preflight = True
    lines = night.run("--dry-run", _01b_synthetic="more")[1].splitlines()
    assert lines[1].split() == ["01b_synthetic", "cannot", "begin"]
    assert [number for number, line in enumerate(lines) if "04_train was begun with other rows" in line] == [2]


def test_a_stage_that_the_kernel_kills_has_the_shells_exit_code(night):
    assert night.run("--only", "05", _05_export="killed")[0] == 137
    assert night.state()["error"] == "killed by SIGKILL, perhaps because memory ran out"


@pytest.mark.parametrize(
    "arguments", [["--deadline", "25:00"], ["--limit", "0"], ["--only", "07"], ["--set", "run.nam=x"], ["--what"]]
)
def test_wrong_arguments_are_one_line_at_once(night, arguments):
    code, out, err = night.run(*arguments)
    assert (code, len(err.splitlines()), out) == (2, 1, "")
    assert not night.run_dir.exists()


def test_prompts_of_the_hub_are_fetched_before_any_server_starts(night):
    code, _, err = night.run(_01b_synthetic="unprepared")
    assert code == 0 and len(night.done()) == len(STAGES), err
    assert (night.run_dir / "01b_synthetic/prepared").read_text() == "False", "its server was not up yet"
    assert err.count("--prepare") == 1


def test_a_hub_that_is_out_of_reach_costs_no_boot(night):
    code, _, err = night.run(_01b_synthetic="unreachable")
    assert code == 3 and night.state()["error"] == "the hub does not answer"
    assert "is ready after" not in err and night.done() == []


@pytest.mark.parametrize("python", ["/nowhere/python", "/etc", "/bin/ls"])
def test_a_wrong_interpreter_is_one_line(python, tmp_path):
    environment = os.environ | {"PYTHON": python}
    done = subprocess.run(
        [config.ROOT / "run_pipeline.sh", "--dry-run"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert (done.returncode, len(done.stderr.splitlines()), python in done.stderr) == (2, 1, True)


@pytest.mark.parametrize(
    ("call", "code", "said"),
    [
        ("--help", 0, "usage: run_pipeline.sh"),
        ("--help", 0, "./run_pipeline.sh status mine.yaml"),
        ("status", 2, "status needs the packages"),
        ("--what", 2, "unrecognized arguments: --what"),
        ("--only 07", 2, "no stage 07"),
        ("stauts", 2, "did you mean status?"),
    ],
)
def test_help_and_a_wrong_option_are_answered_before_anything_is_installed(tmp_path, call, code, said):
    """With nothing of the package that needs more than Python."""
    for name in (
        "run_pipeline.sh",
        "environment.sh",
        *(f"drafter/{n}.py" for n in ("__init__", "cli", "errors")),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(config.ROOT / name, tmp_path / name)
    env = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run([tmp_path / "run_pipeline.sh", *call.split()], env=env, capture_output=True, text=True)
    right, other = (done.stderr, done.stdout) if code else (done.stdout, done.stderr)
    assert (done.returncode, said in right, other) == (code, True, ""), done.stderr
    assert not (tmp_path / ".venv").exists() and len(done.stderr.splitlines()) == bool(code)


def test_a_stage_taken_from_another_run_is_passed_over(night):
    other = night.folder / "other"
    take = f"run.take={{01b_synthetic: {other}}}"
    code, out, err = night.run("--set", take)
    assert (code, out, "no finished 01b_synthetic" in err) == (2, "", True)
    other.mkdir()
    (other / "manifest.json").write_text(json.dumps({"status": "complete", "question": {}, "facts": {}}))
    assert night.run("--set", take)[0] == 0
    assert night.done() == STAGES[1:]
    assert [path.name for path in other.iterdir()] == ["manifest.json"]


def test_a_finished_stage_that_was_asked_something_else_is_refused(night):
    """H12: another learning rate once was `nothing to do`."""
    manifest = night.run_dir / "04_train/manifest.json"
    manifest.parent.mkdir(parents=True)
    files.write_json(manifest, {"status": "complete", "question": {"train.lr": 0.5}})
    code, _, err = night.run("--only", "04")
    assert code == 2 and "04_train was made with another train.lr (was 0.5, is 0.001)" in err and night.done() == []


def test_one_stage_alone_and_from_a_stage_on(night):
    assert night.run("--only", "05")[0] == 0
    assert night.done() == ["05_export"]
    assert night.run("--from", "06")[0] == 0
    assert night.done() == ["05_export", "06_acceptance"]
    code, _, err = night.run("--only", "03")
    assert code == 2 and "choose from 01b, 02, 04, 05, 06" in err


@pytest.mark.parametrize(
    ("name", "signum", "code"),
    [
        ("01b_synthetic", signal.SIGINT, 130), ("01b_synthetic", signal.SIGHUP, 129),
        ("04_train", signal.SIGINT, 130), ("04_train", signal.SIGTERM, 143),
    ],
)  # fmt: skip
def test_a_signal_lets_the_stage_save_and_leaves_no_process(night, signum, code, name):
    """R02"""
    running = night.start("--only", name.partition("_")[0], **{f"_{name}": "forever"})
    wait_for(night.run_dir / name / "working")
    running.send_signal(signum)
    _, err = running.communicate(timeout=10)
    assert running.returncode == code, err
    assert (night.run_dir / name / "saved").exists() and night.leftovers() == []
    assert night.state()["status"] == "interrupted" and "Traceback" not in err and "Error" not in err


@pytest.mark.parametrize("point", ["a dry run", "preflight", "a server's boot", "a server's restart"])
def test_a_signal_at_any_other_point_leaves_no_process(night, point):
    """R02"""
    stages, mark = {}, night.folder / "mark"
    if point == "a dry run":
        stages, mark = {f"_{name}": "ponders" for name in STAGES}, night.run_dir / "01b_synthetic/pondering"
    elif point == "preflight":
        night.server_fakes["evaluate"], night.preflight = f"slow_engine={mark}", True
    elif point == "a server's boot":
        night.server_fakes["generate"], mark = "slow stubborn", night.run_dir / "servers/generate.json"
    else:
        night.scripted("generate", "dies_after=2", f"slow mark={mark}")
        stages = {"_01b_synthetic": "server"}
    running = night.start(*(["--dry-run"] if point == "a dry run" else []), **stages)
    wait_for(mark)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=10)
    assert running.returncode == 130 and night.leftovers() == [] and "Traceback" not in err
    assert ("interrupted by SIGINT: finished work is kept" in err) and ("a server" in point or out == "")
    assert not out or json.loads(out)["status"] == "interrupted"


@pytest.mark.parametrize(
    ("program", "library"),
    [
        ("-m drafter.pipeline --plan", "_pydantic_core"),
        ("04_train.py --dry-run", "torch"),
        ("-m drafter.pipeline.torchrun x", "torch"),
    ],
)
def test_a_ctrl_c_during_imports_ends_a_program_without_a_traceback(program, library):
    line = [sys.executable, *program.split()]
    starting = subprocess.Popen(line, cwd=config.ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while library not in Path(f"/proc/{starting.pid}/maps").read_text():
        time.sleep(0.01)
    starting.send_signal(signal.SIGINT)
    _, err = starting.communicate(timeout=10)
    assert (starting.returncode, err) in [(-signal.SIGINT, ""), (130, "")]


@pytest.mark.parametrize("name", ["01b_synthetic", "04_train"])
def test_a_stage_saves_and_ends_when_its_pipeline_is_killed(night, name):
    """R02: it once went on by itself, beside the one that the next run started."""
    running = night.start("--only", name.partition("_")[0], **{f"_{name}": "forever"})
    wait_for(night.run_dir / name / "working")
    running.kill()
    wait_for(night.run_dir / name / "saved")
    running.communicate(timeout=10)
    code, _, err = night.run("--only", name.partition("_")[0])
    assert code == 0 and night.leftovers() == [], err


def test_a_run_folder_that_cannot_be_is_one_line(night):
    (night.folder / "file").touch()
    night.overrides = [f"run.dir={night.folder / 'file'}"]
    code, _, err = night.run()
    assert (code, len(err.splitlines()), "Not a directory" in err) == (2, 1, True)


@pytest.mark.parametrize(
    "content", ["", "7", "[]", "{}", '{"stages": 7}', '{"status": "failed", "stages": {"a": 7}}']
)
def test_a_state_file_that_says_nothing_is_as_good_as_none(night, content):
    night.run_dir.mkdir(parents=True)
    (night.run_dir / "pipeline.json").write_text(content)
    assert night.run("--only", "05")[0] == 0
    assert night.state()["status"] == "stopped"


def test_a_stage_alone_says_nothing_of_the_run_but_what_is_left(night):
    """Law 8: nor does it forget where an earlier call stood still."""
    assert "left: 01b_synthetic, 02_hidden_states, 04_train, 06_acceptance" in night.run("--only", "05")[2]
    assert night.state()["status"] == "stopped"
    stood = night.state() | {"status": "interrupted", "stage": "06_acceptance", "error": "signal 15"}
    (night.run_dir / "pipeline.json").write_text(json.dumps(stood))
    code, _out, err = night.run("--only", "05")
    assert code == 0 and "06_acceptance; the same command" in err
    assert {key: night.state()[key] for key in ("status", "stage", "error")}.items() <= stood.items()


def test_a_log_on_a_full_disk_does_not_stop_the_reading(capfd):
    supervise._copy_lines(lines := iter([b"one\n", b"two\n"]), Path("/dev/full"))
    assert next(lines, None) is None and capfd.readouterr().err == "one\ntwo\n"


@pytest.mark.parametrize("place", ["log", "logs"])
def test_a_log_that_cannot_be_opened_stops_no_stage_and_is_reported_once(night, place):
    """Seam M3: nobody read the stage's output any more; it blocked at 64 KiB, and the pipeline waited for ever."""
    blocked = night.run_dir / ("logs/05_export.log/folder" if place == "log" else "logs")
    blocked.parent.mkdir(parents=True)
    blocked.mkdir() if place == "log" else blocked.touch()
    code, _, err = night.run("--only", "05", _05_export="talks")
    assert code == 0 and night.done() == ["05_export"], err[-2000:]
    assert err.count("line ") == 3000 and err.count("05_export.log cannot be written (") == 1


def test_a_server_is_not_taken_for_hanging_while_its_stage_writes_lines_that_no_log_keeps(capfd):
    """Seam M3: progress was the log's time of change."""
    heard = []
    supervise._copy_lines(iter([b"one\n", b"two\n"]), Path("/dev/full"), lambda: heard.append(1))
    assert len(heard) == 2 and capfd.readouterr().err.endswith("one\ntwo\n")


@pytest.mark.parametrize("asked", ["the stages", "the engine"])
def test_what_a_killed_pipeline_has_asked_does_not_outlive_it(night, asked):
    """Seam K6"""
    if asked == "the engine":
        mark, night.preflight = night.folder / "mark", True
        package = night.folder / "packages/vllm"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(
            f"import os, time\nopen({str(mark)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
        )
        night.overrides.append(f"servers.evaluate.env={{PYTHONPATH: {package.parent}}}")
        night.overrides.append(f"servers.evaluate.python={sys.executable}")
        running = night.start()
    else:
        mark = night.run_dir / "01b_synthetic/pondering"
        running = night.start("--dry-run", **{f"_{name}": "ponders" for name in STAGES})
    wait_for(mark)
    children = [process.identity(pid) for pid in process.descendants(running.pid)]
    running.kill()
    running.communicate()
    assert children
    for child in children:
        while process.lives(child):
            time.sleep(0.05)


def test_a_log_says_where_each_call_begins_on_a_line_of_its_own(tmp_path):
    for said in ("4/16 rows", "6/16 rows"):
        supervise._watch(["/bin/sh", "-c", f"printf '19:00:00 {said}, torn' >&2"], tmp_path / "x.log", None)
    log = (tmp_path / "x.log").read_text()
    assert len(run_state.BEGIN.findall(log)) == 2 and run_state.BEGIN.split(log)[-1] == "19:00:00 6/16 rows, torn\n"


def test_a_server_that_always_dies_is_given_up(night):
    night.scripted("generate", "dies_after=2", "dies_after=1")  # the start asks once, the stage once more
    night.overrides.append("servers.generate.restarts=1")
    code, _, err = night.run(_01b_synthetic="forever")
    assert code == 3 and "server generate died, after 1 restarts" in err
    assert (night.run_dir / "01b_synthetic/saved").exists()
    assert night.state()["stages"]["01b_synthetic"]["status"] == "failed"


def test_a_server_that_hangs_behind_a_healthy_api_is_restarted_while_the_stage_waits(night):
    """R01"""
    night.server_fakes["extract"] = "hangs=4"
    night.overrides.append("servers.extract.hang_minutes=0.03")
    code, _, err = night.run("--only", "02", _02_hidden_states="server")
    assert code == 0, err
    assert "hangs: it accepts a request and does not answer): restart 1 of at most 3" in err


def test_a_server_that_dies_is_restarted_again_if_that_fails_and_the_stage_goes_on(night):
    """R01"""
    night.scripted("extract", "dies_after=2", "boot_failure", "well")
    code, _, err = night.run("--only", "02", _02_hidden_states="server")
    assert code == 0, err
    assert "server extract died: restart 1 of at most 3" in err
    assert "did not come back (server extract died while starting: CUDA out of memory): restart 2 of at most 3" in err


def test_a_stage_that_ends_while_its_server_is_restarted_is_noticed_at_once(night):
    """R02"""
    night.scripted("extract", "dies_after=2", "slow")
    night.overrides.append("servers.extract.start_minutes=5")
    code, _, err = night.run("--only", "02", _02_hidden_states="lost")
    assert code == 1 and "the states are wrong" in err and "no longer needed" in err


def test_a_stage_that_gave_up_waiting_goes_on_once_its_server_is_repaired(night):
    """R01"""
    code, _, err = night.run("--only", "02", _02_hidden_states="outage")
    assert code == 0, err
    assert re.search(r"server extract (is unhealthy \(not running\)|died): restart 1 of at most 3", err)
    assert night.done() == ["02_hidden_states"] and err.count("02_hidden_states.py --config") == 2


@pytest.mark.parametrize("word", ["", "fail"])
def test_the_production_server_is_given_back(night, word):
    night.production(active=True)
    code, _, err = night.run(_04_train=word)
    assert code == (1 if word else 0), err
    assert night.production_active()
    calls = (night.units / "calls.log").read_text().splitlines()
    changes = [call for call in calls if call.startswith("st")]
    assert "stop vllm-team" in changes and changes[-1] == "start vllm-team"


@pytest.mark.parametrize("number", ["01b", "02"])
def test_a_stage_that_asks_its_server_nothing_never_stops_production(night, number):
    """Summing up anew took the team's server down for the time of its next boot."""
    assert night.run("--only", number)[0] == 0
    night.production(active=True)
    words = {"01b": {"_01b_synthetic": "stale"}, "02": {"_02_hidden_states": "stale"}}[number]
    code, _, err = night.run("--only", number, **words)
    assert code == 0 and ".py --config" in err, err
    assert not any(call.startswith("stop") for call in (night.units / "calls.log").read_text().splitlines())


def test_more_rows_of_a_complete_01b_are_checked_as_those_of_a_first_call_are(night):
    """Its manifest was complete, so that its server was started unchecked."""
    assert night.run("--only", "01b")[0] == 0 and night.run("--only", "02")[0] == 0
    night.preflight = True
    night.overrides += [f"servers.{role}.api_key_env=NOT_SET" for role in ("generate", "extract")]
    code, _, err = night.run("--only", "01b", _01b_synthetic="more")
    assert code == 2 and "servers.generate.api_key_env" in err and "is starting" not in err, err
    code, _, err = night.run(_01b_synthetic="more")
    assert code == 2 and "servers.extract.api_key_env" in err, "02 will read the new rows back"


def test_the_production_server_is_given_back_after_a_signal_and_after_a_kill(night):
    night.production(active=True)
    running = night.start("--from", "04", _04_train="forever")
    wait_for(night.run_dir / "04_train/working")
    assert not night.production_active()
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=10)
    assert night.production_active()

    (night.run_dir / "04_train/working").unlink()
    running = night.start("--from", "04", _04_train="forever")
    wait_for(night.run_dir / "04_train/working")
    (night.run_dir / "04_train/saved").unlink()
    running.kill()
    wait_for(night.run_dir / "04_train/saved")  # a stage does not outlive its pipeline
    running.communicate()
    assert not night.production_active()
    assert night.run("--from", "04")[0] == 0
    assert night.production_active(), "the next pipeline knows what the killed one owed"


def test_a_stages_time_continues_after_a_kill_and_starts_again_without_its_folder(made, tmp_path):
    night = made()
    step, log = pipeline.STEPS[0], night.config.run_dir / "logs/01b_synthetic.log"
    log.parent.mkdir(parents=True)
    log.touch()
    running = {"status": "running", "started": log.stat().st_mtime - 60, "seconds": 600}
    night.record.state["stages"] = {step.stage: running}
    night.record.save()
    state = json.loads(pipeline.state_path(night.config).read_text()) | {"birth": "1"}
    files.write_json(pipeline.state_path(night.config), state)
    following = made()
    following.record.take_over()
    assert following.record.state["stages"][step.stage] == running | {"status": "interrupted", "seconds": 660}
    assert following.record.seconds(step) == 0
    manifest = night.config.stage_dir(step.stage) / "manifest.json"
    files.write_json(manifest, {"status": "interrupted"})
    assert following.record.seconds(step) == 660


def test_a_stage_without_its_input_is_refused_and_never_noted_as_done(made, monkeypatch):
    """Law 7: with nothing to read it has no row left, and once passed for complete."""
    monkeypatch.setattr(pipeline.Pipeline, "dry_runs", lambda _self, steps, *_: [{"pending": 0}] * len(steps))
    for begun in (False, True):
        night = made()
        night.steps = pipeline.STEPS[1:2]
        if begun:
            night.record.state["stages"] = {"02_hidden_states": {"status": "complete"}}
            night.record.save()
        with pytest.raises(ConfigError, match="02_hidden_states needs 01b_synthetic, which has not run"):
            night.run()
        assert night.config.run_dir.exists() == begun
    assert night.record.state["status"] == "failed"
    assert night.record.state["stages"] == {}, "the record of an earlier call is not kept either"


@pytest.mark.parametrize(("status", "left"), [("complete", 0), ("running", 1), ("failed", 1), ("partial", 1)])
def test_a_stage_is_done_when_its_manifest_says_so(made, monkeypatch, status, left):
    """R02: one that is killed after its last row has its manifest left to write."""
    monkeypatch.setattr(pipeline.Pipeline, "dry_runs", lambda _self, steps, *_: [{"pending": 0}] * len(steps))
    night = made()
    files.write_json(night.config.stage_dir("02_hidden_states") / "manifest.json", {"status": status, "question": {}})
    assert night.pending(pipeline.STEPS[1]) == left


def test_a_stage_that_has_not_begun_is_planned_again_and_a_finished_one_keeps_its_plan(made):
    def planned(*overrides: str, limit: int | None = None) -> tuple[str, list[int], list[float]]:
        night = made(*overrides)
        night.limit, night.record.state["stages"] = limit, {"01b_synthetic": {"status": "complete"}}
        night.record.write_plan(night.limit)
        plan = json.loads((night.config.run_dir / "plan.json").read_text())
        seconds = [plan[name]["seconds"]["typical"] for name in STAGES[:2]]
        return (
            night.record.state["stages"]["01b_synthetic"]["status"],
            [plan[name]["conversations"] for name in STAGES],
            seconds,
        )

    _, rows, (first, second) = planned("prompts.0.count=40")
    assert rows == [40] * 5
    manifest = made().config.stage_dir("01b_synthetic") / "manifest.json"
    files.write_json(manifest, {"status": "complete"})
    status, rows, fewer = planned(limit=16)
    assert (status, rows) == ("complete", [40, 24, 24, 24, 24]), "16 beside the 8 that are held out"
    assert fewer[0] == first and fewer[1] < second
    status, rows, more = planned()
    assert (status, rows) == ("begun", [101] * 5) and more[0] > first


def test_a_copied_run_does_not_restore_the_units_of_the_original(night, tmp_path):
    original = config.load(CPU_CONFIG, night.overrides)
    state = pipeline.Pipeline(original, pipeline.STEPS, None, None)
    original.run_dir.mkdir(parents=True)
    state.machine.production = {"vllm-team"}
    state.record.save()
    copy = config.load(CPU_CONFIG, [*night.overrides, "run.name=copy"])
    shutil.copytree(original.run_dir, copy.run_dir)
    owed = {}
    for each in (original, copy):
        following = pipeline.Pipeline(each, pipeline.STEPS, None, None)
        following.record.take_over()
        owed[each.run.name] = following.machine.production
    assert owed == {"smollm2_cpu": {"vllm-team"}, "copy": set()}


@pytest.mark.parametrize(
    ("status", "owed", "remembered"),
    [
        ("running", {"vllm-team"}, {"vllm-team"}),
        ("running", set(), set()),
        ("failed", {"vllm-team"}, {"vllm-team"}),
        ("failed", set(), {"vllm-team", "vllm-extract"}),
    ],
)
def test_a_unit_that_a_killed_call_started_is_not_restored_as_production(
    night, monkeypatch, status, owed, remembered
):
    """R01: given back as well, the extract unit would stop production, with which it conflicts."""
    monkeypatch.setattr(server, "alive", lambda *_: True)
    roles = {"generate": "vllm-team", "extract": "vllm-extract"}
    sets = [f"servers.{role}.{what}" for role, unit in roles.items() for what in ("kind=systemd", f"unit={unit}")]
    run_config = config.load(CPU_CONFIG, [*night.overrides, *sets])
    killed = pipeline.Pipeline(run_config, pipeline.STEPS, None, None)
    killed.record.state["status"], killed.machine.production = status, owed
    killed.record.save()
    following = pipeline.Pipeline(run_config, pipeline.STEPS, None, None)
    following.record.take_over()
    following.machine.snapshot()
    assert following.machine.production == remembered


def test_a_production_server_that_does_not_start_stays_owed(night, monkeypatch):
    """R01: a start beyond the unit's StartLimitBurst is taken without an error, and nothing starts."""
    night.production(active=False)
    for name, value in night.environment().items():
        monkeypatch.setenv(name, value)
    this = production_units.Machine(config.load(CPU_CONFIG, night.overrides))
    this.production = {"vllm-team"}
    (night.units / "deaf").touch()
    this.restore()
    assert this.production == {"vllm-team"}
    (night.units / "deaf").unlink()
    this.restore()
    assert not this.production and night.production_active()
    verbs = [line.split()[0] for line in (night.units / "calls.log").read_text().splitlines()]
    assert verbs[verbs.index("start") - 1] == "reset-failed"


def test_a_unit_that_was_down_is_down_afterwards(night):
    night.production(active=False)
    assert night.run("--only", "01b")[0] == 0
    assert not night.production_active()


@pytest.mark.parametrize("end", ["complete", "failed", "interrupted"])
def test_the_gpu_of_a_server_is_waited_for_only_once_every_server_on_it_was_stopped(night, end):
    """Seam G1: `generate`, long down, was waited for while `extract` still held the GPU, in silence for 300 s."""
    night.overrides += [f"servers.{role}.gpus=[0]" for role in night.ports]
    (night.folder / "follows").write_text(f"0 {' '.join(map(str, night.ports.values()))}\n")
    (night.folder / "processes").write_text("")
    (night.run_dir / "servers").mkdir(parents=True)
    running = night.start("--only", "02", _02_hidden_states={"failed": "fail", "interrupted": "forever"}.get(end, ""))
    if end == "interrupted":
        wait_for(night.run_dir / "02_hidden_states/working")
        running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=60)
    assert running.returncode == {"complete": 0, "failed": 1, "interrupted": 130}[end], err
    assert "is not free" not in err and night.leftovers() == []
    assert len(re.findall("server extract: stopping process", err)) == 1, err


def test_memory_that_another_program_holds_is_waited_for_aloud_and_never_long_once_signals_are_muted(
    night, monkeypatch, caplog
):
    """Seam G1"""
    for name, value in night.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(production_units, "RESTORE_SECONDS", 1)
    (night.folder / "memory").write_text("0, 80000\n1, 80000\n")
    (night.folder / "processes").write_text("4242, stranger, 79000\n")
    stopped = {"extract": True, "generate": False, "evaluate": False}
    monkeypatch.setattr(server, "stop", lambda _, role, **bound: stopped[role])
    gpus = [f"servers.{role}.gpus=[{number}]" for number, role in enumerate(("generate", "extract"))]
    with caplog.at_level("INFO"):
        production_units.Machine(config.load(CPU_CONFIG, [*night.overrides, *gpus])).restore()
    (waits, fault) = caplog.messages
    assert waits.startswith("waiting for GPU memory, at most 1 s more (GPU 1: 83.89 GB)")
    assert "GPU 1: 83.89 GB), held by process 4242 stranger" in fault and "GPU 0" not in fault


def test_two_pipelines_never_share_a_run(night):
    running = night.start(_01b_synthetic="forever")
    wait_for(night.run_dir / "01b_synthetic/working")
    code, _, err = night.run()
    assert code == 2 and "another process is working" in err
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=10)


def test_a_call_that_is_refused_before_it_begins_leaves_the_runs_state_as_it_was(night):
    """`status` of a finished run showed the refusal as its last error."""
    heard = night.folder / "heard"
    assert night.run()[0] == 0
    state, plan = pipeline.state_path(config.load(CPU_CONFIG, night.overrides)), night.run_dir / "plan.json"
    before = state.read_bytes(), plan.read_bytes()
    path = night.run_dir / "01b_synthetic/manifest.json"
    path.parent.mkdir(exist_ok=True)
    files.write_json(path, {"status": "complete", "question": {"generate.temperature": 0.9}})
    night.overrides.append(f"run.on_event=echo $EVENT >> {heard}")
    code, _, err = night.run()
    assert code == 2 and "01b_synthetic was made with another generate.temperature" in err
    assert (state.read_bytes(), plan.read_bytes()) == before and heard.read_text() == "failed\n"


@pytest.fixture
def made(tmp_path, model, monkeypatch):
    """Makes a pipeline of this process whose first stage has something to do."""
    monkeypatch.setattr(locks, "CLAIMS", tmp_path)
    monkeypatch.setattr(locks, "LOCK_SECONDS", 0.1)
    monkeypatch.setattr(pipeline.Pipeline, "dry_runs", lambda _self, steps, *_: [{"pending": 1}] * len(steps))

    def make(*overrides: str) -> pipeline.Pipeline:
        run = config.load(CPU_CONFIG, [f"run.dir={tmp_path / 'runs'}", *overrides])
        return pipeline.Pipeline(run, pipeline.STEPS, None, None)

    return make


def test_two_runs_that_share_a_unit_refuse_each_other_by_name_and_leave_the_machine_alone(made, monkeypatch):
    """R02: the second would stop the first one's server, and give back what is not its own to give.

    Seam H4: it is refused before its checks, whose answers the first one changes.
    """
    monkeypatch.setattr(pipeline.Pipeline, "preflight", lambda _: pytest.fail("checked before the claim"))
    unit = ["servers.generate.kind=systemd", "servers.generate.unit=vllm-team"]
    first, second = made(*unit, "run.name=first"), made(*unit, "run.name=second")
    with first.machine.claimed():
        with pytest.raises(ConfigError, match=f"vllm-team is in use by the run in {first.config.run_dir}; wait"):
            second.run()
        assert not second.config.run_dir.exists()
        with made("run.name=without").machine.claimed():
            pass
    with second.machine.claimed():  # the file that is left is no lock
        pass


@pytest.mark.parametrize(
    ("override", "finding"),
    [("target.model=/nowhere", "no model at /nowhere"), ("train.warm_start=/nowhere", "no drafter at /nowhere")],
)
def test_a_run_that_cannot_begin_says_so_and_leaves_nothing(made, tmp_path, override, finding):
    heard = tmp_path / "heard"
    night = made(override, f"servers.evaluate.python={SCRIPTS / 'fake_vllm'}", f"run.on_event=echo $EVENT > {heard}")
    with pytest.raises(ConfigError, match=finding):
        night.run()
    assert not night.config.run.dir.exists() and heard.read_text() == "failed\n"


@pytest.mark.parametrize(
    "call",
    [
        "--probe", "--only 04 --from 05", "--plan --dry-run", "--plan --limit 5", "--done-by 09:00", "status --plan",
        "status --from 04", "--from 02 --deadline 01:00", "--plan --only 04",
        "--plan --redo", "status --redo",
    ],
)  # fmt: skip
def test_arguments_that_contradict_each_other_are_refused(call, monkeypatch, capsys):
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # pytest keeps its own handlers
    assert command.main([*call.split(), str(CPU_CONFIG)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    "call",
    [
        "status CONFIG --set a.b=1", "CONFIG --set a.b=1 status", "status --set a.b=1 CONFIG",
        "--config CONFIG --set a.b=1 status",
    ],
)  # fmt: skip
def test_the_config_and_status_stand_on_either_side_of_a_flag(call):
    args = cli.parse(call.replace("CONFIG", str(CPU_CONFIG)).split())
    assert (args.config, args.status, args.overrides) == (str(CPU_CONFIG), True, ["a.b=1"])


def test_on_event_hears_each_end_of_a_stage_and_of_the_run_once(night):
    """Seam L14: one failure was two events."""
    heard = night.folder / "heard"
    night.overrides.append(f"run.on_event=echo $EVENT $STAGE $RUN >> {heard}; exit 1")
    night.run("--only", "05")
    night.run("--only", "06", _06_acceptance="fail")
    assert heard.read_text().splitlines() == [
        "stage_end 05_export smollm2_cpu",
        "finish smollm2_cpu",
        "failed 06_acceptance smollm2_cpu",
    ]
