"""Training goes on with the rows that it was begun with: whether the stages before it are about to make others.

Stage 04 refuses those itself, but only once 01b and 02 have spent hours on them.
"""

from typing import Any

from drafter.config import Config, StageName
from drafter.stage import read_manifest

TRAIN: StageName = "04_train"


def refused(config: Config, planned: dict[str, Any], limit: int | None) -> str | None:
    """Why 04 would not go on after what `planned`, the plan of 01b or 02, says it will make; None where it would.

    The rows are compared by their `row_set`. None also where one of the two is unknown: a manifest of an earlier
    version records none. Of a call with a limit, 02 may have taken other rows of those that are there than 01b
    counts first, so a plan of 01b is judged only when it asks for new ones.
    """
    if {TRAIN, "02_hidden_states"} & config.run.take.keys() or "row_set" not in planned:
        return None
    if limit is not None and planned["stage"] == "01b_synthetic" and not planned["pending"]:
        return None
    folder = config.stage_dir(TRAIN)
    given = (read_manifest(folder) or {"facts": {}})["facts"].get("row_set")
    if given in (None, planned["row_set"]):
        return None
    from drafter.train import checkpoint  # needs torch, which a finished run does without

    if not checkpoint.complete_steps(folder):
        return None
    return (
        f"{TRAIN} was begun with other rows than these prompts give; use another run.name, or remove {folder} to "
        "train anew"
    )
