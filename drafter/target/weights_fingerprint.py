"""A fingerprint of all weights of a target, recorded beside the hidden states that were captured from it.

`files.fingerprint_path` reads only the ends of each file; this one reads pieces of every tensor, so it notices a
permuted embedding or a replaced expert.
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
SAMPLES, SAMPLE = 8, 4096  # pieces of a tensor and bytes of a piece; the first and the last piece are its ends
THREADS = 16


def check_same_weights(config: Config, recording: bool) -> None:
    """Compare the target's weights with those that the hidden states in 02's folder came from.

    `recording`: stage 02 records the fingerprint before the first states. States of an earlier version have no record
    and are not compared; they get none now, since their target may have changed. Raises ConfigError on other weights.
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
            f"came from (fingerprint {found}, recorded {recorded}): restore the old weights, or use another run.name"
        )


def fingerprint(model: Path, cache: Path) -> str | None:
    """Hash of names, dtypes, shapes and SAMPLES pieces of every tensor in a model folder: 16 hex digits.

    A model of 550 GB in 200,000 tensors takes 1.6 million reads, so `cache` keeps the result until a file changes its
    size or time. None without safetensors files. Raises ConfigError when one is broken.
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
    """(offset, length) of the pieces to read from a tensor of `size` bytes; a small one is read whole."""
    if size <= SAMPLES * SAMPLE:
        yield 0, size
        return
    for number in range(SAMPLES):
        yield (size - SAMPLE) * number // (SAMPLES - 1), SAMPLE
