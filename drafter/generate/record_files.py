"""Files of records, read one by one in bounded memory: JSON Lines, a JSON array or Parquet, compressed or not.

The form is recognised by the file's first bytes, so its name does not matter.
"""

import bz2
import codecs
import contextlib
import gzip
import io
import json
import lzma
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from drafter import user_files
from drafter.errors import ConfigError, StageError
from drafter.generate.conversations import BrokenLine

LINE_BYTES = 64 * 2**20  # a longer record is not a conversation
CHUNK = 2**16  # characters read at once from an array
BATCH = 1024  # records
SPACE = re.compile(r"[ \t\r\n]*")
PARQUET = b"PAR1"
TEXT_NAMES = {".csv", ".tsv", ".txt", ".md"}  # of files that often are no JSON Lines
OTHERS = {b"PK\x03\x04": "a zip archive: unpack it", b"\x89HDF": "an HDF5 file", b"SQLite": "an SQLite file"}


class Opened(NamedTuple):
    kind: str  # "JSON Lines", "a JSON array", "Parquet"
    form: str  # the same with compression and encoding, for messages
    stream: Any  # bytes in UTF-8, or text of another encoding


def read_records(path: Path) -> Iterator[tuple[str, Any]]:
    """Records with their places in the file; a line that is not JSON is a BrokenLine.

    Raises ConfigError for a file that cannot be read, or only up to some place.
    """
    with _opened(path) as opened:
        reader = {"Parquet": _read_parquet, "a JSON array": read_array, "JSON Lines": read_lines}[opened.kind]
        yield from reader(path, opened.stream)


def file_form(path: Path) -> str:
    """The file's form, for messages. Raises ConfigError."""
    with _opened(path) as opened:
        return opened.form


def count_records(path: Path) -> int:
    """Number of records in the file, broken ones included. Raises ConfigError."""
    with _opened(path) as opened:
        if opened.kind == "Parquet":
            import pyarrow.parquet

            return pyarrow.parquet.ParquetFile(opened.stream).metadata.num_rows
        if opened.kind == "a JSON array":
            return sum(1 for _ in read_array(path, opened.stream))
        return sum(1 for _, line in _lines(opened.stream) if line is None or line.strip())


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Opened]:
    with one_line_errors(path), contextlib.ExitStack() as held:
        file = held.enter_context(_open(path))
        yield _look(path, file, held)


@contextlib.contextmanager
def one_line_errors(path: Path) -> Iterator[None]:
    """Turn any error of a library that reads `path` into a ConfigError of one line."""
    try:
        yield
    except StageError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        kind = type(error).__name__
        raise ConfigError(f"prompts: {path} cannot be read ({f'{kind}: {reason}' if reason else kind})") from None


def _open(path: Path) -> BinaryIO:
    try:
        return user_files.open_regular(path)
    except ConfigError as error:
        raise ConfigError(f"prompts: {error}") from None


def _look(path: Path, file: BinaryIO, held: contextlib.ExitStack) -> Opened:
    head = _head(file)
    if head.startswith(PARQUET):
        return Opened("Parquet", "Parquet", file)
    for magic, what in OTHERS.items():
        if head.startswith(magic):
            raise ConfigError(f"prompts: {path} is {what}; use JSON Lines, a JSON array or Parquet")
    stream, packing = _unpacked(file, head, held)
    head = _head(stream)
    encoding = json.detect_encoding(head)
    words = [packing] if packing else []
    if head.startswith(codecs.BOM_UTF8):
        stream.read(len(codecs.BOM_UTF8))
        head = head[len(codecs.BOM_UTF8) :]
    elif not encoding.startswith("utf-8"):
        words.append(encoding.upper())
        stream = held.enter_context(io.TextIOWrapper(stream, encoding, newline="\n"))
        head = head.decode(encoding, errors="ignore").encode()
    if TEXT_NAMES & set(path.suffixes) and head.lstrip()[:1] not in (b"{", b"["):
        raise ConfigError(
            f"prompts: {path} is CSV or plain text, which is not read; use JSON Lines, a JSON array or Parquet"
        )
    kind = "a JSON array" if head.lstrip().startswith(b"[") else "JSON Lines"
    return Opened(kind, ", ".join([kind, *words]), stream)


def _head(stream: Any) -> bytes:
    return stream.peek(256)[:256]


