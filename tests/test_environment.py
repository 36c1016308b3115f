"""What the caller's shell, folder and /proc hold changes nothing about what runs."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from drafter import config, process, stage, torchrun_env
from drafter.extract import writer
from drafter.serve import vllm_command
from drafter.train import distributed
from tests.conftest import CPU_CONFIG, free_port

RANKS = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "192.0.2.1"}


@pytest.fixture
def load(tmp_path):
    def make(*overrides):
        return config.load(CPU_CONFIG, [f"run.dir={tmp_path / 'runs'}", *overrides])

    return make


@pytest.fixture
def elsewhere(tmp_path, monkeypatch) -> Path:
    """The caller's folder, with names of ours and of packages in it; each leaves a mark when it is imported."""
    folder = tmp_path / "elsewhere"
    for name in ("drafter", "vllm", "torch", "yaml", "pydantic", "aiohttp"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(f"open({str(folder / 'imported')!r}, 'a').write('{name} ')\n")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", ":")  # as `export PYTHONPATH=$PYTHONPATH:` leaves it: the caller's folder
    return folder


def test_without_torchrun_rank_and_its_like_mean_nothing(monkeypatch):
    """Seam B19: another launcher, or a shell inside one, has set them."""
    for name, value in RANKS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(torchrun_env.MARK, raising=False)
    own = distributed.Ranks()
    assert (own.rank, own.world, own.main, stage.is_main_process()) == (0, 1, True, True)
    monkeypatch.setenv(torchrun_env.MARK, "1")
    assert stage.is_main_process() is False


def test_a_script_with_rank_in_its_environment_prints_its_summary(load, model):
    """Seam B19: rank 1 of nothing said nothing, and the pipeline read no line."""
    line = [sys.executable, str(config.ROOT / "01b_generate_synthetic.py"), "--dry-run", *load().arguments]
    done = subprocess.run(line, env=os.environ | RANKS, capture_output=True, text=True, timeout=120)
    assert json.loads(done.stdout)["stage"] == "01b_synthetic", done.stderr


def test_a_server_is_no_rank_of_another_program(load, monkeypatch):
    """Seam B19"""
    for name, value in RANKS.items():
        monkeypatch.setenv(name, value)
    assert not set(vllm_command.environment(load().servers.generate)) & set(torchrun_env.VARIABLES)


def test_a_server_command_imports_nothing_from_the_callers_folder(load, elsewhere):
    """Seam B06: `-m` and `-c` put it first."""
    environment = vllm_command.environment(load().servers.generate)
    asked = "import drafter, torch, yaml; print(drafter.__file__)"
    for line in ([sys.executable, "-c", asked], [sys.executable, "-m", "drafter.pipeline.torchrun", "--help"]):
        done = process.run(line, timeout=120, env=environment)
        assert done.returncode == 0, done.stderr
    assert not (elsewhere / "imported").exists()


def test_the_pipeline_imports_nothing_from_the_callers_folder(load, elsewhere, model):
    """Seam B06: run_pipeline.sh, the stages that it asks and the engine."""
    urls = [f"servers.{role}.url=http://127.0.0.1:{free_port()}" for role in ("generate", "extract", "evaluate")]
    fake = f"servers.evaluate.python={config.ROOT / 'tests/scripts/fake_vllm'}"
    run_config = load(*urls, fake, f"servers.generate.python={sys.executable}")
    line = [str(config.ROOT / "run_pipeline.sh"), str(CPU_CONFIG), "--dry-run", *run_config.arguments[2:]]
    done = subprocess.run(
        line, env=os.environ | {"PYTHON": sys.executable}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert not (elsewhere / "imported").exists(), (elsewhere / "imported").read_text()


def test_the_writer_of_states_imports_nothing_from_the_callers_folder(elsewhere):
    """Seam B06"""
    from multiprocessing import Pipe

    ours, theirs = Pipe()
    arena = os.memfd_create("arena")
    os.truncate(arena, 4096)
    started = writer.start_writer(arena, theirs, 4096, 1)
    ours.send(None)
    assert started.wait(60) == 0
    assert not (elsewhere / "imported").exists()


HIDDEN = """
import ctypes, os, subprocess, sys, time
from drafter import process
dumpable = sys.argv[1]
hide = f"import ctypes, signal, time; ctypes.CDLL(None).prctl(4, {dumpable}); signal.signal(15, signal.SIG_IGN)"
child = subprocess.Popen([sys.executable, "-c", f"{hide}; print(1, flush=True); time.sleep(60)"],
                         stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
record = process.identity(child.pid)
alive, seen = process.lives(record), process.start_time(child.pid) is not None
left = process.end_session(child.pid, 0.2)
child.wait()
try:
    os.kill(child.pid, 0)
except ProcessLookupError:
    print(alive, seen, left, process.lives(record))
"""


@pytest.mark.parametrize(("hidepid", "dumpable", "seen"), [(1, 1, True), (2, 1, True), (1, 0, False), (2, 0, False)])
def test_a_server_that_proc_hides_is_alive_until_it_is_ended(hidepid, dumpable, seen):
    """Seam B04: by an ordinary user, whom /proc shows no other user's processes, in a mount namespace."""
    python = shutil.which("python3", path="/usr/bin:/bin")  # this one may lie below /root; process needs no packages
    if os.getuid() or not all((python, shutil.which("unshare"), shutil.which("setpriv"))):
        pytest.skip("needs root, unshare, setpriv and a Python of the system")
    user = "setpriv --reuid 65534 --regid 65534 --clear-groups"
    inside = f'mount -t proc -o hidepid={hidepid} proc /proc && exec {user} "$@"'
    line = ["unshare", "-m", "sh", "-c", inside, "sh", python, "-c", HIDDEN, str(dumpable)]
    environment = os.environ | process.import_path() | {"PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, env=environment)
    if "mount:" in done.stderr:
        pytest.skip(f"no /proc with hidepid here: {done.stderr}")
    assert done.stdout == f"True {seen} [] False\n", done.stderr
