"""Stage 02: every row once more through the target as prefill; its states checked, published and indexed.

The server's connector writes a `.part`; this side compares it with the row and renames it. `index.jsonl` is the join
of all journals with the rows, rebuilt at every end.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from drafter import contracts, files
from drafter.contracts import IndexEntry
from drafter.errors import ConfigError, ContractError, RowError, StageError
from drafter.extract import states, worklist
from drafter.extract.loop import Extraction
from drafter.extract.worklist import Item, Rejected, Share
from drafter.progress import Progress
from drafter.serve import roles
from drafter.serve.client import run_interruptible
from drafter.stage import Stage, read_manifest, say

REDO_ROWS = 10  # finished files that are replaced without being asked to
QUESTION = ("target.model", "target.layer_ids", "extract.dtype")


def dry_run(run: Stage, items: list[Item], rejected: list[Rejected], todo: list[Item]) -> dict:
    """The plan, offline; what is missing or does not fit are findings.

    `refused`: why the stage would end before its first row. `stale`: why the index is to be merged again, also when
    nothing is to be extracted. `row_set` identifies 01b's rows.
    """
    outdated = worklist.outdated_rows(run.config, run.folder, todo)
    planned = worklist.estimate_disk(run.config, todo, run.folder, sum(outdated.values()))
    refused = redo_refusal(run, outdated)
    findings = [text for text in (planned.get("advice"), refused) if text]
    try:
        check_upstream(run, items, rejected)
    except StageError as error:
        findings.append(str(error))
    numbers = {key: planned[key] for key in ("tokens", "bytes", "free", "reserve")}
    # Rejected rows are settled; a run by hand gives them another chance, and so does one that merges again.
    rows_now, stale = row_set(items, rejected), {}
    if (read_manifest(run.folder) or {"facts": {}})["facts"].get("row_set", rows_now) != rows_now:
        stale = {"stale": "index.jsonl is of other rows than 01b_synthetic has now"}
    settled = set() if stale else settled_ids(run.folder)
    return {
        "stage": run.name,
        "dry_run": True,
        "in": len(items),
        "pending": sum(item.row_id not in settled for item in todo),
        **numbers,
        "redo": len(outdated),
        "row_set": rows_now,
        **stale,
        **({"refused": refused} if refused else {}),
        "findings": findings,
    }


def row_set(items: list[Item], rejected: list[Rejected]) -> str:
    """Identity of 01b's rows, of which the index is made."""
    return contracts.row_set({one.row_id for one in (*items, *rejected)})


def check_upstream(run: Stage, items: list[Item], rejected: list[Rejected]) -> None:
    """Raises ConfigError when stage 01b has no rows, ContractError when it has fewer than it counted."""
    before = run.require("01b_synthetic")
    if not items and not rejected:
        raise ConfigError(f"01b_synthetic has no rows yet (its status: {before['status']}); let it finish first")
    if run.args.limit is None:
        worklist.compare_with_manifest(before, items, rejected)


def redo_refusal(run: Stage, outdated: dict[Item, int]) -> str | None:
    """Why finished files are not replaced without --redo, where there are more than REDO_ROWS."""
    if run.args.redo or len(outdated) <= REDO_ROWS:
        return None
    tokens = sum(item.tokens for item in outdated)
    return (
        f"{len(outdated)} finished rows hold other token ids than are asked for now: target.max_seq_len "
        f"({run.config.target.max_seq_len} now) was another, or 01b generated them again. To extract them again "
        f"({tokens} tokens), add --redo; to keep them, set what was set before or use another run.name"
    )


def check_ready(run: Stage, todo: list[Item]) -> None:
    """Everything that may end the stage before its first row. Raises ConfigError or ResumableError."""
    outdated = worklist.outdated_rows(run.config, run.folder, todo)
    if refused := redo_refusal(run, outdated):
        raise ConfigError(refused)
    if advice := worklist.estimate_disk(run.config, todo, run.folder, sum(outdated.values())).get("advice"):
        raise ConfigError(advice)
    roles.require_ready(run.config, "extract")
    if outdated:
        say("%d finished rows are extracted again; each keeps its file until the new one is there", len(outdated))


