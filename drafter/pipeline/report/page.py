"""The report of a run: `report.html`, one file, written whatever happened.

Written after every stage from what the stages left behind; a part that is not there yet is left out.
By hand: `python -m drafter.pipeline.report --config FILE`.
"""

from collections import Counter
from datetime import datetime
from html import escape
from itertools import pairwise
from pathlib import Path

from drafter import checked, disk, errors, files, run_files, stage, text
from drafter.acceptance.wording import caveats, length, named, recommendation, why_slower
from drafter.config import STAGES, Config
from drafter.errors import ConfigError
from drafter.model_folder import DEFAULT_MODEL
from drafter.pipeline.report import charts, elements
from drafter.pipeline.run_state import NOT_ASKED, RunState, seconds_of

NUMBERS = {name: name.partition("_")[0] for name in STAGES}
HISTOGRAM_ROWS = 50_000
SPREAD = ("typical", "low", "high")  # of a planned time

# Columns of the acceptance tables: heading -> key of a record in acceptance.json
MEASURED = {
    "drafter": "drafter",
    "tokens a step": "acceptance_length",
    "95% low": "low",
    "95% high": "high",
    "in reasoning": "reasoning_length",
    "in answers": "answer_length",
    "tokens/s": "tokens_per_second",
    "speed-up": "speed_up",
    "prompt set": "prompt_set",
    "prompts": "prompts",
    "concurrency": "concurrency",
    "draft tokens": "num_speculative_tokens",
    "temperature": "temperature",
}
BY_SOURCE = {
    "drafter": "drafter",
    "source": "source",
    **{name: MEASURED[name] for name in ("tokens a step", "95% low", "95% high", "in reasoning", "in answers")},
    **{name: MEASURED[name] for name in ("prompt set", "prompts", "concurrency", "draft tokens", "temperature")},
}
COMPARED = {
    "drafter": "drafter",
    "against": "baseline",
    "verdict": "verdict",
    "difference": "difference",
    "99% low": "low",
    "99% high": "high",
    "part": "part",
    "prompt set": "prompt_set",
    "prompts": "prompts",
}

STYLE = Path(__file__).with_name("report.css")


def write(config: Config) -> Path:
    """Write `report.html` of a run and return its path."""
    path = config.run_dir / "report.html"
    text = page(RunState(config))
    files.write_text(path, text.encode(errors="backslashreplace").decode())  # a file name need not be valid text
    return path


def page(found: RunState) -> str:
    name = escape(found.config.run.name)
    sections = [
        verdict(found),
        acceptance(found),
        timeline(found),
        elements.section(
            "Charts",
            elements.grid(
                [durations(found), *throughput(found), lengths(found), *training(found), per_position(found)]
            ),
        ),
        rows(found),
        space(found),
        rerun(found),
        versions(found),
        elements.section(
            "Config", f"<details><summary>resolved config</summary><pre>{escape(found.config.dump())}</pre></details>"
        ),
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<style>{STYLE.read_text()}</style></head><body><h1>{name}</h1>"
        f'<div class="soft">{escape(str(found.config.target.model))}, written {datetime.now():%Y-%m-%d %H:%M}</div>'
        f"{''.join(sections)}</body></html>\n"
    )


# The sections, in the order of the page


def verdict(found: RunState) -> str:
    """The answer first: whether the drafter is better, or why that is not known."""
    if found.acceptance:
        head = found.acceptance["headline"]
        tone = {"better": "good", "worse": "bad"}.get(head["verdict"], "wait")
        said = f"Acceptance length {length(head)} with {escape(named(head['drafter']))}"
        if head["baseline"]:
            low, high = _signed(head["difference_low"]), _signed(head["difference_high"])
            said += (
                f": {escape(head['verdict'])} against {escape(named(head['baseline']))}, "
                f"difference {_signed(head['difference'])} ({low} to {high})"
            )
        else:
            said += ", no other drafter to compare it with"
        recommended = recommendation(head)
        advice = f"{escape(recommended[0].upper() + recommended[1:])}."
        if head["speed_up"]:
            advice += f" Decoding is {head['speed_up']:.2f} times as fast as without a drafter."
        if why := why_slower(head, found.config.target.model == DEFAULT_MODEL):
            advice += f" {why[0].upper() + why[1:]}."
        return elements.box(tone, said, advice)
    if trouble := found.trouble():
        code = found.pipeline_record(trouble.at).get("exit_code")
        where = f"{trouble.how} in {escape(trouble.at)}" if trouble.at else f"{trouble.how} before the first stage"
        return elements.box(
            "bad", f"No drafter yet: {where}", f"{escape(trouble.reason)}; {errors.next_action(code)}."
        )
    statuses = {name: found.status(name) for name in STAGES}
    begun = [f"{name} {status}" for name, status in statuses.items() if status != "not begun"]
    return elements.box("wait", "Not measured yet", escape(", ".join(begun) or "Not begun") + ".")


