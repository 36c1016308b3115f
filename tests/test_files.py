"""Files are whole or absent."""

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from drafter import config, files
from drafter.errors import ConfigError, ContractError


def run_and_kill(code, *args):
    """Run Python that kills itself; the exit status must be SIGKILL's."""
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, args)]
    done = subprocess.run(command, cwd=config.ROOT, timeout=60)
    assert done.returncode == -signal.SIGKILL


def test_publish_leaves_the_old_bytes_when_writing_fails(tmp_path):
    target = tmp_path / "a.json"
    files.write_json(target, {"a": 1})
    with pytest.raises(RuntimeError), files.publish(target) as part:
        part.write_text("half")
        raise RuntimeError
    assert json.loads(target.read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_publish_replaces_a_folder_as_one(tmp_path):
    target = tmp_path / "export"
    for content in ("one", "two"):
        with files.publish(target) as part:
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
            from drafter import files
            shutil.rmtree = lambda path, **_: path.exists() and os.kill(os.getpid(), signal.SIGKILL)
            with files.publish(Path(sys.argv[1])) as part:
                part.mkdir()
                (part / "weights").write_text(sys.argv[2])
                (part / "config").write_text(sys.argv[2])
            os.kill(os.getpid(), signal.SIGKILL)
            """,
            target,
            content,
        )
        assert {path.name: path.read_text() for path in target.iterdir()} == {"weights": content, "config": content}
    with files.publish(target) as part:
        part.mkdir()
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


ONE_STEP_AND_TWO = {"in one step": "", "in two steps": "files._rename_exchange = lambda *_: False"}


@pytest.fixture(params=ONE_STEP_AND_TWO)
def way(request, monkeypatch):
    """How a folder is exchanged, here and as code for a child: a file system may lack RENAME_EXCHANGE."""
    if request.param == "in two steps":
        monkeypatch.setattr(files, "_rename_exchange", lambda *_: False)
    return ONE_STEP_AND_TWO[request.param]


def publish_folder(target, content):
    with files.publish(target) as part:
        part.mkdir()
        (part / "weights").write_text(content)


@pytest.mark.parametrize("number", [1, 2])
def test_a_replacement_that_fails_at_any_step_leaves_a_whole_folder(tmp_path, monkeypatch, way, number):
    """Seam M4: the old one was gone when the second rename failed."""
    target, renames = tmp_path / "model", []
    publish_folder(target, "old")

    def rename(path, other):
        renames.append(path)
        if len(renames) == number:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.rename(path, other)

    monkeypatch.setattr(Path, "rename", rename)
    failed = False
    try:
        publish_folder(target, "new")
    except OSError:
        failed = True
    assert failed == (number <= (2 if way else 1))
    assert (target / "weights").read_text() == ("old" if way else "new")
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.parametrize("finder", ["sweep", "publish"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_after_a_kill_at_any_step_of_a_replacement_a_whole_folder_has_the_name(tmp_path, way, number, finder):
    """Seam K5, Seam M4: what was set aside is restored; it was swept with the rest."""
    target = tmp_path / "model"
    publish_folder(target, "old")
    run_and_kill(
        f"""
        import os, signal, sys
        from pathlib import Path
        from drafter import files
        {way}
        renames = 0
        def dies(real):
            def act(*paths):
                global renames
                done = real(*paths)
                renames += 1
                if renames == int(sys.argv[2]):
                    os.kill(os.getpid(), signal.SIGKILL)
                return done
            return act
        Path.rename, files.fsync_dir = dies(Path.rename), dies(files.fsync_dir)
        with files.publish(Path(sys.argv[1])) as part:
            part.mkdir()
            (part / "weights").write_text("new")
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        target,
        number,
    )
    if finder == "sweep":
        files.sweep(tmp_path)
        assert (target / "weights").read_text() in ("old", "new")
        assert os.listdir(tmp_path) == ["model"]
    else:
        with pytest.raises(RuntimeError), files.publish(target):
            raise RuntimeError
        assert (target / "weights").read_text() in ("old", "new")


