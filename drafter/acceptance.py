"""Stage 06: how many tokens are accepted per step, served, on the same frozen prompts for every drafter.

A unit is one drafter on one prompt set in one cell (concurrency, draft length, temperature). Its result lies under a
name that hashes everything it depends on, so a rerun measures what is missing and nothing else.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from drafter import artifacts, client, contracts, decoding, export, native, server, statistics
from drafter.config import Cell, Config
from drafter.decoding import Decoded
from drafter.errors import ConfigError, ResumableError
from drafter.stage import Progress, Stage, say

QUESTION = ("target.model", "target.chat_template_kwargs")
HELD_OUT = "held_out"
PARTS = ("all", "reasoning", "answer")


@dataclass(frozen=True, slots=True)
class Drafter:
    """`folder` None stands for decoding without one; `identity` hashes weights and config."""

    label: str
    folder: Path | None
    identity: str


@dataclass(frozen=True, slots=True)
class Unit:
    drafter: Drafter
    prompt_set: str
    cell: Cell
    key: str


def run(stage: Stage) -> dict:
    """Measure every unit that has no result yet, within the budget, and write `acceptance.json`."""
    config = stage.config
    sets = read_prompts(config, stage.args.limit)
    refuse_overlap(config, sets)
    units = plan(config, sets)
    stage.begin(QUESTION)
    with artifacts.publish(stage.folder / "prompts.jsonl") as part, open(part, "w") as file:
        for name, prompts in sets.items():
            file.writelines(json.dumps({"prompt_set": name, **prompt}) + "\n" for prompt in prompts)
    stage.counts.total = len(units)
    missing = [unit for unit in units if not unit_path(stage, unit).exists()]
    if missing:
        measure(stage, sets, missing)
    else:
        say("everything asked for is measured already")
    done = {unit: read_unit(stage, unit) for unit in units if unit_path(stage, unit).exists()}
    stage.counts.done = len(done)
    if not done:
        raise ResumableError("nothing was measured within acceptance.budget_minutes")
    report = summarise(config, sets, units, done)
    artifacts.write_json(stage.folder / "acceptance.json", report)
    stage.facts = report["headline"]
    # What the budget left out is a plan, not a failure: a rerun goes on with it.
    return stage.finish() | {"deadline": True}


def read_prompts(config: Config, limit: int | None = None) -> dict[str, list[dict]]:
    """Prompt sets: name -> records {"conv_id", "source", "messages", "tools"}, each ending in a user turn.

    Raises ConfigError when there is nothing to measure on.
    """
    path = config.stage_dir("01b_synthetic") / "held_out.jsonl"
    if not path.exists():
        raise ConfigError(f"no held-out prompts at {path}: run 01b_generate_synthetic.py, or set acceptance.prompts")
    sets = {HELD_OUT: list(artifacts.read_jsonl(path))}
    count = min(limit or config.acceptance.max_prompts, config.acceptance.max_prompts)
    sets = {name: [_question(record) for record in records[:count]] for name, records in sets.items()}
    for name, records in sets.items():
        if not records:
            raise ConfigError(f"acceptance: prompt set {name} is empty")
    return sets


def _question(record: dict) -> dict:
    """The conversation up to its last user turn."""
    last = max(i for i, message in enumerate(record["messages"]) if message["role"] == "user")
    return record | {"messages": record["messages"][: last + 1]}


def refuse_overlap(config: Config, sets: dict[str, list[dict]]) -> None:
    """Raises ConfigError when a prompt's conversation is among the training rows."""
    index = config.stage_dir("02_hidden_states") / "index.jsonl"
    trained = {entry["conv_id"] for entry in artifacts.read_jsonl(index)} if index.exists() else set()
    for name, records in sets.items():
        shared = [record["conv_id"] for record in records if record["conv_id"] in trained]
        if shared:
            raise ConfigError(
                f"acceptance: {len(shared)} of {len(records)} prompts of {name} are in the training rows "
                f"({shared[0]}, ...); a drafter is measured on prompts it has not seen"
            )


