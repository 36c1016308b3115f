"""What units say together: figures, pairs on shared prompts, the verdict, and what was left out."""

import numpy as np
import pytest

from drafter.acceptance import comparison
from drafter.acceptance.comparison import Measurement
from drafter.acceptance.wording import sentence
from drafter.serve.decoding import Counters, Decoded, Reply

THINK_END = 5


def unit(
    drafter: str, prompt_set: str = "s", concurrency: int = 8, tokens: int = 3, temperature: float = 0.7
) -> Measurement:
    tokens = 0 if drafter == "none" else tokens
    return Measurement(
        drafter, prompt_set, concurrency, tokens, temperature, f"{drafter}/{prompt_set}/{concurrency}/{tokens}"
    )


def decoded(ability: float, prompts: int = 40, seconds: float = 10.0, seed: int = 0, skipped: int = 0) -> Decoded:
    """Replies that reason for half their length; `ability` is the chance that a drafted token is accepted."""
    rng = np.random.default_rng(seed)
    replies = []
    for number in range(prompts):
        chunks = [1] + [int(1 + rng.binomial(3, ability)) for _ in range(30)]
        ids = [9] * sum(chunks)
        ids[len(ids) // 2] = THINK_END
        replies.append(Reply(f"c{number}", ids, chunks, "stop", 1.0, 0.1, True))
    steps = sum(len(r.chunks) - 1 for r in replies)
    accepted = sum(sum(r.chunks) - len(r.chunks) for r in replies)
    counters = Counters(steps, 3 * steps, accepted, [accepted, 0, 0]) if ability >= 0 else Counters()
    return Decoded(replies, counters, seconds, {}, skipped)


def plain(seconds: float = 20.0) -> Decoded:
    replies = [Reply(f"c{number}", [9] * 50, [1] * 50, "stop", 1.0, 0.1, True) for number in range(40)]
    return Decoded(replies, Counters(), seconds, {}, 0)


def report(results: dict[Measurement, Decoded], units: list[Measurement] | None = None) -> dict:
    return comparison.summarise_results(units or list(results), results, THINK_END, seed=0)


def test_figures_are_the_engines_counters_pooled():
    (m,) = report({unit("run"): decoded(0.5)})["measurements"]
    assert m["acceptance_length"] == pytest.approx(1 + m["accepted"] / m["drafts"])
    assert m["per_position"] == [pytest.approx(m["accepted"] / m["drafts"]), 0, 0]
    assert m["low"] < m["acceptance_length"] < m["high"]
    assert m["tokens_per_second"] == pytest.approx(m["output_tokens"] / 10)


def test_reasoning_and_answer_are_given_apart_and_make_up_the_whole():
    (m,) = report({unit("run"): decoded(0.5)})["measurements"]
    assert m["reasoning_low"] < m["reasoning_length"] < m["reasoning_high"]
    low, high = sorted([m["reasoning_length"], m["answer_length"]])
    assert low <= m["acceptance_length"] <= high


def test_streams_that_disagree_leave_pooled_figures_only():
    torn = decoded(0.5)
    torn.counters.drafts += 70
    result = report({unit("warm_start"): decoded(0.4), unit("run"): torn})
    m = result["measurements"][1]
    assert m["streams_agree"] is False
    assert m["acceptance_length"] > 1
    assert [m[key] for key in ("low", "high", "reasoning_length", "answer_length")] == [None] * 4
    assert result["headline"]["verdict"] == "no difference shown"
    assert result["comparisons"][0]["prompts"] == 0


def test_without_a_drafter_there_is_speed_and_no_length():
    result = report({unit("none"): plain(), unit("run"): decoded(0.5)})
    none, run = result["measurements"]
    assert none["acceptance_length"] is None
    assert none["speed_up"] == 1
    assert run["speed_up"] == pytest.approx(run["tokens_per_second"] / none["tokens_per_second"])


def test_speed_up_is_only_against_the_same_load():
    result = report({unit("none", concurrency=1): plain(), unit("run", concurrency=8): decoded(0.5)})
    assert result["measurements"][1]["speed_up"] is None


@pytest.mark.parametrize(
    ("ours", "verdict", "recommended"),
    [(0.6, "better", "run"), (0.2, "worse", "warm_start"), (0.4, "no difference shown", "warm_start")],
)
def test_the_warm_start_stays_recommended_unless_better_is_shown(ours, verdict, recommended):
    headline = report({unit("warm_start"): decoded(0.4), unit("run"): decoded(ours, seed=1)})["headline"]
    assert (headline["verdict"], headline["recommended"]) == (verdict, recommended)
    assert (headline["drafter"], headline["baseline"]) == ("run", "warm_start")


def test_the_same_drafter_twice_shows_no_difference():
    result = report({unit("warm_start"): decoded(0.4), unit("run"): decoded(0.4)})
    assert result["headline"]["verdict"] == "no difference shown"
    assert result["headline"]["difference"] == 0


def test_without_a_rival_the_verdict_says_so_and_speed_decides():
    fast = report({unit("none"): plain(100), unit("run"): decoded(0.5)})["headline"]
    slow = report({unit("none"): plain(1), unit("run"): decoded(0.5)})["headline"]
    assert fast["verdict"] == slow["verdict"] == "not compared"
    assert (fast["recommended"], slow["recommended"]) == ("run", "none")
    alone = report({unit("run"): decoded(0.5)})["headline"]
    assert alone["recommended"] is None and sentence(alone).endswith(
        "no baseline was measured, so nothing is recommended"
    )


def test_another_folder_is_the_baseline_when_there_is_no_warm_start():
    results = {unit("/x/model"): decoded(0.3), unit("run"): decoded(0.6)}
    for listed in (results, dict(reversed(results.items()))):
        headline = report(listed)["headline"]
        assert (headline["drafter"], headline["baseline"], headline["verdict"]) == ("run", "/x/model", "better")


def test_drafters_are_compared_on_the_prompts_both_answered():
    short = decoded(0.6).only([f"c{number}" for number in range(25)])
    short.counters.drafts = sum(len(r.chunks) - 1 for r in short.replies)
    short.counters.accepted = sum(sum(r.chunks) - len(r.chunks) for r in short.replies)
    result = report({unit("warm_start"): decoded(0.4), unit("run"): short})
    assert [c["prompts"] for c in result["comparisons"]] == [25, 25, 25]
    assert {c["part"] for c in result["comparisons"]} == {"all", "reasoning", "answer"}


def test_several_prompt_sets_are_compared_together_and_each():
    results = {
        unit(drafter, prompt_set): decoded(ability, seed=seed)
        for drafter, ability in (("warm_start", 0.4), ("run", 0.5))
        for seed, prompt_set in enumerate(("a", "b"))
    }
    found = report(results)
    sets = [(c["prompt_set"], c["prompts"]) for c in found["comparisons"] if c["part"] == "all"]
    assert sets == [("all", 80), ("a", 40), ("b", 40)]
    assert found["headline"]["difference"] == found["comparisons"][0]["difference"]
    drafts = [m["drafts"] for m in found["measurements"] if m["drafter"] == "run"]
    accepted = [m["accepted"] for m in found["measurements"] if m["drafter"] == "run"]
    assert found["headline"]["acceptance_length"] == pytest.approx(1 + sum(accepted) / sum(drafts))


def test_the_first_cell_makes_the_headline():
    results = {unit("run", concurrency=1): decoded(0.6), unit("run", concurrency=8): decoded(0.2, seed=1)}
    result = report(results)
    assert result["headline"]["acceptance_length"] == result["measurements"][0]["acceptance_length"]


def test_greedy_outputs_are_compared_with_none_and_none_with_itself():
    ours = plain()
    ours.replies[0].token_ids[10] = 1
    ours.replies[1].token_ids[49] = 1
    results = {
        unit("none", concurrency=1, temperature=0): plain(),
        unit("none", concurrency=8, temperature=0): plain(),
        unit("run", concurrency=8, temperature=0): ours,
        unit("run", concurrency=8, temperature=0.7): ours,
    }
    result = report(results)["greedy_agreement"]
    assert [(r["drafter"], r["concurrency"], r["reference_concurrency"]) for r in result] == [
        ("none", 8, 1),
        ("run", 8, 8),
    ]
    assert result[0]["equal_tokens"] == result[0]["equal_outputs"] == 1
    assert result[1]["equal_outputs"] == 38 / 40
    assert result[1]["equal_tokens"] == (38 * 50 + 10 + 49) / (40 * 50)


def test_what_the_budget_left_out_is_listed():
    cut, absent = unit("run"), unit("run", concurrency=32)
    result = report({cut: decoded(0.5, skipped=3)}, [cut, absent])
    assert [(u["concurrency"], u["prompts_skipped"]) for u in result["left_out"]] == [(8, 3), (32, None)]


def test_the_headline_reads_as_a_sentence():
    result = report({unit("warm_start"): decoded(0.4), unit("run"): decoded(0.7, seed=1)})
    said = sentence(result["headline"])
    length = result["headline"]["acceptance_length"]
    assert said.startswith(f"acceptance length {length:.2f} (") and "better against the warm start" in said
    assert said.endswith("recommended to serve: the trained drafter")


def test_the_headline_says_a_length_whose_interval_is_not_known():
    result = report({unit("run"): decoded(0.7)})
    headline = result["headline"] | {"low": None, "high": None}
    assert sentence(headline).startswith(
        f"acceptance length {headline['acceptance_length']:.2f} with the trained drafter"
    )


def test_sources_are_measured_apart_and_make_up_the_whole():
    """How well a drafter does on one's own prompts was hidden in the mean over all."""
    easy, hard = decoded(0.8, prompts=20, seed=1), decoded(0.2, prompts=20, seed=2)
    for number, reply in enumerate(hard.replies):
        reply.conv_id = f"h{number}"
    counters = Counters(
        easy.counters.drafts + hard.counters.drafts,
        easy.counters.draft_tokens + hard.counters.draft_tokens,
        easy.counters.accepted + hard.counters.accepted,
        [easy.counters.accepted + hard.counters.accepted, 0, 0],
    )
    both = Decoded([*easy.replies, *hard.replies], counters, 10.0, {}, 0)
    sources = {reply.conv_id: "mine" if reply.conv_id.startswith("h") else "open" for reply in both.replies}
    results = {unit("run"): both, unit("none"): plain()}
    mine, others = comparison.by_source(results, sources, THINK_END, seed=0)
    assert (mine["source"], others["source"], mine["prompts"]) == ("mine", "open", 20)
    for figures, decoded_apart in ((mine, hard), (others, easy)):
        counted = decoded_apart.counters
        assert figures["acceptance_length"] == pytest.approx(1 + counted.accepted / counted.drafts)
        assert figures["low"] < figures["acceptance_length"] < figures["high"] and figures["answer_length"] >= 1
    assert list(comparison.by_source(results, dict.fromkeys(sources, "open"), THINK_END, seed=0)) == []
