"""The async client of one vLLM server: raw JSON over aiohttp, with our own limits, retries and patience.

Not the OpenAI SDK: it spends 0.8 ms of CPU on preparing a request, three times what aiohttp needs for sending it, and
reads proxies and certificates from the environment.
"""

import asyncio
import contextlib
import email.utils
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
from typing import Any, NoReturn, TypeVar, cast

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError

from drafter import signals as interrupts
from drafter.config import Server
from drafter.errors import ConfigError, Interrupted, ResumableError, RowError
from drafter.text import duration

log = logging.getLogger("drafter")

ATTEMPTS = 5  # of one request, not counting those that met no server or a busy one
TIMEOUT_COST = 3  # attempts: a request that timed out will probably time out again, and each wait is long
BACKOFF_SECONDS = (0.5, 30.0)  # first and longest pause between attempts
DOWN_REQUESTS = 3  # distinct requests failing with no success between: the server is down
PROBE_SECONDS = (1.0, 15.0)  # first and longest pause between probes of a server that is down
PROBE_TIMEOUT = 60.0  # of the completion in a probe
CONNECT_SECONDS = 10.0
KEEPALIVE_SECONDS = 4.0  # vLLM's own server closes idle connections after 5, and a race would cost an attempt
SPARE_FILES = 64  # descriptors for everything that is not a connection

WAIT_STATUSES = frozenset({429, 503})  # a busy server; costs the request no attempt
RETRY_STATUSES = frozenset({408, 409, 425})  # and every other 5xx
CONFIG_STATUSES = frozenset({401, 403, 404})
LONGEST_MESSAGE = 10_000  # characters of an error reply that are read

T = TypeVar("T")


class AttemptError(Exception):
    """One attempt failed. `reason` is its name in the counts; it uses up `cost` of the request's ATTEMPTS."""

    def __init__(self, reason: str, cost: int, message: str = "", pause: float | None = None):
        super().__init__(f"{reason}: {message}" if message else reason)
        self.reason, self.cost = reason, cost
        self.pause = pause  # seconds that the server asked for


class StatusError(Exception):
    """A reply with an error status that is not retried."""

    def __init__(self, status: int, message: str):
        super().__init__(f"{status}: {message}")
        self.status, self.message = status, message


def request_headers(server: Server) -> dict[str, str]:
    """Headers of every request to a server. Raises ConfigError when the variable of its API key is not set.

    They ask for uncompressed replies: a proxy that compresses its error pages would only add a way to fail.
    """
    headers = {"content-type": "application/json", "accept-encoding": "identity"}
    if server.api_key_env:
        key = os.environ.get(server.api_key_env)
        if not key:
            raise ConfigError(
                f"the environment variable {server.api_key_env} is empty; set it to the server's API key"
            )
        headers["authorization"] = f"Bearer {key}"
    return headers


def open_session(headers: dict[str, str], **settings: Any) -> aiohttp.ClientSession:
    """A session for a server that ignores the environment: no proxy, no netrc."""
    return aiohttp.ClientSession(headers=headers, trust_env=False, cookie_jar=aiohttp.DummyCookieJar(), **settings)


