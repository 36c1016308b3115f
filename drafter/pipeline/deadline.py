"""The moment when 01b stops generating. HH:MM becomes a moment once a run, which pipeline.json records.

A call that continues a run with the same HH:MM means the recorded moment, not the same hour of the next day: for as
long as 01b ended by it, else until CONTINUED_SECONDS after it. Another time, or one with its date, is a new deadline.
"""

from datetime import datetime
from typing import Any, NamedTuple

from drafter import checked, run_files
from drafter.cli import next_time
from drafter.config import Config
from drafter.stage import read_manifest

CONTINUED_SECONDS = 12 * 3600


class Deadline(NamedTuple):
    given: str  # as on the command line
    at: float  # timestamp

    @property
    def moment(self) -> datetime:
        return datetime.fromtimestamp(self.at)

    @property
    def argument(self) -> str:
        """For the command line of 01b, which must not resolve it again."""
        return self.moment.astimezone().isoformat(timespec="seconds")


def resolve(config: Config, given: str | None, now: datetime) -> Deadline | None:
    """The deadline that `given` means for this run at `now` (local time). Raises ConfigError for what is no time."""
    if given is None:
        return None
    noted = checked.read_or_empty(config.run_dir / "pipeline.json", run_files.State).get("deadline")
    if noted and noted["given"] == given:
        ended = ended_at(read_manifest(config.stage_dir("01b_synthetic")) or {}) == noted["at"]
        if ended or now.timestamp() < noted["at"] + CONTINUED_SECONDS:
            return Deadline(given, noted["at"])
    return Deadline(given, next_time(given, now).timestamp())


def ended_at(manifest: dict[str, Any]) -> float | None:
    """The deadline, as a timestamp, that ended 01b with requests left; None where none did. `manifest` is 01b's."""
    return manifest.get("facts", {}).get("deadline") if manifest.get("status") == "partial" else None


def is_settled(manifest: dict[str, Any] | None, requests: int, wanted: Deadline | None) -> bool:
    """Whether 01b ended by its deadline and no more is asked of it now, of so many `requests`.

    More is asked by a later deadline, and by more requests than it had then.
    """
    ended = ended_at(manifest or {})
    return (
        ended is not None
        and requests <= manifest["facts"].get("requests", 0)
        and (wanted is None or wanted.at <= ended)
    )


def left_undone(manifest: dict[str, Any] | None, plan: dict[str, Any], wanted: Deadline | None) -> str:
    """What to show of the requests that a deadline left and this call does not ask for; empty without any.

    `plan` is what 01b's own dry run says: prompts that have changed since are asked for. Where it does not know the
    requests, the hub being asked for them, none are new.
    """
    if not plan["pending"] or plan.get("stale") or not is_settled(manifest, plan.get("requests", 0), wanted):
        return ""
    ended, left = datetime.fromtimestamp(ended_at(manifest)), manifest.get("pending", 0)
    return f"{left:,} requests left by the deadline {ended:%a %H:%M}; a later --deadline sends them"
