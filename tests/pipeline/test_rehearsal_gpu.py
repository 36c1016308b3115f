"""The rehearsal of a Kimi-shaped target of true widths, by hand on a machine with GPUs, one form a call:

    python -m tests.wide_kimi /data/wide          # once; or without it, in a temporary folder for each test
    WIDE_KIMI=/data/wide python -m pytest -m gpu tests/pipeline/test_rehearsal_gpu.py -s -k bf16-1

vLLM on the CPU is no help: it has no drafter for an MLA target there, and prompts in one batch change its states.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from drafter.config import ROOT
from drafter.serve import unit_command, unit_file
from tests import tiny_models, wide_kimi
from tests.conftest import SERVED_TOKENS, free_port
from tests.pipeline.test_rehearsal import pieces

KIMI = ROOT / "configs/kimi_k25.yaml"
UNITS = {"generate": "vllm-kimi-k25-generate", "extract": "vllm-kimi-k25-extract"}
NEWER = ("decode-context-parallel-size", "watermark")  # not on few GPUs, not in vLLM 0.26
ROWS = {"generate.max_tokens": 2048, "target.max_seq_len": 2048, "acceptance.held_out": 2}


def overrides(folder: Path, target: Path, drafter: Path, ranks: int) -> dict:
    """The night's own config with this target, on so many GPUs; the two units as commands with the units' flags."""
    changes: dict = ROWS | {
        "run.dir": str(folder / "runs"), "run.name": "wide", "train.warm_start": str(drafter),
        "train.processes": ranks, "extract.reserve_gb": 1, "acceptance.drafters": ["warm_start", "run"],
        "prompts": [{"name": "sample", "path": "configs/prompts_sample.jsonl", "turns": "first"}],
        "target": {
            "model": str(target), "served_name": "kimi-k2.5", "layer_ids": [2, 4, 5, 8], "max_seq_len": 2048,
            "prompt_suffix": [tiny_models.THINK], "think_end": tiny_models.THINK_END,
            "special_tokens": {text: tiny_models.TOKEN_IDS[text] for text in SERVED_TOKENS},
        },
    }  # fmt: skip
    for role in ("generate", "extract", "evaluate"):
        server = {"kind": "command", "url": f"http://127.0.0.1:{free_port()}", "gpus": list(range(ranks))}
        if role in UNITS:
            unit = unit_file.shipped(UNITS[role])
            own = {"speculative-config", "kv-transfer-config", "trust-remote-code", *NEWER}
            server["args"] = {flag: value for flag, value in unit_command.role_args(unit).items() if flag not in own}
            server["env"] = {name: value for name, value in unit.environment.items() if name.startswith("NCCL")}
        else:
            server["args"] = {"max-num-seqs": 32, "language-model-only": True, "reasoning-parser": "kimi_k2"}
        server["args"] |= {"tensor-parallel-size": ranks, "max-model-len": 4096, "gpu-memory-utilization": 0.8}
        changes[f"servers.{role}"] = server
    return changes


def rehearse(changes: dict) -> tuple[int, str, str]:
    line = [sys.executable, "-P", "-m", "drafter.pipeline", str(KIMI), "--rehearse"]
    for key, value in changes.items():
        line += ["--set", f"{key}={json.dumps(value)}"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True)
    print(done.stderr[-6000:], done.stdout, sep="\n")
    return done.returncode, done.stdout, done.stderr


def models(folder: Path, int4: bool) -> tuple[Path, Path]:
    """Target and drafter: those of WIDE_KIMI where it names a folder, the target a copy that may be quantized."""
    made = os.environ.get("WIDE_KIMI")
    if made is None:
        target, drafter = wide_kimi.make(folder)
    else:
        target, drafter = Path(made) / "kimi", Path(made) / "drafter"
        if int4:
            target = Path(shutil.copytree(target, folder / "kimi"))
    return (tiny_models.make_int4(target) if int4 else target), drafter


NIGHT = ["target", "server generate", "01b_synthetic", "server extract", "02_hidden_states", "04_train", "05_export"]
NIGHT += ["server evaluate", "06_acceptance"]


@pytest.mark.gpu
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("form", ["bf16", "int4"])
def test_a_kimi_of_true_widths_is_rehearsed_whole(tmp_path, form, ranks):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    target, drafter = models(tmp_path, int4=form == "int4")
    code, page, err = rehearse(overrides(tmp_path, target, drafter, ranks))
    assert code == 0, err[-4000:]
    assert pieces(page) == dict.fromkeys(NIGHT, "passed")
    assert "4 of 8 layers" in page and f"2 steps on {ranks} rank" in page and "all layers compared" in page
