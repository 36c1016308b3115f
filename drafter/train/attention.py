"""Attention over packed rows with test-time-training steps: one causal block and a few diagonals, merged.

In step k an anchor attends to the step-0 keys of its row up to itself (which the engine computes from the target's
true states) and to its own keys of steps 1..k. A variable-length kernel computes the causal block; the diagonals are
k dot products for each head, merged by their log-sum-exp. The backward pass gives the kernel the *merged* output and
log-sum-exp, which makes its gradient of the causal block exact (as in ring attention).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from drafter.train.fuse import fused, matrix_rows


@dataclass(slots=True)
class Documents:
    """Bounds of packed rows: row i has keys cu_k[i]:cu_k[i+1] and, for its last slots, queries cu_q[i]:cu_q[i+1]."""

    cu_q: Tensor  # int32 [rows + 1]
    cu_k: Tensor  # int32 [rows + 1]
    max_q: int
    max_k: int


def attend(q: Tensor, k0: Tensor, v0: Tensor, diagonals: list[tuple[Tensor, Tensor]], documents: Documents) -> Tensor:
    """Attention output [N, heads, d].

    `q` [N, heads, d]; `k0`, `v0` [L, kv_heads, d] of step 0; `diagonals` holds (k, v) [N, kv_heads, d] for each
    later step up to the current one.
    """
    flat = [tensor for pair in diagonals for tensor in pair]
    return _Merged.apply(documents, q, k0, v0, *flat)


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(ctx, documents, q, k0, v0, *flat):
        scale = q.shape[-1] ** -0.5
        kernel = _flash if q.is_cuda and q.dtype != torch.float32 else _plain
        out, lse, extra = kernel.forward(q, k0, v0, documents, scale)
        if flat:
            merge = fused(_merge, q.device)
            out, lse = merge(
                matrix_rows(out), matrix_rows(lse, 1), matrix_rows(q), [matrix_rows(t) for t in flat], scale
            )
        ctx.save_for_backward(q, k0, v0, out, lse, *flat)
        ctx.kernel, ctx.documents, ctx.scale, ctx.extra = kernel, documents, scale, extra
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k0, v0, out, lse, *flat = ctx.saved_tensors
        grad = grad.contiguous()
        dq, dk0, dv0 = ctx.kernel.backward(grad, q, k0, v0, out, lse, ctx.documents, ctx.scale, ctx.extra)
        if not flat:
            return None, dq, dk0, dv0
        gradients = fused(_diagonal_gradients, q.device)
        diagonals = [matrix_rows(t) for t in flat]
        dq, dflat = gradients(
            matrix_rows(grad),
            matrix_rows(q),
            matrix_rows(out),
            matrix_rows(lse, 1),
            diagonals,
            ctx.scale,
            matrix_rows(dq),
        )
        return None, dq, dk0, dv0, *dflat


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    """[N, heads, d] as [N, kv_heads, group, d], in fp32."""
    return x.float().unflatten(1, (kv_heads, -1))


def _merge(out, lse, q, flat, scale):
    """Merge the causal block's (out [N, h, d], lse [h, N]) with the diagonals."""
    kv_heads = flat[0].shape[1]
    qg = _grouped(q, kv_heads)
    block = lse.T.unflatten(1, (kv_heads, -1))  # [N, kv_heads, group]
    scores = [(qg * k.float().unsqueeze(2)).sum(-1) * scale for k in flat[::2]]
    total = torch.logsumexp(torch.stack([block, *scores]), 0)
    merged = _grouped(out, kv_heads) * (block - total).exp().unsqueeze(-1)
    for score, v in zip(scores, flat[1::2], strict=True):
        merged = merged + (score - total).exp().unsqueeze(-1) * v.float().unsqueeze(2)
    return merged.flatten(1, 2).to(q.dtype), total.flatten(1).T.contiguous()


