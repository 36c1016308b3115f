"""Whether the server at a role's address is ready to serve this run: asked over HTTP, with a bound on every reply."""

import contextlib
import enum
import http.client
import json
import os
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from drafter import gpu
from drafter.config import Config, Role, Server

PROBE_SECONDS = 60  # a longer completion of one token means a hang, even right after kernels were compiled
ASK_SECONDS = 10  # for replies that the API server gives without the engine
LONGEST = 1 << 20  # bytes of a reply that are read


class Cause(enum.Enum):
    """Why a server is not ready. Callers decide by this, never by the sentence beside it."""

    NOT_RUNNING = enum.auto()  # the unit or process does not exist, or died
    NO_ANSWER = enum.auto()  # no connection is accepted: it is starting, or gone
    HANGS = enum.auto()  # a connection is accepted, but no reply comes in time
    ERROR = enum.auto()  # an error status, or a reply that no OpenAI-compatible server gives
    LOADING = enum.auto()  # the GPUs do not hold the model yet
    UNFIT = enum.auto()  # another model, a context that is too short, or the hidden states of another run
    UNKNOWN = enum.auto()  # systemctl or nvidia-smi failed


@dataclass(frozen=True)
class Unready:
    """Why a server is not ready, with a sentence for the user."""

    cause: Cause
    sentence: str

    def __str__(self) -> str:
        return self.sentence


def why_unready(config: Config, role: Role, patience: float | None = None) -> Unready | None:
    """The first reason why a running server is not ready for this run, or None when it is.

    Ready means: /health is 200, the served name is listed with enough context, the GPUs hold the model, and a real
    completion returns token ids within `patience` seconds (/health can be 200 while the engine is dead).
    """
    server: Server = config.server(role)
    try:
        _request(server, "/health", None, ASK_SECONDS)
        listed = {model["id"]: model for model in _request(server, "/v1/models", None, ASK_SECONDS)["data"]}
        if (name := config.target.served_name) not in listed:
            return Unready(Cause.UNFIT, f"{server.url} serves {', '.join(listed)}, not target.served_name {name}")
        needed, offered = context_needed(config, role), listed[name].get("max_model_len")
        if offered is not None and offered < needed:
            return Unready(Cause.UNFIT, f"its max_model_len is {offered}, this run needs {needed}")
        folder = config.stage_dir("02_hidden_states")
        if server.link and server.link.resolve() != folder.resolve():
            sentence = f"{server.link} does not point to {folder}: the server writes to another run's folder"
            return Unready(Cause.UNFIT, sentence)
        if reason := gpu.not_loaded(server.gpus, config.target.model):
            return Unready(Cause.LOADING, reason)
        body = {"model": name, "prompt": "Hello", "max_tokens": 1, "temperature": 0, "return_token_ids": True}
        reply = _request(server, "/v1/completions", body, patience or PROBE_SECONDS)
        if not reply["choices"][0]["token_ids"]:
            return Unready(Cause.UNFIT, "its completions have no token ids (vLLM's return_token_ids)")
    except _Refused as refusal:
        return Unready(Cause.ERROR, str(refusal))
    except TimeoutError:
        return Unready(Cause.HANGS, f"{server.url} hangs: it accepts a request and does not answer")
    except OSError as error:
        # A server that we started refuses connections while it loads its model.
        loads = server.kind != "external" and isinstance(error, ConnectionRefusedError)
        return Unready(Cause.NO_ANSWER, f"no answer at {server.url} " + ("yet" if loads else f"({error})"))
    except (ValueError, LookupError, TypeError, RecursionError, http.client.HTTPException):
        return Unready(Cause.ERROR, f"{server.url} answers, but not as an OpenAI-compatible server does")
    return None


def remedy(server: Server) -> str:
    """What to do about a server that is Cause.UNFIT."""
    what = f"the unit {server.unit}" if server.kind == "systemd" else "the server"
    return f"correct {what} or the config: waiting does not help"


def context_needed(config: Config, role: Role) -> int:
    """Smallest `max_model_len` for this run: every role adds at least one token to a prompt."""
    tokens = {
        "generate": config.generate.max_tokens,
        "extract": config.target.max_seq_len,
        "evaluate": config.acceptance.max_tokens,
    }
    return 1 + tokens[role]


def found_at(server: Server) -> str:
    """What answers at the address of a role that is down, for a message; empty when nothing does."""
    try:
        served = ", ".join(model["id"] for model in _request(server, "/v1/models", None, 2)["data"])
        return f"a server of {served}"
    except (_Refused, TimeoutError, ValueError, LookupError, TypeError, RecursionError):
        return "another program"
    except (OSError, http.client.HTTPException):
        return ""


class _Refused(Exception):
    """A status other than 200."""


def _request(server: Server, path: str, body: dict | None, seconds: float) -> Any:
    """The JSON of a reply; None for an empty one.

    Raises OSError when no connection is accepted, TimeoutError when the whole reply does not follow in time.
    """
    headers = {"content-type": "application/json"}
    if server.api_key_env:
        headers["authorization"] = f"Bearer {os.environ.get(server.api_key_env, '')}"
    address = urlsplit(server.url)
    # Not urllib: it would use a proxy of the environment even for this machine.
    kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
    connection = kind(address.hostname or "", address.port, timeout=seconds)
    with contextlib.closing(connection):
        try:
            connection.connect()
        except TimeoutError:
            raise ConnectionError("the connection is not accepted") from None
        with _hung_up(connection.sock, seconds):
            data = None if body is None else json.dumps(body).encode()
            connection.request("GET" if body is None else "POST", address.path.rstrip("/") + path, data, headers)
            with connection.getresponse() as reply:
                if reply.status != 200:  # its body may be anything
                    raise _Refused(f"{path} answers {reply.status}")
                text = reply.read(LONGEST)
    return json.loads(text) if text else None


@contextlib.contextmanager
def _hung_up(sock: socket.socket, seconds: float):
    """Cut the block short after `seconds` with TimeoutError.

    The socket's own timeout bounds each read, so a server that sends a byte now and then never exceeds it.
    """
    deadline = time.monotonic() + seconds

    def hang_up() -> None:
        with contextlib.suppress(OSError):  # already closed
            socket.socket.shutdown(sock, socket.SHUT_RDWR)

    timer = threading.Timer(seconds, hang_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (OSError, http.client.HTTPException):
        if time.monotonic() < deadline:
            raise
    finally:
        timer.cancel()
    if time.monotonic() >= deadline:  # a reply without a length seems to end where it was cut
        raise TimeoutError
