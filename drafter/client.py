"""The async client of one vLLM server: the OpenAI SDK with our own limits, retries and patience.

The SDK builds requests and reads status codes; a transport on aiohttp carries them (the SDK's default spends
more time in its connection pool at hundreds of connections than the server does on a reply), and replies are
taken as raw JSON. Retries are ours alone: the SDK's are off.
"""

import asyncio
import contextlib
import email.utils
import importlib
import json
import logging
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

from drafter.config import Server
from drafter.errors import ConfigError, Interrupted, ResumableError, RowError

# httpx for openai 2, httpx2 for openai 3: whichever the SDK builds its own client on
httpx = importlib.import_module(openai.DefaultAsyncHttpxClient.__base__.__module__.partition(".")[0])

log = logging.getLogger("drafter")

ATTEMPTS = 5  # of one request, not counting those that met no server or a busy one
BACKOFF_SECONDS = (0.5, 30.0)  # first and longest pause between attempts
SICK_REQUESTS = 3  # distinct requests failing in a row, nothing succeeding between: the server is down
PROBE_SECONDS = (1.0, 15.0)  # first and longest pause between looks at a server that is down
PROBE_TIMEOUT = 60.0  # of one trial completion
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
        self._sick: set[int] = set()
        self._probe: asyncio.Task | None = None
        self._gone: ResumableError | None = None

    async def __aenter__(self) -> "Client":
        _need_files(self._concurrency + SPARE_FILES)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60, ttl_dns_cache=600),
            auto_decompress=True,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self._sdk = openai.AsyncOpenAI(
            base_url=self.url,
            api_key=self._key,
            max_retries=0,
            http_client=_AioClient(self._session),
        )
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
            return await self._persist(path, body, timeout)

    async def get(self, path: str, timeout: float = 30.0) -> dict:
        """One look, not retried. Raises openai.APIError, or RowError for a reply that is not a JSON object."""
        return await self._once("get", path, None, timeout)

    async def _persist(self, path: str, body: dict, timeout: float) -> dict:
        attempts, busy_since = 0, None
        me = id(body)
        while True:
            await self._up.wait()
            if self._gone is not None:
                raise self._gone
            pause = None
            try:
                reply = await self._once("post", path, body, timeout)
                self._sick.clear()
                return reply
            except openai.APIStatusError as error:
                status = error.status_code
                _raise_permanent(error, path)
                reason = f"http_{status}"
                pause = _retry_after(error.response.headers.get("retry-after"))
                counts = status not in WAIT_STATUSES
            except openai.APITimeoutError:
                reason, counts = "timeout", True
                self.abandoned += 1
            except openai.APIConnectionError as error:
                reached = not isinstance(error.__cause__, httpx.ConnectError)
                reason, counts = ("disconnected", True) if reached else ("no_connection", False)
            self.retries[reason] += 1
            self._sick.add(me)
            if reason == "no_connection" or len(self._sick) >= SICK_REQUESTS:
                self._wait_for_server(reason)
            if counts:
                attempts += 1
                if attempts >= ATTEMPTS:
                    self._sick.discard(me)
                    raise RowError("failed", f"{attempts} attempts, the last one: {reason}")
            else:
                busy_since = busy_since or time.monotonic()
                if time.monotonic() - busy_since > self.outage_seconds and self._up.is_set():
                    raise RowError("failed", f"{reason} for {self.outage_seconds / 60:.0f} minutes")
            if self._up.is_set():
                await asyncio.sleep(pause if pause is not None else _backoff(attempts or 1, *BACKOFF_SECONDS))

    async def _once(self, method: str, path: str, body: dict | None, timeout: float) -> dict:
        self.in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        try:
            send = self._sdk.get if method == "get" else self._sdk.post
            content = {} if body is None else {"body": body}
            response = await send(path, cast_to=httpx.Response, options={"timeout": timeout}, **content)
            data = response.content
        except asyncio.CancelledError:
            self.abandoned += 1
            raise
        finally:
            self.in_flight -= 1
        try:
            parsed = json.loads(data) if data else {}
        except ValueError as error:
            raise RowError("bad_reply", f"not JSON: {error}") from None
        if not isinstance(parsed, dict):
            raise RowError("bad_reply", f"a JSON {type(parsed).__name__} where an object was due")
        return parsed

    def _wait_for_server(self, reason: str) -> None:
        if not self._up.is_set():
            return
        self._up.clear()
        self.outages += 1
        log.warning("server %s is down (%s); waiting up to %.0f min", self.url, reason, self.outage_seconds / 60)
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
                f"no answer from {self.url} for {self.outage_seconds / 60:.0f} minutes ({reason}); "
                "bring the server up and run the same command again"
            )
        self._sick.clear()
        self._up.set()

    async def _answers(self, timeout: float) -> bool:
        with contextlib.suppress(openai.APIError, RowError, LookupError):
            await self._once("get", "/health", None, timeout)
            model = (await self._once("get", "/v1/models", None, timeout))["data"][0]["id"]
            await self._once("post", "/v1/completions", {"model": model, "prompt": "a", "max_tokens": 1}, timeout)
            return True
        return False


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` for stages: SIGINT and SIGTERM cancel `main`, which saves; then Interrupted is raised."""

    async def guarded() -> T:
        loop, task, caught = asyncio.get_running_loop(), asyncio.current_task(), []

        def stop(signum: int) -> None:
            if not caught:  # a second signal must not cut the saving short
                task.cancel()
            caught.append(signum)

        for signum in (signal.SIGINT, signal.SIGTERM):
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
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(guarded())


class _AioClient(httpx.AsyncClient):
    """The SDK's HTTP client over aiohttp's connections, replies read whole.

    Building and sending are overridden rather than the transport alone: merging URLs and headers, redirects,
    cookies and auth flows cost httpx more than the whole request costs aiohttp.
    """

    def __init__(self, session: aiohttp.ClientSession, **settings):
        super().__init__(**settings)
        self._session = session

    def build_request(self, method, url, *, headers=None, timeout=None, json=None, content=None, **_unused):
        if json is not None:  # openai 2 leaves the encoding to httpx
            content = dumps(json)
        return httpx.Request(method, url, headers=headers, content=content, extensions={"timeout": timeout})

    async def send(self, request, **_unused):
        timeout = request.extensions["timeout"]
        seconds = timeout.read if isinstance(timeout, httpx.Timeout) else timeout
        try:
            async with self._session.request(
                request.method,
                str(request.url),
                headers=request.headers,
                data=request.content,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=seconds, sock_connect=min(10.0, seconds)),
            ) as reply:
                content = await reply.read()
                return httpx.Response(reply.status, headers=reply.raw_headers, content=content, request=request)
        except (aiohttp.ConnectionTimeoutError, aiohttp.ClientConnectorError) as error:
            raise httpx.ConnectError(str(error), request=request) from error
        except TimeoutError as error:
            raise httpx.ReadTimeout(f"no reply in {seconds} s", request=request) from error
        except (aiohttp.ClientError, OSError) as error:
            raise httpx.ReadError(str(error), request=request) from error


def dumps(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("ascii")


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


def _retry_after(value: str | None) -> float | None:
    """Seconds from a Retry-After header: a number or an HTTP date."""
    if value is None:
        return None
    with contextlib.suppress(ValueError):
        return max(0.0, float(value))
    with contextlib.suppress(ValueError, TypeError):
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    return None


def _backoff(attempt: int, first: float, longest: float) -> float:
    """Full jitter over a doubling pause, so that 200 callers do not come back at once."""
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
