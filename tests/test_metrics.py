"""What training shows: figures of a step, and the two places they go to."""

import json
import sys
import types

import pytest
import torch

from drafter import metrics
from drafter.draft import ANSWER, REASONING

FIGURES = {"loss": [1.5, 2.0], "lr": 0.1, "answer": {"accuracy": [0.25]}, "epoch": 0}


class Board:
    """Stands for TensorBoard's writer where that package is not installed."""

    made: list["Board"] = []

    def __init__(self, folder, purge_step):
        self.folder, self.purge_step, self.scalars, self.open = folder, purge_step, [], True
        Board.made.append(self)

    def add_scalar(self, name, value, step):
        self.scalars.append((name, value, step))

    def flush(self):
        pass

    def close(self):
        self.open = False


@pytest.fixture
def board(monkeypatch):
    Board.made = []
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Board
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    return Board.made


def test_every_number_becomes_a_scalar(board, tmp_path):
    log = metrics.Metrics(tmp_path, 0)
    log.write("train", 1, FIGURES)
    log.write("validation", 1, {"loss": [1.25]})
    log.close()
    [writer] = board
    assert writer.folder == str(tmp_path / "tensorboard") and not writer.open
    assert writer.scalars == [
        ("train/loss_0", 1.5, 1), ("train/loss_1", 2.0, 1), ("train/lr", 0.1, 1),
        ("train/answer/accuracy_0", 0.25, 1), ("train/epoch", 0, 1), ("validation/loss_0", 1.25, 1),
    ]  # fmt: skip


def test_a_resumed_run_shows_every_step_once(board, tmp_path):
    """T12: what was written after the checkpoint is made anew, in both places."""
    log = metrics.Metrics(tmp_path, 0)
    for step in (1, 2, 3):
        log.write("train", step, FIGURES | {"lr": 1.0 * step})
    log.close()
    log = metrics.Metrics(tmp_path, 2)
    log.write("train", 3, FIGURES | {"lr": 30.0})
    log.close()
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(record["step"], record["lr"]) for record in records] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert [writer.purge_step for writer in board] == [1, 3]


def test_real_event_files_hold_the_scalars(tmp_path):
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log = metrics.Metrics(tmp_path, 0)
    log.write("train", 1, FIGURES)
    log.close()
    events = loader.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss_1")] == [(1, 2.0)]


def test_figures_of_counts_written_out():
    """Of 4 drafts 3 begin right, 2 of those 3 go on right: 1 + 3/4 + 2/4."""
    sums = torch.zeros(2, 2, 5)
    sums[ANSWER] = torch.tensor([[4.0, 8.0, 3.0, 3.0, 4.0], [4.0, 10.0, 2.0, 2.0, 3.0]])
    figures = metrics.summary_by_region(sums)
    assert figures["expected_acceptance"] == 2.25 and "answer" not in figures
    assert figures["accuracy"] == [0.75, 0.5] and figures["conditional_accuracy"] == [0.75, 0.666667]
    assert figures["loss"] == [2.0, 2.5] and figures["guesses"] == [4, 4]
    sums[REASONING] = torch.tensor([[4.0, 8.0, 1.0, 1.0, 4.0], [4.0, 10.0, 0.0, 0.0, 1.0]])
    figures = metrics.summary_by_region(sums)
    assert figures["reasoning"]["expected_acceptance"] == 1.25 and figures["answer"]["expected_acceptance"] == 2.25
    assert figures["expected_acceptance"] == 1.75


def test_nothing_asked_gives_no_division_by_zero():
    """T01"""
    assert metrics.summary(torch.zeros(3, 5))["expected_acceptance"] == 1.0
