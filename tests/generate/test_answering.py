"""Stage 01b at its borders: prompts before the boot, replies before they are rows, histories before they are sent."""

import json
from collections import Counter

import pytest

from drafter import config, contracts, files, run_files
from drafter.errors import ConfigError, RowError
from drafter.generate import chat, prompts, replay, rows
from tests import fakes, tiny_models
from tests.fakes import FakeServer, Reply, chat_reply, error_body
from tests.generate.test_stage import Lab, by_question, hold_out, questions
from tests.pipeline.test_run import Night


@pytest.fixture
def lab(tmp_path):
    with FakeServer() as server:
        found = Lab(tmp_path, server.url)
        found.server = server
        yield found


def summary(capsys) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


# ---- prompts before the boot


BARE = {"name": "area", "parameters": {"type": "object", "properties": {"side": {"type": "number"}}}}


def strict(call):
    """Answers 400 where vLLM does: tools without `function`, calls without what they need."""
    body = call.body
    tools = body.get("tools") or []
    calls = [each for message in body["messages"] for each in message.get("tool_calls", ())]
    fine = all(tool.get("type") == "function" and isinstance(tool.get("function"), dict) for tool in tools)
    fine &= all({"id", "type", "function"} <= set(each) and isinstance(each["function"]["arguments"], str)
                for each in calls)  # fmt: skip
    return None if fine else Reply(error_body("Field required: tools.0.function", 400), 400)


def test_bare_function_schemas_are_asked_with_their_tools(lab):
    """Seam B08: the sixth 400 ended 01b."""
    lab.server.script = strict
    with_tools = [record | {"tools": json.dumps([BARE])} for record in questions(20)]
    lab.add_source([*with_tools, *questions(10, name="plain")])
    assert lab.run() == 0
    assert lab.rejected == {"held_out": 2}
    asked = [call.body["tools"] for call in lab.server.chats if "tools" in call.body]
    assert len(asked) >= 18 and all(tools == [{"type": "function", "function": BARE}] for tools in asked)


def test_a_function_call_conversation_is_asked_with_its_calls_as_calls(lab):
    """Seam B21"""
    lab.server.script = strict
    hold_out(lab)
    talk = [("human", "area?"), ("function_call", json.dumps({"name": "area", "arguments": {"side": 2}}))]
    talk += [("observation", "4"), ("gpt", "It is 4."), ("human", "and now?")]
    lab.add_source([{"conversations": [{"from": role, "value": text} for role, text in talk]}], turns="last")
    assert lab.run() == 0
    [call] = lab.server.chats
    assert [message["role"] for message in call.body["messages"]] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
    ]


def test_what_a_server_refuses_is_named_by_its_line_of_the_prompt_file(lab, capsys):
    """Seam B08: no line of the prompt file was named."""
    lab.server.script = lambda call: (
        Reply(error_body("no such template", 400), 400) if "bad" in call.question else None
    )
    hold_out(lab)
    lab.add_source([*questions(3), *questions(9, name="bad")])
    assert lab.run() == 1
    error = lab.manifest["error"]
    assert f"the first: {lab.folder}/s.jsonl line " in error and "400: no such template" in error
    refused = [r for r in prompts.read_rejections(lab.stage) if r["reason"] == "request_refused"]
    numbers = {int(r["detail"].partition(" line ")[2].partition(":")[0]) for r in refused}
    assert numbers <= set(range(4, 13)) and len(numbers) == len(refused) >= 6


def test_a_source_of_pictures_is_an_error_before_the_first_request(lab, capsys):
    """Seam B13, U3"""
    lab.add_source(questions(20))
    lab.add_source(
        [{"prompt": f"<image>Who are the {i} people?", "images": ["a.jpg"]} for i in range(12)], "pictures"
    )
    assert lab.run("--dry-run") == 0
    planned = summary(capsys)
    [finding] = planned["findings"]
    assert planned["refused"] == finding  # at which the pipeline stops before it starts a server
    assert "prompts pictures: no conversation can be used; all 12 are rejected" in finding
    assert f"{lab.folder}/pictures.jsonl line 1: images: " in finding
    assert lab.run() == 2
    assert not lab.server.calls


def command_config(lab: Lab, model) -> config.Config:
    if not lab.tree["prompts"]:
        lab.add_source(questions(9))
    lab.tree["target"]["model"] = str(model)
    lab.tree["servers"]["generate"] = {"kind": "command", "url": "http://127.0.0.1:15600"}
    return lab.config


