"""Prompt files as people have them: packing, encodings, arrays, folders, and what cannot be read."""

import bz2
import gzip
import json
import lzma
import os
import threading

import pyarrow
import pyarrow.parquet
import pytest

from drafter.config import Source
from drafter.errors import ConfigError
from drafter.generate import record_files, sources

RECORDS = [{"messages": [{"role": "user", "content": f"Where is {i}? \u2028 \u00fc \U0001f600"}]} for i in range(7)]


def lines(records=RECORDS) -> bytes:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()


def source(path, **settings) -> Source:
    return Source(name="s", path=path, **settings)


def read(path, **settings) -> list:
    return [record for _, record in sources.read_source(source(path, **settings))]


def zstd(data: bytes) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as out:
        out.write(data)
    return sink.getvalue().to_pybytes()


ARRAY = json.dumps(RECORDS).encode()
PRETTY = json.dumps(RECORDS, indent=2, ensure_ascii=False)
ONE_A_LINE = b"[\n" + b",\n".join(json.dumps(record).encode() for record in RECORDS) + b"\n]\n"


@pytest.mark.parametrize(
    ("content", "form"),
    [
        (lines(), "JSON Lines"),
        (b"\xef\xbb\xbf" + lines(), "JSON Lines"),
        (lines()[:-1], "JSON Lines"),
        (ARRAY, "a JSON array"),
        (ONE_A_LINE, "a JSON array"),
        (b" \n" + PRETTY.encode() + b"\n", "a JSON array"),
        (b"\xef\xbb\xbf" + ARRAY, "a JSON array"),
        (PRETTY.encode("utf-16"), "a JSON array, UTF-16"),
        (lines().decode().encode("utf-16"), "JSON Lines, UTF-16"),
        (lines().decode().encode("utf-16-le"), "JSON Lines, UTF-16-LE"),
        (lines().decode().encode("utf-32"), "JSON Lines, UTF-32"),
        (gzip.compress(lines()), "JSON Lines, gzip"),
        (gzip.compress(ONE_A_LINE), "a JSON array, gzip"),
        (gzip.compress(lines().decode().encode("utf-16")), "JSON Lines, gzip, UTF-16"),
        (bz2.compress(lines()), "JSON Lines, bzip2"),
        (lzma.compress(lines()), "JSON Lines, xz"),
        (zstd(lines()), "JSON Lines, zstd"),
    ],
)
def test_the_same_records_are_read_from_every_form_whatever_the_name(tmp_path, content, form):
    """Seam B14, B15: a JSON array lost 19 of 20 records, gz and UTF-16 all of them."""
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    assert read(path) == RECORDS
    assert record_files.file_form(path) == form
    assert sources.count_records(source(path)) == len(RECORDS)


@pytest.mark.parametrize("size", [1, 3, 64, 10_000])
def test_an_array_is_read_alike_in_chunks_of_any_size(tmp_path, monkeypatch, size):
    """Seam B14: items, numbers and white space that a chunk cuts in two."""
    monkeypatch.setattr(record_files, "CHUNK", size)
    values = [*RECORDS, 12345, "a\nb", None, [], {"a": [1, 2]}]
    (tmp_path / "a.json").write_text("\n\n [ " + " ,\n ".join(json.dumps(value) for value in values) + "\n] \n")
    placed = list(record_files.read_records(tmp_path / "a.json"))
    assert [value for _, value in placed] == values
    assert [place for place, _ in placed[:2]] == [
        f"{tmp_path}/a.json item 1 (line 3)", f"{tmp_path}/a.json item 2 (line 4)"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b'[\n{"a": 1},\n{"a": }\n]', "a.json line 3: the JSON array cannot be read beyond item 1 (Expecting value)"),
        (b'[{"a": 1},\n{"a": 2}', "a.json line 2: the JSON array cannot be read beyond item 2 (no ',' at its end)"),
        (
            b'[{"a": 1}\n{"a": 2}]',
            "a.json line 2: the JSON array cannot be read beyond item 1 (',' expected",
        ),
        (b'[{"a": 1}]\n[{"a": 2}]', "a.json line 2: the JSON array cannot be read beyond item 1 (text follows"),
        (b"[" * 100_000, "a.json line 1: the JSON array cannot be read beyond item 0 (nested too deeply)"),
        (b'[{"a": "\xff"}]', "a.json cannot be read (UnicodeDecodeError"),
        (gzip.compress(lines(), mtime=0)[:-9], "a.json cannot be read (EOFError"),
        (gzip.compress(lines(), mtime=0)[:15] + b"\0" * 40, "a.json cannot be read ("),
        (lines().decode().encode("utf-16")[:-3], "a.json cannot be read (UnicodeDecodeError"),
        (b"PAR1" + b"\0" * 40, "a.json cannot be read (Arrow"),
        (b"PK\x03\x04" + b"\0" * 40, "a.json is a zip archive: unpack it"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line_with_file_and_place(tmp_path, content, why):
    """Seam B14, B15"""
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ConfigError) as error:
        read(tmp_path / "a.json")
    assert str(error.value).startswith(f"prompts: {tmp_path}/{why}")
    assert "\n" not in str(error.value) and len(str(error.value)) < 600


