"""A dry run, a plan and a status change nothing: no unit, no file, no folder, no lock."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from drafter import config
from tests.conftest import CPU_CONFIG, free_port

SCRIPTS = Path(__file__).parents[1] / "scripts"
ALLOWED = {"systemctl": {"show", "cat"}, "sudo": {"-l"}, "nvidia-smi": {"-L"}, "journalctl": {"--no-pager"}}
RECORD = '#!/bin/sh\necho "{name} $*" >> "$RECORD"\n{then}\n'
SHOW = "printf 'LoadState=loaded\\nActiveState=inactive\\nNRestarts=0\\nUser=daemon\\nUMask=0022\\n'"
COMMANDS = [
    *(f"{script.name} --dry-run" for script in sorted(config.ROOT.glob("0*.py"))),
    "05_export_checkpoint.py --smoke --dry-run",
    "-m drafter.pipeline --dry-run",
    "-m drafter.pipeline --plan",
    "-m drafter.pipeline status",
    "-m drafter.pipeline.plan",
    "-m drafter.pipeline.status",
    "-m drafter.serve status generate",
    "-m drafter.serve status evaluate",
    "-m drafter.disk du",
    "-m drafter.disk clean",
]


@pytest.fixture
def machine(tmp_path):
    """Recording programs first on PATH, and a home, a TMPDIR and a run folder of this test alone."""
    for name in ("bin", "home", "tmp", "runs"):
        (tmp_path / name).mkdir()
    programs = {"systemctl": SHOW, "sudo": '[ "$1" = -l ] || { shift; exec "$@"; }', "journalctl": ":"}
    programs["nvidia-smi"] = 'case "$1" in --query-gpu=*) echo "0, 5";; esac'
    for name, then in programs.items():
        path = tmp_path / "bin" / name
        path.write_text(RECORD.format(name=name, then=then))
        path.chmod(0o755)
    return tmp_path


def snapshot(folder: Path) -> dict[str, tuple]:
    """Every file and folder below it with its kind, size, and when it or what it holds was last changed."""
    found = {}
    for path in [folder, *folder.rglob("*")]:
        about = path.lstat()
        found[str(path.relative_to(folder))] = (about.st_mode, about.st_size, about.st_mtime_ns)
    return found


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("command", COMMANDS)
def test_what_only_looks_changes_nothing(machine, model, command, begun):
    """Seam H4: a dry run stopped an idle unit, made a folder to see how, and kept what the engine said."""
    if begun:
        for name in config.STAGES:
            (folder := machine / "runs/smollm2_cpu" / name).mkdir(parents=True)
            manifest = {"stage": name, "status": "interrupted", "question": {}, "facts": {}, "seconds": 1.0}
            (folder / "manifest.json").write_text(json.dumps(manifest))
    sets = [f"run.dir={machine / 'runs'}", f"servers.evaluate.python={SCRIPTS / 'fake_vllm'}"]
    for role in ("generate", "extract", "evaluate"):
        sets.append(f"servers.{role}.url=http://127.0.0.1:{free_port()}")
    for role, prefix in (("generate", "[sudo, -n, systemctl]"), ("extract", "[systemctl]")):
        sets += [f"servers.{role}.kind=systemd", f"servers.{role}.unit=vllm-{role}"]
        sets.append(f"servers.{role}.systemctl={prefix}")
    sets += ["servers.evaluate.gpus=[0]"]
    line = [sys.executable, *command.split(), "--config", str(CPU_CONFIG)]
    line += [part for each in sets for part in ("--set", each)]
    environment = os.environ | {
        "PATH": f"{machine / 'bin'}:{os.environ['PATH']}",
        "RECORD": str(machine / "record"),
        "HOME": str(machine / "home"),
        "TMPDIR": str(machine / "tmp"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": str(config.ROOT),
    }
    (machine / "record").touch()
    names = {"home", "runs"}
    claims = set(Path("/tmp").glob("drafter-*"))
    before = {name: snapshot(machine / name) for name in names}
    done = subprocess.run(line, cwd=config.ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode in (0, 2, 3), done.stderr  # 2: refused, of no question or no server; 3: a server is down
    assert "Traceback" not in done.stderr
    assert {name: snapshot(machine / name) for name in names} == before
    assert list((machine / "tmp").iterdir()) == [] and set(Path("/tmp").glob("drafter-*")) == claims
    for call in (machine / "record").read_text().splitlines():
        name, verb, *_ = call.split()
        if name == "sudo" and verb == "-n":
            name, verb = call.split()[2:4]
        assert verb in ALLOWED[name] or verb.startswith("--query"), call
