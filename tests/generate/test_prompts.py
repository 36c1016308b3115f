"""Sources to requests: odd conversations, content ids, the shuffle, what is held out."""

import json
import random
from datetime import datetime

import pyarrow.parquet
import pytest

from drafter import config, files, run_files
from drafter.config import Source
from drafter.errors import ConfigError, ResumableError, RowError
from drafter.generate import prompts, record_files, sources
from drafter.generate.conversations import OWN_ANSWER, read_conversation
from drafter.generate.mix import materialise
from drafter.generate.prompts import Requests, requests_of

CPU_CONFIG = config.ROOT / "configs/smollm2_cpu.yaml"


def human(*pairs: tuple[str, str], **extra) -> dict:
    return {"conversations": [{"from": role, "value": text} for role, text in pairs], **extra}


def openai(*pairs: tuple[str, str], **extra) -> dict:
    return {"messages": [{"role": role, "content": text} for role, text in pairs], **extra}


def source(**settings) -> Source:
    return Source(**({"name": "s", "path": "s.jsonl"} | settings))


def sent(record: dict, **settings) -> list[list[tuple[str, str | None]]]:
    made = requests_of(record, source(**settings), {})
    return [[(m["role"], m["content"]) for m in request.messages] for request in made]


def write(path, records: list) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def mix(folder, *sources: dict, held_out: int = 1, seed: int = 0, **acceptance) -> config.Config:
    settings = [{"path": str(folder / f"{s['name']}.jsonl"), **s} for s in sources]
    acceptance = json.dumps({"held_out": held_out, **acceptance})
    return config.load(
        CPU_CONFIG, [f"prompts={json.dumps(settings)}", f"acceptance={acceptance}", f"run.seed={seed}"]
    )


def rejected(folder) -> list[tuple[str, str]]:
    return sorted((r["source"], r["reason"]) for r in prompts.read_rejections(folder))


# ---- conversations


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"conversations": []}, "no_user_turn"),
        ({"messages": None}, "no_user_turn"),
        ({}, "no_user_turn"),
        (openai(("system", "Be brief.")), "no_user_turn"),
        (human(("human", "   ")), "no_user_turn"),
        (human(("gpt", "hello")), "no_user_turn"),
        (openai(("user", "hi"), ("assistant", "a"), ("user", " ")), "bad_conversation"),
        (openai(("user", "hi"), ("assistant", "a"), ("assistant", "b"), ("user", "x")), "bad_conversation"),
        (openai(("user", "hi"), ("system", "now be rude"), ("user", "x")), "bad_conversation"),
        (openai(("narrator", "once"), ("user", "x")), "bad_conversation"),
        (openai(("tool", "42"), ("user", "x")), "bad_conversation"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "bad_conversation"),
        ({"messages": [{"role": "user", "content": 7}]}, "bad_conversation"),
        ({"messages": [{"role": 7, "content": "x"}]}, "bad_conversation"),
        ({"messages": ["hi"]}, "bad_conversation"),
        ({"messages": "hi"}, "bad_conversation"),
        (openai(("user", "x"), tools="{"), "bad_conversation"),
        (["hi"], "bad_conversation"),
        ("{not json", "bad_conversation"),
    ],
)
def test_odd_conversations_are_rejected_by_name(record, reason):
    """G01, G02"""
    with pytest.raises(RowError) as error:
        read_conversation(record)
    assert error.value.reason == reason


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        (human(("gpt", "hello"), ("human", "q"), ("gpt", "a")), [("user", "q"), ("assistant", "a")]),
        (openai(("user", "q"), ("user", "more"), ("assistant", "a")), [("user", "q\n\nmore"), ("assistant", "a")]),
        (openai(("user", " "), ("user", "q")), [("user", "q")]),
        (human(("Human", "q"), ("ChatGPT", "a")), [("user", "q"), ("assistant", "a")]),
        (human(("system", " "), ("human", "q\n")), [("user", "q")]),
        ({"conversations": [{"role": "user", "content": "q"}, {"from": "gpt", "value": "a"}]},
         [("user", "q"), ("assistant", "a")]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}, {"text": "!"}]}]},
         [("user", "q!")]),
    ],
)  # fmt: skip
def test_documented_repairs_and_no_others(record, messages):
    """G02: never a crash, never a reordered conversation."""
    assert [(m["role"], m["content"]) for m in read_conversation(record)[0]] == messages


