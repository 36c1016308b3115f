"""Write, check and read hidden-state files as tensors, without vLLM. state_file.py handles their bytes."""

import fcntl
import hashlib
import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from drafter.contracts import SCHEMA
from drafter.errors import ContractError, RowError
from drafter.extract import state_file
from drafter.extract.state_file import FINAL, Dtype

FP8_MAX = torch.finfo(torch.float8_e4m3fn).max

_NAMES = {torch.int64: "I64", torch.bfloat16: "BF16", torch.float32: "F32", torch.float8_e4m3fn: "F8_E4M3"}
_TYPES = {name: dtype for dtype, name in _NAMES.items()}
_BITS = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8}


@dataclass(frozen=True, slots=True)
class States:
    """Hidden states of one row.

    token_ids [T] int64; aux [T, A, H] bf16, the inputs of the asked layers in ascending order; final [T, H] bf16,
    the last layer's output before the final norm.
    """

    token_ids: Tensor
    aux: Tensor
    final: Tensor
    metadata: dict[str, str]

    @property
    def layer_ids(self) -> list[int]:
        """Raises ContractError."""
        try:
            found = json.loads(self.metadata["layer_ids"])
            if isinstance(found, list) and all(type(layer) is int for layer in found):
                return found
        except (KeyError, ValueError, RecursionError):
            pass
        raise ContractError("layer_ids in a hidden-state file's metadata must be a list of numbers")


def shapes(tokens: int, layers: int, hidden: int, dtype: Dtype) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape of a file's tensors, in file order."""
    ids = {"token_ids": (torch.int64, (tokens,))}
    if dtype == "bf16":
        return ids | {"hidden_states": (torch.bfloat16, (tokens, layers, hidden))}
    return ids | {
        "aux_scale": (torch.float32, (tokens, layers - 1)),
        "final": (torch.bfloat16, (tokens, hidden)),
        "aux": (torch.float8_e4m3fn, (tokens, layers - 1, hidden)),
    }


def file_bytes(tokens: int, hidden: int, facts: dict[str, str]) -> int:
    """Exact size of the file that `write_states` makes with `facts` (from `file_metadata`)."""
    layers = len(json.loads(facts["layer_ids"]))
    spec = shapes(tokens, layers, hidden, cast(Dtype, facts["dtype"]))
    named = {name: (_NAMES[dtype], shape) for name, (dtype, shape) in spec.items()}
    return len(state_file.file_header(named, facts, 0)) + sum(_size(*entry) for entry in spec.values())


def to_compact(hidden_states: Tensor) -> dict[str, Tensor]:
    """Convert [T, L, H] bf16 to the compact format's tensors, on the same device.

    Auxiliary layers become float8 with one scale for each token and layer; the final layer, the teacher, stays bf16.
    """
    aux = hidden_states[:, :-1].float()
    scale = (aux.abs().amax(dim=-1) / FP8_MAX).clamp_min(1e-12)
    return {
        "aux_scale": scale,
        "final": hidden_states[:, -1].contiguous(),
        "aux": (aux / scale[..., None]).to(torch.float8_e4m3fn),
    }


def from_compact(aux: Tensor, scale: Tensor) -> Tensor:
    """bf16 states from the compact format's `aux` and `aux_scale`."""
    return (aux.float() * scale[..., None]).to(torch.bfloat16)


