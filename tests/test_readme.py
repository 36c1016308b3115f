"""Every command the documents show is one that works: executed, or executed up to the point where it would begin."""

import os
import re
import shlex
import subprocess
import sys

import pytest

from drafter.config import ROOT
from drafter.pipeline import parser

PAGES = (ROOT / "README.md", ROOT / "docs/operations.md")
ELSEWHERE = ("sudo", "xdg-open", "tmux", "tests/run.sh", "journalctl", "systemctl", "systemd-run", "nvidia-smi")


def commands() -> list[str]:
    """The indented lines of the documents, comments taken off."""
    found = []
    for page in PAGES:
        for line in re.findall(r"^    (\S.*)$", page.read_text(), re.M):
            found.append(re.split(r"\s{2,}#|,? {2,}#", line)[0].strip())
    return sorted(set(found))


@pytest.mark.parametrize("command", commands())
def test_a_documented_command_is_understood(command, tmp_path):
    words = shlex.split(command)
    words = [word for word in words if not re.fullmatch(r"[A-Z_]+=\S+", word)]  # variables before the command
    if words[0] in ELSEWHERE:
        return
    env = os.environ | {"PYTHON": sys.executable}
    if words[0] == "./run_pipeline.sh":
        parser().parse_args(words[1:])
        if not {"status", "--plan", "--dry-run"} & set(words):
            words.append("--dry-run")
        words += ["--set", f"run.dir={tmp_path}"]
    elif words[:3] == ["python", "-m", "drafter.server"]:
        words = [sys.executable, "-m", "drafter.server", "status", *words[4:], "--set", f"run.dir={tmp_path}"]
    elif words[0] == "python":
        words[0] = sys.executable
        if words[1].startswith("0"):
            words += ["--dry-run"]
        words += ["--set", f"run.dir={tmp_path}"]
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_documents_name_only_files_that_exist():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
