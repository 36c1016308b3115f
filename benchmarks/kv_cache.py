"""What a KV cache that is too small for the requests in flight costs stage 01b: a simulation of vLLM's scheduler.

    python -m benchmarks.kv_cache [--rows 3000]

Requests are admitted in order while blocks are free beside the watermark. When a running one needs a block and none
is free, the newest one loses all of its blocks, goes to the head of the queue and is computed again. Answers have
exponential lengths, cut at `max_tokens`, as the profile says; a step takes what DECODING says: public rates of
Kimi-K2.6 (the shape of K2.5) on 8x RTX PRO 6000 without a drafter, from voipmonitor/rtx6kpro on GitHub,
models/kimi-k26.md. Nothing here is a measurement of this project. Prints `METRIC name value` lines, hours being those
of 10,000 rows.
"""

import argparse
from collections import deque
from dataclasses import dataclass

import numpy as np

from drafter.pipeline import profiles

LONG_CONTEXT = 16384
# Decode context parallel size -> requests at once -> tokens a second with an empty context and with LONG_CONTEXT.
DECODING = {
    1: {8: (340.7, 310.2), 16: (475.2, 413.8), 32: (823.6, 667.9), 64: (1330.2, 954.0), 128: (2026.3, 1272.2)},
    4: {8: (308.2, 278.5), 16: (426.6, 365.8), 32: (726.2, 600.0), 64: (1136.1, 827.1), 128: (1640.3, 1145.0)},
    8: {8: (276.6, 262.2), 16: (363.5, 333.9), 32: (600.9, 571.3), 64: (948.4, 826.7), 128: (1260.6, 1137.4)},
}
KV_TOKENS = 190_000  # of the box at --gpu-memory-utilization 0.93, the same source; times the decode context parallel
BLOCK = 16
PROMPT = 100


@dataclass(frozen=True)
class Night:
    hours: float  # of 10,000 rows
    tokens_per_second: float
    running: float  # requests, on average
    preemptions: float  # of each row
    recomputed: float  # tokens, of those that were asked for


class Engine:
    """Seconds of one decoding step by the requests in it and their mean context; beyond 128 requests linear."""

    def __init__(self, dcp: int):
        self.counts = np.array(sorted(DECODING[dcp]))
        self.seconds = np.array([[n / rate for rate in DECODING[dcp][n]] for n in self.counts])

    def step(self, count: int, context: float) -> float:
        short, long = (self._interpolated(count, column) for column in self.seconds.T)
        return short + (long - short) * context / LONG_CONTEXT

    def _interpolated(self, count: int, seconds: np.ndarray) -> float:
        if count <= self.counts[-1]:
            return float(np.interp(count, self.counts, seconds))
        slope = (seconds[-1] - seconds[-2]) / (self.counts[-1] - self.counts[-2])
        return float(seconds[-1] + slope * (count - self.counts[-1]))


def simulate(
    kv_tokens: float, dcp: int = 1, watermark: float = 0, in_flight: int = 200, rows: int = 3000, seed: int = 0
) -> Night:
    """01b with so many tokens of KV cache and requests in flight. Time goes in steps of one block a request."""
    platform, engine = profiles.profile("rtx_pro_6000_x8"), Engine(dcp)
    drawn = np.random.default_rng(seed).exponential(platform.answer_tokens.typical, rows)
    lengths = np.minimum(drawn.astype(int) + 1, 8192)
    made = np.zeros(rows, int)
    unit = BLOCK * dcp
    free = int(kv_tokens // unit)
    reserve = int(watermark * free)
    left, waiting, running, held = deque(range(rows)), deque(), [], {}
    seconds = running_seconds = 0.0
    preempted = recomputed = done = 0

    def blocks(row: int) -> int:
        return -(-(PROMPT + made[row] + BLOCK) // unit)

    while done < rows:
        while left and len(waiting) + len(running) < in_flight:
            waiting.append(left.popleft())
        short_of_blocks = False
        for row in list(running):
            if row not in held:  # preempted in this step
                continue
            while (wanted := blocks(row) - held[row]) > free:
                newest = running.pop()
                free += held.pop(newest)
                waiting.appendleft(newest)
                preempted, short_of_blocks = preempted + 1, True
                if newest == row:
                    break
            else:
                held[row] += wanted
                free -= wanted
        prefilled = 0
        while waiting and not short_of_blocks:
            wanted = blocks(row := waiting[0])
            if wanted > free - (reserve if running else 0):
                break
            running.append(waiting.popleft())
            held[row] = wanted
            free -= wanted
            prefilled += PROMPT + made[row]
            recomputed += PROMPT + made[row] if made[row] else 0
        context = PROMPT + made[running].mean()
        took = BLOCK * engine.step(len(running), context) + prefilled / platform.extract_tokens_per_s.typical
        seconds += took
        running_seconds += took * len(running)
        made[running] += BLOCK
        for row in [row for row in running if made[row] >= lengths[row]]:
            running.remove(row)
            free += held.pop(row)
            done += 1
    tokens = lengths.sum()
    hours = seconds / 3600 * 10_000 / rows
    return Night(hours, tokens / seconds, running_seconds / seconds, preempted / rows, recomputed / tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=3000)
    args = parser.parse_args()
    ample = simulate(1e9, rows=args.rows)
    cases = {"ample": {"kv_tokens": 1e9}, "box": {"kv_tokens": KV_TOKENS}}
    cases["box_watermark"] = {"kv_tokens": KV_TOKENS, "watermark": 0.05}
    cases |= {f"box_{n}_in_flight": {"kv_tokens": KV_TOKENS, "in_flight": n} for n in (70, 60, 50)}
    cases["box_watermark_60_in_flight"] = {"kv_tokens": KV_TOKENS, "watermark": 0.05, "in_flight": 60}
    for dcp in (4, 8):
        cases[f"dcp{dcp}"] = {"kv_tokens": KV_TOKENS * dcp, "dcp": dcp}
        cases[f"dcp{dcp}_watermark"] = {"kv_tokens": KV_TOKENS * dcp, "dcp": dcp, "watermark": 0.05}
    for watermark in (0, 0.05):  # the shares of rates.CROWDED
        for fitting in (0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0, 1.2):
            wanted = 200 * (
                PROMPT + profiles.held_when_cut(profiles.profile("rtx_pro_6000_x8").answer_tokens.typical, 8192)
            )
            cases[f"fitting_{fitting}_watermark_{watermark}"] = {
                "kv_tokens": wanted * fitting,
                "watermark": watermark,
            }
    for name, case in cases.items():
        night = simulate(**case, rows=args.rows)
        for fact, value in vars(night).items():
            print(f"METRIC {name}_{fact} {value:.4g}", flush=True)
        print(f"METRIC {name}_rate_share {night.tokens_per_second / ample.tokens_per_second:.3f}", flush=True)


if __name__ == "__main__":
    main()