def verify(run: Stage, items: list[Item], rejected: list[Rejected], share: Share) -> dict:
    """Check every published byte and list what is right; the damaged is removed, so that the next run redoes it."""
    folder = run.folder
    own = [item for item in items if item.row_id in share and (folder / contracts.states_path(item.row_id)).exists()]

    def check(item: Item) -> IndexEntry | str:
        path = folder / contracts.states_path(item.row_id)
        try:
            try:
                return worklist.check_file(run.config, item, path)
            except worklist.Outdated:  # of another max_seq_len, say: no damage, if it is whole
                states.check_content(path)
                return "outdated"
        except (RowError, ContractError) as error:
            say("%s is removed: %s", item.row_id, error)
            path.unlink()
            return "removed"

    with ThreadPoolExecutor() as threads:
        outcomes = list(threads.map(check, own))
    right = [entry for entry in outcomes if isinstance(entry, IndexEntry)]
    lines = "".join(f"{json.dumps(entry.to_record())}\n" for entry in right)
    files.sync_file_system(folder)
    files.write_text(folder / ".journal" / f"{share}.jsonl", lines)
    run.facts["verified"] = {
        "right": len(right),
        "removed": outcomes.count("removed"),
        "outdated": outcomes.count("outdated"),
    }
    return settle(run, items, rejected, share)


def probe_only(run: Stage, items: list[Item], share: Share) -> dict:
    """The probe of the server as it runs now, on the share's first rows; what the stage holds stays as it is."""
    run.refuse_another_question()
    roles.require_ready(run.config, "extract")
    rows = [item for item in items if item.row_id in share][: run.config.extract.probe_rows]
    if not rows:
        raise ConfigError("there is no row to probe the server with")
    extraction = Extraction(run.config, run.folder, rows, share, Progress(len(rows), "rows"))
    try:
        run_interruptible(extraction.probe_once())
    finally:
        worklist.remove_unpublished(run.folder, share)
    return {"stage": run.name, "probe": extraction.probes[0]}


def settle(
    run: Stage, items: list[Item], rejected: list[Rejected], share: Share, extraction: Extraction | None = None
) -> dict:
    """Index, manifest and summary, joined by one host at a time: a slower host never writes an older view."""
    with worklist.merge_lock(run.folder):
        record_counts(run, items, rejected, share, extraction)
        if run.counts.total and not run.counts.done:
            raise ContractError("no row has hidden states")
        return share_summary(run, items, share)


def record_counts(
    run: Stage, items: list[Item], rejected: list[Rejected], share: Share, extraction: Extraction | None = None
) -> None:
    """Index, rejected rows, counts and facts, as they are now."""
    folder = run.folder
    if extraction is not None:
        records = "".join(f"{json.dumps(one.to_record())}\n" for one in extraction.rejected)
        files.write_text(folder / ".rejected" / f"{share}.jsonl", records)
        run.facts |= extraction.facts()
    found = worklist.write_index(folder, items)
    asked = {item.row_id for item in items}
    failed = {
        one["row_id"]: one
        for path in sorted(folder.glob(".rejected/*.jsonl"))
        for one in read_rejected(path)
        if one["row_id"] in asked and one["row_id"] not in found
    }
    out = [*(one.to_record() for one in rejected), *failed.values()]
    files.write_text(folder / "rejected.jsonl", "".join(f"{json.dumps(one)}\n" for one in out))
    run.counts = contracts.Counts(total=len(items) + len(rejected), done=len(found))
    for one in out:
        run.counts.reject(one["reason"])
    run.facts |= {
        "row_set": row_set(items, rejected),
        "tokens": sum(entry.tokens for entry in found.values()),
        "bytes": sum(entry.bytes for entry in found.values()),
        "cut": sum(entry.tokens < entry.row_tokens for entry in found.values()),
    }


def read_rejected(path: Path) -> list[dict]:
    """Records of rejected rows; none where there is no file. Raises ContractError on a broken one."""
    if not path.exists():
        return []
    found = list(files.read_jsonl(path, row_id=str, reason=str))
    if odd := {one["reason"] for one in found} - set(contracts.REJECT_REASONS):
        raise ContractError(f"{path}: {min(odd)[:40]!r} is not a known reason; remove the file, 02 writes it anew")
    return found


def settled_ids(folder: Path) -> set[str]:
    """Rows that were rejected and have no states; of one that the shards repeat, the first is still extracted."""
    return {one["row_id"] for one in read_rejected(folder / "rejected.jsonl") if one["reason"] != worklist.DUPLICATE}


def share_summary(run: Stage, items: list[Item], share: Share) -> dict:
    """The summary. Of a share it counts this share's rows as pending; the manifest counts all of them."""
    summary = run.finish()
    if share.of > 1:
        done, rejected = worklist.extracted_rows(run.folder, items), settled_ids(run.folder)
        left = [i for i in items if i.row_id in share and i.row_id not in done and i.row_id not in rejected]
        summary = summary | {"shard": str(share), "pending": len(left)}
    return summary