def test_a_model_without_a_chat_template_is_known_before_the_boot(lab, capsys):
    """Seam B23: known only after the boot, minutes later."""
    model = fakes.make_model_folder(lab.folder / "plain")
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    plain = command_config(lab, model)
    with pytest.raises(ConfigError, match=r"plain has no chat template .*servers.generate.args.chat-template"):
        chat.check_template(plain)
    assert lab.run("--dry-run") == 0
    assert any("has no chat template" in finding for finding in summary(capsys)["findings"])
    assert lab.run() == 2
    assert not lab.server.calls
    lab.tree["servers"]["generate"]["args"] = {"chat_template": "mine.jinja"}
    chat.check_template(lab.config)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat_template.jinja", "{{ messages }}"),
        ("chat_template.json", '{"chat_template": "{{ messages }}"}'),
        ("tokenizer_config.json", '{"chat_template": "{{ messages }}"}'),
        ("tokenizer_config.json", '{"chat_template": [{"name": "default", "template": "{{ messages }}"}]}'),
        ("tekken.json", "{}"),
    ],
)
def test_a_chat_template_is_found_wherever_a_server_looks_for_it(lab, name, content):
    """Seam B23"""
    model = fakes.make_model_folder(lab.folder / "plain")
    (model / name).write_text(content)
    chat.check_template(command_config(lab, model))
    tiny_models.write_tokenizer(model)
    chat.check_template(command_config(lab, model))


# ---- the dry run and the run


def test_the_dry_run_draws_and_counts_what_the_run_does(lab, capsys):
    """Seam U4, U5: more prompts, another source, another count; held-out prompts and numbers are the same."""
    lab.tree["acceptance"]["held_out"] = 6
    lab.add_source(questions(30, name="a"), "a", count=10)
    assert lab.run() == 0
    for change in (
        lambda: lab.tree["prompts"][0].update(count=30),
        lambda: lab.add_source(questions(40, name="b"), "b"),
        lambda: lab.tree["acceptance"].update(held_out=3),
        lambda: lab.tree["prompts"][0].update(count=15),
    ):
        change()
        capsys.readouterr()
        assert lab.run("--dry-run") == 0
        planned, done = summary(capsys), len(lab.records)
        assert lab.run() == 0
        made = lab.manifest
        assert planned["sources"] == made["facts"]["sources"]
        assert planned["pending"] == len(lab.records) - done
        assert planned["requests"] == made["out"]
        held = Counter(record["source"] for record in files.read_jsonl(lab.stage / run_files.HELD_OUT))
        assert made["facts"]["held_out"] == dict(held)
        if "b" in held:
            assert held["a"] >= 1 and held["b"] >= held["a"]


def test_the_dry_run_counts_what_the_next_run_tries_again(lab, capsys):
    """Seam U4: rows whose retries were used up are asked again by the run that comes."""
    lab.server.script = lambda call: Reply(error_body("boom", 500), 500) if call.question != "Say hello." else None
    lab.add_source(questions(30))
    assert lab.run() == 1
    capsys.readouterr()
    assert lab.run("--dry-run") == 0
    planned = summary(capsys)
    lab.server.script = lambda call: None
    assert lab.run() == 0
    assert planned["pending"] == len(lab.records) == 28


def test_the_dry_run_counts_no_row_that_the_run_would_cut(lab, capsys):
    """Seam U4: behind the zeros that a power failure leaves in the journal."""
    lab.add_source(questions(12))
    assert lab.run() == 0
    lines = b"".join(path.read_bytes() for path in rows.shards(lab.stage)).splitlines(keepends=True)
    for path in rows.shards(lab.stage):
        path.unlink()
    (lab.stage / rows.JOURNAL).write_bytes(b"".join(lines[:4]) + b"\0" * 300 + b"\n" + b"".join(lines[4:]))
    capsys.readouterr()
    assert lab.run("--dry-run") == 0
    planned, asked = summary(capsys)["pending"], len(lab.server.chats)
    assert lab.run() == 0
    assert planned == len(lab.server.chats) - asked == 6


def test_the_dry_run_says_how_each_source_was_read(lab, capsys):
    """Seam U3"""
    lab.add_source([{"question": f"why {i}?"} for i in range(9)])
    assert lab.run("--dry-run") == 0
    said = summary(capsys)["read"]
    assert said == [
        f"prompts s: {lab.folder}/s.jsonl (JSON Lines), read by question, turns: last; the first: 'why 0?'"
    ]
    assert lab.run() == 0
    assert lab.manifest["facts"]["read"] == {"s": said[0].removeprefix("prompts s: ")}


# ---- conversations


def talks(count: int) -> list[dict]:
    """Conversations with one first turn and second turns of their own."""
    return [
        {"conversations": [{"from": speaker, "value": text}
                           for speaker, text in (("human", "start"), ("gpt", "x"), ("human", f"then {i}"))]}
        for i in range(count)
    ]  # fmt: skip


