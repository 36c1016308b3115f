"""Compiles chains of memory-bound operations to one kernel each on a GPU; plain torch elsewhere.

Only the number of rows varies from pack to pack. If only that is marked as dynamic, each function is compiled once,
with every other size as a constant. Callers provide the gradients.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor


def fused(function: Callable, device: torch.device) -> Callable:
    """`function`, compiled on a GPU. On a CPU compiling costs more than it gains."""
    return _compiled(function) if device.type == "cuda" else function


@cache
def _compiled(function: Callable) -> Callable:
    return torch.compile(function)


def matrix_rows(tensor: Tensor, dim: int = 0) -> Tensor:
    """`tensor`, detached, with dimension `dim` marked as dynamic."""
    tensor = tensor.detach()
    if tensor.is_cuda:
        torch._dynamo.maybe_mark_dynamic(tensor, dim)
    return tensor


@cache
def constant(value: float, device: torch.device) -> Tensor:
    """A number as a tensor, so that a compiled function does not specialize on it."""
    return torch.tensor(value, device=device)
