"""Stage 01b's pending requests and the pass that sends them: workers, histories, rejections, the failure budget."""

import asyncio
import json
import resource
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from pathlib import Path

from drafter import checked, contracts, files, run_files
from drafter.contracts import Row
from drafter.errors import ConfigError, ContractError, RowError
from drafter.generate import chat, prompts, replay, rows
from drafter.generate.prompts import Request, Requests
from drafter.generate.server_load import ServerLoad
from drafter.progress import RECORDS, Progress
from drafter.serve.client import Client
from drafter.stage import Stage, say
from drafter.text import duration

BUDGETED_REASONS = frozenset(
    {"failed", "bad_reply", "token_count_mismatch", "prompt_mismatch", "empty_completion", "request_refused",
     "bad_token_ids"}
)  # fmt: skip
RETRYABLE_REASONS = frozenset({"failed", "conversation_ended"})  # tried again after an incomplete run
FAILURES_ALLOWED = 5  # failures below this number never stop the run
MAX_ROWS_WITHOUT_REASONING = 20  # the first rows of a reasoning model; then the run stops
FRAME_TOKENS = 64  # tokens that a template may put around one message
DRAIN = 16  # the last DRAIN * concurrency requests are sent longest first


class Work:
    """The requests, split into done (row on disk), rejected for good, and pending.

    `mixed` holds the prompt mix, `folder` the rows and the rejected replies; replies that were rejected for a reason
    in `retried` are pending again.
    """

    def __init__(self, mixed: Path, folder: Path, limit: int | None = None, retried: frozenset[str] = frozenset()):
        self.requests = Requests(mixed / run_files.PROMPTS, limit)
        asked = set(self.requests.ids)
        self.done = rows.done_ids(folder) & asked
        self.rejected = Counter[str]()
        for table in checked.load(mixed / run_files.PROMPTS_META, prompts.Meta)["sources"].values():
            self.rejected.update(table["rejected"])
        settled = set(self.done)
        for record in prompts.read_rejections(folder):
            identity = bytes.fromhex(record["row_id"])
            lasts = record["at"] == "reply" and record["reason"] not in retried
            if lasts and identity in asked and identity not in settled:
                settled.add(identity)
                self.rejected[record["reason"]] += 1
        self.pending = [i for i, identity in enumerate(self.requests.ids) if identity not in settled]

    def row_set(self) -> str:
        """Hash of the ids of all rows, as if every pending request had one."""
        ids = self.done | {self.requests.ids[index] for index in self.pending}
        return contracts.row_set(identity.hex() for identity in ids)

    def count(self, counts: contracts.Counts) -> None:
        counts.total = len(self.pending) + len(self.done) + self.rejected.total()
        counts.done, counts.rejected = len(self.done), self.rejected.copy()