class Client:
    """One client for a whole stage; at most `concurrency` requests are in flight.

    A request that fails because of its content raises RowError (`request_refused`, `prompt_too_long`, `failed`,
    `bad_reply`). While the server is down every caller waits, and the server is probed with a real completion; after
    `outage_minutes` every caller gets ResumableError. ConfigError: wrong key, wrong served name, too few file
    descriptors.
    """

    def __init__(self, server: Server, *, concurrency: int, outage_minutes: float):
        self.url = server.url.rstrip("/")
        self.outage_seconds = outage_minutes * 60
        self.retries: Counter[str] = Counter()  # repeated attempts by reason
        self.abandoned = 0  # requests dropped while the server worked on them; closing the connection ends that work
        self.in_flight = 0
        self.peak_in_flight = 0
        self.outages = 0
        self._headers = request_headers(server)
        self._concurrency = concurrency
        self._slots = asyncio.Semaphore(concurrency)
        self._up = asyncio.Event()
        self._up.set()
        self._failing: set[object] = set()  # requests that failed since the last success
        self._probe: asyncio.Task | None = None
        self._gone: BaseException | None = None  # why waiting for the server ended without it

    async def __aenter__(self) -> "Client":
        _need_files(self._concurrency + SPARE_FILES)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS, ttl_dns_cache=600)
        self._session = open_session(self._headers, connector=connector)
        return self

    async def __aexit__(self, *_exc) -> None:
        if self._probe is not None:
            self._probe.cancel()
            await asyncio.gather(self._probe, return_exceptions=True)
        await self._session.close()

    async def post(self, path: str, body: dict, timeout: float) -> dict:
        """The reply to one request, which is retried up to ATTEMPTS times; `timeout` seconds bound each attempt."""
        async with self._slots:
            return await self._persist("post", path, body, timeout)

    async def get(self, path: str, timeout: float = 30.0) -> dict:
        """As `post`; an empty reply is `{}`."""
        return await self._persist("get", path, None, timeout)

    async def metrics(self) -> str:
        """The server's /metrics, asked for once; empty where it gives none."""
        with contextlib.suppress(AttemptError, StatusError):
            return (await self._send("get", "/metrics", None, PROBE_TIMEOUT)).decode(errors="replace")
        return ""

    async def _persist(self, method: str, path: str, body: dict | None, timeout: float) -> dict:
        me = object()  # unlike id(...), unique while it is in the set
        spent, busy_since = 0, None
        while True:
            await self._up.wait()
            if self._gone is not None:
                raise self._gone
            try:
                reply = await self._once(method, path, body, timeout)
                self._failing.clear()
                return reply
            except StatusError as error:
                _raise_permanent(error, path)
            except AttemptError as error:
                reason, cost, pause = error.reason, error.cost, error.pause
            if reason == "timeout":
                self.abandoned += 1
            self.retries[reason] += 1
            self._failing.add(me)
            if reason == "no_connection" or len(self._failing) >= DOWN_REQUESTS:
                self._wait_for_server(reason)
            if cost:
                spent += cost
                if spent >= ATTEMPTS:
                    raise RowError("failed", f"retries used up, the last failure was {reason}")
            else:
                busy_since = busy_since or time.monotonic()
                if time.monotonic() - busy_since > self.outage_seconds and self._up.is_set():
                    raise RowError("failed", f"{reason} for {duration(self.outage_seconds)}")
            if self._up.is_set():
                await asyncio.sleep(pause if pause is not None else _backoff(spent or 1, *BACKOFF_SECONDS))

    async def _once(self, method: str, path: str, body: dict | None, timeout: float) -> dict:
        self.in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        try:
            data = await self._send(method, path, body, timeout)
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
            raise RowError("bad_reply", f"a JSON {type(parsed).__name__} instead of an object")
        return parsed

    def _wait_for_server(self, reason: str) -> None:
        if not self._up.is_set():
            return
        self._up.clear()
        self.outages += 1
        log.warning("server %s is down (%s); waiting up to %s", self.url, reason, duration(self.outage_seconds))
        self._probe = asyncio.create_task(self._outage(reason))
        self._probe.add_done_callback(self._wake)

    def _wake(self, probe: "asyncio.Task[ResumableError | None]") -> None:
        """Release every waiting call, however the wait for the server ended; its error is every call's error."""
        if probe.cancelled():
            self._gone = ResumableError(f"waiting for {self.url} was interrupted; run the same command again")
        else:
            self._gone = probe.exception() or probe.result()
        self._failing.clear()
        self._up.set()

    async def _outage(self, reason: str) -> ResumableError | None:
        """Probe with a real completion until one succeeds: `/health` can be 200 while the engine is dead."""
        since = time.monotonic()
        tries = 0
        while (left := since + self.outage_seconds - time.monotonic()) > 0:
            tries += 1
            if await self._answers(min(PROBE_TIMEOUT, max(left, 1.0))):
                log.warning("server %s is back after %.0f s", self.url, time.monotonic() - since)
                return None
            await asyncio.sleep(min(left, _backoff(tries, *PROBE_SECONDS)))
        return ResumableError(
            f"no answer from {self.url} for {duration(self.outage_seconds)} ({reason}); "
            "bring the server up and run the same command again"
        )

    async def _answers(self, timeout: float) -> bool:
        with contextlib.suppress(AttemptError, StatusError, RowError, LookupError, TypeError):
            await self._once("get", "/health", None, timeout)
            model = (await self._once("get", "/v1/models", None, timeout))["data"][0]["id"]
            await self._once("post", "/v1/completions", {"model": model, "prompt": "a", "max_tokens": 1}, timeout)
            return True
        return False

    async def _send(self, method: str, path: str, body: dict | None, timeout: float) -> bytes:
        """The bytes of one reply. Raises AttemptError for what may be retried, else StatusError."""
        limits = aiohttp.ClientTimeout(total=timeout, sock_connect=min(CONNECT_SECONDS, timeout))
        content = None if body is None else _encode(body)
        try:
            async with self._session.request(method, self.url + path, data=content, timeout=limits) as reply:
                data = await reply.read()
        except (aiohttp.ConnectionTimeoutError, aiohttp.ClientConnectorError) as error:
            raise AttemptError("no_connection", 0, repr(error)) from None
        except TimeoutError:
            raise AttemptError("timeout", TIMEOUT_COST) from None
        except (aiohttp.ClientError, HttpProcessingError, OSError, ValueError) as error:  # a reply that is no HTTP
            raise AttemptError("disconnected", 1, repr(error)) from None
        status = reply.status
        if status < 400:
            return data
        message = _message(data)
        if status in WAIT_STATUSES or status in RETRY_STATUSES or status >= 500:
            pause = _retry_after(reply.headers.get("retry-after"), self.outage_seconds)
            raise AttemptError(f"http_{status}", 0 if status in WAIT_STATUSES else 1, message, pause)
        raise StatusError(status, message)


