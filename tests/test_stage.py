"""What every script shares: refusing a changed question, the summary line, exit codes."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import safetensors.numpy

import drafter
from drafter import checked, config, run_files, stage
from drafter.errors import ConfigError, ContractError, ResumableError
from drafter.progress import Progress

KEYS = ("generate.temperature", "target.chat_template_kwargs")


@pytest.fixture
def call(tmp_path, capsys, monkeypatch):
    """Run a stage body in a fresh run folder; returns (exit code, summary, stderr)."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # pytest keeps its own handlers

    def run(body, *overrides, name="01b_synthetic", flags=()):
        argv = ["--set", f"run.dir={tmp_path}", *flags]
        for override in overrides:
            argv += ["--set", override]
        code = stage.run_stage(name, body, stage.parser("test"), argv)
        captured = capsys.readouterr()
        lines = captured.out.splitlines()
        assert len(lines) == 1, "stdout is one JSON line"
        return code, json.loads(lines[0]), captured.err

    return run


def complete(this):
    this.begin(KEYS)
    this.counts.total = this.counts.done = 3
    return this.finish()


def partial(this):
    this.begin(KEYS)
    this.counts.total, this.counts.done = 3, 2
    return this.finish()


def test_complete_means_pending_zero(call, tmp_path):
    code, summary, _ = call(complete)
    assert code == 0 and summary["status"] == "complete" and summary["pending"] == 0
    manifest = json.loads((tmp_path / "smollm2_cpu/01b_synthetic/manifest.json").read_text())
    assert summary == manifest | {"exit_code": 0}


def test_pending_rows_are_never_exit_zero(call):
    code, summary, _ = call(partial)
    assert code == 3 and summary["status"] == "partial" and summary["pending"] == 1


@pytest.mark.parametrize(("error", "code"), [(ConfigError, 2), (ResumableError, 3), (ContractError, 1)])
def test_an_error_says_who_dies(call, error, code):
    def body(this):
        this.begin(KEYS)
        raise error("one line")

    found, summary, err = call(body)
    assert found == code and summary["error"] == "one line" and summary["status"] == "failed"
    assert err.strip().endswith("01b_synthetic: one line") and "Traceback" not in err


def test_our_own_bug_shows_a_traceback(call):
    code, summary, err = call(lambda this: 1 // 0)
    assert code == 1 and "ZeroDivisionError" in summary["error"] and "Traceback" in err


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [(errno.EROFS, 2, "/data: Read-only"), (errno.EACCES, 2, "/data"), (errno.ENOSPC, 3, "free")],
)
def test_an_error_of_the_machine_says_who_must_act(call, number, code, said):
    """H13, H15"""

    def body(this):
        raise OSError(number, os.strerror(number), "/data")

    found, summary, err = call(body)
    assert (found, said in summary["error"], "Traceback" in err) == (code, True, False)


def test_an_error_of_the_machine_inside_a_library_says_who_must_act(call, tmp_path):
    """safetensors raises its own error when the disk is full."""

    def body(this):
        this.begin(KEYS)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        try:
            safetensors.numpy.save_file({"a": np.zeros(1 << 16)}, tmp_path / "model.safetensors")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    code, summary, err = call(body)
    assert (code, "free some space" in summary["error"], "Traceback" in err) == (3, True, False)


@pytest.mark.parametrize("arguments", [["--limit", "0"], ["--limit", "-1"], ["--limit", "x"], ["--unknown"]])
def test_wrong_arguments_are_a_config_error_like_any_other(capsys, monkeypatch, arguments):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert stage.run_stage("01b_synthetic", complete, stage.parser("test"), arguments) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out)["exit_code"] == 2
    assert len(captured.err.splitlines()) == 1


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b"null", b"\xff", b'{"status": "complete", "question": [], "facts": {}}']
)
def test_a_broken_manifest_is_named_and_kept(call, tmp_path, content):
    call(complete)
    path = tmp_path / "smollm2_cpu/01b_synthetic/manifest.json"
    path.write_bytes(content)
    code, summary, err = call(complete)
    assert (code, f"{path} is broken" in summary["error"], "Traceback" in err) == (1, True, False)
    assert path.read_bytes() == content


