"""A journal's records are in the file at once and durable within a second, whatever follows."""

import errno
import os
import queue
import signal
import subprocess
import sys
import textwrap

import pytest

from drafter import config, files

# A child that reports every fsync, with the bytes it made durable, and then does nothing more.
CHILD = """
    import asyncio, os, signal, sys
    from pathlib import Path
    from drafter import files

    real = os.fsync
    def fsync(descriptor):
        real(descriptor)
        print("durable", os.fstat(descriptor).st_size, flush=True)
    os.fsync = fsync

    journal = files.Journal(Path(sys.argv[1]), sync_seconds=float(sys.argv[2]))
    def work():
        for number in range(5):
            journal.append({"row": number})
        print("appended", flush=True)
"""
ENDS = {
    "plain": "work(); signal.pause()",
    "forked": "journal.append({'row': -1}); os.fork() and os._exit(0); work(); signal.pause()",
    "asyncio": "async def main():\n    work()\n    await asyncio.Event().wait()\nasyncio.run(main())",
}


def child(path, end, sync_seconds):
    code = textwrap.dedent(CHILD) + ENDS[end]
    return subprocess.Popen(
        [sys.executable, "-c", code, str(path), str(sync_seconds)],
        cwd=config.ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def rows(path):
    return [record["row"] for record in files.read_jsonl(path, journal=True) if record["row"] >= 0]


@pytest.mark.parametrize("end", ENDS)
def test_records_are_in_the_file_as_soon_as_they_are_appended(tmp_path, end):
    """Seam M9: 5 records, nothing after them, SIGKILL: all 5 are there."""
    path = tmp_path / "journal.jsonl"
    running = child(path, end, sync_seconds=3600)
    assert "appended\n" in iter(running.stdout.readline, "")
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    assert rows(path) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("end", ENDS)
def test_records_become_durable_although_nothing_follows(tmp_path, end):
    """Seam M9, Seam K4: the sync came with the next append, which may never be."""
    path = tmp_path / "journal.jsonl"
    running = child(path, end, sync_seconds=0.01)
    lines, durable = iter(running.stdout.readline, ""), 0
    for line in lines:
        durable = max(durable, int(line.split()[1]) if line.startswith("durable") else 0)
        if path.exists() and len(rows(path)) == 5 and durable == path.stat().st_size:
            break
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    assert durable == path.stat().st_size > 0 and rows(path) == [0, 1, 2, 3, 4]


@pytest.fixture
def syncs(monkeypatch):
    """Every fsync of this process waits here: `asked` has its file's size then, `answers` what it is to do."""

    class Syncs:
        asked, answers = queue.Queue(), queue.Queue()

    def fsync(descriptor):
        Syncs.asked.put(os.fstat(descriptor).st_size)
        if error := Syncs.answers.get(timeout=30):
            raise error

    monkeypatch.setattr(os, "fsync", fsync)
    return Syncs


def test_what_is_appended_during_a_sync_is_synced_again(tmp_path, syncs):
    """Seam M9"""
    journal = files.Journal(tmp_path / "journal.jsonl", sync_seconds=0)
    journal.append({"row": 0})
    first = syncs.asked.get(timeout=30)
    journal.append({"row": 1})
    second = syncs.asked.get(timeout=30)
    assert (first, second) == (len(b'{"row":0}\n'), 2 * len(b'{"row":0}\n'))
    for _ in range(3):
        syncs.answers.put(None)
    journal.close()


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_sync_that_fails_in_the_background_is_raised_by_whatever_comes_next(tmp_path, syncs, number):
    """Seam M9"""
    journal = files.Journal(tmp_path / "journal.jsonl", sync_seconds=0)
    failed = OSError(number, os.strerror(number))
    syncs.answers.put(failed)
    journal.append({"row": 0})
    syncs.asked.get(timeout=30)
    while journal._failure is None:
        pass
    for act in (lambda: journal.append({"row": 1}), journal.sync, journal.close):
        with pytest.raises(OSError) as raised:
            act()
        assert raised.value.errno == number
    assert rows(tmp_path / "journal.jsonl") == [0]


def test_a_full_disk_is_raised_by_the_append_that_met_it(tmp_path):
    """Seam M9: not by a later one."""
    (tmp_path / "journal.jsonl").symlink_to("/dev/full")
    journal = files.Journal(tmp_path / "journal.jsonl")
    for act in (lambda: journal.append({"row": 0}), journal.close):
        with pytest.raises(OSError) as raised:
            act()
        assert raised.value.errno == errno.ENOSPC


def test_two_hundred_records_a_second_cost_one_sync_a_second(tmp_path, monkeypatch):
    """Seam M9: one thread at a time, and one fsync for all that was appended while it waited."""
    started = []

    class Thread(files.threading.Thread):
        def start(self):
            started.append(self)

    monkeypatch.setattr(files.threading, "Thread", Thread)
    journal = files.Journal(tmp_path / "journal.jsonl")
    for number in range(200):
        journal.append({"row": number})
    assert len(started) == 1
    journal._closed.set()
    started[0].run()
    journal.close()
