"""Ranks: what `auto` means, on real gloo ranks."""

import errno
import json

import pytest
import torch

from drafter.errors import ConfigError
from drafter.train import distributed
from tests import captured

FROZEN = 3


def model_of_two() -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, FROZEN))
    model[1].requires_grad_(False)
    return model


def on_two(tmp_path, work) -> list:
    """What `work(ranks)` returns on each of two gloo ranks."""

    def joined() -> int:
        with distributed.joined_ranks() as ranks:
            (tmp_path / f"{ranks.rank}.json").write_text(json.dumps(work(ranks)))
        return 0

    assert [captured.wait(pid) for pid in captured.on_ranks(2, joined)] == [0, 0]
    return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("holds", "copies", "expected"),
    [((1, 1), (1, 1), "ddp"), ((1, 1), (1, 0), "fsdp2"), ((0, 1), (1, 1), "fsdp2"), ((1, 0), (0, 1), "fsdp2")],
)
def test_every_rank_takes_the_same_kind_whatever_it_sees_alone(tmp_path, monkeypatch, holds, copies, expected):
    """Seam M8: DDP on one rank and a trial with collectives on another waited for each other for ever."""
    monkeypatch.setattr(distributed.Ranks, "holds", lambda self, _state: bool(holds[self.rank]))
    monkeypatch.setattr(distributed.Ranks, "copies_directly", property(lambda self: bool(copies[self.rank])))
    assert on_two(tmp_path, lambda ranks: distributed.parallel_kind("auto", model_of_two(), ranks)) == [expected] * 2


@pytest.mark.timeout(60)
def test_rank_0_decides_for_all(tmp_path):
    """Seam M8: with the attribute caches of a network file system each rank saw another last step."""
    assert on_two(tmp_path, lambda ranks: ranks.decide(lambda: ["step", ranks.rank])) == [["step", 0]] * 2
    assert on_two(tmp_path, lambda ranks: [ranks.all(ranks.rank == 0), ranks.all(True)]) == [[False, True]] * 2


def test_what_a_decision_raises_ends_every_rank(tmp_path):
    """Seam M8"""

    def broken():
        raise ConfigError("other rows")

    def work():
        with distributed.joined_ranks() as own:
            try:
                own.decide(broken)
            except (ConfigError, distributed.MainFailed) as failed:
                return failed.exit_code + 10 * (type(failed) is distributed.MainFailed)

    assert [captured.wait(pid) for pid in captured.on_ranks(2, work)] == [2, 12]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_the_moments_of_rank_0_reach_every_rank(tmp_path, kind):
    """Seam M8: every rank read all of them, 10 GB of host memory each at Kimi's size."""
    whole = torch.arange(64.0).view(8, 8)

    def work(ranks) -> list:
        model = Scaled()
        distributed.wrap(model, kind, ranks, torch.bfloat16)
        got = distributed.scatter(whole if ranks.main else None, model.matrix)
        assert type(got) is (torch.Tensor if kind == "ddp" else type(model.matrix.data))
        return distributed.gather(got).tolist()

    assert on_two(tmp_path, work) == [whole.tolist()] * 2


def test_auto_is_ddp_where_there_is_nothing_to_choose():
    for asked, expected in {"auto": "ddp", "ddp": "ddp", "fsdp2": "fsdp2"}.items():
        assert distributed.parallel_kind(asked, model_of_two(), distributed.Ranks()) == expected


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
        with distributed.joined_ranks() as ranks:
            model = Scaled()
            wrapped = distributed.wrap(model, kind, ranks, torch.bfloat16)
            with torch.no_grad():
                before = wrapped(inputs[0])
            (wrapped(inputs[ranks.rank]).square().sum() * ranks.world).backward()
            gradients = {name: distributed.gather(p.grad) for name, p in model.named_parameters()}
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
    """Its own exit code would mean that a file is broken."""

    def full():
        raise OSError(errno.ENOSPC, "No space left on device")

    def work():
        with distributed.joined_ranks() as own:
            try:
                own.on_main(full)
            except (OSError, distributed.MainFailed) as failed:
                return getattr(failed, "exit_code", 100)

    assert [captured.wait(pid) for pid in captured.on_ranks(2, work)] == [100, 3]
