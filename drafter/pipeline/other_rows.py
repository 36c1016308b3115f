"""Whether 01b or 02 is about to make other rows than those that 04 was begun with.

Stage 04 refuses other rows itself, but only after 01b and 02 have spent hours on them.
"""

from typing import Any

from drafter.config import Config, StageName
from drafter.stage import read_manifest

TRAIN: StageName = "04_train"


def refused(config: Config, planned: dict[str, Any], limit: int | None) -> str | None:
    """Why 04 would refuse the rows that `planned`, a dry run of 01b or 02, announces; None when it would not.

    The rows are compared by their `row_set`; None also when one of the two is unknown (the manifest of an earlier
    version has none). With a limit 02 may have taken other finished rows than 01b counts first, so a dry run of 01b
    is compared only if it will make new rows.
    """
    if {TRAIN, "02_hidden_states"} & config.run.take.keys() or "row_set" not in planned:
        return None
    if limit is not None and planned["stage"] == "01b_synthetic" and not planned["pending"]:
        return None
    folder = config.stage_dir(TRAIN)
    given = (read_manifest(folder) or {"facts": {}})["facts"].get("row_set")
    if given in (None, planned["row_set"]):
        return None
    from drafter.train import checkpoint  # needs torch, which a finished run does not

    if not checkpoint.complete_steps(folder):
        return None
    return (
        f"{TRAIN} was begun with other rows than these prompts give (or with another --limit); use another run.name, "
        f"or delete {folder} to train from the start"
    )