TALK = [("system", "S"), ("user", "q1"), ("assistant", "a1"), ("user", "q2"), ("assistant", "a2")]


def test_turns_first_last_and_all():
    assert sent(openai(*TALK), turns="first") == [TALK[:2]]
    assert sent(openai(*TALK), turns="last") == [TALK[:4]]
    assert sent(openai(*TALK), turns="all") == [TALK[:2], [*TALK[:2], ("assistant", None), ("user", "q2")]]


def test_the_default_for_turns_follows_the_schema():
    """Open sets: each question on its own. Conversations of one's own: history up to the last user message."""
    assert sent(openai(*TALK)) == [TALK[:4]]
    assert sent(human(*TALK)) == [TALK[:2]]


def test_replay_keeps_the_answers():
    assert sent(openai(*TALK), mode="replay") == [TALK]
    assert sent(openai(*TALK), mode="replay", turns="first") == [TALK[:3]]
    assert sent(openai(*TALK[:4]), mode="replay") == [TALK[:3]]
    with pytest.raises(RowError, match="no answer"):
        sent(openai(*TALK[:2]), mode="replay")


def test_tool_calls_and_results_are_kept_and_forbid_own_answers():
    function = {"name": "f", "arguments": "{}"}
    calls = [{"id": "1", "type": "function", "function": function}]
    call = {"role": "assistant", "content": None, "tool_calls": calls}
    result = {"role": "tool", "content": "42", "tool_call_id": "1"}
    record = {"messages": [{"role": "user", "content": "q"}, call, result, {"role": "user", "content": "so?"}]}
    tool = {"type": "function", "function": {"name": "f"}}
    [request] = requests_of(record | {"tools": json.dumps([tool])}, source(), {})
    assert request.messages[1]["tool_calls"] == call["tool_calls"]
    assert request.messages[2] == result
    assert request.tools == [tool]
    with pytest.raises(RowError, match="tool results"):
        requests_of(record, source(turns="all"), {})


# ---- identity


def test_ids_hang_on_what_is_sent_and_on_nothing_else():
    one, again = (requests_of(openai(*TALK), source(name=name), {})[0] for name in ("a", "b"))
    assert one.row_id == again.row_id
    others = [
        requests_of(openai(*TALK[1:]), source(), {}),
        requests_of(openai(*TALK, tools=[{"type": "function", "function": {"name": "f"}}]), source(), {}),
        requests_of(openai(*TALK), source(), {"thinking": False}),
        requests_of(openai(*TALK), source(mode="replay"), {}),
        requests_of(openai(*TALK), source(turns="first"), {}),
    ]
    assert len({one.row_id, *(made[0].row_id for made in others)}) == 6


def test_all_turns_of_a_conversation_share_its_id_and_form_a_chain():
    """G27"""
    first, second = requests_of(openai(*TALK), source(turns="all"), {})
    assert first.conv_id == second.conv_id
    assert (first.parent, second.parent) == (None, first.row_id)
    assert second.messages[2] == OWN_ANSWER
    other = openai(*TALK[:2], ("assistant", "another old answer"), *TALK[3:])
    assert [r.row_id for r in requests_of(other, source(turns="all"), {})] == [first.row_id, second.row_id]


def test_one_request_a_content_whatever_its_spelling(tmp_path):
    """G27: other ids, white space, role spellings."""
    write(
        tmp_path / "s.jsonl",
        [
            human(("human", "same?"), id=1),
            human(("human", "same?"), id=2),
            human(("Human", "  same?\n")),
            openai(("user", "same?")),
            openai(("user", "other?")),
            openai(("user", "held?")),
        ],
    )
    materialise(mix(tmp_path, {"name": "s"}), tmp_path / "out")
    assert len(Requests(tmp_path / "out" / run_files.PROMPTS)) == 2
    assert rejected(tmp_path / "out").count(("s", "duplicate")) == 3


# ---- the mix


def ids(folder) -> list[str]:
    return [record["row_id"] for record in files.read_jsonl(folder / run_files.PROMPTS)]


