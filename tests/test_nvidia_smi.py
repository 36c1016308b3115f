"""Whatever nvidia-smi does, GPU memory is known or unknown: never free by mistake, never a traceback."""

import pytest

from drafter import gpu
from drafter.errors import ResumableError
from drafter.pipeline import preflight, status
from drafter.serve import readiness
from tests.pipeline.test_preflight import load  # noqa: F401 - a fixture

NO_FIGURE = """case "$*" in
 -L) echo "GPU 0: NVIDIA GB10 (UUID: GPU-00000000-0000-0000-0000-000000000000)";;
 *compute-apps*) : ;;
 *index*memory.used*) echo "0, [N/A]";;
esac
"""
FAILS = "echo 'NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.'; exit 9"
ANSWERS = {  # what it does -> what becomes of it, as a regular expression
    FAILS: "exit code 9: NVIDIA-SMI has failed",
    "exit 3": "exit code 3: no reason given",
    "kill -9 $$": "exit code -9",
    "exec sleep 60": r"nvidia-smi .* has not ended after 0\.2 s",
    "true": "lists no GPU",
    r"printf '\xff\xfe'": "nvidia-smi gave",
    "echo 0, [GPU is lost]": "nvidia-smi gave '0, .GPU is lost.'",
    "echo 0, -5": "nvidia-smi gave",
    "echo 0": "nvidia-smi gave",
    "echo 'Field \"memory.used\" is not a valid field to query.'": "nvidia-smi gave",
    "echo GPU-1, 5": "nvidia-smi gave",
}


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Puts an nvidia-smi with this body on PATH; None: there is none."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr(gpu, "DRIVER", tmp_path / "driver")
    monkeypatch.setattr(gpu, "ANSWER_SECONDS", 0.2)

    def make(body: str | None, mode: int = 0o755) -> None:
        if body is not None:
            (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{body}\n")
            (folder / "nvidia-smi").chmod(mode)

    return make


@pytest.mark.parametrize("body", ANSWERS)
def test_an_answer_without_figures_is_unknown_and_never_free_or_not_loaded(smi, body, model):
    """Seam M6: the wait for free memory ends with an error that says what nvidia-smi did."""
    smi(body)
    found = gpu.query_memory()
    assert not found.gpus and found.unknown and not found.lasting
    assert isinstance(gpu.names(), list)
    with pytest.raises(ResumableError, match=rf"unknown after 0 s: .*{ANSWERS[body]}"):
        gpu.wait_free([0], 0)
    assert gpu.not_loaded([0], model) is None
    gpu.wait_free([], 0)


def test_a_gpu_without_a_figure_is_there_and_is_not_waited_for(smi, model, caplog):
    """Seam B03: GPUs that share the host's memory, as GB10."""
    caplog.set_level("INFO")
    smi(NO_FIGURE)
    assert gpu.query_memory() == gpu.Memory({}, frozenset({0}))
    gpu.wait_free([0], 60)
    assert "GPU memory is unknown, not waiting for it: GPU 0" in caplog.text
    assert gpu.not_loaded([0], model) is None


def test_a_machine_without_nvidia_smi_and_without_a_driver_has_no_gpu(smi, tmp_path):
    """Seam M6: it is told from one that has a driver and cannot be asked."""
    smi(None)
    assert gpu.query_memory() == gpu.Memory({})
    gpu.wait_free([0], 60)
    gpu.DRIVER.touch()
    assert gpu.query_memory() == gpu.Memory({}, unknown="nvidia-smi: No such file or directory", lasting=True)
    gpu.wait_free([0], 60)


def test_an_nvidia_smi_that_this_user_may_not_run_is_unknown(smi):
    """Seam B11"""
    smi("echo 0, 5", mode=0o644)
    assert gpu.query_memory() == gpu.Memory({})
    gpu.DRIVER.touch()
    assert gpu.query_memory() == gpu.Memory({}, unknown="nvidia-smi: Permission denied", lasting=True)


def test_an_nvidia_smi_that_recovers_in_time_is_waited_for(smi, tmp_path):
    """Seam M6: a driver that hangs for a moment does not end the night."""
    smi(f"[ -f {tmp_path}/again ] && echo 0, 5 && exit; touch {tmp_path}/again; {FAILS}")
    gpu.wait_free([0], 60)
    assert (tmp_path / "again").exists()


def test_holders_of_any_form_are_named(smi):
    """Seam M6: a process whose name holds commas, a figure that is not given, a broken line."""
    smi("case $1 in *apps*) echo '7, a, b, 5'; echo '8, c, [N/A]'; echo what;; *) echo 0, 80000;; esac")
    expected = r"held by process 7 a, b \(5 MiB\), process 8 c \(\[N/A\] MiB\)$"
    with pytest.raises(ResumableError, match=expected):
        gpu.wait_free([0], 0)
    smi(f"case $1 in *apps*) {FAILS};; *) echo 0, 80000;; esac")
    with pytest.raises(ResumableError, match=r"held by unknown processes \(nvidia-smi failed"):
        gpu.wait_free([0], 0)


@pytest.mark.parametrize("body", [*ANSWERS, NO_FIGURE])
def test_no_command_ends_in_a_traceback(smi, body, load):  # noqa: F811
    """Seam B03: preflight and status say that the GPUs cannot be asked; a config that names none goes on."""
    smi(body)
    found = list(preflight.gpus(load("servers.evaluate.gpus=[0]")))
    assert [("it is unknown whether GPU 0 is free" in line) for line in found] == ([True] if body in ANSWERS else [])
    assert list(preflight.gpus(load())) == list(preflight.ranks(load())) == []
    (load().run_dir / "01b_synthetic").mkdir(parents=True)
    (load().run_dir / "01b_synthetic/manifest.json").write_text('{"status": "partial", "question": {}}')
    shown = "\n".join(status.lines(load()))
    assert "GPU memory: unknown (nvidia-smi" in shown if body in ANSWERS else "GPU 0: unknown" in shown
    assert readiness.why_unready(load(), "generate").cause is readiness.Cause.NO_ANSWER
