"""A warm start that does not belong to its hidden states, or is broken, is refused before it is trained on."""

import json
from dataclasses import replace
from math import comb

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from drafter import config, contracts
from drafter.errors import ConfigError
from drafter.export import stage as export
from drafter.extract import state_file, states
from drafter.serve import smoke_record
from drafter.serve.decoding import Counters, Decoded, Reply
from drafter.target.head import read_verifier
from drafter.train import examples, new_drafter, warm_start_check
from tests import captured, tiny_models

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, TOKENS = 60, 24
LAST_AUX = 2  # slot of the layer that the drafter drafts from


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_models.make_tiny_mla(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def drafter(target, tmp_path_factory):
    """Says what the target's head says of its last auxiliary layer; drafts half of the vocabulary."""
    folder = tmp_path_factory.mktemp("right")
    run = config.load(captured.write_config(folder, target))
    settings = new_drafter.first_config(run.target, captured.VOCAB // 2, 64)
    vocabulary = torch.arange(0, captured.VOCAB, 2)
    weights = new_drafter.first_weights(settings, read_verifier(target), vocabulary, 0)
    export.write_drafter(folder / "drafter", weights, settings, run.target)
    return folder / "drafter"


def write_run(folder, target, warm_start, telling=LAST_AUX, share=1.0, ids=None):
    """A run of ROWS conversations in which slot `telling` holds the next final state, at a `share` of the tokens."""
    path = captured.write_config(folder, target, warm_start, validation_share=0.4, max_steps=1)
    place = folder / "runs/run/02_hidden_states"
    entries, generator = [], torch.Generator().manual_seed(5)
    for index in range(ROWS):
        entry = captured.write_row(place, index, TOKENS, [[4, TOKENS]])
        read = states.read_states(place / entry.path)
        hidden = torch.cat([read.aux, read.final[:, None]], 1)
        known = torch.rand(TOKENS - 1, generator=generator) < share
        if telling is not None:
            hidden[:-1][known, telling] = hidden[1:, -1][known]
        tokens = read.token_ids if ids is None else ids(read.token_ids)
        tensors = {"token_ids": tokens, "hidden_states": hidden.contiguous()}
        states.write_states(place / entry.path, tensors, facts_of(read))
        entries.append(replace(entry, digest=states.ids_digest(tokens.tolist())))
    captured.write_stage(place, entries)
    return path


def facts_of(read):
    return state_file.file_metadata(read.metadata["row_id"], "tiny", captured.LAYER_IDS, "bf16")


def smoke(path, chunks, prompts=32):
    """Record that vLLM served the run's warm start, every decoding step accepting as `chunks` say."""
    run = config.load(path)
    replies = [Reply(str(i), list(range(sum(chunks))), list(chunks), "stop", 1.0, 0.1, False) for i in range(prompts)]
    accepted = sum(size - 1 for size in chunks[1:])
    drafts = len(chunks) - 1
    positions = [prompts * sum(size - 1 >= k for size in chunks[1:]) for k in (1, 2, 3)]
    counters = Counters(prompts * drafts, prompts * drafts * 3, prompts * accepted, positions)
    smoke_record.record(run, Decoded(replies, counters, 1.0, {}, 0), 1 + accepted / drafts)


def changed(drafter, folder, change):
    """A copy of a drafter's folder with other tensors."""
    folder.mkdir()
    (folder / "config.json").write_text((drafter / "config.json").read_text())
    save_file(change(load_file(drafter / "model.safetensors")), folder / "model.safetensors")
    return folder


def test_a_right_warm_start_passes_and_its_first_length_is_kept(target, drafter, tmp_path):
    path = write_run(tmp_path, target, drafter)
    smoke(path, (1, 2, 2, 2))
    code, summary = captured.train(path)
    assert code == 0, summary
    facts = summary["facts"]
    assert facts["served_length"] == 2.0
    # Every token of the draft vocabulary is guessed at step 0, about half of all, and next to none after it.
    assert 1.3 < facts["first_look_length"] < 1.7


@pytest.mark.parametrize("slot", [0, 1])
def test_states_with_permuted_layers_are_refused(target, drafter, tmp_path, slot):
    """Seam F2: the probe compares the final layer alone, so exchanged auxiliary layers were trained on."""
    code, summary = captured.train(write_run(tmp_path, target, drafter, telling=slot))
    assert code == 2
    assert "do not hold layers [2, 4, 5] in this order" in summary["error"] and "extract again" in summary["error"]


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_states_of_layers_one_too_late_are_refused(target, drafter, tmp_path, share):
    """Seam F2: no order of these layers is better; serving says what the drafter reaches on its own layers."""
    path = write_run(tmp_path, target, drafter, share=share)
    smoke(path, (1, 4, 4, 4, 3))
    code, summary = captured.train(path)
    assert code == 2
    assert "reached acceptance length 3.75 when vLLM served it" in summary["error"]
    assert "layers [2, 4, 5] are not those that the drafter was trained on" in summary["error"]


def test_a_permuted_head_is_refused(target, drafter, tmp_path):
    """Seam F8: expected acceptance 1.000 passed, and training began from nothing under the name of a warm start."""

    def permute(tensors):
        order = torch.randperm(len(tensors["lm_head.weight"]), generator=torch.Generator().manual_seed(0))
        return tensors | {"lm_head.weight": tensors["lm_head.weight"][order].contiguous()}

    broken = changed(drafter, tmp_path / "broken", permute)
    code, summary = captured.train(write_run(tmp_path, target, broken))
    assert code == 2
    assert "one constant token reaches" in summary["error"] and "head, vocabulary map (d2t, t2d)" in summary["error"]
    assert not list((tmp_path / "runs/run/04_train").glob("step-*"))


def mostly_even(ids):
    return ids // 2 * 2 + (torch.arange(len(ids)) % 12 == 0)


def shift(tensors):
    ids = torch.arange(len(tensors["d2t"])) + tensors["d2t"] + 1
    kept = torch.zeros_like(tensors["t2d"]).index_fill_(0, ids, True)
    return tensors | {"d2t": ids - torch.arange(len(ids)), "t2d": kept}


def test_a_consistently_shifted_vocabulary_map_is_refused_with_the_shift(target, drafter, tmp_path):
    """Seam F8: d2t and t2d agree with each other and not with what the target writes."""
    path = write_run(tmp_path, target, changed(drafter, tmp_path / "broken", shift), ids=mostly_even)
    code, summary = captured.train(path)
    assert code == 2
    assert "if all ids in d2t and t2d were 1 lower" in summary["error"]


def test_a_shifted_map_that_frequencies_do_not_show_is_no_better_than_chance(target, drafter, tmp_path):
    """Seam F8: here all tokens are equally frequent, so only the guesses show it."""
    code, summary = captured.train(write_run(tmp_path, target, changed(drafter, tmp_path / "broken", shift)))
    assert code == 2 and "one constant token reaches" in summary["error"]


def test_with_few_conversations_there_is_no_judgement(target, drafter, tmp_path):
    path = write_run(tmp_path, target, drafter, telling=None)
    assert captured.train(path, limit=20)[0] == 0


def test_at_its_bound_a_warm_start_is_refused_less_than_once_in_a_million(target, tmp_path):
    """Seam F2: the bound of false alarms, from drafters that reach on these rows just the least share allowed."""
    rng = np.random.default_rng(0)
    run = config.load(captured.write_config(tmp_path, target))
    conversations, steps, excess = 24, 200, []
    for _ in range(4000):
        ability = rng.beta(8, 12, conversations) * 1.5
        hits = rng.binomial(steps, np.clip(ability * warm_start_check.OTHER_PROMPTS, 0, 1))[:, None]
        guessed = warm_start_check._length(hits, np.full((conversations, 1), steps))
        taken = rng.binomial(steps, np.clip(rng.beta(8, 12, conversations) * 1.5, 0, 1))[:, None]
        reached = warm_start_check._length(taken, np.full((conversations, 1), steps))
        warm_start_check._check_served(guessed, reached, conversations, run)  # never raises
        error = np.hypot(guessed[1], warm_start_check.OTHER_PROMPTS * reached[1])
        excess.append((warm_start_check.OTHER_PROMPTS * (reached[0] - 1) - (guessed[0] - 1)) / error)
    assert np.std(excess) == pytest.approx(1.05, abs=0.1), "the error is as large as the spread that is seen"
    with pytest.raises(ConfigError, match="length 2.50"):
        warm_start_check._check_served((1.02, 0.01), (2.5, 0.05), conversations, run)


def test_a_right_drafter_fails_on_half_of_its_conversations_less_than_once_in_a_million():
    """Seam F8, F2: the bound that MIN_CONVERSATIONS is derived from."""
    for n in range(warm_start_check.MIN_CONVERSATIONS, 2 * warm_start_check.CONVERSATIONS):
        assert sum(comb(n, k) * 0.9**k * 0.1 ** (n - k) for k in range(n // 2 + 1)) < 1e-6


def test_an_earlier_smoke_without_tallies_is_no_evidence(target, drafter, tmp_path):
    path = write_run(tmp_path, target, drafter)
    run = config.load(path)
    (run.run.dir / smoke_record.NAME).write_text(json.dumps({smoke_record.key(run): 3.9}))
    assert smoke_record.find(run) is None
    assert captured.train(path)[0] == 0


def test_every_rank_ends_when_the_warm_start_is_refused(target, drafter, tmp_path):
    """Seam M8, F2: rank 0 looks for all."""
    path = write_run(tmp_path, target, drafter, telling=0)
    assert captured.train_on_ranks(2, path, "train.tokens_per_step=128") == [2, 2]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 0, 2)])
def test_layers_are_reordered_alike_in_both_forms_of_the_states(tmp_path, order):
    packs = []
    for dtype in ("bf16", "fp8"):
        entry = captured.write_row(tmp_path / dtype, 0, 20, [[4, 20]], dtype=dtype)
        rows = examples.learnable_rows([entry], 64, 3, contracts.Counts(total=1))
        reader = examples.Reader(tmp_path / dtype, *captured.FORM, 3, think_end=None, pin=False)
        packs.append(reader.read(rows))
    plain, compact = (warm_start_check._reordered(pack, order) for pack in packs)
    wanted = packs[0].states[:, list(order)].flatten(1).float()
    assert torch.equal(plain.drafter_input(torch.float32), wanted)
    torch.testing.assert_close(compact.drafter_input(torch.float32), wanted, rtol=0.07, atol=0.05)
    for pack, before in ((plain, packs[0]), (compact, packs[1])):
        assert torch.equal(pack.teacher_states(torch.float32), before.teacher_states(torch.float32))
