"""Training examples from the index of hidden states: the guesses with loss, the split, the packs, the loader."""

import hashlib
import random
import time
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from drafter import files, run_files
from drafter.contracts import Counts, IndexEntry, cut
from drafter.errors import ContractError, RowError
from drafter.extract import states
from drafter.train import state_reader
from drafter.train.attention import Documents
from drafter.train.batch import ANSWER, REASONING, Pack

WINDOW = 512  # rows that are packed together


@dataclass(frozen=True, slots=True)
class Example:
    """One row as training uses it. Slots are counted from the row's start."""

    entry: IndexEntry
    supervised: list[list[int]]  # after the cut at max_seq_len
    first: int  # first anchor
    slots: int  # kept slots: up to one past the last anchor, whose state is the last guess's teacher
    asked: tuple[int, ...]  # guesses at each step


def depths(supervised: list[list[int]], tokens: int, steps: int) -> np.ndarray:
    """How many guesses are asked for at each slot of a row: [tokens] int64.

    Serving, the target itself writes a response's first token s, and slot s - 1 is where the first draft begins:
    its step k guesses token s + 1 + k. So slot p asks for step k when s - 1 <= p and token p + 2 + k is still
    in the same response [s, e), whose last token is its end token.
    """
    result = np.zeros(tokens, dtype=np.int64)
    for start, end in supervised:
        slots = np.arange(max(start - 1, 0), max(end - 2, 0))
        result[slots] = np.minimum(end - 2 - slots, steps)
    return result


def learnable_rows(entries: Iterable[IndexEntry], max_seq_len: int, steps: int, counts: Counts) -> list[Example]:
    """Rows with at least one guess, in order of row id; the others are counted as rejected."""
    result = []
    for entry in sorted(entries, key=lambda e: e.row_id):
        tokens = min(entry.tokens, max_seq_len)
        supervised = cut(entry.supervised, tokens)
        depth = depths(supervised, tokens, steps)
        anchors = depth.nonzero()[0]
        if tokens < 3:
            counts.reject("too_short")
        elif not len(anchors):
            counts.reject("no_supervised_tokens")
        else:
            asked = tuple(int((depth > k).sum()) for k in range(steps))
            result.append(Example(entry, supervised, int(anchors[0]), int(anchors[-1]) + 2, asked))
    return result


def read_index(folder: Path) -> list[IndexEntry]:
    """Raises ContractError on a record that is not an index entry, or on a row that is listed twice."""
    entries: dict[str, IndexEntry] = {}
    try:
        for record in files.read_jsonl(folder / run_files.INDEX):
            entry = IndexEntry.from_record(record)
            if entries.setdefault(entry.row_id, entry) is not entry:
                raise ContractError(f"row {entry.row_id} is listed twice")
        return list(entries.values())
    except (FileNotFoundError, ContractError) as error:
        raise ContractError(
            f"{folder / run_files.INDEX}: {error}; 02_extract_hidden_states.py writes it again"
        ) from None


def split_rows(rows: list[Example], share: float) -> tuple[list[Example], list[Example]]:
    """Training and validation rows. A conversation is on one side only, and stays there when rows are added."""
    conversations = sorted({row.entry.conv_id for row in rows}, key=_fraction)
    held = {conv for conv in conversations if _fraction(conv) < share} or set(conversations[:1])
    return [r for r in rows if r.entry.conv_id not in held], [r for r in rows if r.entry.conv_id in held]


def _fraction(conv_id: str) -> float:
    return int(hashlib.sha256(conv_id.encode()).hexdigest()[:8], 16) / 16**8


def pack_rows(rows: list[Example], capacity: int, seed: str | None) -> list[list[Example]]:
    """Rows grouped into packs of at most `capacity` slots; shuffled by `seed`, or in the given order without a seed.

    Within each window of WINDOW rows, the longest rows are placed first, each into the first pack that has room.
    """
    order = list(rows)
    generator = random.Random(seed)
    if seed is not None:
        generator.shuffle(order)
    packs: list[list[Example]] = []
    for start in range(0, len(order), WINDOW):
        free: list[int] = []
        first = len(packs)
        for row in sorted(order[start : start + WINDOW], key=lambda r: -r.slots):
            place = next((i for i, space in enumerate(free) if space >= row.slots), len(free))
            if place == len(free):
                free.append(capacity)
                packs.append([])
            free[place] -= row.slots
            packs[first + place].append(row)
    if seed is not None:
        generator.shuffle(packs)
    return packs


