"""Stage 01b against a scripted server, and on a served tiny Kimi."""

import errno
import functools
import importlib.util
import json
import logging
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
import urllib.request
from collections import Counter
from datetime import datetime
from pathlib import Path

import pytest
import yaml

from drafter import cli, config, contracts, files, progress, run_files
from drafter.generate import answering, chat, mix, prompts, rows
from drafter.generate import stage as generate
from drafter.pipeline import deadline as until
from drafter.serve import client
from tests import fakes
from tests.fakes import FakeServer, Reply, chat_reply, error_body

SCRIPT = config.ROOT / "01b_generate_synthetic.py"


def load_script():
    spec = importlib.util.spec_from_file_location("stage_01b", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


main = load_script().main


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(client, "BACKOFF_SECONDS", (0.01, 0.02))
    monkeypatch.setattr(client, "PROBE_SECONDS", (0.02, 0.05))


def questions(count: int, turns: int = 1, name: str = "q") -> list[dict]:
    """Conversations in the open sets' schema; the old answers carry a sentinel."""
    return [
        {
            "conversations": [
                {"from": speaker, "value": text}
                for turn in range(turns)
                for speaker, text in (("human", f"{name} {i} turn {turn}?"), ("gpt", "OLD_ANSWER_7"))
            ]
        }
        for i in range(count)
    ]


class Lab:
    """A run folder, its config, and what lies in it."""

    def __init__(self, folder: Path, url: str):
        self.folder = folder
        self.tree = {
            "run": {"name": "r", "dir": str(folder / "runs")},
            "target": {
                "model": str(fakes.make_model_folder(folder / "model")),
                "served_name": fakes.MODEL,
                "layer_ids": [2, 8],
                "max_seq_len": 512,
                "prompt_suffix": [fakes.THINK],
                "think_end": fakes.THINK_END,
                "special_tokens": fakes.SPECIAL_TOKENS,
            },
            "servers": {role: {"kind": "external", "url": url} for role in ("generate", "extract", "evaluate")},
            "prompts": [],
            "generate": {
                "concurrency": 8, "max_tokens": 60, "temperature": 0.7, "top_p": 0.95, "rows_per_shard": 7,
                "outage_minutes": 0.05,
            },
            "train": {"lr": 0.001},
            "acceptance": {"held_out": 2},
        }  # fmt: skip

    def add_source(self, records: list, name: str = "s", **settings) -> None:
        path = self.folder / f"{name}.jsonl"
        path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
        self.tree["prompts"].append({"name": name, "path": str(path), **settings})

    def argv(self, *arguments: str) -> list[str]:
        path = self.folder / "config.yaml"
        path.write_text(yaml.safe_dump(self.tree))
        return ["--config", str(path), *arguments]

    def run(self, *arguments: str) -> int:
        return main(self.argv(*arguments))

    @property
    def config(self) -> config.Config:
        self.argv()
        return config.load(self.folder / "config.yaml")

    @property
    def stage(self) -> Path:
        return self.folder / "runs/r/01b_synthetic"

    @property
    def manifest(self) -> dict:
        return json.loads((self.stage / "manifest.json").read_text())

    @property
    def records(self) -> dict[str, dict]:
        """Rows by id; a row that is there twice is an error."""
        found: dict[str, dict] = {}
        for path in rows.row_files(self.stage):
            for line in path.read_bytes().split(b"\n"):
                if line:
                    record = json.loads(line)
                    assert record["row_id"] not in found
                    found[record["row_id"]] = record
        return found

    @property
    def rejected(self) -> Counter:
        return Counter(r["reason"] for r in prompts.read_rejections(self.stage))

    @property
    def everything(self) -> str:
        return "".join(path.read_text() for path in self.stage.iterdir() if path.suffix == ".jsonl")


@pytest.fixture
def lab(tmp_path):
    """A lab whose server follows `lab.server.script`."""
    with FakeServer() as server:
        lab = Lab(tmp_path, server.url)
        lab.server = server
        yield lab


def hold_out(lab: Lab) -> None:
    """Measure on a separate prompt, so that every other conversation becomes a row."""
    path = lab.folder / "eval.jsonl"
    path.write_text(json.dumps(questions(1, name="eval")[0]))
    lab.tree["acceptance"]["prompts"] = [{"name": "eval", "path": str(path)}]


def by_question(lab: Lab) -> dict[str, dict]:
    asked = {r["row_id"]: r["messages"][-1]["content"] for r in files.read_jsonl(lab.stage / run_files.PROMPTS)}
    return {asked[row_id]: record for row_id, record in lab.records.items()}


# ---- exactness


def test_rows_hold_the_servers_own_ids(lab):
    """G06: nothing is decoded and encoded again, no tokenizer is loaded."""
    lab.add_source(questions(20))
    assert lab.run() == 0
    sent = {call.question: call.body for call in lab.server.chats}
    assert len(lab.records) == 18
    for question, record in by_question(lab).items():
        reply = chat_reply(sent[question])
        choice = reply["choices"][0]
        assert record["input_ids"] == reply["prompt_token_ids"] + choice["token_ids"]
        assert record["supervised"] == [[len(reply["prompt_token_ids"]), len(record["input_ids"])]]
        if record["think_end"] is not None:
            assert record["input_ids"][record["think_end"]] == fakes.THINK_END
            assert record["think_end"] >= len(reply["prompt_token_ids"])
        assert record["reasoning"] == choice["message"]["reasoning"]
        assert record["content"] == choice["message"]["content"]
    assert lab.manifest["status"] == "complete"
    assert lab.manifest["in"] == 20 == lab.manifest["out"] + 2


def test_every_sampling_field_is_sent_and_kept(lab):
    """G23"""
    lab.add_source(questions(4))
    assert lab.run() == 0
    fields = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
              "frequency_penalty", "max_tokens", "seed"}  # fmt: skip
    for call in lab.server.chats:
        assert fields <= set(call.body)
        assert call.body["return_token_ids"] is True
    kept = {json.dumps(record["sampling"], sort_keys=True) for record in lab.records.values()}
    sent = {json.dumps({key: call.body[key] for key in fields}, sort_keys=True) for call in lab.server.chats}
    assert kept == sent


@pytest.mark.parametrize("field", ["temperature", "top_p", "top_k", "min_p", "repetition_penalty"])
def test_a_null_sampling_field_is_a_config_error(lab, field):
    """G23"""
    lab.add_source(questions(4))
    lab.tree["generate"][field] = None
    assert lab.run() == 2
    assert not lab.server.calls


def test_row_seeds_come_from_the_row_id_and_can_be_turned_off(lab):
    lab.add_source(questions(6))
    assert lab.run() == 0
    seeds = {record["row_id"]: record["sampling"]["seed"] for record in lab.records.values()}
    assert all(seed == int(row_id[:7], 16) for row_id, seed in seeds.items())
    lab.tree["run"]["name"] = "r2"
    assert lab.run("--set", "generate.seed_rows=false") == 0
    assert not any("seed" in call.body for call in lab.server.chats[4:])


