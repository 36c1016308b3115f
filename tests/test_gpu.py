"""What only GPUs show, by hand on a machine that has them: pytest -m gpu tests/test_gpu.py"""

import json
from pathlib import Path

import pytest
import torch
from test_acceptance import COMMA, PROMPTS, make_run, one_word_drafter, one_word_length, script

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
