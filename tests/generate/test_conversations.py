"""Records in the schemas of public data sets, what is repaired, and what is refused by its field."""

import json

import pytest

from drafter.config import Source
from drafter.errors import RowError
from drafter.generate import conversations, prompts
from drafter.generate.conversations import OWN_ANSWER, read_conversation


def source(**settings) -> Source:
    return Source(**({"name": "s", "path": "s.jsonl"} | settings))


def asked(record: dict, **settings) -> list[list[tuple[str, str | None]]]:
    made = prompts.requests_of(record, source(**settings), {})
    return [[(m["role"], m["content"]) for m in request.messages] for request in made]


def refused(record: dict, **settings) -> str:
    with pytest.raises(RowError) as error:
        prompts.requests_of(record, source(**settings), {})
    return str(error.value)


# ---- schemas


@pytest.mark.parametrize(
    ("record", "sent", "read_by"),
    [
        ({"prompt": " q "}, ["q"], "prompt"),
        ({"prompt": [{"role": "user", "content": "q"}]}, ["q"], "prompt"),
        ({"prompt": ["q"], "category": "x"}, ["q"], "prompt"),
        ({"question": "q", "answer": "a"}, ["q"], "question"),
        ({"question": "q", "answer": 3, "choices": ["x"]}, ["q"], "question"),
        ({"instruction": "do", "input": "", "output": "a"}, ["do"], "instruction"),
        ({"instruction": "do", "input": "x", "output": "a"}, ["do\n\nx"], "instruction + input"),
        ({"instruction": "do", "context": "x", "response": "a"}, ["do\n\nx"], "instruction + context"),
        ({"question_id": 81, "turns": ["q"]}, ["q"], "turns"),
        ({"conversation": [{"role": "user", "content": "q"}], "model": "m"}, ["q"], "conversation"),
        ({"question": "q", "context": "x", "answers": {}}, ["q\n\nx"], "question + context"),
        ({"messages": [{"role": "user", "content": "q"}], "prompt": "not this"}, ["q"], "messages"),
        ({"messages": None, "prompt": "q"}, ["q"], "prompt"),
        ({"messages": [], "conversations": [{"from": "human", "value": "q"}]}, ["q"], "conversations"),
        ({"system_prompt": "S", "question": "q"}, ["S", "q"], "question + system_prompt"),
        ({"system": "S", "conversations": [{"from": "human", "value": "q"}]}, ["S", "q"], "conversations + system"),
        ({"system": "T", "messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "q"}]},
         ["S", "q"], "messages + system"),
    ],
)  # fmt: skip
def test_common_schemas_are_read_by_themselves(record, sent, read_by):
    """Seam U3: of ten public files three were taken; `{"prompt": ...}` was rejected whole."""
    assert [[text for _, text in request] for request in asked(record)] == [sent]
    assert " + ".join(read_conversation(record).read_by) == read_by


def test_the_answer_beside_a_question_is_kept_by_replay():
    """Seam U3"""
    for record in (
        {"prompt": "q", "completion": "a"}, {"question": "q", "answer": "a"}, {"instruction": "q", "output": "a"}
    ):  # fmt: skip
        assert asked(record, mode="replay") == [[("user", "q"), ("assistant", "a")]]
        assert asked(record) == [[("user", "q")]]
    assert "no answer to keep" in refused({"prompt": "q"}, mode="replay")


def test_a_source_names_its_unusual_columns():
    """Seam U3"""
    record = {"frage": "q", "rolle": "S", "mehr": "x", "antwort": "a", "messages": "no list"}
    columns = {"prompt": "frage", "system": "rolle", "input": "mehr", "answer": "antwort"}
    assert asked(record, columns=columns) == [[("system", "S"), ("user", "q\n\nx")]]
    assert asked(record, columns=columns, mode="replay")[0][-1] == ("assistant", "a")
    talk = {"dialog": [{"from": "human", "value": "q"}], "fns": [{"name": "f"}]}
    [request] = prompts.requests_of(talk, source(columns={"messages": "dialog", "tools": "fns"}), {})
    assert (request.messages, request.tools) == (
        [{"role": "user", "content": "q"}], [{"type": "function", "function": {"name": "f"}}]
    )  # fmt: skip
    assert refused({"prompt": "q"}, columns={"prompt": "frage"}) == (
        "no_user_turn: has none of the columns frage; it has prompt"
    )


def test_a_question_is_never_asked_without_the_context_beside_it(tmp_path):
    """Seam B13, U3: a context that is no text is refused, unless the source names the question alone."""
    record = {"question": "q", "context": {"title": ["x"], "sentences": [["y"]]}}
    assert refused(record).startswith(
        "bad_conversation: context: {'sentences': [['y']], 'title': ['x']} is not text; "
    )
    assert asked(record, columns={"prompt": "question"}) == [[("user", "q")]]


TWO = [("user", "q1"), ("assistant", None), ("user", "q2")]


@pytest.mark.parametrize(
    "record",
    [
        {"turns": ["q1", "q2"]},
        {"prompt": ["q1", "q2"]},
        {"messages": [{"role": "user", "content": "q1"}, {"role": "user", "content": "q2"}]},
        {"conversations": [{"from": "human", "value": "q1"}, {"from": "human", "value": "q2"}]},
    ],
)
def test_two_user_turns_without_answers_are_two_turns(record):
    """Seam B22: MT-Bench's two turns were joined to one question."""
    assert asked(record, turns="all") == [TWO[:1], TWO]
    assert asked(record, turns="first") == [TWO[:1]]
    if "conversations" not in record:
        assert asked(record) == [TWO[:1], TWO]
    assert "turns: last needs the answers before the last turn" in refused(record, turns="last")
    first, second = prompts.requests_of(record, source(turns="all"), {})
    assert second.parent == first.row_id and second.messages[1] == OWN_ANSWER


# ---- what a server would refuse


BARE = {"name": "area", "description": "Area of a shape", "parameters": {"type": "object"}}
WRAPPED = {"type": "function", "function": BARE}


@pytest.mark.parametrize(
    "tools",
    [[BARE], [WRAPPED], [{"function": BARE}], [{"type": "function", **BARE}], json.dumps([BARE]), [json.dumps(BARE)]],
)
def test_function_schemas_are_given_the_form_that_servers_take(tools):
    """Seam B08: vLLM answers 400 to bare schemas, and the sixth ended 01b."""
    assert prompts.requests_of({"prompt": "q", "tools": tools}, source(), {})[0].tools == [WRAPPED]


@pytest.mark.parametrize("tools", [None, [], "", "[]", "null", "  "])
def test_no_tools_are_none(tools):
    """Seam B08"""
    assert prompts.requests_of({"prompt": "q", "tools": tools}, source(), {})[0].tools is None


@pytest.mark.parametrize(
    ("tools", "why"),
    [
        ([{"type": "function"}], "tools[0]: {'type': 'function'} is not a tool; use"),
        ([WRAPPED, {"type": "retrieval"}], "tools[1]: {'type': 'retrieval'} is not a tool"),
        ([{"type": "custom", "function": BARE}], "tools[0].type: 'custom'"),
        ([{"name": "f", "parameters": "x"}], "tools[0].function.parameters: 'x' is not a JSON schema"),
        ([{"name": "f", "description": 3}], "tools[0].function.description: 3 is not text"),
        ([{"name": ""}], "tools[0]"),
        ([7], "tools[0]: 7 is not a tool"),
        ("{", "tools: '{' is not JSON"),
        ({"name": "f"}, "tools: {'name': 'f'} is not a list"),
    ],
)
def test_tools_that_no_server_takes_are_refused_by_their_field(tools, why):
    """Seam B08: known before the boot."""
    assert refused({"prompt": "q", "tools": tools}).startswith(f"bad_conversation: {why}")


@pytest.mark.parametrize("column", ["images", "image", "videos", "audios"])
def test_text_about_media_beside_it_is_refused(column):
    """Seam B13: asked in silence, the answers are about nothing."""
    record = {"messages": [{"role": "user", "content": "<image>Who is this?"}], column: ["photo.jpg"]}
    assert refused(record) == (f"bad_conversation: {column}: the text refers to media, but only text can be asked")
    assert asked(record | {column: []}) == [[("user", "<image>Who is this?")]]
    part = {"role": "user", "content": [{"type": "text", "text": "Who?"}, {"type": "image_url", "image_url": {}}]}
    assert refused({"messages": [part]}) == (
        "bad_conversation: messages[0].content[1]: 'image_url' is not text, but only text can be asked"
    )


CALL = {"from": "function_call", "value": '{"name": "area", "arguments": {"side": 2}}'}
TALK = [
    {"from": "human", "value": "q"},
    CALL,
    {"from": "observation", "value": "4"},
    {"from": "gpt", "value": "It is 4."},
    {"from": "human", "value": "and now?"},
]


def test_a_function_call_role_is_a_call_of_the_assistant():
    """Seam B21: the role was unknown."""
    [request] = prompts.requests_of({"conversations": TALK}, source(turns="last"), {})
    call = {"id": "call_1_0", "type": "function", "function": {"name": "area", "arguments": '{"side": 2}'}}
    assert request.messages[1:3] == [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "call_1_0"},
    ]
    assert "the function call is not JSON" in refused(
        {"conversations": [TALK[0], {"from": "function_call", "value": "area(2)"}, *TALK[2:]]}, turns="last"
    )