def acceptance(found: RunState) -> str:
    if not found.acceptance:
        return ""
    head = found.acceptance["headline"]
    expected = found.acceptance.get("expected", {}).get(head["drafter"])
    tiles = [
        (length(head), f"tokens a step, {named(head['drafter'])}"),
        (f"{expected:.2f}" if expected else "", "tokens a step, as training expected"),
        (f"{head['speed_up']:.2f}x" if head["speed_up"] else "", "tokens a second against no drafter"),
        (f"{head['tokens_per_second']:,.0f}" if head["tokens_per_second"] else "", "tokens a second"),
    ]
    shown = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(what)}</span></div>' for value, what in tiles if value
    )
    measured = elements.columns(found.acceptance["measurements"], MEASURED)
    compared = elements.columns(found.acceptance["comparisons"], COMPARED)
    limits = "".join(f"<li>{escape(sentence)}</li>" for sentence in caveats(found.acceptance))
    body = f'<div class="tiles">{shown}</div>{measured}{_prompt_sources(found)}{compared}<ul>{limits}</ul>'
    return elements.section("Acceptance", body)


def _prompt_sources(found: RunState) -> str:
    """Prompts and acceptance by prompt set and source: an acceptance length is valid only for its sources."""
    sets = found.acceptance.get("prompt_sets", [])
    body = [[one["name"], source, count] for one in sets for source, count in one.get("sources", {}).items()]
    counted = elements.table(["prompt set", "source", "prompts"], body) if body else ""
    apart = found.acceptance.get("by_source", [])
    return counted + (elements.columns(apart, BY_SOURCE) if apart else "")


def timeline(found: RunState) -> str:
    """Planned and actual time of each stage, including its server's starts and restarts."""
    body = []
    for name in STAGES:
        seen, manifest = found.pipeline_record(name), found.manifest(name)
        began = seen.get("started") or seconds_of(manifest.get("started"))
        started = f"{datetime.fromtimestamp(began):%a %H:%M}" if began else ""
        body.append([name, found.status(name), found.minutes(name), *map(found.planned(name).get, SPREAD), started])
    header = ["stage", "status", "actual min", "planned min", "at least", "at most", "last started"]
    return elements.section("Timeline", elements.table(header, body))


def durations(found: RunState) -> str:
    series = {
        "planned": [found.planned(name).get("typical") for name in STAGES],
        "actual": [found.minutes(name) for name in STAGES],
    }
    return charts.bars("Minutes by stage", [NUMBERS[name] for name in STAGES], series, "stage", "min")


def throughput(found: RunState) -> list[str]:
    """Rates over time: of 01b and 02 from their recorded progress, of 04 from its metrics."""
    drawn = []
    for name, what in zip(STAGES, ("Generation", "Extraction"), strict=False):
        points, unit = _rates(found.progress_records(name))
        if len(points) < 2:
            continue
        drawn.append(charts.lines(f"{what} over time", {unit: points}, "minutes", f"{unit}/s", from_zero=True))
    steps = [
        (r["step"], r["tokens_per_s"]) for r in found.metrics if r.get("kind") == "train" and "tokens_per_s" in r
    ]
    drawn.append(charts.lines("Training speed", {"tokens a second": steps}, "step", "tok/s", from_zero=True))
    return drawn


def lengths(found: RunState) -> str:
    """Tokens of each row, and those of them that training sees."""
    index = checked.records_or_empty(
        found.config.stage_dir("02_hidden_states") / run_files.INDEX, run_files.Indexed, HISTOGRAM_ROWS
    )
    if not index:
        return ""
    labels, heights = charts.histogram([entry["row_tokens"] for entry in index])
    return charts.bars("Length of rows", labels, {"rows": heights}, "tokens", "rows")


def training(found: RunState) -> list[str]:
    trained = [r for r in found.metrics if r.get("kind") == "train"]
    validated = [r for r in found.metrics if r.get("kind") == "validation"]

    def curve(records: list[dict], key: str) -> list[tuple[float, float]]:
        return [(r["step"], r[key][0] if isinstance(r[key], list) else r[key]) for r in records if key in r]

    expected = {"all": curve(validated, "expected_acceptance")}
    for part in ("reasoning", "answer"):
        apart = [r | {"expected_acceptance": r[part]["expected_acceptance"]} for r in validated if part in r]
        if apart:
            expected[part] = curve(apart, "expected_acceptance")
    return [
        charts.lines(
            "Loss of the first guess",
            {"training": curve(trained, "loss"), "validation": curve(validated, "loss")},
            "step",
            "loss",
        ),
        charts.lines("Expected acceptance length (validation)", expected, "step", "tokens a step"),
    ]


