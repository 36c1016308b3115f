"""Stage 06: measure how many tokens vLLM accepts per step, on the same prompts for every drafter.

A unit is one drafter on one prompt set in one cell. Its result file is named by a hash of everything that the result
depends on, so a rerun measures only what is missing and never mixes in results of other settings.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from drafter import checked, contracts, files, run_files
from drafter.acceptance import comparison, prompt_sets
from drafter.acceptance.comparison import NONE, RUN, WARM_START, Measurement
from drafter.acceptance.prompt_sets import PromptSets
from drafter.acceptance.wording import caveats, sentence
from drafter.config import ROOT, Config, Generate
from drafter.errors import ConfigError, ContractError, ResumableError, StageError
from drafter.export import stage as export
from drafter.generate import chat
from drafter.generate.prompts import Request
from drafter.progress import Progress
from drafter.serve import client, decoding, roles, smoke_record
from drafter.serve.decoding import Decoded
from drafter.stage import Stage, read_manifest, say
from drafter.target import eagle3_folder

QUESTION = ("target.model", "target.chat_template_kwargs")
SMOKE_SECONDS = 300
LEAST_SECONDS = 1  # of the budget that are worth a server start
SMOKE_LENGTH = 1.05  # random weights reach this if their favourite token is a comma


def run(stage: Stage) -> dict:
    """Measure every unit that has no result yet, within the budget, and write `acceptance.json`."""
    config = stage.config
    eagle3_folder.check_engine(config)
    if RUN in config.acceptance.drafters:
        stage.require("05_export")
    drafters, sets = find_drafters(config), prompt_sets.read_prompt_sets(config, stage.args.limit)
    units = list_units(config, drafters, sets)
    stage.begin(QUESTION)
    write_prompt_sets(stage, sets)
    stage.counts.total = len(units)
    if missing := [unit for unit in units if not is_measured(stage, unit)]:
        measure_units(stage, drafters, sets, missing)
    else:
        say("every measurement has a result already")
    done = {unit: read_result(stage, unit) for unit in units if result_path(stage, unit).exists()}
    if not done:
        raise ResumableError("nothing was measured within acceptance.budget_minutes; raise it and run again")
    stage.counts.done = sum(not decoded.skipped for decoded in done.values())
    report = comparison.summarise_results(units, done, config.target.think_end, config.run.seed)
    report["prompt_sets"] = prompt_sets.describe_sets(sets, config.stage_dir("01b_synthetic") / run_files.PROMPTS)
    sources = {record["conv_id"]: record["source"] for records in sets.values() for record in records}
    report["by_source"] = list(comparison.by_source(done, sources, config.target.think_end, config.run.seed))
    report["expected"] = expected_lengths(config)
    report["drafters"] = {label: folder and eagle3_folder.fingerprint(folder) for label, folder in drafters.items()}
    files.write_json(stage.folder / run_files.ACCEPTANCE, checked.sealed(report))
    for caveat in caveats(report):
        say("%s", caveat)
    say("%s", sentence(report["headline"]))
    stage.facts = report["headline"] | {"left_out": len(report["left_out"])}
    # Units that the budget left out are no failure; the next run measures them.
    return stage.finish() | {"deadline": True}


def dry_run(stage: Stage) -> dict:
    """Offline: the number of units without a result, and what is missing to measure them."""
    config, findings, pending = stage.config, [], len(stage.config.acceptance.drafters)
    try:
        eagle3_folder.check_engine(config)
        sets = prompt_sets.read_prompt_sets(config, stage.args.limit)
        units = list_units(config, find_drafters(config), sets)
        pending = sum(not is_measured(stage, unit) for unit in units) or int(
            not checked.read_or_empty(stage.folder / run_files.ACCEPTANCE, run_files.Results)
        )
    except StageError as error:
        findings.append(str(error))
    return {"stage": stage.name, "dry_run": True, "pending": pending, "findings": findings}


def find_drafters(config: Config) -> dict[str, Path | None]:
    """Label -> folder, checked; None decodes without a drafter. A warm start that the run lacks is passed over.

    Raises ConfigError for a folder that is not there, ContractError for one that cannot be served.
    """
    found: dict[str, Path | None] = {}
    for label in config.acceptance.drafters:
        if label == WARM_START and config.train.warm_start is None:
            say("this run trains from scratch: there is no warm start to measure")
            continue
        known = {NONE: None, WARM_START: config.train.warm_start, RUN: export.drafter_folder(config)}
        found[label] = known[label] if label in known else ROOT / label
        if folder := found[label]:
            check = eagle3_folder.check_folder if label in known else eagle3_folder.check_rival
            check(folder, config.target)
        if label == RUN:
            export.check_exported(config)
    return found


def expected_lengths(config: Config) -> dict[str, float]:
    """Label -> acceptance length that stage 04 expected; empty if it trained for another draft length."""
    if config.train.ttt_steps != config.acceptance.cells[0].num_speculative_tokens:
        return {}
    facts = (read_manifest(config.stage_dir("04_train")) or {"facts": {}})["facts"]
    found = {RUN: facts.get("expected_acceptance"), WARM_START: facts.get("expected_acceptance_before")}
    return {label: length for label, length in found.items() if isinstance(length, int | float)}


def list_units(config: Config, drafters: dict[str, Path | None], sets: PromptSets) -> list[Measurement]:
    """All units, first cell first. Without a drafter, cells that differ only in draft length give the same unit."""
    identities = {label: folder and eagle3_folder.fingerprint(folder) for label, folder in drafters.items()}
    sets_identities = {name: prompt_sets.prompts_fingerprint(records) for name, records in sets.items()}
    units: dict[str, Measurement] = {}
    for cell in config.acceptance.cells:
        for label, folder in drafters.items():
            for name in sets:
                sampling = cell_settings(config, cell.temperature)
                facts: dict[str, Any] = {
                    "concurrency": cell.concurrency,
                    "num_speculative_tokens": cell.num_speculative_tokens if folder else 0,
                    "temperature": sampling.temperature,
                }
                question: dict[str, Any] = {"drafter": [label, identities[label]], "prompts": sets_identities[name]}
                question |= {
                    "sampling": chat.sampling(sampling, "0" * 7),
                    "kwargs": config.target.chat_template_kwargs,
                    "engine": smoke_record.engine(config),
                }
                key = contracts.content_id(question | facts)
                units.setdefault(key, Measurement(label, name, **facts, key=key))
    return list(units.values())


def cell_settings(config: Config, temperature: float | None, max_tokens: int | None = None) -> Generate:
    """The run's sampling with a cell's temperature; each prompt has its own seed, the same for all drafters."""
    changed: dict[str, Any] = {"max_tokens": max_tokens or config.acceptance.max_tokens, "seed_rows": True}
    if temperature is not None:
        changed["temperature"] = temperature
    return config.generate.model_copy(update=changed)


def chat_body(config: Config, settings: Generate, record: Mapping[str, Any]) -> dict[str, Any]:
    """The chat request that stage 01b would send for this prompt."""
    conv_id = record["conv_id"]
    request = Request(conv_id, None, conv_id, record["source"], 0, "regenerate", record["messages"], record["tools"])
    return chat.chat_body(request, [], config.model_copy(update={"generate": settings}))


def write_prompt_sets(stage: Stage, sets: PromptSets) -> None:
    """Write the measured prompts to prompts.jsonl, for inspection."""
    records = ({"prompt_set": name, **record} for name, records in sets.items() for record in records)
    files.write_jsonl(stage.folder / run_files.PROMPTS, records)


def measure_units(stage: Stage, drafters: dict[str, Path | None], sets: PromptSets, units: list[Measurement]) -> None:
    """Measure units, with one server start for each drafter and draft length.

    Every start, and every unit of it, gets an equal share of the remaining time, so that a slow drafter does not use
    up the time of the others. The budget runs while a server is ready, so a slow start takes nothing from it.
    """
    config = stage.config
    left = config.acceptance.budget_minutes * 60
    starts: dict[tuple[str, int], list[Measurement]] = {}
    for unit in units:
        starts.setdefault((unit.drafter, unit.num_speculative_tokens), []).append(unit)
    for number, ((label, tokens), group) in enumerate(starts.items()):
        if left < LEAST_SECONDS:
            break
        log_file = stage.folder / f"server-{_short(label)}-{tokens}.log"
        with roles.serving(config, "evaluate", drafters[label], tokens or 1, log_file):
            ready = time.monotonic()
            end = ready + left / (len(starts) - number)
            for position, unit in enumerate(group):
                say(
                    "measurement %d of %d: %s, %d tokens a draft, %s, concurrency %d",
                    units.index(unit) + 1, len(units), label, tokens, unit.prompt_set, unit.concurrency,
                )  # fmt: skip
                settings = cell_settings(config, unit.temperature)
                until = _share(end, len(group) - position)
                records = sets[unit.prompt_set]
                progress = Progress(len(records), "prompts", at_once=unit.concurrency)
                decoded = decode_prompts(config, settings, records, unit.concurrency, until, progress.advance)
                progress.close()
                check_result(unit, decoded)
                if decoded.replies:
                    files.write_json(result_path(stage, unit), checked.sealed(decoded.to_record()))
            left -= time.monotonic() - ready


def _short(label: str) -> str:
    """A drafter's label as part of a file name, different for folders with the same last part."""
    return label if "/" not in label else f"{Path(label).name}-{contracts.content_id(label)[:8]}"


