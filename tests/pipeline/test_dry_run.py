"""The page of a dry run: a line a stage, each finding once, with the stage that it stops."""

import json

import pytest

from drafter import config
from drafter.pipeline import command, dry_run, preflight
from drafter.pipeline.run import Pipeline
from tests.conftest import CPU_CONFIG


def plans(**changes):
    """What the stages of a new run say of themselves."""
    said = {name: {"stage": name, "pending": 1, "findings": ["nothing is there yet"]} for name in config.STAGES}
    sources = {"s": {"conversations": 101, "requests": 93, "rejected": {"held_out": 8}}}
    said["01b_synthetic"] |= {"pending": 93, "findings": [], "sources": sources}
    return [said[name] | changes.get(f"_{name}", {}) for name in config.STAGES]


def page(monkeypatch, tmp_path, found, asked):
    monkeypatch.setattr(preflight, "findings", lambda *_: found)
    return list(dry_run.lines(config.load(CPU_CONFIG, [f"run.dir={tmp_path}"]), asked))


def test_a_new_run_says_what_comes_first_and_what_waits(monkeypatch, tmp_path):
    assert page(monkeypatch, tmp_path, {}, plans()) == [
        f"run smollm2_cpu in {tmp_path}/smollm2_cpu",
        "  01b_synthetic     93 requests to answer (s: 101 conversations, 8 held_out)",
        "  02_hidden_states  waits for 01b_synthetic",
        "  04_train          waits for 02_hidden_states",
        "  05_export         waits for 04_train",
        "  06_acceptance     waits for 05_export",
        f"never rehearsed with this machine, engine and model; in minutes: ./run_pipeline.sh {CPU_CONFIG} --rehearse "
        f"--set run.dir={tmp_path}",
        "nothing to fix was found",
    ]


def test_how_prompts_were_read_and_which_are_rejected_is_shown_below_01b(monkeypatch, tmp_path):
    """Seam U3: how each source was read is one line of the dry run, with its first conversation."""
    read = ["prompts s: /data/s.jsonl (JSON Lines), read by question, turns: last; the first: 'why?'"]
    broken = ["prompts s: rejected: /data/s.jsonl line 4: not JSON", "a line can be ..."]
    lines = page(monkeypatch, tmp_path, {}, plans(_01b_synthetic={"read": read, "broken": broken}))
    assert [line.strip() for line in lines[2:5]] == [*read, *broken]


def test_a_finding_is_shown_once_below_its_stage(monkeypatch, tmp_path):
    twice = "no model at /nowhere"
    found = {twice: "01b_synthetic", "no drafter at /nowhere": "04_train"}
    lines = page(monkeypatch, tmp_path, found, plans(_01b_synthetic={"findings": [twice]}))
    assert lines[1:3] == ["  01b_synthetic     cannot begin", f"      ! {twice}"]
    assert lines[4:6] == ["  04_train          waits for 02_hidden_states", "      ! no drafter at /nowhere"]
    assert lines[-1] == "2 to fix (!) before `run_pipeline.sh` starts anything"


def test_a_missing_input_is_shown_once(monkeypatch, tmp_path):
    """By 02 and by 06, and by the plan of 02 itself."""
    found = preflight.missing_inputs(run := config.load(CPU_CONFIG, [f"run.dir={tmp_path}"]), config.STAGES[1:])
    monkeypatch.setattr(preflight, "findings", lambda *_: dict(found))
    of_02 = {"pending": 0, "findings": ["stage 01b_synthetic has not run"]}
    lines = list(dry_run.lines(run, plans(_02_hidden_states=of_02)[1:]))
    assert lines[1] == "  02_hidden_states  cannot begin"
    assert [line for line in lines if "01b_synthetic" in line] == [lines[2]] and "which has not run" in lines[2]
    assert [line.split(None, 1)[1] for line in lines[3:-2]] == [
        "waits for 02_hidden_states", "waits for 04_train", "waits for 05_export"
    ]  # fmt: skip
    assert lines[-1] == "1 to fix (!) before `run_pipeline.sh` starts anything"


def test_what_is_finished_has_nothing_to_do_and_the_next_stage_counts(monkeypatch, tmp_path):
    done, rows = {"pending": 0, "findings": []}, {"pending": 1200, "bytes": 3 * 2**30, "findings": []}
    lines = page(monkeypatch, tmp_path, {}, plans(_01b_synthetic=done, _02_hidden_states=rows))
    assert lines[1:3] == [
        "  01b_synthetic     nothing to do", "  02_hidden_states  1,200 rows to read back (3.22 GB)"
    ]  # fmt: skip


