"""The connector's promises, kept without an engine: vLLM's class and ours over a cache that the tests fill."""

import errno
import fcntl
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.request import RequestStatus

from drafter.extract import connector, state_file, states
from tests import connector_rig
from tests.connector_rig import params

LAYERS = (2, 5, 7, 9)
HIDDEN = 64


class Rig(connector_rig.Rig):
    """Closed after the test, with its process."""

    opened: list["Rig"] = []

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.opened.append(self)


@pytest.fixture(autouse=True)
def closed():
    yield
    while Rig.opened:
        Rig.opened.pop().close()


def row(tokens: int, seed: int = 0, layers: int = len(LAYERS)):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 1000, (tokens,), generator=generator).tolist()
    return ids, torch.randn(tokens, layers, HIDDEN, generator=generator).bfloat16()


@pytest.mark.parametrize("old", [False, True], ids=["layout since 0.32", "layout of 0.26"])
@pytest.mark.parametrize("tokens", [1, 16, 17, 250])
def test_a_file_holds_the_states_of_its_prompt_in_order(tmp_path, old, tokens):
    rig = Rig(tmp_path, LAYERS, HIDDEN, old=old)
    ids, hidden = row(tokens)
    part = tmp_path / "ab" / f"{'ab' * 16}.1.part"
    _id, kept, reply = rig.finish(ids, params({part: ids}, LAYERS), rig.fill(hidden))
    assert kept and reply["error"] is None and states.is_locked(reply["writer"])
    rig.drain()
    read = states.read_states(part)
    assert torch.equal(torch.cat([read.aux, read.final[:, None]], 1), hidden)
    assert read.token_ids.tolist() == ids
    assert read.layer_ids == list(LAYERS) and read.metadata["row_id"] == "ab" * 16
    assert part.stat().st_size == states.file_bytes(
        tokens, HIDDEN, state_file.file_metadata("ab" * 16, "tiny", LAYERS, "bf16")
    )
    umask = os.umask(0)
    os.umask(umask)
    assert part.stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_gather_larger_than_its_device_memory_goes_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("drafter.extract.connector.GATHER_BYTES", 3 * 16 * len(LAYERS) * HIDDEN * 2)
    rig = Rig(tmp_path, LAYERS, HIDDEN)
    ids, hidden = row(200)
    rig.finish(ids, params({tmp_path / "a.1.part": ids}, LAYERS), rig.fill(hidden))
    rig.drain()
    assert torch.equal(states.read_states(tmp_path / "a.1.part").final, hidden[:, -1])


def test_a_request_takes_the_layers_it_names_of_those_captured(tmp_path):
    """H06"""
    rig = Rig(tmp_path, (2, 3, 5, 6, 9), HIDDEN)
    ids, hidden = row(20, layers=5)
    blocks = rig.fill(hidden)
    rig.finish(ids, params({tmp_path / "a.1.part": ids}, (2, 5, 9)), blocks)
    rig.drain()
    read = states.read_states(tmp_path / "a.1.part")
    assert read.layer_ids == [2, 5, 9]
    assert torch.equal(read.aux, hidden[:, [0, 2]]) and torch.equal(read.final, hidden[:, 4])
    _id, kept, reply = rig.finish(ids, params({tmp_path / "b.1.part": ids}, (2, 4, 9)), blocks)
    assert not kept and "[4] are not captured" in reply["error"] and "[2, 3, 5, 6, 9]" in reply["error"]
    for wrong in ((), (2, 2, 9)):  # of any number of layers one would wait for room in the queue for ever
        _id, kept, reply = rig.finish(ids, params({tmp_path / "b.1.part": ids}, wrong), blocks)
        assert not kept and "each once" in reply["error"]


def test_many_prompts_of_one_request_each_get_their_own_file(tmp_path):
    rig = Rig(tmp_path, LAYERS, HIDDEN)
    rows = [row(10 + i, seed=i) for i in range(5)]
    asked = params({tmp_path / f"{i}.1.part": ids for i, (ids, _) in enumerate(rows)}, LAYERS)
    for ids, hidden in rows:
        rig.finish(ids, asked, rig.fill(hidden))
    rig.drain()
    for i, (ids, hidden) in enumerate(rows):
        read = states.read_states(tmp_path / f"{i}.1.part")
        assert read.token_ids.tolist() == ids and torch.equal(read.final, hidden[:, -1])


