"""The layer's memory-bound chains: their written-out gradients are autograd's."""

import pytest
import torch
import torch.nn.functional as F

from drafter.train import pointwise

EPS = 1e-5


def plain_norm(x, weight):
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


def plain_rotation(x, cos, sin):
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * cos[:, None] + turned * sin[:, None]


def angles(rows, dim):
    angle = torch.linspace(0, 3, rows)[:, None] * torch.linspace(1, 0.1, dim // 2)
    return torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)


CASES = {
    "rms_norm": (lambda x, w: pointwise.rms_norm(x, w, EPS), plain_norm, [(7, 16), (16,)], ()),
    "swiglu": (pointwise.swiglu, lambda gate, up: F.silu(gate) * up, [(7, 16), (7, 16)], ()),
    "rotate": (pointwise.rotate, plain_rotation, [(7, 3, 8)], angles(7, 8)),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_autograds(name):
    ours, plain, shapes, fixed = CASES[name]
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    results = []
    for function in (ours, plain):
        out = function(*inputs, *fixed)
        grad = torch.linspace(-1, 1, out.numel()).view_as(out)
        results.append([out, *torch.autograd.grad(out, inputs, grad)])
    for own, expected in zip(*results, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("frozen", [0, 1])
def test_what_is_frozen_gets_no_gradient(frozen):
    inputs = [torch.randn(5, 8).requires_grad_(frozen != 0), torch.ones(8).requires_grad_(frozen != 1)]
    pointwise.rms_norm(*inputs, EPS).sum().backward()
    assert [tensor.grad is None for tensor in inputs] == [frozen == 0, frozen == 1]


def test_half_precision_is_computed_in_single():
    """Squares of these overflow half precision; a gradient is as exact as its inputs allow."""
    x = torch.full((2, 8), 300.0, dtype=torch.float16).requires_grad_()
    out = pointwise.rms_norm(x, torch.ones(8), EPS)
    out[:, 0].sum().backward()
    assert out.dtype == x.grad.dtype == torch.float16
    torch.testing.assert_close(out, torch.ones_like(out))
    assert x.grad.isfinite().all()
