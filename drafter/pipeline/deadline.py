"""The moment when 01b stops generating. HH:MM is resolved once per run and recorded in pipeline.json.

A later call with the same HH:MM means the recorded moment, not the same hour of the next day: always if 01b ended at
that deadline, else until CONTINUED_SECONDS after it. Another time, or one with a date, is a new deadline.
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
        """With its date, so that 01b does not resolve it again."""
        return self.moment.astimezone().isoformat(timespec="seconds")


def resolve(config: Config, given: str | None, now: datetime) -> Deadline | None:
    """The deadline that `given` means for this run at `now` (local time). Raises ConfigError for an invalid time."""
    if given is None:
        return None
    noted = checked.read_or_empty(config.run_dir / run_files.PIPELINE, run_files.State).get("deadline")
    if noted and noted["given"] == given:
        ended = ended_at(read_manifest(config.stage_dir("01b_synthetic")) or {}) == noted["at"]
        if ended or now.timestamp() < noted["at"] + CONTINUED_SECONDS:
            return Deadline(given, noted["at"])
    return Deadline(given, next_time(given, now).timestamp())


def ended_at(manifest: dict[str, Any]) -> float | None:
    """Timestamp of the deadline that ended 01b with requests left, else None. `manifest` is 01b's."""
    return manifest.get("facts", {}).get("deadline") if manifest.get("status") == "partial" else None


def is_settled(manifest: dict[str, Any] | None, requests: int, wanted: Deadline | None) -> bool:
    """Whether 01b ended at its deadline and this call asks for no more (a later deadline, more `requests`)."""
    manifest = manifest or {}
    ended = ended_at(manifest)
    return (
        ended is not None
        and requests <= manifest["facts"].get("requests", 0)
        and (wanted is None or wanted.at <= ended)
    )


def left_undone(manifest: dict[str, Any] | None, plan: dict[str, Any], wanted: Deadline | None) -> str:
    """A message about requests that a deadline left and this call does not send; empty without any.

    `plan` is the summary of 01b's dry run. Changed prompts are sent in any case. If it does not know the number of
    requests (a hub dataset), none count as new.
    """
    manifest = manifest or {}
    ended = ended_at(manifest)
    settled = is_settled(manifest, plan.get("requests", 0), wanted)
    if ended is None or not settled or not plan["pending"] or plan.get("stale"):
        return ""
    left, at = manifest.get("pending", 0), datetime.fromtimestamp(ended)
    return f"{left:,} requests left by the deadline {at:%a %H:%M}; a later --deadline sends them"