def per_position(found: RunState) -> str:
    measured = [m for m in found.acceptance.get("measurements", []) if m["per_position"]]
    if not measured:
        return ""
    first = measured[0]
    same = [
        m for m in measured if all(m[k] == first[k] for k in ("prompt_set", "concurrency", "num_speculative_tokens"))
    ]
    labels = [str(place + 1) for place in range(len(first["per_position"]))]
    series = {m["drafter"]: m["per_position"] for m in same}
    return charts.bars(
        f"Accepted by position ({first['prompt_set']})", labels, series, "position of the guess", "share"
    )


def rows(found: RunState) -> str:
    body = []
    for name, m in found.manifests.items():
        if m and "in" in m:
            by_reason = m.get("rejected", {})
            apart = [by_reason.get(reason, 0) for reason in NOT_ASKED]
            body.append([name, m["in"], m.get("out"), *apart, sum(by_reason.values()) - sum(apart), m.get("pending")])
    if not body:
        return ""
    counted: Counter = Counter()
    for name in STAGES[:2]:
        for record in checked.records_or_empty(found.config.stage_dir(name) / run_files.REJECTED, run_files.Rejected):
            counted[name, record.get("source", ""), record.get("reason", "")] += 1
    reasons: dict[str, list[list]] = {"rejected in": [], "not asked in": []}
    for key, count in sorted(counted.items()):
        reasons["not asked in" if key[-1] in NOT_ASKED else "rejected in"].append([*key, count])
    apart = [reason.replace("_", " ") for reason in NOT_ASKED]
    return elements.section(
        "Rows",
        elements.table(["stage", "in", "out", *apart, "rejected", "pending"], body)
        + "".join(elements.table([what, "source", "reason", "rows"], each) for what, each in reasons.items() if each)
        + _preempted(found),
    )


def _preempted(found: RunState) -> str:
    """Tokens that 01b's server computed twice."""
    generation = found.manifest("01b_synthetic").get("facts", {}).get("generation", {})
    count, tokens = generation.get("preemptions"), generation.get("kv_cache_tokens", 0)
    if not count:
        return ""
    return (
        f"<p>The server of 01b preempted requests {count:,} times and computed them again: its KV cache of "
        f"{tokens:,} tokens does not hold generate.concurrency requests (see docs/operations.md).</p>"
    )


def space(found: RunState) -> str:
    body = []
    for name in STAGES:
        folder = found.config.stage_dir(name)
        if folder.exists():
            planned = found.plan.get(name, {}).get("bytes")
            body.append([name, _gb(planned), _gb(disk.usage(folder))])
    free = text.size(files.free_bytes(found.config.run_dir))
    table = elements.table(["stage", "planned GB", "GB"], body) if body else ""
    return elements.section("Disk", table + f'<p class="soft">{free} free.</p>')


def rerun(found: RunState) -> str:
    own = [name for name in STAGES if name not in found.config.run.take]
    lines = [found.config.pipeline("--only", NUMBERS[name]) for name in own]
    hint = '<p class="soft">A finished stage has nothing to do: remove its folder first.</p>'
    return elements.section("Run a stage again", f"<pre>{escape(chr(10).join(lines))}</pre>{hint}")


def versions(found: RunState) -> str:
    newest = next((m["versions"] for m in reversed(found.manifests.values()) if m and "versions" in m), None)
    return (
        elements.section("Versions", elements.table(["package", "version"], [list(item) for item in newest.items()]))
        if newest
        else ""
    )


# Pieces


def _signed(value: float | None) -> str:
    return "unknown" if value is None else f"{value:+.2f}"


def _gb(count: float | None) -> float | None:
    return None if count is None else round(count / 1e9, 3)


def _rates(progressed: list[dict]) -> tuple[list[tuple[float, float]], str]:
    """Points (minutes since the first record, rate since the previous one) and the unit."""
    return [
        ((after["at"] - progressed[0]["at"]) / 60, (after["done"] - before["done"]) / (after["at"] - before["at"]))
        for before, after in pairwise(progressed)
        if after["at"] > before["at"] and after["done"] >= before["done"]
    ], progressed[-1]["unit"] if progressed else "rows"


def main(argv: list[str] | None = None) -> int:
    def body(config: Config, _args) -> None:
        if not RunState(config).has_begun():
            raise ConfigError(f"run {config.run.name} has not begun ({config.run_dir})")
        print(write(config))

    return stage.run_tool("report", body, stage.tool_parser(__doc__, "python -m drafter.pipeline.report"), argv)
