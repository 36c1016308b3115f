"""The mix of a run: sources that lose too much, what is held out of each, how each was read."""

import json
import random
from pathlib import Path

import pytest

from drafter import config, files, run_files
from drafter.errors import ConfigError
from drafter.generate.mix import materialise, shares

CPU_CONFIG = config.ROOT / "configs/smollm2_cpu.yaml"


def good(count: int, name: str = "q") -> list[dict]:
    return [{"messages": [{"role": "user", "content": f"{name} {i}"}]} for i in range(count)]


def write(path: Path, records: list) -> None:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))


def run_config(folder: Path, *sources: dict, held_out: int = 4, **acceptance) -> config.Config:
    settings = json.dumps([{"path": str(folder / f"{s['name']}.jsonl"), **s} for s in sources])
    held = json.dumps({"held_out": held_out, **acceptance})
    return config.load(CPU_CONFIG, [f"prompts={settings}", f"acceptance={held}"])


def held_by_source(folder: Path) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for record in files.read_jsonl(folder / run_files.HELD_OUT):
        found.setdefault(record["source"], set()).add(record["conv_id"])
    return found


# ---- sources that lose too much


def test_a_source_that_is_rejected_whole_is_an_error(tmp_path):
    """Seam U3: 40 of 40 conversations refused, and the night trained on the other source."""
    write(tmp_path / "good.jsonl", good(30))
    write(tmp_path / "cooking.jsonl", [{"recipe": f"r {i}"} for i in range(40)])
    with pytest.raises(ConfigError) as error:
        materialise(run_config(tmp_path, {"name": "good"}, {"name": "cooking"}), tmp_path / "out")
    assert str(error.value) == (
        f"prompts cooking: no conversation can be used; all 40 are rejected, the first: "
        f"{tmp_path}/cooking.jsonl line 1: "
        "has none of the columns messages, conversations, conversation, prompt, question, instruction, turns; it has "
        "recipe; "
        "correct the source, or name its unusual columns with the source's `columns`; a line can be "
        '{"messages": [{"role": "user", "content": "..."}]} or {"prompt": "..."}; every form is in '
        "docs/data_formats.md"
    )
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(("bad", "fine", "passes"), [(1, 0, False), (2, 1, True), (3, 27, True), (4, 27, False)])
def test_more_bad_conversations_than_the_sources_share_are_an_error(tmp_path, bad, fine, passes):
    """Seam U3: up to two, or a tenth; the counts by reason and the first of them are named."""
    spoilt = ["{no json", *({"messages": []} for _ in range(bad - 1))]
    write(tmp_path / "other.jsonl", good(30, "other"))
    write(tmp_path / "s.jsonl", good(fine) + spoilt)
    asked = run_config(tmp_path, {"name": "other"}, {"name": "s"})
    if passes:
        assert materialise(asked, tmp_path / "out")["sources"]["s"]["conversations"] == bad + fine
        return
    with pytest.raises(ConfigError) as error:
        materialise(asked, tmp_path / "out")
    assert f"s.jsonl line {fine + 1}: not JSON" in str(error.value)
    if fine:
        assert (
            "4 of 31 conversations cannot be used (3 no_user_turn, 1 bad_conversation), more than the source's "
            in (str(error.value))
        )
        allowed = run_config(tmp_path, {"name": "other"}, {"name": "s", "max_bad_share": 0.2})
        assert materialise(allowed, tmp_path / "out")["sources"]["s"]["conversations"] == 31


def test_duplicates_are_no_bad_conversations(tmp_path):
    """Seam U3: a source whose questions another has too is fine."""
    write(tmp_path / "a.jsonl", good(30))
    write(tmp_path / "b.jsonl", good(30))
    table = materialise(run_config(tmp_path, {"name": "a"}, {"name": "b"}), tmp_path / "out")["sources"]
    assert table["b"] == {"conversations": 30, "requests": 0, "rejected": {"duplicate": 30}}


# ---- held out


def test_every_source_gives_its_share_of_the_held_out_conversations(tmp_path):
    """Seam U5: a drafter for cooking was measured on no cooking prompt."""
    for name, count in (("a", 30), ("b", 60), ("few", 3)):
        write(tmp_path / f"{name}.jsonl", good(count, name))
    sources = [{"name": name} for name in ("a", "b", "few")]
    meta = materialise(run_config(tmp_path, *sources, held_out=10), tmp_path / "out")
    assert meta["held_out"] == {"a": 3, "b": 6, "few": 1}
    assert {name: len(ids) for name, ids in held_by_source(tmp_path / "out").items()} == meta["held_out"]
    other = materialise(run_config(tmp_path, *sources[::-1], held_out=10), tmp_path / "other")
    assert held_by_source(tmp_path / "other") == held_by_source(tmp_path / "out")
    assert other["held_out"] == meta["held_out"]


