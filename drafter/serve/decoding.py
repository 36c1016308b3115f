"""Decode prompts on a served model and record each decoding step, from the engine's counters and from the streams.

Each streamed chunk of token ids is one decoding step: the accepted draft tokens and one token of the target. The
first chunk comes from prefill, without a draft. The engine may merge chunks when the reader falls behind, and drops
accepted tokens after a stop, so streams are used only where they agree with the counters.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field, replace

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError
from prometheus_client.parser import text_string_to_metric_families

from drafter import contracts
from drafter.config import Server
from drafter.errors import ResumableError, RowError
from drafter.serve.client import open_session, request_headers

SETTLE_SECONDS = 30  # until the engine has counted the last step after the last reply
SPECULATION = "vllm:spec_decode_num"
WARM_TOKENS = 8
MERGED_SHARE = 0.01  # of steps that may be merged into another's chunk: far less than an interval's width


@dataclass(slots=True)
class Counters:
    """vLLM's speculation counters, summed over engines: `drafts` are steps that had a draft."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    accepted_per_position: list[int] = field(default_factory=list)

    def since(self, earlier: "Counters") -> "Counters":
        """Raises ResumableError when these are not later counters of the same engine, or contradict each other."""
        before = earlier.accepted_per_position or [0] * len(self.accepted_per_position)
        if len(before) != len(self.accepted_per_position):
            raise ResumableError("the engine has other counters than before: its server was replaced; run it again")
        result = Counters(
            self.drafts - earlier.drafts,
            self.draft_tokens - earlier.draft_tokens,
            self.accepted - earlier.accepted,
            [now - then for now, then in zip(self.accepted_per_position, before, strict=True)],
        )
        counts = (result.drafts, result.draft_tokens, result.accepted, *result.accepted_per_position)
        if min(counts) < 0 or result.accepted > result.drafts * len(before):
            raise ResumableError(
                f"the engine's counters are no later ones of the same engine ({result}): its server was replaced or "
                "started again; run the same command again"
            )
        return result


@dataclass(slots=True)
class Reply:
    """One request's output. `chunks` are the token counts of its streamed chunks, the first one undrafted.

    `thinks`: the prompt leaves a reasoning block open, so the output begins inside it.
    """

    conv_id: str
    token_ids: list[int]
    chunks: list[int]
    finish_reason: str
    seconds: float
    first_token_seconds: float
    thinks: bool

    def tally(self, part: str, think_end: int | None) -> tuple[int, int]:
        """(drafted steps, accepted tokens) of "all", "reasoning" or "answer".

        A step belongs to the part in which it begins; `</think>` itself is reasoning.
        """
        end = 0
        if self.thinks:
            end = self.token_ids.index(think_end) + 1 if think_end in self.token_ids else len(self.token_ids)
        steps = accepted = position = 0
        for number, size in enumerate(self.chunks):
            inside = part == "all" or (position < end) == (part == "reasoning")
            if number and inside:
                steps += 1
                accepted += size - 1
            position += size
        return steps, accepted


