"""du and clean: what runs hold, what may go, and what never goes by itself."""

import json

import pytest
from conftest import CPU_CONFIG

from drafter import artifacts, config, disk, locks


@pytest.fixture
def runs(tmp_path):
    """Runs `exported` and `unexported`, each with states and checkpoints."""
    for run in ("exported", "unexported"):
        for name in config.STAGES:
            folder = tmp_path / run / name
            folder.mkdir(parents=True)
            (folder / "data").write_bytes(b"x" * 100_000)
            done = run == "exported" or name in ("01b_synthetic", "02_hidden_states")
            (folder / "manifest.json").write_text(json.dumps({"status": "complete" if done else "partial"}))
            (folder / "config.yaml").write_text("run: {keep: []}\n")
    return tmp_path


def call(runs, *arguments):
    return disk.main([*arguments, "--set", f"run.dir={runs}"])


def folders(runs):
    return {f"{path.parent.name}/{path.name}" for path in runs.glob("*/0*")}


def test_du_lists_every_stage_of_every_run(runs, capsys):
    assert call(runs, "du") == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 1 + 10 + 1
    assert disk.usage(runs / "exported/02_hidden_states") >= 100_000


def test_clean_proposes_and_frees_nothing_without_yes(runs, capsys):
    before = folders(runs)
    assert call(runs, "clean") == 0
    assert "would be freed with --yes" in capsys.readouterr().out
    assert folders(runs) == before


def test_clean_frees_states_and_checkpoints_of_exported_runs_alone_and_logs_it(runs):
    before = folders(runs)
    assert call(runs, "clean", "--yes") == 0
    assert before - folders(runs) == {"exported/02_hidden_states", "exported/04_train"}
    freed = list(artifacts.read_jsonl(runs / "freed.jsonl"))
    assert len(freed) == 2 and all(record["bytes"] >= 100_000 for record in freed)


def test_an_unexported_runs_folder_goes_only_when_named(runs):
    assert call(runs, "clean", "unexported/02_hidden_states", "--yes") == 0
    assert "unexported/02_hidden_states" not in folders(runs) and "unexported/04_train" in folders(runs)
    assert call(runs, "clean", "unexported/nothing", "--yes") == 2


@pytest.mark.parametrize(
    "named", [(), ("unexported/02_hidden_states",), ("exported/04_train", "unexported/05_export")]
)
@pytest.mark.parametrize("running", ["exported", "exported/02_hidden_states", "none"])
def test_without_yes_clean_shows_exactly_what_yes_frees(runs, capsys, named, running):
    with locks.locked(runs / running):
        before = folders(runs)
        assert call(runs, "clean", *named) == 0
        shown = capsys.readouterr().out
        assert folders(runs) == before
        assert call(runs, "clean", *named, "--yes") == 0
        done = capsys.readouterr().out
    freed = before - folders(runs)
    lines = [line.split()[2].rstrip(",") for line in shown.splitlines() if line.startswith("would free ")]
    assert sorted(lines) == sorted(str(runs / name) for name in freed)
    assert shown.splitlines()[-1].removesuffix(" would be freed with --yes") == done.splitlines()[-1].removesuffix(
        " freed"
    )


@pytest.mark.parametrize("lock", ["exported", "exported/{}", "exported/{}/.shares/2of3"])
@pytest.mark.parametrize("name", ["02_hidden_states", "04_train"])
def test_a_running_run_is_never_touched(runs, lock, name):
    with locks.locked(runs / lock.format(name)):
        assert call(runs, "clean", f"exported/{name}", "--yes") == 0
        assert f"exported/{name}" in folders(runs)


def test_du_leaves_nothing_behind_and_needs_no_right_to_write(runs):
    before = sorted(runs.rglob("*"))
    assert call(runs, "du") == 0
    assert sorted(runs.rglob("*")) == before


def test_what_a_config_keeps_or_takes_stays(runs):
    (runs / "exported/04_train/config.yaml").write_text("run: {keep: [04_train]}\n")
    taken = runs / "exported/02_hidden_states"
    run_config = config.load(CPU_CONFIG, [f"run.dir={runs}", f"run.take={{02_hidden_states: {taken}}}"])
    why = {f"{each.run.name}/{each.stage}": each.why for each in disk.survey(run_config) if not each.proposed}
    assert why["exported/04_train"] == "kept by run.keep"
    assert why["exported/02_hidden_states"] == "taken by this config"
    assert why["unexported/04_train"] == "the run is not exported"
    assert why["exported/05_export"] == "small and the result"


def test_nothing_there_is_no_error(tmp_path, capsys):
    assert call(tmp_path / "none", "du") == 0
    assert "0 B in all" in capsys.readouterr().out
