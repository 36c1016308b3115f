"""Text about acceptance lengths and the limits of the figures, for the log, the report and the model card."""

from collections.abc import Iterator
from typing import Any


def named(label: str | None) -> str:
    """A drafter's label in words; a folder's path stays as it is."""
    if label is None:
        return "nothing"
    return {"run": "the trained drafter", "warm_start": "the warm start", "none": "no drafter"}.get(label, label)


def sentence(headline: dict[str, Any]) -> str:
    """The headline as a line of the log."""
    parts = []
    if headline["acceptance_length"] is not None:
        parts.append(f"acceptance length {length(headline)} with {named(headline['drafter'])}")
    if headline["speed_up"] is not None:
        parts.append(f"{headline['speed_up']:.2f} times as fast as without a drafter")
    if headline["baseline"]:
        parts.append(f"{headline['verdict']} against {named(headline['baseline'])}")
    return ", ".join([*parts, recommendation(headline)])


def recommendation(headline: dict[str, Any]) -> str:
    """Which drafter to serve, if there is a measurement to compare with."""
    if not headline["baseline"] and headline["speed_up"] is None:
        return "no baseline was measured, so nothing is recommended"
    return f"recommended to serve: {named(headline['recommended'])}"


def why_slower(headline: dict[str, Any], default_target: bool) -> str:
    """What a speed below that of plain decoding means; empty if there is none."""
    if not headline["speed_up"] or headline["speed_up"] >= 1:
        return ""
    if default_target:
        return (
            "slower than without a drafter, as expected here: a target of 135M parameters is hardly larger than its "
            "drafter, so it cannot gain; this run shows that the pipeline works"
        )
    return (
        "slower than without a drafter: at this load, drafting and checking cost more time than the accepted tokens "
        "save; measure fewer draft tokens or a lower concurrency (acceptance.cells)"
    )


def length(headline: dict[str, Any]) -> str:
    """The acceptance length, with its interval if known."""
    if headline.get("acceptance_length") is None:
        return "not measured"
    if headline.get("low") is None or headline.get("high") is None:
        return f"{headline['acceptance_length']:.2f}"
    return f"{headline['acceptance_length']:.2f} ({headline['low']:.2f} to {headline['high']:.2f})"


def caveats(report: dict[str, Any]) -> list[str]:
    """A sentence for each limit of the figures in `acceptance.json`."""
    return [*_left_out(report), *_unseen(report), *_expected(report), *_overlap(report), *_agreement(report)]


def _left_out(report: dict[str, Any]) -> Iterator[str]:
    for unit in report.get("left_out", []):
        count = unit["prompts_skipped"]
        yield f"left out, since the time budget was used up: {f'{count} prompts of ' if count else ''}{_name(unit)}"


def _unseen(report: dict[str, Any]) -> Iterator[str]:
    for m in report["measurements"]:
        if m.get("prompts_refused"):
            yield f"the server refused {m['prompts_refused']} prompts: {_name(m)}"
        if not m.get("streams_agree", True):
            yield f"pooled figures only, since the streams do not show every step that the engine counted: {_name(m)}"


def _expected(report: dict[str, Any]) -> Iterator[str]:
    headline = report.get("headline", {})
    length = report.get("expected", {}).get(headline.get("drafter"))
    low, high = headline.get("low"), headline.get("high")
    if length is not None and low is not None and not low <= length <= high:
        yield (
            f"training expected an acceptance length of {length:.2f} for {named(headline['drafter'])}, outside the "
            f"served interval of {low:.2f} to {high:.2f}: other prompts or another temperature may explain a small "
            "difference, a large one means that the export or the server is wrong"
        )


def _overlap(report: dict[str, Any]) -> Iterator[str]:
    for one in report.get("prompt_sets", []):
        if shared := one["ngram_overlap"]:
            short = f" ({shared['too_short']} are shorter)" if shared["too_short"] else ""
            count = f"{shared['prompts']} of {shared['of']} prompts of {one['name']}"
            yield f"{count} share {shared['words']} words in a row with a training prompt{short}"


def _agreement(report: dict[str, Any]) -> Iterator[str]:
    """Batches change the order of sums: plain decoding at another concurrency shows the normal difference."""
    for one in report.get("greedy_agreement", []):
        shares = f"{one['equal_outputs']:.0%} of greedy replies equal, {one['equal_tokens']:.1%} of tokens before"
        against = f"against no drafter at concurrency {one['reference_concurrency']}"
        yield f"{shares} the first difference: {_name(one)}, {against}"
    if report.get("greedy_agreement"):
        yield "greedy replies differ where two tokens are equally likely and another batch adds in another order"


def _name(unit: dict[str, Any]) -> str:
    tokens = unit["num_speculative_tokens"]
    draft = f", {tokens} draft tokens" if tokens else ""
    place = f"{unit['drafter']} on {unit['prompt_set']}, concurrency {unit['concurrency']}{draft}"
    return f"{place}, temperature {unit['temperature']:g}"
