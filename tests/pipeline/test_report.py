"""The morning's page: its verdict and figures, whatever happened, in a real browser, alone on the disk."""

import json
import re
import shutil
import subprocess

import pytest

from drafter import config
from drafter.pipeline.report import charts, elements
from drafter.pipeline.report import page as report
from tests.conftest import CPU_CONFIG

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def headline(**changes):
    return {
        "verdict": "better",
        "recommended": "run",
        "drafter": "run",
        "baseline": "warm_start",
        "acceptance_length": 2.471,
        "low": 2.31,
        "high": 2.63,
        "per_position": [0.71, 0.48, 0.28],
        "tokens_per_second": 812.4,
        "speed_up": 1.62,
        "difference": 0.38,
        "difference_low": 0.21,
        "difference_high": 0.55,
    } | changes


def measurement(drafter, length, positions):
    return {
        "drafter": drafter,
        "prompt_set": "held_out",
        "concurrency": 8,
        "num_speculative_tokens": 3,
        "temperature": 1.0,
        "prompts": 80,
        "acceptance_length": length,
        "low": length - 0.1,
        "high": length + 0.1,
        "reasoning_length": length + 0.2,
        "answer_length": length - 0.2,
        "per_position": positions,
        "tokens_per_second": 700.0,
        "speed_up": 1.4,
    }


@pytest.fixture
def run_config(tmp_path, model):
    return config.load(CPU_CONFIG, [f"run.dir={tmp_path}", "run.name=night"])


@pytest.fixture
def finished(run_config):
    """A run with everything a page can show, without a GPU's night behind it."""
    run_dir = run_config.run_dir
    stages = {name: {"status": "complete", "started": 1.8e9, "seconds": 600.0} for name in config.STAGES}
    write(run_dir / "pipeline.json", {"status": "complete", "stage": "06_acceptance", "stages": stages, "pid": 1})
    write(run_dir / "plan.json", {name: {"seconds": {"typical": 660.0}, "bytes": 2**30} for name in config.STAGES})
    for name in config.STAGES:
        counts = {"in": 93, "out": 90, "rejected": {"duplicate": 3}, "pending": 0}
        manifest = {"stage": name, "status": "complete", "seconds": 600.0, "versions": {"vllm": "0.32.0"}}
        write(run_dir / name / "manifest.json", manifest | counts)
    jsonl(run_dir / "01b_synthetic/rejected.jsonl", [{"source": "<b>x</b>", "reason": "duplicate"}] * 3)
    jsonl(run_dir / "02_hidden_states/index.jsonl", [{"row_tokens": 40 + 7 * i % 500} for i in range(90)])
    train = [{"kind": "train", "step": i, "loss": [5 / i, 6 / i], "tokens_per_s": 900 + i} for i in range(1, 200)]
    apart = {"reasoning": {"expected_acceptance": 2.5}, "answer": {"expected_acceptance": 1.9}}
    judged = {"kind": "validation", "loss": [3.0]} | apart
    validation = [judged | {"step": i, "expected_acceptance": 1 + i / 150} for i in range(0, 200, 20)]
    jsonl(run_dir / "04_train/metrics.jsonl", train + validation)
    done = [{"at": 1.7e9 + 60 * m, "done": m * 3, "total": 93, "unit": "rows"} for m in range(31)]
    jsonl(run_dir / "01b_synthetic/progress.jsonl", done)
    comparison = {"drafter": "run", "baseline": "warm_start", "prompt_set": "all", "part": "all", "prompts": 80}
    write(
        run_dir / "06_acceptance/acceptance.json",
        {
            "headline": headline(),
            "measurements": [
                measurement("warm_start", 2.09, [0.6, 0.3, 0.19]),
                measurement("run", 2.47, [0.7, 0.5, 0.3]),
            ],
            "comparisons": [comparison | {"difference": 0.38, "low": 0.21, "high": 0.55, "verdict": "better"}],
        },
    )
    return run_config


