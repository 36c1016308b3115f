"""The layer convention of a warm start is tested, not assumed."""

import json
from dataclasses import replace

import pytest
import torch

from drafter import config, contracts
from drafter.errors import ConfigError
from drafter.extract import state_file, states
from drafter.target import eagle3_folder
from drafter.target.head import read_verifier
from drafter.train import draft_model, examples, layer_convention, new_drafter
from tests import captured, tiny_models

BOTH = (2, 3, 4, 5, 6, 8)  # layers 2, 4 and 5 with their upper neighbours, and the last


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_models.make_tiny_mla(tmp_path_factory.mktemp("target"))


@pytest.fixture
def run(target, tmp_path):
    return config.load(captured.write_config(tmp_path, target))


@pytest.fixture
def drafter(run):
    """Says what the target's head says of its last auxiliary layer: right where that knows the next state."""
    settings = new_drafter.first_config(run.target, None, 64)
    verifier = read_verifier(run.target.model)
    model = draft_model.build_drafter(
        new_drafter.first_weights(settings, verifier, None, 0), settings, verifier, run.target
    )
    model.prepare(verifier, torch.float32, 3)
    return model


def write(run, telling: int | None) -> list[examples.Example]:
    """Two rows captured at both; layer `telling` knows the next state."""
    folder = run.stage_dir("02_hidden_states") / layer_convention.FOLDER
    entries = []
    for index in range(2):
        entry = captured.write_row(folder, index, 30, [[5, 30]])
        hidden = torch.randn(30, len(BOTH), captured.HIDDEN).bfloat16()
        if telling:
            hidden[:-1, BOTH.index(telling)] = hidden[1:, -1]
        ids = states.read_states(folder / entry.path).token_ids
        tensors = {"token_ids": ids, "hidden_states": hidden}
        states.write_states(
            folder / entry.path, tensors, state_file.file_metadata(entry.row_id, "tiny", BOTH, "bf16")
        )
        entries.append(entry)
    return examples.learnable_rows(entries, 64, 3, contracts.Counts(total=2))


def test_the_right_layers_pass(run, drafter):
    losses = layer_convention.losses_by_layer_ids(drafter, run, write(run, telling=5))
    assert losses["2, 4, 5"] < 0.01 < losses["3, 5, 6"]


def test_a_clearly_better_neighbour_stops_the_run(run, drafter):
    with pytest.raises(ConfigError, match=r"better from layers \[3, 5, 6\].*set target.layer_ids to \[3, 5, 6, 8\]"):
        layer_convention.losses_by_layer_ids(drafter, run, write(run, telling=6))


def test_no_such_rows_no_opinion(run, drafter):
    rows = write(run, telling=6)
    absent = [replace(row, entry=replace(row.entry, row_id="0" * 32)) for row in rows]
    assert layer_convention.losses_by_layer_ids(drafter, run, absent) == {}


def test_the_stage_asks_before_its_first_step(target, tmp_path):
    warm = tiny_models.make_drafter(target, tmp_path / "warm")
    path = captured.write_run(tmp_path, target, warm_start=warm, max_steps=1)
    run = config.load(path)
    index = examples.read_index(run.stage_dir("02_hidden_states"))
    folder = run.stage_dir("02_hidden_states") / layer_convention.FOLDER
    hidden = torch.randn(index[0].tokens, len(BOTH), captured.HIDDEN).bfloat16()
    for layer, equal in ((3, 2), (5, 4), (6, 4)):  # so that neither reading of the ids is better
        hidden[:, BOTH.index(layer)] = hidden[:, BOTH.index(equal)]
    ids = states.read_states(run.stage_dir("02_hidden_states") / index[0].path).token_ids
    (folder / index[0].path).parent.mkdir(parents=True)
    facts = state_file.file_metadata(index[0].row_id, "tiny", BOTH, "bf16")
    states.write_states(folder / index[0].path, {"token_ids": ids, "hidden_states": hidden}, facts)
    code, summary = captured.train(path)
    assert code == 0 and set(summary["facts"]["layer_losses"]) == {"2, 4, 5", "3, 5, 6"}
    assert json.dumps(eagle3_folder.read_config(warm)["eagle_aux_hidden_state_layer_ids"]) == "[2, 4, 5]"
