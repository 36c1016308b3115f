"""Status: where the run is, from another terminal, changing nothing."""

import json
import os
import re
import time
from datetime import UTC, datetime

import pytest

from drafter import config, disk, files, process
from drafter.pipeline import status
from drafter.pipeline.report import page as report
from drafter.pipeline.run_state import RunState
from drafter.target import default_model
from tests.conftest import CPU_CONFIG


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
        default |= process.identity(os.getpid()) | {"home": files.inode_id(run_config.run_dir)}
        (run_config.run_dir / "pipeline.json").write_text(json.dumps(default | changes))

    return write


def text(run_config):
    return "\n".join(status.lines(run_config))


def test_a_run_that_has_not_begun_says_so(run_config):
    assert "has not begun" in text(run_config)


def test_what_is_taken_from_another_run_is_neither_this_runs_work_nor_left(run_config, tmp_path):
    taken = {name: tmp_path / f"other/{name}" for name in config.STAGES[:2]}
    for folder in taken.values():
        folder.mkdir(parents=True)
        files.write_json(folder / "manifest.json", {"status": "complete", "seconds": 5400})
    run = run_config.model_copy(update={"run": run_config.run.model_copy(update={"take": taken})})
    run.run_dir.mkdir()
    assert "has not begun" in text(run)
    for name in config.STAGES[2:]:
        by_hand(run, name)
    first, second, *_ = text(run).splitlines()
    assert (
        first.startswith("run smollm2_cpu: complete")
        and second == f"  01b_synthetic     taken from {taken['01b_synthetic']}"
    )
    assert RunState(run).minutes("01b_synthetic") is None and "taken" in report.timeline(RunState(run))
    assert "--only 01b" not in report.rerun(RunState(run)), "its folder is another run's, and not to be removed"


@pytest.mark.parametrize("program", [status.main, default_model.main])
def test_help_is_printed_and_nothing_done(program, capsys):
    with pytest.raises(SystemExit) as end:
        program(["--help"])
    assert end.value.code == 0 and capsys.readouterr().out.startswith("usage: python -m drafter.")


def test_the_status_command_prints_the_page(run_config, capsys):
    assert status.main(["--set", f"run.dir={run_config.run.dir}"]) == 0
    assert "has not begun" in capsys.readouterr().out


def test_a_running_run_shows_stages_progress_and_when_it_ends(run_config, state):
    state()
    by_hand(run_config, "01b_synthetic")
    (run_config.run_dir / "plan.json").write_text(json.dumps({"04_train": {"seconds": {"typical": 3600}}}))
    (run_config.run_dir / "logs").mkdir()
    (run_config.run_dir / "logs/02_hidden_states.log").write_text("19:30:00 5/93 rows, ETA 3 min\n")
    shown = text(run_config)
    assert "run smollm2_cpu: running" in shown and "01b_synthetic     complete" in shown and "1.5 min" in shown
    assert "| 19:30:00 5/93 rows, ETA 3 min" in shown and "done at about" in shown and "free" in shown


@pytest.mark.parametrize("changes", [{"pid": 2**22 - 1}, {"birth": "1"}, {"boot": "another"}, {"home": "a copy"}])
def test_a_run_whose_process_is_gone_or_another_is_not_called_running(run_config, state, changes):
    state(**changes, production=["vllm-team"])
    assert "interrupted; the same command continues it" in text(run_config)
    assert "the next call will restart: vllm-team" in text(run_config)


def by_hand(run_config, name, **facts):
    folder = run_config.run_dir / name
    folder.mkdir(parents=True, exist_ok=True)
    manifest = {"status": "complete", "in": 9, "out": 9, "seconds": 60, "updated": "2099-01-01T00:00:00+00:00"}
    (folder / "manifest.json").write_text(json.dumps(manifest | facts))


def progressed(run_config, name, *records):
    folder = run_config.run_dir / name
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "progress.jsonl", "a") as file:
        for at, done, total in records:
            file.write(json.dumps({"at": at, "done": done, "total": total, "unit": "rows"}) + "\n")


def test_manual_stages_are_shown_as_their_manifests_say(run_config):
    by_hand(run_config, "01b_synthetic")
    by_hand(run_config, "02_hidden_states", status="running", process=process.identity(os.getpid()))
    assert "run smollm2_cpu: running manually" in (shown := text(run_config))
    assert "01b_synthetic     complete     9 of 9 rows  1.0 min" in shown and "02_hidden_states  running" in shown
    by_hand(run_config, "02_hidden_states", status="running", process={"pid": 2**22 - 1, "boot": process.boot_id()})
    assert "02_hidden_states  interrupted" in text(run_config)
    by_hand(run_config, "02_hidden_states", status="failed", error="layer 2 is constant")
    assert "last error: layer 2 is constant" in text(run_config)