def write(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_the_verdict_comes_first_with_intervals(finished):
    text = report.write(finished).read_text()
    first = re.sub("<[^>]+>", " ", text[text.index('class="verdict') :])[:400]
    assert "Acceptance length 2.47 (2.31 to 2.63) with the trained drafter: better against the warm start, " in first
    assert "difference +0.38 (+0.21 to +0.55)" in first
    assert "Recommended to serve: the trained drafter" in first and "1.62 times" in first
    assert text.index('class="verdict') < text.index("<h2>")


def test_a_drafter_without_a_rival_is_described_in_words(finished):
    path = finished.run_dir / "06_acceptance/acceptance.json"
    alone = headline(verdict="not compared", baseline=None, recommended="none", speed_up=0.53)
    write(path, json.loads(path.read_text()) | {"headline": alone})
    text = report.write(finished).read_text()
    assert "with the trained drafter, no other drafter to compare it with" in text and "not compared" not in text
    assert "Recommended to serve: no drafter. Decoding is 0.53 times as fast as without a drafter." in text


def test_without_anything_to_compare_with_nothing_is_recommended(finished):
    path = finished.run_dir / "06_acceptance/acceptance.json"
    alone = headline(verdict="not compared", baseline=None, speed_up=None)
    write(path, json.loads(path.read_text()) | {"headline": alone})
    text = report.write(finished).read_text()
    assert "No baseline was measured, so nothing is recommended." in text and "ecommended to serve" not in text


def test_tokens_that_01bs_server_computed_twice_are_shown(finished):
    assert "preempted" not in report.write(finished).read_text()
    path = finished.run_dir / "01b_synthetic/manifest.json"
    facts = {"generation": {"preemptions": 1065, "kv_cache_tokens": 190_000}}
    write(path, json.loads(path.read_text()) | {"facts": facts})
    assert "preempted requests 1,065 times and computed them again: its KV cache of 190,000 tokens" in (
        report.write(finished).read_text()
    )


def test_the_length_that_training_expected_is_shown_beside_the_served_one(finished):
    """Seam F6: 1.30 expected and 1.02 served stood in two files, and no page showed both."""
    path = finished.run_dir / "06_acceptance/acceptance.json"
    assert "as training expected" not in report.write(finished).read_text()
    write(path, json.loads(path.read_text()) | {"expected": {"run": 3.14}})
    text = report.write(finished).read_text()
    assert "<b>3.14</b><span>tokens a step, as training expected</span>" in text
    assert "expected an acceptance length of 3.14 for the trained drafter, outside the served interval" in text


def test_the_prompts_that_were_measured_on_are_counted_by_source(finished):
    """Seam U5: a drafter for cooking was measured on no cooking prompt, and nothing near the figure said so."""
    path = finished.run_dir / "06_acceptance/acceptance.json"
    sets = [{"name": "held_out", "ngram_overlap": None, "sources": {"<i>cooking": 2, "sample": 6}}]
    write(path, json.loads(path.read_text()) | {"prompt_sets": sets})
    text = re.sub("</?t[rdh][^>]*>", " ", report.write(finished).read_text())
    section = text[text.index("<h2>Acceptance") : text.index("<h2>Timeline")]
    assert "held_out  &lt;i&gt;cooking  2" in re.sub(" +", "  ", section)
    assert "held_out  sample  6" in re.sub(" +", "  ", section)


def test_the_acceptance_on_each_source_is_shown(finished):
    path = finished.run_dir / "06_acceptance/acceptance.json"
    apart = [measurement("run", 1.875, []) | {"source": "mine", "prompts": 31}]
    write(path, json.loads(path.read_text()) | {"by_source": apart})
    text = report.write(finished).read_text()
    assert "<td>mine</td>" in text and "1.875" in text


def test_what_was_not_asked_is_no_reject(finished):
    """Law 7"""
    folder = finished.run_dir / "01b_synthetic"
    counts = {"in": 101, "out": 90, "rejected": {"held_out": 8, "duplicate": 2, "bad_conversation": 1}, "pending": 0}
    write(folder / "manifest.json", {"stage": "01b_synthetic", "status": "complete", "versions": {}} | counts)
    jsonl(folder / "rejected.jsonl", [{"source": "s", "reason": each} for each in ("held_out", "bad_conversation")])
    text = re.sub("</?t[rdh]>", " ", report.write(finished).read_text())
    assert " held out  duplicate  rejected  pending " in text and " 01b_synthetic  101  90  8  2  1  0 " in text
    assert re.search("rejected in .* 01b_synthetic  s  bad_conversation  1 .*not asked in .* s  held_out  1 ", text)


@pytest.mark.parametrize(
    "figure",
    [
        "Minutes by stage", "Generation over time", "Training speed", "Length of rows", "Loss of the first guess",
        "Expected acceptance length (validation)", "Accepted by position (held_out)",
    ],
)  # fmt: skip
def test_every_figure_is_drawn(finished, figure):
    assert f"<figcaption>{figure}</figcaption>" in report.write(finished).read_text()


def test_the_page_is_one_file_without_network(finished):
    text = report.write(finished).read_text()
    assert not re.search(r'(src|href)="(?!data:)', text) and "url(" not in text and "@import" not in text


def test_text_from_outside_is_escaped(finished):
    text = report.write(finished).read_text()
    assert "&lt;b&gt;x&lt;/b&gt;" in text and "<b>x</b>" not in text


def test_rerun_commands_name_every_stage(finished):
    text = report.write(finished).read_text()
    for number in ("01b", "02", "04", "05", "06"):
        assert f"--only {number}" in text


def test_a_failed_run_says_why_and_where(run_config):
    state = {"status": "failed", "stage": "02_hidden_states", "stages": {}, "error": "layer 2 is constant"}
    write(run_config.run_dir / "pipeline.json", state)
    text = report.write(run_config).read_text()
    assert "failed in 02_hidden_states" in text and "layer 2 is constant" in text


def test_a_manual_run_shows_what_its_manifests_say(run_config):
    write(
        run_config.run_dir / "01b_synthetic/manifest.json", {"status": "complete", "in": 9, "out": 9, "seconds": 60}
    )
    text = report.write(run_config).read_text()
    assert "01b_synthetic complete." in text and "<td>01b_synthetic</td><td>complete</td><td>1</td>" in text
    write(run_config.run_dir / "02_hidden_states/manifest.json", {"status": "failed", "error": "layer 2 is constant"})
    text = report.write(run_config).read_text()
    assert "failed in 02_hidden_states" in text and "layer 2 is constant" in text


def test_the_report_of_a_run_that_has_not_begun_is_one_line_and_no_folder(tmp_path, capsys):
    arguments = ["--set", f"run.dir={tmp_path}/runs"]
    assert report.main(arguments) == 2
    assert capsys.readouterr().err == f"report: run smollm2_cpu has not begun ({tmp_path}/runs/smollm2_cpu)\n"
    assert not list(tmp_path.iterdir())
    (tmp_path / "runs/smollm2_cpu/01b_synthetic").mkdir(parents=True)
    (tmp_path / "runs/smollm2_cpu/01b_synthetic/manifest.json").write_text('{"status": "partial"}')
    assert report.main(arguments) == 0
    assert (tmp_path / "runs/smollm2_cpu/report.html").exists()


def test_a_run_that_has_not_begun_and_torn_files_still_make_a_page(run_config):
    assert "Not measured yet" in report.write(run_config).read_text()
    torn = ("pipeline.json", "plan.json", "04_train/manifest.json", "04_train/metrics.jsonl")
    for name in (*torn, "06_acceptance/acceptance.json"):
        path = run_config.run_dir / name
        path.parent.mkdir(exist_ok=True)
        path.write_text('{"headline": ')
    assert "Not measured yet" in report.write(run_config).read_text()


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (Debian: apt install chromium)")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_every_figure_without_a_console_error(finished, tmp_path, scheme):
    page = report.write(finished)
    line = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    line += ["--enable-logging=stderr", "--window-size=390,900", "--virtual-time-budget=2000", "--dump-dom"]
    line += ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
    done = subprocess.run([*line, page.as_uri()], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0
    assert "CONSOLE" not in done.stderr
    assert done.stdout.count("<svg") == 7 and done.stdout.count("<polyline") == 7


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e308])
def test_a_loss_that_is_not_finite_is_left_out_of_its_chart(run_config, value):
    """The report of a training that stopped at it gives its verdict"""
    state = {"status": "failed", "stage": "04_train", "stages": {}, "error": "the validation loss is not finite"}
    write(run_config.run_dir / "pipeline.json", state)
    (run_config.run_dir / "04_train").mkdir()
    losses = [3.0, 2.5, value]
    records = [
        {"kind": "validation", "step": step, "loss": [loss], "expected_acceptance": value}
        for step, loss in enumerate(losses)
    ]
    jsonl(run_config.run_dir / "04_train/metrics.jsonl", records)
    text = report.write(run_config).read_text()
    assert "failed in 04_train" in text and "the validation loss is not finite" in text
    line = re.search('<polyline class="line c0" points="([^"]+)"', text).group(1)
    assert len(line.split()) == 2 and "<title>validation: 2.5</title>" in text
    assert "Expected acceptance length (validation)" not in text


