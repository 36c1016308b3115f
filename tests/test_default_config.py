"""One machine, one default config, whichever command is called without one."""

import os
import sys

import pytest

from drafter import gpu
from drafter.config import ROOT
from drafter.config.default import default_config
from drafter.errors import ConfigError
from drafter.process import run


def test_no_config_is_chosen_for_a_machine_whose_gpus_are_unknown(tmp_path, monkeypatch):
    """Seam M6: behind a driver that hung, a GPU machine began a night on its CPU."""
    program = tmp_path / "nvidia-smi"
    program.touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(gpu, "DRIVER", tmp_path / "driver")
    chosen = {"exit 9": "smollm2_cpu.yaml", "echo 0, 17": "smollm2_gpu.yaml", "echo 0, [N/A]": "smollm2_gpu.yaml"}
    for body, name in chosen.items():
        program.write_text(f"#!/bin/sh\n{body}\n")
        assert default_config().name == name
    gpu.DRIVER.touch()
    program.write_text("#!/bin/sh\nexit 9\n")
    with pytest.raises(ConfigError, match="exit code 9.*name the config"):
        default_config()


@pytest.mark.parametrize(("answer", "name"), [("exit 9", "smollm2_cpu"), ("echo 0, 17", "smollm2_gpu")])
def test_scripts_and_the_pipeline_take_the_same_default_config(tmp_path, monkeypatch, answer, name):
    program = tmp_path / "nvidia-smi"
    program.touch(mode=0o755)
    program.write_text(f"#!/bin/sh\n{answer}\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    sets = ["--set", f"run.dir={tmp_path / 'runs'}"]
    pipeline = run([sys.executable, "-m", "drafter.pipeline", "status", *sets], 60, cwd=ROOT)
    script = run([sys.executable, "05_export_checkpoint.py", "--dry-run", *sets], 120, cwd=ROOT)
    tool = run([sys.executable, "-m", "drafter.pipeline.report", *sets], 60, cwd=ROOT)
    assert f"run {name} has not begun" in pipeline.stdout and f"run {name} has not begun" in tool.stderr
    assert f"runs/{name}/04_train" in script.stdout
