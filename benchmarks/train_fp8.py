"""Whether fp8 products with the frozen heads would pay off: time at the Kimi shape, effect on loss and gradient.

    python -m benchmarks.train_fp8            on a GPU that has fp8 (H100 and later), under a minute
    python -m benchmarks.train_fp8 --tiny     the same code on a small shape, on a CPU too

The head is quantized once (e4m3, a scale a row), states and gradients at every step, which is counted. Figures are
printed as `METRIC name value`.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks import train as bench

FP8 = torch.float8_e4m3fn
SPREAD = 3.0  # standard deviation of logits, about that of a language model's


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x` [N, K] in fp8 and its scales [N, 1]."""
    scale = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / torch.finfo(FP8).max
    return (x.float() / scale).to(FP8), scale


def product(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
    """a @ b.T of two quantized matrices, in bf16."""
    (left, left_scale), (right, right_scale) = a, b
    if left.is_cuda:
        return torch._scaled_mm(
            left, right.T, left_scale, right_scale.T, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    return ((left.float() * left_scale) @ (right.float() * right_scale).T).bfloat16()


def milliseconds(work: Callable[[], object], rounds: int) -> float:
    for _ in range(3):
        work()
    bench.synchronize()
    started = time.perf_counter()
    for _ in range(rounds):
        work()
    bench.synchronize()
    return 1000 * (time.perf_counter() - started) / rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    shape = bench.TINY if arguments.tiny else bench.KIMI
    device, rounds = bench.device(), 2 if arguments.tiny else 20
    torch.manual_seed(0)
    anchors = int(shape.pack * shape.supervised) // 16 * 16
    head = (torch.randn(shape.draft_vocab, shape.hidden, device=device) * SPREAD / shape.hidden**0.5).bfloat16()
    teacher = torch.randn(anchors, shape.hidden, device=device).bfloat16()
    drafted = [(teacher + 0.5 * torch.randn_like(teacher)) / 1.25**0.5 for _ in range(shape.steps)]
    by_row, by_column = quantized(head), quantized(head.T.contiguous())
    quantize = torch.compile(quantized, dynamic=False) if device.type == "cuda" else quantized

    def forward(states: Tensor, fp8: bool) -> Tensor:
        return product(quantize(states), by_row) if fp8 else states @ head.T

    def backward(grad: Tensor, fp8: bool) -> Tensor:
        return product(quantize(grad), by_column) if fp8 else grad @ head

    losses, gradients, sample = {}, {}, min(anchors, 1024)
    for teacher8, drafter8 in ((False, False), (False, True), (True, True)):
        target = forward(teacher[:sample], teacher8).float().log_softmax(-1)
        guess = forward(drafted[0][:sample], drafter8).float().log_softmax(-1)
        losses[teacher8, drafter8] = float((target.exp() * (target - guess)).sum(-1).mean())
        grad = (guess.exp() - target.exp()).bfloat16()
        gradients[teacher8, drafter8] = backward(grad, drafter8).float()
    for (teacher8, drafter8), loss in losses.items():
        name = "both_fp8" if teacher8 else "drafter_fp8" if drafter8 else "bf16"
        bench.metric(f"fp8_loss_{name}", loss)
        pair = gradients[teacher8, drafter8].flatten(), gradients[False, False].flatten()
        bench.metric(f"fp8_gradient_cosine_{name}", float(torch.nn.functional.cosine_similarity(*pair, dim=0)))
    del target, guess, gradients
    grad = torch.randn(anchors, shape.draft_vocab, device=device).bfloat16() * 1e-4
    for fp8 in (False, True):
        name = "fp8" if fp8 else "bf16"
        ahead = milliseconds(lambda fp8=fp8: [forward(states, fp8) for states in (teacher, *drafted)], rounds)
        back = milliseconds(lambda fp8=fp8: [backward(grad, fp8) for _ in drafted], rounds)
        bench.metric(f"fp8_heads_forward_ms_{name}", ahead)
        bench.metric(f"fp8_heads_backward_ms_{name}", back)


if __name__ == "__main__":
    main()
