"""Status: where the run is, from another terminal, changing nothing."""

import json
import os
import time

import pytest
from conftest import CPU_CONFIG

from drafter import artifacts, config, default_model, process, report, status


@pytest.fixture
def run_config(tmp_path, model):
    return config.load(CPU_CONFIG, [f"run.dir={tmp_path}"])


@pytest.fixture
def state(run_config):
    run_config.run_dir.mkdir(parents=True)

    def write(**changes):
        started = {"status": "running", "started": time.time() - 120}
        stages = {"01b_synthetic": {"status": "complete", "seconds": 90.0}, "02_hidden_states": started}
        default = {"status": "running", "stage": "02_hidden_states", "stages": stages}
        default |= process.identity(os.getpid()) | {"home": artifacts.home(run_config.run_dir)}
        (run_config.run_dir / "pipeline.json").write_text(json.dumps(default | changes))

    return write


def text(run_config):
    return "\n".join(status.lines(run_config))


def test_a_run_that_has_not_begun_says_so(run_config):
    assert "has not begun" in text(run_config)


@pytest.mark.parametrize("program", [status.main, default_model.main])
def test_help_is_printed_and_nothing_done(program, capsys):
    with pytest.raises(SystemExit) as end:
        program(["--help"])
    assert end.value.code == 0 and capsys.readouterr().out.startswith("usage: python -m drafter.")


def test_by_hand_status_prints_the_page(run_config, capsys):
    assert status.main(["--set", f"run.dir={run_config.run.dir}"]) == 0
    assert "has not begun" in capsys.readouterr().out


def test_a_running_run_shows_stages_progress_and_when_it_ends(run_config, state):
    state()
    (run_config.run_dir / "plan.json").write_text(json.dumps({"04_train": {"seconds": {"typical": 3600}}}))
    (run_config.run_dir / "logs").mkdir()
    (run_config.run_dir / "logs/02_hidden_states.log").write_text("19:30:00 5/93 rows, ETA 3 min\n")
    shown = text(run_config)
    assert "run smollm2_cpu: running" in shown and "01b_synthetic     complete" in shown and "1.5 min" in shown
    assert "| 19:30:00 5/93 rows, ETA 3 min" in shown and "done at about" in shown and "free" in shown


@pytest.mark.parametrize("changes", [{"pid": 2**22 - 1}, {"birth": "1"}, {"boot": "another"}, {"home": "a copy"}])
def test_a_run_whose_process_is_gone_or_another_is_not_called_running(run_config, state, changes):
    state(**changes, production=["vllm-team"])
    assert "killed; the same command continues it" in text(run_config)
    assert "the next run gives back: vllm-team" in text(run_config)


def by_hand(run_config, name, **facts):
    folder = run_config.run_dir / name
    folder.mkdir(parents=True, exist_ok=True)
    manifest = {"status": "complete", "in": 9, "out": 9, "seconds": 60, "updated": "2099-01-01T00:00:00+00:00"}
    (folder / "manifest.json").write_text(json.dumps(manifest | facts))


def test_stages_run_by_hand_are_shown_as_their_manifests_say(run_config):
    by_hand(run_config, "01b_synthetic")
    by_hand(run_config, "02_hidden_states", status="running", process=process.identity(os.getpid()))
    assert "run smollm2_cpu: by hand" in (shown := text(run_config))
    assert "01b_synthetic     complete     9 of 9           1.0 min" in shown and "02_hidden_states  running" in shown
    by_hand(run_config, "02_hidden_states", status="running", process={"pid": 2**22 - 1, "boot": process.boot()})
    assert "02_hidden_states  stopped" in text(run_config)
    by_hand(run_config, "02_hidden_states", status="failed", error="layer 2 is constant")
    assert "last error: layer 2 is constant" in text(run_config)


def test_a_stage_that_was_finished_by_hand_is_no_longer_the_runs_failure(run_config, state):
    failed = {"01b_synthetic": {"status": "failed", "started": 1.7e9, "seconds": 90.0, "exit_code": 3}}
    state(status="failed", stage="01b_synthetic", stages=failed, error="no answer")
    by_hand(run_config, "01b_synthetic", updated="2020-01-01T00:00:00+00:00")
    assert "01b_synthetic     failed" in text(run_config) and "last error: no answer" in text(run_config)
    by_hand(run_config, "01b_synthetic")
    assert "run smollm2_cpu: not complete" in (shown := text(run_config)) and "error" not in shown


def test_a_stage_that_is_late_is_not_done_now(run_config, state):
    late = {"06_acceptance": {"status": "running", "started": time.time() - 3600}}
    state(stage="06_acceptance", stages=late)
    planned = {"06_acceptance": {"seconds": {"typical": 1800, "high": 7200}}}
    (run_config.run_dir / "plan.json").write_text(json.dumps(planned))
    assert status._left(report.Found(run_config)) == pytest.approx(3600, abs=5)


def test_a_failed_run_shows_its_last_error(run_config, state):
    state(status="failed", error="the disk reserve is reached")
    assert "run smollm2_cpu: failed" in text(run_config) and "last error: the disk reserve is reached" in text(
        run_config
    )
