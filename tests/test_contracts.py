"""The formats between stages."""

import pytest

from drafter import contracts
from drafter.errors import ContractError


def row(**changes):
    record = {
        "row_id": "ab" * 16,
        "conv_id": "cd" * 16,
        "source": "s",
        "turn": 0,
        "input_ids": list(range(10)),
        "supervised": [[4, 10]],
        "think_end": 6,
        "reasoning": "r",
        "content": "c",
        "finish_reason": "stop",
        "sampling": {},
        "usage": {},
        "model": "m",
        "flags": [],
    }
    return record | changes


def test_a_row_survives_its_record():
    assert contracts.Row.from_record(row()).to_record() == row()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"supervised": []}, "no supervised span"),
        ({"supervised": [[4, 11]]}, "outside 0..10"),
        ({"supervised": [[4, 4]]}, "outside 0..10"),
        ({"supervised": [[4, 8], [7, 9]]}, "overlap"),
        ({"think_end": 10}, "think_end"),
        ({"finish_reason": "abort"}, "finish_reason"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_a_contradictory_row_is_refused(changes, said):
    with pytest.raises(ContractError, match=said):
        contracts.Row.from_record(row(**changes))


def test_row_id_is_the_request_and_nothing_else():
    """Identity is content: messages, tools, template kwargs and mode; key order does not matter."""
    messages = [{"role": "user", "content": "hi"}]
    same = contracts.row_id([{"content": "hi", "role": "user"}], None, {"thinking": True}, "regenerate")
    assert contracts.row_id(messages, None, {"thinking": True}, "regenerate") == same
    others = [
        contracts.row_id([{"role": "user", "content": "hi "}], None, {"thinking": True}, "regenerate"),
        contracts.row_id(messages, [{"type": "function"}], {"thinking": True}, "regenerate"),
        contracts.row_id(messages, None, {"thinking": False}, "regenerate"),
        contracts.row_id(messages, None, {"thinking": True}, "replay"),
    ]
    assert len({same, *others}) == 5


def test_all_turns_of_a_conversation_share_its_conv_id():
    """G27: the split is made on the first user turn with its system prompt."""
    system, first = {"role": "system", "content": "s"}, {"role": "user", "content": "one"}
    later = [system, first, {"role": "assistant", "content": "a"}, {"role": "user", "content": "two"}]
    assert contracts.conv_id([system, first]) == contracts.conv_id(later)
    assert contracts.conv_id([first]) != contracts.conv_id([system, first])


def test_a_cut_row_keeps_only_what_is_before_the_cut():
    assert contracts.cut([[2, 4], [6, 9]], 8) == [[2, 4], [6, 8]]
    assert contracts.cut([[2, 4], [6, 9]], 6) == [[2, 4]]
    assert contracts.cut([[6, 9]], 6) == []


def test_in_equals_out_plus_rejected_plus_pending():
    counts = contracts.Counts(total=10, done=6)
    counts.reject("duplicate")
    counts.reject("held_out")
    record = counts.to_record()
    assert record["in"] == record["out"] + sum(record["rejected"].values()) + record["pending"] == 10
    assert record["pending"] == 2


def test_more_out_than_in_is_our_bug():
    with pytest.raises(ContractError):
        contracts.Counts(total=1, done=2).to_record()


def test_reject_reasons_are_a_closed_list():
    with pytest.raises(ContractError, match="not a known reject reason"):
        contracts.Counts().reject("because")
