"""Combines the results of all measurements to the content of `acceptance.json`, including the verdict."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from drafter import contracts, intervals
from drafter.serve.decoding import Decoded

NONE, WARM_START, RUN = "none", "warm_start", "run"
ALL_SETS = "all"
PARTS = ("all", "reasoning", "answer")
NOT_COMPARED = "not compared"  # the verdict when there is no other drafter to compare with


@dataclass(frozen=True, slots=True)
class Measurement:
    """One drafter on one prompt set in one cell. `key` is a hash of everything that the result depends on.

    `num_speculative_tokens` is 0 without a drafter.
    """

    drafter: str
    prompt_set: str
    concurrency: int
    num_speculative_tokens: int
    temperature: float
    key: str

    def to_record(self) -> dict[str, Any]:
        names = ("drafter", "prompt_set", "concurrency", "num_speculative_tokens", "temperature")
        return {name: getattr(self, name) for name in names}

    @property
    def load(self) -> tuple[str, int, float]:
        """The facts that must be equal for two drafters' speeds to be comparable."""
        return self.prompt_set, self.concurrency, self.temperature


Results = dict[Measurement, Decoded]


def summarise_results(units: list[Measurement], done: Results, think_end: int | None, seed: int) -> dict[str, Any]:
    """The report on `units` (in the config's order); those without a result are listed as left out.

    The headline is about this run's drafter in the first cell, with all prompt sets pooled.
    """
    results = {unit: done[unit] for unit in units if unit in done}
    measurements = [
        unit.to_record() | result_figures([decoded], think_end, seed) | {"speed_up": speed_up(unit, results)}
        for unit, decoded in results.items()
    ]
    comparisons = list(_comparisons(results, think_end, seed))
    return {
        "schema": contracts.SCHEMA,
        "headline": _headline(results, comparisons, think_end, seed),
        "measurements": measurements,
        "comparisons": comparisons,
        "greedy_agreement": list(_greedy_agreement(results)),
        "left_out": [
            unit.to_record() | {"prompts_skipped": done[unit].skipped if unit in done else None}
            for unit in units
            if unit not in done or done[unit].skipped
        ],
    }


def result_figures(decoded: list[Decoded], think_end: int | None, seed: int) -> dict[str, Any]:
    """Pooled figures of one or several prompt sets that were decoded in the same cell.

    Lengths, rates and speed come from the engine's counters and the clock. Intervals and the separate figures for
    reasoning and answer come from the streams, and only if every stream shows the steps that the engine counted.
    """
    drafts = sum(d.counters.drafts for d in decoded)
    accepted = sum(d.counters.accepted for d in decoded)
    tokens, seconds = sum(d.output_tokens for d in decoded), sum(d.seconds for d in decoded)
    positions = np.sum([d.counters.accepted_per_position for d in decoded], axis=0)
    result = {
        "prompts": sum(len(d.replies) for d in decoded),
        "prompts_skipped": sum(d.skipped for d in decoded),
        "prompts_refused": sum(len(d.refused) for d in decoded),
        "output_tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_second": tokens / seconds,
        "drafts": drafts,
        "accepted": accepted,
        "acceptance_length": 1 + accepted / drafts if drafts else None,
        "per_position": [float(count / drafts) for count in positions] if drafts else [],
        "streams_agree": all(d.streams_agree for d in decoded),
        "unseen_steps": sum(d.unseen_steps for d in decoded) if drafts else 0,
    }
    for part in PARTS:
        counted = np.concatenate([_tallies(d, part, think_end) for d in decoded])
        usable = counted if drafts and result["streams_agree"] else counted[:0]
        low, high = intervals.interval(usable, seed) or (None, None)
        prefix = "" if part == "all" else f"{part}_"
        if prefix:
            result[f"{prefix}length"] = intervals.length(usable)
        result |= {f"{prefix}low": low, f"{prefix}high": high}
        if part == "all":
            result |= intervals.per_request(usable)
    return result


def by_source(
    results: Results, sources: dict[str, str], think_end: int | None, seed: int
) -> Iterator[dict[str, Any]]:
    """Each measurement apart for each source of its prompts (conversation id -> source), if it has several.

    Lengths come from the streams, since the engine counts no sources; none where the streams miss steps.
    """
    for unit, decoded in results.items():
        by_name: dict[str, list[str]] = {}
        for reply in decoded.replies:
            if source := sources.get(reply.conv_id):
                by_name.setdefault(source, []).append(reply.conv_id)
        if unit.drafter == NONE or len(by_name) < 2 or not decoded.streams_agree:
            continue
        for source, conv_ids in sorted(by_name.items()):
            part = decoded.only(conv_ids)
            figures: dict[str, Any] = {"source": source, "prompts": len(conv_ids)}
            for name in PARTS:
                counted = _tallies(part, name, think_end)
                figures["acceptance_length" if name == "all" else f"{name}_length"] = intervals.length(counted)
            low, high = intervals.interval(_tallies(part, "all", think_end), seed) or (None, None)
            yield unit.to_record() | figures | {"low": low, "high": high}


def speed_up(unit: Measurement, results: Results) -> float | None:
    """Output tokens a second relative to decoding without a drafter under the same load; None if not measured."""
    for other, decoded in results.items():
        if other.drafter == NONE and other.load == unit.load:
            ours = results[unit]
            return (ours.output_tokens / ours.seconds) / (decoded.output_tokens / decoded.seconds)
    return None