class Generation:
    """One pass over the pending requests at full concurrency."""

    def __init__(self, stage: Stage, work: Work, client: Client, context: int, deadline: float | None):
        self.config, self.counts, self.client = stage.config, stage.counts, client
        self.load = ServerLoad(client)
        self.settings = stage.config.generate
        self.requests, self.context, self.deadline = work.requests, context, deadline
        self.folder = stage.folder
        self.store = rows.Store(stage.folder, self.settings.rows_per_shard)
        self.rejected = files.Journal(stage.folder / run_files.REJECTED)
        requests, concurrency = len(work.requests), stage.config.generate.concurrency
        self.progress = Progress(
            requests, "rows", requests - len(work.pending), at_once=concurrency, record=stage.folder / RECORDS
        )
        self.tokens = 0
        self.started, self._cpu = time.monotonic(), time.process_time()
        self._ends: list[float] = []  # time at which each worker ran out of requests
        self._new = Counter[str]()
        self._first_failure = ""
        self._rows_without_reasoning: int | None = 0  # None once a row has some
        self._misparsed = Counter[str]()
        self._ended: set[int] = set()  # requests rejected because an earlier turn has no usable answer
        self._lengths: dict[str, list[int]] = defaultdict(lambda: [0, 0])  # source -> tokens, rows
        self._continued: deque[tuple[int, list[str]]] = deque()
        self._asked: dict[int, float] = {}  # request that is being answered -> since when
        self._pending = work.pending
        self._ready = self._in_order(work.done)

    async def run(self) -> None:
        """Raises ContractError when too many requests fail, ConfigError when no row has reasoning."""
        await self.load.look()
        if room := self.load.room(self.settings):
            say("%s", room)
        workers = [asyncio.create_task(self._worker()) for _ in range(self.settings.concurrency)]
        watching = [asyncio.create_task(each) for each in (self.load.keep_looking(), self._keep_reminding())]
        try:
            self._ends = await asyncio.gather(*workers)
            await self.load.look()
        finally:
            for task in (*workers, *watching):
                task.cancel()
            await asyncio.gather(*workers, *watching, return_exceptions=True)
            self.store.close()
            self.rejected.close()
            self.progress.close()

    def _in_order(self, done: set[bytes]) -> Iterator[tuple[int, list[str]]]:
        """Requests that can be sent now, with their history.

        The shuffled order is kept, so that a run that stops early is a fair sample. Only the last requests are sent
        longest first: then the time with idle slots at the end is about as long as the shortest of them.
        """
        yield from self._resumed(done)
        heads = [i for i in self._pending if i not in self.requests.parents]
        drain = self.settings.concurrency * DRAIN
        for index in heads[:-drain]:
            yield index, []
        for index in sorted(heads[-drain:], key=self._expected_tokens, reverse=True):
            yield index, []

    def _expected_tokens(self, index: int) -> tuple[float, int]:
        request = self.requests[index]
        tokens, finished = self._lengths[request.source]
        mean = tokens / finished if finished else self.settings.max_tokens
        turns, children = 1, self.requests.children.get(self.requests.ids[index])
        while children:
            turns, children = turns + 1, self.requests.children.get(self.requests.ids[children[0]])
        return turns * mean, sum(len(message["content"] or "") for message in request.messages)

    def _resumed(self, done: set[bytes]) -> Iterator[tuple[int, list[str]]]:
        """Turns whose earlier turns have rows on disk. Turns after a rejected one are rejected."""
        requests = self.requests
        if not requests.parents:
            return
        place = {identity: i for i, identity in enumerate(requests.ids)}
        open_ids = {requests.ids[i] for i in self._pending}
        lines = {}
        for index in self._pending:
            parent = requests.parents.get(index)
            if parent in done:
                lines[index] = requests.line(index, place)
            elif parent and parent not in open_ids:
                self._end_conversation(parent)
        answers = rows.read_answers(self.folder, {identity for line in lines.values() for identity in line})
        for index, line in lines.items():
            history = [answer for identity in line if (answer := answers[identity]) is not None]
            if len(history) < len(line):
                self._end_conversation(line[-1])
            else:
                yield index, history

    def _next(self) -> tuple[int, list[str]] | None:
        if self.deadline is not None and time.time() >= self.deadline:
            return None
        return self._continued.popleft() if self._continued else next(self._ready, None)

    async def _worker(self) -> float:
        while (item := self._next()) is not None:
            index, history = item
            request = self.requests[index]
            self._asked[index] = time.monotonic()
            try:
                row = await self._row(request, history)
            except RowError as error:
                self._reject(request, error)
                self._end_conversation(self.requests.ids[index])
            else:
                self._keep(index, row, history)
            del self._asked[index]
            self.progress.advance(**self._status())
        return time.monotonic()

    async def _keep_reminding(self) -> None:
        """Show that requests are being answered while none ends."""
        while True:
            await asyncio.sleep(max(self.progress.every / 6, 0.1))
            if self._asked:
                longest = time.monotonic() - min(self._asked.values())
                self.progress.remind(**self._status(), longest_so_far=duration(longest))

    async def _row(self, request: Request, history: list[str]) -> Row:
        row = await self._made(request, history)
        rows.check_row(row, self.config.target)
        return row

    async def _made(self, request: Request, history: list[str]) -> Row:
        if request.mode != "regenerate":
            return await replay.build_row(self.client, request, self.config)
        body = chat.chat_body(request, history, self.config)
        await self._refuse_too_long(request, body)
        reply = await self.client.post(chat.CHAT, body, timeout=chat.request_timeout(self.settings))
        return rows.read_reply(reply, request, chat.sampling(self.settings, request.row_id), self.config.target)

    async def _refuse_too_long(self, request: Request, body: dict) -> None:
        """A token has at least one byte, so tokens are counted only for prompts with more bytes than the context."""
        texts = [message["content"] or "" for message in body["messages"]]
        most = sum(len(text.encode(errors="replace")) + FRAME_TOKENS for text in [*texts, json.dumps(request.tools)])
        if most < self.context:
            return
        ids = await replay.tokenize(
            self.client,
            self.config.target,
            messages=body["messages"],
            tools=request.tools,
            add_generation_prompt=True,
        )
        if len(ids) >= self.context:
            raise RowError("prompt_too_long", f"{len(ids)} tokens, the context has {self.context}")

    def _keep(self, index: int, row: Row, history: list[str]) -> None:
        self._check_parsing(row)
        self.store.add(row)
        self.counts.done += 1
        tokens = row.usage["completion_tokens"]
        self.tokens += tokens
        lengths = self._lengths[row.source]
        lengths[0], lengths[1] = lengths[0] + tokens, lengths[1] + 1
        if not (children := self.requests.children.get(self.requests.ids[index])):
            return
        if rows.may_continue(row):
            self._continued.extend((child, [*history, row.content or ""]) for child in children)
        else:
            self._end_conversation(self.requests.ids[index])

    def _check_parsing(self, row: Row) -> None:
        """Raises ConfigError when the server has no reasoning parser, or another model's."""
        if row.finish_reason == "replay":
            return
        if self._rows_without_reasoning is not None and rows.thinks(self.config.target):
            self._rows_without_reasoning = None if row.reasoning else self._rows_without_reasoning + 1
            if self._rows_without_reasoning == MAX_ROWS_WITHOUT_REASONING:
                raise ConfigError(
                    f"{MAX_ROWS_WITHOUT_REASONING} rows have no reasoning: start the server with "
                    "--reasoning-parser, or correct target.think_end and target.prompt_suffix"
                )
        self._misparsed.update(set(row.flags) & set(rows.MISPARSED))
        for flag, count in self._misparsed.items():
            if count > max(FAILURES_ALLOWED, self.settings.max_failure_share * (self._rows_made + 1)):
                raise ConfigError(
                    f"{count} of {self._rows_made + 1} replies {rows.MISPARSED[flag]}: restart the server with the "
                    "model's own --reasoning-parser (servers.generate.args.reasoning-parser), or without one for a "
                    "model without reasoning; the rows made so far are kept"
                )

    def _reject(self, request: Request, error: RowError) -> None:
        self.counts.reject(error.reason)
        self._new[error.reason] += 1
        detail = f"{request.place}: {error.detail}" if request.place and error.detail else error.detail
        self._first_failure = self._first_failure or (detail if error.reason in BUDGETED_REASONS else "")
        self.rejected.append(prompts.rejection(request.row_id, request.source, error.reason, detail, at="reply"))
        failures = sum(self._new[reason] for reason in BUDGETED_REASONS)
        seen = failures + self._rows_made
        if failures > max(FAILURES_ALLOWED, self.settings.max_failure_share * seen):
            raise ContractError(
                f"{failures} of {seen} requests failed ({dict(self._new)}), more than generate.max_failure_share "
                f"allows, the first: {self._first_failure[: prompts.DETAIL]}; see {self.folder / run_files.REJECTED}"
            )

    def _end_conversation(self, identity: bytes) -> None:
        """Reject every later turn of the conversation: `identity`, the row before them, has no usable answer."""
        rejected = [identity]
        while rejected:
            for index in self.requests.children.get(rejected.pop(), ()):
                if index not in self._ended:
                    self._ended.add(index)
                    rejected.append(self.requests.ids[index])
                    self._reject(self.requests[index], RowError("conversation_ended"))

    @property
    def _rows_made(self) -> int:
        return sum(finished for _, finished in self._lengths.values())

    def _status(self) -> dict:
        seconds = max(time.monotonic() - self.started, 1e-9)
        failures = {reason: count for reason, count in self._new.items() if reason in BUDGETED_REASONS}
        return {
            "tok/s": round(self.tokens / seconds),
            "in_flight": self.client.in_flight,
            **self.load.status(),
            **({"failed": failures} if failures else {}),
        }

    def facts(self) -> dict:
        """Facts for the manifest. The tail is the time from the first idle slot to the last reply."""
        seconds = time.monotonic() - self.started
        ends = self._ends or [0.0]
        idle = sum(max(ends) - end for end in ends)
        return {
            "seconds": round(seconds, 3),
            "cpu_seconds": round(time.process_time() - self._cpu, 3),
            "output_tokens_per_second": round(self.tokens / seconds, 1),
            "peak_in_flight": self.client.peak_in_flight,
            "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
            "retries": dict(self.client.retries),
            "abandoned_requests": self.client.abandoned,
            "misparsed": dict(self._misparsed),
            "outages": self.client.outages,
            **self.load.facts(),
            "tail_seconds": round(max(ends) - min(ends), 3),
            "tail_idle_share": round(idle / (self.settings.concurrency * seconds), 4),
        }