def test_neither_the_order_of_a_source_nor_of_the_sources_matters(tmp_path):
    """G21, G24"""
    records = {name: [openai(("user", f"{name} {i}")) for i in range(30)] for name in "ab"}
    for name in "ab":
        write(tmp_path / f"{name}.jsonl", records[name])
    materialise(mix(tmp_path, {"name": "a", "count": 9}, {"name": "b"}), tmp_path / "one")
    for name in "ab":
        random.Random(3).shuffle(records[name])
        write(tmp_path / f"{name}.jsonl", records[name])
    materialise(mix(tmp_path, {"name": "b"}, {"name": "a", "count": 9}), tmp_path / "two")
    assert ids(tmp_path / "one") == ids(tmp_path / "two")
    assert len(ids(tmp_path / "one")) == 38
    materialise(mix(tmp_path, {"name": "b"}, {"name": "a", "count": 9}, seed=1), tmp_path / "three")
    assert ids(tmp_path / "three") != ids(tmp_path / "two")


def test_a_larger_count_contains_the_smaller(tmp_path):
    write(tmp_path / "s.jsonl", [openai(("user", f"q {i}")) for i in range(60)] + [openai(("user", "q 1"))] * 5)
    drawn = {}
    for count in (5, 20, 64, 999):
        held = {"held_out": 1, "prompts": [{"name": "e", "path": str(tmp_path / "e.jsonl")}]}
        write(tmp_path / "e.jsonl", [openai(("user", "measured"))])
        meta = materialise(mix(tmp_path, {"name": "s", "count": count}, **held), tmp_path / f"out{count}")
        assert meta["sources"]["s"]["conversations"] == min(count, 65)
        drawn[count] = set(ids(tmp_path / f"out{count}"))
    assert drawn[5] < drawn[20] < drawn[64] <= drawn[999]
    assert len(drawn[999]) == 60


def test_what_is_measured_is_held_out_with_all_its_turns(tmp_path):
    """G27: no conversation is on both sides."""
    write(tmp_path / "s.jsonl", [human(*[("human", f"q {i} {t}") for t in (0,)], ("gpt", "a"), ("human", "more"))
                                 for i in range(20)])  # fmt: skip
    out = tmp_path / "out"
    meta = materialise(mix(tmp_path, {"name": "s", "turns": "all"}, held_out=4), out)
    held = {record["conv_id"] for record in files.read_jsonl(out / run_files.HELD_OUT)}
    asked = {record["conv_id"] for record in files.read_jsonl(out / run_files.PROMPTS)}
    assert len(held) == 4
    assert not held & asked
    assert meta["sources"]["s"] == {"conversations": 20, "requests": 32, "rejected": {"held_out": 8}}
    for record in files.read_jsonl(out / run_files.HELD_OUT):
        assert set(record) == {"conv_id", "source", "messages", "tools"}
        assert [message["role"] for message in record["messages"]] == ["user"]


def test_conversations_held_out_before_stay_held_out(tmp_path):
    write(tmp_path / "s.jsonl", [openai(("user", f"q {i}")) for i in range(50)])
    out = tmp_path / "out"
    held = []
    for count, keep in ((10, 3), (50, 3), (50, 5)):
        materialise(mix(tmp_path, {"name": "s", "count": count}, held_out=keep), out)
        held.append({record["conv_id"] for record in files.read_jsonl(out / run_files.HELD_OUT)})
    assert held[0] == held[1] < held[2]


def test_measuring_prompts_of_their_own_are_held_out_of_the_sources(tmp_path):
    write(tmp_path / "s.jsonl", [openai(("user", f"q {i}")) for i in range(9)])
    write(tmp_path / "e.jsonl", [openai(("user", "q 3")), openai(("user", "elsewhere"))])
    out = tmp_path / "out"
    materialise(mix(tmp_path, {"name": "s"}, prompts=[{"name": "e", "path": str(tmp_path / "e.jsonl")}]), out)
    assert rejected(out) == [("s", "held_out")]
    assert len(list(files.read_jsonl(out / run_files.HELD_OUT))) == 2


def test_holding_out_everything_is_refused(tmp_path):
    write(tmp_path / "s.jsonl", [openai(("user", f"q {i}")) for i in range(3)])
    with pytest.raises(ConfigError, match="held_out"):
        materialise(mix(tmp_path, {"name": "s"}, held_out=3), tmp_path / "out")


# ---- where conversations come from