def test_a_reply_cut_inside_its_reasoning_is_a_good_row(lab):
    """G07: content null, finish_reason length."""
    lab.add_source(questions(6))
    lab.tree["generate"]["max_tokens"] = 6
    assert lab.run() == 0
    for record in lab.records.values():
        assert record["content"] is None
        assert record["finish_reason"] == "length"
        assert record["think_end"] is None
        assert record["flags"] == ["cut_in_reasoning"]
        assert record["supervised"][0][1] - record["supervised"][0][0] == 6
    assert len(lab.records) == 4
    assert '"None"' not in lab.everything
    table = lab.manifest["facts"]["rows"]["all"]
    assert table["truncated_share"] == table["reasoning_share"] == 1.0


@pytest.mark.parametrize("form", ["reasoning", "reasoning_content", "inline"])
def test_reasoning_has_one_form_whatever_the_server_calls_it(lab, form):
    """G09"""

    def script(call):
        reply = chat_reply(call.body | {"max_tokens": 500})
        message = reply["choices"][0]["message"]
        reasoning = message.pop("reasoning")
        if form == "inline":
            message["content"] = f"<think>{reasoning}</think>{message['content']}"
        else:
            message[form] = reasoning
        return Reply(reply)

    lab.server.script = script
    lab.tree["target"]["special_tokens"] = {}
    lab.add_source(questions(5))
    assert lab.run() == 0
    for record in lab.records.values():
        ids = record["input_ids"]
        start, end = record["supervised"][0]
        assert record["reasoning"] == bytes(ids[start : record["think_end"]]).decode()
        assert record["content"] == bytes(ids[record["think_end"] + 1 : end - 1]).decode()


def test_thinking_without_any_reasoning_stops_the_run(lab):
    """G09"""

    def script(call):
        reply = chat_reply(call.body)
        reply["choices"][0]["message"]["reasoning"] = None
        return Reply(reply)

    lab.server.script = script
    lab.add_source(questions(60))
    assert lab.run() == 2
    assert "--reasoning-parser" in lab.manifest["error"]
    assert len(lab.records) < 30


def test_instant_mode_finds_the_closing_token_in_the_prompt(lab):
    """G11, G15: the template flag reaches the server at top level and takes effect."""
    lab.tree["target"]["chat_template_kwargs"] = {"thinking": False}
    lab.tree["target"]["prompt_suffix"] = [fakes.THINK, fakes.THINK_END]
    lab.add_source(questions(5))
    assert lab.run() == 0
    assert all(call.body["chat_template_kwargs"] == {"thinking": False} for call in lab.server.chats)
    for record in lab.records.values():
        assert record["think_end"] == record["supervised"][0][0] - 1
        assert record["reasoning"] is None
        assert record["flags"] == []


def test_odd_characters_survive_as_ids_and_text(lab):
    """G10: half an emoji, a lone surrogate, U+2028 and U+0085 are one line of the shard."""

    def script(call):
        ids = [*b"hm", fakes.THINK_END, *"ok \U0001f600".encode()[:-2]]
        text = "ok \ufffd\u2028\x85\ud83d"
        return Reply(fakes.reply_of(fakes.render(call.body["messages"]), ids, "hm", text, "length"))

    lab.server.script = script
    lab.add_source(questions(3))
    assert lab.run() == 0
    [record] = lab.records.values()
    assert record["content"] == "ok \ufffd\u2028\x85\ud83d"
    assert record["input_ids"][-2:] == list("\U0001f600".encode()[:2])
    assert len(list(rows.read_rows(lab.stage))) == 1


def test_markers_leaking_into_text_are_flagged(lab):
    """G12"""

    def script(call):
        reply = chat_reply(call.body)
        reply["choices"][0]["message"]["reasoning"] = "then <|tool_mark|> I call"
        return Reply(reply)

    lab.server.script = script
    lab.add_source(questions(4))
    assert lab.run() == 0
    assert all("special_in_text" in record["flags"] for record in lab.records.values())


def change(reply: dict, **changes) -> dict:
    reply["choices"][0] |= changes
    return reply


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda r: change(r, token_ids=r["choices"][0]["token_ids"] + [1]), "token_count_mismatch"),
        (lambda r: change(r, token_ids=None), "bad_reply"),
        (lambda r: change(r, token_ids=[1, "2"]), "bad_reply"),
        (lambda r: change(r, token_ids=[]), "empty_completion"),
        (lambda r: change(r, finish_reason="abort"), "bad_reply"),
        (lambda r: change(r, finish_reason=None), "bad_reply"),
        (lambda r: change(r, token_ids=[fakes.VOCAB] * len(r["choices"][0]["token_ids"])), "bad_token_ids"),
        (lambda r: change(r, token_ids=[-1] * len(r["choices"][0]["token_ids"])), "bad_token_ids"),
        (lambda r: change(r, message=None), "bad_reply"),
        (lambda r: change(r, message={"content": 5}), "bad_reply"),
        (lambda r: change(r, message={"content": "a", "reasoning": [{"text": "b"}]}), "bad_reply"),
        (lambda r: r | {"usage": r["usage"] | {"completion_tokens_details": [1]}}, "bad_reply"),
        (lambda r: r | {"choices": []}, "bad_reply"),
        (lambda r: r | {"choices": None}, "bad_reply"),
        (lambda r: r | {"usage": None}, "bad_reply"),
        (lambda r: r | {"prompt_token_ids": None}, "bad_reply"),
        (lambda r: r | {"prompt_token_ids": [*r["prompt_token_ids"][:-1], 65]}, "prompt_mismatch"),
        (lambda r: r | {"usage": r["usage"] | {"prompt_tokens": 1}}, "token_count_mismatch"),
        (lambda r: {"error": "half a gateway"}, "bad_reply"),
    ],
)
def test_a_malformed_reply_costs_its_row_and_nothing_else(lab, spoil, reason):
    """G05, and half a gateway: counted under its name, never fatal, never re-tokenized."""
    lab.server.script = lambda call: Reply(spoil(chat_reply(call.body))) if call.question == "q 5 turn 0?" else None
    lab.tree["acceptance"]["held_out"] = 1
    lab.add_source(questions(10))
    assert lab.run() == 0
    held = {r["messages"][-1]["content"] for r in files.read_jsonl(lab.stage / run_files.HELD_OUT)}
    assert "q 5 turn 0?" not in held
    assert lab.rejected == {"held_out": 1, reason: 1}
    assert "q 5 turn 0?" not in by_question(lab)
    assert lab.manifest["pending"] == 0


# ---- preflight


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("prompt_suffix", [fakes.THINK, fakes.THINK_END], "target.prompt_suffix"),
        ("special_tokens", {"<think>": 77}, "target.special_tokens"),
        ("served_name", "other", "served_name"),
    ],
)
def test_the_preflight_refuses_before_the_first_real_request(lab, setting, value, message):
    """G11, G16"""
    lab.tree["target"][setting] = value
    lab.add_source(questions(5))
    assert lab.run() == 2
    assert message in lab.manifest["error"]
    assert not lab.server.chats


def test_a_server_without_token_ids_is_refused_by_the_preflight(lab):
    """G05"""
    lab.server.script = lambda call: Reply(change(chat_reply(call.body), token_ids=None))
    lab.add_source(questions(5))
    assert lab.run() == 2
    assert "token ids" in lab.manifest["error"]
    assert not lab.server.chats


def test_a_server_that_is_not_there_is_named_with_the_command_that_starts_it(lab):
    lab.add_source(questions(5))
    lab.tree["servers"]["generate"]["url"] = "http://127.0.0.1:9"
    assert lab.run() == 2
    assert "drafter.serve up generate" in lab.manifest["error"]