def test_held_out_conversations_of_a_first_try_make_room_for_other_sources(tmp_path):
    """Seam U5: those chosen when a source was missing stayed, all of one source."""
    write(tmp_path / "a.jsonl", good(30, "a"))
    write(tmp_path / "b.jsonl", good(30, "b"))
    out = tmp_path / "out"
    assert materialise(run_config(tmp_path, {"name": "a"}, held_out=6), out)["held_out"] == {"a": 6}
    first = held_by_source(out)["a"]
    both = run_config(tmp_path, {"name": "a"}, {"name": "b"}, held_out=6)
    assert materialise(both, out)["held_out"] == {"a": 3, "b": 3}
    assert held_by_source(out)["a"] < first


def test_a_run_of_a_version_without_shares_keeps_its_held_out_conversations(tmp_path):
    """Seam U5: a finished run asked for two more rows, and 04 refused to go on with what it had trained."""
    for name in ("a", "b"):
        write(tmp_path / f"{name}.jsonl", good(30, name))
    out, both = tmp_path / "out", run_config(tmp_path, {"name": "a"}, {"name": "b"}, held_out=4)
    materialise(run_config(tmp_path, {"name": "a"}, held_out=4), out)  # all four of one source
    before = (out / run_files.HELD_OUT).read_bytes()

    def held_by_version_without_shares(requests_of_b: int) -> None:
        (out / run_files.HELD_OUT).write_bytes(before)
        sources = {"a": {"requests": 26, "rejected": {}}, "b": {"requests": requests_of_b, "rejected": {}}}
        files.write_json(out / run_files.PROMPTS_META, {"key": "0" * 32, "sha256": "", "sources": sources})

    held_by_version_without_shares(30)
    assert materialise(both, out)["held_out"] == {"a": 4}
    assert (out / run_files.HELD_OUT).read_bytes() == before
    held_by_version_without_shares(0)  # a source that it could not read
    assert materialise(both, out)["held_out"] == {"a": 2, "b": 2}


def test_a_question_in_two_sources_counts_for_one_whatever_their_order(tmp_path):
    """Seam U5"""
    write(tmp_path / "a.jsonl", good(20))
    write(tmp_path / "b.jsonl", good(40))
    names = [{"name": "a"}, {"name": "b"}]
    for folder, order in (("one", names), ("two", names[::-1])):
        materialise(run_config(tmp_path, *order, held_out=9), tmp_path / folder)
    assert set().union(*held_by_source(tmp_path / "one").values()) == set().union(
        *held_by_source(tmp_path / "two").values()
    )


@pytest.mark.parametrize("seed", range(20))
def test_shares_add_up_and_every_source_gets_one(seed):
    """Seam U5"""
    dice = random.Random(seed)
    sizes = {f"s{i}": dice.choice([1, 2, 5, 100, 5000]) for i in range(dice.randint(1, 6))}
    total = dice.randint(1, 60)
    found = shares(sizes, total)
    assert sum(found.values()) == min(total, sum(sizes.values()))
    assert all(0 <= found[name] <= size for name, size in sizes.items())
    if total >= 2 * len(sizes):
        assert all(found[name] for name, size in sizes.items() if size > 1)


def test_the_prompts_that_are_measured_on_are_counted_by_set(tmp_path):
    """Seam U5"""
    write(tmp_path / "s.jsonl", good(30))
    write(tmp_path / "e.jsonl", good(5, "e"))
    own = [{"name": "e", "path": str(tmp_path / "e.jsonl")}]
    assert materialise(run_config(tmp_path, {"name": "s"}, prompts=own), tmp_path / "out")["held_out"] == {"e": 5}


def test_another_folders_mix_is_followed_without_writing_there(tmp_path):
    """Seam U4: the dry run's scratch folder knew nothing of what was held out."""
    write(tmp_path / "s.jsonl", good(50))
    out, scratch = tmp_path / "out", tmp_path / "scratch"
    materialise(run_config(tmp_path, {"name": "s", "count": 10}), out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    planned = materialise(run_config(tmp_path, {"name": "s"}), scratch, earlier=out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert materialise(run_config(tmp_path, {"name": "s"}), out) == planned
    assert held_by_source(out) == held_by_source(scratch)


# ---- how it was read


def test_how_each_source_was_read_is_one_line_with_its_first_question(tmp_path):
    """Seam U3: what is read by itself is said."""
    write(tmp_path / "a.jsonl", [*good(3), *({"prompt": f"p {i}"} for i in range(9)), {"turns": ["x", "y"]}])
    write(tmp_path / "b.jsonl", [{"question": f"why {i} " + "so " * 99, "answer": "a"} for i in range(9)])
    read = materialise(run_config(tmp_path, {"name": "a"}, {"name": "b", "turns": "first"}), tmp_path / "out")["read"]
    assert read["a"] == (
        f"{tmp_path}/a.jsonl (JSON Lines), read by prompt, turns: last (9); messages, turns: last (3); "
        "turns, turns: all (1); the first: 'q 0'"
    )
    assert read["b"].startswith(
        f"{tmp_path}/b.jsonl (JSON Lines), read by question, turns: first; the first: 'why 0 so"
    )
    assert read["b"].endswith("(not read: answer)") and len(read["b"]) < len(str(tmp_path)) + 200
