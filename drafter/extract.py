"""Stage 02: every row once more through the target as prefill; its states checked, published and indexed.

The server's connector writes a `.part`; this side compares it with the row and renames it. Rows are durable in
groups: once a second the file system is synced, and only then do their entries reach the journal, so that a
journal entry vouches for its file. `index.jsonl` is the join of all journals with the rows, rebuilt at every end.
"""

import asyncio
import contextlib
import json
import os
import random
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from drafter import artifacts, contracts, probe, states, worklist
from drafter.client import Client
from drafter.client import run as run_client
from drafter.config import Config
from drafter.contracts import IndexEntry
from drafter.errors import ConfigError, ContractError, ResumableError, RowError
from drafter.launch import captured_layer_ids
from drafter.stage import Progress, Stage, say
from drafter.worklist import Item, Rejected, Share

QUESTION = ("target.model", "target.layer_ids", "extract.dtype")
ATTEMPTS = 3  # of a row whose states were bad or never came, while the server lived
RESTARTS = 20  # of the server, that one row may live through
FLOOR_TOKENS_PER_SECOND = 300  # of the whole server; bounds a request's time limit
FILE_SECONDS = 60  # what a reply's file may take beyond the time that a full queue needs
SLOWEST_DISK = 50e6  # bytes a second
OLDEST = (0, 23)  # vLLM: asynchronous writes of hidden states
OLDEST_DEEPSEEK = (0, 25)  # before, that family drops the last layer's states in silence
PARITY_ROWS = 32
SHARE_AFTER = 20  # failures below this number never blow the budget


# The stage's ends


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


def probe_only(run: Stage, extraction: "Extraction") -> dict:
    """The probe of the server as it runs now; nothing is published."""
    try:
        run_client(extraction.probe_once())
    finally:
        worklist.sweep(run.folder, Share())
    return {"stage": run.name, "probe": extraction.probes[0]}