def _diagonal_gradients(grad, q, out, lse, flat, scale, dq):
    kv_heads = flat[0].shape[1]
    qg, gg = _grouped(q, kv_heads), _grouped(grad, kv_heads)
    delta = (gg * _grouped(out, kv_heads)).sum(-1)
    total = lse.T.unflatten(1, (kv_heads, -1))
    dqg = _grouped(dq, kv_heads)
    dflat = []
    for k, v in zip(flat[::2], flat[1::2], strict=True):
        kf, vf = k.float().unsqueeze(2), v.float().unsqueeze(2)
        p = ((qg * kf).sum(-1) * scale - total).exp()
        ds = p * ((gg * vf).sum(-1) - delta) * scale
        dqg = dqg + ds.unsqueeze(-1) * kf
        dflat.append((ds.unsqueeze(-1) * qg).sum(2).to(k.dtype))
        dflat.append((p.unsqueeze(-1) * gg).sum(2).to(v.dtype))
    return dqg.flatten(1, 2).to(q.dtype), dflat


class _flash:
    """FlashAttention's variable-length kernels (CUDA, half precision); causal means aligned at the end of a row."""

    @staticmethod
    def forward(q, k, v, documents, scale):
        d = documents
        out, lse, *random, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, d.cu_q, d.cu_k, d.max_q, d.max_k, 0.0, True, False, scale=scale
        )
        return out, lse, tuple(random)

    @staticmethod
    def backward(grad, q, k, v, out, lse, documents, scale, random):
        d = documents
        return torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, lse, d.cu_q, d.cu_k, d.max_q, d.max_k, 0.0, True, *random, scale=scale
        )


class _plain:
    """The same in plain torch, row by row: what a CPU runs, and fp32 anywhere."""

    @staticmethod
    def _rows(documents):
        q, k = documents.cu_q.tolist(), documents.cu_k.tolist()
        return zip(q, q[1:], k, k[1:], strict=False)

    @staticmethod
    def _scores(q, k, scale):
        """Queries as [kv_heads, group * nq, d] and their causal scores [kv_heads, group * nq, nk]."""
        nq, nk, kv_heads = q.shape[0], k.shape[0], k.shape[1]
        folded = q.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)  # [kv_heads, group, nq, d]
        scores = (folded.flatten(1, 2) @ k.permute(1, 2, 0)) * scale
        future = torch.ones(nq, nk, dtype=torch.bool, device=q.device).triu(nk - nq + 1)
        scores = scores.unflatten(1, (-1, nq)).masked_fill(future, float("-inf"))
        return folded.flatten(1, 2), scores.flatten(1, 2)

    @staticmethod
    def _unfold(x, nq):
        """[kv_heads, group * nq, d] back to [nq, heads, d]."""
        return x.unflatten(1, (-1, nq)).permute(2, 0, 1, 3).flatten(1, 2)

    @classmethod
    def forward(cls, q, k, v, documents, scale):
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
        for q0, q1, k0, k1 in cls._rows(documents):
            _, scores = cls._scores(q[q0:q1], k[k0:k1], scale)
            total = scores.float().logsumexp(-1, keepdim=True)
            weights = (scores - total).exp().to(q.dtype)
            out[q0:q1] = cls._unfold(weights @ v[k0:k1].transpose(0, 1), q1 - q0)
            lse[:, q0:q1] = total.reshape(-1, q1 - q0)
        return out, lse, ()

    @classmethod
    def backward(cls, grad, q, k, v, out, lse, documents, scale, _extra):
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for q0, q1, k0, k1 in cls._rows(documents):
            nq, kv_heads = q1 - q0, k.shape[1]
            folded, scores = cls._scores(q[q0:q1], k[k0:k1], scale)
            go = grad[q0:q1].unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)
            oo = out[q0:q1].unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)
            p = (scores.float() - lse[:, q0:q1].reshape(kv_heads, -1, 1)).exp()
            dp = (go @ v[k0:k1].permute(1, 2, 0)).float()
            ds = (p * (dp - (go.float() * oo.float()).sum(-1, keepdim=True)) * scale).to(q.dtype)
            dq[q0:q1] = cls._unfold(ds @ k[k0:k1].transpose(0, 1), nq)
            dk[k0:k1] = (ds.transpose(1, 2) @ folded).transpose(0, 1)
            dv[k0:k1] = (p.to(q.dtype).transpose(1, 2) @ go).transpose(0, 1)
        return dq, dk, dv