@dataclass(slots=True)
class Decoded:
    """A prompt set decoded once."""

    replies: list[Reply]
    counters: Counters
    seconds: float
    refused: dict[str, str]  # conv_id -> why the server refused it
    skipped: int  # prompts not sent, because time was up

    @property
    def output_tokens(self) -> int:
        return sum(len(reply.token_ids) for reply in self.replies)

    def only(self, conv_ids: list[str]) -> "Decoded":
        """The replies to these prompts, in this order; the counters still cover all prompts."""
        by_id = {reply.conv_id: reply for reply in self.replies}
        return replace(self, replies=[by_id[conv_id] for conv_id in conv_ids])

    @property
    def unseen_steps(self) -> int:
        """Steps that the engine counted but that arrived merged into another step's chunk."""
        return self.counters.drafts - sum(len(reply.chunks) - 1 for reply in self.replies)

    @property
    def streams_agree(self) -> bool:
        """Whether the streams show the steps that the engine counted: every token, and almost every step.

        The tokens match exactly, except for those that a stop or the token limit cut from a request's last step.
        Without a drafter the engine counts no steps, and the streams always agree.
        """
        if not self.counters.accepted_per_position:
            return True
        streamed = sum(sum(reply.chunks[1:]) for reply in self.replies)
        cut = self.counters.drafts + self.counters.accepted - streamed
        width = len(self.counters.accepted_per_position) + 1
        most = sum(max(width - reply.chunks[-1], 0) for reply in self.replies if len(reply.chunks) > 1)
        return 0 <= cut <= most and 0 <= self.unseen_steps <= MERGED_SHARE * self.counters.drafts

    def to_record(self) -> dict:
        return asdict(self)

    @classmethod
    def from_record(cls, record: dict) -> "Decoded":
        replies = [Reply(**reply) for reply in record["replies"]]
        return cls(**record | {"replies": replies, "counters": Counters(**record["counters"])})


async def decode(
    server: Server,
    requests: dict[str, dict],
    concurrency: int,
    until: float,
    think_end: int | None = None,
    on_reply=lambda reply: None,
) -> Decoded:
    """Send each request body (by conv_id) once, `concurrency` at a time, none after `until` (time.monotonic).

    Nothing is retried: a repeated request would count twice. Raises ResumableError when the server fails.
    """
    url = server.url.rstrip("/")
    replies: dict[str, Reply] = {}
    refused: dict[str, str] = {}
    waiting = list(requests)

    async with open_session(
        request_headers(server),
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_read=600),
        read_bufsize=1 << 20,
    ) as session:

        async def work() -> None:
            while waiting and time.monotonic() < until:
                conv_id = waiting.pop(0)
                try:
                    replies[conv_id] = await _stream(session, url, conv_id, requests[conv_id], think_end)
                    on_reply(replies[conv_id])
                except RowError as error:
                    refused[conv_id] = error.detail

        try:
            # A short warm-up round: what the server compiles or captures on first use is not part of its speed.
            warm = [body | {"max_tokens": WARM_TOKENS} for body in list(requests.values())[:concurrency]]
            await asyncio.gather(*(_stream(session, url, "", body, None) for body in warm), return_exceptions=True)
            before = await _settled(session, url)
            started = time.monotonic()
            async with asyncio.TaskGroup() as group:
                for _ in range(concurrency):
                    group.create_task(work())
            seconds = time.monotonic() - started
            counters = (await _settled(session, url)).since(before)
        except ExceptionGroup as group:
            raise _failed(url, group.exceptions[0]) from None
        except (aiohttp.ClientError, OSError) as error:
            raise _failed(url, error) from None
    ordered = [replies[conv_id] for conv_id in requests if conv_id in replies]
    return Decoded(ordered, counters, seconds, refused, len(waiting))


def _failed(url: str, error: Exception) -> Exception:
    """The exception for a failed request: ResumableError when the server failed, else the error itself."""
    if isinstance(error, aiohttp.ClientError | OSError):
        return ResumableError(f"the server at {url} failed: {error!r}; run the same command again")
    return error


async def _stream(session: aiohttp.ClientSession, url: str, conv_id: str, body: dict, think_end: int | None) -> Reply:
    started = time.monotonic()
    first = 0.0
    prompt_ids: list[int] = []
    token_ids: list[int] = []
    chunks: list[int] = []
    finish_reason = ""
    async for event in _events(session, f"{url}/v1/chat/completions", body | {"stream": True}):
        prompt_ids = event.prompt_ids or prompt_ids
        finish_reason = event.finish_reason or finish_reason
        if event.token_ids:
            first = first or time.monotonic() - started
            token_ids += event.token_ids
            chunks.append(len(event.token_ids))
    if finish_reason not in contracts.FINISH_REASONS[:3]:
        why = f"with finish_reason {finish_reason[:40]!r}" if finish_reason else "before its completion did"
        raise ResumableError(f"a stream from {url} ended {why}; run the same command again")
    if not token_ids or not prompt_ids:
        raise RowError("empty_completion", "a reply without token ids")
    thinks = think_end is not None and prompt_ids[-1] != think_end
    return Reply(conv_id, token_ids, chunks, finish_reason, time.monotonic() - started, first, thinks)