# ---- sources and turns


def test_only_the_models_answers_are_kept(lab):
    """G03: no answer of the source is sent or written, one assistant turn a row."""
    lab.add_source(questions(6, turns=3), turns="all")
    assert lab.run() == 0
    assert "OLD_ANSWER_7" not in json.dumps([call.body for call in lab.server.calls])
    assert "OLD_ANSWER_7" not in lab.everything
    assert len(lab.records) == 4 * 3


def test_turn_by_turn_the_history_is_the_models_own_without_reasoning(lab):
    """T08: the ids of each turn are the served ones."""
    lab.tree["generate"]["max_tokens"] = 200
    lab.add_source(questions(5, turns=3), turns="all")
    assert lab.run() == 0
    answers = by_question(lab)
    for call in lab.server.chats:
        messages = call.body["messages"]
        assert [m["role"] for m in messages] == ["user", "assistant"] * (len(messages) // 2) + ["user"]
        for question, answer in zip(messages[::2], messages[1::2], strict=False):
            assert answer["content"] == answers[question["content"]]["content"]
            assert set(answer) == {"role", "content"}
        assert answers[call.question]["input_ids"][: len(fakes.render(messages))] == fakes.render(messages)


def test_a_conversation_ends_where_an_answer_cannot_be_built_on(lab):
    """G07, G12: cut, leaked or refused, the turns behind it are named."""

    def script(call):
        if call.question == "cut 0 turn 1?":
            return Reply(chat_reply(call.body | {"max_tokens": 3}))
        if call.question == "bad 0 turn 0?":
            return Reply(error_body("no", 400), 400)
        return None

    lab.server.script = script
    lab.tree["generate"]["max_tokens"] = 200
    hold_out(lab)
    lab.add_source(questions(1, turns=4, name="cut"), "a", turns="all")
    lab.add_source(questions(1, turns=3, name="bad"), "b", turns="all")
    lab.add_source(questions(5, name="fine"), "c")
    assert lab.run() == 0
    assert lab.rejected["conversation_ended"] == 2 + 2
    assert lab.rejected["request_refused"] == 1
    assert lab.manifest["pending"] == 0


def test_tools_reach_the_prompt_and_need_no_parser(lab):
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    lab.add_source([{"messages": [{"role": "user", "content": f"call {i}"}], "tools": [tool]} for i in range(4)])
    assert lab.run() == 0
    assert all(call.body["tools"] == [tool] and call.body["tool_choice"] == "none" for call in lab.server.chats)


def test_prompts_that_cannot_fit_are_not_sent(lab):
    """G14: with M the context, prompts of M-1 tokens are sent, M and M+1 are not."""
    frame = len(fakes.render([{"role": "user", "content": ""}]))
    sizes = {fakes.CONTEXT - 1, fakes.CONTEXT, fakes.CONTEXT + 1}
    lab.add_source([{"messages": [{"role": "user", "content": "x" * (size - frame)}]} for size in sizes])
    hold_out(lab)
    assert lab.run() == 0
    assert [len(call.question) + frame for call in lab.server.chats] == [fakes.CONTEXT - 1]
    assert lab.rejected == {"prompt_too_long": 2}


def test_replayed_conversations_keep_their_answers(lab):
    """Mode replay: ids from the server's template, spans of the answers up to the stop token, nothing generated."""
    conversation = [
        {"role": "user", "content": "one?"},
        {"role": "assistant", "content": "first"},
        {"role": "user", "content": "two?"},
        {"role": "assistant", "content": "second"},
    ]
    lab.add_source([{"messages": conversation}], mode="replay", turns="all")
    lab.add_source([{"messages": conversation}], "l", mode="replay")
    hold_out(lab)
    assert lab.run() == 0
    replayed = [r for r in lab.records.values() if r["finish_reason"] == "replay"]
    assert len(replayed) == 2
    for record in replayed:
        assert record["input_ids"] == fakes.render(conversation, generation_prompt=False)
        taught = [bytes(record["input_ids"][start : end - 1]).decode() for start, end in record["supervised"]]
        assert taught == (["first", "second"] if record["source"] == "s" else ["second"])
        assert all(record["input_ids"][end - 1] == fakes.END for _, end in record["supervised"])
        assert record["input_ids"][record["think_end"]] == fakes.THINK_END


LOGGED = [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "first", "reasoning": "old"}]
LOGGED += [{"role": "user", "content": "two?"}]


@pytest.mark.parametrize(
    "answer",
    [
        {"content": "second", "reasoning": "hm"},
        {"content": "second", "reasoning_content": "hm"},
        {"content": "<think>hm</think>second"},
        {"content": "\n<think>\nhm\n</think>\n\nsecond"},
    ],
)
def test_a_replayed_answer_keeps_its_reasoning(lab, answer):
    """It was dropped without a word: the row of a reasoning model became <think></think>answer."""
    lab.add_source([{"messages": [*LOGGED, {"role": "assistant"} | answer]}], mode="replay")
    hold_out(lab)
    assert lab.run() == 0
    [record] = [r for r in lab.records.values() if r["finish_reason"] == "replay"]
    [[start, end]] = record["supervised"]
    wanted = [*fakes.encode("hm"), fakes.THINK_END, *fakes.encode("second"), fakes.END]
    assert record["input_ids"][start:end] == wanted and record["think_end"] == start + 2
    assert (record["reasoning"], record["content"]) == ("hm", "second")
    assert fakes.encode("old") not in [record["input_ids"][i : i + 3] for i in range(start)], "as the model saw it"


def test_torn_reasoning_is_refused_by_line_and_field(lab):
    lab.add_source(
        [{"messages": [*LOGGED, {"role": "assistant", "content": "a</think>b"}]}] + questions(9),
        "torn",
        mode="replay",
    )
    hold_out(lab)
    assert lab.run() == 0
    [torn] = [r for r in prompts.read_rejections(lab.stage) if r["reason"] == "bad_conversation"]
    assert "torn.jsonl line 1: messages[3].content: a <think> or </think>" in torn["detail"]


def test_reasoning_that_the_template_leaves_out_is_put_back_and_of_an_earlier_answer_refused(lab, monkeypatch):
    render = fakes.render
    monkeypatch.setattr(
        fakes, "render", lambda messages, *more, **kw: render([m | {"reasoning": ""} for m in messages], *more, **kw)
    )
    talk = [*LOGGED, {"role": "assistant", "content": "second", "reasoning": "hm"}]
    lab.add_source([{"messages": talk}], "last", mode="replay")
    lab.add_source([{"messages": talk}], "all", mode="replay", turns="all")
    hold_out(lab)
    assert lab.run() == 0
    [record] = [r for r in lab.records.values() if r["finish_reason"] == "replay"]
    [[start, end]] = record["supervised"]
    assert record["input_ids"][start : record["think_end"] + 1] == [*fakes.encode("hm"), fakes.THINK_END]
    [refused] = [r for r in prompts.read_rejections(lab.stage) if r["reason"] == "prompt_mismatch"]
    assert "the template leaves out the reasoning of messages[1]" in refused["detail"]


def test_the_reasoning_of_a_history_is_not_sent(lab):
    lab.add_source([{"messages": LOGGED}, *questions(5)], turns="last")
    hold_out(lab)
    assert lab.run() == 0
    assert "old" not in json.dumps([call.body for call in lab.server.chats])


