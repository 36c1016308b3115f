"""The prompts that drafters are measured on: the same for every drafter, and none of the training's."""

import json
from pathlib import Path

import pytest

from drafter import config, contracts
from drafter.acceptance import prompt_sets
from drafter.errors import ConfigError

LONG = "Name the three rivers that meet in the old town and say which of them is the longest one"  # 19 words


def conversation(text: str) -> dict:
    return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "An old answer."}]}


def write_jsonl(path: Path, records: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def run_config(tmp_path: Path, *overrides: str) -> config.Config:
    return config.load(config.ROOT / "configs/smollm2_cpu.yaml", [f"run.dir={tmp_path}", "run.name=r", *overrides])


def held_out(tmp_path: Path, texts: list[str]) -> None:
    records = [
        {
            "conv_id": contracts.conv_id([{"role": "user", "content": text}]),
            "source": "sample",
            "messages": [{"role": "user", "content": text}],
            "tools": None,
        }
        for text in texts
    ]
    write_jsonl(tmp_path / "r/01b_synthetic/held_out.jsonl", records)


def trained_on(tmp_path: Path, texts: list[str]) -> None:
    entries = [{"conv_id": contracts.conv_id([{"role": "user", "content": text}])} for text in texts]
    write_jsonl(tmp_path / "r/02_hidden_states/index.jsonl", entries)


def test_the_runs_own_held_out_conversations_are_the_default(tmp_path):
    held_out(tmp_path, [f"question {i}" for i in range(20)])
    sets = prompt_sets.read_prompt_sets(run_config(tmp_path, "acceptance.max_prompts=5"))
    assert list(sets) == ["held_out"]
    assert [r["messages"][-1]["content"] for r in sets["held_out"]] == [f"question {i}" for i in range(5)]
    assert (
        len(prompt_sets.read_prompt_sets(run_config(tmp_path, "acceptance.max_prompts=5"), limit=2)["held_out"]) == 2
    )


def test_files_the_user_names_are_sets_of_their_own_without_their_old_answers(tmp_path):
    path = write_jsonl(tmp_path / "mine.jsonl", [conversation(f"question {i}") for i in range(30)])
    source = f"{{name: mine, path: {path}, turns: first}}"
    asked = run_config(tmp_path, f"acceptance.prompts=[{source}]", "acceptance.max_prompts=7")
    sets = prompt_sets.read_prompt_sets(asked)
    assert {name: len(records) for name, records in sets.items()} == {"mine": 7}
    assert all([m["role"] for m in record["messages"]] == ["user"] for record in sets["mine"])
    assert sets == prompt_sets.read_prompt_sets(asked)


def test_the_draw_does_not_depend_on_the_files_order(tmp_path):
    records = [conversation(f"question {i}") for i in range(30)]
    chosen = []
    for order in (records, records[::-1]):
        path = write_jsonl(tmp_path / "mine.jsonl", order)
        asked = run_config(tmp_path, f"acceptance.prompts=[{{name: m, path: {path}}}]", "acceptance.max_prompts=7")
        chosen.append({record["conv_id"] for record in prompt_sets.read_prompt_sets(asked)["m"]})
    assert chosen[0] == chosen[1]


def test_a_prompt_that_was_trained_on_is_an_error(tmp_path):
    held_out(tmp_path, ["a", "b", "c"])
    trained_on(tmp_path, ["x", "b"])
    with pytest.raises(ConfigError, match="1 of 3 prompts of held_out are also in the training rows"):
        prompt_sets.read_prompt_sets(run_config(tmp_path))
    trained_on(tmp_path, ["x", "y"])
    assert prompt_sets.read_prompt_sets(run_config(tmp_path))


def test_a_record_that_is_no_prompt_is_the_users_error(tmp_path):
    path = write_jsonl(tmp_path / "mine.jsonl", [{"messages": []}])
    with pytest.raises(
        ConfigError, match="acceptance.prompts mine: .*/mine.jsonl line 1 is not a prompt: no_user_turn"
    ):
        prompt_sets.read_prompt_sets(run_config(tmp_path, f"acceptance.prompts=[{{name: mine, path: {path}}}]"))


def test_no_prompts_is_one_line_that_says_what_to_do(tmp_path):
    with pytest.raises(ConfigError, match="run 01b_generate_synthetic.py, or set acceptance.prompts"):
        prompt_sets.read_prompt_sets(run_config(tmp_path))
    held_out(tmp_path, [])
    with pytest.raises(ConfigError, match="held_out is empty"):
        prompt_sets.read_prompt_sets(run_config(tmp_path))


def test_identity_is_what_was_asked(tmp_path):
    held_out(tmp_path, ["a", "b"])
    records = prompt_sets.read_prompt_sets(run_config(tmp_path))["held_out"]
    assert prompt_sets.prompts_fingerprint(records) == prompt_sets.prompts_fingerprint(
        [dict(r, source="other") for r in records]
    )
    assert prompt_sets.prompts_fingerprint(records) != prompt_sets.prompts_fingerprint(records[::-1])


def test_shared_runs_of_words_are_reported_and_short_prompts_cannot_tell(tmp_path):
    """The id differs, the question does not: spelling of case and marks, text before and after."""
    trained = write_jsonl(
        tmp_path / "prompts.jsonl",
        [{"messages": [{"role": "user", "content": f"Please answer: {LONG.upper()}!! And why?"}]}],
    )
    prompts = [LONG, "short", " ".join(f"word{i}" for i in range(40))]
    sets = {"s": [{"messages": [{"role": "user", "content": text}]} for text in prompts]}
    assert prompt_sets.ngram_overlap(sets, trained) == {"s": {"words": 13, "prompts": 1, "of": 3, "too_short": 1}}
    assert prompt_sets.ngram_overlap(sets, tmp_path / "nowhere") == {"s": None}


def test_the_sample_for_a_smoke_test_needs_no_run(tmp_path):
    records = prompt_sets.sample_prompts(run_config(tmp_path), 8)
    assert len(records) == 8
    assert all(record["messages"][-1]["role"] == "user" for record in records)


def test_a_set_that_is_cut_has_its_share_of_every_source(tmp_path):
    """Seam U5: the first so many were all of one source; the counts by source are in the record and on the page."""
    held_out(tmp_path, [f"question {i}" for i in range(20)])
    path = tmp_path / "r/01b_synthetic/held_out.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    write_jsonl(path, [record | {"source": "few" if i >= 15 else "many"} for i, record in enumerate(records)])
    sets = prompt_sets.read_prompt_sets(run_config(tmp_path, "acceptance.max_prompts=8"))
    assert [record["source"] for record in sets["held_out"]] == ["many"] * 6 + ["few"] * 2
    [described] = prompt_sets.describe_sets(sets, tmp_path / "nowhere")
    assert (described["prompts"], described["sources"]) == (8, {"few": 2, "many": 6})
