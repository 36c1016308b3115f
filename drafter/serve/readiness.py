"""Whether what answers at a role's address would serve this run: asked over HTTP, each time within a bound."""

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

PROBE_SECONDS = 60  # a completion of one token that takes longer is a hang, also right after compiling kernels
ASK_SECONDS = 10  # what an API server answers by itself
LONGEST = 1 << 20  # bytes of a reply that are read


class Cause(enum.Enum):
    """Why a server would not serve a request now. Callers decide by this, never by the sentence beside it."""

    NOT_RUNNING = enum.auto()  # the unit or process does not exist, or has died
    NO_ANSWER = enum.auto()  # no connection is accepted: it starts, or is gone
    HANGS = enum.auto()  # a connection is accepted, and no answer comes in time
    ERROR = enum.auto()  # it answers with an error status, or not as an OpenAI-compatible server does
    LOADING = enum.auto()  # the GPUs do not hold the model yet
    UNFIT = enum.auto()  # it serves another model, a shorter context, or writes for another run
    UNKNOWN = enum.auto()  # it could not be asked: systemctl or nvidia-smi failed


@dataclass(frozen=True)
class Unready:
    """Why a server is not ready, and the sentence that says so to the user."""

    cause: Cause
    sentence: str

    def __str__(self) -> str:
        return self.sentence


def why_unready(config: Config, role: Role, patience: float | None = None) -> Unready | None:
    """The first reason why a running server would not serve a request of this run, or None when it is ready.

    Ready means: /health is 200, the served name is listed with enough context, the GPUs hold the model, and one real
    completion came back with token ids within `patience` seconds (an API can be healthy over a dead engine).
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
            sentence = f"{server.link} does not lead to {folder}: the server writes for another run"
            return Unready(Cause.UNFIT, sentence)
        if reason := gpu.not_loaded(server.gpus, config.target.model):
            return Unready(Cause.LOADING, reason)
        body = {"model": name, "prompt": "Hello", "max_tokens": 1, "temperature": 0, "return_token_ids": True}
        reply = _request(server, "/v1/completions", body, patience or PROBE_SECONDS)
        if not reply["choices"][0]["token_ids"]:
            return Unready(Cause.UNFIT, "its completions carry no token ids (vLLM's return_token_ids)")
    except _Refused as refusal:
        return Unready(Cause.ERROR, str(refusal))
    except TimeoutError:
        return Unready(Cause.HANGS, f"{server.url} hangs: it accepts a request and does not answer")
    except OSError as error:
        # A server of ours refuses connections while it loads its model.
        loads = server.kind != "external" and isinstance(error, ConnectionRefusedError)
        return Unready(Cause.NO_ANSWER, f"no answer at {server.url} " + ("yet" if loads else f"({error})"))
    except (ValueError, LookupError, TypeError, RecursionError, http.client.HTTPException):
        return Unready(Cause.ERROR, f"{server.url} answers, but not as an OpenAI-compatible server does")
    return None


def context_needed(config: Config, role: Role) -> int:
    """Smallest `max_model_len` this run can work with: every role adds at least one token to a prompt."""
    return (
        1
        + {
            "generate": config.generate.max_tokens,
            "extract": config.target.max_seq_len,
            "evaluate": config.acceptance.max_tokens,
        }[role]
    )


def found_at(server: Server) -> str:
    """What answers at the address of a role that is down, in words; empty when nothing does."""
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

    Raises TimeoutError when it is not whole in time after the connection was accepted, OSError when none is.
    """
    headers = {"content-type": "application/json"}
    if server.api_key_env:
        headers["authorization"] = f"Bearer {os.environ.get(server.api_key_env, '')}"
    address = urlsplit(server.url)
    # Not urllib: a proxy of the environment must never stand before a server of this machine.
    kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
    connection = kind(address.hostname, address.port, timeout=seconds)
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
    """Raises TimeoutError when the block takes longer, cutting it short.

    The socket's own timeout is one of each read, which a server that sends a byte now and then never meets.
    """
    deadline = time.monotonic() + seconds

    def hang_up() -> None:
        with contextlib.suppress(OSError):  # closed by now
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
    if time.monotonic() >= deadline:  # a reply without a length ends where it was cut
        raise TimeoutError