def _unpacked(file: BinaryIO, head: bytes, held: contextlib.ExitStack) -> tuple[Any, str]:
    if head.startswith(b"\x1f\x8b"):
        return held.enter_context(gzip.open(file)), "gzip"
    if head.startswith(b"BZh"):
        return held.enter_context(bz2.open(file)), "bzip2"
    if head.startswith(b"\xfd7zXZ\x00"):
        return held.enter_context(lzma.open(file)), "xz"
    if head.startswith(b"\x28\xb5\x2f\xfd"):
        import pyarrow

        return held.enter_context(io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"))), "zstd"
    return file, ""


def _lines(stream: Any) -> Iterator[tuple[int, Any]]:
    """Numbered lines, split at line feeds only (U+2028 is text); None for a line beyond LINE_BYTES."""
    number = 0
    while line := stream.readline(LINE_BYTES):
        number += 1
        whole = True
        while len(line) == LINE_BYTES and line[-1] not in ("\n", 10):
            whole, line = False, stream.readline(LINE_BYTES)
        yield number, line if whole else None


def read_lines(path: Path, stream: Any) -> Iterator[tuple[str, Any]]:
    for number, line in _lines(stream):
        if line is None:
            yield f"{path} line {number}", broken_line("", f"not JSON: longer than {LINE_BYTES // 2**20} MiB")
        elif line.strip():
            yield f"{path} line {number}", _parsed(line.rstrip())  # else an error at its end names the next line


def _parsed(line: bytes | str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        return broken_line(line, f"not JSON: {error.msg.removesuffix(' at')} at column {error.colno}")
    except (ValueError, RecursionError) as error:
        return broken_line(line, f"not JSON: {error}")


def broken_line(line: bytes | str, why: str) -> BrokenLine:
    result = BrokenLine(line if isinstance(line, str) else line.decode("utf-8", errors="replace"))
    result.why = why
    return result


def read_array(path: Path, stream: Any) -> Iterator[tuple[str, Any]]:
    """The items of one JSON array, parsed one by one. Raises ConfigError where it is broken."""
    text = stream if isinstance(stream, io.TextIOBase) else io.TextIOWrapper(stream, "utf-8", newline="\n")
    array = _Array(path, text)
    array.expect("[")
    while not array.at("]"):
        if array.items:
            array.expect(",")
            array.skip_space()
        line, item = array.line, array.item()
        yield f"{path} item {array.items} (line {line})", item
    array.expect("]")
    array.end()


class _Array:
    """An array's text and the current place in it; only one item and the chunk where it ends are in memory."""

    def __init__(self, path: Path, text: io.TextIOBase):
        self.path, self.items, self.line = path, 0, 1
        self._text, self._decoder = text, json.JSONDecoder()
        self._buffer, self._place, self._ended = "", 0, False

    def skip_space(self) -> None:
        while True:
            self._advance(len(cast(re.Match, SPACE.match(self._buffer, self._place))[0]))
            if self._place < len(self._buffer) or not self._more():
                return

    def at(self, mark: str) -> bool:
        self.skip_space()
        return self._buffer[self._place : self._place + 1] == mark

    def expect(self, mark: str) -> None:
        if not self.at(mark):
            there = self._buffer[self._place : self._place + 1]
            raise self._broken(self.line, f"{mark!r} expected, not {there!r}" if there else f"no {mark!r} at its end")
        self._advance(1)

    def end(self) -> None:
        self.skip_space()
        if self._place < len(self._buffer):
            raise self._broken(self.line, "text follows the array's end")

    def item(self) -> Any:
        while True:
            try:
                value, end = self._decoder.raw_decode(self._buffer, self._place)
                if end < len(self._buffer) or not self._more():  # a number might continue in the next chunk
                    break
            except json.JSONDecodeError as error:
                if len(self._buffer) - self._place > LINE_BYTES:
                    raise self._broken(self.line, f"an item longer than {LINE_BYTES // 2**20} MiB") from None
                line = self.line + self._buffer.count("\n", self._place, error.pos)
                if not self._more():
                    raise self._broken(line, error.msg.removesuffix(" at")) from None
            except RecursionError:
                raise self._broken(self.line, "nested too deeply") from None
        self.items += 1
        self._advance(end - self._place)
        return value

    def _advance(self, count: int) -> None:
        self.line += self._buffer.count("\n", self._place, self._place + count)
        self._place += count

    def _more(self) -> bool:
        """Read on and drop the text before the current place; False at the end of the file.

        The buffer doubles each time, so that parsing a long item again and again stays linear.
        """
        self._buffer, self._place = self._buffer[self._place :], 0
        chunk = "" if self._ended else self._text.read(max(CHUNK, len(self._buffer)))
        self._buffer, self._ended = self._buffer + chunk, not chunk
        return bool(chunk)

    def _broken(self, line: int, why: str) -> ConfigError:
        return ConfigError(
            f"prompts: {self.path} line {line}: the JSON array cannot be read beyond item {self.items} ({why}); "
            "correct it, or write one record a line"
        )


def _read_parquet(path: Path, stream: Any) -> Iterator[tuple[str, Any]]:
    import pyarrow.parquet  # takes 0.3 s

    table = pyarrow.parquet.ParquetFile(stream)
    records = (record for batch in table.iter_batches(batch_size=BATCH) for record in batch.to_pylist())
    for number, record in enumerate(records, 1):
        yield f"{path} row {number}", without_nulls(record)


def without_nulls(record: dict) -> dict:
    """The record without the nulls that Parquet adds to nested objects for keys that only other records have."""
    return {key: _without_nulls(value) for key, value in record.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value
