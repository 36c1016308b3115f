"""Read speed of this machine's disk without the page cache: 04 reads every state once per epoch."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from drafter import files
from drafter.config import Config

SAMPLE_BYTES = 2 * files.GIB  # at most
SAMPLE_SECONDS = 2
READERS = 4  # as train.loader_workers
CHUNK = 2**24
LEAST_BYTES = 4 * files.GIB  # a smaller file would mostly be read from memory


def bytes_per_second(config: Config) -> float | None:
    """Read speed of the model's largest file; None unless it is on the disk of the hidden states."""
    folder = config.run.dir
    while not folder.exists():
        folder = folder.parent
    try:
        shards = sorted(config.target.model.glob("*.safetensors"), key=lambda path: path.stat().st_size)
        if not shards or shards[-1].stat().st_dev != folder.stat().st_dev:
            return None
        return measure(shards[-1])
    except OSError:
        return None


@cache
def measure(path: Path, least_bytes: int = LEAST_BYTES) -> float | None:
    """Bytes per second of a file, read by several threads; None for a file smaller than `least_bytes`.

    The sample is first dropped from the page cache. Raises OSError.
    """
    whole = path.stat().st_size
    if whole < least_bytes:
        return None
    sample = min(whole, SAMPLE_BYTES) // CHUNK * CHUNK
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, sample, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(descriptor, 0, sample, os.POSIX_FADV_RANDOM)
        started = time.monotonic()

        def read(offset: int) -> int:
            late = time.monotonic() - started > SAMPLE_SECONDS
            return 0 if late else len(os.pread(descriptor, CHUNK, offset))

        with ThreadPoolExecutor(READERS) as readers:
            count = sum(readers.map(read, range(0, sample, CHUNK)))
        return count / max(time.monotonic() - started, 1e-6)
    finally:
        os.close(descriptor)
