"""Status: where the run is, from another terminal, changing nothing."""

import json
import os
import time

import pytest
from conftest import CPU_CONFIG

from drafter import artifacts, config, process, status


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


def test_a_failed_run_shows_its_last_error(run_config, state):
    state(status="failed", error="the disk reserve is reached")
    assert "run smollm2_cpu: failed" in text(run_config) and "last error: the disk reserve is reached" in text(
        run_config
    )
