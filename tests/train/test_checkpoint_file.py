"""Safetensors files that stream: what safetensors reads back, and what of them is ever half there."""

import json

import numpy as np
import pytest
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file

from drafter.train import checkpoint_file

TENSORS = {
    "mask": torch.tensor([True, False, True]),
    "scalar": torch.tensor(2.5),
    "weight": torch.randn(33, 7),
    "turned": torch.randn(5, 9).T,
    "half": torch.randn(3).bfloat16(),
    "ids": torch.tensor([-1, 2**62]),
    "none": torch.empty(0, 4),
}


@pytest.mark.parametrize("piece", [8, 64, 1 << 20])
def test_what_is_written_is_what_safetensors_reads(tmp_path, monkeypatch, piece):
    """T13: bit for bit, in pieces of any size, in tensors of odd lengths."""
    monkeypatch.setattr(checkpoint_file, "PIECE", piece)
    tensors = checkpoint_file.in_file_order(TENSORS)
    checkpoint_file.write_tensors(tmp_path / "x", tensors, iter(tensors.values()), {"folder": "step"})
    found = load_file(tmp_path / "x")
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
    with safe_open(tmp_path / "x", "pt") as file:
        facts = file.metadata()
    assert facts["folder"] == "step"
    assert facts["xxh3"] == checkpoint_file.checksums(TENSORS) == checkpoint_file.checksums(found)
    assert json.loads(facts["xxh3"])["ids"] == xxhash.xxh3_64(TENSORS["ids"].numpy().tobytes()).hexdigest()


def test_each_tensor_is_aligned_to_its_numbers(tmp_path):
    tensors = checkpoint_file.in_file_order(TENSORS)
    checkpoint_file.write_tensors(tmp_path / "x", tensors, iter(tensors.values()), {})
    data = (tmp_path / "x").read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert (8 + length) % 8 == 0
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            assert entry["data_offsets"][0] % TENSORS[name].element_size() == 0, name


def test_the_sums_of_an_earlier_version_are_of_words_of_eight_bytes_and_of_what_is_left():
    numbers = torch.tensor([3, 2**63 - 1, 2**63 - 1, 5], dtype=torch.int64)
    assert json.loads(checkpoint_file.additive_sums({"ids": numbers})) == {"ids": (3 + 2 * (2**63 - 1) + 5) % 2**64}
    nine = torch.from_numpy(np.array([1, 0, 0, 0, 0, 0, 0, 0, 7], dtype=np.uint8)).view(torch.bool)
    assert json.loads(checkpoint_file.additive_sums({"nine": nine})) == {"nine": 8}


@pytest.mark.parametrize("position", [0, 40, -1])
def test_any_flipped_bit_changes_a_checksum(position):
    before = torch.arange(33, dtype=torch.float32)
    after = before.clone()
    after.view(torch.uint8)[position] ^= 1
    assert checkpoint_file.checksums({"a": before}) != checkpoint_file.checksums({"a": after})


@pytest.mark.parametrize("piece", [64, 1 << 20])
def test_words_and_pages_that_are_exchanged_change_a_checksum(monkeypatch, piece):
    """Seam L1: a sum of words is blind to their order, so two swapped pages passed."""
    monkeypatch.setattr(checkpoint_file, "PIECE", piece)
    before = torch.arange(4096, dtype=torch.float32)
    for size in (2, 1024):
        after = before.view(-1, size).clone()
        after[[0, 1]] = after[[1, 0]]
        assert checkpoint_file.checksums({"a": before}) != checkpoint_file.checksums({"a": after.flatten()})


def test_fewer_or_other_tensors_than_named_write_no_file_for_good(tmp_path):
    """Seam L7: a short file was written, and only its reader noticed."""
    tensors = checkpoint_file.in_file_order(TENSORS)
    with pytest.raises(ValueError, match="ids is missing|mask is missing"):
        checkpoint_file.write_tensors(tmp_path / "x", tensors, iter(list(tensors.values())[:-1]), {})
    with pytest.raises(ValueError, match="has another shape or dtype"):
        checkpoint_file.write_tensors(tmp_path / "x", tensors, iter(torch.zeros(2) for _ in tensors), {})
    rest = iter([*tensors.values(), torch.zeros(1)])
    checkpoint_file.write_tensors(tmp_path / "x", tensors, rest, {})
    assert len(list(rest)) == 1  # the next file's
