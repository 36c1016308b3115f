"""The client against a scripted server: limits, retries, patience."""

import asyncio
import email.utils
import gzip
import os
import resource
import signal
import time

import pytest

from drafter import signals
from drafter.config import Server
from drafter.errors import ConfigError, Interrupted, ResumableError, RowError
from drafter.serve import client
from drafter.serve.client import Client
from tests.fakes import FakeServer, Reply, error_body

CHAT = "/v1/chat/completions"
BODY = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 50}


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(client, "BACKOFF_SECONDS", (0.01, 0.05))
    monkeypatch.setattr(client, "PROBE_SECONDS", (0.02, 0.05))


def ask(server: FakeServer, count: int = 1, concurrency: int = 8, timeout: float = 5.0, outage_minutes: float = 0.05):
    """Send `count` requests together; replies or errors in order, and the client."""

    async def main():
        settings = Server(kind="external", url=server.url)
        async with Client(settings, concurrency=concurrency, outage_minutes=outage_minutes) as one:
            bodies = [BODY | {"seed": i} for i in range(count)]
            posts = (one.post(CHAT, body, timeout=timeout) for body in bodies)
            return await asyncio.gather(*posts, return_exceptions=True), one

    return asyncio.run(main())


def test_a_reply_comes_as_raw_json_with_reasoning_and_ids():
    with FakeServer() as server:
        [reply], _ = ask(server)
    assert reply["choices"][0]["message"]["reasoning"].startswith("hm ")
    assert isinstance(reply["prompt_token_ids"], list)


def test_exactly_the_configured_number_is_in_flight():
    """G17"""
    with FakeServer(lambda call: Reply(b"{}", delay=4.0 if call.number < 1500 else 0.01)) as server:
        replies, one = ask(server, count=3000, concurrency=1500, timeout=60)
        assert server.peak_in_flight == one.peak_in_flight == 1500
    assert replies == [{}] * 3000
    assert not one.retries