def record(
    run: Stage, items: list[Item], rejected: list[Rejected], share: Share, extraction: "Extraction | None" = None
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


# The run


@dataclass(frozen=True, slots=True)
class Asked:
    """Which states a request is for."""

    layer_ids: tuple[int, ...]
    dtype: states.Dtype


class Extraction:
    """One client's way through its rows; `entries` and `rejected` grow as rows are settled."""

    def __init__(self, config: Config, folder: Path, todo: list[Item], share: Share, progress: Progress):
        self.config, self.folder, self.todo, self.progress = config, folder.resolve(), todo, progress
        self.entries: dict[str, IndexEntry] = {}
        self.rejected: list[Rejected] = []
        self.retries: Counter[str] = Counter()
        self.probes: list[dict] = []
        self.parity: dict | None = None  # of the compact format
        self.seconds = 0.0  # of sending and collecting, without the first probe
        self.tokens = 0
        self._journal = artifacts.Journal(folder / ".journal" / f"{share}.jsonl", sync_seconds=float("inf"))
        self._unvouched: list[IndexEntry] = []
        self._committing = threading.Lock()
        self._attempts: Counter[str] = Counter()
        self._stop: ResumableError | None = None
        self._threads = ThreadPoolExecutor(max_workers=8, thread_name_prefix="collect")
        self._probe = probe.Probe(config)
        self._asked = Asked(config.target.layer_ids, config.extract.dtype)
        settings = config.extract
        # A full queue may stand before a file that is on its way.
        self._file_seconds = FILE_SECONDS + settings.queue_gb * 1e9 / SLOWEST_DISK
        in_flight = settings.concurrency * max(settings.tokens_per_request, config.target.max_seq_len)
        self._request_seconds = 120 + in_flight / FLOOR_TOKENS_PER_SECOND

    async def run(self) -> None:
        """Raises ResumableError (disk, server), ContractError (wrong states, failure budget), ConfigError."""
        settings = self.config.extract
        async with Client(
            self.config.servers.extract, concurrency=settings.concurrency, outage_minutes=settings.outage_minutes
        ) as self._client:
            try:
                await self._refuse_old_engine()
                await self._first_probe()
                async with asyncio.TaskGroup() as self._tasks:
                    await self._extract()
            except BaseExceptionGroup as group:
                raise _first_of(group) from None
            finally:
                await asyncio.to_thread(self._commit)
                self._journal.close()
                self._threads.shutdown()
                self.progress.close()
        if self._stop is not None:
            raise self._stop

    async def probe_once(self) -> None:
        """The probe alone, on the first rows. Raises ContractError when their states are wrong."""
        async with Client(self.config.servers.extract, concurrency=8, outage_minutes=1) as self._client:
            await self._refuse_old_engine()
            result, _parts = await self.probe_rows(self.todo[: self.config.extract.probe_rows])
            if not result.passed:
                raise ContractError(f"the server's hidden states are wrong: {result}")

    def facts(self) -> dict:
        """What the manifest records of this run."""
        return {
            "extracted_rows": len(self.entries),
            "extracted_tokens": self.tokens,
            "extract_seconds": round(self.seconds, 3),
            "tokens_per_second": round(self.tokens / self.seconds) if self.seconds else None,
            "retries": dict(self.retries),
            "probes": self.probes,
        } | ({"parity": self.parity} if self.parity else {})

    async def _refuse_old_engine(self) -> None:
        """Raises ConfigError for an engine that would leave out the last layer of a DeepSeek-V2-family target."""
        found = ""
        with contextlib.suppress(RowError):  # one that cannot be asked may well be right
            found = str((await self._client.get("/version")).get("version"))
        name = self.config.target.architecture.name
        oldest = OLDEST_DEEPSEEK if "Deepseek" in name or "Kimi" in name else OLDEST
        if (parsed := re.match(r"(\d+)\.(\d+)", found)) and tuple(map(int, parsed.groups())) < oldest:
            raise ConfigError(
                f"vLLM {found} does not capture the last layer of {name}; it needs {oldest[0]}.{oldest[1]} or newer"
            )

    async def _first_probe(self) -> None:
        """The first rows get their final names only after they were shown to be the right states."""
        items = self.todo[: self.config.extract.probe_rows]
        result, parts = await self.probe_rows(items)
        if not result.passed:
            raise ContractError(f"the server's hidden states are wrong, nothing was published: {result}")
        for item in items:
            self._publish(item, parts[item])
        if self._asked.dtype == "fp8":
            await self._measure_parity()
        if self.config.extract.neighbour_ids:
            await self._keep_neighbours()

    async def probe_rows(self, items: list[Item]) -> tuple[probe.Result, dict[Item, Path]]:
        """Whole, checked, unpublished files of a few rows, and whether they are right. Raises ContractError."""
        parts = await self._capture(items, self._asked)
        result = await self._probe.check(self._client, [(item.input_ids(), part) for item, part in parts.items()])
        self.probes.append(result.to_record())
        say("probe: %s", result)
        return result, parts

    async def _capture(self, items: list[Item], asked: Asked) -> dict[Item, Path]:
        """Whole, checked, unpublished files, one request each. Raises ConfigError, ContractError, ResumableError."""
        parts: dict[Item, Path] = {}
        for item in items:
            try:
                sent, writer = await self._request([item], asked)
            except RowError as error:
                if error.reason == "failed":
                    raise ResumableError(f"no answer to {item.row_id} ({error.detail}); run it again") from None
                raise ConfigError(f"the extract server refuses {item.row_id}: {error}") from None
            found, _late = await self._await(sent, writer, asked)
            if not isinstance(found.get(item), Path):
                raise ContractError(f"the server's hidden states are wrong: {found.get(item) or 'no file came'}")
            parts[item] = found[item]
        return parts

    async def _measure_parity(self) -> None:
        """What the compact format costs: the relative error of some rows' auxiliary states, printed and recorded."""
        parts = await self._capture(self.todo[:PARITY_ROWS], Asked(self._asked.layer_ids, "bf16"))
        errors = torch.stack([await asyncio.to_thread(_relative_error, part) for part in parts.values()])
        by_layer = dict(zip(map(str, self._asked.layer_ids), errors.mean(dim=0).tolist(), strict=False))
        self.parity = {"rows": len(errors), "mean": by_layer, "worst_row": errors.max().item()}
        shown = ", ".join(f"layer {layer} {error:.4f}" for layer, error in by_layer.items())
        say("fp8: relative error of the auxiliary states of %d rows: %s", len(errors), shown)
        for part in parts.values():
            part.unlink()

    async def _keep_neighbours(self) -> None:
        """The probe rows once more in `neighbours/`, with the layers above the asked ones, to compare conventions."""
        captured = tuple(captured_layer_ids(self.config))
        parts = await self._capture(self.todo[: self.config.extract.probe_rows], Asked(captured, "bf16"))
        for item, part in parts.items():
            path = self.folder / "neighbours" / contracts.states_path(item.row_id)
            path.parent.mkdir(parents=True, exist_ok=True)
            os.replace(part, path)
            probe.check_neighbours(path, self._asked.layer_ids[:-1])

    async def _extract(self) -> None:
        self._started = time.monotonic()
        commits = asyncio.create_task(self._commit_every_second())
        size = self.config.extract.rows_per_shard
        self._shards = [self.todo[start : start + size] for start in range(0, len(self.todo), size)]
        self._shard_of = {item.row_id: number for number, shard in enumerate(self._shards) for item in shard}
        self._unsettled = [len(shard) for shard in self._shards]
        self._unproven = set(range(len(self._shards)))
        for item in [item for item in self.todo if item.row_id in self.entries]:
            self._settle(item)
        self.tokens = 0  # those of the first probe took no part in the rate
        # Files of replied requests may be late: their requests no longer count as in flight, but are bounded too.
        room = asyncio.Semaphore(4 * self.config.extract.concurrency)
        try:
            async with asyncio.TaskGroup() as group:
                for batch in self._batches([item for item in self.todo if item.row_id not in self.entries]):
                    await room.acquire()
                    if self._stop is not None:
                        break
                    group.create_task(self._deliver(batch)).add_done_callback(lambda _task: room.release())
        finally:
            commits.cancel()
            self.seconds = time.monotonic() - self._started

    def _batches(self, items: list[Item]) -> Iterator[list[Item]]:
        """Rows that share a request: up to `tokens_per_request`, no two with the same ids."""
        batch: list[Item] = []
        for item in items:
            full = sum(other.tokens for other in batch) + item.tokens > self.config.extract.tokens_per_request
            if batch and (full or any(item.digest == other.digest for other in batch)):
                yield batch
                batch = []
            batch.append(item)
        if batch:
            yield batch

    async def _deliver(self, batch: list[Item]) -> None:
        """Until every row of the batch is published or rejected: together first, then alone."""
        again = await self._attempt(batch)
        for item in again:
            while self._stop is None and await self._attempt([item]):
                pass

    async def _attempt(self, batch: list[Item]) -> list[Item]:
        """One request; the rows that need another."""
        try:
            sent, writer = await self._request(batch, self._asked)
        except RowError as error:
            if len(batch) > 1:
                return batch  # one of them spoils the request; alone it will be found
            if error.reason in ("bad_reply", "bad_states"):
                return self._once_more(batch[0], error)
            self._reject(batch[0], error)
            return []
        found, late = await self._await(sent, writer, self._asked)
        again = []
        for item, outcome in found.items():
            if isinstance(outcome, Path):
                self._publish(item, outcome)
                self._settle(item)
            elif outcome.reason == "disk_full":
                self._stop = ResumableError(f"no space left below {self.folder}; free some and run the same again")
            else:
                again += self._once_more(item, outcome)
        for item, error in late.items():
            again += self._once_more(item, error)
        return again

    async def _request(self, batch: list[Item], asked: Asked) -> tuple[dict[Item, tuple[Path, list[int]]], Path]:
        """Ask for the states of some rows. Returns where they will be, and who writes them. Raises RowError."""
        target = self.config.target
        ids = [item.input_ids() for item in batch]
        attempt = secrets.token_hex(4)  # a late file of an earlier attempt is never taken for this one's
        parts = [
            self.folder / contracts.states_path(item.row_id).with_name(f"{item.row_id}.{attempt}.part")
            for item in batch
        ]
        files = {item.digest: str(part) for item, part in zip(batch, parts, strict=True)}
        body = {
            "model": target.served_name,
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 0,
            "kv_transfer_params": {
                "files": files,
                "layer_ids": list(asked.layer_ids),
                "dtype": asked.dtype,
            },
        }
        reply = await self._client.post("/v1/completions", body, self._request_seconds)
        answer = reply.get("kv_transfer_params")
        if not isinstance(answer, dict) or not isinstance(answer.get("writer"), str):
            raise RowError("bad_reply", "the reply names no writer; is drafter.connector the server's connector?")
        if error := answer.get("error"):
            raise RowError("bad_states", str(error))
        writer = Path(answer["writer"])
        if not writer.exists():
            raise RowError("bad_reply", f"the server shares no file system with this process: {writer}")
        return dict(zip(batch, zip(parts, ids, strict=True), strict=True)), writer

    async def _await(self, sent: dict, writer: Path, asked: Asked) -> tuple[dict, dict[Item, RowError]]:
        """Look until every file is there or given up: what was found, and what is late."""
        loop = asyncio.get_running_loop()
        waiting, found = dict(sent), {}
        started, pause, alive = time.monotonic(), 0.002, True
        while True:
            outcomes = await loop.run_in_executor(self._threads, self._look, waiting, asked)
            found |= outcomes
            for item in outcomes:
                del waiting[item]
            waited = time.monotonic() - started
            if not waiting or not alive or waited > self._file_seconds:
                break
            if waited > 1:  # asked before the next look, which therefore sees the writer's last file
                alive = states.is_locked(writer)
            await asyncio.sleep(pause)
            pause = min(2 * pause, 0.1)
        why = f"no file within {waited:.0f} s of the reply" if alive else "the server died before writing it"
        return found, {item: RowError("no_states" if alive else "failed", why) for item in waiting}

    def _look(self, sent: dict[Item, tuple[Path, list[int]]], asked: Asked) -> dict[Item, Path | RowError]:
        """In a thread: the files that are there, compared with their rows, and the reports of those that failed."""
        hidden = self.config.target.architecture.hidden_size
        found: dict[Item, Path | RowError] = {}
        for item, (part, ids) in sent.items():
            try:
                header = states.read_header(part)
                states.check_header(header, item.row_id, ids, asked.layer_ids, hidden, asked.dtype)
                found[item] = part
            except FileNotFoundError:
                if (report := part.with_suffix(".error")).exists():
                    found[item] = _read_report(report)
            except ContractError as error:
                found[item] = RowError("bad_states", str(error))
            except RowError as error:
                found[item] = error
        return found

    def _publish(self, item: Item, part: Path) -> None:
        path = self.folder / contracts.states_path(item.row_id)
        size = part.stat().st_size
        os.replace(part, path)
        entry = item.entry(size)
        self.entries[item.row_id] = entry
        self._unvouched.append(entry)

    def _once_more(self, item: Item, error: RowError) -> list[Item]:
        """The row as one to try again, or nothing once it had its attempts."""
        self.retries[error.reason] += 1
        self._attempts[item.row_id] += 1
        limit = RESTARTS if error.reason == "failed" else ATTEMPTS
        if self._attempts[item.row_id] < limit:
            return [item]
        self._reject(item, error)
        return []

    def _reject(self, item: Item, error: RowError) -> None:
        self.rejected.append(Rejected(item.row_id, error.reason, error.detail))
        handled = len(self.entries) + len(self.rejected)
        if len(self.rejected) > max(SHARE_AFTER, self.config.extract.max_failure_share * handled):
            raise ContractError(f"{len(self.rejected)} of {handled} rows failed, the last one: {error}")
        self._settle(item)

    def _settle(self, item: Item) -> None:
        self.tokens += item.tokens
        rate = self.tokens / max(time.monotonic() - self._started, 1e-9)
        self.progress.advance(tokens_per_s=round(rate), retries=self.retries.total())
        number = self._shard_of[item.row_id]
        self._unsettled[number] -= 1
        if self._unsettled[number] == 0:
            self._tasks.create_task(self._probe_shard(number))

    async def _probe_shard(self, number: int) -> None:
        """A few published rows of a finished shard once more; wrong ones take every unproven row with them."""
        rows = [item for item in self._shards[number] if item.row_id in self.entries]
        chosen = random.Random(number).sample(rows, min(self.config.extract.probe_rows, len(rows)))
        pairs = [(item.input_ids(), self.folder / self.entries[item.row_id].path) for item in chosen]
        result = await self._probe.check(self._client, pairs)
        self.probes.append(result.to_record())
        if result.passed:
            self._unproven.discard(number)
            return
        withdrawn = [row_id for row_id in self.entries if self._shard_of[row_id] in self._unproven]
        for row_id in withdrawn:
            (self.folder / self.entries.pop(row_id).path).unlink(missing_ok=True)
        raise ContractError(f"the server's hidden states went wrong, {len(withdrawn)} rows are withdrawn: {result}")

    async def _commit_every_second(self) -> None:
        while True:
            await asyncio.sleep(1)
            await asyncio.to_thread(self._commit)
            free, reserve = artifacts.free_bytes(self.folder), self.config.extract.reserve_gb * 1e9
            if free < reserve and self._stop is None:
                self._stop = ResumableError(
                    f"{free / 1e9:.1f} GB free below {self.folder}, extract.reserve_gb keeps {reserve / 1e9:.1f}; "
                    "free some and run the same again"
                )

    def _commit(self) -> None:
        """In a thread: make what was published durable, then vouch for it."""
        with self._committing:  # the last commit waits for one that was cut off
            entries, self._unvouched = self._unvouched, []
            if entries:
                artifacts.sync_file_system(self.folder)
                for entry in entries:
                    self._journal.append(entry.to_record())
                self._journal.sync()


def _relative_error(path: Path) -> Tensor:
    """Of each auxiliary layer after a round trip through the compact format: [A]."""
    read = states.read_states(path)
    small = states.compact(torch.cat([read.aux, read.final[:, None]], dim=1))
    aux = read.aux.float()
    return (states.expand(small["aux"], small["aux_scale"]).float() - aux).norm(dim=(0, 2)) / aux.norm(dim=(0, 2))


def _read_report(path: Path) -> RowError:
    """Why the connector wrote no file. An empty report is all that fits on a full disk."""
    try:
        report = json.loads(path.read_text())
        return RowError(report["reason"], report["detail"])
    except (ValueError, KeyError, TypeError):
        return RowError("disk_full")


def _first_of(group: BaseExceptionGroup) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
