"""Shared fixtures: the default model, and one real vLLM server a configuration for the whole test session."""

import contextlib
import json
import random
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from drafter import config
from drafter.serve import roles
from drafter.target import default_model
from tests import tiny_models

CPU_CONFIG = config.ROOT / "configs/smollm2_cpu.yaml"


@dataclass(frozen=True)
class Served:
    """A running role. `overrides` point another config at it, as a server that is not its own to stop."""

    role: config.Role
    config: config.Config

    @property
    def url(self) -> str:
        return getattr(self.config.servers, self.role).url

    @property
    def overrides(self) -> list[str]:
        return [f"servers.{self.role}.url={self.url}", f"servers.{self.role}.kind=external"]


def free_port() -> int:
    """Below the range the kernel gives to outgoing connections, so that it stays free between two starts."""
    while True:
        port = random.randrange(15000, 30000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def serve(role: config.Role, folder: Path, overrides: list[str], path: Path = CPU_CONFIG) -> Iterator[Served]:
    """Serve a role of a config on a free port, its run below `folder`."""
    url = f"http://127.0.0.1:{free_port()}"
    run_config = config.load(path, [*overrides, f"run.dir={folder}", f"servers.{role}.url={url}"])
    with roles.serving(run_config, role):
        yield Served(role, run_config)


@pytest.fixture(scope="session")
def model() -> Path:
    """SmolLM2-135M-Instruct as a plain bf16 folder."""
    return default_model.ensure()


@pytest.fixture(scope="session")
def generate_server(model, tmp_path_factory) -> Iterator[Served]:
    """The default config's role `generate`."""
    with serve("generate", tmp_path_factory.mktemp("generate"), ["run.name=served"]) as served:
        yield served


@pytest.fixture(scope="session")
def extract_server(model, tmp_path_factory) -> Iterator[Served]:
    """The default config's role `extract`; it writes below `served.config.stage_dir("02_hidden_states")`."""
    with serve("extract", tmp_path_factory.mktemp("extract"), ["run.name=served"]) as served:
        yield served


SERVED_TOKENS = ("<|im_end|>", "<think>", "</think>", "<|tool_calls_section_begin|>")


@pytest.fixture(scope="session")
def tiny_kimi_server(tmp_path_factory) -> Iterator[Served]:
    """A nested Kimi-K2.5 of random weights that thinks, behind the reasoning parser; role `generate`."""
    folder = tmp_path_factory.mktemp("tiny_kimi")
    target = {
        "model": str(tiny_models.make_tiny_kimi(folder / "model")),
        "served_name": "tiny-kimi",
        "layer_ids": list(tiny_models.LAYER_IDS),
        "max_seq_len": 512,
        "prompt_suffix": [tiny_models.THINK],
        "think_end": tiny_models.THINK_END,
        "special_tokens": {text: tiny_models.TOKEN_IDS[text] for text in SERVED_TOKENS},
    }
    flags = {"language-model-only": True, "reasoning-parser": "kimi_k2"}
    overrides = [f"target={json.dumps(target)}"]
    overrides += [f"servers.generate.args.{flag}={json.dumps(value)}" for flag, value in flags.items()]
    with serve("generate", folder, overrides) as served:
        yield served