def check_result(unit: Measurement, decoded: Decoded) -> None:
    """Raises ConfigError when the server refused every prompt, or counts no drafts."""
    if decoded.refused and not decoded.replies:
        reason = next(iter(decoded.refused.values()))
        raise ConfigError(f"the server refused every prompt of {unit.prompt_set}: {reason}")
    if unit.num_speculative_tokens and not decoded.counters.accepted_per_position:
        raise ConfigError("the server counts no drafts: remove disable-log-stats from servers.evaluate.args")


def _share(deadline: float, parts: int) -> float:
    now = time.monotonic()
    return now + max(0.0, deadline - now) / parts


def decode_prompts(
    config: Config,
    settings: Generate,
    records: Sequence[Mapping[str, Any]],
    concurrency: int,
    until: float,
    advance: Callable[[], None] = lambda: None,
) -> Decoded:
    """Decode one prompt set on the running server."""
    requests = {record["conv_id"]: chat_body(config, settings, record) for record in records}
    think_end = config.target.think_end
    return client.run_interruptible(
        decoding.decode(config.servers.evaluate, requests, concurrency, until, think_end, lambda _reply: advance())
    )


def result_path(stage: Stage, unit: Measurement) -> Path:
    return stage.folder / "units" / f"{unit.key}.json"