def drafters(config: Config) -> list[Drafter]:
    """The drafters asked for, checked. A warm start that the run does not have is left out.

    Raises ConfigError for a folder that is not there, ContractError for one that cannot be served.
    """
    found = []
    for label in config.acceptance.drafters:
        if label == "none":
            found.append(Drafter(label, None, "none"))
            continue
        if label == "warm_start" and config.train.warm_start is None:
            say("this run trains from scratch: there is no warm start to measure")
            continue
        known = {"warm_start": config.train.warm_start, "run": export.folder(config)}
        folder = known.get(label) or Path(label)
        native.check_folder(folder, config.target)
        found.append(Drafter(label, folder, native.identity(folder)))
    return found


def plan(config: Config, sets: dict[str, list[dict]]) -> list[Unit]:
    """Every unit, in the order of measuring: what the headline needs comes first.

    Without a drafter the draft length means nothing, so such cells are measured once.
    """
    result: dict[str, Unit] = {}
    for cell in config.acceptance.cells:
        for drafter in drafters(config):
            tokens = cell.num_speculative_tokens if drafter.folder else 0
            for name, records in sets.items():
                identity = {
                    "drafter": [drafter.label, drafter.identity],
                    "prompts": set_hash(records),
                    "concurrency": cell.concurrency,
                    "num_speculative_tokens": tokens,
                    "sampling": sampling(config, cell),
                }
                key = contracts.content_id(identity)
                result.setdefault(key, Unit(drafter, name, cell, key))
    return list(result.values())


def set_hash(records: list[dict]) -> str:
    return contracts.content_id([[record["messages"], record.get("tools")] for record in records])


def sampling(config: Config, cell: Cell) -> dict[str, Any]:
    """Sent with every request, in full: a server's own defaults must not decide."""
    generate = config.generate
    temperature = generate.temperature if cell.temperature is None else cell.temperature
    fields = ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    return {
        "temperature": temperature,
        **{name: getattr(generate, name) for name in fields},
        "max_tokens": config.acceptance.max_tokens,
    }


def body(config: Config, cell: Cell, record: dict) -> dict[str, Any]:
    """One chat request. The seed is the prompt's, so drafters differ by drafting and not by luck."""
    request = {
        "model": config.target.served_name,
        "messages": record["messages"],
        "seed": int(record["conv_id"][:8], 16) & 0x7FFFFFFF,
        "return_token_ids": True,
        **sampling(config, cell),
    }
    if config.target.chat_template_kwargs:
        request["chat_template_kwargs"] = config.target.chat_template_kwargs
    if record.get("tools"):
        request["tools"] = record["tools"]
    return request


def measure(stage: Stage, sets: dict[str, list[dict]], units: list[Unit]) -> None:
    """Measure units, one server start for each drafter and draft length.

    Every start, and every unit within it, gets an equal share of the time that is left, so that a slow drafter
    does not eat what its rival is compared on.
    """
    config = stage.config
    deadline = time.monotonic() + config.acceptance.budget_minutes * 60
    starts: dict[tuple[str, int], list[Unit]] = {}
    for unit in units:
        starts.setdefault((unit.drafter.label, unit.cell.num_speculative_tokens if unit.drafter.folder else 0), [])
        starts[unit.drafter.label, unit.cell.num_speculative_tokens if unit.drafter.folder else 0].append(unit)
    progress = Progress(sum(len(sets[unit.prompt_set]) for unit in units), "prompts")
    for number, ((label, tokens), group) in enumerate(starts.items()):
        end = _share(deadline, len(starts) - number)
        if time.monotonic() >= end:
            break
        say("drafter %s%s", label, f", {tokens} tokens a draft" if tokens else "")
        log = stage.folder / f"server-{Path(label).name}-{tokens}.log"
        with server.serving(config, "evaluate", group[0].drafter.folder, tokens or 3, log):
            for position, unit in enumerate(group):
                until = _share(end, len(group) - position)
                measure_unit(stage, sets[unit.prompt_set], unit, until, progress.advance)
    progress.close()


def _share(deadline: float, parts: int) -> float:
    now = time.monotonic()
    return now + max(0.0, deadline - now) / parts


