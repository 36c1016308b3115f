"""The distillation loss at supervised positions, fused with both heads and computed in chunks.

Full logits of a pack would be steps x positions x vocabulary numbers, several times. Since the loss is a sum over
positions, the gradient of a chunk of logits is known at once: it goes through the head, and the logits are freed.
"""

import torch
from torch import Tensor

from drafter.train.fuse import fused, matrix_rows

CHUNK_BYTES = 1 << 30  # size of one chunk's logits in fp32


def linear_kl(
    hidden: Tensor, head: Tensor, teacher: Tensor, teacher_head: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """KL(teacher || drafter) over the draft vocabulary.

    `hidden` [K, N, H]: the drafter's states, after its norm, of the K steps that predict position n; `teacher`
    [N, H]: the target's, after its norm; `head`, `teacher_head` [D, H]; `weight` [K, N]: the weight of each loss.
    Returns the weighted sum (differentiable in `hidden` and `head`), the losses [K, N], and the drafted ids [K, N].
    """
    if not torch.is_grad_enabled():
        head = head.detach()  # a parameter would request a gradient even here
    return _LinearKL.apply(hidden, head, teacher, teacher_head, weight)


class _LinearKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, head, teacher, teacher_head, weight):
        steps, positions, _ = hidden.shape
        wants_hidden, wants_head = ctx.needs_input_grad[:2]
        chunks = -(-4 * steps * positions * head.shape[0] // CHUNK_BYTES)
        chunk = max(1, -(-positions // max(1, chunks)))  # of nearly equal size
        losses = torch.empty(steps, positions, dtype=torch.float32, device=hidden.device)
        drafted = torch.empty(steps, positions, dtype=torch.long, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_head = torch.zeros(head.shape, dtype=torch.float32, device=head.device) if wants_head else None
        kernel = fused(_kl, hidden.device)
        for start in range(0, positions, chunk):
            part = slice(start, start + chunk)
            states = hidden[:, part]
            logits = states @ head.T
            teacher_logits = teacher[part] @ teacher_head.T
            # A slice has other strides than a whole pack, which would compile the kernel twice.
            counts = weight[:, part].contiguous()
            losses[:, part], drafted[:, part], grad = kernel(
                matrix_rows(logits, 1), matrix_rows(teacher_logits), matrix_rows(counts, 1)
            )
            if wants_hidden:
                grad_hidden[:, part] = grad @ head
            if wants_head:
                grad_head += grad.flatten(0, 1).T @ states.flatten(0, 1)
        ctx.save_for_backward(grad_hidden, grad_head)
        ctx.head_dtype = head.dtype
        ctx.mark_non_differentiable(losses, drafted)
        return (losses * weight).sum(), losses, drafted

    @staticmethod
    def backward(ctx, grad, *_):
        grad_hidden, grad_head = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = grad_hidden * grad.to(grad_hidden.dtype)
        if grad_head is not None:
            grad_head = (grad_head * grad).to(ctx.head_dtype)
        return grad_hidden, grad_head, None, None, None


def _kl(logits: Tensor, teacher_logits: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Loss [K, C], argmax [K, C] and gradient [K, C, D] of one chunk."""
    log_q = logits.float().log_softmax(-1)
    log_p = teacher_logits.float().log_softmax(-1)
    p = log_p.exp()
    loss = (p * (log_p - log_q)).sum(-1)
    grad = ((log_q.exp() - p) * weight.unsqueeze(-1)).to(logits.dtype)
    return loss, logits.argmax(-1), grad
