"""The layer's memory-bound operations, each one kernel forward and one backward with an explicit gradient.

With autograd, a compiled function is compiled again for every set of inputs that need gradients and for validation.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from drafter.train.fuse import constant, fused, matrix_rows


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of `x` [N, H], computed in fp32."""
    return _RMSNorm.apply(x, weight.float(), eps)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return _SwiGLU.apply(gate, up)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of `x` [N, heads, d] with `cos`, `sin` [N, d], whose halves are equal."""
    return _Rotate.apply(x, cos, sin)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        ctx.save_for_backward(x, weight)
        ctx.eps = constant(eps, x.device)
        return fused(_norm, x.device)(matrix_rows(x), weight.detach(), ctx.eps)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        kernel = fused(_norm_gradients, x.device)
        return *kernel(matrix_rows(grad.contiguous()), matrix_rows(x), weight.detach(), ctx.eps), None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return fused(_gated, gate.device)(matrix_rows(gate), matrix_rows(up))

    @staticmethod
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        return fused(_gated_gradients, gate.device)(
            matrix_rows(grad.contiguous()), matrix_rows(gate), matrix_rows(up)
        )


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return fused(_rotated, x.device)(matrix_rows(x), matrix_rows(cos), matrix_rows(sin))

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return (
            fused(_rotated, grad.device)(matrix_rows(grad.contiguous()), matrix_rows(cos), matrix_rows(-sin)),
            None,
            None,
        )


def _norm(x, weight, eps):
    wide = x.float()
    return (weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps))).to(x.dtype)


def _norm_gradients(grad, x, weight, eps):
    wide, grad = x.float(), grad.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    normed, weighted = wide * scale, grad * weight
    dx = scale * (weighted - normed * (weighted * normed).mean(-1, keepdim=True))
    return dx.to(x.dtype), (grad * normed).sum(0)


def _gated(gate, up):
    return F.silu(gate) * up


def _gated_gradients(grad, gate, up):
    wide, grad = gate.float(), grad.float()
    share = torch.sigmoid(wide)
    dgate = grad * up.float() * share * (1 + wide * (1 - share))
    return dgate.to(gate.dtype), (grad * wide * share).to(up.dtype)


def _rotated(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos.unsqueeze(1) + torch.cat((-b, a), -1) * sin.unsqueeze(1)
