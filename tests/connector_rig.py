"""The real connector over a cache of our own, driven by hand: vLLM's code and ours, without an engine."""

import itertools
import mmap
import os
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.request import RequestStatus

from drafter.extract import states, writer
from drafter.extract.connector import HiddenStatesWriter

BLOCK = 16


class Rig:
    """Both sides of one connector. `cache` is [blocks, layers, BLOCK, H], or the order of vLLM 0.26 when `old`."""

    def __init__(
        self, root: Path, layer_ids, hidden: int, blocks=64, device="cpu", old=False, connector=None, model="",
        longest=1024, **extra,
    ):  # fmt: skip
        connector = connector or HiddenStatesWriter
        transfer = KVTransferConfig(
            kv_connector="HiddenStatesWriter",
            kv_role="kv_producer",
            kv_connector_extra_config={"shared_storage_path": str(root), **extra},
        )
        draft = SimpleNamespace(eagle_aux_hidden_state_layer_ids=list(layer_ids))
        vllm_config = SimpleNamespace(
            kv_transfer_config=transfer,
            cache_config=SimpleNamespace(block_size=BLOCK),
            model_config=SimpleNamespace(
                served_model_name="tiny",
                model=str(model),
                max_model_len=longest,
                get_hidden_size=lambda: hidden,
            ),
            speculative_config=SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=draft)),
        )
        self.scheduler = connector(vllm_config, KVConnectorRole.SCHEDULER, None)
        self.worker = connector(vllm_config, KVConnectorRole.WORKER, None)
        # Since 0.32 the layers lie before the positions of a block, in a buffer that is still ordered by position.
        self.cache = torch.zeros(blocks, BLOCK, len(layer_ids), hidden, dtype=torch.bfloat16, device=device)
        self.worker._kv_cache = self.cache if old else self.cache.transpose(1, 2)
        self.worker._open_queue()
        self.close = self.worker.shutdown
        self._numbers = itertools.count()
        self._next_block = 1

    def fill(self, hidden_states: Tensor) -> list[int]:
        """Put [T, L, H] into blocks that are not in order; their ids."""
        count = -(-len(hidden_states) // BLOCK)
        if self._next_block + count > len(self.cache):
            self.drain()
            self._next_block = 1
        ids = list(range(self._next_block, self._next_block + count))[::-1]
        self._next_block += count
        for position, block in enumerate(ids):
            rows = hidden_states[position * BLOCK : (position + 1) * BLOCK]
            self.cache[block, : len(rows)] = rows.to(self.cache.device)
        return ids

    def finish(self, token_ids, params, block_ids, status=RequestStatus.FINISHED_LENGTH_CAPPED):
        """The engine's call when a request has finished: (id, whether blocks are kept, the reply's parameters)."""
        request = SimpleNamespace(
            request_id=f"request-{next(self._numbers)}",
            kv_transfer_params=params,
            prompt_token_ids=token_ids,
            status=status,
        )
        groups = block_ids if isinstance(block_ids, tuple) else (block_ids,)
        return request.request_id, *self.scheduler.request_finished_all_groups(request, groups)

    def step(self) -> set[str]:
        """One engine step; the requests whose blocks may be freed after it."""
        self.worker.bind_connector_metadata(self.scheduler.build_connector_meta(None))
        done, _ = self.worker.get_finished(set())
        self.worker.clear_connector_metadata()
        return done or set()

    @property
    def busy(self) -> bool:
        return bool(self.worker._waiting or self.worker._copying or self.worker._out.queued)

    def drain(self) -> None:
        """Steps until nothing is queued."""
        self.step()
        while self.busy:
            self.step()


def in_a_thread(arena: int, pipe: Connection, size: int, threads: int) -> SimpleNamespace:
    """Replaces `drafter.extract.writer.start_writer`: the same work in a thread of this process, for tests."""
    theirs = Connection(os.dup(pipe.fileno()))
    work = (mmap.mmap(arena, size), theirs, threads, os.getppid())
    thread = threading.Thread(target=writer.write_jobs, args=work, daemon=True)
    thread.start()
    return SimpleNamespace(wait=thread.join)


def params(parts: dict[Path, list[int]], layer_ids, dtype: states.Dtype = "bf16") -> dict:
    """What a client sends for some prompts."""
    files = {states.ids_digest(ids): str(part) for part, ids in parts.items()}
    return {"files": files, "layer_ids": list(layer_ids), "dtype": dtype}