# ---- never losing, never doubling


def test_a_second_run_of_a_finished_run_sends_nothing(lab):
    lab.add_source(questions(12))
    assert lab.run() == 0
    calls, before = len(lab.server.calls), lab.records
    assert lab.run() == 0
    assert len(lab.server.calls) == calls
    assert lab.records == before
    assert not (lab.stage / rows.JOURNAL).exists()


def test_completion_order_and_source_order_do_not_matter_to_resuming(lab):
    """G21, G24: rows finish out of order, the run is cut, the source is shuffled, again and again."""
    lab.server.script = lambda call: Reply(chat_reply(call.body), delay=random.Random(call.question).random() / 50)
    records = questions(40)
    lab.add_source(records)
    lab.tree["acceptance"]["held_out"] = 1
    for limit in (5, 17, 30):
        assert lab.run("--limit", str(limit)) == 0
        assert len(lab.records) == limit
        random.Random(limit).shuffle(records)
        (lab.folder / "s.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    assert lab.run() == 0
    assert len(lab.records) == 39
    assert len(lab.server.chats) == 39


def test_more_prompts_change_only_what_is_left_to_do(lab):
    lab.add_source(questions(40), count=10)
    assert lab.run() == 0
    before = lab.records
    lab.tree["prompts"][0]["count"] = 25
    assert lab.run() == 0
    assert before.items() <= lab.records.items()
    held = {r["conv_id"] for r in files.read_jsonl(lab.stage / run_files.HELD_OUT)}
    assert len(lab.records) + len(held) == 25


def test_rows_no_longer_asked_for_stay_on_disk_and_out_of_the_reading(lab):
    lab.add_source(questions(20))
    assert lab.run() == 0
    lab.tree["prompts"][0]["count"] = 10
    assert lab.run() == 0
    assert len(lab.records) == 18
    assert len(list(rows.read_rows(lab.stage))) == lab.manifest["out"] == 8


def planned(lab: Lab, capsys, *arguments: str) -> dict:
    capsys.readouterr()
    assert lab.run("--dry-run", *arguments) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_manifest_of_other_prompts_is_written_again_without_a_server_and_no_row_is_lost(lab, capsys):
    """Seam U4: after a call with other prompts the first had nothing to do, and the manifest counted 8 of 8."""
    lab.add_source(questions(20))
    assert lab.run() == 0
    asked, mine = lab.tree["prompts"], [{"name": "mine", "path": str(lab.folder / "mine.jsonl")}]
    (lab.folder / "mine.jsonl").write_text("".join(json.dumps(q) + "\n" for q in questions(8, name="mine")))
    assert "stale" not in planned(lab, capsys)
    first = lab.manifest
    lab.tree["prompts"] = mine
    assert lab.run() == 0 and lab.manifest["out"] == 6
    lab.tree["prompts"] = asked
    sent = len(lab.server.chats)
    plan = planned(lab, capsys)
    assert plan["pending"] == 0 and "other prompts" in plan["stale"]
    assert lab.run() == 0 and len(lab.server.chats) == sent
    assert [lab.manifest[key] for key in ("in", "out", "rejected")] == [
        first[key] for key in ("in", "out", "rejected")
    ]
    assert len(list(rows.read_rows(lab.stage))) == 18 and len(lab.records) == 24
    assert "stale" not in planned(lab, capsys)


def test_a_smaller_count_and_a_manifest_of_a_limit_are_seen_by_the_plan(lab, capsys):
    """Seam U4: prompts.0.count=50 on a finished run was ignored."""
    lab.add_source(questions(20))
    assert lab.run() == 0
    assert "stale" not in planned(lab, capsys, "--limit", "4"), "a limit bounds what a call does"
    assert planned(lab, capsys, "--set", "prompts.0.count=10")["stale"]
    assert lab.run("--limit", "4") == 0 and lab.manifest["out"] == 4
    plan = planned(lab, capsys)
    assert plan["pending"] == 0 and "counts 4 rows, there are 18" in plan["stale"]


def test_a_manifest_that_does_not_record_its_prompts_is_taken_as_it_is(lab, capsys):
    """Seam U4: of an earlier version, whose folder is no reason to begin again."""
    lab.add_source(questions(6))
    assert lab.run() == 0
    manifest = lab.manifest
    del manifest["facts"]["prompts_sha256"]
    files.write_json(lab.stage / "manifest.json", manifest)
    assert "stale" not in planned(lab, capsys, "--set", "prompts.0.count=5")


def test_the_plan_identifies_the_rows_that_there_will_be(lab, capsys):
    """Seam U4: by their ids alone, whether they are there or still asked for."""
    lab.add_source(questions(12))
    before = planned(lab, capsys)["row_set"]
    assert lab.run() == 0
    assert planned(lab, capsys)["row_set"] == before == contracts.row_set(list(lab.records))
    lab.tree["prompts"][0]["name"] = "renamed"
    assert planned(lab, capsys)["row_set"] == before
    assert planned(lab, capsys, "--set", "prompts.0.count=10")["row_set"] != before


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("generate", "temperature", 0.6), ("generate", "max_tokens", 61), ("generate", "top_p", 0.9),
        ("generate", "seed_rows", False), ("target", "think_end", fakes.TOOL_MARK),
        ("target", "chat_template_kwargs", {"thinking": True}),
    ],
)  # fmt: skip
def test_a_changed_question_is_refused_and_the_manifest_stays(lab, section, key, value):
    """H12 for this stage"""
    lab.add_source(questions(6))
    assert lab.run() == 0
    before = lab.manifest
    lab.tree[section][key] = value
    assert lab.run() == 2
    assert lab.manifest == before


def test_a_torn_journal_loses_only_the_torn_row(lab):
    """G22: cut at every byte of the last line; the torn row is made again, its neighbours stay."""
    lab.add_source(questions(5))
    lab.tree["generate"]["rows_per_shard"] = 100
    assert lab.run() == 0
    whole = lab.records
    [shard] = rows.shards(lab.stage)
    data = shard.read_bytes()
    journal = lab.stage / rows.JOURNAL
    last = data.rindex(b"\n", 0, -1) + 1
    shard.unlink()
    for cut in [*range(last, len(data), 37), len(data) - 1]:
        journal.write_bytes(data[:cut])
        assert lab.run() == 0
        assert lab.records == whole
        for path in rows.shards(lab.stage):
            path.unlink()


def test_a_journal_that_ends_in_zeros_is_cut_where_they_begin(lab):
    """What a power failure leaves of bytes that were never synced."""
    lab.add_source(questions(6))
    lab.tree["generate"]["rows_per_shard"] = 100
    assert lab.run() == 0
    whole = lab.records
    [shard] = rows.shards(lab.stage)
    lines = shard.read_bytes().splitlines(keepends=True)
    shard.unlink()
    (lab.stage / rows.JOURNAL).write_bytes(b"".join(lines[:2]) + b"\0" * 300 + b"\n" + lines[2])
    assert lab.run() == 0
    assert lab.records == whole


