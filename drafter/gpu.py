"""What nvidia-smi says about memory; on a machine without it there is nothing to wait for."""

import logging
import math
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

from drafter.errors import ResumableError

log = logging.getLogger("drafter")

REPORT_SECONDS = 10  # between two log lines of a wait
FREE_MIB = 2048  # driver, display and idle contexts: below this a GPU counts as free


def memory_used() -> dict[int, int]:
    """GPU index -> MiB in use."""
    return {int(index): int(used) for index, used in _query("--query-gpu=index,memory.used")}


def names() -> list[str]:
    """The name of each GPU; empty without one, and where nvidia-smi does not answer."""
    return [row[0] for row in _query("--query-gpu=name")]


def _query(what: str) -> list[list[str]]:
    try:
        line = ["nvidia-smi", what, "--format=csv,noheader,nounits"]
        done = subprocess.run(line, capture_output=True, text=True, timeout=30)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return []
    if done.returncode:
        return []
    return [[cell.strip() for cell in row.split(",")] for row in done.stdout.splitlines() if row.strip()]


def not_loaded(gpus: Iterable[int], model: Path) -> str | None:
    """Why these GPUs do not hold the model yet: each must carry half its share of the weights' bytes."""
    gpus = tuple(gpus)
    if not gpus or not (used := memory_used()):
        return None
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors")) / 2**20
    share = weights / len(gpus)
    empty = [index for index in gpus if used.get(index, 0) < share / 2]
    if not empty:
        return None
    return f"GPU {', '.join(map(str, empty))} does not hold its {share / 1024:.1f} GiB of the model yet"


def wait_free(gpus: Iterable[int], seconds: float) -> None:
    """Raises ResumableError, naming the processes that hold the memory, when it is not free in time."""
    gpus = tuple(gpus)
    deadline = time.monotonic() + seconds
    spoke = -math.inf
    while held := {index: mib for index, mib in memory_used().items() if index in gpus and mib > FREE_MIB}:
        now = time.monotonic()
        amounts = ", ".join(f"GPU {index}: {mib / 1024:.1f} GiB" for index, mib in held.items())
        if now > deadline:
            raise ResumableError(f"GPU memory is not free after {seconds:.0f} s ({amounts}), held by {holders()}")
        if now - spoke >= REPORT_SECONDS:
            log.info("waiting for GPU memory, at most %.0f s more (%s)", deadline - now, amounts)
            spoke = now
        time.sleep(1)


def holders() -> str:
    """The compute processes on all GPUs, for a person."""
    rows = _query("--query-compute-apps=pid,process_name,used_memory")
    return ", ".join(f"process {pid} {name} ({mib} MiB)" for pid, name, mib in rows) or "no process nvidia-smi knows"