def test_a_setting_that_is_no_more_is_another_question(call, tmp_path):
    """Law 5: the manifest of an earlier version."""
    call(complete)
    path = tmp_path / "smollm2_cpu/01b_synthetic/manifest.json"
    path.write_text(path.read_text().replace("generate.temperature", "generate.warmth"))
    code, summary, _ = call(complete)
    assert code == 2 and "generate.warmth (was 0.7, is None)" in summary["error"]


def test_a_stage_taken_from_another_run_is_never_written_to(call, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    code, summary, _ = call(complete, f"run.take={{01b_synthetic: {other}}}")
    assert code == 2 and "belongs to another run" in summary["error"]
    assert list(other.iterdir()) == []


def test_a_changed_question_is_refused_and_the_manifest_kept(call, tmp_path):
    """H12: exit 2 naming the key; the old manifest is untouched."""
    call(complete)
    before = (tmp_path / "smollm2_cpu/01b_synthetic/manifest.json").read_bytes()
    code, summary, _ = call(complete, "generate.temperature=0.9")
    assert code == 2 and "generate.temperature" in summary["error"]
    assert "run.name" in summary["error"] and "run.take" in summary["error"]
    assert (tmp_path / "smollm2_cpu/01b_synthetic/manifest.json").read_bytes() == before
    code, summary, _ = call(lambda _: {"findings": []}, "generate.temperature=0.9", flags=["--dry-run"])
    assert code == 0 and ["generate.temperature" in finding for finding in summary["findings"]] == [True]


def test_a_changed_amount_is_not_refused(call):
    call(complete)
    assert call(complete, "generate.concurrency=3", "prompts.0.count=5")[0] == 0


def test_a_later_stage_refuses_another_template(call):
    """G15: rows generated with other chat_template_kwargs, named."""
    call(complete)

    def later(this):
        this.require("01b_synthetic")
        return complete(this)

    code, summary, _ = call(later, "target.chat_template_kwargs={thinking: false}", name="02_hidden_states")
    assert code == 2 and "target.chat_template_kwargs" in summary["error"]


def test_a_later_stage_needs_the_earlier_one(call):
    code, summary, _ = call(lambda this: this.require("01b_synthetic"), name="02_hidden_states")
    assert code == 2 and "01b_synthetic has not run" in summary["error"]


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_ends_with_its_own_exit_code_after_saving(tmp_path, signum, code):
    script = """
        import sys, time
        from drafter import stage
        def body(this):
            this.begin(("generate.temperature",))
            print("ready", file=sys.stderr, flush=True)
            time.sleep(60)
        sys.exit(stage.run_stage("01b_synthetic", body, stage.parser("t"), ["--set", "run.dir=" + sys.argv[1]]))
        """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        cwd=config.ROOT,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert any("ready" in line for line in iter(process.stderr.readline, ""))
    os.kill(process.pid, signum)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == code
    assert json.loads(out)["status"] == "interrupted"


def test_there_is_no_eta_before_all_items_in_flight_have_ended():
    progress = Progress(100, "rows", done=20, at_once=8)
    progress.advance(8)
    assert "ETA unknown" in progress.line()
    progress.advance(1)
    assert " min" in progress.line()


def test_progress_line_shows_rate_and_eta():
    progress = Progress(10, "rows")
    progress.advance(5)
    line = progress.line(in_flight=2)
    assert line.startswith("5/10 rows") and "ETA" in line and line.endswith("in flight 2")


def test_progress_is_recorded_for_programs_and_a_file_that_cannot_be_written_stops_nothing(tmp_path):
    """Seam M5: status and report read it out of the log's sentences."""
    for path in (tmp_path / "progress.jsonl", tmp_path / "no/progress.jsonl"):
        progress = Progress(10, "rows", done=2, every=0, record=path)
        progress.advance(5)
        progress.advance()
    (first, last) = checked.records_or_empty(tmp_path / "progress.jsonl", run_files.Progressed)
    assert (first["done"], last["done"], last["total"], last["unit"]) == (7, 8, 10, "rows")
    assert first["at"] <= last["at"]


def bare(*program: str) -> subprocess.CompletedProcess:
    """A program in an interpreter that has no package but Python's own."""
    return subprocess.run(
        [sys.executable, "-S", *program], cwd=config.ROOT, capture_output=True, text=True, timeout=30
    )


@pytest.mark.parametrize(
    "program", [*(path.name for path in sorted(config.ROOT.glob("0*.py"))), "-m drafter.pipeline.report"]
)
def test_outside_the_environment_one_line_says_where_it_is(program):
    done = bare(*program.split(), "--help")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("no module '") and "source .venv/bin/activate" in done.stderr


@pytest.mark.parametrize("module", ["drafter.gone", "asyncio.gone", "yaml.gone", "this"])
def test_another_missing_module_is_a_bug_and_shows_its_trace(module, capsys):
    error = ModuleNotFoundError(f"No module named {module!r}", name=module)
    drafter._without_packages(ModuleNotFoundError, error, None)
    assert f"No module named {module!r}" in capsys.readouterr().err


def test_the_clock_of_progress_starts_with_the_first_that_is_done(monkeypatch):
    """An engine that warms up for a minute is no measure of the hours after it, nor are rows that were there."""
    now = 0.0
    monkeypatch.setattr(stage.time, "monotonic", lambda: now)
    progress = Progress(1008, "rows", at_once=2)
    now = 60.0
    progress.skip(8)
    progress.advance()
    assert "ETA unknown" in progress.line()
    for _ in range(99):
        now += 0.1
        progress.advance()
    assert progress.line().startswith("108/1008 rows, 10.00 rows/s, ETA 1.5 min")


def test_the_seconds_of_a_stage_are_those_of_all_its_calls(call, tmp_path, monkeypatch):
    def slow(this):
        this.begin(KEYS)
        this._clock -= 100
        this.counts.total = this.counts.done = 1
        return this.finish()

    assert call(slow)[1]["seconds"] == pytest.approx(100, abs=5)
    assert call(slow)[1]["seconds"] == pytest.approx(200, abs=5)


@pytest.mark.parametrize(
    ("terminal", "flags", "shown"),
    [
        (True, [], "01b_synthetic: partial, 2 of 5 done, 1 held out, 1 prompt too long, 1 left\n"),
        (True, ["--json"], "json"),
        (False, [], "json"),
    ],
)
def test_a_terminal_is_shown_words_and_a_pipe_or_json_gets_one_line_of_json(
    tmp_path, capsys, monkeypatch, terminal, flags, shown
):
    def body(this):
        this.begin(KEYS)
        this.counts.total, this.counts.done = 5, 2
        this.counts.rejected.update(["held_out", "prompt_too_long"])
        return this.finish() | {"deadline": "2026-12-01T04:00"}

    monkeypatch.setattr(signal, "signal", lambda *_: None)  # pytest keeps its own handlers
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    code = stage.run_stage("01b_synthetic", body, stage.parser("t"), ["--set", f"run.dir={tmp_path}", *flags])
    out = capsys.readouterr().out
    assert code == 0 and (json.loads(out)["out"] == 2 if shown == "json" else out == shown)


@pytest.mark.parametrize(("terminal", "lines"), [(True, 0), (False, 1)])
def test_after_a_failure_a_terminal_shows_the_error_alone(tmp_path, capsys, monkeypatch, terminal, lines):
    def body(this):
        raise ConfigError("one line")

    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    stage.run_stage("01b_synthetic", body, stage.parser("t"), ["--set", f"run.dir={tmp_path}"])
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == lines and captured.err.count("one line") == 1