def is_measured(stage: Stage, unit: Measurement) -> bool:
    """Whether all prompts of the unit were sent; a unit that the budget cut off is measured again."""
    return result_path(stage, unit).exists() and not read_result(stage, unit).skipped


def read_result(stage: Stage, unit: Measurement) -> Decoded:
    """Raises ContractError when the file is broken."""
    record = checked.load(result_path(stage, unit), checked.record_of(Decoded), remedy="remove it to measure again")
    return Decoded.from_record(record)


def dry_run_smoke(stage: Stage) -> dict:
    """Offline: whether the warm start needs a smoke test, and what is missing for it."""
    findings, pending = [], 0
    try:
        pending = int(needs_smoke_test(stage.config))
    except StageError as error:
        findings.append(str(error))
    return {"stage": stage.name, "dry_run": True, "pending": pending, "findings": findings}


def needs_smoke_test(config: Config) -> bool:
    """Whether the run has a warm start, has not trained yet, and no smoke test of it is recorded.

    Raises StageError when a folder is missing or broken.
    """
    if (start := config.train.warm_start) is None or export.is_trained(config):
        return False
    eagle3_folder.read_config(start)
    return smoke_record.key(config) not in smoke_record.read_all(config)


def smoke_test(stage: Stage) -> dict:
    """Serve the untrained warm start, then the export if there is one, for a minute each; returns the summary.

    Raises ContractError for a drafter whose tokens are accepted no more often than by chance.
    """
    config = stage.config
    eagle3_folder.check_engine(config)
    records = prompt_sets.sample_prompts(config, smoke_record.PROMPTS)
    settings = cell_settings(config, smoke_record.CELL.temperature, smoke_record.TOKENS)
    lengths = {}
    for label, folder in ((WARM_START, config.train.warm_start), (RUN, export.drafter_folder(config))):
        if folder is None or (label == RUN and not folder.exists()):
            continue
        eagle3_folder.check_folder(folder, config.target)
        log_file = stage.folder / f"server-{label}.log"
        with roles.serving(config, "evaluate", folder, smoke_record.CELL.num_speculative_tokens, log_file):
            decoded = decode_prompts(
                config, settings, records, smoke_record.CELL.concurrency, time.monotonic() + SMOKE_SECONDS
            )
        counters = decoded.counters
        lengths[label] = 1 + counters.accepted / max(counters.drafts, 1)
        if lengths[label] <= SMOKE_LENGTH:
            raise ContractError(
                f"vLLM serves {folder}, but accepts only {counters.accepted} of its {counters.draft_tokens} drafted "
                f"tokens (length {lengths[label]:.3f}): it was loaded wrongly, or was made for another model"
            )
        say("smoke: %s has acceptance length %.3f", label, lengths[label])
        if label == WARM_START:
            smoke_record.record(config, decoded, lengths[label])
    if not lengths:
        raise ConfigError("nothing to serve: no warm start in train.warm_start, and no checkpoint in 04_train")
    if stage.counts.total:
        stage.facts["smoke"] = lengths
        return stage.finish()
    return {"stage": stage.name, "smoke": lengths}
