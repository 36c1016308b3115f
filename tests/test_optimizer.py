"""The update: its schedule."""

import pytest

from drafter import config
from drafter.optimizer import learning_rate


def test_the_learning_rate_is_a_function_of_the_step():
    run = config.Train(lr=1.0, warmup_share=0.1, min_lr_share=0.1)
    rates = [learning_rate(step, 100, run) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([0.1 * i for i in range(1, 11)])
    assert all(a > b for a, b in zip(rates[9:], rates[10:], strict=False))
    assert 0.1 < rates[-1] < 0.11