def test_a_manifest_to_be_written_again_is_work_and_the_next_stage_waits_for_it(monkeypatch, tmp_path):
    """Seam U4"""
    done = {"pending": 0, "findings": [], "stale": "manifest.json was written for other prompts"}
    lines = page(monkeypatch, tmp_path, {}, plans(_01b_synthetic=done))
    assert lines[1:3] == [
        "  01b_synthetic     its counts to write again: manifest.json was written for other prompts",
        "  02_hidden_states  waits for 01b_synthetic",
    ]


def test_lines_that_cannot_be_used_are_named_and_stop_nothing(monkeypatch, tmp_path):
    line = "prompts mine: rejected: /data/mine.jsonl line 7: not JSON: Expecting value"
    lines = page(monkeypatch, tmp_path, {}, plans(_01b_synthetic={"broken": [line]}))
    assert lines[1].startswith("  01b_synthetic     93 requests to answer") and lines[2] == f"      {line}"
    assert lines[-1] == "nothing to fix was found"


def test_the_default_model_is_not_made_by_a_dry_run_and_not_missing(monkeypatch, tmp_path):
    """Seam H4: it was converted first, 270 MB."""
    monkeypatch.setattr(dry_run, "DEFAULT_MODEL", tmp_path / "model")
    run = config.load(CPU_CONFIG, [f"run.dir={tmp_path}", f"target.model={tmp_path / 'model'}"])
    _, line = dry_run.lines(run, plans(_01b_synthetic={"findings": ["no model"]}))
    assert line == f"  the first run creates the target {tmp_path}/model; nothing more can be checked without it"
    assert list(tmp_path.iterdir()) == []


def test_what_is_unknown_offline_is_a_note_and_no_finding(monkeypatch, tmp_path):
    note = {"pending": 1, "findings": [], "notes": ["the hub has it"]}
    lines = page(monkeypatch, tmp_path, {}, plans(_01b_synthetic=note))
    assert lines[1:3] == [
        "  01b_synthetic     everything is left to do; the number is unknown offline", "      the hub has it"
    ]  # fmt: skip
    assert lines[-1] == "nothing to fix was found"


@pytest.mark.parametrize(
    ("status", "finished"), [("complete", True), ("partial", True), ("running", False), (None, False)]
)
def test_a_stage_taken_from_another_run_is_not_planned_and_must_be_finished(monkeypatch, tmp_path, status, finished):
    """Whatever it says of itself is about a folder that is not this run's to write."""
    if status:
        (tmp_path / "manifest.json").write_text(json.dumps({"status": status}))
    monkeypatch.setattr(preflight, "findings", lambda *_: {})
    run = config.load(CPU_CONFIG, [f"run.dir={tmp_path}", f"run.take={{01b_synthetic: {tmp_path}}}"])
    lines = list(dry_run.lines(run, plans(_01b_synthetic={"findings": ["no prompts"]})))
    assert lines[1] == f"  01b_synthetic     taken from {tmp_path}"
    found = [line for line in lines if "no finished 01b_synthetic" in line]
    waiting = [line for line in lines if "waits for 01b_synthetic" in line]
    assert (len(found), bool(waiting)) == ((0, False) if finished else (1, True))


def test_a_freed_stage_is_shown_as_to_be_made_again(monkeypatch, tmp_path):
    (tmp_path / "freed.jsonl").write_text(f'{{"freed": "{tmp_path}/smollm2_cpu/02_hidden_states", "bytes": 7}}\n')
    said = page(monkeypatch, tmp_path, {}, plans(_01b_synthetic={"pending": 0}, _02_hidden_states={"findings": []}))
    assert "  02_hidden_states  freed by drafter.disk clean, will be made again: 1 row to read back" in said


def test_a_dry_run_says_at_once_what_it_does_and_names_each_stage_that_has_answered(monkeypatch, tmp_path, caplog):
    said = plans()

    def dry_runs(_pipeline, steps, ended):
        assert caplog.messages == ["asking 5 stages what is left to do"]
        for at in range(len(steps)):
            ended(at)
        return said

    monkeypatch.setattr(Pipeline, "dry_runs", dry_runs)
    monkeypatch.setattr(preflight, "findings", lambda *_: {})
    with caplog.at_level("INFO", "drafter"):
        assert command.main([str(CPU_CONFIG), "--dry-run", "--set", f"run.dir={tmp_path}"]) == 0
    assert caplog.messages[1:6] == [f"{name} has answered" for name in config.STAGES]
    assert caplog.messages[6] == "checking this machine, the engine and the model"