def ids_digest(token_ids: list[int] | np.ndarray) -> str:
    """Hash of a sequence of token ids: 16 hex digits."""
    return hashlib.sha256(np.asarray(token_ids, dtype="<i8").tobytes()).hexdigest()[:16]


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock on `path`; the kernel releases it when the process ends."""
    try:
        with open(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def to_arrays(tensors: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """CPU tensors as the arrays that state_file.py takes."""
    return {name: tensor.view(_BITS.get(tensor.dtype, tensor.dtype)).numpy() for name, tensor in tensors.items()}


def check_tensors(tensors: dict[str, Tensor]) -> None:
    """Raises RowError("bad_states") for CPU tensors that no forward pass gives (state_file.check_arrays)."""
    state_file.check_arrays(to_arrays(tensors))


def write_states(path: Path, tensors: dict[str, Tensor], facts: dict[str, str]) -> int:
    """Write CPU `tensors` (in file order, contiguous) to `path` and return the size. Raises OSError."""
    return state_file.write_arrays(path, to_arrays(tensors), facts)


def _size(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return state_file.array_bytes(_NAMES[dtype], shape)


@dataclass(frozen=True, slots=True)
class Header:
    """Everything in a file but the states."""

    metadata: dict[str, str]
    spec: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    head: bytes  # everything before the first tensor byte
    offsets: dict[str, tuple[int, int]]
    token_ids: np.ndarray  # [T] int64
    size: int  # of the file

    @property
    def start(self) -> int:
        """Offset of the first tensor byte."""
        return len(self.head)


def read_header(path: Path) -> Header:
    """Raises ContractError when `path` is not a complete hidden-state file, FileNotFoundError when it is missing."""
    fd = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        first = os.pread(fd, 16384, 0)
        try:
            start = 8 + int.from_bytes(first[:8], "little")
            if start > min(size, 1 << 20):
                raise ValueError("its header is longer than the file")
            if start > len(first):
                first += os.pread(fd, start - len(first), len(first))
            facts, spec, offsets = _parse_header(first[8:start])
            end = start + max(high for _low, high in offsets.values())
            if size != end:
                raise ValueError(f"it has {size} bytes, its header says {end}")
        except (ValueError, RecursionError) as error:
            raise ContractError(f"{path} is not a hidden-state file: {error}") from None
        low, high = offsets["token_ids"]
        ids = first[start + low : start + high]
        if len(ids) < high - low:
            ids += os.pread(fd, high - low - len(ids), start + low + len(ids))
    finally:
        os.close(fd)
    return Header(facts, spec, first[:start], offsets, np.frombuffer(ids, dtype="<i8"), size)


def _parse_header(text: bytes) -> tuple[dict[str, str], dict, dict[str, tuple[int, int]]]:
    """Metadata, dtypes with shapes, and offsets of a header. Raises ValueError (naming the field), RecursionError."""
    tree = json.loads(text)
    facts = tree.pop("__metadata__", None) if isinstance(tree, dict) else None
    if not isinstance(facts, dict) or not all(isinstance(value, str) for value in facts.values()):
        raise ValueError("__metadata__ must map names to strings")
    spec: dict[str, Any] = {}
    offsets: dict[str, tuple[int, int]] = {}
    for name, entry in tree.items():
        entry = entry if isinstance(entry, dict) else {}
        kind: Any = entry.get("dtype")
        shape: Any = entry.get("shape")
        place: Any = entry.get("data_offsets")
        if not isinstance(kind, str) or kind not in _TYPES:
            raise ValueError(f"{name[:40]}.dtype must be one of {', '.join(_TYPES)}")
        for key, value in (("shape", shape), ("data_offsets", place)):
            if not isinstance(value, list) or not all(type(n) is int and 0 <= n < 2**63 for n in value):
                raise ValueError(f"{name[:40]}.{key} must be a list of counts")
        if len(place) != 2 or place[1] - place[0] != _size(_TYPES[kind], tuple(shape)):
            raise ValueError(f"{name[:40]}: shape and data_offsets disagree")
        spec[name], offsets[name] = (_TYPES[kind], tuple(shape)), (place[0], place[1])
    if spec.get("token_ids", (None, ()))[0] is not torch.int64 or len(spec["token_ids"][1]) != 1:
        raise ValueError("token_ids must be a one-dimensional I64 tensor")
    places = sorted(offsets.values())
    if [low for low, _high in places] != [0, *(high for _low, high in places[:-1])]:
        raise ValueError("its tensors overlap or leave a gap")
    return facts, spec, offsets


def check_header(
    header: Header,
    row_id: str,
    input_ids: list[int] | np.ndarray,
    layer_ids: tuple[int, ...],
    hidden: int,
    dtype: Dtype,
    target: str | None = None,
) -> None:
    """Raises RowError("bad_states") unless the file holds this row's states of these layers in this format.

    `target` is the target's fingerprint; files of earlier versions contain none and are not compared with it.
    """
    facts = header.metadata
    asked = {"row_id": row_id, "layer_ids": json.dumps(list(layer_ids), separators=(",", ":")), "final": FINAL}
    if target is not None and "target" in facts:
        asked["target"] = target
    for key, value in (asked | {"dtype": dtype, "schema": str(SCHEMA)}).items():
        if facts.get(key) != value:
            raise RowError("bad_states", f"{key} is {facts.get(key)}, expected {value}")
    if not np.array_equal(header.token_ids, np.asarray(input_ids, dtype=np.int64)):
        raise RowError("bad_states", f"its {len(header.token_ids)} token ids are not the row's {len(input_ids)}")
    expected = shapes(len(input_ids), len(layer_ids), hidden, dtype)
    if header.spec != expected:
        raise RowError("bad_states", f"tensors {header.spec}, expected {expected}")


def begin_checksum(header: Header) -> int:
    """CRC-32 of the header with its own checksum zeroed; continue it with the tensors' bytes in file order."""
    stored = header.metadata.get("crc32", "")
    return zlib.crc32(header.head.replace(f'"crc32":"{stored}"'.encode(), b'"crc32":"00000000"'))


