"""Locks on folders and names: exclusive for who works, shared for who reads, gone with the process."""

import errno
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading

import pytest

from drafter import config, locks
from drafter.errors import ConfigError
from tests.holding import held


def test_a_locked_folder_refuses_a_second_process_and_a_dead_one_frees_it(tmp_path):
    holder = "import sys; from pathlib import Path; from drafter import locks\n"
    holder += "with locks.locked(Path(sys.argv[1])): "
    with locks.locked(tmp_path):
        command = [sys.executable, "-c", holder + "pass", str(tmp_path)]
        done = subprocess.run(command, cwd=config.ROOT, capture_output=True, text=True)
        assert "another process is working" in done.stderr
    code = holder + "import os; os.kill(os.getpid(), 9)"
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=config.ROOT, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    with locks.locked(tmp_path):
        pass


@pytest.mark.parametrize("there", ["link", "dangling link", "hard link", "pipe", "folder", "another user's"])
def test_another_file_in_place_of_a_claim_is_reported_and_left_alone(tmp_path, monkeypatch, there):
    """R02: the claims lie where every user of the machine can put what he likes."""
    monkeypatch.setattr(locks, "CLAIMS", tmp_path)
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
    with pytest.raises(ConfigError, match=f"{path}.*the lock file of vllm-team: remove it"):
        locks.claimed("vllm-team", "me").__enter__()
    assert other.read_text() == "precious" and not (tmp_path / "none").exists()


def test_the_holder_of_a_claim_is_named_in_one_line_whatever_the_file_holds(tmp_path, monkeypatch):
    """R02"""
    monkeypatch.setattr(locks, "CLAIMS", tmp_path)
    monkeypatch.setattr(locks, "LOCK_SECONDS", 0)
    with locks.claimed("vllm-team", "me"):
        assert (tmp_path / "drafter-vllm-team.lock").stat().st_mode & 0o777 == 0o666
        (tmp_path / "drafter-vllm-team.lock").write_bytes(b"\xff\x1b[2J\nroot")
        with pytest.raises(ConfigError, match=r"^vllm-team is in use by \ufffd\[2Jroot; wait"):
            locks.claimed("vllm-team", "other").__enter__()


def test_many_processes_read_a_folder_and_none_works_in_it_meanwhile(tmp_path):
    """Seam M1: readers hold a shared lock where deletion can meet them."""
    with held("reading", tmp_path), locks.reading(tmp_path):
        assert not locks.in_use(tmp_path) and locks.in_use(tmp_path, readers=True)
        with pytest.raises(ConfigError, match=f"^another process is reading {tmp_path}; wait for it or stop it$"):
            locks.locked(tmp_path, seconds=0).__enter__()
    with locks.locked(tmp_path):
        pass


def test_a_folder_in_which_a_process_works_is_not_read_and_the_message_names_the_process(tmp_path):
    """Seam M1"""
    with held("working", tmp_path, "04_train") as holder:
        said = f"in {tmp_path} (04_train, process {holder.pid} on {socket.gethostname()}); wait for it or stop it"
        for act in (lambda: locks.reading(tmp_path), lambda: locks.locked(tmp_path, seconds=0)):
            with pytest.raises(ConfigError) as refused:
                act().__enter__()
            assert str(refused.value) == f"another process is working {said}"
        assert locks.in_use(tmp_path)
    assert not locks.in_use(tmp_path, patience=30)
    with locks.reading(tmp_path):
        pass


def test_a_share_of_a_divided_folder_keeps_readers_out(tmp_path):
    """Seam M1: several hosts work in 02's folder, each under the lock of its share."""
    share = tmp_path / locks.SHARES / "1of2"
    with held("working", share), pytest.raises(ConfigError, match=f"another process is working in {share}"):
        locks.reading(tmp_path).__enter__()
    with locks.reading(tmp_path):
        pass


def test_another_users_lock_file_is_locked_although_it_cannot_be_written(tmp_path, monkeypatch):
    """Seam M1: made under umask 022 in a folder that a group shares."""
    real = os.open

    def refuse(path, flags, *rest):
        if flags & os.O_RDWR and str(path).endswith(locks.LOCK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, flags, *rest)

    (tmp_path / locks.LOCK).touch()
    monkeypatch.setattr(os, "open", refuse)
    with locks.reading(tmp_path), held("reading", tmp_path):
        assert locks.in_use(tmp_path, readers=True) and not locks.in_use(tmp_path)
    with held("working", tmp_path), pytest.raises(ConfigError, match="another process is working"):
        locks.reading(tmp_path).__enter__()
    with pytest.raises(PermissionError):
        locks.locked(tmp_path).__enter__()


def test_what_does_not_exist_is_read_without_a_trace(tmp_path):
    with locks.reading(tmp_path / "none"):
        assert not (tmp_path / "none").exists()


def test_a_lock_on_a_file_that_was_removed_meanwhile_is_taken_again(tmp_path, monkeypatch):
    """Seam M13: between opening and locking another process may remove the file, or the folder with it."""
    folder, real, removals = tmp_path / "folder", fcntl.flock, iter([True, True, False, False])

    def flock(descriptor, how):
        if next(removals):
            shutil.rmtree(folder)
        return real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with locks.locked(folder):
        monkeypatch.undo()
        assert locks.in_use(folder)
    assert next(removals) is False


def test_a_process_that_waits_for_a_lock_whose_file_is_removed_locks_the_new_file(tmp_path, monkeypatch):
    """Seam M13: of two that wait, one gets in at a time."""
    folder, waits, inside = tmp_path / "folder", threading.Semaphore(0), []

    def sleep(_seconds):
        waits.release()
        time_passes.wait(30)

    time_passes = threading.Event()
    monkeypatch.setattr(locks.time, "sleep", sleep)

    def work():
        with locks.locked(folder, seconds=60):
            inside.append(1)
            assert len(inside) == 1
            assert locks.in_use(folder)
            inside.pop()

    with locks.locked(folder):
        workers = [threading.Thread(target=work) for _ in range(2)]
        for worker in workers:
            worker.start()
        for _ in workers:
            assert waits.acquire(timeout=30)
        shutil.rmtree(folder)
    time_passes.set()
    for worker in workers:
        worker.join(30)
    assert not inside and not locks.in_use(folder)


NO_LOCKS = "the file system of {} has no locks ({}): mount it with locks, or set run.dir to a folder on another one"


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_one_line_that_says_so(tmp_path, monkeypatch, number):
    """Seam B05: an NFS mount whose lock service is not there."""

    def flock(_descriptor, _how):
        raise OSError(number, os.strerror(number))

    with locks.locked(tmp_path):
        pass
    monkeypatch.setattr(fcntl, "flock", flock)
    said = NO_LOCKS.format(tmp_path, os.strerror(number))
    for act in (locks.locked, locks.reading):
        with pytest.raises(ConfigError) as refused:
            act(tmp_path).__enter__()
        assert str(refused.value) == said
    with pytest.raises(ConfigError, match="has no locks"):
        locks.in_use(tmp_path)
    assert locks.fault(tmp_path) == locks.fault(tmp_path / "not" / "there" / "yet") == said


def test_looking_for_locks_leaves_nothing(tmp_path):
    """Seam B05: it is part of every dry run."""
    before = tmp_path.stat().st_mtime_ns
    assert locks.fault(tmp_path / "run") is None
    assert list(tmp_path.iterdir()) == [] and tmp_path.stat().st_mtime_ns == before
