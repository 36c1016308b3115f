"""Which difference in acceptance length 06 can show, from the intervals of what it measured before."""

import math

from drafter import checked, run_files
from drafter.config import Config
from drafter.intervals import VERDICT_CONFIDENCE
from drafter.pipeline.rates import finished_manifests


def smallest_difference(config: Config, prompts: int) -> tuple[float, str] | None:
    """The half-width that a difference over so many prompts would have, and the run it follows from.

    Intervals are as wide as 1 / sqrt(prompts). None before 06 has compared two drafters of this target.
    """
    for made in finished_manifests(config, "06_acceptance"):
        report = checked.read_or_empty(made["folder"] / run_files.ACCEPTANCE, run_files.Acceptance)
        for each in report.get("comparisons", ()):
            low, high, count = each.get("low"), each.get("high"), each.get("prompts")
            whole = each.get("part") == "all" and all(isinstance(value, int | float) for value in (low, high, count))
            if whole and count > 1 and high > low:
                return (high - low) / 2 * math.sqrt(count / prompts), made["folder"].parent.name
    return None


def line(config: Config, prompts: int) -> str:
    """The plan's line about 06."""
    level = f"{VERDICT_CONFIDENCE:.0%}"
    if found := smallest_difference(config, prompts):
        return (
            f"  06: {prompts} prompts show differences in acceptance length from {found[0]:.2f} at {level}, by the "
            f"intervals of run {found[1]}"
        )
    return (
        f"  06: which difference in acceptance length {prompts} prompts show at {level} is unknown until two "
        "drafters of this target were compared here"
    )