def kill_campaign(lab: Lab, dice: random.Random, longest: float) -> int:
    """Run until done, SIGKILL at random moments on the way; the number of kills."""
    fork = multiprocessing.get_context("fork")
    kills = 0
    while True:
        worker = fork.Process(target=lambda: os._exit(main(lab.argv())))
        worker.start()
        worker.join(dice.uniform(0.0, longest))
        if worker.exitcode is not None:
            assert worker.exitcode == 0
            return kills
        os.kill(worker.pid, signal.SIGKILL)
        worker.join()
        kills += 1


def test_killed_at_any_moment_the_rows_are_those_of_an_undisturbed_run(tmp_path):
    """Law 4, G21, G22: at least 50 SIGKILLs at random moments, turns that build on each other included."""
    dice = random.Random(20)

    def script(call):
        return Reply(chat_reply(call.body), delay=random.Random(call.question).uniform(0.005, 0.02))

    def furnished(name: str, url: str) -> Lab:
        lab = Lab(tmp_path / name, url)
        lab.folder.mkdir(exist_ok=True)
        lab.tree["generate"] |= {"max_tokens": 200}
        lab.add_source(questions(40), "first")
        lab.add_source(questions(15, turns=3, name="all"), "all", turns="all")
        lab.add_source([{"conversations": []}, *questions(5)], "doubles")
        return lab

    with FakeServer(script) as server:
        calm = furnished("calm", server.url)
        started = time.monotonic()
        assert calm.run() == 0
        longest = 1.2 * (time.monotonic() - started)
        kills, campaign = 0, 0
        while kills < 50:
            wild = furnished(f"wild{campaign}", server.url)
            kills += kill_campaign(wild, dice, longest)
            campaign += 1
            assert wild.records == calm.records
            assert wild.rejected == calm.rejected
            keys = ("in", "out", "rejected", "pending", "status")
            assert [wild.manifest[key] for key in keys] == [calm.manifest[key] for key in keys]
            assert list(rows.read_rows(wild.stage))


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_exits_with_its_code(lab, signum, code):
    lab.server.script = lambda call: Reply(then="hang") if "q 3 " in call.question else None
    lab.tree["acceptance"]["held_out"] = 1
    lab.add_source(questions(20))
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), *lab.argv()], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    until = time.monotonic() + 60
    while len(lab.server.chats) < 19 and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(signum)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == code
    assert json.loads(out.splitlines()[-1])["status"] == "interrupted"
    assert len(lab.records) == 18
    assert lab.server.hung_up == 1  # the open request was dropped, not left to run
    lab.server.script = lambda call: None
    assert lab.run() == 0
    assert len(lab.records) == 19
    assert len(lab.server.chats) == 20


# ---- failures, budget, deadline


def test_failures_and_truncations_are_counted_apart(lab):
    """G04: one request in ten is HTTP 500 forever, some finish with `length`."""

    def script(call):
        if call.question == "q 3 turn 0?":
            return Reply(error_body("boom", 500), 500)
        if call.question in {f"q {i} turn 0?" for i in (4, 5, 6, 7)}:
            return Reply(chat_reply(call.body | {"max_tokens": 5}))
        return Reply(chat_reply(call.body | {"max_tokens": 500}))

    lab.server.script = script
    hold_out(lab)
    lab.add_source(questions(10))
    assert lab.run() == 0
    assert lab.rejected == {"failed": 1}
    finishes = Counter(record["finish_reason"] for record in lab.records.values())
    assert finishes == {"stop": 5, "length": 4}
    assert lab.manifest["facts"]["rows"]["all"]["truncated_share"] == round(4 / 9, 4)
    assert lab.manifest["facts"]["generation"]["retries"] == {"http_500": client.ATTEMPTS}
    assert all(record["supervised"] for record in lab.records.values())


def test_a_sick_run_is_stopped_by_its_failure_budget_and_can_be_resumed(lab):
    lab.server.script = lambda call: Reply(error_body("no", 400), 400) if call.number % 4 == 3 else None
    lab.add_source(questions(200))
    assert lab.run() == 1
    assert "max_failure_share" in lab.manifest["error"]
    assert len(lab.server.chats) < 60
    assert (
        lab.manifest["in"]
        == 200
        == lab.manifest["out"] + lab.manifest["pending"] + sum(lab.manifest["rejected"].values())
    )


def test_rows_that_failed_are_tried_again_by_the_next_run(lab):
    """Retries used up are the server's fault, so a run that did not complete tries them again."""
    lab.server.script = lambda call: Reply(error_body("boom", 500), 500) if call.question != "Say hello." else None
    lab.add_source(questions(30))
    assert lab.run() == 1
    assert lab.rejected["failed"] > 5
    lab.server.script = lambda call: None
    assert lab.run() == 0
    assert len(lab.records) == 28
    assert lab.rejected == {"held_out": 2}


def test_no_row_at_all_is_never_success(lab):
    """H13 for this stage"""
    lab.server.script = lambda call: Reply(error_body("no", 400), 400) if call.question != "Say hello." else None
    lab.add_source(questions(5))
    assert lab.run() == 1
    assert "no rows from" in lab.manifest["error"]


def test_an_outage_past_its_bound_exits_3_and_the_rerun_goes_on(lab):
    def script(call):
        if len(lab.server.chats) > 20:
            lab.server.alive = False
            return Reply(error_body("EngineDeadError", 500), 500)
        return None

    lab.server.script = script
    lab.tree["generate"]["outage_minutes"] = 0.005
    lab.add_source(questions(60))
    assert lab.run() == 3
    assert 10 <= len(lab.records) <= 20
    assert "run the same command again" in lab.manifest["error"]
    lab.server.script, lab.server.alive = (lambda call: None), True
    assert lab.run() == 0
    assert len(lab.records) == 58


def test_a_full_disk_is_resumable(lab, monkeypatch):
    """H15 for this stage: what was written before stays, what was torn is made again."""
    hold_out(lab)
    lab.add_source(questions(30))
    whole = files.Journal.append

    def append(journal, record):
        if journal.path.name == rows.JOURNAL and len(lab.records) >= 10:
            journal._file.write(b'{"row_id":"torn')
            raise OSError(errno.ENOSPC, "No space left on device")
        whole(journal, record)

    with monkeypatch.context() as patch:
        patch.setattr(files.Journal, "append", append)
        patch.setitem(lab.tree["generate"], "rows_per_shard", 5)
        assert lab.run() == 3
    assert "free some space" in lab.manifest["error"]
    assert lab.run() == 0
    assert len(lab.records) == 30


def test_progress_shows_rate_load_and_failures(lab, monkeypatch, caplog):
    monkeypatch.setattr(answering, "Progress", functools.partial(progress.Progress, every=0.0))
    lab.server.script = lambda call: Reply(error_body("no", 400), 400) if call.question == "q 3 turn 0?" else None
    hold_out(lab)
    lab.add_source(questions(20))
    with caplog.at_level("INFO", logger="drafter"):
        assert lab.run() == 0
    lines = [line for line in caplog.messages if "rows/s" in line]
    assert re.fullmatch(
        r"20/20 rows, [\d.]+ rows/s, ETA 0.0 min, tok/s \d+, in flight \d, failed {'request_refused': 1}", lines[-1]
    )
    assert "truncated_share" in caplog.text  # the table by source


