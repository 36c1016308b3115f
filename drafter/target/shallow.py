"""A shallow copy of a target for a rehearsal: its first layers and every tensor outside the layers, byte for byte.

The copy is a separate model folder: safetensors files with the original's bytes (quantized weights and their scales
as they are), a config with fewer layers, and links to the tokenizer, the template, the processor and remote code.
"""

import json
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafter import files
from drafter.errors import ConfigError
from drafter.model_folder import CONFIG, read_architecture, read_text_config
from drafter.target import eagle3_folder, head

LAYERS = 4  # at least: one dense and one expert layer, and the inputs of three for the drafter
INDEX = "model.safetensors.index.json"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", INDEX)  # endings of files that are not linked

BROKEN = (
    struct.error,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    OverflowError,
)  # what a damaged header raises

Header = dict[str, dict[str, Any]]  # tensor name -> dtype, shape, data_offsets


@dataclass(frozen=True)
class Cut:
    """What a shallow copy of `model` takes: `layers` of `of`, and `tensors` of each weight file, `bytes` in all."""

    model: Path
    layers: int
    of: int
    tensors: dict[Path, list[str]]
    bytes: int

    def layer_ids(self, layer_ids: tuple[int, ...]) -> list[int]:
        """The same number of ids within the copy: the inputs of its last layers, and its final states."""
        return list(range(self.layers - len(layer_ids) + 1, self.layers + 1))


def cut(model: Path, layer_ids: tuple[int, ...]) -> Cut:
    """The first layers of a target: enough for every kind of layer and for all of `layer_ids`. Reads only headers.

    Raises ConfigError when the target has no layers under the embedding's name, or a file is broken.
    """
    of, by_tensor = read_architecture(model).num_layers, head.files_by_tensor(model)
    prefix = head.find(model, by_tensor, head.EMBED).removesuffix(head.EMBED)
    number = re.compile(rf"{re.escape(prefix)}layers\.(\d+)\.(.+)")
    matches = {name: found for name in by_tensor if (found := number.fullmatch(name))}
    layer_of = {name: int(found[1]) for name, found in matches.items()}
    if missing := sorted(set(range(of)) - set(layer_of.values())):
        raise ConfigError(
            f"target.model: {model} has no tensor {prefix}layers.{missing[0]}.*: an architecture with other layer "
            "names cannot be rehearsed"
        )
    kinds: dict[int, set[str]] = {layer: set() for layer in range(of)}
    for name, layer in layer_of.items():
        if layer < of:
            kinds[layer].add(re.sub(r"\.\d+\.", ".", matches[name][2]))
    types = read_text_config(model).get("layer_types") or [None] * of
    seen = [(frozenset(kinds[layer]), types[layer]) for layer in range(of)]
    layers = min(of, max(LAYERS, len(layer_ids), *(seen.index(kind) + 1 for kind in set(seen))))
    tensors: dict[Path, list[str]] = {}
    for name, path in by_tensor.items():
        if layer_of.get(name, 0) < layers:
            tensors.setdefault(path, []).append(name)
    return Cut(model, layers, of, tensors, sum(_bytes(path, names) for path, names in tensors.items()))


def copy(cut: Cut, folder: Path) -> None:
    """Write the shallow copy to `folder`. Raises ConfigError on a broken file, OSError when the disk is full."""
    folder.mkdir(parents=True)
    for path, names in cut.tensors.items():
        _copy_tensors(path, folder / path.name, names)
    if (cut.model / INDEX).exists():
        weight_map = {name: path.name for path, names in cut.tensors.items() for name in names}
        index = {"metadata": {"total_size": cut.bytes}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index))
    config = json.loads((cut.model / CONFIG).read_text())
    for section in (config, config.get("text_config") or {}):
        _cut_config(section, cut.layers)
    (folder / CONFIG).write_text(json.dumps(config, indent=1))
    for path in cut.model.iterdir():
        if path.name != CONFIG and not path.name.endswith(WEIGHTS) and not path.name.startswith("."):
            (folder / path.name).symlink_to(path.resolve())


def copy_drafter(source: Path, folder: Path, aux_layer_ids: list[int]) -> None:
    """A copy of a drafter folder that reads other layers: its config with these ids, and links to the other files."""
    config = eagle3_folder.read_config(source)
    if eagle3_folder.layer_ids(config):  # other forms of drafters read no layers
        ids = {eagle3_folder.LAYER_IDS: aux_layer_ids}
        config |= ids | {"eagle_config": (config.get("eagle_config") or {}) | ids}
    folder.mkdir(parents=True)
    (folder / CONFIG).write_text(json.dumps(config, indent=1))
    for path in source.iterdir():
        if path.name != CONFIG:
            (folder / path.name).symlink_to(path.resolve())


def _cut_config(section: dict[str, Any], layers: int) -> None:
    """Reduce the number of layers and every list with one entry a layer; remove layers for multi-token prediction."""
    if (before := section.get("num_hidden_layers")) is None:
        return
    section |= {
        key: value[:layers] for key, value in section.items() if isinstance(value, list) and len(value) == before
    }
    section["num_hidden_layers"] = layers
    if section.get("num_nextn_predict_layers"):
        section["num_nextn_predict_layers"] = 0


def _header(path: Path) -> tuple[Header, int]:
    """A safetensors file's header, and the offset of its data. Raises ConfigError when it is missing or broken."""
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        if path.stat().st_size != 8 + length + end:
            raise ValueError(f"{path.stat().st_size} bytes, {8 + length + end} expected")
        return header, 8 + length
    except (*BROKEN, FileNotFoundError) as error:
        raise ConfigError(f"target.model: {path} is missing or broken ({error}): fetch it again") from None


def _bytes(path: Path, names: list[str]) -> int:
    header, _ = _header(path)
    if absent := sorted(set(names) - header.keys()):
        raise ConfigError(f"target.model: {path} has no {absent[0]}, which {INDEX} lists there: fetch both again")
    return sum(high - low for low, high in (header[name]["data_offsets"] for name in names))


def _copy_tensors(source: Path, destination: Path, names: list[str]) -> None:
    """Write a safetensors file with some tensors of another one, in their order; the kernel copies the bytes."""
    header, start = _header(source)
    made: Header = {"__metadata__": header.get("__metadata__", {"format": "pt"})}
    runs: list[list[int]] = []  # [low, high) of adjacent bytes
    end = 0
    for name in sorted(names, key=lambda each: header[each]["data_offsets"]):
        low, high = header[name]["data_offsets"]
        made[name] = header[name] | {"data_offsets": [end, end + high - low]}
        end += high - low
        if runs and runs[-1][1] == low:
            runs[-1][1] = high
        else:
            runs.append([low, high])
    text = json.dumps(made, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(source, "rb") as reading, open(destination, "wb") as writing:
        writing.write(struct.pack("<Q", len(text)) + text)
        writing.flush()
        for low, high in runs:
            while low < high:
                low += os.sendfile(writing.fileno(), reading.fileno(), start + low, min(high - low, files.GIB))
