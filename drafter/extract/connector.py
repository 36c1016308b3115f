"""Runs inside vLLM: passes each request's hidden states to a writer process, which checks, writes and renames them.

A request names its file in `kv_transfer_params`:

    {"files": {<digest of the prompt's ids>: "<folder>/<xx>/<row_id>.<attempt>.part", ...},
     "layer_ids": [...], "dtype": "bf16" | "fp8", "target": <fingerprint of the target, for the files' headers>}

Files are keyed by the prompt's content because one HTTP request may carry many prompts but only one set of
parameters; a prompt that was changed on its way to the engine gets no file. The reply names the writer, or the error:

    {"writer": <path>, "runner": "v1" | "v2", "error": null | "..."}

The reply arrives before the file. A `.part` file is always complete and checked; if writing fails, a `.error` file
beside it gives the reason. `writer` is a file that this process keeps locked, so a client can tell a late file from a
dead server. `runner` is the version of vLLM's model runner, which collects the states. Nothing is written outside the
folder that the server was started with, whatever a request names.

vLLM's own connector registers the cache and finds its group. The rest is replaced, on vLLM 0.26 and 0.32, because
its write path needs CUDA, queues without bound when the disk is slower, and reports no failures; a request aborted
before it was scheduled raises on 0.26, and one aborted during prefill is written half empty; under tensor parallelism
0.26 waits for a notice from every rank although only one writes, and never frees the blocks.
"""

import contextlib
import fcntl
import functools
import math
import os
import socket
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
)
from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from drafter.extract import state_file, states
from drafter.extract.writer import File, Region, Writer

logger = init_logger(__name__)

GATHER_BYTES = 64 << 20  # states that are copied at once; this device memory comes on top of vLLM's own


@dataclass(frozen=True, slots=True)
class Save:
    """A finished prompt whose states are still in the cache."""

    req_id: str
    part: Path
    token_ids: list[int]
    block_ids: list[int]
    layer_ids: list[int]
    dtype: states.Dtype
    target: str | None


@dataclass
class Saves(KVConnectorMetadata):
    new: list[Save] = field(default_factory=list)


