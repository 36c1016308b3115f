"""Whether the files of the extract role's systemd unit name the layers that the config needs, and let it start."""

import json
import re
from collections.abc import Iterator

from drafter.config import Config
from drafter.serve import unit_file
from drafter.serve.vllm_command import captured_layer_ids

ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
CAPTURED = re.compile(r'"eagle_aux_hidden_state_layer_ids":\s*(\[[\d,\s]*\])')


def findings(config: Config) -> Iterator[str]:
    """A finding if the unit's files name other layers; none if they cannot be read or name no layers."""
    own, wanted = config.servers.extract, captured_layer_ids(config)
    if own.kind != "systemd" or not (named := named_layers(own.systemd_unit)):
        return
    if missing := sorted(set(wanted) - set(named)):
        why = " (extract.neighbour_ids adds the layer above each)" if config.extract.neighbour_ids else ""
        yield (
            f"servers.extract: the unit {own.unit} captures layers {named}, not {missing}{why}; name {wanted} in its "
            "--speculative-config, see docs/operations.md"
        )


def environment(config: Config) -> Iterator[str]:
    """A finding for an allocator setting beside which vLLM refuses to load a connector."""
    own = config.servers.extract
    found = unit_file.read(own.systemd_unit) if own.kind == "systemd" else None
    settings = found.environment if found else own.env if own.kind == "command" else {}
    for name in ALLOCATOR:
        if "expandable_segments:True" in settings.get(name, ""):
            where = f"the unit {own.unit} or its EnvironmentFile" if found else "servers.extract.env"
            yield (
                f"servers.extract: {where} sets {name}={settings[name]}, and vLLM refuses expandable segments beside "
                "a connector: take it out for this unit"
            )


def named_layers(unit: str) -> list[int]:
    """Layer ids in the unit's command line; empty if it names none."""
    found = unit_file.read(unit)
    ids = CAPTURED.findall(" ".join(found.command)) if found else []
    return json.loads(ids[-1]) if ids else []