def run_interruptible(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` for stages: a signal cancels `main`, which saves; then Interrupted is raised."""
    signals = interrupts.wanted()

    async def guarded() -> T:
        loop, caught = asyncio.get_running_loop(), list[int]()
        task = cast(asyncio.Task, asyncio.current_task())

        def stop(signum: int) -> None:
            if not caught:  # a second signal must not interrupt saving
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
    with contextlib.suppress(ImportError):  # a tenth faster; installed together with vLLM
        import uvloop

        factory = uvloop.new_event_loop
    before = {signum: signal.getsignal(signum) for signum in signals}
    try:
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(guarded())
    finally:  # closing the loop leaves the default handlers in place, and with those a signal saves nothing
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _encode(body: Any) -> bytes:
    # ASCII escapes: a lone surrogate in a prompt cannot be written as UTF-8.
    return json.dumps(body, separators=(",", ":")).encode("ascii")


def _message(data: bytes) -> str:
    """The message of an error reply on one line; works for any content."""
    text = data.decode("utf-8", errors="replace")
    with contextlib.suppress(ValueError, LookupError, TypeError, RecursionError):
        text = str(json.loads(text)["error"]["message"])
    return " ".join(text[:LONGEST_MESSAGE].split())[:300]


def _raise_permanent(error: StatusError, path: str) -> NoReturn:
    """Raise what an error status without retries means: ConfigError for the user, RowError for this request."""
    status, message = error.status, error.message
    if status in CONFIG_STATUSES:
        raise ConfigError(f"the server answered {status} to {path}: {message}") from None
    too_long = status == 413 or "maximum context length" in message or "max_model_len" in message
    raise RowError("prompt_too_long" if too_long else "request_refused", f"{status}: {message}") from None


def _retry_after(value: str | None, longest: float) -> float | None:
    """Seconds from a Retry-After header, a number or an HTTP date; None without a valid one."""
    if value is None:
        return None
    seconds = None
    with contextlib.suppress(ValueError, TypeError, OverflowError, OSError):
        seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
    with contextlib.suppress(ValueError):
        seconds = float(value)
    return None if seconds is None or math.isnan(seconds) else min(max(seconds, 0.0), longest)


def _backoff(attempt: int, first: float, longest: float) -> float:
    """A pause that doubles each time, with jitter so that 200 callers do not return at once."""
    return random.uniform(0.5, 1.0) * min(longest, first * 2 ** (attempt - 1))


def _need_files(count: int) -> None:
    """Raise the soft limit on open files to `count`. Raises ConfigError when the hard limit is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        if hard != resource.RLIM_INFINITY and hard < count:
            raise ConfigError(
                f"{count} open files are needed and the hard limit is {hard}: lower the concurrency or raise it"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
