"""Confidence of measured acceptance lengths: bootstrap over prompts, paired between drafters, and the verdict.

Acceptance length is a ratio of sums: 1 + accepted / steps. Requests of one prompt set differ far more from each other
than two drafters do on the same prompt, so a comparison resamples prompts with the results of both drafters.
"""

import math
from statistics import NormalDist
from typing import Any

import numpy as np

RESAMPLES = 10_000
LENGTH_CONFIDENCE = 0.95  # of a reported length
VERDICT_CONFIDENCE = 0.99  # of a difference: each run compares several, and a false one costs a deployment
MIN_PROMPTS = 20  # with fewer, bootstrap intervals are too narrow for a verdict

BETTER, WORSE, UNDECIDED = "better", "worse", "no difference shown"

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(200)

Tallies = np.ndarray  # [prompts, 2]: steps that had a draft, tokens accepted


def length(tallies: Tallies) -> float | None:
    """Pooled acceptance length: mean tokens of a step, 1 if no draft is ever accepted. None without steps."""
    steps, accepted = tallies.sum(0)
    return 1 + float(accepted) / float(steps) if steps else None


def interval(tallies: Tallies, seed: int = 0) -> tuple[float, float] | None:
    """Bootstrap interval of the pooled length over prompts, at LENGTH_CONFIDENCE; no length is below 1."""
    if not tallies[:, 0].all():
        tallies = tallies[tallies[:, 0] > 0]
    if len(tallies) < 2:
        return None
    low, high = _quantiles(_resampled([tallies], seed)[0], LENGTH_CONFIDENCE, len(tallies))
    return max(1.0, low), high


def per_request(tallies: Tallies) -> dict[str, float | None]:
    """Mean and percentiles of the acceptance lengths of single requests.

    The mean differs from the pooled length, since short requests count as much as long ones.
    """
    tallies = tallies[tallies[:, 0] > 0]
    lengths = 1 + tallies[:, 1] / tallies[:, 0] if len(tallies) else np.array([np.nan])
    values = {"request_mean": lengths.mean(), "request_p10": np.quantile(lengths, 0.1)}
    values["request_p90"] = np.quantile(lengths, 0.9)
    return {name: None if np.isnan(value) else float(value) for name, value in values.items()}


def compare(tallies: Tallies, baseline: Tallies, seed: int = 0) -> dict:
    """Difference in pooled length against a baseline on the same prompts, row by row, with its verdict."""
    both = (tallies[:, 0] > 0) & (baseline[:, 0] > 0)
    tallies, baseline = tallies[both], baseline[both]
    result: dict[str, Any] = dict.fromkeys(("difference", "low", "high"))
    result = {"prompts": len(tallies), **result, "verdict": UNDECIDED}
    if len(tallies) < 2:
        return result
    ours, theirs = _resampled([tallies, baseline], seed)
    low, high = _quantiles(ours - theirs, VERDICT_CONFIDENCE, len(tallies))
    difference = (length(tallies) or 0.0) - (length(baseline) or 0.0)  # each row has steps
    result |= {"difference": difference, "low": low, "high": high}
    if len(tallies) >= MIN_PROMPTS:
        result["verdict"] = BETTER if low > 0 else WORSE if high < 0 else UNDECIDED
    return result


def agreement(outputs: list[list[int]], references: list[list[int]]) -> dict:
    """How far two sets of greedy outputs agree: share of equal outputs, and of tokens before the first difference."""
    common = [
        next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
        for ours, theirs in zip(outputs, references, strict=True)
    ]
    equal = sum(ours == theirs for ours, theirs in zip(outputs, references, strict=True))
    tokens = sum(max(len(ours), len(theirs)) for ours, theirs in zip(outputs, references, strict=True))
    return {
        "prompts": len(outputs),
        "equal_outputs": equal / len(outputs),
        "equal_tokens": sum(common) / tokens if tokens else 1.0,
    }


def _resampled(groups: list[Tallies], seed: int) -> list[np.ndarray]:
    """Pooled lengths of RESAMPLES draws of the same prompts from every group."""
    count = len(groups[0])
    drawn = np.random.default_rng(seed).integers(0, count, (RESAMPLES, count))
    sums = [group[drawn].sum(1) for group in groups]
    return [1 + total[:, 1] / total[:, 0] for total in sums]


def _quantiles(values: np.ndarray, confidence: float, count: int) -> tuple[float, float]:
    """Percentile interval of resampled values, with a small-sample (Student's t) correction for `count` prompts."""
    tail = (1 - confidence) / 2
    low, middle, high = np.quantile(values, [tail, 0.5, 1 - tail])
    wider = student_t(tail, count - 1) / -NormalDist().inv_cdf(tail) * (count / (count - 1)) ** 0.5
    return float(middle - wider * (middle - low)), float(middle + wider * (high - middle))


def student_t(tail: float, freedom: int) -> float:
    """The value that Student's t with `freedom` degrees exceeds with probability `tail` (below one half).

    By bisection of the exact tail probability: the closed forms for whole degrees of freedom lose small tails to
    rounding, so the density is integrated from the far end instead.
    """
    low, high = 0.0, 1.0
    while _t_tail(high, freedom) > tail:
        low, high = high, 2 * high
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_tail(middle, freedom) > tail else (low, middle)
    return high


def _t_tail(value: float, freedom: int) -> float:
    """P(T > value): with t = sqrt(n) cot(phi) the density is proportional to sin(phi)^(n - 1) on (0, pi)."""
    end = math.atan2(freedom**0.5, value)
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.pi**0.5
    phi = (end / 2) * (_NODES + 1)
    return scale * (end / 2) * float(_WEIGHTS @ np.sin(phi) ** (freedom - 1))