def test_parquet_and_jsonl_of_the_same_records_give_the_same_requests(tmp_path):
    """The open set's schema, as the hub serves it and as a local copy."""
    import datasets

    records = [human(("human", f"q {i}"), ("gpt", "a"), source="gsm") for i in range(2500)]
    write(tmp_path / "s.jsonl", records)
    datasets.Dataset.from_list(records).to_parquet(tmp_path / "s.parquet")
    materialise(mix(tmp_path, {"name": "s", "count": 700}), tmp_path / "lines")
    columns = {"name": "s", "count": 700, "path": str(tmp_path / "s.parquet")}
    materialise(mix(tmp_path, columns), tmp_path / "columns")
    assert ids(tmp_path / "lines") == ids(tmp_path / "columns")


def test_lines_end_at_line_feeds_only(tmp_path):
    """G10: U+2028 and U+0085 are text; a last line without its line feed is a record."""
    text = "one\u2028two\x85three"
    path = tmp_path / "s.jsonl"
    path.write_text(
        json.dumps(openai(("user", "first"))) + "\n\n" + json.dumps(openai(("user", text)), ensure_ascii=False)
    )
    records = [record for _, record in sources.read_source(source(path=path))]
    assert records[1]["messages"][0]["content"] == text
    assert len(records) == 2


def test_the_sources_are_read_once_and_never_needed_again(tmp_path, monkeypatch):
    """G25: a hub that fails half way leaves nothing; what is materialised needs no source."""
    config_ = mix(tmp_path, {"name": "s"})
    write(tmp_path / "s.jsonl", [openai(("user", f"q {i}")) for i in range(9)])

    def failing(source):
        yield "line 1", openai(("user", "q"))
        raise ResumableError("504 Gateway Time-out")

    with monkeypatch.context() as patch:
        patch.setattr(sources, "read_source", failing)
        with pytest.raises(ResumableError):
            materialise(config_, tmp_path / "out")
        assert not list((tmp_path / "out").iterdir())
    first = materialise(config_, tmp_path / "out")
    monkeypatch.setattr(sources, "read_source", failing)
    assert materialise(config_, tmp_path / "out") == first
    assert first["sha256"] == files.sha256_file(tmp_path / "out" / run_files.PROMPTS)


def test_a_source_that_was_edited_is_read_again(tmp_path):
    """Also when its size and its ends stay the same."""
    records = [openai(("user", f"q {i}")) for i in range(9)]
    write(tmp_path / "s.jsonl", records)
    first = materialise(mix(tmp_path, {"name": "s"}), tmp_path / "out")
    write(tmp_path / "s.jsonl", [*records[:4], openai(("user", "Q 4")), *records[5:]])
    assert materialise(mix(tmp_path, {"name": "s"}), tmp_path / "out")["sha256"] != first["sha256"]


def test_a_hub_that_does_not_answer_can_be_asked_again(monkeypatch):
    """G25"""
    import datasets

    def fail(*_args, **_settings):
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)  # a dry run in this process may have set it
    with pytest.raises(ResumableError, match="cannot be read now"):
        list(sources.read_source(Source(name="o", hub="mlabonne/open-perfectblend", revision="af60f3c")))


def test_columns_that_json_has_no_word_for_do_not_matter(tmp_path):
    rows = [human(("human", f"q{i}" if i else "")) | {"at": datetime(2026, 1, 1), "raw": b"\xff"} for i in range(9)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    meta = materialise(
        mix(tmp_path, {"name": "a", "path": str(tmp_path / "a.parquet"), "count": 9}), tmp_path / "out"
    )
    assert meta["sources"]["a"] == {
        "conversations": 9, "requests": 7, "rejected": {"no_user_turn": 1, "held_out": 1}
    }  # fmt: skip


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "folder"])
def test_a_source_with_nothing_to_read_is_named(tmp_path, name):
    path = tmp_path / name
    path.mkdir() if name == "folder" else path.touch()
    with pytest.raises(ConfigError, match=str(path)):
        materialise(mix(tmp_path, {"name": "a", "path": str(path)}), tmp_path / "out")


def test_a_line_nested_beyond_reading_is_rejected_by_name(tmp_path):
    write(tmp_path / "a.jsonl", [human(("human", f"q{i}")) for i in range(3)])
    with open(tmp_path / "a.jsonl", "a") as file:
        file.write("[" * 100000 + "\n")
    meta = materialise(mix(tmp_path, {"name": "a"}), tmp_path / "out")
    assert meta["sources"]["a"]["rejected"] == {"bad_conversation": 1, "held_out": 1}