def test_the_compact_format_halves_the_auxiliary_layers_and_keeps_the_teacher(tmp_path):
    rig = Rig(tmp_path, LAYERS, HIDDEN)
    ids, hidden = row(100)
    hidden[:, 1] *= 300  # one scale a layer and token: a loud layer takes nothing from a quiet one
    rig.finish(ids, params({tmp_path / "a.1.part": ids}, LAYERS, "fp8"), rig.fill(hidden))
    rig.drain()
    read = states.read_states(tmp_path / "a.1.part")
    assert torch.equal(read.final, hidden[:, -1])
    error = (read.aux.float() - hidden[:, :-1].float()).norm(dim=-1) / hidden[:, :-1].float().norm(dim=-1)
    assert 0 < error.max() < 0.04
    facts = state_file.file_metadata("a", "tiny", LAYERS, "fp8")
    assert (tmp_path / "a.1.part").stat().st_size == states.file_bytes(100, HIDDEN, facts)


@pytest.mark.parametrize(
    "name", ["../out.1.part", "/etc/out.1.part", "xx/../../out.1.part", "link/out.1.part", "a.safetensors", ""]
)
def test_nothing_is_written_outside_the_folder_the_server_was_started_with(tmp_path, name):
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(tmp_path)
    rig = Rig(root, LAYERS, HIDDEN)
    ids, hidden = row(10)
    asked = params({}, LAYERS) | {"files": {states.ids_digest(ids): name}}
    _id, kept, reply = rig.finish(ids, asked, rig.fill(hidden))
    rig.drain()
    assert not kept and "not a .part file below" in reply["error"]
    assert not list(tmp_path.rglob("out*"))


def test_a_prompt_that_arrived_changed_finds_no_file(tmp_path):
    """H01, G06"""
    rig = Rig(tmp_path, LAYERS, HIDDEN)
    ids, hidden = row(10)
    asked = params({tmp_path / "a.1.part": ids}, LAYERS)
    _id, kept, reply = rig.finish([*ids[:-1], ids[-1] + 1], asked, rig.fill(hidden))
    assert not kept and "KeyError" in reply["error"]


def test_a_request_without_the_cache_of_its_whole_prompt_is_refused(tmp_path):
    """H01, H02: fewer blocks than positions, or a block that was given up."""
    rig = Rig(tmp_path, LAYERS, HIDDEN)
    ids, hidden = row(40)
    blocks = rig.fill(hidden)
    asked = params({tmp_path / "a.1.part": ids}, LAYERS)
    for held in (blocks[:-1], [0, *blocks[1:]]):
        _id, kept, reply = rig.finish(ids, asked, held)
        assert not kept and "no longer holds all 40 positions" in reply["error"]


@pytest.mark.parametrize("status", [RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR])
def test_a_request_aborted_before_or_while_it_ran_leaves_nothing_behind(tmp_path, status):
    """H11"""
    rig = Rig(tmp_path, LAYERS, HIDDEN)
    ids, _hidden = row(40)
    asked = params({tmp_path / "a.1.part": ids}, LAYERS)
    assert rig.finish(ids, asked, (), status)[1:] == (False, None)
    assert rig.finish(ids, asked, ([1],), status)[1:] == (False, None)
    rig.drain()
    assert not list(tmp_path.rglob("*.part"))


def test_a_request_that_names_no_file_costs_nothing(tmp_path):
    rig = Rig(tmp_path, LAYERS, HIDDEN)
    ids, hidden = row(10)
    for empty in (None, {}, {"include_output_tokens": True}):
        assert rig.finish(ids, empty, rig.fill(hidden))[1:] == (False, None)


def broken(kind: str, hidden):
    hidden = hidden.clone()
    if kind == "zeros":
        hidden.zero_()
    elif kind == "a zero layer":
        hidden[:, 1] = 0
    elif kind == "a position never written":
        hidden[30] = 0
    elif kind == "the same everywhere":
        hidden[:] = hidden[0]
    elif kind == "one layer twice":
        hidden[:, 2] = hidden[:, 1]
    elif kind == "nan":
        hidden[7, 3, 5] = float("nan")
    elif kind == "inf":
        hidden[7, 0, 5] = float("-inf")
    return hidden


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize(
    "kind",
    ["zeros", "a zero layer", "a position never written", "the same everywhere", "one layer twice", "nan", "inf"],
)
def test_states_that_no_forward_pass_gives_never_become_a_part(tmp_path, kind, dtype):
    """H02"""
    rig = Rig(tmp_path, LAYERS, HIDDEN)
    ids, hidden = row(40)
    part = tmp_path / "a.1.part"
    rig.finish(ids, params({part: ids}, LAYERS, dtype), rig.fill(broken(kind, hidden)))
    rig.drain()
    assert [path.name for path in tmp_path.glob("a.*")] == ["a.1.error"]
    assert json.loads(part.with_suffix(".error").read_text())["reason"] == "bad_states"


