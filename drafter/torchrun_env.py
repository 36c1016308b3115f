"""What torchrun says of this process. RANK and the like of another program, or of a shell, mean nothing here."""

import os

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE")
MARK = "TORCHELASTIC_RUN_ID"  # set by torchrun alone


def get(variable: str, default: int) -> int:
    """A variable of torchrun's, or `default` in a process that torchrun did not start."""
    return int(os.environ.get(variable, default)) if MARK in os.environ else default