def check_content(path: Path) -> None:
    """Check every byte and value of a published file. Raises ContractError or RowError("bad_states")."""
    header = read_header(path)
    names = {"fp8": {"aux": 3, "aux_scale": 2, "final": 2}}.get(
        header.metadata.get("dtype", ""), {"hidden_states": 3}
    )
    _need(path, header, names)
    data = _read_data(path, header)
    if f"{zlib.crc32(memoryview(data.numpy()), begin_checksum(header)):08x}" != header.metadata.get("crc32", ""):
        raise ContractError(f"{path} is damaged: its checksum does not match its bytes")
    check_tensors(_views(data, header))


def read_states(path: Path) -> States:
    """Read a bf16 or compact file. Raises ContractError when it is neither."""
    header = read_header(path)
    tensors = _views(_read_data(path, header), header)
    if header.metadata.get("dtype") == "fp8":
        _need(path, header, {"aux": 3, "aux_scale": 2, "final": 2})
        aux, final = from_compact(tensors["aux"], tensors["aux_scale"]), tensors["final"]
    else:
        _need(path, header, {"hidden_states": 3})
        aux, final = tensors["hidden_states"][:, :-1], tensors["hidden_states"][:, -1]
    return States(tensors["token_ids"], aux, final, header.metadata)


def _need(path: Path, header: Header, dimensions: dict[str, int]) -> None:
    """Raises ContractError unless the tensors exist and their first dimension is the number of tokens."""
    tokens = len(header.token_ids)
    for name, count in dimensions.items():
        _dtype, shape = header.spec.get(name, (None, ()))
        if len(shape) != count or shape[0] != tokens or 0 in shape:
            raise ContractError(f"{path}: {name} must have {count} dimensions, the first of {tokens}; it has {shape}")


def read_last(path: Path, header: Header) -> Tensor:
    """The final layer's state at the last position: [H] bf16. Raises ContractError."""
    name = "final" if "final" in header.spec else "hidden_states"
    _dtype, shape = header.spec[name]
    size = 2 * shape[-1]
    with open(path, "rb", buffering=0) as file:
        file.seek(header.start + header.offsets[name][1] - size)
        data = file.read(size)
    if len(data) < size:
        raise ContractError(f"{path} shrank while it was read")
    return torch.frombuffer(bytearray(data), dtype=torch.bfloat16)


def _read_data(path: Path, header: Header) -> Tensor:
    data = torch.empty(header.size - header.start, dtype=torch.uint8)
    with open(path, "rb", buffering=0) as file:
        file.seek(header.start)
        view = memoryview(data.numpy())
        while view and (count := file.readinto(view)):
            view = view[count:]
    if view:
        raise ContractError(f"{path} shrank while it was read")
    return data


def _views(data: Tensor, header: Header) -> dict[str, Tensor]:
    return {
        name: data[slice(*header.offsets[name])].view(dtype).view(shape)
        for name, (dtype, shape) in header.spec.items()
    }