@pytest.mark.parametrize(("number", "reason"), [(errno.ENOSPC, "disk_full"), (errno.EIO, "failed")])
def test_a_failed_write_reaches_the_client(tmp_path, monkeypatch, number, reason):
    """H15"""

    def fail(path, arrays, facts):
        path.write_bytes(b"half")
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("drafter.extract.writer.start_writer", connector_rig.in_a_thread)
    monkeypatch.setattr(state_file, "write_arrays", fail)
    rig = Rig(tmp_path, LAYERS, HIDDEN)
    ids, hidden = row(40)
    rig.finish(ids, params({tmp_path / "a.1.part": ids}, LAYERS), rig.fill(hidden))
    rig.drain()
    assert [path.name for path in tmp_path.glob("a.*")] == ["a.1.error"]
    assert json.loads((tmp_path / "a.1.error").read_text())["reason"] == reason


def test_a_log_on_the_full_disk_keeps_neither_the_report_nor_the_queue(tmp_path, monkeypatch):
    """H15: a server's log lies in the run's folder, beside its states."""

    def fail(path, arrays, facts):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("drafter.extract.writer.start_writer", connector_rig.in_a_thread)
    monkeypatch.setattr(state_file, "write_arrays", fail)
    ids, hidden = row(40)
    with open("/dev/full", "wb", buffering=0) as full:
        monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(full, write_through=True))
        rig = Rig(tmp_path, LAYERS, HIDDEN)
        rig.finish(ids, params({tmp_path / "a.1.part": ids}, LAYERS), rig.fill(hidden))
        rig.drain()
    assert json.loads((tmp_path / "a.1.error").read_text())["reason"] == "disk_full"


def test_a_file_that_can_neither_be_written_nor_removed_gives_its_memory_back(tmp_path):
    """Seam M7: as on a file system that became read-only. The queue filled and kept the blocks."""
    size = 32 * len(LAYERS) * HIDDEN * 2
    rig = Rig(tmp_path, LAYERS, HIDDEN, longest=64, queue_gb=2 * size / 1e9, num_writer_threads=1)
    for i in range(6):
        ids, hidden = row(32, seed=i)
        if i < 5:
            (tmp_path / f"{i}.1.writing").mkdir()  # neither opened for writing nor unlinked
        rig.finish(ids, params({tmp_path / f"{i}.1.part": ids}, LAYERS), rig.fill(hidden))
    rig.drain()
    assert not list(tmp_path.glob("[0-4].1.part"))
    assert torch.equal(states.read_states(tmp_path / "5.1.part").final, hidden[:, -1])


def test_engines_that_start_together_keep_each_others_lock_files(tmp_path, monkeypatch):
    """Seam M13: the second one starts between the first one's file and its lock."""
    flock, others = fcntl.flock, []

    def second_starts_first(fd, operation):
        if operation == fcntl.LOCK_EX and not others:
            others.append(None)
            others[0] = connector._announce(tmp_path)
        flock(fd, operation)

    (tmp_path / "dead").touch()
    monkeypatch.setattr(fcntl, "flock", second_starts_first)
    announced = [connector._announce(tmp_path), *others]
    monkeypatch.undo()
    assert {path.name for path in tmp_path.iterdir()} == {Path(name).name for name, _fd in announced}
    assert len(announced) == 2 and all(states.is_locked(Path(name)) for name, _fd in announced)
    for _name, fd in announced:
        os.close(fd)


def stopped(rig, parts, rows) -> set[str]:
    """Finish `rows` while the writer process is stopped, as on a disk that hangs; returns the freed requests."""
    os.kill(rig.worker._out._process.pid, signal.SIGSTOP)
    freed = set()
    for part, (ids, hidden) in zip(parts, rows, strict=True):
        rig.finish(ids, params({part: ids}, LAYERS), rig.fill(hidden))
        freed |= rig.step()
    return freed | {request for _ in range(5) for request in rig.step()}


def test_a_full_queue_holds_blocks_and_memory_until_the_disk_has_caught_up(tmp_path):
    """H15: the engine keeps its blocks, so it slows down; it neither fails nor fills the memory."""
    size = 32 * len(LAYERS) * HIDDEN * 2
    rig = Rig(tmp_path, LAYERS, HIDDEN, longest=64, queue_gb=3 * size / 1e9, num_writer_threads=2)
    rows = [row(32, seed=i) for i in range(10)]
    freed = stopped(rig, [tmp_path / f"{i}.1.part" for i in range(10)], rows)
    assert len(freed) == 3 and rig.worker._out.queued == 3 * size and len(rig.worker._waiting) == 7
    os.kill(rig.worker._out._process.pid, signal.SIGCONT)
    rig.drain()
    for i, (ids, hidden) in enumerate(rows):
        read = states.read_states(tmp_path / f"{i}.1.part")
        assert read.token_ids.tolist() == ids and torch.equal(read.final, hidden[:, -1])


