"""The connector's promises, kept without an engine: vLLM's class and ours over a cache that the tests fill."""

import errno
import json
import os
import threading

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.request import RequestStatus

from drafter import states
from tests.connector_rig import Rig, params

LAYERS = (2, 5, 7, 9)
HIDDEN = 64


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
        tokens, HIDDEN, states.metadata("ab" * 16, "tiny", LAYERS, "bf16")
    )
    umask = os.umask(0)
    os.umask(umask)
    assert part.stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_gather_larger_than_its_device_memory_goes_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("drafter.connector.GATHER_BYTES", 3 * 16 * len(LAYERS) * HIDDEN * 2)
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
    facts = states.metadata("a", "tiny", LAYERS, "fp8")
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

    def fail(path, tensors, facts):
        path.write_bytes(b"half")
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(states, "write", fail)
    rig = Rig(tmp_path, LAYERS, HIDDEN)
    ids, hidden = row(40)
    rig.finish(ids, params({tmp_path / "a.1.part": ids}, LAYERS), rig.fill(hidden))
    rig.drain()
    assert [path.name for path in tmp_path.glob("a.*")] == ["a.1.error"]
    assert json.loads((tmp_path / "a.1.error").read_text())["reason"] == reason


def test_a_full_queue_holds_blocks_and_memory_until_the_disk_has_caught_up(tmp_path, monkeypatch):
    """H15: the engine keeps its blocks, so it slows down; it neither fails nor fills the memory."""
    tokens, size = 32, 32 * len(LAYERS) * HIDDEN * 2
    rig = Rig(tmp_path, LAYERS, HIDDEN, queue_gb=3.5 * size / 1e9, num_writer_threads=2)
    disk = threading.Event()
    write = states.write
    monkeypatch.setattr(states, "write", lambda *args: (disk.wait(30), write(*args))[1])
    rows = [row(tokens, seed=i) for i in range(10)]
    freed = set()
    for i, (ids, hidden) in enumerate(rows):
        rig.finish(ids, params({tmp_path / f"{i}.1.part": ids}, LAYERS), rig.fill(hidden))
        freed |= rig.step()
    for _ in range(5):
        freed |= rig.step()
    assert len(freed) == 3 and rig.worker._queued == 3 * size and len(rig.worker._waiting) == 7
    disk.set()
    rig.drain()
    assert len(list(tmp_path.glob("*.part"))) == 10


def test_a_row_larger_than_the_queue_passes_alone(tmp_path):
    rig = Rig(tmp_path, LAYERS, HIDDEN, queue_gb=1e-9)
    for i in range(3):
        ids, hidden = row(32, seed=i)
        rig.finish(ids, params({tmp_path / f"{i}.1.part": ids}, LAYERS), rig.fill(hidden))
    rig.drain()
    assert len(list(tmp_path.glob("*.part"))) == 3


def test_one_notice_frees_a_request_under_tensor_parallelism(tmp_path):
    """Ranks that write nothing report nothing, and the engine is told to expect one notice."""
    rig = Rig(tmp_path, LAYERS, HIDDEN)
    assert rig.scheduler.get_finished_count() == 1
    ids, hidden = row(32)
    rig.worker._is_tp_rank_zero = False
    rig.finish(ids, params({tmp_path / "a.1.part": ids}, LAYERS), rig.fill(hidden))
    assert rig.step() == set()
    assert not list(tmp_path.glob("a.*"))


def test_a_dead_server_is_told_from_a_late_file(tmp_path):
    """The writer's file is locked while the server lives; the next server removes what the dead left."""
    rig = Rig(tmp_path, LAYERS, HIDDEN)
    assert states.is_locked(rig.scheduler._writer)
    os.close(rig.scheduler._alive)
    assert not states.is_locked(rig.scheduler._writer)
    again = Rig(tmp_path, LAYERS, HIDDEN)
    assert [str(path) for path in (tmp_path / ".writers").iterdir()] == [again.scheduler._writer]
