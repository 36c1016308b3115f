"""Rows against the target's own token ids."""

import contextlib
import dataclasses

import pytest

from drafter import config, contracts
from drafter.errors import ContractError
from drafter.generate import rows
from tests.test_contracts import row


def think_row(**changes) -> contracts.Row:
    """Prompt 1 2 60, then reasoning, `</think>` (61) at 5, an answer."""
    ids = [1, 2, 60, 7, 8, 61, 9, 10, 11]
    usage = {"prompt_tokens": 3, "completion_tokens": 6}
    made = contracts.Row(**row(input_ids=ids, supervised=[[3, 9]], think_end=5, usage=usage))
    return dataclasses.replace(made, **changes)


REPLAYED = {"finish_reason": "replay", "input_ids": [1, 2, 60, 61, 8, 9, 10, 11, 12], "supervised": [[4, 9]]}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"think_end": 6}, "think_end is 6, but the token is at 5"),
        ({"think_end": None}, "think_end is None, but the token is at 5"),
        ({"input_ids": [1, 2, 60, 7, 8, 9, 9, 10, 11]}, "think_end is 5, but the token is at None"),
        ({"input_ids": [1, 2, 3, 7, 8, 61, 9, 10, 11]}, r"no target.prompt_suffix \[60\] before the answer at 3"),
        (REPLAYED | {"think_end": 3}, None),
        (REPLAYED | {"think_end": None}, "think_end is None, but the token is at 3"),
        (REPLAYED | {"think_end": 3, "supervised": [[5, 9]]}, "no target.prompt_suffix"),
    ],
)
def test_a_rows_prompt_ends_and_its_reasoning_ends_where_the_targets_own_token_ids_are(changes, said):
    """Seam F10 and F3: think_end off by one, or spans shifted together with their counts, were accepted."""
    target = config.load(config.ROOT / "configs/smollm2_cpu.yaml").target
    target = target.model_copy(update={"prompt_suffix": (60,), "think_end": 61})
    with pytest.raises(ContractError, match=said) if said else contextlib.nullcontext():
        rows.check_positions(think_row(**changes), target)


@pytest.mark.parametrize(("cut", "lines"), [(0.85, 1), (0.4, 0)])
def test_answers_that_are_mostly_cut_get_one_line_with_the_setting(cut, lines):
    said = rows.advice({"all": {"rows": 20, "truncated_share": cut}}, 96)
    assert len(said) == lines
    assert all("17 of 20 answers were cut at generate.max_tokens = 96" in line for line in said)
