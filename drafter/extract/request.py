"""Request rows' hidden states from the extract server and pick up the files that its connector writes.

The reply arrives before its files. The connector writes and checks each `.part` file; this module compares it with
its row. The caller gives it its final name.
"""

import asyncio
import contextlib
import json
import os
import re
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from drafter import contracts, files
from drafter.config import Config
from drafter.errors import ConfigError, ContractError, ResumableError, RowError
from drafter.extract import last_position, states
from drafter.extract.last_position import Likeliest
from drafter.extract.probe import MEAN_NAT, Probe
from drafter.extract.worklist import Item
from drafter.serve.client import Client

REQUEST_SECONDS = 120  # time limit of a request, on top of the time that all requests in flight need
FLOOR_TOKENS_PER_SECOND = 300  # of the whole server
FILE_SECONDS = 60  # time limit of a reply's file, on top of the time that a full queue needs
SLOWEST_DISK = 50e6  # bytes a second
OLDEST = (0, 23)  # first vLLM that writes hidden states asynchronously
OLDEST_DEEPSEEK = (0, 25)  # older ones silently drop the last layer of this model family


@dataclass(frozen=True, slots=True)
class StateFormat:
    """Layers and format of the states that a request asks for."""

    layer_ids: tuple[int, ...]
    dtype: states.Dtype


@dataclass(frozen=True, slots=True)
class Sent:
    """A row that the server has answered: its file's path, and what the file must match."""

    part: Path
    ids: list[int]
    likeliest: Likeliest


