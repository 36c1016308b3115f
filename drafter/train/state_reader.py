"""Reads one row's hidden-state file for training and checks it against the index and its own checksum."""

import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from drafter.contracts import IndexEntry
from drafter.errors import ContractError
from drafter.extract import states

PIECE = 4 << 20  # bytes read at once that only the checksum needs
REMEDY = "02_extract_hidden_states.py --verify removes such files, and the next run of 02 extracts them again"


def read_header(folder: Path, entry: IndexEntry) -> states.Header:
    """Raises ContractError when the file is missing or is not a hidden-state file."""
    path = folder / entry.path
    try:
        return states.read_header(path)
    except FileNotFoundError:
        raise ContractError(f"{path} is missing; 02_extract_hidden_states.py extracts it again") from None
    except ContractError as error:
        raise ContractError(f"{error}; {REMEDY}") from None


def token_ids(header: states.Header, entry: IndexEntry, vocab_size: int, think_end: int | None = None) -> np.ndarray:
    """The file's token ids [T] int64.

    Raises ContractError unless they match the index, are in the vocabulary, and have `think_end` at its position.
    """
    ids = header.token_ids
    if len(ids) != entry.tokens:
        raise ContractError(f"{entry.path} holds {len(ids)} tokens, the index says {entry.tokens}; {REMEDY}")
    if not 0 <= ids.min() <= ids.max() < vocab_size:
        span = f"ids {ids.min()} to {ids.max()}"
        raise ContractError(f"{entry.path}: {span} are not all in the target's vocabulary; {REMEDY}")
    if entry.digest and states.ids_digest(ids) != entry.digest:
        raise ContractError(f"{entry.path} holds other token ids than the index lists; {REMEDY}")
    if None not in (think_end, entry.think_end) and ids[entry.think_end] != think_end:
        found = f"token {ids[entry.think_end]} at think_end {entry.think_end}, not {think_end}"
        raise ContractError(f"{entry.path} has {found}; remove index.jsonl, and 02 writes it again")
    return ids


def prefetch(path: Path) -> None:
    """Let the kernel read all rows of a pack in parallel."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return  # the following read reports it
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
    finally:
        os.close(fd)


def read_into(path: Path, header: states.Header, buffers: dict[str, Tensor], verify: bool) -> None:
    """Fill each of `buffers` with the first positions of its tensor: one copy, from page cache to destination.

    `verify`: compare all bytes of the file with its checksum; bytes that no buffer takes are read only for that.
    Raises ContractError when the file ends early or its checksum does not match.
    """
    checksum = states.begin_checksum(header) if verify else 0
    fd = os.open(path, os.O_RDONLY)
    try:
        for name, (low, high) in sorted(header.offsets.items(), key=lambda item: item[1]):
            position, end = header.start + low, header.start + high
            parts = [memoryview(buffers[name].view(torch.uint8).numpy()).cast("B")] if name in buffers else []
            taken = sum(map(len, parts))
            if verify:
                parts += _scratch(end - position - taken)
            elif not parts:
                continue
            for part in parts:
                _fill(fd, part, position, path)
                position += len(part)
                checksum = zlib.crc32(part, checksum) if verify else 0
    finally:
        os.close(fd)
    if verify and f"{checksum:08x}" != header.metadata.get("crc32"):
        raise ContractError(f"{path}: its bytes do not match its checksum; {REMEDY}")


def _scratch(count: int) -> Iterator[memoryview]:
    """The same buffer again and again, `count` bytes in total."""
    buffer = memoryview(bytearray(min(count, PIECE)))
    while count > 0:
        yield buffer[:count]
        count -= len(buffer)


def _fill(fd: int, view: memoryview, position: int, path: Path) -> None:
    while len(view):
        got = os.preadv(fd, [view], position)
        if not got:
            raise ContractError(f"{path} ends early; {REMEDY}")
        view, position = view[got:], position + got
