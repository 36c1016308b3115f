"""A scripted vLLM on real sockets: a toy model that answers like a server, faults on demand, a log of arrivals."""

import asyncio
import hashlib
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

# The toy tokenizer: a token is a byte; the ids of turns and thinking come above.
END, USER, ASSISTANT, SYSTEM, THINK, THINK_END, TOOL_MARK = range(256, 263)
VOCAB = 300
SPECIAL_TOKENS = {"<think>": THINK, "</think>": THINK_END, "<|tool_mark|>": TOOL_MARK}
ROLE_IDS = {"user": USER, "assistant": ASSISTANT, "system": SYSTEM, "tool": SYSTEM}
CONTEXT = 2000
MODEL = "toy"


@dataclass
class Call:
    """One request as it arrived."""

    path: str
    body: dict
    at: float
    number: int  # of its path, from 0
    headers: dict[str, str] = field(default_factory=dict)  # by lower-case name

    @property
    def question(self) -> str:
        """The last user turn's text."""
        return next(m["content"] for m in reversed(self.body["messages"]) if m["role"] == "user")


@dataclass
class Reply:
    """What to do with a call. `then`: answer, reset (close without an answer), short (half an answer), hang."""

    body: dict | bytes = field(default_factory=dict)
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    delay: float = 0.0
    then: str = "answer"


Script = Callable[[Call], "Reply | None"]


def encode(text: str) -> list[int]:
    return list(text.encode("utf-8", errors="surrogatepass"))


def render(messages: list[dict], generation_prompt: bool = True, thinking: bool = True) -> list[int]:
    """The toy chat template: in the history an empty pair of thinking tokens precedes each answer."""
    ids: list[int] = []
    for number, message in enumerate(messages):
        ids.append(ROLE_IDS[message["role"]])
        if message["role"] == "assistant":
            own = (message.get("reasoning") or "") if number == len(messages) - 1 else ""
            ids += [THINK, *encode(own), THINK_END]
        ids += [*encode(message["content"] or ""), END]
    if generation_prompt:
        ids += [ASSISTANT, THINK] + ([] if thinking else [THINK_END])
    return ids


def chat_reply(body: dict, **changes) -> dict:
    """The toy model's answer: a function of the messages and the seed; cut at `max_tokens`."""
    kwargs = body.get("chat_template_kwargs", {})
    thinking = kwargs.get("thinking", True) is not False
    prompt = render(body["messages"], thinking=thinking)
    digest = hashlib.sha256(json.dumps([body["messages"], body.get("seed")]).encode()).hexdigest()
    reasoning = f"hm {digest[: int(digest[0], 16) + 4]}" if thinking else None
    content = f"so {digest[8 : int(digest[1], 16) + 12]}"
    ids = [*(encode(reasoning) + [THINK_END] if thinking else []), *encode(content), END]
    finish = "stop"
    if len(ids) > body["max_tokens"]:
        ids, finish = ids[: body["max_tokens"]], "length"
        if thinking and THINK_END not in ids:
            reasoning, content = bytes(ids).decode(), None
        else:
            content = bytes(ids[ids.index(THINK_END) + 1 if thinking else 0 :]).decode()
    return reply_of(prompt, ids, reasoning, content, finish) | changes


def reply_of(
    prompt: list[int], ids: list[int] | None, reasoning: str | None, content: str | None, finish: str
) -> dict:
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": MODEL,
        "prompt_token_ids": prompt,
        "choices": [
            {
                "index": 0,
                "finish_reason": finish,
                "token_ids": ids,
                "message": {"role": "assistant", "content": content, "reasoning": reasoning, "tool_calls": []},
            }
        ],
        "usage": {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(ids or []),
            "total_tokens": len(prompt) + len(ids or []),
        },
    }


def error_body(message: str, status: int) -> dict:
    return {"error": {"message": message, "type": "BadRequestError", "param": None, "code": status}}