def test_too_few_file_descriptors_are_named_before_anything_is_sent():
    """G17"""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        client._need_files(300)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 300
        with pytest.raises(ConfigError, match="open files"):
            client._need_files(hard + 1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("status", [408, 409, 425, 429, 500, 502, 503])
def test_passing_errors_are_retried(status):
    script = [Reply(error_body("busy", status), status)] * 2
    with FakeServer(lambda call: script.pop() if script else None) as server:
        [reply], one = ask(server)
    assert reply["choices"]
    assert one.retries == {f"http_{status}": 2}


@pytest.mark.parametrize("then", ["reset", "short"])
def test_broken_connections_are_retried(then):
    script = [Reply(b'{"a": 1, "b": 2}', then=then)]
    with FakeServer(lambda call: script.pop() if script else None) as server:
        [reply], one = ask(server)
    assert reply["choices"]
    assert one.retries == {"disconnected": 1}


@pytest.mark.parametrize(
    "value",
    ["0.3", email.utils.format_datetime(email.utils.localtime()), "soon", "nan"],
    ids=["seconds", "date", "nonsense", "no number"],
)
def test_retry_after_is_obeyed(value):
    script = [Reply(error_body("later", 429), 429, {"retry-after": value})]
    with FakeServer(lambda call: script.pop() if script else None) as server:
        [reply], _ = ask(server)
        first, second = server.chats
    assert reply["choices"]
    assert second.at - first.at >= (0.3 if value == "0.3" else 0.0)
    assert second.at - first.at < 1


def test_a_busy_server_costs_a_request_no_attempts():
    """More refusals than attempts, by a server that is full and says so."""
    script = [Reply(error_body("busy", 503), 503)] * (client.ATTEMPTS + 3)
    with FakeServer(lambda call: script.pop() if script else None) as server:
        [reply], _ = ask(server)
    assert reply["choices"]


@pytest.mark.parametrize(
    ("status", "message", "reason"),
    [
        (400, "This model's maximum context length is 2000 tokens", "prompt_too_long"),
        (400, "min_p is not supported", "request_refused"),
        (422, "bad field", "request_refused"),
        (413, "too large", "prompt_too_long"),
    ],
)
def test_other_4xx_are_permanent(status, message, reason):
    """G14"""
    with FakeServer(lambda call: Reply(error_body(message, status), status)) as server:
        [error], _ = ask(server)
        assert len(server.chats) == 1
    assert isinstance(error, RowError)
    assert error.reason == reason
    assert message in error.detail


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_wrong_key_or_name_is_the_users_error(status):
    with FakeServer(lambda call: Reply(error_body("no such model", status), status)) as server:
        [error], _ = ask(server)
    assert isinstance(error, ConfigError)
    assert "no such model" in str(error)


def test_an_empty_key_variable_is_named(monkeypatch):
    monkeypatch.delenv("DRAFTER_TEST_KEY", raising=False)
    settings = Server(kind="external", url="http://127.0.0.1:1", api_key_env="DRAFTER_TEST_KEY")
    with pytest.raises(ConfigError, match="DRAFTER_TEST_KEY"):
        Client(settings, concurrency=1, outage_minutes=1)


@pytest.mark.parametrize("data", [b"<html>", b"[1]", b'"x"', b"[" * 100000], ids=["html", "list", "text", "deep"])
def test_a_reply_that_is_no_json_object_costs_its_row_only(data):
    with FakeServer(lambda call: Reply(data)) as server:
        [error], _ = ask(server)
    assert isinstance(error, RowError)
    assert error.reason == "bad_reply"


def test_one_poisoned_request_fails_alone():
    """G04: HTTP 500 forever for one of ten."""

    def script(call):
        return Reply(error_body("boom", 500), 500) if call.body["seed"] == 3 else None

    with FakeServer(script) as server:
        replies, _ = ask(server, count=10, concurrency=2)
    assert [isinstance(reply, RowError) for reply in replies] == [i == 3 for i in range(10)]
    assert replies[3].reason == "failed"


def test_poisoned_requests_at_the_very_end_do_not_pass_for_an_outage():
    with FakeServer(lambda call: Reply(error_body("boom", 500), 500)) as server:
        replies, one = ask(server, count=4, outage_minutes=5)
    assert [reply.reason for reply in replies] == ["failed"] * 4
    assert one.outages >= 1


def test_a_timeout_hangs_up_is_counted_and_retried():
    script = [Reply(then="hang")]
    with FakeServer(lambda call: script.pop() if script else None) as server:
        [reply], one = ask(server, timeout=0.3)
        assert server.hung_up == 1
    assert reply["choices"]
    assert one.abandoned == 1
    assert one.retries == {"timeout": 1}


def test_what_is_too_slow_twice_is_given_up():
    with FakeServer(lambda call: Reply(then="hang") if call.body["seed"] == 1 else None) as server:
        replies, one = ask(server, count=8, concurrency=2, timeout=0.3)
    assert [isinstance(reply, RowError) for reply in replies] == [i == 1 for i in range(8)]
    assert one.retries["timeout"] == one.abandoned == 2


def test_an_outage_is_waited_for_and_nothing_is_lost(monkeypatch):
    """The port is closed while the server restarts; every request waits, then goes on by itself."""
    monkeypatch.setattr(client, "ATTEMPTS", 2)
    with FakeServer() as before:
        port = before._port
        ask(before)

    async def main():
        settings = Server(kind="external", url=f"http://127.0.0.1:{port}")
        async with Client(settings, concurrency=50, outage_minutes=1) as one:
            tasks = [asyncio.create_task(one.post(CHAT, BODY | {"seed": i}, timeout=5)) for i in range(100)]
            await asyncio.sleep(0.5)
            assert one.in_flight <= 1  # the probe alone knocks at a closed door
            with FakeServer(port=port) as after:
                replies = await asyncio.gather(*tasks)
                return replies, one, len(after.chats)

    replies, one, arrived = asyncio.run(main())
    assert all(reply["choices"] for reply in replies)
    assert arrived == 100
    assert one.outages == 1


def test_a_dead_engine_behind_a_healthy_api_is_an_outage(monkeypatch):
    """R01: /health says 200, completions hang."""
    monkeypatch.setattr(client, "PROBE_TIMEOUT", 0.2)

    def script(call):
        server.alive = False
        return Reply(then="hang")

    with FakeServer(script) as server:
        started = time.monotonic()
        replies, one = ask(server, count=6, timeout=0.3, outage_minutes=0.02)
    assert all(isinstance(reply, ResumableError) for reply in replies)
    assert "run the same command again" in str(replies[0])
    assert time.monotonic() - started < 10


def test_a_server_that_lists_no_models_while_it_starts_is_waited_for():
    """R01: what stands before it answers 200 with nothing in it; the wait still ends."""

    class Starting(FakeServer):
        def _reply(self, call):
            return Reply({"data": None}) if call.path == "/v1/models" else super()._reply(call)

    with Starting(lambda call: Reply(error_body("starting", 500), 500)) as server:
        replies, _ = ask(server, count=6, outage_minutes=0.01)
    assert all(isinstance(reply, ResumableError) for reply in replies)


def test_timeouts_then_errors_for_all_trip_the_breaker():
    """H11"""

    def script(call):
        if len(server.chats) > 40:
            server.alive = False
            return Reply(error_body("EngineDeadError", 500), 500)
        return Reply(then="hang") if call.body["seed"] % 10 == 0 else None

    with FakeServer(script) as server:
        replies, one = ask(server, count=200, concurrency=20, timeout=0.3, outage_minutes=0.02)
        assert len(server.chats) < 120  # the others never left
    assert any(isinstance(reply, dict) for reply in replies)
    assert any(isinstance(reply, ResumableError) for reply in replies)
    assert not any(isinstance(reply, RowError) for reply in replies)
    assert one.outages == 1


COMPRESSED = gzip.compress(b"<html>bad gateway</html>")
BROKEN_REPLIES = {
    "gzip": Reply(COMPRESSED, 502, {"content-encoding": "gzip"}),
    "cut gzip": Reply(COMPRESSED[:12], 502, {"content-encoding": "gzip"}),
    "no gzip": Reply(b"<html>", 502, {"content-encoding": "gzip"}),
    "unknown encoding": Reply(b"<html>", 502, {"content-encoding": "rot13"}),
    "not installed": Reply(b"<html>", 502, {"content-encoding": "br"}),
    "no text": Reply(b"\xff\xfe\x00", 502, {"content-type": "application/json; charset=klingon"}),
    "deep": Reply(b"[" * 100_000, 502),
    "other shape": Reply({"error": [1]}, 502),
    "retry in year 0": Reply(b"", 503, {"retry-after": "Mon, 01 Jan 0001 00:00:00 +2359"}),
    "retry never": Reply(b"", 503, {"retry-after": "-inf"}),
    "length": Reply(b"", 502, {"content-length": "many"}),
    "long header": Reply(b"", 502, {"x": "y" * 100_000}),
    "no such place": Reply(b"", 302, {"location": "http://[::1"}),
    "in circles": Reply(b"", 307, {"location": "/v1/chat/completions"}),
}


@pytest.mark.parametrize("kind", BROKEN_REPLIES)
def test_a_compressed_or_malformed_error_reply_is_retried(kind):
    """Seam H5: whatever a proxy answers while the server is away, the next attempt gets its reply."""
    script = [BROKEN_REPLIES[kind]] * 11  # a redirect is followed ten times
    with FakeServer(lambda call: script.pop() if script else None) as server:
        script[(11 if kind == "in circles" else 2) :] = []
        [reply], one = ask(server)
        assert server.calls[0].headers["accept-encoding"] == "identity"
    assert reply["choices"]
    assert sum(one.retries.values()) >= 1


@pytest.mark.parametrize("kind", BROKEN_REPLIES)
def test_a_malformed_reply_to_the_health_check_wakes_every_caller_with_an_error(kind):
    """Seam H5: no call waits for ever for a health check that has ended."""

    class Broken(FakeServer):
        def _reply(self, call):
            return BROKEN_REPLIES[kind]

    with Broken() as server:
        replies, _ = ask(server, count=6, outage_minutes=0.005)
    assert all(isinstance(reply, ResumableError | RowError) for reply in replies), replies


def test_any_error_of_the_wait_for_the_server_is_an_error_of_every_waiting_call(monkeypatch):
    """Seam H5: also one that was not foreseen."""

    async def unforeseen(*_):
        raise UnicodeError("not foreseen")

    monkeypatch.setattr(Client, "_answers", unforeseen)
    with FakeServer(lambda call: Reply(then="reset")) as server:
        replies, _ = ask(server, count=20)
    assert {str(reply) for reply in replies} == {"not foreseen"}


def test_a_client_that_closes_wakes_the_callers_that_wait_for_its_server():
    """Seam H5"""

    async def main():
        settings = Server(kind="external", url="http://127.0.0.1:15202")
        async with Client(settings, concurrency=8, outage_minutes=60) as one:
            posts = [asyncio.create_task(one.post(CHAT, BODY, timeout=5)) for _ in range(8)]
            while one._probe is None:
                await asyncio.sleep(0)
        return await asyncio.wait_for(asyncio.gather(*posts, return_exceptions=True), 10)

    replies = asyncio.run(main())
    assert all(isinstance(reply, ResumableError) for reply in replies), replies


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """What HTTP libraries read from the environment, each of it in the way of a request to this machine."""
    netrc = tmp_path / "netrc"
    netrc.write_text("default login somebody password secret\n")
    for name in ("http_proxy", "https_proxy", "all_proxy", "ws_proxy"):
        monkeypatch.setenv(name, "socks5://127.0.0.1:15203")
        monkeypatch.setenv(name.upper(), "socks5://127.0.0.1:15203")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSLKEYLOGFILE"):
        monkeypatch.setenv(name, "/nowhere/certificates")
    monkeypatch.setenv("NETRC", str(netrc))
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:15203")
    monkeypatch.setenv("OPENAI_API_KEY", "another")


def test_no_environment_changes_a_request_to_a_server(hostile):
    """Seam B01: no proxy (socks too), certificate file, netrc or key of another program."""
    with FakeServer() as server:
        [reply], one = ask(server)
        assert reply["choices"] and not one.retries
        assert all("authorization" not in call.headers for call in server.calls)


def test_a_lone_surrogate_in_a_prompt_can_be_sent():
    """G10"""
    with FakeServer() as server:

        async def main():
            async with Client(Server(kind="external", url=server.url), concurrency=1, outage_minutes=1) as one:
                return await one.post("/tokenize", {"prompt": "\ud83d"}, timeout=5)

        assert asyncio.run(main())["count"] == 3


def test_the_stages_signal_handlers_stand_again_after_the_loop():
    """A signal while the last shard is published must still be one that saves."""
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        mine = signal.getsignal(signal.SIGTERM)
        assert client.run_interruptible(asyncio.sleep(0, result=5)) == 5
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_the_work_save_and_says_which_it_was(signum):
    saved = []

    async def work():
        try:
            os.kill(os.getpid(), signum)
            await asyncio.sleep(10)
        finally:
            os.kill(os.getpid(), signum)  # a second one does not cut the saving short
            await asyncio.sleep(0.05)
            saved.append(True)

    with signals.listening(*signals.SIGNALS), pytest.raises(Interrupted) as stop:
        try:
            client.run_interruptible(work())
        finally:
            os.kill(os.getpid(), signum)  # nor does one after the loop, when the stage writes its index
            saved.append(True)
    assert stop.value.exit_code == 128 + signum
    assert saved == [True, True]
    signals.listen()  # as if none had come
