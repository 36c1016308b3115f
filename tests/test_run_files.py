"""Files that are whole JSON with something wrong in them: both pages are made, and show nothing of what is wrong."""

import json
import re

import pytest

from drafter import checked, config, process, run_files
from drafter import files as artifacts
from drafter.errors import ContractError
from drafter.pipeline import status
from drafter.pipeline.report import page as report
from tests.conftest import CPU_CONFIG

STAGE, HAND = "02_hidden_states", "01b_synthetic"
FILES = {"state": "pipeline.json", "plan": "plan.json", "manifest": f"{HAND}/manifest.json"} | {
    "train": "04_train/manifest.json", "metric": "04_train/metrics.jsonl", "index": f"{STAGE}/index.jsonl",
    "rejected": f"{HAND}/rejected.jsonl", "acceptance": "06_acceptance/acceptance.json",
}  # fmt: skip
NONE = {"pid": 2**22 - 1, "birth": "1", "boot": process.boot_id()}
HEADLINE = dict.fromkeys(run_files.Headline.__annotations__, 1.0) | {
    "verdict": "better", "recommended": "run", "drafter": "run", "baseline": "warm_start", "acceptance_length": 2.5,
}  # fmt: skip
UNIT = {"drafter": "run", "prompt_set": "held_out", "concurrency": 8, "num_speculative_tokens": 3, "temperature": 0.7}


@pytest.fixture
def run_config(tmp_path, model):
    return config.load(CPU_CONFIG, [f"run.dir={tmp_path}"])


@pytest.fixture
def files(run_config):
    return the_files(run_config)


def the_files(run_config):
    """One file of every kind, by name, as it is written when nothing is wrong."""
    run_config.run_dir.mkdir()
    seen = {"status": "interrupted", "started": 1.8e9, "ended": 1.8e9, "seconds": 600.0, "exit_code": 143}
    counts = {"in": 93, "out": 85, "rejected": {"held_out": 8}, "pending": 0}
    times = {"started": "2026-11-30T01:00:00+00:00", "updated": "2026-11-30T02:00:00+00:00", "seconds": 720.0}
    manifest = {"status": "running", **counts, **times, "facts": {}, "versions": {"vllm": "0.32.0"}, "process": NONE}
    judged = {"expected_acceptance": 1.5}
    return {
        "state": {
            "status": "interrupted", "stage": STAGE, "stages": {STAGE: seen}, "error": "interrupted by SIGTERM",
            "production": ["vllm-team"], "home": artifacts.inode_id(run_config.run_dir), **NONE,
        },
        "plan": {STAGE: {"seconds": {"low": 60, "typical": 1200, "high": 2400}, "rows": 93, "bytes": 2**30}},
        "manifest": manifest,
        "train": manifest | {"status": "failed", "error": "the loss is not finite", "facts": {"steps": 240}},
        "metric": {"kind": "validation", "step": 12, "loss": [3.0], "reasoning": judged, **judged},
        "index": {"row_tokens": 40},
        "rejected": {"source": "a", "reason": "held_out"},
        "acceptance": {
            "headline": {**HEADLINE},
            "measurements": [UNIT | {"per_position": [0.5, 0.2, 0.1], "prompts_refused": 1, "streams_agree": False}],
            "comparisons": [UNIT],
            "left_out": [UNIT | {"prompts_skipped": 2}],
            "prompt_sets": [{"name": "own", "ngram_overlap": {"words": 13, "prompts": 1, "of": 8, "too_short": 4}}],
            "greedy_agreement": [UNIT | {"equal_outputs": 1.0, "equal_tokens": 1.0, "reference_concurrency": 8}],
        },
    }  # fmt: skip


def pages(run_config, files):
    for name, content in files.items():
        path = run_config.run_dir / FILES[name]
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content) + "\n")
    return "\n".join(status.lines(run_config)), report.write(run_config).read_text()


def test_a_run_with_every_file_shows_all_of_them(run_config, files):
    shown, page = pages(run_config, files)
    assert "run smollm2_cpu: interrupted" in shown and "will restart: vllm-team" in shown
    assert f"{HAND}     interrupted  " in shown and "10.0 min" in shown and "12 of 240 steps" in shown
    assert "<td>20</td><td>1</td><td>40</td>" in page, "planned"
    assert "Acceptance length 2.50" in page and "the server refused 1 prompts" in page and "Length of rows" in page


