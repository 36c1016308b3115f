"""Stage 02: run every row through the target once more, then check, publish and index its hidden states.

The server's connector writes `.part` files; this client compares each with its row and renames it. At its end every
call rebuilds `index.jsonl` from all hosts' journals.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from drafter import contracts, files, run_files
from drafter.config import Config
from drafter.contracts import IndexEntry
from drafter.errors import ConfigError, ContractError, RowError, StageError
from drafter.extract import states, worklist
from drafter.extract.loop import Extraction, FirstLoss
from drafter.extract.worklist import Item, Rejected, Share
from drafter.progress import RECORDS, Progress
from drafter.serve import client, roles
from drafter.stage import Stage, read_manifest, say
from drafter.target import weights_fingerprint

REDO_ROWS = 10  # finished files that are replaced without --redo
QUESTION = ("target.model", "target.layer_ids", "extract.dtype")


class Rows(NamedTuple):
    """Stage 01b's rows: those to extract, those that cannot be extracted, and this host's share."""

    items: list[Item]
    rejected: list[Rejected]
    share: Share

    @property
    def own(self) -> list[Item]:
        return [item for item in self.items if item.row_id in self.share]

    def todo(self, folder: Path) -> list[Item]:
        done = worklist.extracted_rows(folder, self.items)
        return [item for item in self.own if item.row_id not in done]


def read_rows(stage: Stage) -> Rows:
    return Rows(*worklist.read_items(stage.config, stage.args.limit), Share.parse(stage.args.shard))


def run(stage: Stage, first_loss: Callable[[Config], FirstLoss | None]) -> dict:
    """Extract this host's missing rows and return the summary; with --probe or --verify only check."""
    config, folder = stage.config, stage.folder
    stage.require("01b_synthetic")  # before the folder is made
    own_share = partial(worklist.locked_share, folder, Share.parse(stage.args.shard))
    stage.lock("01b_synthetic", own=own_share)
    rows = read_rows(stage)
    check_upstream(stage, rows)
    if stage.args.probe:
        return probe_server(stage, rows)
    stage.refuse_another_question()
    if stage.args.verify:
        stage.begin(QUESTION)
        return verify_files(stage, rows)
    if todo := worklist.adopt_files(config, folder, rows.todo(folder), rows.share):
        check_ready(stage, todo)
    weights_fingerprint.check_same_weights(config, recording=True)
    stage.begin(QUESTION)
    worklist.remove_unpublished(folder, rows.share)
    if not todo:
        say("nothing left to extract: %d rows", len(rows.items))
        return settle(stage, *rows)
    own = len(rows.own)
    record = folder / RECORDS if own == len(rows.items) else None  # a share's counts are not the stage's
    progress = Progress(own, "rows", own - len(todo), at_once=config.extract.concurrency, record=record)
    extraction = Extraction(config, folder, todo, rows.share, progress, first_loss(config))
    try:
        client.run_interruptible(extraction.run())
    except BaseException:
        worklist.remove_unpublished(folder, rows.share)
        with worklist.merge_lock(folder):
            write_records(stage, *rows, extraction)
        raise
    worklist.remove_unpublished(folder, rows.share)
    return settle(stage, *rows, extraction)


