"""The bytes of a hidden-state file: header, checksum, plausibility. Imports only NumPy, so the writer starts fast.

A file is a safetensors file with a padded header and `token_ids` first, so one read of the first few KB gives
everything but the states, and the file's size follows from the token count alone. bf16 is handled as uint16 and
float8 as uint8: their bit patterns.
"""

import json
import math
import os
import zlib
from pathlib import Path
from typing import Literal

import numpy as np

from drafter.contracts import SCHEMA
from drafter.errors import RowError

HEADER_STEP = 1024  # headers are padded to a multiple, so that tensors are aligned and sizes are exact
FINAL = "final layer before final norm"
KINDS = {"int64": "I64", "uint16": "BF16", "float32": "F32", "uint8": "F8_E4M3"}  # safetensors' names
SIZES = {"I64": 8, "BF16": 2, "F32": 4, "F8_E4M3": 1}

Dtype = Literal["bf16", "fp8"]


def file_metadata(
    row_id: str, model: str, layer_ids: list[int] | tuple[int, ...], dtype: Dtype, target: str | None = None
) -> dict[str, str]:
    """A file's metadata. `model`: the served name; `target`: the fingerprint of the target's folder."""
    return ({"target": target} if target else {}) | {
        "row_id": row_id,
        "model": model,
        "layer_ids": json.dumps(list(layer_ids), separators=(",", ":")),
        "final": FINAL,
        "dtype": dtype,
        "schema": str(SCHEMA),
    }


def file_header(spec: dict[str, tuple[str, tuple[int, ...]]], facts: dict[str, str], checksum: int) -> bytes:
    """All bytes before the first tensor. spec: safetensors' dtype and shape of each tensor, in file order."""
    tree: dict = {"__metadata__": {"format": "pt", **facts, "crc32": f"{checksum:08x}"}}
    position = 0
    for name, (kind, shape) in spec.items():
        end = position + array_bytes(kind, shape)
        tree[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(tree, separators=(",", ":")).encode("ascii")
    total = -(-(8 + len(text)) // HEADER_STEP) * HEADER_STEP
    return (total - 8).to_bytes(8, "little") + text.ljust(total - 8)


def array_bytes(kind: str, shape: tuple[int, ...]) -> int:
    return SIZES[kind] * math.prod(shape)


def write_arrays(path: Path, arrays: dict[str, np.ndarray], facts: dict[str, str]) -> int:
    """Write `arrays` (in file order, contiguous) to `path` without syncing; returns the size.

    The checksum over all bytes, with its own field zeroed, goes into the metadata. Raises OSError and leaves a
    partial file, which the caller removes.
    """
    spec = {name: (KINDS[array.dtype.name], array.shape) for name, array in arrays.items()}
    views = [array.data.cast("B") for array in arrays.values()]
    checksum = zlib.crc32(file_header(spec, facts, 0))
    for view in views:
        checksum = zlib.crc32(view, checksum)
    size = 0
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        for view in [memoryview(file_header(spec, facts, checksum)), *views]:
            size += len(view)
            while view:
                view = view[os.write(fd, view) :]
    finally:
        os.close(fd)
    return size


def check_arrays(arrays: dict[str, np.ndarray]) -> None:
    """Raises RowError("bad_states") for lengths, values, zeros or repetitions that no forward pass gives.

    `arrays` are those of one file. Bit patterns are compared: they sort like the magnitudes of their numbers.
    """
    tokens = len(arrays["token_ids"])
    for name, array in arrays.items():
        if len(array) != tokens:
            raise RowError("bad_states", f"{name} has {len(array)} positions, token_ids has {tokens}")
    if "hidden_states" in arrays:
        _check_bits(arrays["hidden_states"], 0x7FFF, 0x7F80)
        return
    _check_bits(arrays["aux"], 0x7F, 0x7F)
    _check_bits(arrays["final"][:, None], 0x7FFF, 0x7F80)
    scale = arrays["aux_scale"]
    if not (np.isfinite(scale) & (scale > 0)).all():
        raise RowError("bad_states", "a scale that is not finite and positive")


def _check_bits(bits: np.ndarray, mask: int, not_finite: int) -> None:
    """bits: [T, L, H]; `mask` clears the sign bit."""
    magnitude = np.max(bits & bits.dtype.type(mask), axis=-1)
    for layer in range(bits.shape[1]):
        column = magnitude[:, layer]
        if column.max() >= not_finite:
            raise RowError("bad_states", f"slot {layer} is not finite at token {int(np.argmax(column))}")
        if column.min() == 0:
            raise RowError("bad_states", f"slot {layer} is zero at token {int(np.argmin(column))}")
        same = np.array_equal(bits[0, layer], bits[-1, layer])
        if len(bits) > 1 and same and (bits[:, layer] == bits[0, layer]).all():
            raise RowError("bad_states", f"slot {layer} is the same at every token")
        for other in range(layer):
            if np.array_equal(bits[0, layer], bits[0, other]) and np.array_equal(bits[:, layer], bits[:, other]):
                raise RowError("bad_states", f"slots {other} and {layer} are the same")
