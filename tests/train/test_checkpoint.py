"""Step folders: whole or absent, found, read back, kept and removed."""

import json
import os
import resource
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from drafter import files
from drafter.errors import ContractError
from drafter.train import checkpoint, checkpoint_file

WEIGHTS = {"fc.weight": torch.randn(8, 8), "d2t": torch.arange(4), "t2d": torch.ones(6, dtype=torch.bool)}
MOMENTS = {"fc.weight.exp_avg": torch.randn(8, 8), "fc.weight.exp_avg_sq": torch.rand(8, 8)}


def save(folder, step, acceptance=1.0, validated=None):
    path = checkpoint.step_path(folder, step)
    state = {"expected_acceptance": acceptance, "step": step, "validated": step if validated is None else validated}
    checkpoint.save_step(path, WEIGHTS, {"hidden_size": 8}, MOMENTS, state)
    return path


def names(paths):
    return [path.name for path in paths]


def test_a_step_comes_back_bit_for_bit(tmp_path):
    path = save(tmp_path, 7, 1.25)
    weights, settings = checkpoint.read_draft(path)
    assert settings == {"hidden_size": 8}
    for name, tensor in WEIGHTS.items():
        assert torch.equal(weights[name], tensor) and weights[name].dtype == tensor.dtype
    for name, tensor in checkpoint.read_moments(path).items():
        assert torch.equal(tensor, MOMENTS[name])
    assert checkpoint.read_state(path) == {"expected_acceptance": 1.25, "step": 7, "validated": 7}
    assert all((path / name).stat().st_mode & 0o777 == 0o644 for name in checkpoint.FILES)


def test_weights_are_read_as_masters(tmp_path):
    path = checkpoint.step_path(tmp_path, 1)
    checkpoint.save_step(path, {"embed_tokens.weight": torch.ones(2, 2).bfloat16()}, {}, MOMENTS, {})
    assert checkpoint.read_draft(path)[0]["embed_tokens.weight"].dtype == torch.float32


def test_best_and_newest(tmp_path):
    for step, acceptance in ((10, 1.3), (20, 1.5), (30, 1.4), (40, 1.5)):
        save(tmp_path, step, acceptance)
    assert checkpoint.best_step(tmp_path).name == "step-00000040"
    assert names(checkpoint.complete_steps(tmp_path))[-1] == "step-00000040"


def test_what_a_signal_saved_is_never_taken_for_the_validation_before_it(tmp_path):
    """T12: step 25 carries the figure of step 20, which it has not earned."""
    save(tmp_path, 5, 0.0, validated=-1)
    assert checkpoint.best_step(tmp_path).name == "step-00000005", "the only one"
    for step, acceptance, validated in ((10, 1.3, 10), (20, 1.5, 20), (25, 1.5, 20), (30, 1.4, 30)):
        save(tmp_path, step, acceptance, validated)
    assert checkpoint.best_step(tmp_path).name == "step-00000020"
    checkpoint.prune_steps(tmp_path, 1)
    assert names(checkpoint.complete_steps(tmp_path)) == ["step-00000020", "step-00000030"]


def test_a_state_of_an_earlier_version_counts_as_validated_at_its_step(tmp_path):
    """Its run goes on, and is exported, after the project was brought up to date in between."""
    for step, acceptance in ((10, 1.5), (20, 1.3)):
        state = {"expected_acceptance": acceptance, "step": step}
        checkpoint.save_step(checkpoint.step_path(tmp_path, step), WEIGHTS, {}, MOMENTS, state)
    assert checkpoint.best_step(tmp_path).name == "step-00000010"
    assert checkpoint.read_state(checkpoint.step_path(tmp_path, 20), "validated")["validated"] == 20


def test_the_last_few_and_the_best_are_kept(tmp_path):
    for step, acceptance in ((10, 1.3), (20, 1.9), (30, 1.4), (40, 1.5), (50, 1.2)):
        save(tmp_path, step, acceptance)
    checkpoint.prune_steps(tmp_path, 2)
    assert names(checkpoint.complete_steps(tmp_path)) == ["step-00000020", "step-00000040", "step-00000050"]
    assert not list(tmp_path.glob(f"*{files.PART}"))


@pytest.mark.parametrize("missing", checkpoint.FILES)
def test_a_partial_folder_is_no_step(tmp_path, missing):
    """T13, X07"""
    save(tmp_path, 10)
    broken = save(tmp_path, 20)
    (broken / missing).unlink()
    assert names(checkpoint.complete_steps(tmp_path)) == ["step-00000010"]
    for read in (checkpoint.read_draft, checkpoint.read_moments, checkpoint.read_state):
        with pytest.raises(
            ContractError, match=f"{missing} is missing; the nearest complete step is .*step-00000010"
        ):
            read(broken)
    save(tmp_path, 20)  # the next save replaces it
    assert names(checkpoint.complete_steps(tmp_path))[-1] == "step-00000020"


def test_the_run_root_and_an_empty_folder_are_explained(tmp_path):
    """X07"""
    with pytest.raises(ContractError, match="no complete step in the same folder"):
        checkpoint.read_draft(tmp_path)
    with pytest.raises(ContractError, match="no complete step in"):
        checkpoint.best_step(tmp_path / "nothing")
    save(tmp_path, 10)
    with pytest.raises(ContractError, match="nearest complete step is .*step-00000010"):
        checkpoint.read_draft(tmp_path)


@pytest.mark.parametrize("content", [b"", b"null", b"{}", b"[]", b"\xff", b'{"expected_acc'])
def test_a_broken_state_is_named(tmp_path, content):
    """T13"""
    path = save(tmp_path, 1) / checkpoint.STATE
    path.write_bytes(content)
    with pytest.raises(ContractError, match=f"{path} is broken"):
        checkpoint.best_step(tmp_path)


