"""The process that checks and writes hidden states.

The connector starts it: `python -m drafter.extract.writer ARENA PIPE BYTES THREADS ENGINE`.

The connector copies states into an arena, an in-memory file that both processes map, and sends what lies where.
Threads in the engine's process would compete with the engine for Python's lock, which costs both more than the work
itself (docs/measurements.md). A second process pays off above about 140,000 tokens a second. It imports only NumPy.

The process ignores signals to its group and ends when the engine sends None. If the engine dies, it starts no further
file and ends, so a client that sees the engine's lock released need not wait for more files.
"""

import contextlib
import errno
import json
import math
import mmap
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from drafter import process
from drafter.errors import RowError
from drafter.extract import state_file

PAGE = 4096


@dataclass(frozen=True, slots=True)
class File:
    """A file to write. `arrays`: NumPy dtype, shape and offset in the arena of each, in file order."""

    part: Path
    token_ids: np.ndarray  # [T] int64
    arrays: dict[str, tuple[str, tuple[int, ...], int]]
    facts: dict[str, str]


@dataclass(slots=True, eq=False)
class Region:
    """A part of the arena; `take` hands out its bytes in order."""

    start: int
    end: int
    given: int = 0
    written: bool = False

    def take(self, size: int) -> int:
        """Offset in the arena of the next `size` bytes. Raises ValueError when the region is used up."""
        offset = self.start + self.given
        self.given += -(-size // 64) * 64
        if offset + size > self.end:
            raise ValueError(f"{self.given} bytes requested from a region of {self.end - self.start}")
        return offset


class Writer:
    """The engine's side: an arena used as a ring buffer, and the process that empties it."""

    def __init__(self, size: int, threads: int):
        self.size = -(-size // PAGE) * PAGE
        fd = os.memfd_create("hidden-states")
        os.ftruncate(fd, self.size)
        self.arena = mmap.mmap(fd, self.size)
        self._pipe, theirs = Pipe()
        self._process = start_writer(fd, theirs, self.size, threads)
        os.close(fd)
        theirs.close()
        self._regions: deque[Region] = deque()
        self._sent: dict[int, Region] = {}  # by their start
        self._changed = threading.Lock()
        self._copies: queue.SimpleQueue = queue.SimpleQueue()
        self._dead = False
        for loop in (self._send, self._receive):
            threading.Thread(target=loop, daemon=True).start()

    @property
    def queued(self) -> int:
        """Bytes waiting for the disk."""
        with self._changed:
            return sum(region.end - region.start for region in self._regions if not region.written)

    def check(self) -> None:
        """Raises RuntimeError once the process is dead."""
        if self._dead:
            raise RuntimeError("the process that writes hidden states has died")

    def reserve(self, size: int) -> Region | None:
        """Space in the arena, or None while it is too full."""
        size = -(-size // PAGE) * PAGE
        with self._changed:
            start = self._place(size)
            if start is None:
                return None
            self._regions.append(Region(start, start + size))
            return self._regions[-1]

    def _place(self, size: int) -> int | None:
        if not self._regions:
            return 0 if size <= self.size else None  # from its start, so that pages never needed are never allocated
        first, last = self._regions[0].start, self._regions[-1].end
        if last <= first:  # wrapped: used are `first` to the arena's end and its start to `last`
            return last if size <= first - last else None
        if size <= self.size - last:
            return last
        return 0 if size <= first else None

    def submit(self, region: Region, files: list[File], copied: Callable[[], None]) -> None:
        """Write the files after `copied()` returns (it blocks); then the region is free again."""
        self._copies.put((region, files, copied))

    def close(self) -> None:
        """Wait until every file is written."""
        self._copies.put(None)
        self._process.wait()

    def _send(self) -> None:
        with contextlib.suppress(OSError):  # the process died, which the receiving thread notices
            try:
                while (job := self._copies.get()) is not None:
                    region, files, copied = job
                    copied()
                    self._sent[region.start] = region
                    self._pipe.send((region.start, files))
            finally:  # also after a failed copy, which ends the engine
                self._pipe.send(None)

    def _receive(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                region = self._sent.pop(self._pipe.recv())
                with self._changed:
                    region.written = True
                    while self._regions and self._regions[0].written:
                        self._regions.popleft()
        self._dead = True


def start_writer(arena: int, pipe: Connection, size: int, threads: int) -> subprocess.Popen:
    numbers = map(str, (arena, pipe.fileno(), size, threads, os.getpid()))
    return subprocess.Popen(
        [sys.executable, "-m", "drafter.extract.writer", *numbers],
        env=os.environ | process.import_path(),
        stdin=subprocess.DEVNULL,
        pass_fds=(arena, pipe.fileno()),
    )


def write_jobs(arena: mmap.mmap, pipe: Connection, threads: int, engine: int) -> None:
    """Write the files that the pipe sends until it sends None. Raises EOFError when the engine has died."""
    open_files: Counter[int] = Counter()
    counting = threading.Lock()

    def one(region: int, file: File) -> None:
        try:
            if os.getppid() == engine:  # files of a dead engine may still be in the pipe
                write_file(arena, file)
        finally:  # free the region's memory whatever happened
            with counting:
                open_files[region] -= 1
                if not open_files[region]:
                    pipe.send(region)

    with ThreadPoolExecutor(threads) as pool:
        while (job := pipe.recv()) is not None:
            region, files = job
            with counting:
                open_files[region] = len(files)
            for file in files:
                pool.submit(one, region, file)


def write_file(arena: mmap.mmap, file: File) -> None:
    """Check the arrays, write them under a temporary name and rename; on failure write the reason to `.error`."""
    own = file.part.with_suffix(".writing")
    try:
        arrays = {"token_ids": file.token_ids} | {
            name: np.frombuffer(arena, dtype, math.prod(shape), offset).reshape(shape)
            for name, (dtype, shape, offset) in file.arrays.items()
        }
        state_file.check_arrays(arrays)
        file.part.parent.mkdir(parents=True, exist_ok=True)
        state_file.write_arrays(own, arrays, file.facts)
        os.rename(own, file.part)
    except RowError as error:
        _report(file.part, {"reason": error.reason, "detail": error.detail})
    except OSError as error:
        with contextlib.suppress(OSError):  # fails too if the file system became read-only
            own.unlink(missing_ok=True)
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        _report(file.part, {"reason": "disk_full" if full else "failed", "detail": str(error)})
    except Exception as error:  # an exception in a thread would be lost
        _report(file.part, {"reason": "failed", "detail": repr(error)})


def _report(part: Path, reason: dict) -> None:
    """Best effort: on a full disk the file may stay empty, and the client has a time limit anyway."""
    with contextlib.suppress(OSError):  # the log may be on the same full disk
        print(f"no hidden states at {part}: {reason}", file=sys.stderr, flush=True)
    own = part.with_suffix(".writing")
    with contextlib.suppress(OSError):
        part.parent.mkdir(parents=True, exist_ok=True)
        own.write_text(json.dumps(reason))
    with contextlib.suppress(OSError):
        os.rename(own, part.with_suffix(".error"))


def main() -> None:
    arena, pipe, size, threads, engine = map(int, sys.argv[1:])
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        write_jobs(mmap.mmap(arena, size), Connection(pipe), threads, engine)
    except (EOFError, OSError):
        os._exit(1)


if __name__ == "__main__":
    main()
