"""GPU memory as nvidia-smi reports it. A figure that it does not give is unknown: neither free nor in use."""

import logging
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from drafter import process, text
from drafter.errors import ResumableError, StageError

log = logging.getLogger("drafter")

DRIVER = Path("/dev/nvidiactl")  # exists while NVIDIA's driver is loaded
ANSWER_SECONDS = 30  # nvidia-smi blocks while the driver hangs
REPORT_SECONDS = 10  # between two log lines while waiting
MIB = 2**20
FREE_MIB = 2048  # driver, display and idle contexts: below this a GPU counts as free
# With MIG, and for GPUs that share the host's memory.
NO_FIGURE = ("[N/A]", "N/A", "[Not Supported]", "[Insufficient Permissions]")


@dataclass(frozen=True)
class Memory:
    """One answer of nvidia-smi. A machine without GPUs has no `gpus` and nothing `unknown`."""

    used: dict[int, int]  # GPU index -> MiB in use
    no_figure: frozenset[int] = frozenset()  # GPUs for which nvidia-smi never gives a figure
    unknown: str = ""  # why nvidia-smi gave no answer; the other fields are then empty
    lasting: bool = False  # asking again will not help

    @property
    def gpus(self) -> frozenset[int]:
        """Indices of this machine's GPUs."""
        return self.no_figure.union(self.used)


def query_memory() -> Memory:
    """Ask nvidia-smi once, for at most ANSWER_SECONDS. Raises nothing: a failure is reported as `unknown`."""
    try:
        rows = _query("--query-gpu=index,memory.used")
    except process.NoProgram as error:
        return Memory({}, unknown=str(error), lasting=True) if DRIVER.exists() else Memory({})
    except StageError as error:
        return Memory({}, unknown=str(error))
    used: dict[int, int] = {}
    no_figure: set[int] = set()
    for row in rows:
        index, figure = (row + ["", ""])[:2]
        if not index.isdecimal() or not (figure.isdecimal() or figure in NO_FIGURE):
            return Memory({}, unknown=f"nvidia-smi gave {', '.join(row)[:100]!r} instead of a GPU's memory")
        if figure.isdecimal():
            used[int(index)] = int(figure)
        else:
            no_figure.add(int(index))
    return Memory(used, frozenset(no_figure)) if rows else Memory({}, unknown="nvidia-smi lists no GPU")


def names() -> list[str]:
    """The name of each GPU; empty when there is none or nvidia-smi does not answer."""
    try:
        return [row[0] for row in _query("--query-gpu=name")]
    except StageError:
        return []


def driver_version() -> str | None:
    """Of the NVIDIA driver; None without one, and where nvidia-smi does not answer."""
    try:
        rows = _query("--query-gpu=driver_version")
    except StageError:
        return None
    return rows[0][0] if rows and rows[0][0].partition(".")[0].isdecimal() else None


def _query(what: str) -> list[list[str]]:
    """The cells of nvidia-smi's output. Raises process.NoProgram, ResumableError."""
    done = process.run(["nvidia-smi", what, "--format=csv,noheader,nounits"], ANSWER_SECONDS)
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines() or ["no reason given"]
        raise ResumableError(f"nvidia-smi failed with exit code {done.returncode}: {said[0][:200]}")
    return [[cell.strip() for cell in row.split(",")] for row in done.stdout.splitlines() if row.strip()]


def not_loaded(gpus: Iterable[int], model: Path) -> str | None:
    """Why these GPUs do not hold the model yet, or None: each must hold half of its share of the weights' bytes.

    None also where the memory is unknown: the completion that follows then decides.
    """
    gpus = tuple(gpus)
    if not gpus:
        return None
    found = query_memory()
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors")) / MIB
    share = weights / len(gpus)
    empty = [index for index in gpus if found.used.get(index, share) < share / 2]
    if not empty:
        return None
    return f"GPU {', '.join(map(str, empty))} does not hold its {text.size(share * MIB)} of the model yet"


def wait_free(gpus: Iterable[int], seconds: float) -> None:
    """Wait until the memory of these GPUs is free, at most `seconds`.

    Raises ResumableError naming the processes that still hold it, or when nvidia-smi fails for that long. Where the
    memory can never be known (no nvidia-smi, a GPU without a figure) it logs that and does not wait.
    """
    asked = frozenset(gpus)
    deadline = time.monotonic() + seconds
    spoke = -math.inf
    while asked:
        found = query_memory()
        held = {index: mib for index, mib in found.used.items() if index in asked and mib > FREE_MIB}
        if not held and (found.lasting or not found.unknown):
            if silent := found.unknown or ", ".join(f"GPU {index}" for index in sorted(asked & found.no_figure)):
                log.info("GPU memory is unknown, not waiting for it: %s", silent)
            return
        amounts = ", ".join(f"GPU {index}: {text.size(mib * MIB)}" for index, mib in held.items()) or found.unknown
        now = time.monotonic()
        if now > deadline:
            if not held:
                raise ResumableError(f"GPU memory is still unknown after {seconds:.0f} s: {amounts}")
            raise ResumableError(f"GPU memory is not free after {seconds:.0f} s ({amounts}), held by {holders()}")
        if now - spoke >= REPORT_SECONDS:
            log.info("waiting for GPU memory, at most %.0f s more (%s)", deadline - now, amounts)
            spoke = now
        time.sleep(1)


def holders() -> str:
    """The compute processes on all GPUs, for a message."""
    try:
        rows = _query("--query-compute-apps=pid,process_name,used_memory")
    except StageError as error:
        return f"unknown processes ({error})"
    # A process name may contain commas.
    named = [f"process {pid} {', '.join(name)} ({mib} MiB)" for pid, *name, mib in (row for row in rows if row[1:])]
    return ", ".join(named) or "no process that nvidia-smi lists"
