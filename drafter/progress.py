"""Progress of a stage: a bar or a line for the user, and a file for `status` and the report."""

import contextlib
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

log = logging.getLogger("drafter")

RECORDS = "progress.jsonl"  # in the stage folder


class Progress:
    """A tqdm bar on a terminal, elsewhere a plain line every 30 s; also every 30 s a line in the file `record`."""

    def __init__(
        self,
        total: int,
        unit: str,
        done: int = 0,
        every: float = 30.0,
        at_once: int = 0,
        record: Path | None = None,
    ):
        """The rate is measured from the first completed item, so warm-up does not count.

        There is no ETA until `at_once` items are done: with that many in flight the short ones finish first.
        """
        self.total, self.unit, self.done, self.every, self.at_once = total, unit, done, every, at_once
        self._file = record
        self._began = done
        self._first: tuple[int, float] | None = None  # done, at what time
        self._spoke = time.monotonic()
        self._bar = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, initial=done, unit=unit, dynamic_ncols=True)

    def skip(self, count: int = 1) -> None:
        """Count items as done without counting them in the rate."""
        self.done += count
        if self._bar is not None:
            self._bar.update(count)

    def advance(self, count: int = 1, **facts: Any) -> None:
        """Count items as done. `facts` are shown with them: token rate, requests in flight, failures by reason."""
        self.done += count
        self._first = self._first or (self.done, time.monotonic())
        if self._bar is not None:
            self._bar.set_postfix(facts, refresh=False)
            self._bar.update(count)
        self.remind(**facts)

    def remind(self, **facts: Any) -> None:
        """Log and record the progress if `every` seconds have passed in silence, also when nothing was completed."""
        if time.monotonic() - self._spoke >= self.every:
            self._spoke = time.monotonic()
            self._record()
            if self._bar is None:
                log.info("%s", self.line(**facts))

    def _record(self) -> None:
        """Append a line to `record`; the stage goes on if that fails."""
        if self._file:
            line = json.dumps(
                {"at": round(time.time(), 1), "done": self.done, "total": self.total, "unit": self.unit}
            )
            with contextlib.suppress(OSError), open(self._file, "a") as file:
                file.write(line + "\n")

    def line(self, **facts: Any) -> str:
        since, at = self._first or (self.done, time.monotonic())
        rate = (self.done - since) / max(time.monotonic() - at, 1e-9)
        known = rate and self.done - self._began > self.at_once
        eta = f"{(self.total - self.done) / rate / 60:.1f} min" if known else "unknown"
        extra = "".join(f", {key.replace('_', ' ')} {value}" for key, value in facts.items())
        return f"{self.done}/{self.total} {self.unit}, {rate:.2f} {self.unit}/s, ETA {eta}{extra}"

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