def test_follow_ups_of_a_rejected_first_turn_are_rejected_once(lab):
    """Seam L4: by the run that goes on each was rejected once for each of its siblings."""
    lab.server.script = lambda call: Reply(error_body("no", 400), 400) if call.question == "start" else None
    hold_out(lab)
    lab.add_source(talks(2), turns="all")
    lab.add_source(questions(3), "other")
    assert lab.run() == 0
    rejected = prompts.read_rejections(lab.stage)
    kept = [r for r in rejected if r["reason"] != "conversation_ended"]
    prompts.write_rejections(lab.stage, kept)  # as a kill between two rejections leaves it
    assert lab.run() == 0
    assert lab.rejected == {"duplicate": 1, "request_refused": 1, "conversation_ended": 2}
    assert lab.manifest["rejected"] == dict(sorted(lab.rejected.items()))


def test_follow_ups_of_an_answer_that_cannot_be_built_on_are_rejected_once(lab):
    """Seam L4: the same for a row on disk."""
    lab.server.script = lambda call: Reply(chat_reply(call.body | {"max_tokens": 3}))
    hold_out(lab)
    lab.add_source(talks(3), turns="all")
    assert lab.run("--limit", "1") == 0
    assert lab.run() == 0
    assert lab.rejected == {"duplicate": 2, "conversation_ended": 3}


# ---- replies of a wrong reasoning parser


def misparse(reply: dict, into: str) -> dict:
    message = reply["choices"][0]["message"]
    text = (message["reasoning"] or "") + (message["content"] or "")
    message |= {"reasoning": text, "content": None} if into == "reasoning" else {"reasoning": None, "content": text}
    return reply


@pytest.mark.parametrize("into", ["reasoning", "content"])
def test_a_parser_that_puts_everything_on_one_side_stops_the_stage_by_name(lab, into):
    """Seam F11: it was counted nowhere; the first replies may be right."""

    def script(call):
        reply = chat_reply(call.body)
        return Reply(reply if call.number < 12 else misparse(reply, into))

    lab.server.script = script
    lab.tree["generate"]["max_tokens"] = 200
    lab.add_source(questions(60))
    assert lab.run() == 2
    assert "restart the server with the model's own --reasoning-parser" in lab.manifest["error"]
    assert rows.MISPARSED[f"all_in_{into}"] in lab.manifest["error"]
    assert lab.manifest["facts"]["generation"]["misparsed"][f"all_in_{into}"] >= 6
    flagged = [record for record in lab.records.values() if f"all_in_{into}" in record["flags"]]
    assert len(flagged) == 5 and 10 <= len(lab.records) < 40
    lab.server.script = lambda call: None
    assert lab.run() == 0
    assert len(lab.records) == 58


@pytest.mark.parametrize("into", ["reasoning", "content"])
def test_no_turn_is_built_on_a_reply_that_was_parsed_wrongly(lab, into):
    """Seam F11"""
    lab.server.script = lambda call: (
        Reply(misparse(chat_reply(call.body), into)) if call.question == "odd 0 turn 0?" else None
    )
    lab.tree["generate"]["max_tokens"] = 200
    hold_out(lab)
    lab.add_source(questions(1, turns=3, name="odd"), "odd", turns="all")
    lab.add_source(questions(4, turns=2), turns="all")
    assert lab.run() == 0
    assert lab.rejected == {"conversation_ended": 2}
    assert f"all_in_{into}" in by_question(lab)["odd 0 turn 0?"]["flags"]
    assert len(lab.records) == 1 + 8


def test_in_instant_mode_an_answer_that_lands_in_the_reasoning_stops_the_stage(lab):
    """Seam F11"""
    lab.tree["target"] |= {
        "chat_template_kwargs": {"thinking": False}, "prompt_suffix": [fakes.THINK, fakes.THINK_END]
    }  # fmt: skip
    lab.server.script = lambda call: Reply(misparse(chat_reply(call.body), "reasoning"))
    lab.add_source(questions(30))
    assert lab.run() == 2
    assert "have their answer in `reasoning`" in lab.manifest["error"]


@pytest.mark.parametrize("max_tokens", [6, 20, 200])
def test_right_replies_and_cut_ones_are_never_called_misparsed(lab, max_tokens):
    """Seam F11: no false alarm where reasoning or answer is cut, short or missing."""
    lab.tree["generate"]["max_tokens"] = max_tokens
    lab.add_source(questions(40))
    assert lab.run() == 0
    assert not any(set(record["flags"]) & set(rows.MISPARSED) for record in lab.records.values())
    assert lab.manifest["facts"]["generation"]["misparsed"] == {}


# ---- a row agrees with its reply


def choice(reply: dict, **changes) -> dict:
    reply["choices"][0] |= changes
    return reply


