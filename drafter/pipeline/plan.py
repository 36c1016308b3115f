"""The plan of a run: time, disk, cost, and what fits.

`run_pipeline.sh --plan` or `python -m drafter.pipeline.plan --config FILE`. Rates come from earlier manifests on this
machine, else from a profile in `configs/profiles`; the plan says which. Figures have a low, typical and high value.
"""

import argparse
import dataclasses
import json
from collections.abc import Iterator
from datetime import datetime, timedelta

from drafter import files, stage
from drafter.cli import next_time
from drafter.config import Config, Source
from drafter.errors import ConfigError
from drafter.generate import sources
from drafter.pipeline import kv_room, smallest_difference
from drafter.pipeline.deadline import resolve
from drafter.pipeline.estimates import (
    SMOKE_TEST,
    Estimate,
    Sizes,
    bytes_read,
    conversations_asked,
    conversations_held,
    estimate,
    num_held_out,
    num_rows,
    prompt_counts,
    sizes,
    total_bytes,
    total_seconds,
)
from drafter.pipeline.rates import (
    OF_PROFILE,
    Profile,
    Range,
    Rates,
    default_profile,
    measured_or,
    other_machine,
    profile,
    profiles,
    with_kv_room,
)
from drafter.text import size, table

COUNTS = (5_000, 10_000, 25_000, 50_000, 100_000)
LINK_GBIT = 5


def _model_is_here(config: Config) -> bool:
    return (config.target.model / "config.json").exists()


def prompt_faults(config: Config) -> Iterator[str]:
    """What would stop 01b: missing or empty prompt files, and no row left beside the held-out conversations."""
    for source in (*config.prompts, *config.acceptance.prompts):
        try:
            held = sources.count_records(source)
        except ConfigError as error:
            yield str(error)
            return
        if source.path and not held:
            what = "does not exist" if held is None else "holds no conversation"
            yield f"prompts {source.name}: {source.path} {what}"
    asked = conversations_asked(config)
    if asked and not num_rows(config, asked):
        yield f"acceptance.held_out takes all {asked:,} conversations; lower it or add prompts"


def answered_by(deadline: datetime, now: datetime, known: Rates) -> int:
    """Rows that 01b can answer by `deadline`, after its server and the smoke test's have started."""
    seconds = (deadline - now).total_seconds() - known.start_seconds.typical * (2 if known.smoke_test else 1)
    return max(0, round(seconds * known.generate.typical / known.answer_tokens.typical))


def disk_left(config: Config) -> float:
    """Bytes that the run may use: free space minus the reserve."""
    return max(0, files.free_bytes(config.run_dir) - config.extract.reserve_gb * 1e9)


