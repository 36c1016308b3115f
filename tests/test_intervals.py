"""What a difference between drafters is worth."""

import numpy as np
import pytest

from drafter import intervals
from drafter.intervals import BETTER, UNDECIDED, WORSE


def tallies(rng: np.random.Generator, ability: np.ndarray, shift: float = 0.0) -> np.ndarray:
    """Steps and accepted tokens of prompts that differ in length and in how predictable they are.

    Twice the same prompt gives replies of somewhat different length.
    """
    steps = np.linspace(20, 400, len(ability)) * rng.uniform(0.7, 1.4, len(ability))
    steps = steps.astype(int)
    return np.stack([steps, rng.binomial(3 * steps, np.clip(ability + shift, 0, 1))], 1)


def test_length_is_pooled_over_steps_and_not_a_mean_over_prompts():
    assert intervals.length(np.array([[100, 200], [1, 0]])) == pytest.approx(1 + 200 / 101)
    assert intervals.length(np.array([[10, 0]])) == 1
    assert intervals.length(np.zeros((0, 2))) is None


def test_an_interval_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(1)
    ability = rng.uniform(0.2, 0.6, 4000)
    truth = 1 + 3 * ability.mean()
    covered = 0
    for trial in range(200):
        chosen = rng.choice(ability, 60)
        low, high = intervals.interval(tallies(rng, chosen), seed=trial)
        covered += low <= truth <= high
    assert 0.88 <= covered / 200 <= 0.99


def test_an_a_a_comparison_shows_no_difference():
    """The same drafter twice: a verdict of better or worse would be false, and must be as rare as 1 in 100."""
    rng = np.random.default_rng(2)
    false = 0
    for trial in range(200):
        ability = rng.uniform(0.2, 0.6, 40)
        false += intervals.compare(tallies(rng, ability), tallies(rng, ability), trial)["verdict"] != UNDECIDED
    assert false / 200 <= 0.02


def test_an_identical_rerun_differs_by_exactly_nothing():
    measured = tallies(np.random.default_rng(3), np.full(40, 0.4))
    result = intervals.compare(measured, measured.copy())
    assert (result["difference"], result["low"], result["high"]) == (0, 0, 0)
    assert result["verdict"] == UNDECIDED


def test_a_real_difference_is_shown_with_its_sign():
    rng = np.random.default_rng(4)
    ability = rng.uniform(0.2, 0.6, 40)
    plain, better = tallies(rng, ability), tallies(rng, ability, 0.05)
    forward, backward = intervals.compare(better, plain), intervals.compare(plain, better)
    assert (forward["verdict"], backward["verdict"]) == (BETTER, WORSE)
    assert forward["low"] > 0 > backward["high"]
    assert forward["difference"] == pytest.approx(-backward["difference"])


def test_pairing_sees_what_the_spread_of_prompts_hides():
    """Two intervals overlap widely, yet on the same prompts one drafter is better throughout."""
    rng = np.random.default_rng(5)
    ability = rng.uniform(0.05, 0.9, 40)
    plain, better = tallies(rng, ability), tallies(rng, ability, 0.04)
    assert intervals.interval(plain)[1] > intervals.interval(better)[0]
    assert intervals.compare(better, plain)["verdict"] == BETTER


def test_too_few_prompts_show_nothing():
    measured = np.array([[100, 200]] * 19)
    result = intervals.compare(measured, np.array([[100, 10]] * 19))
    assert result["low"] > 0
    assert result["verdict"] == UNDECIDED


def test_prompts_without_a_step_on_either_side_are_left_out():
    ours = np.array([[0, 0], [10, 5], [10, 5]])
    theirs = np.array([[10, 5], [10, 5], [0, 0]])
    assert intervals.compare(ours, theirs)["prompts"] == 1
    assert intervals.compare(ours, theirs)["difference"] is None


def test_an_interval_of_few_prompts_does_not_reach_below_what_a_length_can_be():
    low, high = intervals.interval(np.array([[14, 0], [14, 2]]))
    assert low == 1 < high


def test_the_same_seed_gives_the_same_interval():
    measured = tallies(np.random.default_rng(6), np.full(30, 0.3))
    assert intervals.interval(measured, 7) == intervals.interval(measured, 7) != intervals.interval(measured, 8)


def test_requests_spread_around_their_own_mean():
    measured = np.array([[10, 0]] * 5 + [[100, 300]] * 5 + [[0, 0]])
    assert intervals.per_request(measured) == {"request_mean": 2.5, "request_p10": 1.0, "request_p90": 4.0}
    assert intervals.per_request(np.zeros((0, 2)))["request_mean"] is None


def test_agreement_counts_tokens_up_to_the_first_difference():
    outputs = [[1, 2, 3], [1, 2, 3, 4], [5]]
    references = [[1, 2, 3], [1, 9, 3, 4], [5, 6, 7]]
    assert intervals.agreement(outputs, references) == {
        "prompts": 3,
        "equal_outputs": pytest.approx(1 / 3),
        "equal_tokens": pytest.approx((3 + 1 + 1) / 10),
    }


@pytest.mark.parametrize(
    ("confidence", "prompts", "exact"),
    [(0.95, 2, 12.706205), (0.95, 3, 4.302653), (0.95, 4, 3.182446), (0.95, 31, 2.042272), (0.99, 2, 63.656741)],
)
def test_an_interval_of_few_prompts_is_as_wide_as_students_t_says(confidence, prompts, exact):
    """Seam L5: an expansion in 1/n gave 7.2 for two prompts and 3.9 for three."""
    assert intervals.student_t((1 - confidence) / 2, prompts - 1) == pytest.approx(exact, abs=1e-5)
    values = np.random.default_rng(0).normal(size=200_000)
    low, high = intervals._quantiles(values, confidence, prompts)
    assert (high - low) / 2 == pytest.approx(exact * (prompts / (prompts - 1)) ** 0.5, rel=0.03)


def test_students_t_holds_far_out_and_for_many_degrees():
    assert intervals.student_t(1e-6, 1) == pytest.approx(1 / np.tan(np.pi * 1e-6), rel=1e-9)
    assert intervals.student_t(0.025, 10_000) == pytest.approx(1.960201, abs=1e-6)