INF, NAN = float("inf"), float("nan")
WRONG = {
    "state": [
        *(("stages", STAGE, key, bad) for key in ("seconds", "started", "ended") for bad in (None, "x", INF, 1e20)),
        ("stages", STAGE, "seconds", NAN), ("stages", STAGE, "started", -1),
        ("stages", STAGE, 5), ("stages", STAGE, "exit_code", "x"), ("production", [1, None]), ("stage", "../x"),
        ("status", None), ("pid", -1), ("boot", 5), ("asked", ["07"]), ("error", [1]),
    ],
    "plan": [(STAGE, 5), (STAGE, "seconds", None), *((STAGE, "seconds", "typical", bad) for bad in ("x", None, INF))],
    "manifest": [
        *((key, bad) for key in ("in", "out", "pending") for bad in ("x", None, -1, 1.5, True)),
        ("rejected", [1]), ("rejected", {"a": "b"}), ("process", [1]), ("process", {"pid": "x"}), ("error", 5),
        ("seconds", INF), ("seconds", "x"), ("facts", {"steps": "x"}), ("versions", [1]), ("updated", 5),
    ],
    "metric": [("step", "x"), ("step", None), ("loss", []), ("tokens_per_s", "x"), ("reasoning", 5), ("answer", {})],
    "index": [("row_tokens", None), ("row_tokens", -1)],
    "rejected": [("source", 5), ("reason", None)],
    "acceptance": [
        ("headline", "drafter", 5), ("headline", "low", "x"), ("measurements", [1]), ("comparisons", None),
        ("measurements", 0, "per_position", 5), ("left_out", 0, "temperature", "x"), ("prompt_sets", 0, "name", 5),
        ("greedy_agreement", 0, "equal_tokens", None),
    ],
}  # fmt: skip
# What no page says once the file is unreadable
GONE = {
    "state": "last error: interrupted by SIGTERM", "plan": "<td>20</td><td>1</td><td>40</td>",
    "manifest": f"{HAND}     interrupted", "metric": "12 of 240 steps", "index": "Length of rows",
    "rejected": "<td>a</td><td>held_out</td>", "acceptance": "Acceptance length 2.50",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "wrong"), [(name, wrong) for name, each in WRONG.items() for wrong in each], ids=lambda part: str(part)
)
def test_a_file_with_one_wrong_type_is_as_one_that_is_not_there(run_config, files, name, wrong):
    assert GONE[name] in "".join(pages(run_config, files))
    *path, last, value = wrong
    inner = files[name]
    for key in path:
        inner = inner[key]
    inner[last] = value
    shown, page = pages(run_config, files)
    assert GONE[name] not in shown + page
    if name == "manifest":
        assert re.search(f"{HAND} +unreadable", shown) and f"<td>{HAND}</td><td>unreadable</td>" in page


@pytest.mark.parametrize("lost", ["pid", "birth", "boot"])
def test_a_process_that_is_not_all_there_does_not_live(run_config, files, lost):
    del files["state"][lost], files["manifest"]["process"][lost]
    files["state"]["status"] = "running"
    shown, _ = pages(run_config, files)
    assert "run smollm2_cpu: interrupted" in shown
    assert re.search(f"{HAND} +{'begun' if lost == 'boot' else 'interrupted'} ", shown)


def test_undecodable_bytes_are_shown_as_escapes(run_config, files, capsys):
    files["state"]["error"] = "no file \udcff"
    pages(run_config, files)
    (run_config.run_dir / FILES["acceptance"]).unlink()  # else the page says what was measured
    assert status.main(["--set", f"run.dir={run_config.run.dir}"]) == 0
    assert r"last error: no file \udcff" in capsys.readouterr().out
    assert r"no file \udcff" in report.write(run_config).read_text()


def test_a_finished_stage_whose_folder_was_removed_has_not_begun(run_config, files):
    complete = {"status": "complete", "started": 1.8e9, "seconds": 600.0, "exit_code": 0}
    state = files["state"] | {"status": "complete", "stage": "06_acceptance", "error": None}
    state["stages"] = dict.fromkeys(config.STAGES, complete)
    shown, page = pages(run_config, {"state": state, "manifest": files["manifest"] | {"status": "complete"}})
    assert "run smollm2_cpu: not complete" in shown
    assert re.search(f"{HAND} +complete .*10.0 min|{HAND} +complete .*12.0 min", shown)
    assert re.search(f"{STAGE} +not begun$", shown, re.MULTILINE)
    assert f"<td>{STAGE}</td><td>not begun</td>" in page


@pytest.mark.parametrize("status_", ["failed", "interrupted"])
def test_a_stage_that_ended_before_it_wrote_a_manifest_keeps_what_the_pipeline_says(run_config, files, status_):
    files["state"]["stages"][STAGE]["status"] = status_
    shown, _ = pages(run_config, {"state": files["state"]})
    assert re.search(f"{STAGE} +{status_} ", shown)


def test_what_is_wrong_is_named():
    with pytest.raises(ContractError, match="^rejected.a: Input should be a valid integer$"):
        checked.validate(run_files.Manifest, {"rejected": {"a": "b"}})
