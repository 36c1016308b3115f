"""The last lines on the screen after a finished run."""

import json
import subprocess
import sys

import pytest

from drafter import config
from drafter.acceptance import wording
from drafter.pipeline import command, result
from drafter.pipeline.run import Pipeline
from tests.conftest import CPU_CONFIG
from tests.test_checked import ACCEPTANCE

HEADLINE = ACCEPTANCE["headline"] | {
    "drafter": "run", "baseline": None, "recommended": "none", "acceptance_length": 1.27, "low": 1.2, "high": 1.35,
    "speed_up": 0.6,
}  # fmt: skip


def test_the_result_names_the_drafter_the_acceptance_length_in_words_and_the_report(tmp_path):
    run = config.load(CPU_CONFIG, [f"run.dir={tmp_path}"])
    assert list(result.lines(run)) == [f"report: {run.run_dir / 'report.html'}"]
    (run.stage_dir("05_export") / "model").mkdir(parents=True)
    (folder := run.stage_dir("06_acceptance")).mkdir()
    (folder / "acceptance.json").write_text(json.dumps(ACCEPTANCE | {"headline": HEADLINE}))
    drafter, length, speed, why, report = result.lines(run)
    assert str(run.stage_dir("05_export") / "model") in drafter
    assert "1.27 (1.20 to 1.35)" in length and "tokens a step of the target" in length
    assert "0.60 times as fast" in speed and "recommended to serve: no drafter" in speed
    assert "shows that the pipeline works" in why and report.endswith("report.html")


def test_a_drafter_that_is_slower_is_explained_by_its_target():
    assert "135M" in wording.why_slower(HEADLINE, default_target=True)
    assert "concurrency" in wording.why_slower(HEADLINE, default_target=False)
    assert not wording.why_slower(HEADLINE | {"speed_up": 1.5}, default_target=False)
    assert not wording.why_slower(HEADLINE | {"speed_up": None}, default_target=True)


@pytest.mark.parametrize(
    ("terminal", "flags", "code", "json_lines"),
    [(True, [], 0, 0), (True, ["--json"], 0, 1), (False, [], 0, 1), (True, [], 1, 0), (False, [], 1, 1)],
)
def test_a_terminal_ends_with_the_result_and_gets_json_only_if_it_is_asked_for(
    tmp_path, monkeypatch, capsys, caplog, terminal, flags, code, json_lines
):
    def run(pipeline: Pipeline) -> int:
        pipeline.begun = True
        return code

    monkeypatch.setattr(Pipeline, "run", run)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    with caplog.at_level("INFO", "drafter"):
        assert command.main([str(CPU_CONFIG), "--set", f"run.dir={tmp_path}", *flags]) == code
    out = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["exit_code"] for line in out] == [code] * json_lines
    report = f"report: {tmp_path / 'smollm2_cpu/report.html'}"
    assert caplog.messages == [report] * (code == 0)


def test_json_is_refused_where_nothing_ends():
    line = ["./run_pipeline.sh", "--plan", "--json"]
    done = subprocess.run(line, cwd=config.ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "--json" in done.stderr
