"""Stage 01b: have the target answer every prompt and keep its token ids."""

import os
import tempfile
import time
from pathlib import Path
from typing import Any

from drafter import files, run_files
from drafter.errors import ConfigError, ContractError, ResumableError
from drafter.generate import chat, conversations, mix, prompts, rows
from drafter.generate.answering import RETRYABLE_REASONS, Generation, Work
from drafter.serve import client, roles
from drafter.serve.client import Client
from drafter.stage import Stage, read_manifest, say

QUESTION = (
    "target.model", "target.chat_template_kwargs", "target.prompt_suffix", "target.think_end",
    "generate.max_tokens", "generate.temperature", "generate.top_p", "generate.top_k", "generate.min_p",
    "generate.repetition_penalty", "generate.presence_penalty", "generate.frequency_penalty", "generate.seed_rows",
)  # fmt: skip

PENDING = "pending.jsonl"  # requests that a deadline left
BROKEN_NAMED = 5  # unusable conversations that are named; an open data set has many


def prepare(stage: Stage) -> Work:
    """Claim the folder, write the prompt mix, and find the requests that are left."""
    before = read_manifest(stage.folder) or {}
    stage.begin(QUESTION)
    rows.keep_whole_rows(stage.folder / rows.JOURNAL)
    for shard in filter(files.cut_torn_tail, rows.shards(stage.folder)):
        say("%s ended in the middle of a row, which is generated again", shard)
    stage.facts |= before.get("facts", {})
    for ended in ("deadline", "requests"):
        stage.facts.pop(ended, None)
    meta = mix.materialise(stage.config, stage.folder)
    stage.facts |= {"prompts_sha256": meta["sha256"], **{key: meta[key] for key in ("sources", "read", "held_out")}}
    for line in (*source_lines(meta), *broken_lines(stage.folder)):
        say("%s", line)
    if before.get("status") != "complete":
        prompts.forget_rejections(stage.folder, RETRYABLE_REASONS)
    work = Work(stage.folder, stage.folder, stage.args.limit)
    work.count(stage.counts)
    say("%d requests: %d done, %d to do", len(work.requests), len(work.done), len(work.pending))
    if line := prompts.held_out_advice(meta):
        say("%s", line)
    return work


def ask(stage: Stage, work: Work) -> None:
    """Send the pending requests until the deadline; no server is needed if it has passed."""
    deadline = stage.args.deadline and stage.args.deadline.timestamp()
    if deadline is not None and time.time() >= deadline:
        say("the deadline %s has passed: no requests are sent", stage.args.deadline)
        return
    roles.require_ready(stage.config, "generate")
    client.run_interruptible(answer(stage, work, deadline))


async def answer(stage: Stage, work: Work, deadline: float | None) -> None:
    """Send the pending requests until `deadline` (seconds since 1970)."""
    settings, generated = stage.config.generate, stage.config.servers.generate
    async with Client(generated, concurrency=settings.concurrency, outage_minutes=settings.outage_minutes) as calls:
        context = await chat.check_server(calls, stage.config)
        generation = Generation(stage, work, calls, context, deadline)
        try:
            await generation.run()
        finally:
            stage.facts["generation"] = generation.facts()


def conclude(stage: Stage) -> dict:
    """Publish the last shard, count the rows on disk and return the summary.

    Raises ContractError when there are no rows, ResumableError when the deadline left fewer than min_rows.
    """
    rows.publish_journal(stage.folder)
    work = Work(stage.folder, stage.folder, stage.args.limit)
    work.count(stage.counts)
    _name_pending(stage.folder / PENDING, work)
    stage.facts["rows"] = summary = rows.summarise_rows(rows.read_rows(stage.folder, stage.args.limit))
    say("rows written\n%s", rows.summary_table(summary))
    for line in rows.advice(summary, stage.config.generate.max_tokens):
        say("%s", line)
    done, least = stage.counts.done, stage.config.generate.min_rows
    if work.pending and stage.args.deadline:
        if done < max(least, 1):
            raise ResumableError(
                f"at the deadline {stage.args.deadline} there were {done} rows, fewer than generate.min_rows = "
                f"{max(least, 1)}; run the same command with a later --deadline"
            )
        stage.facts |= {"deadline": stage.args.deadline.timestamp(), "requests": len(work.requests)}
        return stage.finish() | {"deadline": stage.args.deadline.isoformat()}
    if not done:
        raise ContractError(f"no rows from {stage.counts.total} prompts; rejected: {dict(stage.counts.rejected)}")
    return stage.finish()


