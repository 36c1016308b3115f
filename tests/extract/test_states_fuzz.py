"""Damaged files of stage 02: each gives one line that names the file, whatever the damage."""

import json
import random
import struct
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

import pytest

from drafter import contracts, run_files
from drafter.errors import ContractError, RowError
from drafter.extract import stage as extract
from drafter.extract import states, worklist
from drafter.train import examples
from tests import captured

VALUES = (
    None, True, 0, -1, 1.5, 2**70, float("nan"), "", "x", "9" * 300, [], {}, [None], ["a", "b"], {"a": 1}, [[1, 2]],
)  # fmt: skip
DEEP = "[" * 20_000 + "]" * 20_000


def places(tree, at: tuple = ()) -> Iterator[tuple]:
    """Every key and index of a JSON tree."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield (*at, key)
        yield from places(value, (*at, key))


def damaged(tree: dict) -> Iterator[str]:
    """The tree as JSON, each time with one value of another kind, missing, or nested beyond reason."""
    for place in places(tree):
        for value in (*VALUES, KeyError, DEEP):
            copy = deepcopy(tree)
            node = copy
            for key in place[:-1]:
                node = node[key]
            if value is KeyError:
                del node[place[-1]]
            else:
                node[place[-1]] = "DEEP" if value is DEEP else value
            yield json.dumps(copy).replace('"DEEP"', DEEP)


def one_line(error: Exception, *named: str) -> None:
    text = str(error)
    assert len(text.splitlines()) == 1 and len(text) < 600, text[:2000]
    assert all(name in text for name in named), text


@pytest.fixture(params=["bf16", "fp8"])
def file(request, tmp_path) -> tuple[Path, list[int], str]:
    entry = captured.write_row(tmp_path, 1, 12, [[5, 12]], dtype=request.param)
    path = tmp_path / entry.path
    return path, states.read_header(path).token_ids.tolist(), request.param


def read(path: Path, ids: list[int], dtype: str) -> None:
    """As 02 and 04 read a file. Raises ContractError or RowError when it is not the row's."""
    header = states.read_header(path)
    states.check_header(header, captured.row_id(1), ids, captured.LAYER_IDS, captured.HIDDEN, dtype)
    states.check_content(path)


def read_by_itself(path: Path) -> None:
    """As the probe and the comparison of layers read a file."""
    found = states.read_states(path)
    assert found.layer_ids is not None and len(found.token_ids) == len(found.aux) == len(found.final)


def test_a_header_of_other_values_is_refused_in_one_line(file):
    """Seam I: types and depth."""
    path, ids, dtype = file
    whole = path.read_bytes()
    start = 8 + struct.unpack("<Q", whole[:8])[0]
    tree, body = json.loads(whole[8:start]), whole[start:]
    read(path, ids, dtype)
    read_by_itself(path)
    for text in damaged(tree):
        if json.loads(text) == tree if len(text) < 10_000 else False:
            continue
        path.write_bytes(struct.pack("<Q", len(text)) + text.encode() + body)
        with pytest.raises((ContractError, RowError)) as caught:
            read(path, ids, dtype)
        one_line(caught.value, *([path.name] if caught.type is ContractError else []))
        try:
            read_by_itself(path)
        except ContractError as error:
            one_line(error)


def test_a_file_of_other_bytes_is_refused_in_one_line(file):
    """Seam I: size and truncation."""
    path, ids, dtype = file
    whole = path.read_bytes()
    choose = random.Random(0)
    lengths = (0, 7, 8, len(whole), 2**20, 2**31, 2**63, 2**64 - 1)
    changed = [struct.pack("<Q", length) + whole[8:] for length in lengths]
    changed += [whole[: choose.randrange(len(whole))] for _ in range(60)] + [whole + b"\0", whole * 2]
    for _ in range(100):
        bytes_ = bytearray(whole)
        bytes_[choose.randrange(1024)] = choose.randrange(256)
        changed.append(bytes(bytes_))
    for content in changed:
        if content == whole:
            continue
        path.write_bytes(content)
        with pytest.raises((ContractError, RowError)) as caught:
            read(path, ids, dtype)
        one_line(caught.value)


def lines_of(record: dict) -> Iterator[bytes]:
    """A JSONL file's content: a good line, then a damaged one."""
    good = json.dumps(record)
    for text in (*damaged(record), "null", "3", '"x"', "[]", "{}", "{", DEEP, good[:-3]):
        yield f"{good}\n{text}\n".encode()
    yield good.encode() + b"\n\xff\xfe\n"
    yield good.encode() + b"\n" + good.encode()[:-5]  # cut


def test_a_damaged_index_is_refused_or_read_as_it_is(tmp_path):
    """Seam I: what 04 reads of 02."""
    entry = captured.write_row(tmp_path, 1, 12, [[5, 9], [10, 12]], think_end=7)
    other = captured.row_id(2)
    refused = 0
    for content in lines_of(entry.to_record() | {"row_id": other}):
        (tmp_path / run_files.INDEX).write_bytes(content)
        try:
            for found in examples.read_index(tmp_path):
                assert all(0 <= start < end <= found.tokens for start, end in found.supervised)
                assert isinstance(found.row_id, str) and isinstance(found.path, Path)
        except ContractError as error:
            refused += 1
            one_line(error, str(tmp_path / run_files.INDEX))
    assert refused > 100


def test_a_damaged_journal_is_refused_by_name_or_counts_for_nothing(tmp_path):
    """Seam I: what the next run of 02 reads of the last one."""
    entry = captured.write_row(tmp_path, 1, 12, [[5, 12]])
    path = tmp_path / ".journal/1of1.jsonl"
    path.parent.mkdir()
    item = worklist.Item(
        row_id=entry.row_id, conv_id="c", source="s", tokens=12, row_tokens=12, supervised=[[5, 12]], think_end=None,
        digest=states.ids_digest(states.read_header(tmp_path / entry.path).token_ids), file=tmp_path, offset=0,
    )  # fmt: skip
    whole = entry.to_record() | {"digest": item.digest}
    path.write_text(json.dumps(whole) + "\n")
    assert list(worklist.extracted_rows(tmp_path, [item])) == [item.row_id]
    refused = 0
    for content in lines_of(whole):
        path.write_bytes(content)
        try:
            worklist.extracted_rows(tmp_path, [item])
        except ContractError as error:
            refused += 1
            one_line(error, str(path), "remove")
    assert refused > 20


def test_a_damaged_list_of_rejected_rows_is_refused_by_name(tmp_path):
    """Seam I"""
    path, refused = tmp_path / "rejected.jsonl", 0
    for content in lines_of({"row_id": "a" * 32, "reason": "bad_states", "detail": "x"}):
        path.write_bytes(content)
        try:
            assert all(one["reason"] in contracts.REJECT_REASONS for one in extract.read_rejected(path))
        except ContractError as error:
            refused += 1
            one_line(error, str(path))
    assert refused > 20
