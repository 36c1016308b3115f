"""Fixtures of the training tests."""

import pytest
import torch


@pytest.fixture
def one_thread():
    """Bitwise equality is promised for one number of threads, and a tiny model is slower on several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
