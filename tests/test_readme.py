"""Every command the documents show is one that works: executed, or executed up to the point where it would begin."""

import hashlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from drafter import cli, config
from drafter.pipeline import run as pipeline
from tests.conftest import CPU_CONFIG

PAGES = (config.ROOT / "README.md", config.ROOT / "docs/operations.md")
APACHE = "c71d239df91726fc519c6eb72d318ec65820627232b2f796219e87dcf35d0ab4"  # sha256 of the licence's text
ELSEWHERE = (
    "sudo",
    "sed",
    "umask",
    "xdg-open",
    "tmux",
    "tests/run.sh",
    "journalctl",
    "systemctl",
    "operator",
    "hf",
    "--speculative-config",
)


def commands(pages: tuple[Path, ...] = PAGES) -> list[str]:
    """The indented lines of the documents, comments taken off."""
    found = []
    for page in pages:
        for line in re.findall(r"^    (\S.*)$", page.read_text(), re.M):
            found.append(re.split(r"\s{2,}#|,? {2,}#", line)[0].strip())
    return sorted(set(found))


@pytest.mark.parametrize("command", commands())
def test_a_documented_command_is_understood(command, tmp_path):
    words = shlex.split(command)
    words = [word for word in words if not re.fullmatch(r"[A-Z_]+=\S+", word)]  # variables before the command
    if words[0] in ELSEWHERE:
        return
    here = ["--set", f"run.dir={tmp_path}"]
    if words[0] == "./run_pipeline.sh":
        args = cli.parse(words[1:])
        config.load(args.config or CPU_CONFIG, args.overrides)
        assert pipeline.chosen(args.first, args.only)
        if not args.plan and not args.status:
            return  # the pipeline's own tests run it
        words += here
    elif words[:3] == ["python", "-m", "drafter.serve"]:
        verb = "check" if words[3] == "check" else "status"
        words = [sys.executable, "-m", "drafter.serve", verb, *words[4:], *here]
    elif words[0] == "python":
        words = [sys.executable, *words[1:], *here, *(["--dry-run"] if words[1].startswith("0") else [])]
    env = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run(words, cwd=config.ROOT, env=env, capture_output=True, text=True)
    not_running = [3] if "drafter.serve" in words else []
    not_installed = [2] if "check" in words and "is not installed here" in done.stdout else []
    assert done.returncode in (0, *not_running, *not_installed), done.stderr


def test_the_licence_is_the_whole_text_that_the_readme_names():
    text = (config.ROOT / "LICENSE").read_bytes()
    assert hashlib.sha256(text).hexdigest() == APACHE and "Apache-2.0" in PAGES[0].read_text()


def test_each_stage_by_hand_names_its_config():
    """Without --config a command means the default run, whatever was run before."""
    by_hand = [line for line in commands(PAGES[:1]) if re.match(r"python (0|-m drafter\.serve)", line)]
    assert len(by_hand) >= 3 and all("--config" in line for line in by_hand)


def test_the_documents_name_only_files_that_exist():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
