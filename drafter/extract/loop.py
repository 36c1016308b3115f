"""The main loop of stage 02: request rows, publish their files, probe them, and record them in the journal.

Once a second the file system is synced, and only then are the published rows written to the journal: a row in the
journal has a durable file.
"""

import asyncio
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from drafter import contracts, files, text
from drafter.config import Config
from drafter.contracts import IndexEntry
from drafter.errors import ContractError, ResumableError, RowError, StageError
from drafter.extract import last_position, probe, states
from drafter.extract.request import Capture, StateFormat, disk_full
from drafter.extract.worklist import Item, Rejected, Share, journal_path
from drafter.progress import Progress
from drafter.serve.vllm_command import captured_layer_ids
from drafter.stage import as_stage_error, say

ATTEMPTS = 3  # for a row whose states were wrong or missing while the server was running
RESTARTS = 20  # attempts for a row whose server died
PARITY_ROWS = 32
SHARE_AFTER = 20  # failures are compared with max_failure_share only above this number


class FirstLoss(Protocol):
    """`drafter.train.fp8_cost.FirstLoss`, which this package must not import."""

    def add(self, entry: IndexEntry, file: Path) -> None: ...

    def losses(self) -> dict[str, float] | None: ...


class Extraction:
    """Extraction of the rows in `todo`; `entries` and `rejected` grow as rows are done."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        todo: list[Item],
        share: Share,
        progress: Progress,
        first_loss: FirstLoss | None = None,  # of the warm start, on the compact format
    ):
        self.config, self.folder, self.todo, self.progress = config, folder.resolve(), todo, progress
        self.entries: dict[str, IndexEntry] = {}
        self.rejected: list[Rejected] = []
        self.retries: Counter[str] = Counter()
        self.probes: list[dict] = []
        self.parity: dict | None = None  # error of the compact format
        self.engine: dict[str, str] = {}
        self.differences: list[float] = []  # at the last positions of rows, in nat
        self.seconds = 0.0  # without the first probe
        self.tokens = 0
        self._journal = files.Journal(journal_path(folder, share), sync_seconds=float("inf"))
        self._uncommitted: list[IndexEntry] = []
        self._committing = threading.Lock()
        self._attempts: Counter[str] = Counter()
        self._stop: StageError | None = None
        self._first_loss = first_loss
        self._probe = probe.Probe(config)
        self._asked = StateFormat(config.target.layer_ids, config.extract.dtype)

    async def run(self) -> None:
        """Raises ResumableError (disk, server), ContractError (wrong states, failure budget), ConfigError."""
        settings = self.config.extract
        try:
            async with (
                self._open(settings.concurrency, settings.outage_minutes) as self._capture,
                asyncio.TaskGroup() as self._tasks,
            ):
                self.engine, self.differences = self._capture.engine, self._capture.differences
                await self._first_probe()
                await self._extract()
        except BaseExceptionGroup as group:
            raise _first_of(group) from None
        finally:
            await asyncio.to_thread(self._commit)
            self._journal.close()
            self.progress.close()
        if self._stop is not None:
            raise self._stop

    async def probe_once(self) -> None:
        """Only probe the server, with all rows. Raises ContractError when their states are wrong."""
        async with self._open(concurrency=8, outage_minutes=1) as self._capture:
            result, _parts = await self.probe_rows(self.todo)
            if not result.passed:
                raise ContractError(f"the server's hidden states are wrong: {result}")
            if self.config.extract.neighbour_ids:
                await self._with_neighbours(self.todo)

    def _open(self, concurrency: int, outage_minutes: float) -> Capture:
        return Capture(self.config, self.folder, concurrency, outage_minutes, self._probe)

    def facts(self) -> dict:
        """Facts for the manifest."""
        return {
            "extracted_rows": len(self.entries),
            "extracted_tokens": self.tokens,
            "extract_seconds": round(self.seconds, 3),
            "tokens_per_second": round(self.tokens / self.seconds) if self.seconds else None,
            "retries": dict(self.retries),
            "probes": self.probes,
            "engine": self.engine,
            "last_positions": {
                "rows": len(found := self.differences),
                "mean_nat": sum(found) / max(1, len(found)),
                "max_nat": max(found, default=0.0),
            },
        } | ({"parity": self.parity} if self.parity else {})

    async def _first_probe(self) -> None:
        """Probe the first rows; only then publish them."""
        items = self.todo[: self.config.extract.probe_rows]
        result, parts = await self.probe_rows(items)
        if not result.passed:
            raise ContractError(f"the server's hidden states are wrong, nothing was published: {result}")
        self._capture.bar = last_position.difference_limit(result.mean_nat)
        neighbours = await self._with_neighbours(items) if self.config.extract.neighbour_ids else {}
        for item in items:
            self._publish(item, parts[item])
        for item, part in neighbours.items():
            path = self.folder / "neighbours" / contracts.states_path(item.row_id)
            path.parent.mkdir(parents=True, exist_ok=True)
            os.replace(part, path)
        if self._asked.dtype == "fp8":
            await self._measure_parity()

    async def probe_rows(self, items: list[Item]) -> tuple[probe.Result, dict[Item, Path]]:
        """Capture a few rows and compare them with the server: the result and the unpublished files.

        Raises ContractError.
        """
        parts = await self._capture.capture_files(items, self._asked)
        pairs = [(item.input_ids(), part) for item, part in parts.items()]
        result = await self._probe.check(self._capture.client, pairs)
        self.probes.append(result.to_record())
        say("probe: %s", result)
        return result, parts

    async def _measure_parity(self) -> None:
        """Capture some rows again in bf16 and record what the compact format costs on them.

        That is the relative error of the auxiliary states, and with a warm start its first loss.
        """
        asked, errors = StateFormat(self._asked.layer_ids, "bf16"), []
        for item in self.todo[:PARITY_ROWS]:
            [part] = (await self._capture.capture_files([item], asked)).values()
            errors.append(await asyncio.to_thread(_relative_error, part))
            if self._first_loss is not None:
                await asyncio.to_thread(self._first_loss.add, item.entry(part.stat().st_size), part)
            part.unlink()
        error = torch.stack(errors)
        by_layer = dict(zip(map(str, asked.layer_ids), error.mean(dim=0).tolist(), strict=False))
        losses = self._first_loss and self._first_loss.losses()
        self.parity = {"rows": len(errors), "mean": by_layer, "worst_row": error.max().item(), "first_loss": losses}
        shown = ", ".join(f"layer {layer} {error:.4f}" for layer, error in by_layer.items())
        say("fp8: relative error of the auxiliary states of %d rows: %s", len(errors), shown)
        if losses:
            say("fp8: the warm start's first loss is %.4f, %.4f on bf16 states", losses["fp8"], losses["bf16"])

    async def _with_neighbours(self, items: list[Item]) -> dict[Item, Path]:
        """Unpublished files that also hold the layers above the asked ones. Raises ContractError on a mix-up."""
        captured = tuple(captured_layer_ids(self.config))
        parts = await self._capture.capture_files(items, StateFormat(captured, "bf16"))
        for part in parts.values():
            await asyncio.to_thread(probe.check_neighbours, part, self._asked.layer_ids[:-1])
        return parts

    async def _extract(self) -> None:
        self._started = time.monotonic()
        commits = asyncio.create_task(self._commit_every_second())
        size = self.config.extract.rows_per_shard
        self._shards = [self.todo[start : start + size] for start in range(0, len(self.todo), size)]
        self._shard_of = {item.row_id: number for number, shard in enumerate(self._shards) for item in shard}
        self._unsettled = [len(shard) for shard in self._shards]
        self._unproven = set(range(len(self._shards)))
        for item in [item for item in self.todo if item.row_id in self.entries]:  # those of the first probe
            self.progress.skip()
            self._settle(item)
        # A replied request no longer counts as in flight, but its file may still be missing: bound both.
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
        """Rows that are sent in one request: up to `tokens_per_request` tokens, no two rows with the same ids."""
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
        """Publish or reject every row of the batch; rows that fail together are sent again one by one."""
        again = await self._attempt(batch)
        for item in again:
            while self._stop is None and await self._attempt([item]):
                pass

    async def _attempt(self, batch: list[Item]) -> list[Item]:
        """Send one request; returns the rows that need another."""
        try:
            sent, writer = await self._capture.request(batch, self._asked)
        except RowError as error:
            if len(batch) > 1:
                return batch  # one row makes the request fail; sent alone it is found
            if error.reason in ("bad_reply", "bad_states"):
                return self._once_more(batch[0], error)
            self._reject(batch[0], error)
            return []
        found, late = await self._capture.collect(sent, writer, self._asked)
        again = []
        for item, outcome in found.items():
            if isinstance(outcome, Path):
                self._publish(item, outcome)
                self._advance(item)
            elif outcome.reason == "disk_full":
                self._stop = disk_full(self.folder)
            else:
                again += self._once_more(item, outcome)
        for item, missing in late.items():
            again += self._once_more(item, missing)
        return again

    def _publish(self, item: Item, part: Path) -> None:
        path = self.folder / contracts.states_path(item.row_id)
        size = part.stat().st_size
        os.replace(part, path)
        entry = item.entry(size)
        self.entries[item.row_id] = entry
        self._uncommitted.append(entry)

    def _once_more(self, item: Item, error: RowError) -> list[Item]:
        """[item] if the row may be tried again; rejects it and returns [] otherwise."""
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
            raise ContractError(
                f"{len(self.rejected)} of {handled} rows failed, more than extract.max_failure_share allows; the "
                f"last: {error}"
            )
        self._advance(item)

    def _advance(self, item: Item) -> None:
        self.tokens += item.tokens
        rate = self.tokens / max(time.monotonic() - self._started, 1e-9)
        self.progress.advance(tokens_per_s=round(rate), retries=self.retries.total())
        self._settle(item)

    def _settle(self, item: Item) -> None:
        number = self._shard_of[item.row_id]
        self._unsettled[number] -= 1
        if self._unsettled[number] == 0:
            self._tasks.create_task(self._probe_shard(number))

    async def _probe_shard(self, number: int) -> None:
        """Probe a few published rows of a finished shard; if they are wrong, withdraw all rows not yet proven."""
        rows = [item for item in self._shards[number] if item.row_id in self.entries]
        chosen = random.Random(number).sample(rows, min(self.config.extract.probe_rows, len(rows)))
        pairs = [(item.input_ids(), self.folder / self.entries[item.row_id].path) for item in chosen]
        result = await self._probe.check(self._capture.client, pairs)
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
            try:
                await asyncio.to_thread(self._commit)
            except OSError as error:  # the next run checks the files that did not reach the journal
                self._stop = as_stage_error(error) or ResumableError(f"{self.folder}: {error.strerror}; run it again")
                return
            asked = self.config.extract.reserve_gb
            free, reserve = files.free_bytes(self.folder), asked * 1e9
            if free < reserve and self._stop is None:
                self._stop = ResumableError(
                    f"{self.folder} has {text.size(free)} free, less than the {text.size(reserve)} that "
                    "extract.reserve_gb keeps; free some space and run the same command again"
                )

    def _commit(self) -> None:
        """In a thread: sync the published files, then write them to the journal."""
        with self._committing:  # the final commit waits for an interrupted one
            entries, self._uncommitted = self._uncommitted, []
            if entries:
                files.sync_file_system(self.folder)
                for entry in entries:
                    self._journal.append(entry.to_record())
                self._journal.sync()


def _relative_error(path: Path) -> Tensor:
    """Relative error of each auxiliary layer after a round trip through the compact format: [A]."""
    read = states.read_states(path)
    small = states.to_compact(torch.cat([read.aux, read.final[:, None]], dim=1))
    aux = read.aux.float()
    return (states.from_compact(small["aux"], small["aux_scale"]).float() - aux).norm(dim=(0, 2)) / aux.norm(
        dim=(0, 2)
    )


def _first_of(group: BaseExceptionGroup) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