def test_a_stage_that_was_finished_manually_is_no_longer_the_runs_failure(run_config, state):
    failed = {
        "01b_synthetic": {"status": "failed", "started": 1.7e9, "ended": 1.7e9 + 90, "seconds": 90.0, "exit_code": 3}
    }
    state(status="failed", stage="01b_synthetic", stages=failed, error="no answer")
    by_hand(run_config, "01b_synthetic", updated="2020-01-01T00:00:00+00:00")
    assert "01b_synthetic     failed" in text(run_config) and "last error: no answer" in text(run_config)
    by_hand(run_config, "01b_synthetic")
    assert "run smollm2_cpu: not complete" in (shown := text(run_config)) and "error" not in shown


@pytest.mark.parametrize("by_pipeline", [True, False])
def test_a_failure_whose_input_was_made_again_since_is_no_longer_shown(run_config, state, by_pipeline):
    """Seam U6: 04 missed a states file, `--only 02` made it, and status went on naming the file."""
    error = "a57b.safetensors is missing; 02_extract_hidden_states.py makes it again"
    made, failed, repaired = (f"2026-11-30T0{hour}:00:00+00:00" for hour in (1, 2, 3))
    if by_pipeline:
        ended = datetime.fromisoformat(failed).timestamp()
        stages = {"04_train": {"status": "failed", "started": ended - 60, "ended": ended, "exit_code": 1}}
        state(status="failed", stage="04_train", stages=stages, error=error)
    by_hand(run_config, "02_hidden_states", updated=made)
    by_hand(run_config, "04_train", status="failed", error=error, updated=failed)
    shown = text(run_config)
    assert f"last error: {error}" in shown and ("run smollm2_cpu: failed" in shown) == by_pipeline
    by_hand(run_config, "02_hidden_states", updated=repaired)
    assert "run smollm2_cpu: not complete" in (shown := text(run_config)) and "error" not in shown
    assert "04_train          begun" in shown and "No drafter yet" not in report.page(RunState(run_config))


def test_the_log_of_an_earlier_call_is_not_shown_for_a_later_one(run_config, state):
    stages = {"01b_synthetic": {"status": "running", "started": time.time() - 60, "seconds": 240}}
    state(stage="01b_synthetic", stages=stages)
    log = run_config.run_dir / "logs/01b_synthetic.log"
    log.parent.mkdir()
    earlier = "19:00:30 4/16 rows, 1.00 rows/s\n01b_synthetic: interrupted by SIGINT\n"
    by_hand(run_config, "01b_synthetic", status="interrupted", **{"in": 16, "out": 6})
    for new, age in (("", 90), ("19:05:00 begins: python 01b\n", 0)):  # its server starts, then itself
        log.write_text(f"19:00:00 begins: python 01b\n{earlier}{new}")
        os.utime(log, (time.time() - age,) * 2)
        shown = text(run_config)
        assert "running      6 of 16 rows  5.0 min, 1.0 of them since" in shown and "|" not in shown
    progressed(run_config, "01b_synthetic", (time.time() - 90, 4, 16))
    now = datetime.now(UTC).isoformat(timespec="seconds")
    by_hand(run_config, "01b_synthetic", status="running", started=now, **{"in": 0, "out": 0})
    assert not re.search(r"rows|\|", text(run_config))
    with open(log, "a") as file:
        file.write("19:05:40 9/16 rows, 1.00 rows/s\n")
    progressed(run_config, "01b_synthetic", (time.time(), 9, 16))
    assert "9 of 16 rows" in text(run_config) and "  | 19:05:40 9/16 rows" in text(run_config)


def test_the_pipelines_log_of_an_earlier_call_is_not_shown_for_a_manual_stage(run_config, state):
    state(status="interrupted", pid=2**22 - 1)
    log = run_config.run_dir / "logs/02_hidden_states.log"
    log.parent.mkdir()
    log.write_text("19:00:30 4/16 rows, 1.00 rows/s\n")
    os.utime(log, (time.time() - 3600,) * 2)
    progressed(run_config, "02_hidden_states", (time.time() - 3600, 4, 16))
    began = datetime.fromtimestamp(time.time() - 600, UTC).isoformat(timespec="seconds")
    at_work = {"status": "running", "started": began, "updated": began, "process": process.identity(os.getpid())}
    by_hand(run_config, "02_hidden_states", **at_work, **{"in": 0, "out": 0, "seconds": 300})
    shown = text(run_config)
    assert "15.0 min, 10.0 of them since" in shown and "4 of 16" not in shown and "|" not in shown


def test_a_stage_whose_folder_was_removed_is_not_complete(run_config, state):
    state()
    assert "01b_synthetic     not begun" in (shown := text(run_config)) and "1.5 min" not in shown


def test_a_stage_that_an_earlier_call_took_is_shown_as_taken_from_there(run_config):
    """A call without that call's `--set run.take...` showed it as not begun."""
    by_hand(run_config, "02_hidden_states")
    (run_config.run_dir / "02_hidden_states/config.yaml").write_text("run: {take: {01b_synthetic: /other/01b}}\n")
    assert "  01b_synthetic     taken from /other/01b\n" in text(run_config)


