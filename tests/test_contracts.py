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
        "usage": {"prompt_tokens": 4, "completion_tokens": 6, "reasoning_tokens": 3},
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
        ({"supervised": [[0, 10]]}, "without a token before it"),
        ({"supervised": [[5, 10]]}, "usage counts 4 prompt tokens and 6 completion tokens"),
        ({"supervised": [[4, 9]]}, "usage counts"),
        ({"supervised": [[4, 6], [7, 10]]}, "usage counts"),
        ({"usage": {"prompt_tokens": 4}}, "usage.completion_tokens"),
        ({"think_end": 2}, "neither in a supervised span nor right before one"),
    ],
)
def test_a_contradictory_row_is_refused(changes, said):
    """Seam F3: spans shifted by one, over the whole row, or too short are compared with `usage`."""
    with pytest.raises(ContractError, match=said):
        contracts.Row.from_record(row(**changes))


@pytest.mark.parametrize("ids", [list(range(9)), list(range(1, 10)), list(range(12))])
def test_ids_that_are_not_as_many_as_the_server_counted_are_refused(ids):
    """Seam F3: a missing end or start token, or ids encoded again from text."""
    with pytest.raises(ContractError, match="usage counts 4 prompt tokens and 6 completion tokens|outside 0"):
        contracts.Row.from_record(row(input_ids=ids))


def test_a_replayed_row_has_as_many_supervised_tokens_as_it_counts():
    """Seam F3: the template's own bytes after the last answer are no part of it."""
    replayed = {"finish_reason": "replay", "think_end": None, "input_ids": list(range(12))}
    usage = {"prompt_tokens": 4, "completion_tokens": 5, "reasoning_tokens": None}
    contracts.Row.from_record(row(**replayed, supervised=[[4, 6], [8, 11]], usage=usage))
    for spans in ([[5, 7], [8, 11]], [[4, 6], [8, 12]], [[4, 6]]):
        with pytest.raises(ContractError, match="usage counts"):
            contracts.Row.from_record(row(**replayed, supervised=spans, usage=usage))


@pytest.mark.parametrize(("think_end", "fits"), [(2, False), (3, True), (4, True), (9, True), (10, False)])
def test_think_end_is_in_a_supervised_span_or_right_before_it(think_end, fits):
    """Seam F10, for rows and index entries: instant mode closes the reasoning with the prompt's last token."""
    place = {"supervised": [[4, 10]], "think_end": think_end}
    entry = {"row_id": "ab", "conv_id": "c", "source": "s", "tokens": 10, "row_tokens": 10, "bytes": 1} | place
    for read, record in ((contracts.Row, row(**place)), (contracts.IndexEntry, entry)):
        if fits:
            assert read.from_record(record).think_end == think_end
        else:
            with pytest.raises(ContractError, match="think_end"):
                read.from_record(record)


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