def test_rows_of_all_lengths_go_round_the_queue_unharmed(tmp_path):
    """Its memory is a ring: a row that does not fit before its end is placed at its start."""
    rig = Rig(tmp_path, LAYERS, HIDDEN, longest=300, queue_gb=0.0004)
    lengths = torch.randint(1, 300, (150,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [row(tokens, seed=i) for i, tokens in enumerate(lengths)]
    for i, (ids, hidden) in enumerate(rows):
        rig.finish(ids, params({tmp_path / f"{i}.1.part": ids}, LAYERS), rig.fill(hidden))
        if i % 3 == 0:
            rig.step()
    rig.drain()
    for i, (ids, hidden) in enumerate(rows):
        read = states.read_states(tmp_path / f"{i}.1.part")
        assert read.token_ids.tolist() == ids
        assert torch.equal(torch.cat([read.aux, read.final[:, None]], 1), hidden)


def test_when_the_engine_dies_nothing_appears_later(tmp_path):
    """H11: a file of a dead server is never on its way, so who finds the server dead may sweep."""
    program = (
        "import sys, os, signal; from pathlib import Path; sys.argv[0] = 'engine'\n"
        "from tests.extract.test_connector import *\n"
        f"root = Path({str(tmp_path)!r}); rig = connector_rig.Rig(root, LAYERS, HIDDEN)\n"
        "stopped(rig, [root / f'{i}.1.part' for i in range(3)], [row(40, i) for i in range(3)])\n"
        "print(rig.worker._out._process.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as engine:
        writer = next(int(line) for line in engine.stdout if line.strip().isdigit())
        assert engine.wait() == -signal.SIGKILL
        os.kill(writer, signal.SIGCONT)
    while is_alive(writer):
        time.sleep(0.01)
    assert not list(tmp_path.glob("*.part"))


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_an_engine_whose_writing_process_died_ends(tmp_path):
    """H11: rather than to answer requests whose files never come."""
    rig = Rig(tmp_path, LAYERS, HIDDEN)
    os.kill(rig.worker._out._process.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="has died"):
        while True:
            rig.step()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_copy_that_fails_ends_the_engine(tmp_path):
    """H11: its error comes in a thread, which the engine does not look at."""
    rig = Rig(tmp_path, LAYERS, HIDDEN)
    out = rig.worker._out
    out.submit(out.reserve(1), [], lambda: 1 / 0)
    with pytest.raises(RuntimeError, match="has died"):
        while True:
            rig.step()
    rig.close()


def test_the_scheduler_side_and_one_that_never_started_shut_down_in_silence(tmp_path):
    Rig(tmp_path, LAYERS, HIDDEN).scheduler.shutdown()


def test_what_is_queued_is_written_before_the_engine_ends(tmp_path):
    rig = Rig(tmp_path, LAYERS, HIDDEN)
    for i in range(20):
        ids, hidden = row(200, seed=i)
        rig.finish(ids, params({tmp_path / f"{i}.1.part": ids}, LAYERS), rig.fill(hidden))
    rig.step()
    rig.close()
    assert len(list(tmp_path.glob("*.part"))) == 20


def test_a_row_larger_than_the_queue_passes_alone(tmp_path):
    rig = Rig(tmp_path, LAYERS, HIDDEN, longest=32, queue_gb=1e-9)
    for i in range(3):
        ids, hidden = row(32, seed=i)
        rig.finish(ids, params({tmp_path / f"{i}.1.part": ids}, LAYERS), rig.fill(hidden))
    rig.drain()
    assert len(list(tmp_path.glob("*.part"))) == 3


def test_one_notice_frees_a_request_under_tensor_parallelism(tmp_path):
    """Ranks that write nothing report nothing, and the engine expects one notice."""
    rig = Rig(tmp_path, LAYERS, HIDDEN)
    assert rig.scheduler.get_finished_count() == 1
    ids, hidden = row(32)
    rig.worker._is_tp_rank_zero = False
    rig.finish(ids, params({tmp_path / "a.1.part": ids}, LAYERS), rig.fill(hidden))
    assert rig.step() == set()
    assert not list(tmp_path.glob("a.*"))


def test_a_dead_server_is_distinguished_from_a_late_file(tmp_path):
    """The writer's file is locked while the server lives; the next server removes what the dead left."""
    rig = Rig(tmp_path, LAYERS, HIDDEN)
    assert states.is_locked(rig.scheduler._writer)
    os.close(rig.scheduler._alive)
    assert not states.is_locked(rig.scheduler._writer)
    again = Rig(tmp_path, LAYERS, HIDDEN)
    assert [str(path) for path in (tmp_path / ".writers").iterdir()] == [again.scheduler._writer]