class HiddenStatesWriter(ExampleHiddenStatesConnector):
    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        extra = self._kv_transfer_config.get_from_extra_config
        self._root = Path(self._storage_path).resolve()
        self._root.mkdir(parents=True, exist_ok=True)
        self._model = vllm_config.model_config.served_model_name
        self._hidden_size = vllm_config.model_config.get_hidden_size()
        draft = vllm_config.speculative_config.draft_model_config.hf_config
        # The engine collects them in layer order, whatever order they were configured in.
        self._captured = sorted(draft.eagle_aux_hidden_state_layer_ids)

        # scheduler side
        runs_v2 = getattr(vllm_config, "use_v2_model_runner", False)  # 0.26 has no such property on some platforms
        self._runner = "v2" if runs_v2 else "v1"
        self._new_saves: list[Save] = []
        self._writer = ""
        if role == KVConnectorRole.SCHEDULER:
            self._writer, self._alive = _announce(self._root / ".writers")

        # worker side, on the rank that writes
        longest = self._rounded(vllm_config.model_config.max_model_len)
        self._queue_bytes = max(int(extra("queue_gb", 4) * 1e9), self._bytes(longest, len(self._captured)))
        self._threads = extra("num_writer_threads", 8)
        self._out: Writer | None = None
        self._waiting: deque[Save] = deque()  # they hold cache blocks, so a long queue slows the engine down
        self._copying: dict[str, torch.cuda.Event | None] = {}

    def get_finished_count(self) -> int:
        return 1  # one rank writes and reports

    # scheduler side

    def request_finished(self, request, block_ids):
        params = request.kv_transfer_params or {}
        prompt = request.prompt_token_ids
        if "files" not in params or prompt is None:
            return False, None
        if request.status not in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED):
            return False, None  # aborted, possibly before or during its prefill
        try:
            save = self._plan(request.request_id, params, list(prompt), list(block_ids))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return False, self._reply(f"{type(error).__name__}: {error}")
        self._new_saves.append(save)
        return True, self._reply(None)

    def _reply(self, error: str | None) -> dict[str, str | None]:
        return {"writer": self._writer, "runner": self._runner, "error": error}

    def request_finished_all_groups(self, request, block_ids):
        """For models with several cache groups; a request that was never scheduled may have no group."""
        group = self._cache_kv_group_id
        return self.request_finished(request, block_ids[group] if group < len(block_ids) else [])

    def _plan(self, req_id: str, params: dict, prompt: list[int], block_ids: list[int]) -> Save:
        """Raises ValueError, KeyError, TypeError or AttributeError on parameters that cannot be honoured."""
        if not params["layer_ids"] or len(set(params["layer_ids"])) < len(params["layer_ids"]):
            raise ValueError(
                f"layers {params['layer_ids']}: at least one, each once"
            )  # repeats could exceed the arena
        if unknown := sorted(set(params["layer_ids"]) - set(self._captured)):
            raise ValueError(f"layers {unknown} are not captured; the server captures {self._captured}")
        if params["dtype"] not in ("bf16", "fp8"):
            raise ValueError(f"unknown dtype {params['dtype']}")
        if len(block_ids) * self._block_size < len(prompt) or 0 in block_ids:  # 0: a block that was freed
            raise ValueError(f"the cache no longer holds all {len(prompt)} positions")
        target = params.get("target")
        if not isinstance(target, str | None) or len(target or "") > 64:
            raise ValueError("target: a fingerprint of at most 64 characters")  # the header's size depends on it
        part = self._inside(params["files"][states.ids_digest(prompt)])
        return Save(req_id, part, prompt, block_ids, params["layer_ids"], params["dtype"], target)

    def _inside(self, name: str) -> Path:
        path = self._root / name
        if path.suffix != ".part" or not _is_below(self._root, path.parent):
            raise ValueError(f"{name!r} is not a .part file below {self._root}")
        return path

    def build_connector_meta(self, scheduler_output) -> Saves:
        meta, self._new_saves = Saves(self._new_saves), []
        return meta

    # worker side

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        if self._is_tp_rank_zero:
            self._open_queue()

    def _open_queue(self) -> None:
        self._out = Writer(self._queue_bytes, self._threads)
        self._arena = torch.frombuffer(self._out.arena, dtype=torch.uint8)
        if self._kv_cache.is_cuda:  # pinned, so that copies overlap with the next step
            runtime = torch.cuda.cudart()
            torch.cuda.check_error(runtime.cudaHostRegister(self._arena.data_ptr(), len(self._arena), 0))

    def wait_for_save(self) -> None:
        pass  # the states stay in the cache until the request has finished

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Start the copies for which the queue has room; return the requests whose blocks may be freed.

        Raises RuntimeError, which ends the engine, when the writer process has died.
        """
        out = self._out
        if not self._is_tp_rank_zero or out is None:
            return None, None
        out.check()
        if self.has_connector_metadata():
            self._waiting.extend(self._get_connector_metadata().new)
        while group := self._next(out.size):
            region = out.reserve(sum(map(self._size, group)))
            if region is None:
                break
            for _ in group:
                self._waiting.popleft()
            self._start(out, group, region)
        done = {req_id for req_id, event in self._copying.items() if event is None or event.query()}
        for req_id in done:
            del self._copying[req_id]
        return done or None, None

    def shutdown(self) -> None:
        if self._out is not None:
            self._out.close()

    def _next(self, room: int) -> list[Save]:
        """The first waiting saves that are copied together. `room`: bytes of the queue."""
        group: list[Save] = []
        size, most = 0, min(GATHER_BYTES, room // 4)
        for save in self._waiting:
            size += self._size(save)
            if group and (size > most or not _alike(save, group[0])):
                break
            group.append(save)
        return group

    def _size(self, save: Save) -> int:
        """Bytes that a save's copy needs at most: whole cache blocks in bf16."""
        return self._bytes(self._rounded(len(save.token_ids)), len(save.layer_ids))

    def _bytes(self, tokens: int, layers: int) -> int:
        return tokens * layers * self._hidden_size * 2

    def _rounded(self, tokens: int) -> int:
        return -(-tokens // self._block_size) * self._block_size

    def _start(self, out: Writer, group: list[Save], region: Region) -> None:
        """Queue the copy from the cache and the writes that follow it."""
        gathered, event = self._gather(group, region)
        files = []
        for save, tensors in zip(group, gathered, strict=True):
            self._copying[save.req_id] = event
            row_id = save.part.name.partition(".")[0]
            facts = state_file.file_metadata(row_id, self._model, save.layer_ids, save.dtype, save.target)
            files.append(File(save.part, np.array(save.token_ids), self._placed(tensors), facts))
        out.submit(region, files, event.synchronize if event is not None else lambda: None)

    def _placed(self, tensors: dict[str, Tensor]) -> dict[str, tuple[str, tuple[int, ...], int]]:
        base = self._arena.data_ptr()
        return {
            name: (array.dtype.str, array.shape, array.ctypes.data - base)
            for name, array in states.to_arrays(tensors).items()
        }

    def _gather(self, group: list[Save], region: Region) -> tuple[list[dict[str, Tensor]], "torch.cuda.Event | None"]:
        """Copy each file's states into the arena. Returns the tensors and the event that completes them (None: now).

        One kernel and one copy serve all saves of a group, since for rows of a few hundred tokens kernel launches
        would cost the engine more than the copying.
        """
        cache = self._kv_cache
        if (
            cache.shape[1] != self._block_size
        ):  # since 0.32 [blocks, layers, block, H], before [blocks, block, layers, H]
            cache = cache.transpose(1, 2)
        first = group[0]
        positions = [self._rounded(len(save.token_ids)) for save in group]
        blocks_of = zip(group, positions, strict=True)
        ids = [block for save, held in blocks_of for block in save.block_ids[: held // self._block_size]]
        shapes = states.shapes(len(ids) * self._block_size, len(first.layer_ids), self._hidden_size, first.dtype)
        del shapes["token_ids"]
        on_gpu = cache.is_cuda
        host = {name: self._space(region, dtype, shape) for name, (dtype, shape) in shapes.items()}
        event = None
        with self._on_copy_stream() if on_gpu else contextlib.nullcontext():
            blocks = torch.tensor(ids).to(cache.device, non_blocking=True)
            columns = [self._captured.index(layer) for layer in first.layer_ids]
            step = max(1, GATHER_BYTES // cache[0].nbytes)
            for start in range(0, len(ids), step):
                rows = cache.index_select(0, blocks[start : start + step]).flatten(0, 1)
                if columns != list(range(rows.shape[1])):
                    rows = rows[:, columns]
                parts = states.to_compact(rows) if first.dtype == "fp8" else {"hidden_states": rows}
                place = slice(start * self._block_size, start * self._block_size + len(rows))
                for name, part in parts.items():
                    host[name][place].copy_(part, non_blocking=True)
            if on_gpu:
                event = torch.cuda.Event(blocking=True)  # waiting must not spin on the engine's cores
                event.record()
        files, start = [], 0
        for save, held in zip(group, positions, strict=True):
            files.append({name: tensor[start : start + len(save.token_ids)] for name, tensor in host.items()})
            start += held
        return files, event

    def _space(self, region: Region, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        start = region.take(size)
        return self._arena[start : start + size].view(dtype).view(shape)

    @contextlib.contextmanager
    def _on_copy_stream(self):
        stream = self._get_copy_stream()
        stream.wait_stream(torch.cuda.current_stream())  # the forward pass that filled the cache
        with torch.cuda.stream(stream):
            yield


def _alike(one: Save, other: Save) -> bool:
    return one.layer_ids == other.layer_ids and one.dtype == other.dtype


def _announce(folder: Path) -> tuple[str, int]:
    """Create a file in `folder` that stays locked until this process ends; returns its path and descriptor."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        _remove_unlocked(old)
    while True:
        path = folder / f"{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return str(path), fd
        os.close(fd)  # another engine removed it before this one locked it


def _remove_unlocked(path: Path) -> None:
    """Remove the file of a dead engine, holding its lock, so that a new engine notices if its own file is removed."""
    with contextlib.suppress(FileNotFoundError, BlockingIOError), open(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()


@functools.lru_cache(maxsize=4096)
def _is_below(root: Path, folder: Path) -> bool:
    return folder.resolve().is_relative_to(root)