def test_while_no_request_ends_the_log_says_how_many_are_in_flight_and_for_how_long(lab, monkeypatch, caplog):
    monkeypatch.setattr(answering, "Progress", functools.partial(progress.Progress, every=0.01))
    said = threading.Event()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if re.match(r"0/10 rows.* in flight [1-8].* longest so far [\d.]+ s$", record.getMessage()):
                said.set()

    # A question of a source is answered only after the reminder.
    lab.server.script = lambda call: said.wait(30) and None if call.question.startswith("q ") else None
    lab.add_source(questions(12))
    logging.getLogger("drafter").addHandler(listener := Listener())
    try:
        with caplog.at_level("INFO", logger="drafter"):
            assert lab.run() == 0
    finally:
        logging.getLogger("drafter").removeHandler(listener)
    assert said.is_set()


@pytest.fixture
def deadline(lab, monkeypatch):
    """The deadline passes when the twentieth request arrives."""

    def now() -> float:
        return 3000.0 if len(lab.server.chats) >= 20 else 1000.0

    for module in (generate, answering):
        monkeypatch.setattr(module, "time", types.SimpleNamespace(**vars(time) | {"time": now}))
    lab.server.script = lambda call: Reply(chat_reply(call.body), delay=0.05)
    lab.add_source(questions(200))
    return ["--deadline", "1970-01-01T00:33:20+00:00"]


def test_past_the_deadline_what_is_in_flight_is_finished_and_the_rest_named(lab, deadline):
    assert lab.run(*deadline) == 0
    made = len(lab.records)
    assert 20 <= made <= 20 + 8
    assert made == len(lab.server.chats)  # nothing that was sent was thrown away
    assert lab.server.hung_up == 0
    pending = [record["row_id"] for record in files.read_jsonl(lab.stage / generate.PENDING)]
    assert len(pending) == 198 - made == lab.manifest["pending"]
    assert not set(pending) & set(lab.records)
    assert lab.manifest["status"] == "partial"


def test_what_a_deadline_left_is_not_asked_again_without_a_later_one_or_more_prompts(lab, deadline, capsys):
    """Seam H1: also where a rerun would try some rejected turns again, which then count as pending too."""
    lab.tree["prompts"][0]["turns"] = "all"
    (lab.folder / "s.jsonl").write_text("".join(json.dumps(each) + "\n" for each in questions(60, turns=2)))

    def refuse_some(call):
        if call.question.startswith("q 3"):
            return Reply(error_body("no", 400), 400)
        return Reply(chat_reply(call.body), delay=0.05)

    lab.server.script = refuse_some

    def plan() -> dict:
        assert lab.run("--dry-run") == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    assert lab.run(*deadline) == 0
    capsys.readouterr()
    assert lab.rejected["conversation_ended"] and plan()["pending"] > lab.manifest["pending"] > 0
    earlier, later = (until.Deadline("01:00", at) for at in (1000.0, 3000.0))
    for wanted in (None, earlier):
        left = until.left_undone(lab.manifest, plan(), wanted)
        assert left.startswith(f"{lab.manifest['pending']} requests left by the deadline Thu ")
    assert until.left_undone(lab.manifest, plan(), later) == ""
    lab.add_source(questions(10, name="more"), name="t")
    assert until.left_undone(lab.manifest, plan(), None) == ""


def test_other_prompts_than_a_deadline_ended_with_are_asked_for(lab, deadline, capsys):
    """Seam U4: as many requests as before passed for the ones that the deadline had left."""
    assert lab.run(*deadline) == 0 and lab.manifest["pending"] > 18
    lab.tree["prompts"] = []
    lab.add_source(questions(20, name="mine"), name="mine")
    plan = planned(lab, capsys)
    assert plan["pending"] == 18 and until.left_undone(lab.manifest, plan, None) == ""


def test_a_deadline_with_too_few_rows_is_not_a_success(lab, deadline):
    lab.tree["generate"]["min_rows"] = 150
    assert lab.run(*deadline) == 3
    assert "min_rows" in lab.manifest["error"]


def test_the_deadline_is_the_next_time_the_clock_shows_it():
    evening = datetime(2026, 1, 1, 22, 30)
    assert cli.next_time("23:00", evening) == datetime(2026, 1, 1, 23, 0)
    assert cli.next_time("06:15", evening) == datetime(2026, 1, 2, 6, 15)
    full = datetime(2026, 1, 2, 6, 15).astimezone()
    assert {cli.next_time(text, evening) for text in ("2026-01-02T06:15", full.isoformat())} == {
        full.replace(tzinfo=None)
    }


def test_a_deadline_with_its_date_that_has_passed_ends_01b_without_a_server(lab):
    """Seam H1: such a time was taken for the same hour of the next day. A later deadline goes on."""
    lab.add_source(questions(20))
    assert lab.run("--deadline", "2026-01-01T00:00") == 3, "no row at all is no success"
    assert lab.server.calls == [] and lab.manifest["error"].endswith("run the same command with a later --deadline")
    assert lab.run("--limit", "4") == 0
    calls = len(lab.server.calls)
    assert lab.run("--deadline", "2026-01-01T00:00") == 0
    assert len(lab.server.calls) == calls
    assert (lab.manifest["out"], lab.manifest["pending"], lab.manifest["status"]) == (4, 14, "partial")
    assert lab.manifest["facts"]["deadline"] == datetime(2026, 1, 1).timestamp()
    assert lab.run() == 0
    assert (lab.manifest["out"], lab.manifest["status"]) == (18, "complete")
    assert "deadline" not in lab.manifest["facts"]


def test_a_deadline_that_is_no_time_of_day_is_refused_at_once(lab, capsys):
    assert lab.run("--deadline", "6 am") == 2
    assert "'6 am' is not HH:MM" in capsys.readouterr().err


# ---- files that were damaged, or belong to another run


def damage(path: Path, place: int) -> None:
    """A byte that no JSON holds."""
    content = bytearray(path.read_bytes())
    content[place] = 0xFF
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["shard-00000.jsonl", "rejected.jsonl"])
def test_a_damaged_line_is_named_and_without_it_its_row_is_asked_again(lab, name, capsys):
    """Laws 4 and 7"""
    lab.server.script = lambda call: Reply(error_body("no", 400), 400) if "q 3 " in call.question else None
    lab.add_source(questions(12))
    hold_out(lab)
    assert lab.run() == 0
    whole = lab.records
    lines = (lab.stage / name).read_bytes().splitlines(keepends=True)
    damage(lab.stage / name, len(b"".join(lines)) - 9)
    assert lab.run() == 1
    assert f"{name}: line {len(lines)} is broken" in capsys.readouterr().err
    (lab.stage / name).write_bytes(b"".join(lines[:-1]))
    assert lab.run() == 0
    assert lab.records == whole
    assert lab.rejected["request_refused"] == 1


def test_a_row_cut_at_the_end_of_a_shard_is_asked_again(lab):
    """Laws 2 and 4: half a line is no row, for the count of rows as for their readers."""
    lab.add_source(questions(12))
    assert lab.run() == 0
    whole, shard = lab.records, lab.stage / "shard-00000.jsonl"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert lab.run() == 0
    assert lab.manifest["facts"]["rows"]["all"]["rows"] == lab.manifest["out"] == 10
    read = [row.to_record() for row in rows.read_rows(lab.stage)]
    assert {record["row_id"]: record for record in read} == whole
    assert len(read) == 10


