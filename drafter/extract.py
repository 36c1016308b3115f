"""Stage 02: every row once more through the target as prefill; its states checked, published and indexed.

The server's connector writes a `.part`; this side compares it with the row and renames it. `index.jsonl` is the join
of all journals with the rows, rebuilt at every end.
"""

import json
from concurrent.futures import ThreadPoolExecutor

from drafter import artifacts, contracts, server, worklist
from drafter.client import run as run_client
from drafter.contracts import IndexEntry
from drafter.errors import ConfigError, ContractError, RowError
from drafter.extraction import Extraction
from drafter.stage import Progress, Stage, say
from drafter.worklist import Item, Rejected, Share

QUESTION = ("target.model", "target.layer_ids", "extract.dtype")


def dry_run(run: Stage, items: list[Item], todo: list[Item], planned: dict) -> dict:
    """The plan, offline; what is missing or does not fit are findings."""
    findings = [planned["advice"]] if "advice" in planned else []
    try:
        run.require("01b_synthetic")
    except ConfigError as error:
        findings.append(str(error))
    numbers = {key: planned[key] for key in ("tokens", "bytes", "free", "reserve")}
    # Rejected rows are settled; a run by hand gives them another chance.
    path = run.folder / "rejected.jsonl"
    settled = {one["row_id"] for one in artifacts.read_jsonl(path, "row_id")} if path.exists() else set()
    return {
        "stage": run.name,
        "dry_run": True,
        "in": len(items),
        "pending": sum(item.row_id not in settled for item in todo),
        **numbers,
        "findings": findings,
    }


def verify(run: Stage, items: list[Item], rejected: list[Rejected], share: Share) -> dict:
    """Check every published byte and vouch for what is right; the rest is removed, so that the next run redoes it."""
    folder = run.folder
    own = [item for item in items if item.row_id in share and (folder / contracts.states_path(item.row_id)).exists()]

    def check(item: Item) -> IndexEntry | None:
        path = folder / contracts.states_path(item.row_id)
        try:
            return worklist.check_file(run.config, item, path)
        except (RowError, ContractError) as error:
            say("%s is removed: %s", item.row_id, error)
            path.unlink()
            return None

    with ThreadPoolExecutor() as threads:
        right = [entry for entry in threads.map(check, own) if entry is not None]
    lines = "".join(f"{json.dumps(entry.to_record())}\n" for entry in right)
    artifacts.sync_file_system(folder)
    artifacts.write_text(folder / ".journal" / f"{share}.jsonl", lines)
    run.facts["verified"] = {"right": len(right), "removed": len(own) - len(right)}
    record(run, items, rejected, share)
    return finish(run, items, share)


def probe_only(run: Stage, items: list[Item], share: Share) -> dict:
    """The probe of the server as it runs now, on the share's first rows; what the stage holds stays as it is."""
    run.refuse_another_question()
    server.check(run.config, "extract")
    rows = [item for item in items if item.row_id in share][: run.config.extract.probe_rows]
    if not rows:
        raise ConfigError("there is no row to probe the server with")
    extraction = Extraction(run.config, run.folder, rows, share, Progress(len(rows), "rows"))
    try:
        run_client(extraction.probe_once())
    finally:
        worklist.sweep(run.folder, share)
    return {"stage": run.name, "probe": extraction.probes[0]}


def record(
    run: Stage, items: list[Item], rejected: list[Rejected], share: Share, extraction: Extraction | None = None
) -> None:
    """Index, rejected rows, counts and facts, as they are now."""
    folder = run.folder
    if extraction is not None:
        records = "".join(f"{json.dumps(one.to_record())}\n" for one in extraction.rejected)
        artifacts.write_text(folder / ".rejected" / f"{share}.jsonl", records)
        run.facts |= extraction.facts()
    found = worklist.write_index(folder, items)
    asked = {item.row_id for item in items}
    failed = {
        one["row_id"]: one
        for path in sorted(folder.glob(".rejected/*.jsonl"))
        for one in artifacts.read_jsonl(path, "row_id", "reason")
        if one["row_id"] in asked and one["row_id"] not in found
    }
    out = [*(one.to_record() for one in rejected), *failed.values()]
    artifacts.write_text(folder / "rejected.jsonl", "".join(f"{json.dumps(one)}\n" for one in out))
    run.counts = contracts.Counts(total=len(items) + len(rejected), done=len(found))
    for one in out:
        run.counts.reject(one["reason"])
    run.facts |= {
        "tokens": sum(entry.tokens for entry in found.values()),
        "bytes": sum(entry.bytes for entry in found.values()),
        "cut": sum(entry.tokens < entry.row_tokens for entry in found.values()),
    }


def finish(run: Stage, items: list[Item], share: Share) -> dict:
    """The summary. Of a share it counts this share's rows as pending; the manifest counts all of them."""
    if run.counts.total and not run.counts.done:
        raise ContractError("no row has hidden states")
    summary = run.finish()
    if share.of > 1:
        done = worklist.present(run.folder, items)
        rejected = {one["row_id"] for one in artifacts.read_jsonl(run.folder / "rejected.jsonl")}
        left = [i for i in items if i.row_id in share and i.row_id not in done and i.row_id not in rejected]
        summary = summary | {"shard": str(share), "pending": len(left)}
    return summary
