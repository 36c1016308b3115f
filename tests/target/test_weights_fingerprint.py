"""Which weights a target has, wherever they differ, at the cost of a few reads a tensor."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafter import config, files
from drafter.errors import ConfigError
from drafter.target import weights_fingerprint
from tests import captured, tiny_models


@pytest.fixture
def target(tmp_path):
    """A target whose embedding is larger than what is read of it."""
    folder = tiny_models.make_tiny_mla(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    wide = torch.randn(16384, captured.HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16()
    save_file(tensors | {"model.wide.weight": wide}, folder / "model.safetensors")
    return folder


def rewrite(folder, **changed):
    """Other tensors under the same names, in a file of the same size."""
    path = folder / "model.safetensors"
    save_file(load_file(path) | {name.replace("__", "."): tensor for name, tensor in changed.items()}, path)


def test_a_change_anywhere_in_a_file_is_another_fingerprint(target, tmp_path):
    """Seam F5: 47,358 of 49,152 embedding rows permuted passed, since only the ends of each file were read."""
    cache = tmp_path / "cache.json"
    tensors = load_file(target / "model.safetensors")
    seen = {weights_fingerprint.fingerprint(target, cache)}
    wide = tensors["model.wide.weight"]
    order = torch.arange(len(wide))
    order[64:-64] = order[64:-64].flip(0)
    rewrite(target, model__wide__weight=wide[order])
    seen.add(weights_fingerprint.fingerprint(target, cache))
    for name, tensor in tensors.items():
        if tensor.numel() * tensor.element_size() <= weights_fingerprint.SAMPLES * weights_fingerprint.SAMPLE:
            changed = tensor.clone()
            changed.view(-1)[tensor.numel() // 2] += 1
            rewrite(target, **{name: changed})
            break
    seen.add(weights_fingerprint.fingerprint(target, cache))
    assert len(seen) == 3 and all(len(one) == 16 for one in seen)


def test_a_fingerprint_is_computed_once_until_a_file_changes(target, tmp_path, monkeypatch):
    """Seam F5: 550 GB are not looked into at every start."""
    cache, read = tmp_path / "cache.json", []
    digest = weights_fingerprint._digest
    monkeypatch.setattr(weights_fingerprint, "_digest", lambda path: read.append(path) or digest(path))
    first = weights_fingerprint.fingerprint(target, cache)
    assert weights_fingerprint.fingerprint(target, cache) == first and len(read) == 1
    os.utime(target / "model.safetensors", ns=(1, 1))
    assert weights_fingerprint.fingerprint(target, cache) == first and len(read) == 2
    cache.write_text("{")
    assert weights_fingerprint.fingerprint(target, cache) == first and len(read) == 3


def test_pieces_cover_small_tensors_and_both_ends_of_large_ones():
    whole = weights_fingerprint.SAMPLES * weights_fingerprint.SAMPLE
    for size in (0, 1, whole):
        assert list(weights_fingerprint._pieces(size)) == [(0, size)]
    for size in (whole + 1, 10**9):
        pieces = list(weights_fingerprint._pieces(size))
        assert pieces[0][0] == 0 and sum(pieces[-1]) == size
        assert all(a + n <= b for (a, n), (b, _) in zip(pieces, pieces[1:], strict=False))


def test_training_refuses_a_target_other_than_the_states_came_from(target, tmp_path):
    """Seam F5: the teacher's head would be another model's. A folder of an earlier version is not compared."""
    path = captured.write_run(tmp_path, target, rows=8, max_steps=1)
    run = config.load(path)
    place = run.stage_dir("02_hidden_states") / weights_fingerprint.RECORD
    for recording in (False, True):  # the target may have changed since these states were made
        weights_fingerprint.check_same_weights(run, recording=recording)
        assert not place.exists()
    fresh = config.load(path, ["run.name=fresh"])
    weights_fingerprint.check_same_weights(fresh, recording=True)
    place.write_text((fresh.stage_dir("02_hidden_states") / weights_fingerprint.RECORD).read_text())
    noted = json.loads(place.read_text())
    assert captured.train(path)[0] == 0
    ends = files.fingerprint_path.__wrapped__(target)
    wide = load_file(target / "model.safetensors")["model.wide.weight"].clone()
    wide[6000:10000] = wide[6000:10000].flip(0)
    rewrite(target, model__wide__weight=wide)
    assert files.fingerprint_path.__wrapped__(target) == ends, "which the other identity does not see"
    code, summary = captured.train(path, "train.max_steps=2")
    assert code == 2 and "target.model: the weights in" in summary["error"] and "came from" in summary["error"]
    with pytest.raises(ConfigError, match="restore the old weights"):
        weights_fingerprint.check_same_weights(run, recording=True)
    assert json.loads(place.read_text()) == noted


def test_a_target_without_safetensors_is_left_to_its_reader(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert weights_fingerprint.fingerprint(tmp_path, tmp_path / "cache.json") is None
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(ConfigError, match="model.safetensors is broken"):
        weights_fingerprint.fingerprint(tmp_path, tmp_path / "cache.json")
