"""Ranks: what `auto` means, on real gloo ranks."""

import errno
import json
import time

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from drafter import parallel
from tests import captured

FROZEN = 3


def model_of_two() -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, FROZEN))
    model[1].requires_grad_(False)
    return model


@pytest.mark.timeout(60)
def test_the_quicker_kind_is_taken_by_every_rank_and_nothing_moves(tmp_path):
    """One rank alone is slowed down: it decides for all, since every step waits for it."""

    def work() -> int:
        with parallel.ranks() as ranks:
            model, seen = model_of_two(), []

            def step(trial: torch.nn.Module) -> None:
                kind = "ddp" if isinstance(trial, DistributedDataParallel) else "fsdp2"
                seen.append(kind)
                time.sleep(0.1 * (kind == "ddp" and ranks.rank == 1))
                trial(torch.ones(4, 8)).sum().backward()

            kind = parallel.quickest(model, ranks, torch.float32, step)
            same = all(
                torch.equal(a, b) for a, b in zip(model.parameters(), model_of_two().parameters(), strict=True)
            )
            whole = all(type(p) is torch.nn.Parameter and p.grad is None for p in model.parameters())
            found = {"kind": kind, "same": same and whole, "seen": seen}
            (tmp_path / f"{ranks.rank}.json").write_text(json.dumps(found))
        return 0

    assert [captured.wait(pid) for pid in captured.on_ranks(2, work)] == [0, 0]
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        steps = 1 + parallel.TRIAL_STEPS
        assert found == {"kind": "fsdp2", "same": True, "seen": ["ddp"] * steps + ["fsdp2"] * steps}


def test_auto_asks_for_no_trial_where_there_is_nothing_to_choose():
    def never(_model: torch.nn.Module) -> None:
        raise AssertionError

    for asked, expected in {"auto": "ddp", "ddp": "ddp", "fsdp2": "fsdp2"}.items():
        assert parallel.choose(asked, model_of_two(), parallel.Ranks(), torch.float32, never) == expected


class Scaled(torch.nn.Module):
    """As the drafter: a matrix cast to bf16 and a vector, near one as a norm's is, read in fp32."""

    def __init__(self):
        super().__init__()
        self.matrix = torch.nn.Parameter(torch.linspace(-1, 1, 64).view(8, 8))
        self.vector = torch.nn.Parameter(torch.full((8,), 1.001))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.bfloat16() @ self.matrix.bfloat16()).float() * self.vector


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_ranks_compute_in_bf16_what_one_computes(tmp_path, kind):
    """To the bit, gradients too: two terms have one order. A norm rounded to bf16 would not move for many steps."""
    inputs = torch.linspace(0, 1, 64).view(2, 4, 8)

    def work() -> int:
        with parallel.ranks() as ranks:
            model = Scaled()
            wrapped = parallel.wrap(model, kind, ranks, torch.bfloat16)
            with torch.no_grad():
                before = wrapped(inputs[0])
            (wrapped(inputs[ranks.rank]).square().sum() * ranks.world).backward()
            gradients = {name: parallel.whole(p.grad) for name, p in model.named_parameters()}
            torch.save({"output": before, **gradients}, tmp_path / f"{ranks.rank}.pt")
        return 0

    assert [captured.wait(pid) for pid in captured.on_ranks(2, work)] == [0, 0]
    alone = Scaled()
    for row in inputs:
        alone(row).square().sum().backward()
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert torch.equal(found["output"], alone(inputs[0]))
        for name, parameter in alone.named_parameters():
            assert torch.equal(found[name], parameter.grad), name


def test_a_full_disk_of_rank_0_ends_the_others_as_it_does():
    """Its own exit code would say that somebody's file is broken."""

    def full():
        raise OSError(errno.ENOSPC, "No space left on device")

    def work():
        with parallel.ranks() as own:
            try:
                own.on_main(full)
            except (OSError, parallel.MainFailed) as failed:
                return getattr(failed, "exit_code", 100)

    assert [captured.wait(pid) for pid in captured.on_ranks(2, work)] == [100, 3]