def make_model_folder(folder: Path) -> Path:
    """A target's `config.json` and no weights: all that stage 01b reads of it."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = {"num_hidden_layers": 8, "hidden_size": 16, "vocab_size": VOCAB, "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps({"architectures": ["Toy"], "eos_token_id": END, **shape}))
    return folder


class FakeServer:
    """`with FakeServer() as server:` serves on `server.url` from a separate thread until the block ends.

    `script` is asked for every chat completion first; None lets the toy model answer. `alive = False` makes the
    health checks and the trial completion fail as well.
    """

    def __init__(self, script: Script | None = None, port: int = 0):
        self.script = script or (lambda call: None)
        self.calls: list[Call] = []
        self.alive = True
        self.metrics: Callable[[], str] | None = None  # the text of /metrics; None: it has none
        self.in_flight = self.peak_in_flight = self.hung_up = 0
        self._port = port
        self._numbers: Counter[str] = Counter()
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> "FakeServer":
        sys.setswitchinterval(1e-4)  # two event loops on one interpreter lock would wait 5 ms for each other
        self._thread.start()
        self._started.wait(10)
        return self

    def __exit__(self, *_exc) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def chats(self) -> list[Call]:
        """Chat completions without the preflight's."""
        return [c for c in self.calls if c.path == "/v1/chat/completions" and c.question != "Say hello."]

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._main())

    async def _main(self) -> None:
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._connection, "127.0.0.1", self._port, backlog=2048)
        self._port = server.sockets[0].getsockname()[1]
        self._started.set()
        await self._stop.wait()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                method, path, _ = line.decode().split()
                headers = {}
                while (header := await reader.readline()) not in (b"\r\n", b""):
                    name, _, value = header.decode().partition(":")
                    headers[name.lower()] = value.strip()
                length = int(headers.get("content-length", 0))
                body = json.loads(await reader.readexactly(length)) if length else {}
                if not await self._answer(Call(path, body, time.monotonic(), 0, headers), reader, writer):
                    break
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _answer(self, call: Call, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection lives on."""
        call.number = self._numbers[call.path]
        self._numbers[call.path] += 1
        self.calls.append(call)
        self.in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        try:
            reply = self._reply(call)
            if reply.delay or reply.then == "hang":
                wait = 3600 if reply.then == "hang" else reply.delay
                gone = asyncio.create_task(reader.read(1))
                done, _ = await asyncio.wait([gone], timeout=wait)
                if done:
                    self.hung_up += 1
                    return False
                gone.cancel()
                await asyncio.gather(gone, return_exceptions=True)
        finally:
            self.in_flight -= 1
        if reply.then == "reset":
            return False
        data = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
        headers = {"content-type": "application/json", "content-length": str(len(data)), **reply.headers}
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        sent = f"HTTP/1.1 {reply.status} X\r\n{head}\r\n".encode() + data
        writer.write(sent[: len(sent) - len(data) // 2] if reply.then == "short" else sent)
        await writer.drain()
        return reply.then == "answer"

    def _reply(self, call: Call) -> Reply:
        if call.path == "/v1/chat/completions":
            return self.script(call) or Reply(chat_reply(call.body))
        if not self.alive:
            return Reply(error_body("dead", 500), 500)
        if call.path == "/health":
            return Reply(b"")
        if call.path == "/v1/models":
            return Reply({"data": [{"id": MODEL, "max_model_len": CONTEXT}]})
        if call.path == "/v1/completions":
            return Reply({"choices": [{"token_ids": [97], "text": "a"}]})
        if call.path == "/metrics" and self.metrics:
            return Reply(self.metrics().encode())
        if call.path == "/tokenize":
            return Reply(_tokenize(call.body))
        return Reply(error_body(f"no {call.path}", 404), 404)


def _tokenize(body: dict) -> dict:
    if "prompt" in body:
        text = body["prompt"]
        ids = [SPECIAL_TOKENS[text]] if text in SPECIAL_TOKENS else encode(text)
    else:
        thinking = body.get("chat_template_kwargs", {}).get("thinking", True) is not False
        ids = render(body["messages"], body.get("add_generation_prompt", True), thinking)
    return {"tokens": ids, "count": len(ids), "max_model_len": CONTEXT}
