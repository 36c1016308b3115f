"""The environment variables that torchrun sets. RANK and others set by another program or a shell are ignored."""

import os

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE")
MARK = "TORCHELASTIC_RUN_ID"  # only torchrun sets it


def get(variable: str, default: int) -> int:
    """A variable that torchrun set, or `default` in a process that torchrun did not start."""
    return int(os.environ.get(variable, default)) if MARK in os.environ else default