@pytest.mark.parametrize("strange", [CALL, {"from": "narrator", "value": "x"}, 7, {"from": "gpt", "value": [7]}])
def test_what_follows_the_first_user_turn_does_not_matter_to_turns_first(strange):
    """Seam B21: the conversation was lost even with `turns: first`."""
    record = {"conversations": [TALK[0], strange, *TALK[2:]]}
    assert asked(record) == asked(record, turns="first") == [[("user", "q")]]


def test_calls_are_given_what_servers_demand_of_them():
    """Seam B08: id, type and arguments as text; verified with vLLM's own request model."""
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [call]}]
    talk += [{"role": "tool", "content": "1"}, {"role": "user", "content": "so?"}]
    [request] = prompts.requests_of({"messages": talk}, source(), {})
    assert request.messages[1]["tool_calls"] == [
        {"id": "call_1_0", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    ]
    for spoilt in ("x", {"a": 1}, ["x"], [{"function": {}}], [call | {"id": 3}], [call | {"type": "custom"}]):
        talk[1] = {"role": "assistant", "tool_calls": spoilt}
        assert refused({"messages": talk}).startswith("bad_conversation: messages[1].tool_calls")


# ---- messages


def test_no_message_repeats_a_long_value():
    """Seam U3: a message repeated 100,000 letters."""
    long = "x" * 100_000
    records = [
        long, [long], {long: 1}, dict.fromkeys((f"{i}{long}" for i in range(9)), 1), {"messages": long},
        {"messages": [long]}, {"messages": [{"role": long, "content": "q"}]}, {"prompt": "q", "tools": long},
        {"prompt": "q", "tools": [long]}, {"prompt": "q", "tools": [{"name": "f", "parameters": long}]},
        {"prompt": "q", "system": [long]}, {"messages": [{"role": "user", "content": {long: 1}}]},
        {"messages": [{"role": "user", "content": [{"type": long}]}]},
        {"messages": [{"role": "user", "content": "q", "name": [long]}]},
        {"messages": [{"role": "user", "content": "q"}, {"role": "function_call", "content": long},
                      {"role": "user", "content": "q"}]},
    ]  # fmt: skip
    for record in records:
        with pytest.raises(RowError) as error:
            prompts.requests_of(record, source(), {})
        assert len(str(error.value)) < 1000


def test_every_form_that_the_advice_shows_is_taken():
    """Seam U3: a refusal shows a wanted line."""
    shown = conversations.WANTED.replace('"..."', '"q"')
    for start, end in (('{"messages"', "}]}"), ('{"prompt"', "}")):
        line = shown[shown.index(start) :]
        assert asked(json.loads(line[: line.index(end) + len(end)])) == [[("user", "q")]]
