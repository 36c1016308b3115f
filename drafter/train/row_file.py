"""One row's hidden-state file as training reads it: checked against the index and against its own checksum."""

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

PIECE = 4 << 20  # bytes read at once of what only the checksum needs
REMEDY = "02_extract_hidden_states.py --verify removes such files, and the next run of 02 extracts them again"


def read_header(folder: Path, entry: IndexEntry) -> states.Header:
    """Raises ContractError when the file is missing or is no hidden-state file."""
    path = folder / entry.path
    try:
        return states.read_header(path)
    except FileNotFoundError:
        raise ContractError(f"{path} is missing; 02_extract_hidden_states.py extracts it again") from None
    except ContractError as error:
        raise ContractError(f"{error}; {REMEDY}") from None


def token_ids(header: states.Header, entry: IndexEntry, vocab_size: int, think_end: int | None = None) -> np.ndarray:
    """The file's token ids [T] int64.

    Raises ContractError unless they are the index's and in the vocabulary, with `think_end` at its position.
    """
    ids = header.token_ids
    if len(ids) != entry.tokens:
        raise ContractError(f"{entry.path} holds {len(ids)} tokens, the index says {entry.tokens}; {REMEDY}")
    if not 0 <= ids.min() <= ids.max() < vocab_size:
        span = f"ids {ids.min()} to {ids.max()}"
        raise ContractError(f"{entry.path}: {span} go outside the target's vocabulary; {REMEDY}")
    if entry.digest and states.ids_digest(ids) != entry.digest:
        raise ContractError(f"{entry.path} holds other token ids than the index lists; {REMEDY}")
    if None not in (think_end, entry.think_end) and ids[entry.think_end] != think_end:
        found = f"token {ids[entry.think_end]} at think_end {entry.think_end}, not {think_end}"
        raise ContractError(f"{entry.path} has {found}; remove index.jsonl, and 02 writes it anew")
    return ids


def prefetch(path: Path) -> None:
    """Let the kernel fetch all rows of a pack at once, not one after the other."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return  # reported by the read that follows
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
    finally:
        os.close(fd)


def read_into(path: Path, header: states.Header, buffers: dict[str, Tensor], verify: bool) -> None:
    """Fill each of `buffers` with the first positions of its tensor: one copy, from page cache to destination.

    `verify`: compare all bytes of the file with its checksum; what no buffer takes is read for that alone.
    Raises ContractError when the file ends early or its bytes are not those that were written.
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
    """One piece of memory again and again, until it has had room for `count` bytes."""
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
