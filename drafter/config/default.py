"""The config of a call that names none: the same for the pipeline, every script and every tool on one machine."""

from pathlib import Path

from drafter import gpu
from drafter.config import ROOT
from drafter.errors import ConfigError


def default_config() -> Path:
    """Raises ConfigError where a loaded driver does not list its GPUs."""
    found = gpu.query_memory()
    if found.unknown and gpu.DRIVER.exists():
        raise ConfigError(
            f"{found.unknown}, so whether this machine has a GPU is unknown: name the config, "
            "configs/smollm2_gpu.yaml or configs/smollm2_cpu.yaml"
        )
    return ROOT / "configs" / ("smollm2_gpu.yaml" if found.gpus else "smollm2_cpu.yaml")
