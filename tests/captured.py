"""A finished stage 02 of random states for the tiny models, small enough to train on in a test."""

import contextlib
import hashlib
import io
import json
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import torch
import yaml

from drafter import config, contracts, signals, stage, torchrun_env
from drafter.extract import state_file, states
from drafter.train import examples
from drafter.train import stage as train_stage
from tests import tiny_models

HIDDEN, VOCAB, LAYER_IDS = tiny_models.HIDDEN, tiny_models.VOCAB, tiny_models.LAYER_IDS
FORM = LAYER_IDS, HIDDEN, VOCAB  # what a reader of hidden states expects


def row_id(index: int) -> str:
    return hashlib.sha256(str(index).encode()).hexdigest()[:32]


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
    name = row_id(index)
    hidden = torch.randn(tokens, len(LAYER_IDS), HIDDEN, generator=generator).bfloat16()
    if fill is not None:
        hidden[tokens // 2, 0, 0] = fill
    tensors = {"token_ids": torch.randint(vocab, (tokens,), generator=generator)}
    tensors |= {"hidden_states": hidden} if dtype == "bf16" else states.to_compact(hidden)
    path = folder / contracts.states_path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    size = states.write_states(path, tensors, state_file.file_metadata(name, "tiny", LAYER_IDS, dtype))
    digest = states.ids_digest(tensors["token_ids"].tolist())
    return contracts.IndexEntry(name, name, "test", tokens, tokens, supervised, think_end, size, digest)


def write_stage(folder: Path, entries: list[contracts.IndexEntry]) -> None:
    """What stage 02 leaves beside the files."""
    lines = "".join(json.dumps(entry.to_record()) + "\n" for entry in entries)
    (folder / "index.jsonl").write_text(lines)
    manifest = {"stage": "02_hidden_states", "status": "complete", "question": {"schema": contracts.SCHEMA}}
    (folder / "manifest.json").write_text(json.dumps(manifest | {"facts": {}}))


def write_config(folder: Path, target: Path, warm_start: Path | None = None, max_seq_len: int = 64, **train) -> Path:
    """A config of a run below `folder` that trains for the tiny target in seconds."""
    tree = yaml.safe_load((config.ROOT / "configs/smollm2_cpu.yaml").read_text())
    tree["run"] = {"name": "run", "dir": str(folder / "runs")}
    tree["target"] |= {"model": str(target), "layer_ids": list(LAYER_IDS), "max_seq_len": max_seq_len}
    tree["target"]["special_tokens"] = {}
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


def train(path: Path, *overrides: str, limit: int | None = None) -> tuple[int, dict]:
    """Run stage 04 in this process: exit code and summary line."""
    argv = ["--config", str(path), *(part for override in overrides for part in ("--set", override))]
    argv += ["--limit", str(limit)] if limit else []
    handlers = {number: signal.getsignal(number) for number in signals.SIGNALS}
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            code = stage.run_stage("04_train", lambda this: train_stage.run(this), stage.parser(""), argv)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    lines = printed.getvalue().splitlines()
    return code, json.loads(lines[-1]) if lines else {}


def forked(work: Callable[[], int | None]) -> int:
    """Start `work` in a forked process and return its id. One thread: a fork has no others."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            code = work() or 0
        finally:
            os._exit(code)
    return pid


def wait(pid: int) -> int:
    """Exit code of a forked process, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def on_ranks(world: int, work: Callable[[], int]) -> list[int]:
    """Start `work` on `world` gloo ranks of this machine; their process ids."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])

    def rank(number: int) -> Callable[[], int]:
        def joined() -> int:
            os.environ[torchrun_env.MARK] = "test"
            os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(world)}
            os.environ |= {"LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            return work()

        return joined

    return [forked(rank(number)) for number in range(world)]


def start_on_ranks(world: int, path: Path, *overrides: str) -> list[int]:
    """Start stage 04 on `world` gloo ranks; their process ids."""
    return on_ranks(world, lambda: train(path, *overrides)[0])


def train_on_ranks(world: int, path: Path, *overrides: str) -> list[int]:
    """Run stage 04 on `world` gloo ranks; their exit codes."""
    return [wait(pid) for pid in start_on_ranks(world, path, *overrides)]


def metrics(path: Path, kind: str = "train") -> list[dict]:
    """Records of a run's metrics.jsonl without what depends on the clock or on what was there before."""
    lines = (path.parent / "runs/run/04_train/metrics.jsonl").read_text().splitlines()
    clock = ("tokens_per_s", "data_share", "seconds", "memory_gib")
    records = [json.loads(line) for line in lines]
    return [{k: v for k, v in r.items() if k not in clock} for r in records if r["kind"] == kind]


def lowest(conv_id: str, others: list[str]) -> bool:
    """Whether `conv_id` is the first conversation that validation takes."""
    return all(examples._fraction(conv_id) < examples._fraction(other) for other in others)