class Capture:
    """Client of the extract server that returns checked files. An async context manager.

    Entering raises ConfigError for an engine that would leave out the last layer of a DeepSeek-V2-family target.
    """

    def __init__(self, config: Config, folder: Path, concurrency: int, outage_minutes: float, probe: Probe):
        self.config, self.folder = config, folder
        self._probe = probe
        self.bar = last_position.difference_limit(MEAN_NAT)  # until the first probe has measured the noise
        self.differences: list[float] = []  # in nat, at the last position of each row that passed
        self._target = files.fingerprint_path(config.target.model)
        self.client = Client(config.servers.extract, concurrency=concurrency, outage_minutes=outage_minutes)
        self.engine: dict[str, str] = {}  # the server's vLLM version and model runner
        self._threads = ThreadPoolExecutor(max_workers=8, thread_name_prefix="collect")
        settings = config.extract
        # A file may have to wait for a full queue.
        self._file_seconds = FILE_SECONDS + settings.queue_gb * 1e9 / SLOWEST_DISK
        in_flight = settings.concurrency * max(settings.tokens_per_request, config.target.max_seq_len)
        self._request_seconds = REQUEST_SECONDS + in_flight / FLOOR_TOKENS_PER_SECOND

    async def __aenter__(self) -> "Capture":
        await self.client.__aenter__()
        try:
            await self._refuse_old_engine()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_exc) -> None:
        self._threads.shutdown()
        await self.client.__aexit__()

    async def _refuse_old_engine(self) -> None:
        """Raises ConfigError for an engine that would leave out the last layer of a DeepSeek-V2-family target."""
        found = ""
        with contextlib.suppress(RowError):  # a server without /version may still be new enough
            found = str((await self.client.get("/version")).get("version"))
            self.engine["vllm"] = found
        name = self.config.target.architecture.name
        oldest = OLDEST_DEEPSEEK if "Deepseek" in name or "Kimi" in name else OLDEST
        if (parsed := re.match(r"(\d+)\.(\d+)", found)) and tuple(map(int, parsed.groups())) < oldest:
            raise ConfigError(
                f"vLLM {found} does not capture the last layer of {name}; it needs {oldest[0]}.{oldest[1]} or newer"
            )

    async def capture_files(self, items: list[Item], asked: StateFormat) -> dict[Item, Path]:
        """Checked, unpublished files, one request each. Raises ConfigError, ContractError, ResumableError."""
        parts: dict[Item, Path] = {}
        for item in items:
            try:
                sent, writer = await self.request([item], asked)
            except RowError as error:
                if error.reason == "failed":
                    raise ResumableError(
                        f"the extract server did not answer row {item.row_id} ({error.detail}); run the same command "
                        "again"
                    ) from None
                raise ConfigError(f"the extract server refuses {item.row_id}: {error}") from None
            found, late = await self.collect(sent, writer, asked)
            if item in late and late[item].reason == "failed":
                raise ResumableError(
                    f"the extract server wrote no file for row {item.row_id} ({late[item].detail}); run the same "
                    "command again"
                )
            if isinstance(outcome := found.get(item) or late[item], RowError):
                if outcome.reason == "disk_full":
                    raise disk_full(self.folder)
                raise ContractError(f"the server's hidden states are wrong: {outcome}")
            parts[item] = outcome
        return parts

    async def request(self, batch: list[Item], asked: StateFormat) -> tuple[dict[Item, Sent], Path]:
        """Request the states of some rows. Returns the sent rows and the writer's lock file. Raises RowError."""
        target = self.config.target
        ids = [item.input_ids() for item in batch]
        attempt = secrets.token_hex(4)  # a late file of an earlier attempt is never taken for this one's
        parts = [
            self.folder / contracts.states_path(item.row_id).with_name(f"{item.row_id}.{attempt}.part")
            for item in batch
        ]
        part_names = {item.digest: str(part) for item, part in zip(batch, parts, strict=True)}
        body = {
            "model": target.served_name,
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 0,
            **last_position.REQUEST,
            "kv_transfer_params": {
                "files": part_names,
                "layer_ids": list(asked.layer_ids),
                "dtype": asked.dtype,
                "target": self._target,
            },
        }
        reply = await self.client.post("/v1/completions", body, self._request_seconds)
        answer = reply.get("kv_transfer_params")
        if not isinstance(answer, dict) or not isinstance(answer.get("writer"), str):
            raise RowError(
                "bad_reply",
                "the reply names no writer; start the server with the connector drafter.extract.connector",
            )
        if error := answer.get("error"):
            raise RowError("bad_states", str(error))
        self.engine["model_runner"] = str(answer.get("runner"))
        writer = Path(answer["writer"])
        if not writer.exists():
            raise RowError("bad_reply", f"the server shares no file system with this process: {writer}")
        likeliest = last_position.read_reply(reply, len(batch))
        return dict(zip(batch, map(Sent, parts, ids, likeliest), strict=True)), writer

    async def collect(
        self, sent: dict[Item, Sent], writer: Path, asked: StateFormat
    ) -> tuple[dict[Item, Path | RowError], dict[Item, RowError]]:
        """Wait for the files. Returns those that came, or their faults, and those missing. Raises ResumableError."""
        loop = asyncio.get_running_loop()
        waiting = dict(sent)
        found: dict[Item, Path | RowError] = {}
        started, pause, alive = time.monotonic(), 0.002, True
        while True:
            outcomes = await loop.run_in_executor(self._threads, self._look, waiting, asked)
            found |= outcomes
            for item in outcomes:
                del waiting[item]
            waited = time.monotonic() - started
            if not waiting or not alive or waited > self._file_seconds:
                break
            if waited > 1:  # checked before the next look, so that look sees the last file of a dead writer
                alive = states.is_locked(writer)
                if os.statvfs(self.folder).f_flag & os.ST_RDONLY:  # the writer cannot report its failure either
                    raise ResumableError(f"{self.folder} is read-only now; remount it and run the same command again")
            await asyncio.sleep(pause)
            pause = min(2 * pause, 0.1)
        why = f"no file within {waited:.0f} s of the reply" if alive else "the server died before writing it"
        return found, {item: RowError("no_states" if alive else "failed", why) for item in waiting}

    def _look(self, sent: dict[Item, Sent], asked: StateFormat) -> dict[Item, Path | RowError]:
        """In a thread: compare the files that exist with their rows, and read the reports of failed writes."""
        hidden = self.config.target.architecture.hidden_size
        found: dict[Item, Path | RowError] = {}
        for item, one in sent.items():
            try:
                header = states.read_header(one.part)
                question = asked.layer_ids, hidden, asked.dtype, self._target
                states.check_header(header, item.row_id, one.ids, *question)
                final = states.read_last(one.part, header)
                self.differences.append(
                    last_position.checked_difference(self._probe.verifier, final, one.likeliest, self.bar)
                )
                found[item] = one.part
            except FileNotFoundError:
                if (report := one.part.with_suffix(".error")).exists():
                    found[item] = _read_report(report)
            except ContractError as error:
                found[item] = RowError("bad_states", str(error))
            except RowError as error:
                found[item] = error
        return found


def disk_full(folder: Path) -> ResumableError:
    return ResumableError(f"no space left below {folder}; free some space and run the same command again")


def _read_report(path: Path) -> RowError:
    """Why the connector wrote no file. The report is empty when the disk was full."""
    try:
        report = json.loads(path.read_text())
        return RowError(report["reason"], report["detail"])
    except (ValueError, KeyError, TypeError):
        return RowError("disk_full")