@pytest.mark.parametrize("name", ["prompts.jsonl", "prompts.json"])
@pytest.mark.parametrize("content", [b"", b"null\n", b"{}\n", b"\0" * 50])
def test_a_damaged_mix_is_made_again(lab, name, content):
    """G25: the mix is what its SHA-256 says, else its sources are read again."""
    lab.add_source(questions(12))
    assert lab.run() == 0
    before, asked = (lab.stage / "prompts.jsonl").read_bytes(), len(lab.server.chats)
    (lab.stage / name).write_bytes(content)
    assert lab.run() == 0
    assert (lab.stage / "prompts.jsonl").read_bytes() == before
    assert len(lab.server.chats) == asked


def test_rows_of_another_run_are_never_written_to(lab):
    """Law 4: `run.take` reads."""
    lab.add_source(questions(6))
    assert lab.run() == 0
    before = {path.name: path.read_bytes() for path in lab.stage.iterdir()}
    lab.add_source(questions(6, name="more"), name="more")
    assert lab.run("--set", "run.name=second", "--set", f"run.take={{01b_synthetic: {lab.stage}}}") == 2
    assert {path.name: path.read_bytes() for path in lab.stage.iterdir()} == before


# ---- throughput's preconditions


def test_one_slow_row_holds_nothing_up(lab):
    """G20: everything behind a row that hangs is asked, answered and on disk before it ends."""
    lab.server.script = lambda call: Reply(
        chat_reply(call.body), delay=8.0 if call.question == "q 0 turn 0?" else 0.01
    )
    lab.tree["generate"] |= {"concurrency": 16, "rows_per_shard": 100}
    hold_out(lab)
    lab.add_source(questions(800))
    assert lab.run() == 0
    slow = next(call for call in lab.server.chats if call.question == "q 0 turn 0?")
    assert lab.server.chats[-1].at - slow.at < 8
    assert len(lab.records) == 800
    assert json.loads(rows.shards(lab.stage)[-1].read_bytes().splitlines()[-1])["row_id"] == next(
        r["row_id"] for q, r in by_question(lab).items() if q == "q 0 turn 0?"
    )
    assert lab.server.peak_in_flight == 16


def test_timeouts_follow_from_max_tokens_and_the_floor_rate(lab):
    assert chat.request_timeout(lab_settings(max_tokens=8192, floor_tokens_per_second=2.0)) == 60 + 4096


def lab_settings(**changes) -> config.Generate:
    return config.Generate(temperature=1.0, top_p=0.95, **changes)


def test_the_drain_goes_longest_first_and_the_rest_stays_shuffled(lab):
    """A run cut short is a fair sample; only the last requests are ordered."""
    lab.add_source(questions(30), "short")
    lab.add_source(questions(30, turns=3, name="chain"), "chain", turns="all")
    lab.tree["generate"]["concurrency"] = 2
    lab.tree["acceptance"]["held_out"] = 1
    assert lab.run() == 0
    heads = [c.question for c in lab.server.chats if c.question.endswith("turn 0?")]
    shuffled, drain = heads[:-32], heads[-32:]
    names = [question.split()[0] for question in drain]
    assert names == sorted(names)  # chains first
    assert len({question.split()[0] for question in shuffled}) == 2


# ---- the dry run


def test_a_dry_run_tells_the_mix_offline(lab, capsys):
    lab.add_source([*questions(10), *questions(3), {"conversations": []}])
    lab.tree["servers"]["generate"]["url"] = "http://127.0.0.1:9"
    assert lab.run("--dry-run") == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["pending"] == 8
    assert summary["sources"]["s"] == {
        "conversations": 14, "requests": 8, "rejected": {"duplicate": 3, "no_user_turn": 1, "held_out": 2},
    }  # fmt: skip
    assert not lab.stage.exists()


def test_a_broken_line_of_a_source_is_named_with_file_and_line(lab, caplog):
    caplog.set_level("INFO", "drafter")
    lab.add_source([*questions(5), "[]", "{broken"])
    assert lab.run("--dry-run") == 0
    assert f"prompts s: rejected: {lab.folder}/s.jsonl line 7: not JSON: Expecting property name" in caplog.text
    assert f"prompts s: rejected: {lab.folder}/s.jsonl line 6: not a JSON object" in caplog.text


def test_a_dry_run_tells_what_is_left_and_what_would_be_refused(lab, capsys):
    lab.add_source(questions(12))
    assert lab.run("--limit", "4") == 0
    assert lab.run("--dry-run") == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (summary["pending"], summary["findings"]) == (6, [])
    assert lab.run("--dry-run", "--set", "generate.top_p=0.9") == 0
    [finding] = json.loads(capsys.readouterr().out.splitlines()[-1])["findings"]
    assert "generate.top_p" in finding


def test_a_dry_run_names_what_is_missing(lab, capsys):
    lab.tree["prompts"] = [{"name": "gone", "path": str(lab.folder / "gone.jsonl")}]
    lab.tree["target"]["model"] = str(lab.folder / "nowhere")
    assert lab.run("--dry-run") == 0
    findings = " ".join(json.loads(capsys.readouterr().out)["findings"])
    assert "gone.jsonl" in findings
    assert "nowhere" in findings
    assert lab.run() == 2 and not lab.stage.parent.exists(), "a run that cannot begin leaves nothing"


def test_a_prompt_file_that_is_gone_after_a_run_is_a_finding_of_the_dry_run(lab, capsys):
    lab.add_source(questions(12))
    assert lab.run("--limit", "2") == 0
    lab.tree["prompts"][0]["path"] = str(lab.folder / "gone.jsonl")
    assert lab.run("--dry-run") == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert "gone.jsonl does not exist" in summary["refused"] and summary["findings"] == [summary["refused"]]


# ---- a served tiny Kimi: real reasoning parser, real template, random weights