@dataclass(frozen=True, slots=True)
class Step:
    """The packs of one optimizer step."""

    number: int  # from 1
    epoch: int  # from 0
    packs: list[list[Example]]

    @property
    def asked(self) -> list[int]:
        """Number of guesses at each TTT step."""
        return [sum(counts) for counts in zip(*(row.asked for p in self.packs for row in p), strict=True)]

    @property
    def tokens(self) -> int:
        return sum(row.slots for p in self.packs for row in p)

    def share(self, rank: int, world: int) -> list[tuple[list[Example], bool]]:
        """This rank's packs, each with whether it counts: a rank with fewer packs gets one that does not count."""
        own = [(p, True) for p in self.packs[rank::world]]
        missing = -(-len(self.packs) // world) - len(own)
        shortest = min((row for p in self.packs for row in p), key=lambda row: row.slots)
        return own + [([shortest], False)] * missing


class Schedule:
    """The rows of every step, the same on every rank and in every process."""

    def __init__(
        self,
        rows: list[Example],
        capacity: int,
        packs_per_step: int,
        epochs: int,
        seed: int,
        max_steps: int | None = None,
    ):
        self.steps: list[Step] = []
        self.packs_per_step = packs_per_step
        for epoch in range(epochs):
            if max_steps is not None and len(self.steps) >= max_steps:
                break
            packs = pack_rows(rows, capacity, f"{seed}/{epoch}")
            for start in range(0, len(packs), packs_per_step):
                self.steps.append(Step(len(self.steps) + 1, epoch, packs[start : start + packs_per_step]))
        self.steps = self.steps[:max_steps]
        facts = [capacity, packs_per_step, seed, *((row.entry.row_id, row.supervised, row.slots) for row in rows)]
        self.fingerprint = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def token_counts(rows: list[Example], folder: Path, vocab_size: int) -> Tensor:
    """How often each token id is guessed at step 0: [V] int64. Raises ContractError on an id beyond V."""

    def guessed(row: Example) -> np.ndarray:
        ids = state_reader.token_ids(state_reader.read_header(folder, row.entry), row.entry, vocab_size)
        return np.concatenate([ids[start + 1 : end] for start, end in row.supervised])

    counts = np.zeros(vocab_size, dtype=np.int64)
    with ThreadPoolExecutor(16) as pool:
        for ids in pool.map(guessed, rows):
            np.add.at(counts, ids, 1)
    return torch.from_numpy(counts)


class Reader:
    """Makes packs from files of hidden states, in pinned memory if `pin`."""

    def __init__(
        self,
        folder: Path,
        layer_ids: tuple[int, ...],
        hidden_size: int,
        vocab_size: int,
        steps: int,
        think_end: int | None,
        pin: bool,
        target: str | None = None,
    ):
        self.folder = folder
        self.layer_ids = layer_ids
        self.hidden_size = hidden_size
        self.vocab_size = vocab_size
        self.steps = steps
        self.think_end = think_end  # token id; a row without it is all reasoning; None: the target does not reason
        self.pin = pin
        self.target = target  # expected fingerprint, for files that contain one
        self._verified: set[str] = set()  # rows whose checksum this process has verified

    def read(self, rows: list[Example], counts: bool = True) -> Pack:
        """Raises ContractError when a file differs from the index. Verifies a row's checksum on its first read."""
        for row in rows:
            state_reader.prefetch(self.folder / row.entry.path)
        headers = [state_reader.read_header(self.folder, row.entry) for row in rows]
        for row, header in zip(rows, headers, strict=True):
            self._check(row, header, cast(states.Dtype, headers[0].metadata.get("dtype")))
        total = sum(row.slots for row in rows)
        names = ["hidden_states"] if "hidden_states" in headers[0].spec else ["final", "aux", "aux_scale"]
        buffers = {}
        for name in names:
            dtype, shape = headers[0].spec[name]
            buffers[name] = torch.empty(total, *shape[1:], dtype=dtype, pin_memory=self.pin)
        start = 0
        for row, header in zip(rows, headers, strict=True):
            parts = {name: buffer[start : start + row.slots] for name, buffer in buffers.items()}
            unseen = row.entry.row_id not in self._verified
            state_reader.read_into(self.folder / row.entry.path, header, parts, verify=unseen)
            self._verified.add(row.entry.row_id)
            start += row.slots
        layout = self._layout(rows, headers, counts)
        made = Pack(
            states=buffers.get("hidden_states", buffers.get("final")),
            aux=buffers.get("aux"),
            aux_scale=buffers.get("aux_scale"),
            **layout,
        )
        return made.map(lambda t: t if t.is_pinned() else t.pin_memory()) if self.pin else made

    def _check(self, row: Example, header: states.Header, dtype: states.Dtype) -> None:
        """Check a file against its row; all files of a pack have the same `dtype`. Raises ContractError."""
        ids = state_reader.token_ids(header, row.entry, self.vocab_size, self.think_end)
        try:
            shape = self.layer_ids, self.hidden_size, dtype
            states.check_header(header, row.entry.row_id, ids, *shape, target=self.target)
        except RowError as error:
            raise ContractError(f"{row.entry.path}: {error.detail}; {state_reader.REMEDY}") from None

    def _layout(self, rows: list[Example], headers: list[states.Header], counts: bool) -> dict:
        """A pack's fields except the states."""
        parts: dict[str, list[np.ndarray]] = {
            name: [] for name in ("input_ids", "positions", "anchors", "labels", "depth", "region")
        }
        cu_q, cu_k = [0], [0]
        for row, header in zip(rows, headers, strict=True):
            ids = np.append(header.token_ids, 0)  # the last slot's label may be past the row, but has no loss
            anchors = np.arange(row.first, row.slots)
            depth = depths(row.supervised, len(header.token_ids), self.steps)[anchors]
            parts["input_ids"].append(ids[1 : row.slots + 1])
            parts["positions"].append(np.arange(row.slots))
            parts["anchors"].append(anchors + cu_k[-1])
            parts["labels"].append(ids[np.minimum(anchors + 2, len(ids) - 1)])
            parts["depth"].append(depth if counts else np.zeros_like(depth))
            end = row.entry.think_end
            if end is None:
                end = -1 if self.think_end is None else len(ids)
            parts["region"].append(np.where(anchors + 2 <= end, REASONING, ANSWER))
            cu_q.append(cu_q[-1] + len(anchors))
            cu_k.append(cu_k[-1] + row.slots)
        documents = Documents(
            torch.tensor(cu_q, dtype=torch.int32),
            torch.tensor(cu_k, dtype=torch.int32),
            max(row.slots - row.first for row in rows),
            max(row.slots for row in rows),
        )
        return {n: torch.from_numpy(np.concatenate(p)) for n, p in parts.items()} | {"documents": documents}


class Loader:
    """Packs on their device, read ahead by threads: at most `workers + 1` in addition to the one in use."""

    def __init__(self, reader: Reader, device: torch.device, workers: int):
        self.reader = reader
        self.device = device
        self.workers = workers
        self.waited = 0.0  # seconds that the consumer waited for data
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def packs(self, order: Iterable[tuple[list[Example], bool]]) -> Generator[Pack]:
        if not self.workers:
            for rows, counts in order:
                started = time.perf_counter()
                made = self._receive(self.reader.read(rows, counts))
                self.waited += time.perf_counter() - started
                yield made
            return
        pool = ThreadPoolExecutor(self.workers, thread_name_prefix="loader")
        pending: deque[Future] = deque()
        source = iter(order)
        try:
            while True:
                while len(pending) <= self.workers and (item := next(source, None)) is not None:
                    pending.append(pool.submit(self._load, *item))
                if not pending:
                    return
                started = time.perf_counter()
                made, copied = pending.popleft().result()
                self.waited += time.perf_counter() - started
                yield self._take(made, copied)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _load(self, rows: list[Example], counts: bool) -> tuple[Pack, torch.cuda.Event | None]:
        made = self.reader.read(rows, counts)
        if self._stream is None:
            return made, None
        with torch.cuda.stream(self._stream):
            made = self._receive(made)
            return made, self._stream.record_event()

    def _receive(self, made: Pack) -> Pack:
        return made.map(lambda t: t.to(self.device, non_blocking=True))

    def _take(self, made: Pack, copied: torch.cuda.Event | None) -> Pack:
        """Make the computing stream wait for a pack that the copying stream transfers."""
        if copied is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(copied)
            for tensor in made.tensors().values():
                tensor.record_stream(current)
        return made
