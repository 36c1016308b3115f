"""What only GPUs show, by hand on a machine that has them: pytest -m gpu tests/test_gpu.py"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from drafter import config, torchrun_env
from drafter.train import checkpoint
from tests import captured, tiny_models
from tests.acceptance.test_stage import COMMA, PROMPTS, make_run, one_word_drafter, one_word_length, script

GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}  # without torch.compile, which takes a minute
ARGS = {"dtype": "bfloat16", "max-model-len": 1024, "gpu-memory-utilization": 0.3, "compilation-config": GRAPHS}


def length(folder: Path, drafter: Path, ranks: int) -> float:
    """Acceptance length from the engine's counters, every prompt at once, over so many tensor-parallel ranks.

    It is what the answers have of the drafter's one word, counted over them.
    """
    run = make_run(
        folder,
        drafter,
        f"run.name=ranks{ranks}",
        f"servers.evaluate.args={json.dumps(ARGS | {'tensor-parallel-size': ranks})}",
        f"acceptance.cells=[{{concurrency: {PROMPTS}, temperature: 0}}]",
        "acceptance.drafters=[warm_start]",
    )
    code, _summary, talk = script("06_measure_acceptance.py", run, folder)
    assert code == 0, talk
    (measured,) = json.loads((run.stage_dir("06_acceptance") / "acceptance.json").read_text())["measurements"]
    assert measured["streams_agree"], measured
    assert measured["acceptance_length"] == pytest.approx(one_word_length(run, "warm_start", COMMA), abs=0.01)
    return measured["acceptance_length"]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")
def test_an_export_is_loaded_and_accepted_from_under_load(tmp_path, model):
    """X05: with CUDA graphs, as it is deployed."""
    assert 1 < length(tmp_path, one_word_drafter(model, tmp_path / "comma", COMMA), 1) < 4


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 3, reason="needs three GPUs: SmolLM2 has 9 heads")
def test_tensor_parallel_ranks_share_the_targets_embedding_alike(tmp_path, model):
    """X09"""
    comma = one_word_drafter(model, tmp_path / "comma", COMMA)
    assert length(tmp_path, comma, 3) == pytest.approx(length(tmp_path, comma, 1), abs=0.1)


def start_training(path: Path, ranks: int) -> list[subprocess.Popen]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    shared |= {torchrun_env.MARK: "test", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    line = [sys.executable, str(config.ROOT / "04_train.py"), "--config", str(path)]
    return [
        subprocess.Popen(line, env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(ranks)
    ]


@pytest.mark.gpu
@pytest.mark.parametrize(("ranks", "kind"), [(1, "ddp"), (2, "ddp"), (2, "fsdp2")])
def test_training_killed_and_resumed_is_the_undisturbed_training_bit_for_bit(tmp_path, ranks, kind):
    """T12, T13: with rows long enough that blocks of the attention's backward pass meet in one sum."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    target = tiny_models.make_tiny_mla(tmp_path / "target")
    warm_start = tiny_models.make_drafter(target, tmp_path / "drafter")
    left = []
    for name, disturbed in (("whole", False), ("killed", True)):
        settings = {"precision": "bf16", "parallel": kind, "epochs": 6, "save_every": 3, "loader_workers": 2}
        folder = tmp_path / name / "runs/run"
        folder.mkdir(parents=True)
        path = captured.write_config(tmp_path / name, target, warm_start, max_seq_len=4096, **settings)
        rows = [
            captured.write_row(folder / "02_hidden_states", i, 500 + 97 * i, [[60, 500 + 97 * i]]) for i in range(24)
        ]
        captured.write_stage(folder / "02_hidden_states", rows)
        for stop in (5, 8, 14) if disturbed else ():
            training = start_training(path, ranks)
            log = folder / "04_train/metrics.jsonl"
            while training[0].poll() is None and not (log.exists() and f'"train","step":{stop},' in log.read_text()):
                time.sleep(0.01)
            number = signal.SIGTERM if stop == 5 else signal.SIGKILL
            for rank in training:
                rank.send_signal(number)
            codes = {rank.wait() for rank in training}
            assert codes == {143 if number == signal.SIGTERM else -number}, "over before it was killed"
        assert [rank.wait() for rank in start_training(path, ranks)] == [0] * ranks
        last = checkpoint.complete_steps(folder / "04_train")[-1]
        left.append((captured.metrics(path), checkpoint.read_draft(last)[0], checkpoint.read_moments(last)))
    (records, *tensors), (others, *other_tensors) = left
    assert len(records) > 16
    assert records == others
    for ours, theirs in zip(tensors, other_tensors, strict=True):
        assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
