"""Stage 01b: ask the target every question and keep what it wrote, token by token."""

import json
import os
import tempfile
import time
from pathlib import Path

from drafter import files
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

PENDING = "pending.jsonl"  # what a deadline left undone
BROKEN_NAMED = 5  # conversations that cannot be used; an open data set has many


def prepare(stage: Stage) -> Work:
    """Claim the folder, materialise the mix, find what is left to do."""
    before = read_manifest(stage.folder) or {}
    stage.begin(QUESTION)
    rows.keep_whole_rows(stage.folder / rows.JOURNAL)
    for shard in filter(files.cut_torn_tail, rows.shards(stage.folder)):
        say("%s ended in the middle of a row, which is asked for again", shard)
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
    return work


def ask(stage: Stage, work: Work) -> None:
    """Answer what is pending until the deadline; once that has passed, no server is needed."""
    deadline = stage.args.deadline and stage.args.deadline.timestamp()
    if deadline is not None and time.time() >= deadline:
        say("the deadline %s has passed: no request is sent", stage.args.deadline)
        return
    roles.require_ready(stage.config, "generate")
    client.run_interruptible(answer(stage, work, deadline))


async def answer(stage: Stage, work: Work, deadline: float | None) -> None:
    """Send what is pending until `deadline`, a timestamp."""
    settings, generated = stage.config.generate, stage.config.servers.generate
    async with Client(generated, concurrency=settings.concurrency, outage_minutes=settings.outage_minutes) as calls:
        context = await chat.check_server(calls, stage.config)
        generation = Generation(stage, work, calls, context, deadline)
        try:
            await generation.run()
        finally:
            stage.facts["generation"] = generation.facts()


def conclude(stage: Stage) -> dict:
    """Publish the last shard, count what is on disk, sum up, and judge whether the night can go on.

    Raises ContractError when there is no row at all, ResumableError when a deadline left fewer than min_rows.
    """
    rows.publish_journal(stage.folder)
    work = Work(stage.folder, stage.folder, stage.args.limit)
    work.count(stage.counts)
    _name_pending(stage.folder / PENDING, work)
    stage.facts["rows"] = summary = rows.summarise_rows(rows.read_rows(stage.folder, stage.args.limit))
    say("rows written\n%s", rows.summary_table(summary))
    done, least = stage.counts.done, stage.config.generate.min_rows
    if work.pending and stage.args.deadline:
        if done < max(least, 1):
            raise ResumableError(
                f"at the deadline {stage.args.deadline} there were {done} rows, fewer than generate.min_rows = "
                f"{max(least, 1)}; run it again with a later --deadline"
            )
        stage.facts |= {"deadline": stage.args.deadline.timestamp(), "requests": len(work.requests)}
        return stage.finish() | {"deadline": stage.args.deadline.isoformat()}
    if not done:
        raise ContractError(f"not one row from {stage.counts.total} prompts: {dict(stage.counts.rejected)}")
    return stage.finish()


def _name_pending(path: Path, work: Work) -> None:
    with files.publish(path) as part, open(part, "w") as file:
        for request in map(work.requests.__getitem__, work.pending):
            file.write(json.dumps({"row_id": request.row_id, "source": request.source}) + "\n")


def dry_run(stage: Stage) -> dict:
    """Offline: the mix by source, what is left to do, and what is missing.

    `refused` is what the pipeline must stop at before it starts a server, and its own checks do not know; `stale`,
    why the manifest is to be written again although no request is left; `row_set` identifies the rows there will be.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when `datasets` is imported
    findings = []
    for check in (stage.config.check_against_model, lambda: chat.check_template(stage.config)):
        try:
            check()
        except ConfigError as error:
            findings.append(str(error))
    result = {"stage": stage.name, "dry_run": True, "pending": 1, "findings": findings}
    before = read_manifest(stage.folder) or {}
    unfinished = before.get("status") != "complete"
    with tempfile.TemporaryDirectory() as scratch:
        try:
            mixed = stage.folder if mix.current_meta(stage.config, stage.folder) else Path(scratch)
            meta = mix.materialise(stage.config, mixed, earlier=stage.folder)
        except ConfigError as error:
            findings.append(str(error))
            result["refused"], meta = str(error), None
        except ResumableError as error:  # only the hub has it, and a dry run is offline
            result["notes"], meta = [str(error)], None
        if meta:
            result |= {"sources": meta["sources"], "read": source_lines(meta), "broken": broken_lines(mixed)}
            work = Work(mixed, stage.folder, stage.args.limit, RETRYABLE_REASONS if unfinished else frozenset())
            result |= {"pending": len(work.pending), "requests": len(work.requests), "row_set": work.row_set()}
            if reason := _stale(stage, before, meta, work):
                result["stale"] = reason
    for name, entry in result.get("sources", {}).items():
        say("%s: %d requests of %s", name, entry["requests"], prompts.count_text(entry))
    for line in (*result.get("read", ()), *result.get("broken", ())):
        say("%s", line)
    return result


def _stale(stage: Stage, before: dict, meta: dict, work: Work) -> str | None:
    """Why the manifest `before` is not of what is asked for now; None where it does not record its prompts.

    A call with a limit counts fewer rows than there are, so only one without judges the counts.
    """
    made_of = before.get("facts", {}).get("prompts_sha256")
    if made_of is None:
        return None
    if made_of != meta["sha256"]:
        return "manifest.json is of other prompts"
    rows_now, counted = len(work.done), before.get("out")
    if stage.args.limit is None and before.get("status") == "complete" and counted != rows_now:
        return f"manifest.json counts {counted} rows of {rows_now}"
    return None


def source_lines(meta: dict) -> list[str]:
    """How each source was read, a line each."""
    return [f"prompts {name}: {how}" for name, how in meta["read"].items()]


def broken_lines(mixed: Path) -> list[str]:
    """The first few conversations that cannot be used, with source, place and reason."""
    broken = prompts.unusable_conversations(prompts.read_rejections(mixed))
    lines = [f"prompts {record['source']}: rejected: {record['detail']}" for record in broken[:BROKEN_NAMED]]
    more = len(broken) - BROKEN_NAMED
    lines += [f"and {more} more, in {prompts.REJECTED} once 01b runs"] if more > 0 else []
    return [*lines, conversations.WANTED] if lines else []
