"""The update: its schedule, its decay, its pull."""

import pytest
import torch

from drafter import config
from drafter.train.optimizer import Optimizer, learning_rate


def test_the_learning_rate_is_a_function_of_the_step():
    run = config.Train(lr=1.0, warmup_share=0.1, min_lr_share=0.1)
    rates = [learning_rate(step, 100, run) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([0.1 * i for i in range(1, 11)])
    assert all(a > b for a, b in zip(rates[9:], rates[10:], strict=False))
    assert 0.1 < rates[-1] < 0.11


def test_the_rate_falls_as_a_cosine_does():
    run = config.Train(lr=1.0, warmup_share=0.1, min_lr_share=0.1)
    for k in range(1, 91):  # as far above the middle at its beginning as below it at its end
        assert learning_rate(10 + k, 100, run) + learning_rate(101 - k, 100, run) == pytest.approx(1.1)


def updated(anchor=None, **train):
    """A matrix and a vector of ones after a step of rate 0.1 without a gradient."""
    parameters = {name: torch.nn.Parameter(torch.ones(shape)) for name, shape in (("fc", (2, 2)), ("norm", (2,)))}
    optimizer = Optimizer(parameters, config.Train(lr=0.1, **train), anchor)
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(0.1)
    return [parameters[name].flatten()[0].item() for name in ("fc", "norm")]


def test_matrices_decay_and_norms_do_not():
    assert updated(weight_decay=0.5) == pytest.approx([0.95, 1.0])


def test_the_pull_is_its_strength_times_the_rate():
    zeros = {"fc": torch.zeros(2, 2), "norm": torch.zeros(2)}
    assert updated(zeros, l2_sp=2.0) == pytest.approx([0.8, 0.8])
