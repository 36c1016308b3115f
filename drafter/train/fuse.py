"""Chains of memory-bound operations as one kernel each, on a GPU; plain torch elsewhere.

Only the number of rows varies from pack to pack. Marking it, and nothing else, as dynamic compiles each function
once and keeps every other size a constant of its kernel. Whoever calls them knows their gradients.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor


def fused(function: Callable, device: torch.device) -> Callable:
    """`function`, compiled where that pays. A CPU gains less than compiling costs."""
    return _compiled(function) if device.type == "cuda" else function


@cache
def _compiled(function: Callable) -> Callable:
    return torch.compile(function)


def matrix_rows(tensor: Tensor, dim: int = 0) -> Tensor:
    """`tensor` without its history, its dimension `dim` marked as the one that varies."""
    tensor = tensor.detach()
    if tensor.is_cuda:
        torch._dynamo.maybe_mark_dynamic(tensor, dim)
    return tensor


@cache
def constant(value: float, device: torch.device) -> Tensor:
    """A number that a compiled function does not specialize on."""
    return torch.tensor(value, device=device)