def test_a_line_without_end_does_not_fill_the_memory(tmp_path, monkeypatch):
    """Seam B15: one record longer than the bound is rejected by name, the next line is read."""
    monkeypatch.setattr(record_files, "LINE_BYTES", 100)
    for name, encoding in (("a.jsonl", "utf-8"), ("b.jsonl", "utf-16")):
        (tmp_path / name).write_bytes(("x" * 1000 + '\n{"a": 1}\n' + "y" * 250).encode(encoding))
        placed = list(record_files.read_records(tmp_path / name))
        assert [place.rpartition(" ")[2] for place, _ in placed] == ["1", "2", "3"]
        assert [getattr(record, "why", record) for _, record in placed] == [
            "not JSON: longer than 0 MiB", {"a": 1}, "not JSON: longer than 0 MiB"
        ]  # fmt: skip
        assert sources.count_records(source(tmp_path / name)) == 3
    (tmp_path / "c.json").write_text('[{"a": "' + "z" * 500_000 + '"}]')
    with pytest.raises(ConfigError, match="an item longer than"):
        read(tmp_path / "c.json")


def test_pipes_and_devices_are_refused_and_never_waited_for(tmp_path):
    """Seam B20: a named pipe blocked for ever, /dev/zero filled the memory."""
    os.mkfifo(tmp_path / "pipe.jsonl")
    for path, kind in ((tmp_path / "pipe.jsonl", "a named pipe"), ("/dev/zero", "a device")):
        for ask in (read, lambda path: sources.count_records(source(path))):
            with pytest.raises(ConfigError, match=f"prompts: {path} is {kind}"):
                ask(path)


# ---- folders


def parquet(path, records) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)


def test_a_folder_of_json_lines_is_read_in_the_order_of_its_names(tmp_path):
    """Seam B16"""
    (tmp_path / "b.jsonl").write_bytes(lines(RECORDS[3:]))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines(RECORDS[:3])))
    for other in ("README.md", ".a.jsonl.swp", "dataset_info.json"):
        (tmp_path / other).write_text("no data")
    assert read(tmp_path) == RECORDS
    assert sources.count_records(source(tmp_path)) == 7
    assert sources.source_text(source(tmp_path)) == f"{tmp_path}, 2 files (JSON Lines, gzip)"


def test_a_download_from_the_hub_is_read_by_split(tmp_path):
    """Seam B16: data/*.parquet held no conversation."""
    parquet(tmp_path / "data/train-00000-of-00002.parquet", RECORDS[:3])
    parquet(tmp_path / "data/train-00001-of-00002.parquet", RECORDS[3:])
    parquet(tmp_path / "data/test_sft-00000-of-00001.parquet", RECORDS[:1])
    (tmp_path / ".cache/huggingface").mkdir(parents=True)
    (tmp_path / ".cache/huggingface/train.jsonl").write_text("{}")
    assert read(tmp_path) == RECORDS
    assert read(tmp_path, split="test_sft") == RECORDS[:1]
    assert sources.source_text(source(tmp_path)) == f"{tmp_path}, 2 of 3 files, split train (Parquet)"
    with pytest.raises(ConfigError, match="has no file of split validation, only of test_sft, train; set"):
        read(tmp_path, split="validation")