@pytest.mark.parametrize("file", [checkpoint.WEIGHTS, checkpoint.OPTIMIZER])
def test_a_torn_tensor_file_is_named(tmp_path, file):
    path = save(tmp_path, 10)
    os.truncate(path / file, (path / file).stat().st_size - 1)
    with pytest.raises(ContractError, match=f"{file} is broken"):
        checkpoint.read_draft(path)
        checkpoint.read_moments(path)


@pytest.mark.parametrize("file", [checkpoint.WEIGHTS, checkpoint.OPTIMIZER])
def test_a_flipped_bit_and_another_steps_file_are_found(tmp_path, file):
    """T13: training would go on from numbers that no step ever had."""
    steps = [save(tmp_path, 10), save(tmp_path, 20)]
    whole = (steps[1] / file).read_bytes()
    for damaged in (whole[:-9] + bytes([whole[-9] ^ 64]) + whole[-8:], (steps[0] / file).read_bytes()):
        (steps[1] / file).write_bytes(damaged)
        with pytest.raises(ContractError, match=f"{file} is broken .*its tensors do not match their checksums"):
            checkpoint.read_draft(steps[1])
            checkpoint.read_moments(steps[1])
    (steps[1] / checkpoint.STATE).write_bytes((steps[0] / checkpoint.STATE).read_bytes())
    with pytest.raises(ContractError, match="it belongs to step 10"):
        checkpoint.read_state(steps[1])


@pytest.mark.parametrize("change", [{"hidden_size": 9}, {"rope_theta": 1e4}, {"rms_norm_eps": 1e-5}])
def test_a_config_that_was_not_saved_with_its_weights_is_found(tmp_path, change):
    """Seam F7: other theta, eps or heads were exported under the trained weights."""
    path = save(tmp_path, 10)
    settings = json.loads((path / checkpoint.CONFIG).read_text())
    (path / checkpoint.CONFIG).write_text(json.dumps(settings, separators=(", ", ":  ")))
    checkpoint.read_draft(path)  # written otherwise, it says the same
    (path / checkpoint.CONFIG).write_text(json.dumps(settings | change))
    for read in (checkpoint.read_draft, checkpoint.read_moments):
        with pytest.raises(ContractError, match=f"{checkpoint.CONFIG} is broken .*; delete its step folder"):
            read(path)


@pytest.mark.parametrize("change", [{"expected_acceptance": 9.0}, {"validated": 9}, {"more": 1}])
def test_a_state_that_was_changed_is_found(tmp_path, change):
    """Seam F7: where training stood, and which step is best, were under no checksum."""
    path = save(tmp_path, 10, 1.25)
    state = json.loads((path / checkpoint.STATE).read_text())
    (path / checkpoint.STATE).write_text(json.dumps(state | change))
    with pytest.raises(ContractError, match=f"{checkpoint.STATE} is broken .*checksum"):
        checkpoint.best_step(tmp_path)
    checkpoint.save_state(path, {"expected_acceptance": 2.0, "step": 10, "validated": 10})
    assert checkpoint.best_step(tmp_path) == path


def test_a_checkpoint_of_an_earlier_version_is_read_by_its_own_sums(tmp_path):
    """Seam L1: a night's training is not lost to an update; its sums find what they always found."""
    path, tensors = save(tmp_path, 10), checkpoint_file.in_file_order(WEIGHTS)
    facts = {"format": "pt", "folder": path.name, "sums": checkpoint_file.additive_sums(WEIGHTS)}
    save_file(tensors, path / checkpoint.WEIGHTS, metadata=facts)
    assert checkpoint.read_draft(path)[0].keys() == WEIGHTS.keys()
    save_file(tensors, path / checkpoint.WEIGHTS, metadata=facts | {"sums": "{}"})
    with pytest.raises(ContractError, match="its tensors do not match their checksums"):
        checkpoint.read_draft(path)


def in_child(work) -> int:
    """Run `work` in a forked process; its exit code, negative for a signal."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("boundary", range(1, 12))
def test_a_kill_while_saving_leaves_the_step_before_or_the_whole_new_one(tmp_path, boundary):
    """T13: after two tensor files, two texts, five syncs (files, their folder), the rename and the sync above it."""
    save(tmp_path, 10)

    def work():
        calls = 0

        def counted(function):
            def wrapped(*args, **kwargs):
                nonlocal calls
                result = function(*args, **kwargs)
                calls += 1
                if calls == boundary:
                    os.kill(os.getpid(), signal.SIGKILL)
                return result

            return wrapped

        checkpoint.checkpoint_file.write_tensors = counted(checkpoint.checkpoint_file.write_tensors)
        Path.write_text = counted(Path.write_text)
        os.fsync, os.replace = counted(os.fsync), counted(os.replace)
        save(tmp_path, 20)

    assert in_child(work) == -signal.SIGKILL
    steps = names(checkpoint.complete_steps(tmp_path))
    renamed = boundary >= 10
    assert steps == ["step-00000010", "step-00000020"][: 1 + renamed]
    assert checkpoint.read_state(tmp_path / steps[-1])["step"] == (20 if renamed else 10)
    files.sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == steps


def test_a_full_disk_leaves_the_step_before(tmp_path):
    save(tmp_path, 10)

    def work():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        large = {"fc.weight": torch.ones(100, 100)}
        try:
            checkpoint.save_step(checkpoint.step_path(tmp_path, 20), large, {}, large, {})
        except OSError:
            os._exit(9)

    assert in_child(work) == 9
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]
    assert checkpoint.read_state(tmp_path / "step-00000010")["step"] == 10
