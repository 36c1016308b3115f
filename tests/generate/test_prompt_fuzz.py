"""Prompt files of random damage: every one is read, or refused in one line that names file, line and field."""

import contextlib
import gzip
import json
import random

import pyarrow.parquet
import pytest

from drafter import files, run_files
from drafter.config import Source
from drafter.errors import ConfigError, StageError
from drafter.generate import prompts, sources
from drafter.generate.conversations import OWN_ANSWER
from drafter.generate.mix import materialise
from tests.generate.test_mix import good, run_config, write

VALUES = [
    None,
    True,
    0,
    -1,
    1.5,
    "",
    "text",
    "\ud800",
    "\0",
    [],
    [[]],
    {},
    {"role": "user"},
    ["text"],
    10**400,
    "x" * 5000,
]
KEYS = ["messages", "conversations", "prompt", "question", "instruction", "input", "turns", "system", "tools",
        "images", "role", "from", "content", "value", "function", "name", "arguments", "tool_calls", "id", "type",
        "text"]  # fmt: skip


def damaged(dice: random.Random, value, depth: int = 0):
    """The value with some of its parts replaced, dropped, doubled or nested."""
    if depth > 6 or dice.random() < 0.12:
        return dice.choice(VALUES)
    if dice.random() < 0.03:
        return [value] if dice.random() < 0.5 else {dice.choice(KEYS): value}
    if isinstance(value, dict):
        result = {
            (dice.choice(KEYS) if dice.random() < 0.08 else key): damaged(dice, inner, depth + 1)
            for key, inner in value.items()
            if dice.random() > 0.05
        }
        return result | ({dice.choice(KEYS): dice.choice(VALUES)} if dice.random() < 0.1 else {})
    if isinstance(value, list):
        return [damaged(dice, inner, depth + 1) for inner in value for _ in range(dice.choice([1, 1, 1, 2]))]
    return value


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
WHOLE = [
    {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": [{"type": "text", "text": "q"}]},
                  {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "4", "tool_call_id": "1"},
                  {"role": "user", "content": "so?"}], "tools": [{"type": "function", "function": {"name": "f"}}]},
    {"conversations": [{"from": "human", "value": "q"}, {"from": "function_call", "value": '{"name": "f"}'},
                       {"from": "observation", "value": "4"}, {"from": "gpt", "value": "a"}],
     "tools": '[{"name": "f"}]'},
    {"prompt": "q", "system": "S"}, {"instruction": "do", "input": "x", "output": "y"}, {"turns": ["q1", "q2"]},
    {"prompt": [{"role": "user", "content": "q"}], "tools": [{"name": "f", "parameters": {}}]},
]  # fmt: skip


@pytest.mark.parametrize("turns", [None, "first", "last", "all"])
@pytest.mark.parametrize("mode", ["regenerate", "replay"])
def test_damaged_records_are_requests_or_named_rejections(tmp_path, turns, mode):
    """Seam B08, B13, B21: types, depth and names at random never end in a traceback."""
    dice = random.Random(f"{turns} {mode}")
    records = [damaged(dice, dice.choice(WHOLE)) for _ in range(600)]
    fine = [{"question": f"why {i}", "answer": "a"} for i in range(5)]  # first: a file that begins with [ is an array
    write(tmp_path / "good.jsonl", [{"question": f"{i}?", "answer": "a"} for i in range(5)])
    write(tmp_path / "s.jsonl", [*fine, *map(json.dumps, records)])
    strange = {"name": "s", "max_bad_share": 1.0, "mode": mode} | ({"turns": turns} if turns else {})
    names = [{"name": "good"}, strange]
    meta = materialise(run_config(tmp_path, *names), tmp_path / "out")
    broken = prompts.unusable_conversations(prompts.read_rejections(tmp_path / "out"))
    assert 50 < len(broken) < 600 and meta["sources"]["s"]["conversations"] == 605
    for record in broken:
        assert record["detail"].startswith(f"{tmp_path}/s.jsonl line ") and len(record["detail"]) <= prompts.DETAIL
    for record in files.read_jsonl(tmp_path / "out" / run_files.PROMPTS):
        for message in record["messages"]:
            assert message["role"] in ("system", "user", "assistant", "tool")
            assert isinstance(message["content"], str) or message == OWN_ANSWER
        for tool in record["tools"] or []:
            assert tool["type"] == "function" and isinstance(tool["function"]["name"], str)


@pytest.mark.parametrize("form", ["jsonl", "json", "gz", "utf16", "parquet"])
def test_damaged_files_are_read_or_refused_in_one_line(tmp_path, form):
    """Seam B14, B15, B16: bytes cut, flipped, doubled and zeroed at random never end in a traceback."""
    records, path, dice = good(40), tmp_path / "s.jsonl", random.Random(form)
    lines = "".join(json.dumps(record) + "\n" for record in records)
    write(tmp_path / "other.jsonl", good(30, "other"))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet")
    whole = {
        "jsonl": lines.encode(), "json": json.dumps(records, indent=1).encode(), "gz": gzip.compress(lines.encode()),
        "utf16": lines.encode("utf-16"), "parquet": (tmp_path / "a.parquet").read_bytes(),
    }[form]  # fmt: skip
    outcomes = set()
    for number in range(60):
        content = bytearray(whole)
        for _ in range(dice.randint(1, 4)):
            start = dice.randrange(len(content) + 1)
            end = min(len(content), start + dice.choice([1, 1, 2, 50, len(content)]))
            part = bytes(content[start:end])
            content[start:end] = dice.choice([b"", dice.randbytes(len(part)), b"\0" * len(part), part * 2])
        path.write_bytes(content)
        try:
            materialise(run_config(tmp_path, {"name": "other"}, {"name": "s"}), tmp_path / f"out{number}")
            outcomes.add("read")
        except StageError as error:
            assert isinstance(error, ConfigError)
            with contextlib.suppress(ConfigError):  # what the plan counts
                sources.count_records(Source(name="s", path=path))
            assert str(path) in str(error) and "\n" not in str(error) and len(str(error)) < 1500
            outcomes.add("refused")
    assert "refused" in outcomes
