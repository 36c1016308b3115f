"""A mistake in a config file as text, with the key that was probably meant."""

import difflib
from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel

# Names that other tools give to our keys, too different in spelling to be found by it.
OTHER_NAMES = {
    "learning_rate": "lr",
    "max_length": "max_seq_len",
    "max_model_len": "max_seq_len",
    "max_new_tokens": "max_tokens",
    "model_name_or_path": "model",
    "num_train_epochs": "epochs",
    "num_epochs": "epochs",
    "file": "path",
}


def explain(model: type[BaseModel], error: Mapping[str, Any]) -> str:
    """One of pydantic's errors about a `model`."""
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] != "extra_forbidden":
        return f"{where}: {error['msg'].removeprefix('Value error, ')}"
    *section, last = error["loc"]
    known = list(_fields_at(model, section))
    meant = OTHER_NAMES.get(str(last))
    nearest = [meant] if meant in known else difflib.get_close_matches(str(last), known, n=1)
    return f"unknown key {where}, " + (f"did you mean {nearest[0]}?" if nearest else f"there are {', '.join(known)}")


def _fields_at(model: type[BaseModel], loc: list) -> dict:
    """Fields of the section that an error's location leads to."""
    for part in loc:
        if isinstance(part, int):
            continue
        annotation = model.model_fields[part].annotation
        candidates = [annotation, *get_args(annotation)]
        model = next(c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))
    return model.model_fields