@dataclass(slots=True)
class Event:
    """One streamed chunk."""

    prompt_ids: list[int]
    token_ids: list[int]
    finish_reason: str

    @classmethod
    def parse(cls, line: bytes) -> "Event":
        """Raises ValueError when it is no chunk of a completion."""
        try:
            record = json.loads(line)
            if "error" in record:
                raise ValueError(f"an error: {record['error']}")
            choice = record["choices"][0] if record["choices"] else {}
            event = cls(
                record.get("prompt_token_ids") or [],
                choice.get("token_ids") or [],
                choice.get("finish_reason") or "",
            )
            whole = all(isinstance(token, int) for token in event.prompt_ids + event.token_ids)
        except (LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"a broken event ({error!r})") from None
        if not whole or not isinstance(event.finish_reason, str):
            raise ValueError("a broken event (token ids are no integers)")
        return event


async def _events(session: aiohttp.ClientSession, url: str, body: dict) -> AsyncIterator[Event]:
    """A completion as server-sent events.

    Raises RowError for a request that the server refuses, ResumableError for a stream that breaks.
    """
    async with session.post(url, json=body) as reply:
        if reply.status != 200:
            text = " ".join((await reply.read()).decode(errors="replace").split())[:300]
            if reply.status in (400, 413, 422):
                raise RowError("request_refused", f"{reply.status}: {text}")
            raise ResumableError(f"{reply.status} from {url}: {text}")
        try:
            async for line in reply.content:
                if line.startswith(b"data: {"):
                    yield Event.parse(line[6:])
        except (ValueError, HttpProcessingError) as error:  # HttpProcessingError: a line longer than the buffer
            raise ResumableError(f"{url} sent {str(error)[:300]}; run the same command again") from None


async def _settled(session: aiohttp.ClientSession, url: str) -> Counters:
    """The counters, once no request runs and they no longer change."""
    deadline = time.monotonic() + SETTLE_SECONDS
    last = None
    while time.monotonic() < deadline:
        async with session.get(f"{url}/metrics") as reply:
            if reply.status != 200:
                raise ResumableError(f"{reply.status} from {url}/metrics")
            text = (await reply.read()).decode(errors="replace")
        try:
            running, counters = read_counters(text)
        except (ValueError, OverflowError, LookupError) as error:
            raise ResumableError(f"{url}/metrics cannot be read: {error}; run the same command again") from None
        if not running and counters == last:
            return counters
        last = counters
        await asyncio.sleep(0.2)
    raise ResumableError(f"the counters of {url} keep changing after the last reply: does another client use it?")


def read_counters(text: str) -> tuple[int, Counters]:
    """(requests running or waiting, speculation counters) from Prometheus text. All zero without a drafter."""
    sums: Counter[str] = Counter()
    positions: Counter[int] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                sums[sample.name] += int(sample.value)
            if sample.name == f"{SPECULATION}_accepted_tokens_per_pos_total":
                positions[int(sample.labels["position"])] += int(sample.value)
    return int(sums["vllm:num_requests_running"] + sums["vllm:num_requests_waiting"]), Counters(
        int(sums[f"{SPECULATION}_drafts_total"]),
        int(sums[f"{SPECULATION}_draft_tokens_total"]),
        int(sums[f"{SPECULATION}_accepted_tokens_total"]),
        [positions[position] for position in sorted(positions)],
    )