@pytest.mark.parametrize("names", [("train.jsonl", "test.jsonl"), ("train/a.jsonl", "test/a.jsonl")])
def test_files_and_folders_that_are_called_after_splits_are_those(tmp_path, names):
    """Seam B16"""
    for name, records in zip(names, (RECORDS[:5], RECORDS[5:]), strict=True):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(lines(records))
    assert read(tmp_path) == RECORDS[:5]
    assert read(tmp_path, split="test") == RECORDS[5:]


def test_a_folder_that_datasets_saved_is_read_with_its_splits(tmp_path):
    """Seam B16: save_to_disk held no conversation."""
    import datasets

    saved = datasets.Dataset.from_list(RECORDS)
    saved.save_to_disk(str(tmp_path / "one"), num_shards=2)
    datasets.DatasetDict({"train": saved, "test": saved.select(range(2))}).save_to_disk(str(tmp_path / "two"))
    before = sorted(tmp_path.rglob("*"))
    assert read(tmp_path / "one") == read(tmp_path / "two") == RECORDS
    assert read(tmp_path / "two", split="test") == RECORDS[:2]
    assert [sources.count_records(source(tmp_path / name)) for name in ("one", "two")] == [7, 7]
    assert sources.source_text(source(tmp_path / "one")) == f"{tmp_path}/one (saved by `datasets`)"
    with pytest.raises(ConfigError, match="has no split dev, only train, test"):
        read(tmp_path / "two", split="dev")
    assert sorted(tmp_path.rglob("*")) == before  # reading writes nothing
    for damaged in ("state.json", "dataset_info.json", "data-00001-of-00002.arrow"):
        kept = (tmp_path / "one" / damaged).read_bytes()
        (tmp_path / "one" / damaged).write_bytes(kept[: len(kept) // 3])
        with pytest.raises(ConfigError, match=f"prompts: {tmp_path}/one cannot be read"):
            read(tmp_path / "one")
        (tmp_path / "one" / damaged).write_bytes(kept)


def test_columns_give_what_lines_give(tmp_path):
    """Seam B08, B16: Parquet fills the keys that one record's objects lack with null."""
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"side": {"type": "number"}}}}
    other = {"name": "g", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    records = [
        {"messages": [{"role": "user", "content": "q"}], "tools": [tool]},
        {"messages": [{"from": "human", "value": "q"}], "tools": [other]},
    ]
    parquet(tmp_path / "a.parquet", records)
    assert read(tmp_path / "a.parquet") == records


# ---- files that change


def test_a_file_that_grows_while_it_is_read_is_one_clear_line(tmp_path):
    """Seam L15: the two readings were zipped strictly, a traceback."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines())
    for count in (3, None):
        drawn = sources.draw(source(path, count=count), seed=0)
        next(drawn)
        with open(path, "ab") as file:
            file.write(lines())
        with pytest.raises(ConfigError, match="a.jsonl changed while it was read; wait until it is complete"):
            list(drawn)


def test_a_file_that_another_process_writes_all_the_time_never_ends_in_a_traceback(tmp_path):
    """Seam L15"""
    path, stop = tmp_path / "a.jsonl", threading.Event()
    path.write_bytes(lines() * 200)

    def write() -> None:
        with open(path, "ab", buffering=0) as file:
            while not stop.wait(0.001):
                file.write(lines()[:133])  # whole and torn lines

    writer = threading.Thread(target=write)
    writer.start()
    try:
        with pytest.raises(ConfigError, match="changed while it was read"):
            while True:
                list(sources.draw(source(path, count=1000), seed=0))
    finally:
        stop.set()
        writer.join()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("q.csv", b"id,prompt\n1,How long do I boil an egg?\n"),
        ("q.txt", b"How long do I boil an egg?\n"),
        ("q.csv.gz", gzip.compress(b"id,prompt\n1,Hello\n")),
    ],
    ids=["csv", "text", "gzip"],
)
def test_csv_and_plain_text_are_refused_by_naming_the_formats_that_are_read(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(
        ConfigError, match="CSV or plain text, which is not read; use JSON Lines, a JSON array or Par"
    ):
        read(tmp_path / name)
    (tmp_path / "jsonl.txt").write_bytes(b'{"a": 1}\n')
    assert len(read(tmp_path / "jsonl.txt")) == 1