def test_everything_of_a_published_folder_is_durable_before_it_has_its_name(tmp_path, monkeypatch):
    """Seam M4: the folder's own entry list too, not its files alone."""
    synced = []
    real = os.fsync

    def fsync(descriptor):
        synced.append(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with files.publish(tmp_path / "model") as part:
        (part / "inner").mkdir(parents=True)
        (part / "inner/weights").write_text("x")
    name = part.name
    assert set(synced[:-1]) == {name, f"{name}/inner", f"{name}/inner/weights"} and synced[-1] == "."


def test_a_link_is_replaced_and_not_what_it_points_to(tmp_path):
    """Seam M4"""
    publish_folder(tmp_path / "elsewhere", "theirs")
    (tmp_path / "model").symlink_to("elsewhere")
    publish_folder(tmp_path / "model", "ours")
    assert (tmp_path / "model/weights").read_text() == "ours" and not (tmp_path / "model").is_symlink()
    assert (tmp_path / "elsewhere/weights").read_text() == "theirs"
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "model"]


def test_sigkill_while_writing_leaves_no_final_name(tmp_path):
    """H10: a killed writer leaves a part, never a destination; the sweep takes the part."""
    run_and_kill(
        """
        import os, signal, sys
        from pathlib import Path
        from drafter import files
        with files.publish(Path(sys.argv[1])) as part:
            part.write_bytes(b"x" * 1000)
            os.kill(os.getpid(), signal.SIGKILL)
        """,
        tmp_path / "final",
    )
    assert not (tmp_path / "final").exists()
    assert files.sweep(tmp_path) == 1
    assert list(tmp_path.iterdir()) == []


def test_published_files_follow_the_umask(tmp_path):
    """H09: readable by others, unlike a temporary file."""
    old = os.umask(0o022)
    try:
        files.write_text(tmp_path / "x", "x")
    finally:
        os.umask(old)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o644


def test_a_journal_torn_at_any_byte_loses_only_its_last_record(tmp_path):
    """G22: a torn tail never glues to the next record."""
    path = tmp_path / "j.jsonl"
    with files.Journal(path) as journal:
        for name in "abc":
            journal.append({"id": name})
    whole = path.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for end in range(last, len(whole)):
        path.write_bytes(whole[:end])
        with files.Journal(path) as journal:
            journal.append({"id": "d"})
        assert [r["id"] for r in files.read_jsonl(path, journal=True)] == ["a", "b", "d"]


def test_a_journal_holds_what_utf8_cannot(tmp_path):
    """G10: a lone surrogate is written, and U+2028 and U+0085 do not split a record."""
    text = "\ud83d half, \u2028 line, \u0085 next"
    with files.Journal(tmp_path / "j.jsonl") as journal:
        journal.append({"text": text})
    assert [r["text"] for r in files.read_jsonl(tmp_path / "j.jsonl")] == [text]


def test_a_torn_last_line_is_no_record_of_a_journal_and_damage_in_a_published_file(tmp_path):
    """Seam L8: a published file was whole when it got its name."""
    path = tmp_path / "j.jsonl"
    path.write_bytes(b'{"a":1}\n{"a":2}')
    assert [r["a"] for r in files.read_jsonl(path, journal=True)] == [1]
    with pytest.raises(ContractError, match=rf"^{path}: line 2 is broken: the file ends in the middle of it$"):
        list(files.read_jsonl(path))


@pytest.mark.parametrize("line", [b"{", b"null", b"[]", b"\0\0", b"\xff", b'{"b": 1}', b"[" * 100000])
def test_a_line_that_is_no_record_is_named(tmp_path, line):
    """G22: what is whole before it is read, nothing is passed over in silence."""
    path = tmp_path / "file.jsonl"
    path.write_bytes(b'{"a": 1}\n' + line + b'\n{"a": 2}\n')
    records = files.read_jsonl(path, "a")
    assert next(records) == {"a": 1}
    with pytest.raises(ContractError, match=f"{path}: line 2 is broken"):
        next(records)


def test_fingerprint_follows_content_not_place(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "w.bin").write_bytes(bytes(3_000_000))
    same = files.fingerprint_path(tmp_path / "one")
    assert files.fingerprint_path(tmp_path / "two") == same
    files.fingerprint_path.cache_clear()
    with open(tmp_path / "two" / "w.bin", "r+b") as file:
        file.seek(2_999_999)
        file.write(b"!")
    assert files.fingerprint_path(tmp_path / "two") != same


def test_free_space_of_a_folder_that_does_not_exist_yet(tmp_path):
    assert files.free_bytes(tmp_path / "a" / "b") > 0


def test_fingerprint_of_nothing_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        files.fingerprint_path(tmp_path / "absent")
