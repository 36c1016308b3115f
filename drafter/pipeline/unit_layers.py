"""Whether the extract role's systemd unit, as its files say, captures the layers that the config asks for."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from drafter.config import Config
from drafter.serve.vllm_command import captured_layer_ids

UNIT_FOLDERS = tuple(map(Path, ("/etc/systemd/system", "/run/systemd/system", "/usr/lib/systemd/system")))
CAPTURED = re.compile(r'"eagle_aux_hidden_state_layer_ids":\s*(\[[\d,\s]*\])')


def findings(config: Config) -> Iterator[str]:
    """A finding for a unit whose files name other layers; none where they cannot be read or name no layers."""
    own, wanted = config.servers.extract, captured_layer_ids(config)
    if own.kind != "systemd" or not (named := named_layers(own.unit)):
        return
    if missing := sorted(set(wanted) - set(named)):
        why = " (extract.neighbour_ids adds the layer above each)" if config.extract.neighbour_ids else ""
        yield (
            f"servers.extract: the unit {own.unit} captures layers {named}, not {missing}{why}; name {wanted} in its "
            "--speculative-config, see docs/operations.md"
        )


def named_layers(unit: str) -> list[int]:
    """Layer ids in the unit's file, or in the last of its drop-ins that names some; empty where none does."""
    found: list[int] = []
    name = unit if unit.endswith(".service") else f"{unit}.service"
    for folder in UNIT_FOLDERS:
        if (folder / name).is_file():
            files = [folder / name, *sorted(path for at in UNIT_FOLDERS for path in at.glob(f"{name}.d/*.conf"))]
            for path in files:
                try:
                    text = path.read_text(errors="replace").replace("\\\n", " ")
                except OSError:
                    continue
                if ids := CAPTURED.findall(text):
                    found = json.loads(ids[-1])
            break
    return found
