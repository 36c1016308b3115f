"""What a model folder's own files say of the model, read without loading it."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from drafter import checked
from drafter.errors import ConfigError

CONFIG = "config.json"
DEFAULT_MODEL = (
    Path(__file__).resolve().parents[1] / "models/SmolLM2-135M-Instruct"
)  # made by drafter.target.default_model

Size = Annotated[int, Field(gt=0, le=2**31)]


@checked.OPEN
class TextConfig(TypedDict):
    """Of a model's `config.json`, or of its `text_config`, what is read here."""

    num_hidden_layers: Size
    hidden_size: Size
    vocab_size: Size
    max_position_embeddings: Size
    rms_norm_eps: NotRequired[Annotated[float, Field(ge=0, lt=1)]]
    tie_word_embeddings: NotRequired[bool | None]
    intermediate_size: NotRequired[Size]
    num_attention_heads: NotRequired[Size]
    num_key_value_heads: NotRequired[Size | None]
    head_dim: NotRequired[Size | None]
    rope_theta: NotRequired[float | None]
    rope_parameters: NotRequired[dict[str, Any] | None]


@checked.OPEN
class Outer(TypedDict, total=False):
    """A whole `config.json`."""

    architectures: list[str] | None
    tie_word_embeddings: bool | None
    text_config: TextConfig


@dataclass(frozen=True, slots=True)
class Architecture:
    """What the stages need to know of a target, read from its `config.json` (nested configs unwrapped)."""

    name: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool | None  # None: not said, so that the presence of a head decides


@cache
def read_architecture(folder: Path) -> Architecture:
    """Raises ConfigError when `folder` is not a model folder."""
    outer, inner = _read_config(folder)
    tied = outer.get("tie_word_embeddings")
    return Architecture(
        name=(outer.get("architectures") or ["unknown"])[0],
        num_layers=inner["num_hidden_layers"],
        hidden_size=inner["hidden_size"],
        vocab_size=inner["vocab_size"],
        rms_norm_eps=inner.get("rms_norm_eps", 1e-6),
        max_position_embeddings=inner["max_position_embeddings"],
        tie_word_embeddings=inner.get("tie_word_embeddings") if tied is None else tied,
    )


def read_text_config(folder: Path, *needed: str) -> dict[str, Any]:
    """The config of the text model. Raises ConfigError when it lacks a field of `needed`."""
    _, inner = _read_config(folder)
    if missing := [name for name in needed if inner.get(name) is None]:
        raise ConfigError(f"target.model: {folder / CONFIG} has no {missing[0]}")
    return inner


def _read_config(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The whole config, and the text model's part of it."""
    path, remedy = Path(folder) / CONFIG, "target.model must be a Hugging Face model folder"
    try:
        outer = checked.load(path, Outer, ConfigError, remedy)
        return outer, outer.get("text_config") or checked.load(path, TextConfig, ConfigError, remedy)
    except (FileNotFoundError, NotADirectoryError):
        how = "; python -m drafter.target.default_model makes it" if folder == DEFAULT_MODEL else ""
        raise ConfigError(f"target.model: no model at {folder} (no {CONFIG} there){how}") from None


def read_added_tokens(folder: Path) -> dict[str, int]:
    """Text -> id of the tokens that a model folder's tokenizer files list by name; empty where they list none.

    The files are read, no tokenizer is built: loaders have picked the wrong backend for a folder before.
    """
    found: dict[str, int] = {}
    for name, key in (("tokenizer.json", "added_tokens"), ("tokenizer_config.json", "added_tokens_decoder")):
        try:
            listed = json.loads((Path(folder) / name).read_text()).get(key) or ()
            entries = listed.items() if isinstance(listed, dict) else ((entry["id"], entry) for entry in listed)
            found |= {entry["content"]: int(token) for token, entry in entries}
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ConfigError(f"{Path(folder) / name} is no tokenizer's file") from None
    return found
