"""Hidden-state files: exact bytes, cheap and full checks, and readers that are not ours."""

import os
import random
import struct

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from drafter.errors import ContractError, RowError
from drafter.extract import state_file, states

LAYERS, HIDDEN = (2, 5, 7, 9), 64
ROW = "0123456789abcdef" * 2


def tensors_of(tokens: int, dtype: states.Dtype = "bf16", seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, len(LAYERS), HIDDEN, generator=generator).bfloat16()
    ids = torch.randint(0, 1000, (tokens,), generator=generator)
    return hidden, {"token_ids": ids} | ({"hidden_states": hidden} if dtype == "bf16" else states.to_compact(hidden))


def written(path, tokens=50, dtype: states.Dtype = "bf16", seed=0):
    hidden, tensors = tensors_of(tokens, dtype, seed)
    states.write_states(path, tensors, state_file.file_metadata(ROW, "tiny", LAYERS, dtype))
    return hidden, tensors["token_ids"].tolist()


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("tokens", [1, 7, 99, 1000, 12345])
def test_the_size_of_a_file_follows_from_its_token_count(tmp_path, tokens, dtype):
    _hidden, tensors = tensors_of(tokens, dtype)
    facts = state_file.file_metadata(ROW, "tiny", LAYERS, dtype)
    size = states.write_states(tmp_path / "a", tensors, facts)
    assert size == states.file_bytes(tokens, HIDDEN, facts) == (tmp_path / "a").stat().st_size


def test_bytes_a_token_are_the_design_s(tmp_path):
    """4 layers of 7,168 in bf16 take 57,344 bytes a token, and 8 more for its id."""
    kimi = state_file.file_metadata(ROW, "kimi", (2, 30, 58, 61), "bf16")
    assert states.file_bytes(2000, 7168, kimi) - states.file_bytes(1000, 7168, kimi) == 1000 * (57344 + 8)
    compact = state_file.file_metadata(ROW, "kimi", (2, 30, 58, 61), "fp8")
    step = states.file_bytes(2000, 7168, compact) - states.file_bytes(1000, 7168, compact)
    assert step == 1000 * (7168 * (3 + 2) + 3 * 4 + 8)


def test_safetensors_and_speculators_read_plain_files_unchanged(tmp_path):
    hidden, ids = written(tmp_path / "hs_0.safetensors")
    loaded = load_file(tmp_path / "hs_0.safetensors")
    assert torch.equal(loaded["hidden_states"], hidden) and loaded["token_ids"].tolist() == ids
    with safe_open(tmp_path / "hs_0.safetensors", "pt") as file:
        assert file.metadata()["final"] == "final layer before final norm"
    hs_connectors = pytest.importorskip("hs_connectors.transfer")
    read = hs_connectors.FileTransfer(tmp_path).get_cached(0)
    assert torch.equal(read["hidden_states"], hidden) and read["token_ids"].tolist() == ids


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_reading_gives_back_what_was_written(tmp_path, dtype):
    hidden, ids = written(tmp_path / "a", dtype=dtype)
    read = states.read_states(tmp_path / "a")
    assert read.token_ids.tolist() == ids and read.layer_ids == list(LAYERS)
    assert torch.equal(read.final, hidden[:, -1])
    assert read.aux.dtype == torch.bfloat16 and read.aux.shape == (50, 3, HIDDEN)
    error = (read.aux.float() - hidden[:, :-1].float()).norm() / hidden[:, :-1].float().norm()
    assert error == 0 if dtype == "bf16" else 0 < error < 0.03
    header = states.read_header(tmp_path / "a")
    states.check_header(header, ROW, ids, LAYERS, HIDDEN, dtype)
    states.check_content(tmp_path / "a")


def test_the_umask_decides_who_can_read_a_file(tmp_path):
    """H09"""
    old = os.umask(0o027)
    try:
        written(tmp_path / "a")
    finally:
        os.umask(old)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_every_flipped_bit_is_found(tmp_path, dtype):
    _hidden, ids = written(tmp_path / "a", dtype=dtype)
    whole = (tmp_path / "a").read_bytes()
    start = 8 + struct.unpack("<Q", whole[:8])[0]
    choose = random.Random(0)
    places = [choose.randrange(start) for _ in range(60)] + [choose.randrange(start, len(whole)) for _ in range(60)]
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << choose.randrange(8)
        (tmp_path / "b").write_bytes(damaged)
        with pytest.raises((ContractError, RowError)):
            states.check_header(states.read_header(tmp_path / "b"), ROW, ids, LAYERS, HIDDEN, dtype)
            states.check_content(tmp_path / "b")


