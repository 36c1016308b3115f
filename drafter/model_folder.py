"""What a model folder's own files say of the model, read without loading it."""

import json
from functools import cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from drafter.errors import ConfigError

DEFAULT_MODEL = Path(__file__).resolve().parents[1] / "models/SmolLM2-135M-Instruct"  # made by drafter.default_model


class Architecture(BaseModel):
    """What the stages need to know of a target, read from its `config.json` (nested configs unwrapped)."""

    model_config = ConfigDict(frozen=True)

    name: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool


@cache
def read_architecture(folder: Path) -> Architecture:
    """Raises ConfigError when `folder` is not a model folder."""
    path = Path(folder) / "config.json"
    try:
        outer = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        how = "; python -m drafter.default_model makes it" if folder == DEFAULT_MODEL else ""
        raise ConfigError(f"target.model: no model at {folder} (no config.json there){how}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    try:
        inner = outer.get("text_config", outer)
        return Architecture(
            name=(outer.get("architectures") or ["unknown"])[0],
            num_layers=inner["num_hidden_layers"],
            hidden_size=inner["hidden_size"],
            vocab_size=inner["vocab_size"],
            rms_norm_eps=inner.get("rms_norm_eps", 1e-6),
            max_position_embeddings=inner["max_position_embeddings"],
            tie_word_embeddings=outer.get("tie_word_embeddings", inner.get("tie_word_embeddings", False)),
        )
    except KeyError as error:
        raise ConfigError(f"{path} has no {error.args[0]}") from None
    except (AttributeError, TypeError, ValidationError):
        raise ConfigError(f"{path} is no model's config") from None


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
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(f"{Path(folder) / name} is no tokenizer's file") from None
    return found
