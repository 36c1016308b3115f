"""What limits the figures is said in words."""

from drafter.acceptance.wording import caveats

UNIT = {"drafter": "run", "prompt_set": "s", "concurrency": 8, "num_speculative_tokens": 3, "temperature": 0.0}
PLAIN = UNIT | {"drafter": "none", "num_speculative_tokens": 0}


def test_every_limit_of_a_measurement_is_a_sentence():
    overlap = {"words": 13, "prompts": 2, "of": 40, "too_short": 1}
    report = {
        "measurements": [UNIT | {"streams_agree": False, "prompts_refused": 0}, PLAIN | {"prompts_refused": 3}],
        "left_out": [UNIT | {"prompts_skipped": None}, UNIT | {"prompts_skipped": 5}],
        "prompt_sets": [{"name": "s", "ngram_overlap": overlap}, {"name": "t", "ngram_overlap": None}],
        "greedy_agreement": [UNIT | {"equal_outputs": 0.75, "equal_tokens": 0.912, "reference_concurrency": 8}],
    }
    where = "run on s, concurrency 8, 3 draft tokens, temperature 0"
    assert caveats(report) == [
        f"left out, since the time budget was used up: {where}",
        f"left out, since the time budget was used up: 5 prompts of {where}",
        f"pooled figures only, since the streams do not show every step that the engine counted: {where}",
        "the server refused 3 prompts: none on s, concurrency 8, temperature 0",
        "2 of 40 prompts of s share 13 words in a row with a training prompt (1 are shorter)",
        f"75% of greedy replies equal, 91.2% of tokens before the first difference: {where}, "
        "against no drafter at concurrency 8",
        "greedy replies differ where two tokens are equally likely and another batch adds in another order",
    ]


def test_figures_without_limits_need_no_words():
    assert caveats({"measurements": [UNIT | {"streams_agree": True, "prompts_refused": 0}]}) == []


def test_a_served_length_that_training_did_not_expect_is_said():
    """Seam F6: 1.30 expected and 1.02 served stood in two files and in no sentence."""

    def said(expected, low, high, drafter="run"):
        headline = {"drafter": drafter, "low": low, "high": high}
        return caveats({"measurements": [], "headline": headline, "expected": {"run": expected}})

    [sentence] = said(1.30, 1.01, 1.03)
    assert "expected an acceptance length of 1.30 for the trained drafter" in sentence
    assert "served interval of 1.01 to 1.03" in sentence
    assert len(said(1.30, 1.40, 1.60)) == 1
    assert said(1.30, 1.20, 1.40) == said(1.30, None, None) == said(1.3, 1.0, 1.1, "warm_start") == []