@pytest.mark.parametrize(
    ("spoil", "reason", "detail"),
    [
        (lambda r: choice(r, token_ids=[*r["choices"][0]["token_ids"][:-1], 65]), "bad_reply", "last token is 65"),
        (lambda r: choice(r, token_ids=[65] * 61) | {"usage": {"prompt_tokens": len(r["prompt_token_ids"]),
                                                              "completion_tokens": 61}},
         "token_count_mismatch", "61 tokens, asked for at most 60"),
        (lambda r: r | {"usage": r["usage"] | {"completion_tokens": 1}}, "token_count_mismatch", "usage says"),
        (lambda r: r | {"prompt_token_ids": r["prompt_token_ids"][1:]}, "token_count_mismatch", "usage says"),
    ],
)  # fmt: skip
def test_a_row_is_not_written_unless_the_reply_agrees_with_itself(lab, spoil, reason, detail):
    """Seam F3: a missing end token, too many tokens, other counts."""
    lab.server.script = lambda call: Reply(spoil(chat_reply(call.body))) if call.question == "q 1 turn 0?" else None
    hold_out(lab)
    lab.add_source(questions(5))
    assert lab.run() == 0
    [rejected] = prompts.read_rejections(lab.stage)
    assert rejected["reason"] == reason and detail in rejected["detail"]
    assert rejected["detail"].startswith(f"{lab.folder}/s.jsonl line 2: ")
    assert len(lab.records) == 4


def test_a_stop_token_that_the_server_names_is_one(lab):
    """Seam F3: vLLM's stop_reason is the id of a stop token beyond the model's own."""

    def script(call):
        reply = chat_reply(call.body)
        ids = [*reply["choices"][0]["token_ids"][:-1], 65]
        return Reply(choice(reply, token_ids=ids, stop_reason=65))

    lab.server.script = script
    lab.add_source(questions(5))
    assert lab.run() == 0
    assert len(lab.records) == 3


ROW = {
    "row_id": "1" * 32, "conv_id": "2" * 32, "source": "s", "turn": 0, "input_ids": [fakes.USER, 97, fakes.ASSISTANT,
    fakes.THINK, 98, fakes.THINK_END, 99, fakes.END], "supervised": [[4, 8]], "think_end": 5, "reasoning": "b",
    "content": "c", "finish_reason": "stop", "sampling": {}, "model": "toy", "flags": [],
    "usage": {"prompt_tokens": 4, "completion_tokens": 4, "reasoning_tokens": None},
}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"supervised": [[5, 8]]}, {"supervised": [[3, 7]]}, {"supervised": [[0, 8]]}, {"supervised": [[4, 7]]},
        {"supervised": [[4, 6], [6, 8]]}, {"think_end": 4}, {"think_end": 6}, {"think_end": None},
        {"usage": ROW["usage"] | {"completion_tokens": 5}}, {"usage": ROW["usage"] | {"prompt_tokens": 3}},
        {"input_ids": [*ROW["input_ids"], 99]}, {"input_ids": ROW["input_ids"][1:], "supervised": [[3, 7]]},
    ],
)  # fmt: skip
def test_spans_counts_and_think_end_of_a_row_must_agree(lab, change):
    """Seam F3, F10: spans shifted or over the whole row, think_end off by one."""
    lab.add_source(questions(1))
    target = lab.config.target
    rows.check_row(contracts.Row(**ROW), target)
    with pytest.raises(RowError):
        rows.check_row(contracts.Row(**(ROW | change)), target)


def test_ids_that_end_an_answer_come_from_all_of_the_models_files(tmp_path):
    """Seam F3"""
    model = fakes.make_model_folder(tmp_path / "model")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    (model / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 9}}))
    (model / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "</s>"}, "added_tokens_decoder": {"10": {"content": "</s>"}}})
    )
    assert replay.stop_ids(model) == {7, 8, 9, 10}
    other = fakes.make_model_folder(tmp_path / "other")
    (other / "generation_config.json").write_text("[")
    with pytest.raises(ConfigError, match="generation_config.json is not JSON"):
        replay.stop_ids(other)


def test_the_pipeline_stops_at_unusable_prompts_before_it_starts_a_server(tmp_path, model):
    """Seam U3: exit 2 before the boot, nothing left behind."""
    (tmp_path / "cooking.jsonl").write_text("".join(json.dumps({"recipe": i}) + "\n" for i in range(40)))
    night = Night(tmp_path)
    (tmp_path / "memory").write_text("")
    script = night.fakes / "01b_synthetic.py"
    script.unlink()
    script.symlink_to(config.ROOT / "01b_generate_synthetic.py")
    night.overrides.append(f"prompts=[{{name: cooking, path: {tmp_path / 'cooking.jsonl'}}}]")
    code, _out, err = night.run("--only", "01b")
    assert code == 2, err
    assert "prompts cooking: no conversation can be used; all 40 are rejected, the first: " in err.splitlines()[-1]
    assert not night.run_dir.exists() and night.leftovers() == []
