"""Safetensors files that stream: what safetensors reads back, and what of them is ever half there."""

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from drafter import tensor_file

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
    monkeypatch.setattr(tensor_file, "PIECE", piece)
    tensors = tensor_file.in_order(TENSORS)
    tensor_file.write(tmp_path / "x", tensors, iter(tensors.values()), {"folder": "step"})
    found = load_file(tmp_path / "x")
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
    with safe_open(tmp_path / "x", "pt") as file:
        facts = file.metadata()
    assert facts["folder"] == "step"
    assert facts["sums"] == tensor_file.sums(TENSORS) == tensor_file.sums(found)


def test_each_tensor_is_aligned_to_its_numbers(tmp_path):
    tensors = tensor_file.in_order(TENSORS)
    tensor_file.write(tmp_path / "x", tensors, iter(tensors.values()), {})
    data = (tmp_path / "x").read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert (8 + length) % 8 == 0
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            assert entry["data_offsets"][0] % TENSORS[name].element_size() == 0, name


def test_the_sums_are_of_words_of_eight_bytes_and_of_what_is_left():
    numbers = torch.tensor([3, 2**63 - 1, 2**63 - 1, 5], dtype=torch.int64)
    assert json.loads(tensor_file.sums({"ids": numbers})) == {"ids": (3 + 2 * (2**63 - 1) + 5) % 2**64}
    nine = torch.from_numpy(np.array([1, 0, 0, 0, 0, 0, 0, 0, 7], dtype=np.uint8)).view(torch.bool)
    assert json.loads(tensor_file.sums({"nine": nine})) == {"nine": 8}


@pytest.mark.parametrize("position", [0, 40, -1])
def test_any_flipped_bit_changes_a_sum(position):
    before = torch.arange(33, dtype=torch.float32)
    after = before.clone()
    after.view(torch.uint8)[position] ^= 1
    assert tensor_file.sums({"a": before}) != tensor_file.sums({"a": after})
