"""Counters and streams of a served model: what a step is, and when the streams may be believed."""

import asyncio
import contextlib
import json
import time

import pytest
from aiohttp import web

from drafter import config
from drafter.errors import ResumableError
from drafter.serve import decoding
from drafter.serve.decoding import Counters, Decoded, Reply
from tests.serve.test_client import hostile  # noqa: F401 - a fixture

PROMETHEUS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 100.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 20.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 360.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 150.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 90.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 40.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="0"} 15.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="1"} 5.0
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:generation_tokens_total{engine="0",model_name="m"} 250.0
"""


def reply(chunks: list[int], token_ids: list[int] | None = None, thinks: bool = False) -> Reply:
    return Reply("c", token_ids or list(range(sum(chunks))), chunks, "stop", 1.0, 0.1, thinks)


def test_counters_are_summed_over_engines_and_created_stamps_ignored():
    running, counters = decoding.read_counters(PROMETHEUS)
    assert running == 5
    assert counters == Counters(120, 360, 150, [105, 45])
    assert counters.since(Counters(20, 60, 50, [30, 15])) == Counters(100, 300, 100, [75, 30])
    assert counters.since(Counters()) == counters


def test_without_a_drafter_there_are_no_counters():
    assert decoding.read_counters('vllm:num_requests_running{engine="0"} 0.0\n') == (0, Counters())


def test_a_step_is_a_chunk_and_the_first_chunk_had_no_draft():
    assert reply([1, 4, 1, 2]).tally("all", None) == (3, 3 + 0 + 1)
    assert reply([1]).tally("all", None) == (0, 0)


def test_reasoning_ends_with_its_end_token_and_a_step_belongs_where_it_begins():
    """Ids 0..9, `</think>` is 5, in the middle of the chunk 4 5 6."""
    split = reply([1, 3, 3, 2, 1], list(range(10)), thinks=True)
    assert split.tally("reasoning", 5) == (2, 2 + 2)
    assert split.tally("answer", 5) == (2, 1 + 0)
    assert split.tally("all", 5) == (4, 5)


def test_reasoning_that_never_ends_is_all_reasoning_and_none_is_all_answer():
    assert reply([1, 2, 2], thinks=True).tally("reasoning", 99) == (2, 2)
    assert reply([1, 2, 2], thinks=True).tally("answer", 99) == (0, 0)
    assert reply([1, 2, 2], thinks=False).tally("answer", 1) == (2, 2)


@pytest.mark.parametrize(
    ("drafts", "accepted", "believed"),
    [
        (5, 6, True),  # exactly what was streamed
        (5, 8, True),  # a stop inside the last steps cut two accepted tokens
        (5, 13, False),  # more than the last steps can have lost
        (4, 7, False),  # chunks the engine did not count as steps
        (6, 5, False),  # one step of six came within another's chunk: too many to look past
        (5, 5, False),  # more streamed than accepted
    ],
)
def test_streams_are_believed_only_as_far_as_the_counters_agree(drafts, accepted, believed):
    replies = [reply([1, 4, 2, 1]), reply([1, 3, 1])]
    decoded = Decoded(replies, Counters(drafts, 3 * drafts, accepted, [0, 0, 0]), 1.0, {}, 0)
    assert decoded.streams_agree is believed


def test_a_few_merged_chunks_are_looked_past_and_counted():
    """Two steps that came in one chunk: a token more in it, a step less, and every token accounted for."""
    replies = [reply([1] + [2] * 199 + [4])]
    decoded = Decoded(replies, Counters(201, 603, 201, [201, 0, 0]), 1.0, {}, 0)
    assert decoded.streams_agree
    assert decoded.unseen_steps == 1


def test_a_result_survives_its_file():
    decoded = Decoded([reply([1, 2])], Counters(1, 3, 1, [1, 0, 0]), 1.5, {"d": "400"}, 2)
    assert Decoded.from_record(json.loads(json.dumps(decoded.to_record()))) == decoded


class Engine:
    """A server that streams what it is told to and counts as an engine does."""

    def __init__(self, chunks: list[int], fail: dict[str, int] | None = None):
        self.chunks, self.fail = chunks, fail or {}
        self.requests: list[dict] = []
        self.now = self.peak = 0
        self.drafts = self.accepted = 0

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        text = body["messages"][-1]["content"]
        if status := self.fail.get(text):
            return web.json_response({"error": {"message": "no"}}, status=status)
        self.now += 1
        self.peak = max(self.peak, self.now)
        try:
            return await self._stream(request)
        finally:
            self.now -= 1

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await self._send(response, {"choices": [{"delta": {"role": "assistant"}}], "prompt_token_ids": [1, 2, 9]})
        for number, size in enumerate(self.chunks):
            await asyncio.sleep(0.002)
            self.drafts += number > 0
            self.accepted += size - 1 if number else 0
            last = number == len(self.chunks) - 1
            choice = {"delta": {}, "token_ids": [7] * size, "finish_reason": "stop" if last else None}
            await self._send(response, {"choices": [choice]})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _send(self, response: web.StreamResponse, event: dict) -> None:
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    async def metrics(self, _request: web.Request) -> web.Response:
        positions = "".join(
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{p}"}} 0.0\n' for p in range(3)
        )
        return web.Response(
            text=f'vllm:num_requests_running{{e="0"}} {self.now}.0\n'
            f'vllm:spec_decode_num_drafts_total{{e="0"}} {self.drafts}.0\n'
            f'vllm:spec_decode_num_accepted_tokens_total{{e="0"}} {self.accepted}.0\n' + positions
        )

    @contextlib.asynccontextmanager
    async def serving(self):
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_get("/metrics", self.metrics)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        yield config.Server(kind="external", url=f"http://127.0.0.1:{port}")
        await runner.cleanup()


def decode(engine: Engine, texts: list[str], concurrency: int = 4, seconds: float = 30, think_end=None) -> Decoded:
    bodies = {text: {"messages": [{"role": "user", "content": text}], "max_tokens": 50} for text in texts}

    async def main() -> Decoded:
        async with engine.serving() as server:
            return await decoding.decode(server, bodies, concurrency, time.monotonic() + seconds, think_end)

    return asyncio.run(main())


def test_every_prompt_is_decoded_once_in_order_at_the_asked_concurrency():
    engine = Engine([1, 3, 2])
    decoded = decode(engine, [f"p{i}" for i in range(20)], concurrency=4)
    assert [r.conv_id for r in decoded.replies] == [f"p{i}" for i in range(20)]
    assert engine.peak == 4
    assert decoded.output_tokens == 20 * 6
    assert (decoded.counters.drafts, decoded.counters.accepted) == (40, 60)
    assert decoded.streams_agree
    assert decoded.skipped == 0


def test_the_warm_up_round_is_short_and_not_counted():
    engine = Engine([1, 2])
    decoded = decode(engine, ["a", "b", "c"], concurrency=2)
    assert [body["max_tokens"] for body in engine.requests] == [decoding.WARM_TOKENS] * 2 + [50] * 3
    assert decoded.counters.drafts == 3


def test_a_refused_prompt_is_counted_and_the_others_go_on():
    decoded = decode(Engine([1, 2], fail={"b": 400}), ["a", "b", "c"])
    assert [r.conv_id for r in decoded.replies] == ["a", "c"]
    assert list(decoded.refused) == ["b"]
    assert "400" in decoded.refused["b"]


def test_a_sick_server_ends_the_unit_resumably():
    """Nothing is retried: a prompt decoded twice would be counted twice."""
    engine = Engine([1, 2], fail={"b": 500})
    with pytest.raises(ResumableError, match="500"):
        decode(engine, ["a", "b", "c"])


def test_a_server_that_is_gone_ends_the_unit_resumably():
    server = config.Server(kind="external", url="http://127.0.0.1:9")
    with pytest.raises(ResumableError, match="run the same command again"):
        asyncio.run(decoding.decode(server, {"a": {"messages": []}}, 1, time.monotonic() + 5))


def test_when_time_is_up_no_prompt_is_begun_and_those_begun_are_finished():
    engine = Engine([1] * 50)
    decoded = decode(engine, [f"p{i}" for i in range(200)], concurrency=2, seconds=3)
    assert 2 <= len(decoded.replies) < 200
    assert decoded.skipped == 200 - len(decoded.replies)
    assert all(len(r.chunks) == 50 for r in decoded.replies)


def test_whether_a_reply_begins_inside_reasoning_is_read_from_the_prompts_last_token():
    assert decode(Engine([1, 2]), ["a"], think_end=5).replies[0].thinks is True
    assert decode(Engine([1, 2]), ["a"], think_end=9).replies[0].thinks is False
    assert decode(Engine([1, 2]), ["a"], think_end=None).replies[0].thinks is False


def test_no_proxy_of_the_environment_is_used_for_the_engine(hostile):  # noqa: F811
    """Seam B01"""
    assert decode(Engine([1, 2]), ["a"]).replies[0].chunks == [1, 2]


BROKEN_LINES = {
    "cut": b'data: {"choices": [{"token_',
    "too long": b"data: {" + b"x" * (3 << 20),
    "deep": b'data: {"choices": ' + b"[" * 100_000,
    "no choices": b'data: {"id": 1}',
    "a text": b'data: {"choices": "x"}',
    "null": b'data: {"choices": [null]}',
    "ids as text": b'data: {"choices": [{"token_ids": "abc"}]}',
    "fractions": b'data: {"choices": [{"token_ids": [1.5]}]}',
    "a number": b'data: {"choices": [{"token_ids": 5}]}',
    "prompt of null": b'data: {"choices": [], "prompt_token_ids": [null]}',
    "an error": b'data: {"error": {"message": "EngineDeadError"}}',
}


@pytest.mark.parametrize("kind", BROKEN_LINES)
def test_a_broken_line_of_a_stream_ends_the_unit_resumably(kind):
    """Seam L6"""

    class Broken(Engine):
        async def _send(self, response, event):
            await response.write(BROKEN_LINES[kind] + b"\n\n")

    with pytest.raises(ResumableError, match="run the same command again"):
        decode(Broken([1, 2]), ["a"])


@pytest.mark.parametrize("value", ["NaN", "+Inf", "many"])
def test_counters_that_are_no_numbers_end_the_unit_resumably(value):
    """Seam L6"""

    class Broken(Engine):
        async def metrics(self, _request):
            return web.Response(text=f'vllm:spec_decode_num_drafts_total{{e="0"}} {value}\n')

    with pytest.raises(ResumableError, match="/metrics cannot be read"):
        decode(Broken([1, 2]), ["a"])


def test_counters_of_another_engine_are_not_subtracted():
    """Seam L6: the server was replaced between two looks."""
    with pytest.raises(ResumableError, match="its server was replaced"):
        Counters(1, 1, 1, [1]).since(Counters(1, 1, 1, [1, 2]))


@pytest.mark.parametrize(
    "later",
    [
        Counters(3, 9, 2, [2, 0, 0]),  # started again: it has counted less
        Counters(12, 36, 4, [4, 0, 0]),  # one of them fell
        Counters(11, 33, 9, [7, 1, 1]),  # more accepted than one draft can hold
    ],
)
def test_counters_that_fell_or_contradict_each_other_end_the_unit_resumably(later):
    """An engine that was started again between two looks gave negative drafts, and a length from them."""
    with pytest.raises(ResumableError, match="started again"):
        later.since(Counters(10, 30, 5, [5, 0, 0]))


@pytest.mark.parametrize("last", [None, "abort", "error"])
def test_a_stream_without_the_end_of_its_completion_is_never_a_reply(last):
    """A proxy that closed the stream in order in the middle made a short reply, which was measured."""

    class Ending(Engine):
        async def _send(self, response, event):
            choice = event["choices"][0]
            await super()._send(response, event | {"choices": [choice | {"finish_reason": last}]})

    with pytest.raises(ResumableError, match="run the same command again"):
        decode(Ending([1, 2, 3]), ["a"])


def test_a_reply_of_200_that_is_no_stream_ends_the_unit_resumably():
    """An error in the body of a 200 was counted as a prompt that the server refuses."""

    class Failing(Engine):
        async def chat(self, request):
            return web.json_response({"error": {"message": "no healthy upstream"}})

    with pytest.raises(ResumableError, match="ended before its completion"):
        decode(Failing([1, 2]), ["a"])
