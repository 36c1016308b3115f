"""Files are whole or absent."""

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from drafter import artifacts, config
from drafter.errors import ConfigError, ContractError


def run_and_kill(code, *args):
    """Run Python that kills itself; the exit status must be SIGKILL's."""
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, args)]
    done = subprocess.run(command, cwd=config.ROOT, timeout=60)
    assert done.returncode == -signal.SIGKILL


def test_publish_leaves_the_old_bytes_when_writing_fails(tmp_path):
    target = tmp_path / "a.json"
    artifacts.write_json(target, {"a": 1})
    with pytest.raises(RuntimeError), artifacts.publish(target) as part:
        part.write_text("half")
        raise RuntimeError
    assert json.loads(target.read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_publish_replaces_a_folder_as_one(tmp_path):
    target = tmp_path / "export"
    for content in ("one", "two"):
        with artifacts.publish(target) as part:
            part.mkdir()
            (part / content).write_text(content)
    assert [p.name for p in target.iterdir()] == ["two"]


def test_sigkill_while_replacing_a_folder_leaves_the_old_one_the_new_one_or_none(tmp_path):
    """T13: never half of it under the final name."""
    target = tmp_path / "export"
    for content in ("one", "two"):
        run_and_kill(
            """
            import os, shutil, signal, sys
            from pathlib import Path
            from drafter import artifacts
            shutil.rmtree = lambda path, **_: path.exists() and os.kill(os.getpid(), signal.SIGKILL)
            with artifacts.publish(Path(sys.argv[1])) as part:
                part.mkdir()
                (part / "weights").write_text(sys.argv[2])
                (part / "config").write_text(sys.argv[2])
            os.kill(os.getpid(), signal.SIGKILL)
            """,
            target,
            content,
        )
        assert {path.name: path.read_text() for path in target.iterdir()} == {"weights": content, "config": content}
    with artifacts.publish(target) as part:
        part.mkdir()
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_sigkill_while_writing_leaves_no_final_name(tmp_path):
    """H10: a killed writer leaves a part, never a destination; the sweep takes the part."""
    run_and_kill(
        """
        import os, signal, sys
        from pathlib import Path
        from drafter import artifacts
        with artifacts.publish(Path(sys.argv[1])) as part:
            part.write_bytes(b"x" * 1000)
            os.kill(os.getpid(), signal.SIGKILL)
        """,
        tmp_path / "final",
    )
    assert not (tmp_path / "final").exists()
    assert artifacts.sweep(tmp_path) == 1
    assert list(tmp_path.iterdir()) == []


def test_published_files_follow_the_umask(tmp_path):
    """H09: readable by others, unlike a temporary file."""
    old = os.umask(0o022)
    try:
        artifacts.write_text(tmp_path / "x", "x")
    finally:
        os.umask(old)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o644


def test_a_journal_torn_at_any_byte_loses_only_its_last_record(tmp_path):
    """G22: a torn tail never glues to the next record."""
    path = tmp_path / "j.jsonl"
    with artifacts.Journal(path) as journal:
        for name in "abc":
            journal.append({"id": name})
    whole = path.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for end in range(last, len(whole)):
        path.write_bytes(whole[:end])
        with artifacts.Journal(path) as journal:
            journal.append({"id": "d"})
        assert [r["id"] for r in artifacts.read_jsonl(path, journal=True)] == ["a", "b", "d"]


def test_a_journal_holds_what_utf8_cannot(tmp_path):
    """G10: a lone surrogate is written, and U+2028 and U+0085 do not split a record."""
    text = "\ud83d half, \u2028 line, \u0085 next"
    with artifacts.Journal(tmp_path / "j.jsonl") as journal:
        journal.append({"text": text})
    assert [r["text"] for r in artifacts.read_jsonl(tmp_path / "j.jsonl")] == [text]


def test_a_torn_last_line_is_no_record_of_a_journal_and_damage_in_a_published_file(tmp_path):
    """Seam L8: a published file was whole when it got its name."""
    path = tmp_path / "j.jsonl"
    path.write_bytes(b'{"a":1}\n{"a":2}')
    assert [r["a"] for r in artifacts.read_jsonl(path, journal=True)] == [1]
    with pytest.raises(ContractError, match=rf"^{path}: line 2 is broken: the file ends in the middle of it$"):
        list(artifacts.read_jsonl(path))


@pytest.mark.parametrize("line", [b"{", b"null", b"[]", b"\0\0", b"\xff", b'{"b": 1}', b"[" * 100000])
def test_a_line_that_is_no_record_is_named(tmp_path, line):
    """G22: what is whole before it is read, nothing is passed over in silence."""
    path = tmp_path / "file.jsonl"
    path.write_bytes(b'{"a": 1}\n' + line + b'\n{"a": 2}\n')
    records = artifacts.read_jsonl(path, "a")
    assert next(records) == {"a": 1}
    with pytest.raises(ContractError, match=f"{path}: line 2 is broken"):
        next(records)


def test_fingerprint_follows_content_not_place(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "w.bin").write_bytes(bytes(3_000_000))
    same = artifacts.fingerprint_path(tmp_path / "one")
    assert artifacts.fingerprint_path(tmp_path / "two") == same
    artifacts.fingerprint_path.cache_clear()
    with open(tmp_path / "two" / "w.bin", "r+b") as file:
        file.seek(2_999_999)
        file.write(b"!")
    assert artifacts.fingerprint_path(tmp_path / "two") != same


def test_a_locked_folder_refuses_a_second_process_and_a_dead_one_frees_it(tmp_path):
    holder = "import sys; from pathlib import Path; from drafter import artifacts\n"
    holder += "with artifacts.locked(Path(sys.argv[1])): "
    with artifacts.locked(tmp_path):
        command = [sys.executable, "-c", holder + "pass", str(tmp_path)]
        done = subprocess.run(command, cwd=config.ROOT, capture_output=True, text=True)
        assert "another process is working" in done.stderr
    run_and_kill(holder + "import os; os.kill(os.getpid(), 9)", tmp_path)
    with artifacts.locked(tmp_path):
        pass


@pytest.mark.parametrize("there", ["link", "dangling link", "hard link", "pipe", "folder", "another user's"])
def test_what_stands_in_place_of_a_claim_is_said_and_left_alone(tmp_path, monkeypatch, there):
    """R02: the claims lie where every user of the machine can put what he likes."""
    monkeypatch.setattr(artifacts, "CLAIMS", tmp_path)
    path, other = tmp_path / "drafter-vllm-team.lock", tmp_path / "other"
    other.write_text("precious")

    def refuse(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    {
        "link": lambda: path.symlink_to(other),
        "dangling link": lambda: path.symlink_to(tmp_path / "none"),
        "hard link": lambda: path.hardlink_to(other),
        "pipe": lambda: os.mkfifo(path),
        "folder": path.mkdir,
        "another user's": lambda: monkeypatch.setattr(os, "open", refuse),
    }[there]()
    with pytest.raises(ConfigError, match=f"{path}.*; vllm-team is claimed with .*: remove what is there"):
        artifacts.claimed("vllm-team", "me").__enter__()
    assert other.read_text() == "precious" and not (tmp_path / "none").exists()


def test_whoever_holds_a_claim_is_named_in_one_line_whatever_he_wrote(tmp_path, monkeypatch):
    """R02"""
    monkeypatch.setattr(artifacts, "CLAIMS", tmp_path)
    monkeypatch.setattr(artifacts, "LOCK_SECONDS", 0)
    with artifacts.claimed("vllm-team", "me"):
        assert (tmp_path / "drafter-vllm-team.lock").stat().st_mode & 0o777 == 0o666
        (tmp_path / "drafter-vllm-team.lock").write_bytes(b"\xff\x1b[2J\nroot")
        with pytest.raises(ConfigError, match=r"^vllm-team is in use by \ufffd\[2Jroot; wait"):
            artifacts.claimed("vllm-team", "other").__enter__()


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.3, "0.3 s"), (20, "20 s"), (90, "90 s"), (120, "2 min"), (3600, "60 min")]
)
def test_a_time_is_told_in_a_unit_that_fits_it(seconds, said):
    assert artifacts.span(seconds) == said


def test_free_space_of_a_folder_that_does_not_exist_yet(tmp_path):
    assert artifacts.free_bytes(tmp_path / "a" / "b") > 0


def test_fingerprint_of_nothing_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        artifacts.fingerprint_path(tmp_path / "absent")