def test_a_line_that_is_not_json_is_rejected_with_file_line_and_reason(tmp_path):
    write(tmp_path / "a.jsonl", [human(("human", f"q{i}")) for i in range(3)])
    with open(tmp_path / "a.jsonl", "a") as file:
        file.write('\n{"conversations": [}\n')
    config_ = mix(tmp_path, {"name": "a"})
    materialise(config_, tmp_path / "out")
    (broken,) = (r for r in prompts.read_rejections(tmp_path / "out") if r["reason"] == "bad_conversation")
    assert broken["source"] == "a"
    assert broken["detail"] == f"{tmp_path / 'a.jsonl'} line 5: not JSON: Expecting value at column 20"
    assert sources.count_records(config_.prompts[0]) == 4


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"a": "b\tc"}', "Invalid control character at column 9"),
        (b'{"a": 1', "Expecting ',' delimiter at column 8"),
        (b'  {"a": "b', "Unterminated string starting at column 9"),
        (b'{"a": "\xff"}', "'utf-8' codec can't decode byte 0xff in position 7: invalid start byte"),
        (b"[" * 100_000, "maximum recursion depth exceeded"),
    ],
)
def test_what_is_wrong_with_a_line_is_said_with_its_place(tmp_path, line, why):
    (tmp_path / "a.jsonl").write_bytes(line + b"\n")
    with open(tmp_path / "a.jsonl", "rb") as file:
        ((_, record),) = record_files.read_lines(tmp_path / "a.jsonl", file)
    assert record.why.startswith(f"not JSON: {why}")


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_conversation_that_cannot_be_used_is_rejected_with_its_place_and_reason(tmp_path, suffix):
    records = [*({"messages": [{"role": "user", "content": f"q{i}"}]} for i in range(3)), {"text": "hi"}]
    records.append({"messages": [{"role": "usr", "content": "hi"}]})
    path = tmp_path / f"a.{suffix}"
    if suffix == "jsonl":
        write(path, records)
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records[:3] + records[4:]), path)
    materialise(mix(tmp_path, {"name": "a", "path": str(path)}), tmp_path / "out")
    broken = prompts.unusable_conversations(prompts.read_rejections(tmp_path / "out"))
    expected = [
        f"{path} line 4: has none of the columns messages, conversations, conversation, prompt, question, "
        "instruction, turns; it has text",
        f"{path} line 5: messages[0]: unknown role 'usr'",
    ]
    if suffix == "parquet":
        expected = [f"{path} row 4: messages[0]: unknown role 'usr'"]
    assert [record["detail"] for record in broken] == expected
    write(tmp_path / "b.jsonl", records[3:])
    with pytest.raises(
        ConfigError, match="no conversation can be used; all 2 are rejected, the first: .* line 1: has"
    ):
        materialise(mix(tmp_path, {"name": "b"}), tmp_path / "all_broken")


def test_a_missing_source_is_named(tmp_path):
    with pytest.raises(ConfigError, match="nowhere.jsonl does not exist"):
        materialise(mix(tmp_path, {"name": "nowhere"}), tmp_path / "out")


def test_the_sample_is_complete_and_varied():
    meta_source = source(path=config.ROOT / "configs/prompts_sample.jsonl")
    records = [record for _, record in sources.read_source(meta_source)]
    assert 90 <= len(records) <= 120
    assert len({requests_of(record, meta_source, {})[0].row_id for record in records}) == len(records)
    kinds = {record["source"] for record in records}
    assert {"maths", "code", "writing", "reasoning", "languages", "multi_turn"} <= kinds
    assert any(record["conversations"][0]["from"] == "system" for record in records)


@pytest.mark.parametrize(
    ("requests", "held", "said"),
    [(8, 8, "8 of 16 prompts are held out for 06, which leaves 8 to train on"), (92, 8, ""), (10, 0, "")],
)
def test_a_small_run_is_told_how_much_of_it_is_held_out(requests, held, said):
    table = {"requests": requests, "rejected": {"held_out": held} if held else {}}
    line = prompts.held_out_advice({"sources": {"mine": table}})
    assert line.startswith(said) and bool(line) == bool(said)
