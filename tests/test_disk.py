"""du and clean: what runs hold, what may go, and what never goes by itself."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from drafter import config, disk, files, locks
from drafter.errors import ConfigError
from drafter.pipeline import engine_check, rehearsal_record
from drafter.serve import boot_times, smoke_record
from drafter.target import weights_fingerprint
from tests.conftest import CPU_CONFIG
from tests.holding import held


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
    freed = list(files.read_jsonl(runs / "freed.jsonl"))
    assert len(freed) == 2 and all(record["bytes"] >= 100_000 for record in freed)


FULL = """
mount -t tmpfs -o size=2m none "$1" || exit 99
cp -a "$2/." "$1" && cat /dev/zero > "$1/filler"
"$3" -m drafter.disk clean --yes --set "run.dir=$1" && ls -d "$1"/*/0* >&2
"""


def test_clean_frees_on_a_full_disk(runs, tmp_path_factory):
    """Seam H2: its locks' records did not fit, and it asked to free some space first."""
    mount = tmp_path_factory.mktemp("mount")
    if os.getuid() or not shutil.which("unshare"):
        pytest.skip("needs root and unshare")
    line = ["unshare", "-m", "sh", "-c", FULL, "sh", str(mount), str(runs), sys.executable]
    done = subprocess.run(line, cwd=config.ROOT, capture_output=True, text=True)
    if done.returncode == 99 or "unshare" in done.stderr:
        pytest.skip("no mounts here")
    assert done.returncode == 0, done.stderr
    left = set(done.stderr.splitlines())
    assert f"{mount}/exported/01b_synthetic" in left and f"{mount}/exported/02_hidden_states" not in left


def test_an_unexported_runs_folder_goes_only_when_named(runs):
    assert call(runs, "clean", "unexported/02_hidden_states", "--yes") == 0
    assert "unexported/02_hidden_states" not in folders(runs) and "unexported/04_train" in folders(runs)
    assert call(runs, "clean", "unexported/nothing", "--yes") == 2


@pytest.mark.parametrize(
    ("named", "freed"),
    [
        (["unexported/01b_synthetic"], {"unexported/01b_synthetic"}),
        (["unexported/01b_synthetic/", "exported/05_export"], {"unexported/01b_synthetic", "exported/05_export"}),
        (["unexported"], {f"unexported/{name}" for name in config.STAGES}),
    ],
)
@pytest.mark.parametrize("order", [("--yes", "names"), ("names", "--yes"), ("--yes", "verb", "names")])
def test_clean_frees_exactly_the_named_folders(runs, capsys, named, freed, order):
    """`clean hand/01b_synthetic --yes` also freed the states of another, exported run; `--yes` first was refused."""
    words = {"names": named, "--yes": ["--yes"], "verb": ["clean"]}
    before = folders(runs)
    line = [word for part in order for word in words[part]]
    assert call(runs, *(line if "verb" in order else ["clean", *line])) == 0
    assert before - folders(runs) == freed
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1 : 1 + len(before)]]
    assert {f"{row[0]}/{row[1]}" for row in rows if "free" in row} == freed
    assert all(("named" if "free" in row else "not named") in " ".join(row) for row in rows)


@pytest.mark.parametrize("wrong", ["nothing", "exported/nothing", "exported/data", "freed.jsonl", "."])
def test_a_name_that_is_no_stage_folder_and_no_run_frees_nothing(runs, wrong, capsys):
    """It freed what was proposed instead."""
    before = folders(runs)
    assert call(runs, "clean", "unexported/04_train", wrong, "--yes") == 2
    assert f": {wrong}; nothing was freed" in capsys.readouterr().err
    assert folders(runs) == before


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


STATES, WEIGHTS = "02_hidden_states", "04_train"


def complete(run):
    for name in config.STAGES:
        (run / name / "manifest.json").write_text(json.dumps({"status": "complete"}))


def take(runs, run, name, folder):
    """Make a run's stages say that they take `folder`, as 04 says it when it begins."""
    text = f"run: {{take: {{{name}: {folder}}}}}\n"
    for stage_name in config.STAGES:
        (runs / run / stage_name / "config.yaml").write_text(text)


@pytest.mark.parametrize("name", [STATES, WEIGHTS])
@pytest.mark.parametrize("working", config.STAGES)
def test_no_folder_of_a_run_is_deleted_while_a_manual_stage_works(runs, capsys, name, working):
    """Seam H2, Seam K2: `04_train.py` by hand holds the lock of 04 alone, and reads 02."""
    with held("working", runs / "exported" / working, working) as stage:
        assert call(runs, "clean", f"exported/{name}", "--yes") == 0
    assert f"exported/{name}" in folders(runs)
    said = capsys.readouterr().out
    assert f"keeps {runs}/exported/{name}: the run is running ({working}, process {stage.pid} on" in said


def test_no_folder_goes_while_a_stage_of_another_run_reads_it(runs, capsys):
    """Seam H2: named or proposed."""
    with held("reading", runs / "exported" / STATES):
        assert call(runs, "clean", f"exported/{STATES}", "--yes") == 0
        assert f"keeps {runs}/exported/{STATES}: another process reads it" in capsys.readouterr().out
        assert call(runs, "clean", "--yes") == 0
    assert f"exported/{STATES}" in folders(runs) and f"exported/{WEIGHTS}" not in folders(runs)


@pytest.mark.parametrize("name", [STATES, WEIGHTS])
def test_what_an_unfinished_run_takes_from_another_is_kept(runs, capsys, name):
    """Seam H2: `clean` with A's config frees what B trains on."""
    take(runs, "unexported", name, runs / "exported" / name)
    assert call(runs, "clean", "--yes") == 0
    assert f"exported/{name}" in folders(runs)
    assert "taken by run unexported, which is not complete" in capsys.readouterr().out
    complete(runs / "unexported")
    assert call(runs, "clean", "--yes") == 0
    assert f"exported/{name}" not in folders(runs)


def test_a_folder_that_comes_into_use_after_the_look_is_kept(runs, caplog):
    """Seam L10: it looked, then deleted, without holding a lock."""
    seen = disk.survey(config.load(CPU_CONFIG, [f"run.dir={runs}"]))
    with held("working", runs / "exported/04_train", "04_train"):
        freed = disk.clean(seen, runs / "freed.jsonl")
    assert freed == 0 and {f"exported/{STATES}", f"exported/{WEIGHTS}"} <= folders(runs)
    assert not (runs / "freed.jsonl").exists()


def test_no_process_starts_in_a_run_while_one_of_its_folders_is_deleted(runs, monkeypatch):
    """Seam L10"""
    refused = []

    def rmtree(path):
        assert not (runs / "exported" / STATES).exists(), "it has lost its name first, whole"
        for place in (runs / "exported", path):
            with pytest.raises(ConfigError) as error:
                locks.locked(place, seconds=0).__enter__()
            refused.append(str(error.value))
        real(path)

    real = disk.shutil.rmtree
    monkeypatch.setattr(disk.shutil, "rmtree", rmtree)
    assert call(runs, "clean", "--set", f"run.keep=[{WEIGHTS}]", "--yes") == 0
    assert len(refused) == 2 and all("drafter.disk clean" in line for line in refused)


def test_what_a_killed_clean_leaves_is_no_stage_and_goes_with_the_next(runs, monkeypatch, capsys):
    """Seam L10: half a folder under its own name would be taken for the stage's."""
    monkeypatch.setattr(disk.shutil, "rmtree", lambda path: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        call(runs, "clean", "--yes")
    monkeypatch.undo()
    left = [path for path in (runs / "exported").iterdir() if path.suffix == ".part"]
    assert len(left) == 1 and len(folders(runs) & {f"exported/{STATES}", f"exported/{WEIGHTS}"}) == 1
    assert call(runs, "clean", "--yes") == 0
    assert "left by an interrupted clean" in capsys.readouterr().out
    assert not left[0].exists() and not folders(runs) & {f"exported/{STATES}", f"exported/{WEIGHTS}"}


@pytest.mark.parametrize(
    "content", ["", "run:", "run: [", "[]", "run: {take: 3}", "run: {take: {04_train: 3}}", "\0"]
)
@pytest.mark.parametrize("verb", [("du",), ("clean",), ("clean", "--yes")])
def test_a_broken_config_of_a_neighbour_is_a_line_and_keeps_its_own_folder(runs, capsys, caplog, content, verb):
    """Seam L2: an empty or half config.yaml was an AttributeError in du and clean."""
    broken = runs / "unexported" / STATES / "config.yaml"
    complete(runs / "unexported")
    broken.write_text(content)
    with caplog.at_level("INFO"):
        assert call(runs, *verb) == 0
    assert "its config.yaml cannot be read" in capsys.readouterr().out
    assert [str(broken) in record.message for record in caplog.records].count(True) == 1
    assert f"unexported/{STATES}" in folders(runs)
    assert (f"exported/{STATES}" in folders(runs)) == ("--yes" not in verb)


def test_what_no_run_made_is_named_and_left_alone(runs, capsys, tmp_path_factory):
    """Seam I: artefacts in run.dir that are not ours; a stage's folder that is a link elsewhere."""
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "states"
    (runs / "exported" / STATES).rename(elsewhere)
    (runs / "exported" / STATES).symlink_to(elsewhere)
    (runs / "my backup").mkdir()
    (runs / "my backup/weights").write_text("precious")
    (runs / "notes.txt").write_text("precious")
    assert call(runs, "clean", "--yes") == 0
    said = capsys.readouterr().out
    assert f"not part of a run, left alone: {runs}/my backup\n" in said
    assert f"not part of a run, left alone: {runs}/notes.txt\n" in said
    assert f"a link, left alone: {runs}/exported/{STATES} -> {elsewhere}\n" in said
    assert "freed.jsonl" not in said
    assert (runs / "my backup/weights").exists() and (elsewhere / "data").exists()


def test_the_files_that_runs_share_are_ours():
    """Seam I: each module that keeps a file in run.dir."""
    kept = {smoke_record.NAME, engine_check.KEPT, weights_fingerprint.CACHE, rehearsal_record.NAME}
    kept |= {boot_times.NAME, "freed.jsonl"}
    assert kept == set(disk.BESIDE_RUNS)


def test_a_small_folder_has_a_size(runs, capsys):
    """Seam I: below 5 MB every size read 0.00."""
    assert call(runs, "du") == 0
    said = capsys.readouterr().out
    assert " 0.11 MB " in said and " 0.00 " not in said