def _name_pending(path: Path, work: Work) -> None:
    pending = map(work.requests.__getitem__, work.pending)
    files.write_jsonl(path, ({"row_id": request.row_id, "source": request.source} for request in pending))


def dry_run(stage: Stage) -> dict:
    """Offline: the mix by source, the number of pending requests, and whatever is missing.

    `refused`: why the pipeline must stop before it starts a server. `stale`: why the manifest must be written again
    although no request is left. `row_set` identifies the rows that there will be. `unprepared`: prompts
    of the hub must still be fetched or mixed, which takes minutes and no server.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when `datasets` is imported
    findings = []
    for check in (stage.config.check_against_model, lambda: chat.check_template(stage.config)):
        try:
            check()
        except ConfigError as error:
            findings.append(str(error))
    result: dict[str, Any] = {"stage": stage.name, "dry_run": True, "pending": 1, "findings": findings}
    before = read_manifest(stage.folder) or {}
    unfinished = before.get("status") != "complete"
    with tempfile.TemporaryDirectory() as scratch:
        mixed = Path(scratch)
        try:
            if mix.current_meta(stage.config, stage.folder):
                mixed = stage.folder
            meta = mix.materialise(stage.config, mixed, earlier=stage.folder)
        except ConfigError as error:
            findings.append(str(error))
            result["refused"], meta = str(error), None
        except ResumableError as error:  # the data set is only on the hub, and a dry run is offline
            result["notes"], meta = [str(error)], None
        result["unprepared"] = mixed != stage.folder and any(source.hub for source in stage.config.prompts)
        if meta:
            result |= {"sources": meta["sources"], "read": source_lines(meta), "broken": broken_lines(mixed)}
            work = Work(mixed, stage.folder, stage.args.limit, RETRYABLE_REASONS if unfinished else frozenset())
            result |= {"pending": len(work.pending), "requests": len(work.requests), "row_set": work.row_set()}
            if reason := _stale(stage, before, meta, work):
                result["stale"] = reason
    for name, entry in result.get("sources", {}).items():
        say("%s: %d requests of %s", name, entry["requests"], prompts.count_text(entry))
    if meta and (line := prompts.held_out_advice(meta)):
        say("%s", line)
    for line in (*result.get("read", ()), *result.get("broken", ())):
        say("%s", line)
    return result


def _stale(stage: Stage, before: dict, meta: dict, work: Work) -> str | None:
    """Why the manifest `before` does not describe today's requests; None if it records no prompts.

    Counts are compared only without --limit, since a limited call counts fewer rows than exist.
    """
    made_of = before.get("facts", {}).get("prompts_sha256")
    if made_of is None:
        return None
    if made_of != meta["sha256"]:
        return "manifest.json was written for other prompts"
    rows_now, counted = len(work.done), before.get("out")
    if stage.args.limit is None and before.get("status") == "complete" and counted != rows_now:
        return f"manifest.json counts {counted} rows, there are {rows_now}"
    return None


def source_lines(meta: dict) -> list[str]:
    """One line for each source: how it was read."""
    return [f"prompts {name}: {how}" for name, how in meta["read"].items()]


def broken_lines(mixed: Path) -> list[str]:
    """Lines about the first unusable conversations: source, place and reason."""
    broken = prompts.unusable_conversations(prompts.read_rejections(mixed))
    lines = [f"prompts {record['source']}: rejected: {record['detail']}" for record in broken[:BROKEN_NAMED]]
    more = len(broken) - BROKEN_NAMED
    lines += [f"and {more} more; 01b lists them in {run_files.REJECTED}"] if more > 0 else []
    return [*lines, conversations.WANTED] if lines else []
