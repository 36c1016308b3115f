"""The async client of one vLLM server: the OpenAI SDK with our own limits, retries and patience.

The SDK gives the address, the headers and the errors; its `request` is replaced by one that sends the body over
aiohttp and returns raw JSON. The SDK's own spends 0.8 ms of CPU a request on preparing it anew, three times what
aiohttp needs for sending it. Retries are ours alone.
"""

import asyncio
import contextlib
import email.utils
import importlib
import json
import logging
import math
import os
import random
import resource
import signal
import time
from collections import Counter
from collections.abc import Coroutine
from typing import Any, TypeVar

import aiohttp
import openai

from drafter import interrupts
from drafter.artifacts import span
from drafter.config import Server
from drafter.errors import ConfigError, Interrupted, ResumableError, RowError

# openai 2 is built on httpx, openai 3 on httpx2; its errors carry that one's requests and responses
httpx = importlib.import_module(openai.DefaultAsyncHttpxClient.__base__.__module__.partition(".")[0])

log = logging.getLogger("drafter")

ATTEMPTS = 5  # of one request, not counting those that met no server or a busy one
TIMEOUT_COST = 3  # attempts; what was too slow once will hardly be faster, and waiting for it holds up the night
BACKOFF_SECONDS = (0.5, 30.0)  # first and longest pause between attempts
SICK_REQUESTS = 3  # distinct requests failing in a row, nothing succeeding between: the server is down
PROBE_SECONDS = (1.0, 15.0)  # first and longest pause between looks at a server that is down
PROBE_TIMEOUT = 60.0  # of one trial completion
CONNECT_SECONDS = 10.0
KEEPALIVE_SECONDS = 4.0  # vLLM's own server closes idle connections after 5, and a race would cost an attempt
SPARE_FILES = 64  # descriptors for everything that is not a connection

WAIT_STATUSES = frozenset({429, 503})  # a busy server: no fault of the request's
RETRY_STATUSES = frozenset({408, 409, 425})  # beside every other 5xx
CONFIG_STATUSES = frozenset({401, 403, 404})


T = TypeVar("T")