def dry_run(stage: Stage) -> dict:
    """What `run` would do, offline; whatever is missing or does not fit is a finding.

    `refused`: why the stage would end before its first row. `stale`: why the index must be merged again even if no
    row needs extraction. `row_set` identifies 01b's rows.
    """
    rows = read_rows(stage)
    todo = rows.todo(stage.folder)
    outdated = worklist.outdated_rows(stage.config, stage.folder, todo)
    estimate = worklist.estimate_disk(stage.config, todo, stage.folder, sum(outdated.values()))
    refused = redo_refusal(stage, outdated)
    findings = [text for text in (estimate.get("advice"), refused) if text]
    try:
        check_upstream(stage, rows)
    except StageError as error:
        findings.append(str(error))
    # Rejected rows are not pending; a manual call retries them, and so does a call that merges the index again.
    rows_now, stale = row_set(rows.items, rows.rejected), {}
    written = read_manifest(stage.folder) or {"facts": {}}
    if written["facts"].get("row_set", rows_now) != rows_now:
        stale = {"stale": "index.jsonl lists other rows than 01b_synthetic has now"}
    elif worklist.index_changed(stage.folder, written):
        stale = {"stale": "index.jsonl is not the one that manifest.json describes"}
    settled = set() if stale else settled_ids(stage.folder)
    return {
        "stage": stage.name,
        "dry_run": True,
        "in": len(rows.items),
        "pending": sum(item.row_id not in settled for item in todo),
        **{key: estimate[key] for key in ("tokens", "bytes", "free", "reserve")},
        "redo": len(outdated),
        "row_set": rows_now,
        **stale,
        **({"refused": refused} if refused else {}),
        "findings": findings,
    }


def row_set(items: list[Item], rejected: list[Rejected]) -> str:
    """Hash of the ids of 01b's rows, which the index is built from."""
    return contracts.row_set({item.row_id for item in items} | {each.row_id for each in rejected})


def check_upstream(stage: Stage, rows: Rows) -> None:
    """Raises ConfigError when stage 01b has no rows, ContractError when rows are missing from its shards."""
    manifest = stage.require("01b_synthetic")
    if not rows.items and not rows.rejected:
        raise ConfigError(f"01b_synthetic has no rows yet (its status: {manifest['status']}); let it finish first")
    if stage.args.limit is None:
        worklist.compare_with_manifest(manifest, rows.items, rows.rejected)


def redo_refusal(stage: Stage, outdated: dict[Item, int]) -> str | None:
    """Why more than REDO_ROWS finished files are not replaced without --redo; None if they may be."""
    if stage.args.redo or len(outdated) <= REDO_ROWS:
        return None
    tokens = sum(item.tokens for item in outdated)
    return (
        f"{len(outdated)} finished rows hold other token ids than they would now: target.max_seq_len (now "
        f"{stage.config.target.max_seq_len}) was changed, or 01b generated them again. To extract them again "
        f"({tokens} tokens), add --redo; to keep them, undo that change or use another run.name"
    )


def check_ready(stage: Stage, todo: list[Item]) -> None:
    """Raises ConfigError or ResumableError for everything that would stop the stage before its first row."""
    outdated = worklist.outdated_rows(stage.config, stage.folder, todo)
    if refused := redo_refusal(stage, outdated):
        raise ConfigError(refused)
    if advice := worklist.estimate_disk(stage.config, todo, stage.folder, sum(outdated.values())).get("advice"):
        raise ConfigError(advice)
    roles.require_ready(stage.config, "extract")
    if outdated:
        say("%d finished rows are extracted again; each old file is kept until its replacement is", len(outdated))


def verify_files(stage: Stage, rows: Rows) -> dict:
    """Check every byte of this share's files and list the correct ones; damaged files are removed."""
    folder = stage.folder
    existing = [item for item in rows.own if (folder / contracts.states_path(item.row_id)).exists()]

    def check(item: Item) -> IndexEntry | str:
        path = folder / contracts.states_path(item.row_id)
        try:
            try:
                return worklist.check_file(stage.config, item, path)
            except worklist.Outdated:  # for example after a change of max_seq_len: not damaged if complete
                states.check_content(path)
                return "outdated"
        except (RowError, ContractError) as error:
            say("%s is removed: %s", item.row_id, error)
            path.unlink()
            return "removed"

    with ThreadPoolExecutor() as threads:
        outcomes = list(threads.map(check, existing))
    correct = [entry for entry in outcomes if isinstance(entry, IndexEntry)]
    files.sync_file_system(folder)
    files.write_jsonl(worklist.journal_path(folder, rows.share), (entry.to_record() for entry in correct))
    stage.facts["verified"] = {
        "right": len(correct),
        "removed": outcomes.count("removed"),
        "outdated": outcomes.count("outdated"),
    }
    return settle(stage, *rows)


