"""A fingerprint of all of a target's weights, and the record beside the hidden states of the one they came from.

`files.fingerprint_path` reads the ends of each file and is part of every identity; this one looks into every
tensor, so that a permuted embedding or one replaced expert is another target.
"""

import json
import os
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from drafter import files
from drafter.config import Config
from drafter.errors import ConfigError

RECORD = "target.json"  # beside the hidden states
CACHE = "target_fingerprints.json"  # in run.dir: a folder's files with sizes and times -> their fingerprint
SAMPLES, SAMPLE = 8, 4096  # of a tensor: so many pieces of so many bytes, the first and the last among them
THREADS = 16


def check_same_weights(config: Config, recording: bool) -> None:
    """Compare the target with the one that the hidden states in 02's folder came from.

    `recording`: stage 02 notes it before the first states. States of an earlier version have no record, get none,
    since their target may have changed since, and are not compared. Raises ConfigError when the weights differ.
    """
    folder = config.stage_dir("02_hidden_states")
    recorded = files.read_note(folder / RECORD, weights=str).get("weights")
    if recorded is None and (not recording or any(folder.glob("??/*.safetensors"))):
        return
    found = fingerprint(config.target.model, config.run.dir / CACHE)
    if found is None:
        return
    if recorded is None:
        files.write_json(folder / RECORD, {"weights": found})
    elif recorded != found:
        raise ConfigError(
            f"target.model: the weights in {config.target.model} are not those that the hidden states in {folder} "
            f"came from (fingerprint {found}, recorded {recorded}): put the old weights back, or use another run.name"
        )


def fingerprint(model: Path, cache: Path) -> str | None:
    """16 hex digits over names, types, shapes and SAMPLES pieces of every tensor in a model folder's safetensors.

    A model of 550 GB in 200,000 tensors takes 1.6 million reads; afterwards `cache` knows it as long as no file
    changes its size or time. None without such files. Raises ConfigError when one is broken.
    """
    if not (paths := sorted(model.glob("*.safetensors"))):
        return None
    stats = [path.stat() for path in paths]
    state = [[path.name, s.st_size, s.st_mtime_ns, s.st_ino] for path, s in zip(paths, stats, strict=True)]
    key = xxhash.xxh3_64(json.dumps([str(model.resolve()), state]).encode()).hexdigest()
    known = files.read_note(cache)
    if isinstance(known.get(key), str):
        return known[key]
    digest = xxhash.xxh3_64()
    with ThreadPoolExecutor(THREADS) as pool:
        for part in pool.map(_digest, paths):
            digest.update(part)
    files.write_json(cache, files.read_note(cache) | {key: digest.hexdigest()})
    return digest.hexdigest()


def _digest(path: Path) -> bytes:
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        try:
            (length,) = struct.unpack("<Q", file.read(8))
            tensors = json.loads(os.pread(file.fileno(), length, 8))
            tensors.pop("__metadata__", None)
            for name, entry in sorted(tensors.items()):
                low, high = entry["data_offsets"]
                digest.update(json.dumps([name, entry["dtype"], entry["shape"]]).encode())
                for start, size in _pieces(high - low):
                    digest.update(os.pread(file.fileno(), size, 8 + length + low + start))
        except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"target.model: {path} is broken ({error}): fetch it again") from None
    return digest.digest()


def _pieces(size: int) -> Iterator[tuple[int, int]]:
    """(offset, length) of what is read of a tensor of `size` bytes: all of a small one."""
    if size <= SAMPLES * SAMPLE:
        yield 0, size
        return
    for number in range(SAMPLES):
        yield (size - SAMPLE) * number // (SAMPLES - 1), SAMPLE