class Client:
    """One client for a whole stage; at most `concurrency` requests are in flight.

    A request that fails for its own reasons raises RowError (`request_refused`, `prompt_too_long`, `failed`,
    `bad_reply`). A server that is gone makes every caller wait; it is asked for a real completion until it
    gives one, and after `outage_minutes` every caller gets ResumableError. ConfigError: wrong key, wrong
    served name, too few file descriptors.
    """

    def __init__(self, server: Server, *, concurrency: int, outage_minutes: float):
        self.url = server.url.rstrip("/")
        self.outage_seconds = outage_minutes * 60
        self.retries: Counter[str] = Counter()  # attempts that had to be repeated, by what went wrong
        self.abandoned = 0  # requests dropped while the server worked on them; it stops when we hang up
        self.in_flight = 0
        self.peak_in_flight = 0
        self.outages = 0
        self._key = os.environ.get(server.api_key_env, "") if server.api_key_env else "none"
        if not self._key:
            raise ConfigError(
                f"the environment variable {server.api_key_env} is empty; it must hold the server's key"
            )
        self._concurrency = concurrency
        self._slots = asyncio.Semaphore(concurrency)
        self._up = asyncio.Event()
        self._up.set()
        self._sick: set[object] = set()  # requests that failed since the last success
        self._probe: asyncio.Task | None = None
        self._gone: ResumableError | None = None

    async def __aenter__(self) -> "Client":
        _need_files(self._concurrency + SPARE_FILES)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS, ttl_dns_cache=600),
            auto_decompress=True,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self._sdk = _AioOpenAI(self._session, base_url=self.url, api_key=self._key, max_retries=0)
        return self

    async def __aexit__(self, *_exc) -> None:
        if self._probe is not None:
            self._probe.cancel()
            await asyncio.gather(self._probe, return_exceptions=True)
        await self._sdk.close()
        await self._session.close()

    async def post(self, path: str, body: dict, timeout: float) -> dict:
        """The reply to one request, retried as often as it makes sense; `timeout` seconds bound one attempt."""
        async with self._slots:
            return await self._persist("post", path, body, timeout)

    async def get(self, path: str, timeout: float = 30.0) -> dict:
        """As `post`; an empty reply is `{}`."""
        return await self._persist("get", path, None, timeout)

    async def _persist(self, method: str, path: str, body: dict | None, timeout: float) -> dict:
        me = object()  # unlike an id, it cannot come again while it is in the set
        spent, busy_since = 0, None
        while True:
            await self._up.wait()
            if self._gone is not None:
                raise self._gone
            pause = None
            try:
                reply = await self._once(method, path, body, timeout)
                self._sick.clear()
                return reply
            except openai.APIStatusError as error:
                status = error.status_code
                _raise_permanent(error, path)
                reason = f"http_{status}"
                pause = _retry_after(error.response.headers.get("retry-after"), self.outage_seconds)
                cost = 0 if status in WAIT_STATUSES else 1
            except openai.APITimeoutError:
                reason, cost = "timeout", TIMEOUT_COST
                self.abandoned += 1
            except openai.APIConnectionError as error:
                reason, cost = ("disconnected", 1) if error.sent else ("no_connection", 0)
            self.retries[reason] += 1
            self._sick.add(me)
            if reason == "no_connection" or len(self._sick) >= SICK_REQUESTS:
                self._wait_for_server(reason)
            if cost:
                spent += cost
                if spent >= ATTEMPTS:
                    raise RowError("failed", f"retries used up, at last by {reason}")
            else:
                busy_since = busy_since or time.monotonic()
                if time.monotonic() - busy_since > self.outage_seconds and self._up.is_set():
                    raise RowError("failed", f"{reason} for {span(self.outage_seconds)}")
            if self._up.is_set():
                await asyncio.sleep(pause if pause is not None else _backoff(spent or 1, *BACKOFF_SECONDS))

    async def _once(self, method: str, path: str, body: dict | None, timeout: float) -> dict:
        self.in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        try:
            send = self._sdk.get if method == "get" else self._sdk.post
            content = {} if body is None else {"body": body}
            data = await send(path, cast_to=bytes, options={"timeout": timeout}, **content)
        except asyncio.CancelledError:
            self.abandoned += 1
            raise
        finally:
            self.in_flight -= 1
        try:
            parsed = json.loads(data) if data else {}
        except (ValueError, RecursionError) as error:
            raise RowError("bad_reply", f"not JSON: {error}") from None
        if not isinstance(parsed, dict):
            raise RowError("bad_reply", f"a JSON {type(parsed).__name__} where an object was due")
        return parsed

    def _wait_for_server(self, reason: str) -> None:
        if not self._up.is_set():
            return
        self._up.clear()
        self.outages += 1
        log.warning("server %s is down (%s); waiting up to %s", self.url, reason, span(self.outage_seconds))
        self._probe = asyncio.create_task(self._watch(reason))

    async def _watch(self, reason: str) -> None:
        """Ask for a real completion until one comes: `/health` says 200 while an engine is dead."""
        since = time.monotonic()
        tries = 0
        while (left := since + self.outage_seconds - time.monotonic()) > 0:
            tries += 1
            if await self._answers(min(PROBE_TIMEOUT, max(left, 1.0))):
                log.warning("server %s is back after %.0f s", self.url, time.monotonic() - since)
                break
            await asyncio.sleep(min(left, _backoff(tries, *PROBE_SECONDS)))
        else:
            self._gone = ResumableError(
                f"no answer from {self.url} for {span(self.outage_seconds)} ({reason}); "
                "bring the server up and run the same command again"
            )
        self._sick.clear()
        self._up.set()

    async def _answers(self, timeout: float) -> bool:
        with contextlib.suppress(openai.APIError, RowError, LookupError, TypeError):
            await self._once("get", "/health", None, timeout)
            model = (await self._once("get", "/v1/models", None, timeout))["data"][0]["id"]
            await self._once("post", "/v1/completions", {"model": model, "prompt": "a", "max_tokens": 1}, timeout)
            return True
        return False


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` for stages: a signal cancels `main`, which saves; then Interrupted is raised."""
    signals = interrupts.wanted()

    async def guarded() -> T:
        loop, task, caught = asyncio.get_running_loop(), asyncio.current_task(), []

        def stop(signum: int) -> None:
            if not caught:  # a second signal must not cut the saving short
                task.cancel()
                interrupts.taken(signum)
            caught.append(signum)

        for signum in signals:
            loop.add_signal_handler(signum, stop, signum)
        try:
            return await main
        except asyncio.CancelledError:
            if caught:
                raise Interrupted(caught[0]) from None
            raise

    factory = None
    with contextlib.suppress(ImportError):  # a tenth faster where it is installed; vLLM brings it
        import uvloop

        factory = uvloop.new_event_loop
    before = {signum: signal.getsignal(signum) for signum in signals}
    try:
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(guarded())
    finally:  # a closing loop leaves the default handlers behind, under which a signal would save nothing
        for signum, handler in before.items():
            signal.signal(signum, handler)


class _AioOpenAI(openai.AsyncOpenAI):
    """The SDK's client with a `request` that returns the reply's bytes, sent over `session`.

    Raises the SDK's errors: APIConnectionError (`sent` tells whether a server was reached), APITimeoutError,
    APIStatusError.
    """

    def __init__(self, session: aiohttp.ClientSession, **settings):
        super().__init__(**settings)
        self._session = session
        self._root = str(self.base_url).rstrip("/")
        headers = {**self.default_headers, **self.auth_headers}
        self._headers = {key: value for key, value in headers.items() if isinstance(value, str)}

    async def request(self, cast_to, options, **_unused) -> bytes:
        url = self._root + options.url
        body = None if options.json_data is None else _encode(options.json_data)
        limits = aiohttp.ClientTimeout(total=options.timeout, sock_connect=min(CONNECT_SECONDS, options.timeout))
        try:
            async with self._session.request(
                options.method, url, data=body, headers=self._headers, timeout=limits
            ) as reply:
                data = await reply.read()
        except (aiohttp.ConnectionTimeoutError, aiohttp.ClientConnectorError) as error:
            raise _connection_error(url, error, sent=False) from error
        except TimeoutError as error:
            raise openai.APITimeoutError(httpx.Request(options.method, url)) from error
        except (aiohttp.ClientError, OSError) as error:
            raise _connection_error(url, error, sent=True) from error
        if reply.status >= 400:
            raise _status_error(httpx.Request(options.method, url), reply, data)
        return data


def _encode(body: Any) -> bytes:
    # ASCII escapes: a lone surrogate in a prompt cannot be written as UTF-8.
    return json.dumps(body, separators=(",", ":")).encode("ascii")


def _connection_error(url: str, cause: Exception, sent: bool) -> openai.APIConnectionError:
    error = openai.APIConnectionError(message=f"{url}: {cause!r}", request=httpx.Request("POST", url))
    error.sent = sent
    return error


def _status_error(request, reply: aiohttp.ClientResponse, data: bytes) -> openai.APIStatusError:
    response = httpx.Response(reply.status, headers=reply.raw_headers, content=data, request=request)
    text = data.decode("utf-8", errors="replace")
    with contextlib.suppress(ValueError, KeyError, TypeError):
        text = str(json.loads(text)["error"]["message"])
    return openai.APIStatusError(text, response=response, body=None)


def _raise_permanent(error: openai.APIStatusError, path: str) -> None:
    """Raise what no retry can change; return for what one may."""
    status = error.status_code
    if status in WAIT_STATUSES or status in RETRY_STATUSES or status >= 500:
        return
    message = " ".join(error.message.split())[:300]
    if status in CONFIG_STATUSES:
        raise ConfigError(f"the server answered {status} to {path}: {message}") from None
    too_long = status == 413 or "maximum context length" in message or "max_model_len" in message
    raise RowError("prompt_too_long" if too_long else "request_refused", f"{status}: {message}") from None


def _retry_after(value: str | None, longest: float) -> float | None:
    """Seconds from a Retry-After header, a number or an HTTP date; None when there is none to read."""
    seconds = None
    with contextlib.suppress(ValueError, TypeError):
        seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
    with contextlib.suppress(ValueError, TypeError):
        seconds = float(value)
    return None if seconds is None or math.isnan(seconds) else min(max(seconds, 0.0), longest)


def _backoff(attempt: int, first: float, longest: float) -> float:
    """A doubling pause with jitter, so that 200 callers do not come back at once."""
    return random.uniform(0.5, 1.0) * min(longest, first * 2 ** (attempt - 1))


def _need_files(count: int) -> None:
    """Raise the soft limit on open files to `count`; ConfigError when the hard limit forbids it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        if hard != resource.RLIM_INFINITY and hard < count:
            raise ConfigError(
                f"{count} open files are needed and the limit is {hard}: lower the concurrency or raise it"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
