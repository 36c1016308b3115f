"""The target's embedding, final norm and head, read from its safetensors by name suffix without loading the model."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from drafter.errors import ConfigError
from drafter.model_folder import read_architecture

EMBED = "embed_tokens.weight"
NORM = "model.norm.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Verifier:
    """embed [V, H], norm [H], head [V, H] in the checkpoint's dtype; head is embed itself when they are tied."""

    embed: Tensor
    norm: Tensor
    head: Tensor
    eps: float

    def normed(self, final: Tensor) -> Tensor:
        """The target's final RMSNorm: [..., H] -> [..., H] in the head's dtype."""
        wide = final.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + self.eps)
        return (wide * self.norm.float()).to(self.head.dtype)

    def log_probs(self, final: Tensor) -> Tensor:
        """log_softmax(head(norm(final))): [..., H] last-layer states before the final norm -> [..., V] fp32."""
        return torch.log_softmax((self.normed(final) @ self.head.T).float(), dim=-1)


def read_verifier(model: Path) -> Verifier:
    """Raises ConfigError when the folder lacks one of the three tensors, the head too where it is not tied."""
    architecture = read_architecture(model)
    files = files_by_tensor(model)
    embed = _read(model, files, EMBED)
    tied = architecture.tie_word_embeddings
    if tied is None:
        tied = not any(_matches(name, HEAD) for name in files)
    head = embed if tied else _read(model, files, HEAD)
    return Verifier(embed=embed, norm=_read(model, files, NORM), head=head, eps=architecture.rms_norm_eps)


def read_last_layer(model: Path) -> dict[str, Tensor]:
    """The last decoder layer's tensors, routed experts left out, by their names inside it (`mlp.up_proj.weight`)."""
    prefix = f"layers.{read_architecture(model).num_layers - 1}."
    files = files_by_tensor(model)
    found = {}
    for name in files:
        before, inside, within = name.partition(prefix)
        if inside and (not before or before.endswith("model.")) and ".experts." not in within:
            with _opened(files[name]) as file:
                found[within] = file.get_tensor(name)
    return found


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[safe_open]:
    """Raises ConfigError when the file is missing or broken."""
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (FileNotFoundError, SafetensorError) as error:
        raise ConfigError(f"target.model: {path} is missing or broken ({error}): fetch it again") from None


def _matches(name: str, suffix: str) -> bool:
    return name == suffix or name.endswith(f".{suffix}")


def files_by_tensor(model: Path) -> dict[str, Path]:
    """The safetensors file that holds each tensor. Raises ConfigError when one, or their index, is broken."""
    index = model / "model.safetensors.index.json"
    if index.exists():
        try:
            return {name: model / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(f"target.model: {index} is broken: fetch it again") from None
    names: dict[str, Path] = {}
    for path in sorted(model.glob("*.safetensors")):
        with _opened(path) as file:
            names |= dict.fromkeys(file.keys(), path)
    return names


def find(model: Path, files: dict[str, Path], suffix: str) -> str:
    """The whole name of the text model's own tensor. Raises ConfigError when the folder has none."""
    # It has the shortest name; a vision tower's or an MTP layer's copy has a longer one.
    matching = sorted((name for name in files if _matches(name, suffix)), key=len)
    if not matching:
        raise ConfigError(f"target.model: no tensor *{suffix} in {model}")
    return matching[0]


def _read(model: Path, files: dict[str, Path], suffix: str) -> Tensor:
    name = find(model, files, suffix)
    with _opened(files[name]) as file:
        return file.get_tensor(name)
