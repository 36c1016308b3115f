"""A finished stage 02 of random states for the tiny models, small enough to train on in a test."""

import hashlib
import json
from pathlib import Path

import torch
import yaml

from drafter import config, contracts, states
from tests import tiny_models

HIDDEN, VOCAB, LAYER_IDS = tiny_models.HIDDEN, tiny_models.VOCAB, tiny_models.LAYER_IDS


def write_row(
    folder: Path,
    index: int,
    tokens: int,
    supervised: list[list[int]],
    think_end: int | None = None,
    dtype: states.Dtype = "bf16",
    fill: float | None = None,
    vocab: int = VOCAB,
) -> contracts.IndexEntry:
    """One file of random states and its index entry. `fill` puts one bad number into the states."""
    generator = torch.Generator().manual_seed(index)
    row_id = hashlib.sha256(str(index).encode()).hexdigest()[:32]
    hidden = torch.randn(tokens, len(LAYER_IDS), HIDDEN, generator=generator).bfloat16()
    if fill is not None:
        hidden[tokens // 2, 0, 0] = fill
    tensors = {"token_ids": torch.randint(vocab, (tokens,), generator=generator)}
    tensors |= {"hidden_states": hidden} if dtype == "bf16" else states.compact(hidden)
    path = folder / contracts.states_path(row_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    size = states.write(path, tensors, states.metadata(row_id, "tiny", LAYER_IDS, dtype))
    return contracts.IndexEntry(row_id, row_id, "test", tokens, tokens, supervised, think_end, size)


def write_stage(folder: Path, entries: list[contracts.IndexEntry]) -> None:
    """What stage 02 leaves beside the files."""
    lines = "".join(json.dumps(entry.to_record()) + "\n" for entry in entries)
    (folder / "index.jsonl").write_text(lines)
    manifest = {"stage": "02_hidden_states", "status": "complete", "question": {"schema": contracts.SCHEMA}}
    (folder / "manifest.json").write_text(json.dumps(manifest | {"facts": {}}))


def write_config(folder: Path, target: Path, warm_start: Path | None = None, **train) -> Path:
    """A config of a run below `folder` that trains for the tiny target in seconds."""
    tree = yaml.safe_load((config.ROOT / "configs/smollm2_cpu.yaml").read_text())
    tree["run"] = {"name": "run", "dir": str(folder / "runs")}
    tree["target"] |= {"model": str(target), "layer_ids": list(LAYER_IDS), "max_seq_len": 64}
    tree["train"] = {
        "warm_start": str(warm_start) if warm_start else None, "draft_vocab_size": None if warm_start else 128,
        "lr": 1e-3, "precision": "fp32", "epochs": 2, "validation_share": 0.2, "validate_every": 4, "save_every": 4,
        "loader_workers": 0, "parallel": "ddp",
    } | train  # fmt: skip
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def write_run(folder: Path, target: Path, rows: int = 24, warm_start: Path | None = None, **train) -> Path:
    """Config of a run whose stage 02 is done, with `rows` rows of 20 to 40 tokens."""
    path = write_config(folder, target, warm_start, **train)
    captured = folder / "runs/run/02_hidden_states"
    entries = [write_row(captured, i, 20 + i * 7 % 21, [[5 + i % 4, 20 + i * 7 % 21]]) for i in range(rows)]
    write_stage(captured, entries)
    return path
