"""Locks that a real process holds while a test looks on."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from drafter import config

HOLDER = """
import sys
from pathlib import Path
from drafter import locks
folder = Path(sys.argv[2])
hold = locks.reading(folder)
if sys.argv[1] == "working":
    hold = locks.locked(folder, sys.argv[3], map(Path, sys.argv[4:]))
with hold:
    print("held", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def held(how: str, folder: Path, who: str = "", reads: tuple[Path, ...] = ()) -> Iterator[subprocess.Popen]:
    """Another process is `working` in a folder or `reading` it as long as the block lasts."""
    line = [sys.executable, "-c", HOLDER, how, str(folder), who, *map(str, reads)]
    with subprocess.Popen(line, cwd=config.ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        yield holder
        holder.stdin.close()