def _tallies(decoded: Decoded, part: str, think_end: int | None) -> np.ndarray:
    return np.array([reply.tally(part, think_end) for reply in decoded.replies], dtype=np.int64).reshape(-1, 2)


def _cells(results: Results) -> dict[tuple, dict[str, dict[str, Decoded]]]:
    """cell (concurrency, draft length, temperature) -> drafter -> prompt set -> result; drafters only."""
    cells: dict[tuple, dict[str, dict[str, Decoded]]] = {}
    for unit, decoded in results.items():
        if unit.drafter != NONE:
            cells.setdefault(_cell(unit), {}).setdefault(unit.drafter, {})[unit.prompt_set] = decoded
    return cells


def _comparisons(results: Results, think_end: int | None, seed: int) -> Iterator[dict[str, Any]]:
    """Compare every pair of drafters, on the prompts that both answered."""
    for (concurrency, tokens, temperature), by_drafter in _cells(results).items():
        # This run's drafter is compared with the others, whatever the order in the config.
        for baseline, drafter in combinations(sorted(by_drafter, key=lambda label: label == RUN), 2):
            ours, theirs = by_drafter[drafter], by_drafter[baseline]
            sets = [name for name in ours if name in theirs]
            for name in ([ALL_SETS] if len(sets) > 1 else []) + sets:
                chosen = sets if name == ALL_SETS else [name]
                pairs = [_paired(ours[s], theirs[s]) for s in chosen]
                for part in PARTS:
                    left, right = (
                        np.concatenate([_tallies(pair[side], part, think_end) for pair in pairs]) for side in (0, 1)
                    )
                    result = intervals.compare(left, right, seed)
                    if part == "all" or result["prompts"]:
                        yield {
                            "drafter": drafter,
                            "baseline": baseline,
                            "prompt_set": name,
                            "concurrency": concurrency,
                            "num_speculative_tokens": tokens,
                            "temperature": temperature,
                            "part": part,
                            **result,
                        }


def _paired(ours: Decoded, theirs: Decoded) -> tuple[Decoded, Decoded]:
    """The replies to the prompts that both answered, in the same order; none if the streams miss steps."""
    if not (ours.streams_agree and theirs.streams_agree):
        return ours.only([]), theirs.only([])
    answered = {reply.conv_id for reply in theirs.replies}
    shared = [reply.conv_id for reply in ours.replies if reply.conv_id in answered]
    return ours.only(shared), theirs.only(shared)


def _greedy_agreement(results: Results) -> Iterator[dict[str, Any]]:
    """Compare greedy outputs with those without a drafter.

    Outputs without a drafter are also compared between concurrencies: batches change the order of sums, so even the
    same model does not always agree with itself, and that shows how much difference is normal.
    """
    greedy = {unit: decoded for unit, decoded in results.items() if unit.temperature == 0}
    plain = [unit for unit in greedy if unit.drafter == NONE]
    for unit, decoded in greedy.items():
        for reference in plain:
            same_set = unit.prompt_set == reference.prompt_set
            yardstick = unit.drafter == NONE and plain.index(reference) < plain.index(unit)
            if same_set and (yardstick or (unit.drafter != NONE and unit.concurrency == reference.concurrency)):
                shared = {reply.conv_id: reply.token_ids for reply in greedy[reference].replies}
                pairs = [(r.token_ids, shared[r.conv_id]) for r in decoded.replies if r.conv_id in shared]
                if pairs:
                    yield {
                        **unit.to_record(),
                        "reference": reference.drafter,
                        "reference_concurrency": reference.concurrency,
                        **intervals.agreement(*map(list, zip(*pairs, strict=True))),
                    }


def _headline(results: Results, comparisons: list[dict], think_end: int | None, seed: int) -> dict[str, Any]:
    cells = _cells(results)
    first = next(iter(cells), ())
    by_drafter = cells.get(first, {})
    drafter = RUN if RUN in by_drafter else next(reversed(by_drafter), NONE)
    rivals = [label for label in by_drafter if label != drafter]
    baseline = WARM_START if WARM_START in rivals else next(iter(rivals), None)
    found = next(
        (c for c in comparisons if (c["drafter"], c["baseline"]) == (drafter, baseline) and c["part"] == "all"), None
    )
    pooled = result_figures(list(by_drafter[drafter].values()), think_end, seed) if by_drafter else {}
    speeds = [
        up for unit in results if unit.drafter == drafter and first == _cell(unit) and (up := speed_up(unit, results))
    ]
    verdict = found["verdict"] if found else NOT_COMPARED
    faster = sum(speeds) / len(speeds) if speeds else None
    return {
        "verdict": verdict,
        "recommended": _recommended(drafter, baseline, verdict, faster),
        "drafter": drafter,
        "baseline": baseline,
        **{key: pooled.get(key) for key in ("acceptance_length", "low", "high", "per_position", "tokens_per_second")},
        "speed_up": faster,
        "difference": found and found["difference"],
        "difference_low": found and found["low"],
        "difference_high": found and found["high"],
    }


def _cell(unit: Measurement) -> tuple:
    return unit.concurrency, unit.num_speculative_tokens, unit.temperature


def _recommended(drafter: str, baseline: str | None, verdict: str, faster: float | None) -> str | None:
    """The drafter if it is better than the baseline, else the baseline; without one, whatever decodes faster."""
    if baseline:
        return drafter if verdict == intervals.BETTER else baseline
    if faster is None:
        return None
    return drafter if faster > 1 else NONE