def test_bars_leave_out_what_is_not_finite():
    drawn = charts.bars("t", ["a", "b", "c"], {"s": [1.0, float("nan"), None]}, "x", "y")
    assert drawn.count("<rect") == 1
    assert charts.bars("t", ["a"], {"s": [float("inf")]}, "x", "y") == ""


def test_recorded_progress_gives_rates_and_a_restart_gives_none():
    records = [(0, 10), (60, 40), (60, 40), (90, 5), (120, 20)]
    progressed = [{"at": 1.7e9 + at, "done": done, "total": 99, "unit": "rows"} for at, done in records]
    assert report._rates(progressed) == ([(1.0, 0.5), (2.0, 0.5)], "rows")
    assert report._rates([]) == ([], "rows")


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (0, 0), (2.1, 2.6), (0, 93_000), (-3, 5), (1e-5, 3e-5), (5e-324, 1e-323), (1e15, 1e15)]
)
def test_ticks_are_round_and_enclose_the_values(low, high):
    found = charts.ticks(low, high)
    assert found[0] <= low and found[-1] >= high and 2 <= len(found) <= 8
    assert all(abs(a - b) > 0 for a, b in zip(found, found[1:], strict=False))


def test_a_histogram_counts_every_value_once():
    labels, heights = charts.histogram([0, 1, 5, 99, 100])
    assert sum(heights) == 5 and len(labels) == len(heights) == 20 and heights[-1] == 2


def test_a_long_line_is_thinned_and_keeps_its_end():
    points = [(x, x * x) for x in range(10_001)]
    thinned = charts.thin(points)
    assert len(thinned) <= charts.POINTS + 1 and thinned[0] == (0, 0) and thinned[-1] == points[-1]


def test_tables_leave_out_columns_that_nothing_fills():
    text = elements.columns([{"a": 1, "b": None}], {"A": "a", "B": "b"})
    assert "<th>A</th>" in text and "<th>B</th>" not in text
    assert elements.columns([], {"A": "a"}) == ""
