"""Writes safetensors files while their tensors are copied from a device.

safetensors' own writer needs all tensors in host memory before it writes. Here tensors go through one pinned buffer
while the disk is already writing, so a signal waits for little more than the disk.
"""

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path

import numpy as np
import torch
import xxhash
from torch import Tensor

PIECE = 64 << 20  # size of the buffer
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64", torch.bool: "BOOL"}  # safetensors' names


def in_file_order(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in file order: wide dtypes first, so that each tensor is aligned."""
    return dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))


def write_tensors(path: Path, tensors: dict[str, Tensor], wholes: Iterator[Tensor], facts: dict[str, str]) -> None:
    """Write `tensors` to `path`, with `facts` and their checksums as metadata. Most of it is synced then.

    `tensors` gives dtypes and (unsharded) shapes, `in_file_order`; `wholes` gives the tensors, on any device.
    Raises OSError, and ValueError when `wholes` gives other tensors or fewer.
    """
    size = len(_header(tensors, facts, dict.fromkeys(tensors, "0" * 16)))
    staging = torch.empty(PIECE, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    with open(path, "wb", buffering=0) as file, ThreadPoolExecutor(1) as disk:
        file.seek(size)
        syncing, found = disk.submit(os.fdatasync, file.fileno()), {}
        for name, tensor in tensors.items():
            whole = next(wholes, None)  # not zip, which would take one tensor too many from the shared iterator
            if whole is None or (whole.shape, whole.dtype) != (tensor.shape, tensor.dtype):
                raise ValueError(
                    f"{path}: {name} is missing from the tensors to write, or has another shape or dtype"
                )
            checksum = xxhash.xxh3_64()
            for piece in _bytes(whole).split(PIECE):
                block = (staging[: len(piece)].copy_(piece) if piece.is_cuda else piece).numpy()
                checksum.update(block)
                _write_all(file, block)
                if syncing.done():
                    syncing.result()
                    syncing = disk.submit(os.fdatasync, file.fileno())
            found[name] = checksum.hexdigest()
        syncing.result()
        file.seek(0)
        _write_all(file, _header(tensors, facts, found, size - 8))


def checksums(tensors: dict[str, Tensor]) -> str:
    """XXH3 of each CPU tensor's bytes; at 10 GB/s on one thread it takes less time than the disk."""
    return json.dumps({name: _checksum(tensor) for name, tensor in tensors.items()}, sort_keys=True)


def _checksum(tensor: Tensor) -> str:
    checksum = xxhash.xxh3_64()
    for piece in _bytes(tensor).split(PIECE):
        checksum.update(piece.numpy())
    return checksum.hexdigest()


def additive_sums(tensors: dict[str, Tensor]) -> str:
    """The checksums of earlier versions: sums of 64-bit words, which do not notice two exchanged words."""
    found = {name: sum(_sum(p.numpy()) for p in _bytes(t).split(PIECE)) % 2**64 for name, t in tensors.items()}
    return json.dumps(found, sort_keys=True)


def _sum(block: np.ndarray) -> int:
    words = len(block) // 8 * 8
    return int(block[:words].view(np.uint64).sum(dtype=np.uint64)) + int(block[words:].sum())


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def _header(tensors: dict[str, Tensor], facts: dict[str, str], found: dict[str, str], room: int = 0) -> bytes:
    """All bytes before the first tensor: the length and at least `room` bytes."""
    tree: dict = {"__metadata__": {"format": "pt", **facts, "xxh3": json.dumps(found, sort_keys=True)}}
    position = 0
    for name, tensor in tensors.items():
        end = position + tensor.numel() * tensor.element_size()
        tree[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(tree, separators=(",", ":")).encode("ascii")
    padded = max(room, -(-len(text) // 8) * 8)
    return padded.to_bytes(8, "little") + text.ljust(padded)


def _write_all(file: FileIO, block: np.ndarray | bytes) -> None:
    view = block.data if isinstance(block, np.ndarray) else memoryview(block)
    while view:
        view = view[file.write(view) :]