def measure_unit(
    stage: Stage, records: list[dict], unit: Unit, until: float, advance: Callable[[], None] = lambda: None
) -> None:
    """Decode one prompt set and publish the result, unless time left no prompt done."""
    config = stage.config
    requests = {record["conv_id"]: body(config, unit.cell, record) for record in records}
    decoded = client.run(
        decoding.decode(
            config.servers.evaluate,
            requests,
            unit.cell.concurrency,
            until,
            config.target.think_end,
            lambda _reply: advance(),
        )
    )
    if decoded.replies:
        path = unit_path(stage, unit)
        path.parent.mkdir(parents=True, exist_ok=True)
        artifacts.write_json(path, decoded.to_record())


def unit_path(stage: Stage, unit: Unit) -> Path:
    return stage.folder / "units" / f"{unit.key}.json"


def read_unit(stage: Stage, unit: Unit) -> Decoded:
    return Decoded.from_record(json.loads(unit_path(stage, unit).read_text()))


def tallies(decoded: Decoded, part: str, think_end: int | None) -> np.ndarray:
    """[prompts, 2] drafted steps and accepted tokens, for `drafter.statistics`."""
    return np.array([reply.tally(part, think_end) for reply in decoded.replies]).reshape(-1, 2)


def summarise(
    config: Config, sets: dict[str, list[dict]], units: list[Unit], done: dict[Unit, Decoded]
) -> dict[str, Any]:
    """The content of `acceptance.json`."""
    measurements = [measurement(config, unit, decoded) for unit, decoded in done.items()]
    speeds = {
        (m["prompt_set"], m["concurrency"], m["temperature"]): m["tokens_per_second"]
        for m in measurements
        if m["drafter"] == "none"
    }
    for m in measurements:
        base = speeds.get((m["prompt_set"], m["concurrency"], m["temperature"]))
        m["speed_up"] = m["tokens_per_second"] / base if base else None
    headline = next((m for m in measurements if m["drafter"] == "run"), measurements[0])
    return {
        "schema": contracts.SCHEMA,
        "headline": {
            key: headline[key]
            for key in ("drafter", "acceptance_length", "low", "high", "tokens_per_second", "speed_up")
        },
        "prompt_sets": [
            {"name": name, "prompts": len(records), "sha256": set_hash(records)} for name, records in sets.items()
        ],
        "measurements": measurements,
        "left_out": [identify(config, unit) for unit in units if unit not in done],
    }


def identify(config: Config, unit: Unit) -> dict[str, Any]:
    return {
        "drafter": unit.drafter.label,
        "prompt_set": unit.prompt_set,
        "concurrency": unit.cell.concurrency,
        "num_speculative_tokens": unit.cell.num_speculative_tokens if unit.drafter.folder else 0,
        "temperature": sampling(config, unit.cell)["temperature"],
    }


def measurement(config: Config, unit: Unit, decoded: Decoded) -> dict[str, Any]:
    """One unit's figures. Without a drafter each step yields one token."""
    counters = decoded.counters
    result = identify(config, unit) | {
        "prompts": len(decoded.replies),
        "prompts_skipped": decoded.skipped,
        "prompts_refused": len(decoded.refused),
        "output_tokens": decoded.output_tokens,
        "seconds": decoded.seconds,
        "tokens_per_second": decoded.output_tokens / decoded.seconds,
        "drafts": counters.drafts,
        "accepted": counters.accepted,
        "acceptance_length": 1 + counters.accepted / counters.drafts if counters.drafts else 1.0,
        "per_position": [count / counters.drafts for count in counters.accepted_per_position if counters.drafts],
        "streams_agree": decoded.streams_agree,
    }
    for part in PARTS:
        counted = tallies(decoded, part, config.target.think_end) if decoded.streams_agree else np.zeros((0, 2))
        bounds = statistics.interval(counted, config.run.seed) or (None, None)
        prefix = "" if part == "all" else f"{part}_"
        result |= {f"{prefix}low": bounds[0], f"{prefix}high": bounds[1]}
        if prefix:
            result[f"{prefix}length"] = statistics.length(counted)
    return result