def probe_server(stage: Stage, rows: Rows) -> dict:
    """Probe the running server with the first rows of this share; nothing in the stage's folder changes."""
    stage.refuse_another_question()
    roles.require_ready(stage.config, "extract")
    items = rows.own[: stage.config.extract.probe_rows]
    if not items:
        raise ConfigError("this share has no rows to probe the server with")
    extraction = Extraction(stage.config, stage.folder, items, rows.share, Progress(len(items), "rows"))
    try:
        client.run_interruptible(extraction.probe_once())
    finally:
        worklist.remove_unpublished(stage.folder, rows.share)
    return {"stage": stage.name, "probe": extraction.probes[0]}


def settle(
    stage: Stage, items: list[Item], rejected: list[Rejected], share: Share, extraction: Extraction | None = None
) -> dict:
    """Write index and manifest and return the summary. One host at a time: a slow host cannot publish an old view.

    The manifest counts the rows of all hosts; the summary of a share counts only its own rows as pending.
    """
    with worklist.merge_lock(stage.folder):
        write_records(stage, items, rejected, share, extraction)
        if stage.counts.total and not stage.counts.done:
            raise ContractError("no row has hidden states")
        summary = stage.finish()
    if share.of > 1:
        settled = worklist.extracted_rows(stage.folder, items).keys() | settled_ids(stage.folder)
        pending = sum(item.row_id in share and item.row_id not in settled for item in items)
        summary |= {"shard": str(share), "pending": pending}
    return summary


def write_records(
    stage: Stage, items: list[Item], rejected: list[Rejected], share: Share, extraction: Extraction | None = None
) -> None:
    """Write the index and the rejected rows; update the stage's counts and facts."""
    folder = stage.folder
    if extraction is not None:
        files.write_jsonl(folder / ".rejected" / f"{share}.jsonl", (one.to_record() for one in extraction.rejected))
        stage.facts |= extraction.facts()
    entries = worklist.write_index(folder, items)
    asked = {item.row_id for item in items}
    failed = {
        record["row_id"]: record
        for path in sorted(folder.glob(".rejected/*.jsonl"))
        for record in read_rejected(path)
        if record["row_id"] in asked and record["row_id"] not in entries
    }
    out = [*(one.to_record() for one in rejected), *failed.values()]
    files.write_jsonl(folder / run_files.REJECTED, out)
    stage.counts = contracts.Counts(total=len(items) + len(rejected), done=len(entries))
    for record in out:
        stage.counts.reject(record["reason"])
    stage.facts |= {
        "row_set": row_set(items, rejected),
        "index_sha256": files.sha256_file(folder / run_files.INDEX),
        "tokens": sum(entry.tokens for entry in entries.values()),
        "bytes": sum(entry.bytes for entry in entries.values()),
        "cut": sum(entry.tokens < entry.row_tokens for entry in entries.values()),
    }


def read_rejected(path: Path) -> list[dict]:
    """Records of rejected rows; empty if the file does not exist. Raises ContractError if it is broken."""
    if not path.exists():
        return []
    records = list(files.read_jsonl(path, row_id=str, reason=str))
    if unknown := {record["reason"] for record in records} - set(contracts.REJECT_REASONS):
        raise ContractError(f"{path}: unknown reason {min(unknown)[:40]!r}; remove the file, 02 writes it again")
    return records


def settled_ids(folder: Path) -> set[str]:
    """Rejected rows that have no states. Duplicates are not among them: their first copy is still extracted."""
    return {
        one["row_id"] for one in read_rejected(folder / run_files.REJECTED) if one["reason"] != worklist.DUPLICATE
    }