class ServedLab(Lab):
    """A lab on a real server."""

    def __init__(self, folder: Path, served):
        super().__init__(folder, served.url)
        self.tree = yaml.safe_load(served.config.dump())
        self.tree["run"] = {"name": "r", "dir": str(folder / "runs")}
        self.tree["servers"]["generate"] = {"kind": "external", "url": served.url}
        self.tree["prompts"] = []
        self.tree["generate"] |= {"max_tokens": 40, "concurrency": 8, "temperature": 1.0}
        self.tree["acceptance"]["held_out"] = 1

    def tokenize(self, messages: list[dict] | None = None, **settings) -> list[int]:
        body = {"model": self.config.target.served_name, **({"messages": messages} if messages else {}), **settings}
        request = urllib.request.Request(
            self.config.servers.generate.url + "/tokenize",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.loads(reply.read())["tokens"]

    @property
    def asked(self) -> dict[str, dict]:
        return {record["row_id"]: record for record in files.read_jsonl(self.stage / run_files.PROMPTS)}


@pytest.fixture
def kimi(tiny_kimi_server, tmp_path):
    return ServedLab(tmp_path, tiny_kimi_server)


def test_prompts_are_prepared_without_a_server_and_read_once(lab, monkeypatch, capsys):
    lab.add_source(questions(9))
    assert lab.run("--prepare") == 0
    assert not lab.server.calls and lab.manifest["pending"] == 7
    monkeypatch.setattr(mix._Mix, "read", lambda self: pytest.fail("read twice"))
    assert lab.run() == 0
    assert len(lab.records) == 7 and lab.manifest["status"] == "complete"


@pytest.mark.vllm
def test_reasoning_of_a_served_kimi_is_captured_token_by_token(kimi):
    """Law 1, G05, G07, G10, T08 on the real thing: parser, template and ids as in the night."""
    kimi.tree["generate"]["max_tokens"] = most = 150
    kimi.add_source(questions(25, name="Why is the sky blue"))
    assert kimi.run() == 0
    assert len(kimi.records) == 24
    think, think_end = kimi.config.target.prompt_suffix[0], kimi.config.target.think_end
    for row_id, record in kimi.records.items():
        [[start, end]] = record["supervised"]
        ids, completion = record["input_ids"], record["input_ids"][start:end]
        assert ids[:start] == kimi.tokenize(kimi.asked[row_id]["messages"])
        assert ids[start - 1] == think
        assert end == len(ids)
        assert record["usage"]["completion_tokens"] == len(completion) <= most
        assert record["finish_reason"] == "stop" or len(completion) == most
        if think_end in completion:
            assert record["think_end"] == start + completion.index(think_end)
            assert record["flags"] in ([], ["special_in_text"])
        else:
            assert record["think_end"] is None
            # The parser also ends the reasoning at a tool call that the model opens without closing its thinking.
            cut = record["finish_reason"] == "length" and not record["content"]
            assert record["flags"][0] == ("cut_in_reasoning" if cut else "no_think_end")
            assert not record["content"] or "special_in_text" in record["flags"]
    thought = [record for record in kimi.records.values() if record["think_end"] is not None]
    assert len(thought) > 3
    assert any(record["reasoning"] for record in thought)
    assert kimi.manifest["facts"]["rows"]["all"]["reasoning_share"] > 0
    assert kimi.manifest["facts"]["generation"]["kv_cache_tokens"] >= 2000, "the server's own figure"


@pytest.mark.vllm
def test_a_served_kimi_in_instant_mode(kimi):
    """G11, G15: `thinking: false` takes effect, and the prompt ends with both thinking tokens."""
    target = kimi.tree["target"]
    target["chat_template_kwargs"] = {"thinking": False}
    kimi.add_source(questions(9))
    assert kimi.run() == 2  # the prompt ends with </think> now, and the config does not say so
    assert "target.prompt_suffix" in kimi.manifest["error"]
    target["prompt_suffix"] = [target["prompt_suffix"][0], target["think_end"]]
    kimi.tree["run"]["name"] = "r"
    shutil.rmtree(kimi.stage)
    assert kimi.run() == 0
    for record in kimi.records.values():
        start = record["supervised"][0][0]
        assert record["input_ids"][start - 2 : start] == target["prompt_suffix"]
        assert record["think_end"] >= start - 1


@pytest.mark.vllm
def test_turns_on_a_served_kimi_build_on_its_own_answers(kimi):
    """T08: every turn's ids are the served ones, the history as the template shows it."""
    kimi.add_source(questions(12, turns=3), turns="all")
    kimi.tree["generate"]["max_tokens"] = 200
    assert kimi.run() == 0
    second = [r for r in kimi.records.values() if kimi.asked[r["row_id"]]["turn"] > 0]
    assert second
    for record in second:
        line, messages = kimi.asked[record["row_id"]], []
        parent = line["parent"]
        for message in line["messages"]:
            messages.append(dict(message))
        while parent:
            gap = max(i for i, m in enumerate(messages) if m == prompts.OWN_ANSWER)
            messages[gap]["content"] = kimi.records[parent]["content"]
            parent = kimi.asked[parent]["parent"]
        start = record["supervised"][0][0]
        assert record["input_ids"][:start] == kimi.tokenize(messages)


@pytest.mark.vllm
def test_replayed_answers_on_a_served_kimi(kimi):
    """Only the answers are taught, up to <|im_end|>; the template's own empty thinking is not."""
    conversation = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one?"},
        {"role": "assistant", "content": "first"},
        {"role": "user", "content": "two?"},
        {"role": "assistant", "content": "second"},
    ]
    kimi.add_source([{"messages": conversation}, {"messages": conversation[1:]}], mode="replay", turns="all")
    assert kimi.run() == 0
    [record] = kimi.records.values()
    messages = kimi.asked[record["row_id"]]["messages"]
    assert record["input_ids"] == kimi.tokenize(messages, add_generation_prompt=False)
    stop = kimi.config.target.special_tokens["<|im_end|>"]
    spans = [record["input_ids"][start:end] for start, end in record["supervised"]]
    assert spans == [[*kimi.tokenize(prompt=text), stop] for text in ("first", "second")]


@pytest.mark.vllm
def test_a_replayed_answer_keeps_its_reasoning_on_a_served_kimi(kimi):
    asked = {"role": "user", "content": "one?"}
    answer = {"role": "assistant", "content": "first", "reasoning_content": "let me see"}
    kimi.add_source(
        [{"messages": [asked, answer]}, {"messages": [asked | {"content": "two?"}, answer]}], mode="replay"
    )
    assert kimi.run() == 0
    [record] = kimi.records.values()
    [[start, end]] = record["supervised"]
    ids, special = record["input_ids"], kimi.config.target.special_tokens
    wanted = [*kimi.tokenize(prompt="let me see"), special["</think>"], *kimi.tokenize(prompt="first")]
    assert ids[start:end] == [*wanted, special["<|im_end|>"]] and ids[start - 1] == special["<think>"]
    assert ids[record["think_end"]] == special["</think>"]


@pytest.mark.vllm
def test_tools_of_a_prompt_reach_a_served_kimi(kimi):
    """The template shows them although no tool parser runs."""
    tool = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": {"type": "object"}}}
    kimi.add_source([{"messages": [{"role": "user", "content": f"call {i}"}], "tools": [tool]} for i in range(3)])
    assert kimi.run() == 0
    for row_id, record in kimi.records.items():
        messages, start = kimi.asked[row_id]["messages"], record["supervised"][0][0]
        assert record["input_ids"][:start] == kimi.tokenize(messages, tools=[tool])
        assert record["input_ids"][:start] != kimi.tokenize(messages)


@pytest.mark.vllm
def test_replayed_answers_of_a_chatml_model_end_with_their_stop_token(generate_server, tmp_path):
    """The line break that the template puts behind <|im_end|> is never taught; nor is its own system prompt."""
    smollm2 = ServedLab(tmp_path, generate_server)
    turns = (("user", "one?"), ("assistant", "first"), ("user", "two?"), ("assistant", "second"))
    conversation = [{"role": role, "content": text} for role, text in turns]
    smollm2.add_source([{"messages": conversation}, {"messages": conversation[:2]}], mode="replay", turns="all")
    hold_out(smollm2)
    assert smollm2.run() == 0
    stop = smollm2.config.target.special_tokens["<|im_end|>"]
    [line_break] = smollm2.tokenize(prompt="\n", add_special_tokens=False)
    long = max(smollm2.records.values(), key=lambda record: len(record["input_ids"]))
    texts = [[*smollm2.tokenize(prompt=text, add_special_tokens=False), stop] for text in ("first", "second")]
    assert [long["input_ids"][start:end] for start, end in long["supervised"]] == texts
    assert [long["input_ids"][end] for _, end in long["supervised"]] == [line_break] * 2
    assert len(smollm2.records) == 2
