"""What training shows: figures of a step, and the two places they go to."""

import json

import pytest
import torch

from drafter.train import metrics
from drafter.train.batch import ANSWER, REASONING

FIGURES = {"loss": [1.5, 2.0], "lr": 0.1, "answer": {"accuracy": [0.25]}, "epoch": 0}


def scalars(folder):
    """Of the event files: by name, every (step, value)."""
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = loader.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {name: [(e.step, round(e.value, 6)) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_every_number_becomes_a_scalar(tmp_path):
    log = metrics.Metrics(tmp_path, 0, -1)
    log.write("train", 1, FIGURES)
    log.write("validation", 1, {"loss": [1.25]})
    log.close()
    assert scalars(tmp_path) == {
        "train/loss_0": [(1, 1.5)], "train/loss_1": [(1, 2.0)], "train/lr": [(1, 0.1)],
        "train/answer/accuracy_0": [(1, 0.25)], "train/epoch": [(1, 0.0)], "validation/loss_0": [(1, 1.25)],
    }  # fmt: skip


def write_and_resume(folder):
    log = metrics.Metrics(folder, 0, -1)
    for step in (1, 2, 3):
        log.write("train", step, FIGURES | {"lr": 1.0 * step})
    log.close()
    log = metrics.Metrics(folder, 2, 2)
    log.write("train", 3, FIGURES | {"lr": 30.0})
    log.close()


def test_a_resumed_run_records_every_step_once(tmp_path):
    """T12: what was written after the checkpoint is made anew."""
    write_and_resume(tmp_path)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(record["step"], record["lr"]) for record in records] == [(1, 1.0), (2, 2.0), (3, 30.0)]


@pytest.mark.parametrize(("validated", "kept"), [(-1, []), (0, [0]), (2, [0, 2])])
def test_a_resumed_run_records_every_validation_once(tmp_path, validated, kept):
    """T12: of the one before step 1 too, which a kill before the first checkpoint has made again."""
    log = metrics.Metrics(tmp_path, 0, -1)
    for step in (0, 2):
        log.write("validation", step, {"loss": [1.25]})
    log.close()
    metrics.Metrics(tmp_path, 2, validated).close()
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == kept


@pytest.mark.parametrize(
    "line", [b"{", b"{}", b"[1]", b"5", b'{"step":"x","kind":"train"}', b'{"step":1}', b"\xff", b"\0" * 40]
)
def test_a_broken_record_does_not_stop_a_night(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    whole = [b'{"kind":"train","step":1}\n', b'{"kind":"validation","step":2}\n']
    path.write_bytes(whole[0] + line + b"\n" + whole[1] + b'{"st')
    metrics.Metrics(tmp_path, 2, 2).close()
    assert path.read_bytes() == b"".join(whole)


def test_a_resumed_run_shows_every_step_once(tmp_path):
    """T12: in TensorBoard too."""
    write_and_resume(tmp_path)
    assert scalars(tmp_path)["train/lr"] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_figures_of_counts_written_out():
    """Of 4 drafts 3 begin right, 2 of those 3 go on right: 1 + 3/4 + 2/4."""
    sums = torch.zeros(2, 2, 5)
    sums[ANSWER] = torch.tensor([[4.0, 8.0, 3.0, 3.0, 4.0], [4.0, 10.0, 2.0, 2.0, 3.0]])
    figures = metrics.region_figures(sums)
    assert figures["expected_acceptance"] == 2.25 and "answer" not in figures
    assert figures["accuracy"] == [0.75, 0.5] and figures["conditional_accuracy"] == [0.75, 0.666667]
    assert figures["loss"] == [2.0, 2.5] and figures["guesses"] == [4, 4]
    sums[REASONING] = torch.tensor([[4.0, 8.0, 1.0, 1.0, 4.0], [4.0, 10.0, 0.0, 0.0, 1.0]])
    figures = metrics.region_figures(sums)
    assert figures["reasoning"]["expected_acceptance"] == 1.25 and figures["answer"]["expected_acceptance"] == 2.25
    assert figures["expected_acceptance"] == 1.75


def test_nothing_asked_gives_no_division_by_zero():
    """T01"""
    assert metrics.step_figures(torch.zeros(3, 5))["expected_acceptance"] == 1.0