def test_what_clean_freed_of_a_finished_run_is_freed_and_not_unbegun(run_config):
    for name in config.STAGES:
        by_hand(run_config, name)
    assert (
        disk.main(["clean", "smollm2_cpu/02_hidden_states", "--yes", "--set", f"run.dir={run_config.run.dir}"]) == 0
    )
    shown = text(run_config)
    assert shown.startswith("run smollm2_cpu: complete") and "  02_hidden_states  freed" in shown
    assert "drafter.disk clean freed 02_hidden_states; the same command would make them again" in shown
    by_hand(run_config, "02_hidden_states")
    assert "  freed" not in (shown := text(run_config)) and "clean freed" not in shown


def test_the_end_is_that_of_the_stages_asked_for(run_config, state):
    state(asked=["02_hidden_states"])
    hour = {"seconds": {"typical": 3600}}
    (run_config.run_dir / "plan.json").write_text(json.dumps({"02_hidden_states": hour, "04_train": hour}))
    assert status._left(RunState(run_config)) == pytest.approx(3480, abs=5)


def test_a_stage_that_is_late_is_not_done_now(run_config, state):
    late = {"06_acceptance": {"status": "running", "started": time.time() - 3600}}
    state(stage="06_acceptance", stages=late)
    planned = {"06_acceptance": {"seconds": {"typical": 1800, "high": 7200}}}
    (run_config.run_dir / "plan.json").write_text(json.dumps(planned))
    assert status._left(RunState(run_config)) == pytest.approx(3600, abs=5)


def test_a_failed_run_shows_its_last_error(run_config, state):
    state(status="failed", error="the disk reserve is reached")
    assert "run smollm2_cpu: failed" in text(run_config) and "last error: the disk reserve is reached" in text(
        run_config
    )


def test_what_was_never_to_be_answered_is_not_counted_and_what_was_lost_is(run_config, state):
    """Law 7"""
    state()
    by_hand(run_config, "01b_synthetic", **{"in": 101, "out": 93, "rejected": {"held_out": 8}})
    assert "93 of 93 rows  " in text(run_config)
    by_hand(run_config, "01b_synthetic", **{"in": 1200, "out": 1096, "rejected": {"duplicate": 100, "failed": 4}})
    assert "1,096 of 1,100 rows, 4 rejected  " in text(run_config)


def test_training_is_counted_in_steps_and_a_running_stage_by_its_log(run_config, state):
    state()
    by_hand(run_config, "04_train", status="interrupted", out=0, facts={"steps": 240})
    assert "04_train          interrupted  0 of 240 steps" in text(run_config)
    records = [{"kind": "train", "step": 12}, {"kind": "validation", "step": 12}]
    (run_config.run_dir / "04_train/metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in records))
    assert "12 of 240 steps" in text(run_config)
    by_hand(run_config, "02_hidden_states", status="running", **{"in": 0, "out": 0})
    assert re.search("02_hidden_states  running  +2.0 min, since", text(run_config))
    progressed(run_config, "02_hidden_states", (time.time() - 60, 5, 1093), (time.time(), 1005, 1093))
    assert "02_hidden_states  running      1,005 of 1,093 rows" in text(run_config)


def test_a_stages_minutes_are_those_of_all_its_calls(run_config, state):
    running = {"status": "running", "started": time.time() - 120, "seconds": 600}
    state(stages={"02_hidden_states": running})
    by_hand(run_config, "02_hidden_states", status="running", seconds=300)
    assert "12.0 min, 2.0 of them since" in text(run_config)
    log = run_config.run_dir / "logs/02_hidden_states.log"
    log.parent.mkdir()
    log.touch()
    os.utime(log, (running["started"] + 60,) * 2)
    state(stages={"02_hidden_states": running}, pid=2**22 - 1)
    assert "11.0 min" in text(run_config), "the last that is known of a call that was killed"
    by_hand(run_config, "02_hidden_states", seconds=1200)
    assert "20.0 min" in text(run_config), "others by hand"


@pytest.mark.parametrize("how", ["signal", "kill"])
def test_an_interrupted_stage_has_one_name_everywhere(run_config, state, how):
    stages = {"02_hidden_states": {"status": "interrupted" if how == "signal" else "running", "started": 1.7e9}}
    said = {"status": "interrupted", "error": "interrupted by SIGTERM"} if how == "signal" else {"pid": 2**22 - 1}
    state(stages=stages, **said)
    manifest = (
        {"status": "interrupted"}
        if how == "signal"
        else {"status": "running", "process": {"boot": process.boot_id()}}
    )
    by_hand(run_config, "02_hidden_states", **manifest)
    shown, page = text(run_config), report.write(run_config).read_text()
    assert "run smollm2_cpu: interrupted; the same command continues it" in shown
    assert "02_hidden_states  interrupted" in shown and "<td>02_hidden_states</td><td>interrupted</td>" in page
    assert "No drafter yet: interrupted in 02_hidden_states" in page
    assert not any(word in shown + page for word in ("stopped", "killed;"))