def test_a_file_of_another_target_is_refused_by_its_header(tmp_path):
    """Seam F1: a model of the same form; files that name no target are of an earlier version and still read."""
    _hidden, tensors = tensors_of(50)
    ids = tensors["token_ids"].tolist()
    states.write_states(tmp_path / "a", tensors, state_file.file_metadata(ROW, "tiny", LAYERS, "bf16", "0" * 16))
    written(tmp_path / "b")
    question = ROW, ids, LAYERS, HIDDEN, "bf16"
    states.check_header(states.read_header(tmp_path / "a"), *question, "0" * 16)
    states.check_header(states.read_header(tmp_path / "b"), *question, "0" * 16)
    with pytest.raises(RowError, match="target is 0000000000000000, expected 1"):
        states.check_header(states.read_header(tmp_path / "a"), *question, "1" * 16)


def test_tensors_that_overlap_or_leave_a_gap_are_no_file(tmp_path):
    """Seam F1: the checksum runs over the tensors in their order, so it must meet every byte once."""
    written(tmp_path / "a")
    whole = (tmp_path / "a").read_bytes()
    for old, new in (('data_offsets":[400,26000]', 'data_offsets":[399,25999]'), ("[0,400]", "[1,401]")):
        assert old.encode() in whole
        (tmp_path / "b").write_bytes(whole.replace(old.encode(), new.encode()))
        with pytest.raises(ContractError, match="overlap or leave a gap|header says"):
            states.read_header(tmp_path / "b")


def test_a_file_cut_at_any_length_or_grown_is_not_a_file(tmp_path):
    """H09"""
    written(tmp_path / "a", tokens=3)
    whole = (tmp_path / "a").read_bytes()
    for length in [0, 1, 7, 8, 9, 500, 1023, 1024, 1025, len(whole) - 1]:
        (tmp_path / "b").write_bytes(whole[:length])
        with pytest.raises(ContractError):
            states.read_header(tmp_path / "b")
        with pytest.raises(ContractError):
            states.read_states(tmp_path / "b")
    (tmp_path / "b").write_bytes(whole + b"x")
    with pytest.raises(ContractError, match="header says"):
        states.read_header(tmp_path / "b")


def test_a_swapped_file_a_recast_one_and_other_layers_are_refused(tmp_path):
    """H06"""
    hidden, ids = written(tmp_path / "a")
    header = states.read_header(tmp_path / "a")
    for question, named in [
        (("f" * 32, ids, LAYERS, HIDDEN, "bf16"), "row_id"),
        ((ROW, ids, (2, 5, 9), HIDDEN, "bf16"), r"\[2,5,7,9\], expected \[2,5,9\]"),
        ((ROW, ids, (5, 2, 7, 9), HIDDEN, "bf16"), r"\[2,5,7,9\], expected \[5,2,7,9\]"),
        ((ROW, ids, LAYERS, HIDDEN, "fp8"), "dtype"),
        ((ROW, ids, LAYERS, 2 * HIDDEN, "bf16"), "expected"),
        ((ROW, ids[:-1], LAYERS, HIDDEN, "bf16"), "token ids"),
        ((ROW, [*ids[:-1], 0 if ids[-1] else 1], LAYERS, HIDDEN, "bf16"), "token ids"),
    ]:
        with pytest.raises(RowError, match=named):
            states.check_header(header, *question)
    with safe_open(tmp_path / "a", "pt") as file:
        facts = file.metadata()
    save_file({"hidden_states": hidden.half(), "token_ids": torch.tensor(ids)}, tmp_path / "b", metadata=facts)
    with pytest.raises(ContractError, match="not a hidden-state file"):
        states.read_header(tmp_path / "b")


@pytest.mark.parametrize("shortened", ["hidden_states", "token_ids"])
def test_states_shorter_than_the_ids_are_refused(shortened):
    """H01"""
    _hidden, tensors = tensors_of(50)
    with pytest.raises(RowError, match="positions"):
        states.check_tensors(tensors | {shortened: tensors[shortened][:-16]})


def test_ordinary_states_pass_whatever_their_scale():
    for scale in (1e-30, 1e-3, 1.0, 1e4, 1e30):
        hidden, tensors = tensors_of(3)
        states.check_tensors(tensors | {"hidden_states": (hidden.float() * scale).bfloat16()})
        states.check_tensors(tensors | {"hidden_states": hidden[:1], "token_ids": tensors["token_ids"][:1]})


def test_a_lock_is_held_only_by_the_living(tmp_path):
    import fcntl

    assert not states.is_locked(tmp_path / "none")
    fd = os.open(tmp_path / "a", os.O_CREAT | os.O_WRONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    assert states.is_locked(tmp_path / "a")
    os.close(fd)
    assert not states.is_locked(tmp_path / "a")


def test_the_digest_depends_on_the_ids_not_on_their_container():
    ids = [1, 2, 163607]
    assert states.ids_digest(ids) == states.ids_digest(np.array(ids, dtype=np.int32))
    assert states.ids_digest(ids) != states.ids_digest([1, 2, 163606])