def proposal(config: Config, known: Rates, platform: Profile, seconds: float | None) -> str:
    """The largest number of conversations that fits the sources, the disk and the time.

    Prefers bf16 over fp8, and a shorter max_seq_len only if nothing else fits.
    """
    free, held = disk_left(config), conversations_held(config)
    counts = {*COUNTS, 1_000, 500, conversations_asked(config) or 0} - {0}
    if held is not None:
        counts = {count for count in counts if count < held} | {held}
    for length in (config.target.max_seq_len, config.target.max_seq_len // 2):
        for count in sorted(counts, reverse=True):
            for dtype in ("bf16", "fp8"):
                target = config.target.model_copy(update={"max_seq_len": length})
                extract = config.extract.model_copy(update={"dtype": dtype})
                tried = config.model_copy(update={"target": target, "extract": extract})
                parts = estimate(tried, known, sizes(tried, platform), count)
                if total_bytes(parts) <= free and (seconds is None or total_seconds(parts).typical <= seconds):
                    return (
                        f"{count:,} conversations, max_seq_len {length}, {dtype}: {duration(total_seconds(parts))}, "
                        f"{size(total_bytes(parts))}"
                    )
    return f"not even {min(counts):,} conversations: free some disk (python -m drafter.disk du) or allow more time"


def duration(seconds: Range) -> str:
    """A duration with its range, in minutes or hours."""
    unit, name = (3600, "h") if seconds.typical >= 5400 else (60, "min")
    low, typical, high = (getattr(seconds, part) / unit for part in ("low", "typical", "high"))
    if f"{low:.1f}" == f"{high:.1f}":
        return f"{typical:.1f} {name}"
    return f"{typical:.1f} {name} ({low:.1f} to {high:.1f})"


def clock(now: datetime, seconds: float) -> str:
    """The time in `seconds` from now: day and hour; a date after 6 days, years after a year."""
    days = seconds / 86400
    if days > 365:
        return f"in {days / 365:,.0f} years"
    then = now + timedelta(seconds=seconds)
    return f"{then:%a %H:%M}" if days < 6 else f"{then:%Y-%m-%d}"


def dollars(seconds: Range, usd_per_hour: Range) -> str:
    if not usd_per_hour.high:
        return "electricity"
    low, high = seconds.low / 3600 * usd_per_hour.low, seconds.high / 3600 * usd_per_hour.high
    return f"{low:.0f} to {high:.0f} USD"


def moving(byte_count: float, link_gbit: float = LINK_GBIT) -> Range:
    """Seconds to copy so many bytes over a link, of whose rate one copy reaches an eighth to two thirds."""
    line = byte_count * 8 / (link_gbit * 1e9)
    return Range(line * 1.5, line * 3, line * 8)


def page(
    config: Config,
    platform: Profile,
    now: datetime,
    deadline: datetime | None = None,
    done_by: datetime | None = None,
) -> str:
    """The plan as text, for a run whose 01b stops at `deadline` and that must be finished at `done_by`."""
    known = measured_or(config, platform)
    count = sizes(config, platform)
    asked = conversations_asked(config) or COUNTS[1]
    rows = num_rows(config, asked)
    answered = min(rows, answered_by(deadline, now, known)) if deadline else rows
    taken = asked - rows + answered
    parts = estimate(config, known, count, taken)
    total = total_seconds(parts)
    seconds = (done_by - now).total_seconds() if done_by else None
    lines = [
        *_of_another_machine(config, platform),
        f"{config.run.name}: {answered:,} rows on {platform.title}"
        + (f", of {rows:,} those answered by {deadline:%H:%M}" if answered < rows else "")
        + (f"; {asked - rows:,} of {asked:,} conversations are held out" if asked > rows else ""),
        "",
        _work_table(config, parts),
        "",
        f"started now, done {clock(now, total.typical)}, at the latest {clock(now, total.high)}"
        + _of_production(config, known, now, total),
        *_of_a_deadline(parts, now, deadline, answered, rows),
        *_of_the_smoke_test(config, parts),
        f"prompts: {'; '.join(map(_of_a_source, config.prompts))}",
        "",
        *_counted_with(config, platform, known, count, parts),
        "",
        *_fits(config, known, count, done_by, now),
        "",
        f"proposal: {proposal(config, known, platform, seconds)}",
        "",
        *_platforms(config, taken),
    ]
    return "\n".join(lines)


def _work_table(config: Config, parts: list[Estimate]) -> str:
    body = [
        [
            part.stage,
            "taken from another run" if part.stage in config.run.take else duration(part.seconds),
            duration(part.start_seconds) if part.start_seconds.high else "",
            f"{part.tokens / 1e6:.2f} M" if part.tokens else "",
            size(part.bytes) if part.bytes else "",
        ]
        for part in parts
    ]
    whole = ["whole run", duration(total_seconds(parts)), "included", "", size(total_bytes(parts))]
    return table([["stage", "work", "server starts", "tokens", "disk"], *body, whole])


def _counted_with(config: Config, platform: Profile, known: Rates, count: Sizes, parts: list[Estimate]) -> list[str]:
    """The rates behind the plan and where each comes from."""
    lines = ["counted with:"]
    for name, rate in (("generate", known.generate), ("extract", known.extract), ("train", known.train)):
        lines.append(
            f"  {name}: {rate.typical:,.0f} tok/s ({rate.low:,.0f} to {rate.high:,.0f}), {known.sources[name]}"
        )
    lines.append(f"  a server start: {duration(known.start_seconds)}, {known.sources['start']}")
    lines += _of_the_disk(config, known, count, parts)
    generation = next(part for part in parts if part.stage == "01b_synthetic")
    if "generate" not in known.measured:
        lines += kv_room.lines(config, platform, generation.seconds)
    lines.append(
        f"  evaluate: {known.evaluate.typical:,.2f} prompts/s ({known.evaluate.low:,.2f} to "
        f"{known.evaluate.high:,.2f}), {known.sources['evaluate']}"
    )
    lines.append(smallest_difference.line(config, sum(prompt_counts(config))))
    lines.append(f"  an answer: {known.answer_tokens.typical:,.0f} tokens, {known.sources['answer_tokens']}")
    lines.append(f"  a row: {known.row_tokens.typical:,.0f} tokens, {known.sources['row_tokens']}")
    lines.append(f"  a token: {count.state_bytes_per_token:,} bytes of hidden states ({config.extract.dtype})")
    if guesses(config) and _model_is_here(config):
        again = config.pipeline("--plan", "--probe")
        lines.append(f"  to measure these first (two server starts and a few minutes): {again}")
    return lines


def _of_another_machine(config: Config, platform: Profile) -> list[str]:
    planned = f"planned as {platform.model['name']} on {platform.title}"
    if not _model_is_here(config):
        return [f"target.model {config.target.model} is not here: {planned}", ""]
    if here := other_machine(config, platform):
        return [f"unknown machine ({here}, hidden size {config.target.architecture.hidden_size}): {planned}", ""]
    return []


def _of_production(config: Config, known: Rates, now: datetime, total: Range) -> str:
    """When the generate unit serves again, if it was active before."""
    if config.server("generate").kind != "systemd":
        return ""
    back = clock(now, (total + known.start_seconds).typical)
    return f"; {config.server('generate').unit}, if it was up before, serves again {back}"


def _of_the_disk(config: Config, known: Rates, count: Sizes, parts: list[Estimate]) -> list[str]:
    """How fast 04 must read, and how many GPUs the disk can feed; empty if the rate of a whole 04 was measured."""
    if not known.train_steps_only or "04_train" in config.run.take:
        return []
    training = next(part for part in parts if part.stage == "04_train")
    share = config.train.validation_share
    trained = Range.point(training.tokens)
    held = trained * (share / (1 - share) / config.train.epochs)
    amount = bytes_read(config, count, trained, held).typical
    each = known.train.typical * count.state_bytes_per_token  # of one GPU, bytes a second
    text = f"  04 reads {size(amount)} of states, {size(each)}/s for one GPU at that rate; "
    if known.disk:
        return [text + f"the disk gives {size(known.disk)}/s: it feeds {known.disk / each:.1f} GPUs"]
    return [text + "the speed of the disk is unknown here, so the plan assumes that it keeps up"]


def _of_a_deadline(
    parts: list[Estimate], now: datetime, deadline: datetime | None, answered: int, rows: int
) -> list[str]:
    if deadline is None:
        return []
    if answered < rows:
        return [f"deadline {deadline:%a %H:%M}: 01b stops there with about {answered:,} of {rows:,} rows"]
    until = [part.stage for part in parts].index("01b_synthetic") + 1
    done = clock(now, total_seconds(parts[:until]).typical)
    return [f"deadline {deadline:%a %H:%M}: 01b has all {rows:,} rows before it, at about {done}"]


def _of_the_smoke_test(config: Config, parts: list[Estimate]) -> list[str]:
    if parts[0].stage != SMOKE_TEST:
        return []
    both = parts[0].seconds + parts[0].start_seconds + parts[1].start_seconds
    return [
        f"the first run smoke-tests the untrained warm start: {duration(both)}, with the start of 01b's server after "
        "it; acceptance.smoke=false skips it"
    ]


def _of_a_source(source: Source) -> str:
    held = sources.count_records(source)
    if held is not None:
        drawn = ""
        if source.count and source.count != held:
            few = source.count > held
            drawn = f"; {source.count:,} are asked for" if few else f", of which {source.count:,} are drawn"
        return f"{source.name} holds {held:,} conversations{drawn}"
    asked = f"{source.count:,}" if source.count else "all"
    return f"{source.name}, {asked} conversations of {source.hub or source.path}"


def guesses(config: Config) -> bool:
    """Whether some rate was not measured on this machine."""
    known = measured_or(config, profile(default_profile(config)))
    return not known.measured >= OF_PROFILE


def _fits(config, known: Rates, count: Sizes, done_by: datetime | None, now: datetime) -> list[str]:
    free, held = disk_left(config), conversations_held(config)
    rows = []
    for number in sorted({*COUNTS, conversations_asked(config) or COUNTS[1]}):
        parts = estimate(config, known, count, number)
        total, needed = total_seconds(parts), total_bytes(parts)
        lacks = [f"{number - held:,} more prompts"] if held is not None and number > held else []
        lacks += [f"{size(needed - free)} of disk"] if needed > free else []
        verdict = [f"lacks {' and '.join(lacks)}" if lacks else "fits"]
        if done_by:
            late = total.typical - (done_by - now).total_seconds()
            verdict.append("in time" if late <= 0 else f"{late / 3600:.1f} h late")
        rows.append([f"{number:,}", duration(total), size(needed), ", ".join(verdict)])
    return [table([["conversations", "whole run", "disk", f"against {size(free)} free beside the reserve"], *rows])]


def _platforms(config: Config, asked: int) -> list[str]:
    """Time and cost of 01b to 04 on every platform for this size of model, with 01b's server already up.

    For rented platforms also the cost of moving the states there.
    """
    here = profile(default_profile(config))
    rows, moves = [], []
    for other in map(profile, profiles()):
        if other.model["hidden_size"] != here.model["hidden_size"]:
            continue
        generate, extract, train = estimate(config, with_kv_room(config, other), sizes(config, other), asked)[
            :3
        ]  # without a trial
        made = generate.seconds + extract.start_seconds + extract.seconds + train.seconds
        rows.append([other.title, duration(made), dollars(made, other.usd_per_hour)])
        if other.usd_per_hour.high and extract.bytes:
            hours = moving(extract.bytes) * (1 / 3600)
            cost = f"{hours.low * other.usd_per_hour.low:.0f} to {hours.high * other.usd_per_hour.high:.0f} USD"
            moves.append(
                f"moving {size(extract.bytes)} of states to {other.title} over {LINK_GBIT} Gb/s: {hours.low:.1f} to "
                f"{hours.high:.1f} h, {cost} of idle GPUs: train where they are"
            )
    return [table([["platform (01b, 02, 04)", "time", "cost"], *rows]), *moves]


def show(config: Config, profile_name: str | None, deadline: datetime | None, done_by: datetime | None) -> str:
    """The plan as text. Raises ConfigError for missing prompts or taken stages and for wrong settings."""
    for name in config.run.take:
        stage.read_taken(config, name)
    if "01b_synthetic" not in config.run.take:
        for line in prompt_faults(config):
            raise ConfigError(line)
    if _model_is_here(config):
        config.check_against_model()
    platform = profile(profile_name or default_profile(config))
    return page(config, platform, datetime.now(), deadline, done_by)


def to_record(config: Config, limit: int | None = None) -> dict:
    """Seconds (server starts included) and bytes by stage, which the report compares with the run.

    `conversations` is the number they are for: at most `limit` beside the held-out ones.
    """
    platform = profile(default_profile(config))
    known = measured_or(config, platform)
    count = conversations_asked(config) or COUNTS[1]
    if limit is not None:
        count = min(count, limit + num_held_out(config))
    return {
        part.stage: {
            "conversations": count,
            "seconds": dataclasses.asdict(part.seconds + part.start_seconds),
            "bytes": round(part.bytes),
        }
        for part in estimate(config, known, sizes(config, platform), count)
    } | {"sources": known.sources}


def main(argv: list[str] | None = None) -> int:
    arguments = stage.tool_parser(__doc__, "python -m drafter.pipeline.plan")
    arguments.add_argument("--profile", metavar="NAME", help="a file of configs/profiles; default: this machine's")
    arguments.add_argument("--deadline", metavar="HH:MM", help="when 01b stops generating")
    arguments.add_argument("--done-by", metavar="HH:MM", help="propose what is finished by then")
    arguments.add_argument("--json", action="store_true", help="the estimate by stage, for programs")

    def body(config: Config, args: argparse.Namespace) -> None:
        now = datetime.now()
        until = resolve(config, args.deadline, now)
        text = show(config, args.profile, until and until.moment, next_time(args.done_by, now))
        print(json.dumps(to_record(config)) if args.json else text)

    return stage.run_tool("plan", body, arguments, argv)


if __name__ == "__main__":
    raise SystemExit(main())
