"""The rows of stage 02: which are requested, which are extracted, which are left, and whether they fit the disk."""

import contextlib
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafter import contracts, files, locks, run_files, text
from drafter.config import Config
from drafter.contracts import IndexEntry
from drafter.errors import ConfigError, ContractError, RowError
from drafter.extract import state_file, states
from drafter.generate import prompts, rows
from drafter.stage import say

DUPLICATE = "duplicate"  # reject reason of a row that occurs again in the shards
MERGE_SECONDS = 3600.0  # a merge stats every file, which takes minutes on a network file system


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """A row to extract, cut at `max_seq_len`; its token ids stay on disk."""

    row_id: str
    conv_id: str
    source: str
    tokens: int
    row_tokens: int
    supervised: list[list[int]]
    think_end: int | None
    digest: str  # of the ids after the cut
    file: Path
    offset: int  # of the row's line in `file`

    def input_ids(self) -> list[int]:
        with open(self.file, "rb") as file:
            file.seek(self.offset)
            return json.loads(file.readline())["input_ids"][: self.tokens]

    def entry(self, size: int) -> IndexEntry:
        return IndexEntry(
            row_id=self.row_id,
            conv_id=self.conv_id,
            source=self.source,
            tokens=self.tokens,
            row_tokens=self.row_tokens,
            supervised=self.supervised,
            think_end=self.think_end,
            bytes=size,
            digest=self.digest,
        )


@dataclass(frozen=True, slots=True)
class Rejected:
    row_id: str
    reason: str
    detail: str = ""

    def to_record(self) -> dict:
        return {"row_id": self.row_id, "reason": self.reason, "detail": self.detail}


def read_items(config: Config, limit: int | None = None) -> tuple[list[Item], list[Rejected]]:
    """Stage 01b's requested rows in order, cut for extraction, and the rows that cannot be extracted.

    A row that occurs several times is extracted once, from its first place. Raises ContractError on a broken row.
    """
    items: list[Item] = []
    rejected: list[Rejected] = []
    places: dict[str, str] = {}
    asked = prompts.requested_ids(config.stage_dir("01b_synthetic"))
    vocabulary = config.target.architecture.vocab_size
    for file in sorted(config.stage_dir("01b_synthetic").glob("shard-*.jsonl")):
        for offset, row in contracts.read_rows(file):
            if limit is not None and len(items) + len(rejected) >= limit:
                return items, rejected
            if asked is not None and row.row_id not in asked:
                continue
            rows.check_positions(row, config.target)
            try:
                if row.row_id in places:
                    raise RowError(DUPLICATE, f"{file.name} repeats the row; the one in {places[row.row_id]} is used")
                places[row.row_id] = file.name
                items.append(_cut(row, config.target.max_seq_len, vocabulary, file, offset))
            except RowError as error:
                rejected.append(Rejected(row.row_id, error.reason, error.detail))
    return items, rejected


def compare_with_manifest(manifest: dict, items: list[Item], rejected: list[Rejected]) -> None:
    """Compare all of stage 01b's rows with the count in its manifest. Raises ContractError when some are missing."""
    if manifest["status"] not in ("complete", "partial") or "out" not in manifest:
        say("01b_synthetic has not finished (status %s); run 02 again for its later rows", manifest["status"])
        return
    there = len(items) + sum(one.reason != DUPLICATE for one in rejected)
    if there < manifest["out"]:
        raise ContractError(
            f"the shards of 01b_synthetic hold {there} rows, its manifest.json counts {manifest['out']} (out): a "
            "shard is missing or was cut; run 01b_generate_synthetic.py, which generates the rows that are missing"
        )
    if there > manifest["out"]:
        say("01b_synthetic counts %d rows, its shards hold %d; all of them are used", manifest["out"], there)


def _cut(row: contracts.Row, max_seq_len: int, vocabulary: int, file: Path, offset: int) -> Item:
    ids = row.input_ids[:max_seq_len]
    supervised = contracts.cut(row.supervised, len(ids))
    if len(ids) < 3:
        raise RowError("too_short", f"{len(ids)} tokens")
    if not supervised:
        raise RowError("no_supervised_tokens", f"the first supervised token is at {row.supervised[0][0]}")
    if not 0 <= min(ids) <= max(ids) < vocabulary:
        raise RowError("bad_token_ids", f"ids from {min(ids)} to {max(ids)}, the vocabulary has {vocabulary}")
    return Item(
        row_id=row.row_id,
        conv_id=row.conv_id,
        source=row.source,
        tokens=len(ids),
        row_tokens=len(row.input_ids),
        supervised=supervised,
        think_end=row.think_end if row.think_end is not None and row.think_end < len(ids) else None,
        digest=states.ids_digest(ids),
        file=file,
        offset=offset,
    )


# Shards of hosts


@dataclass(frozen=True, slots=True)
class Share:
    """Part i of n of the rows, by their ids: hosts that share a file system work on disjoint rows."""

    index: int = 1
    of: int = 1

    @classmethod
    def parse(cls, text: str) -> "Share":
        if not re.fullmatch("[0-9]{1,6}/[0-9]{1,6}", text):
            raise ConfigError(f"--shard {text}: write it as i/n")
        index, of = map(int, text.split("/"))
        if not 1 <= index <= of:
            raise ConfigError(f"--shard {text}: i must be between 1 and {of}")
        return cls(index, of)

    def __contains__(self, row_id: str) -> bool:
        return zlib.crc32(row_id.encode()) % self.of == self.index - 1

    def __str__(self) -> str:
        return f"{self.index}of{self.of}"


# Published files


def journal_path(folder: Path, share: Share) -> Path:
    return folder / ".journal" / f"{share}.jsonl"


def extracted_rows(folder: Path, items: Iterable[Item]) -> dict[str, IndexEntry]:
    """Rows whose published file has the size that some journal lists for these token ids."""
    listed, sizes = _listed(folder), _sizes(folder)
    found = {}
    for item in items:
        path = folder / contracts.states_path(item.row_id)
        records, size = listed.get(item.row_id, set()), sizes.get(path.name)
        # Files for different ids can have the same size, so if hosts disagree the file itself decides.
        if size is not None and (size, item.digest) in records and (len(records) == 1 or _holds_ids(path, item)):
            found[item.row_id] = item.entry(size)
    return found


def _listed(folder: Path) -> dict[str, set[tuple[int, str]]]:
    """(size, digest) of each row's file, from the last record in each host's journal."""
    listed: dict[str, set[tuple[int, str]]] = {}
    for path in sorted(folder.glob(".journal/*.jsonl")):
        try:
            records = files.read_jsonl(path, journal=True, row_id=str, bytes=int, digest=str)
            last = {r["row_id"]: (r["bytes"], r["digest"]) for r in records}
        except ContractError as error:
            raise ContractError(
                f"{error}; remove {path.name}, and the next run checks the files themselves"
            ) from None
        for row_id, record in last.items():
            listed.setdefault(row_id, set()).add(record)
    return listed


def _holds_ids(path: Path, item: Item) -> bool:
    try:
        return states.ids_digest(states.read_header(path).token_ids) == item.digest
    except (FileNotFoundError, ContractError):
        return False


def _files(folder: Path) -> Iterator[os.DirEntry]:
    for entry in os.scandir(folder) if folder.exists() else ():
        if len(entry.name) == 2 and entry.is_dir():
            yield from os.scandir(entry.path)


def _sizes(folder: Path) -> dict[str, int]:
    """Bytes of the published files, by name."""
    sizes = {}
    for file in _files(folder):
        if file.name.endswith(".safetensors"):
            with contextlib.suppress(FileNotFoundError):  # removed by another host meanwhile
                sizes[file.name] = file.stat().st_size
    return sizes


class Outdated(RowError):
    """The file belongs to this row but holds other token ids: cut at another length, or generated again since."""


def check_row_header(config: Config, item: Item, path: Path) -> None:
    """Compare a file's header with its row. Raises Outdated, RowError, ContractError or FileNotFoundError."""
    header, target = states.read_header(path), config.target
    hidden, model = target.architecture.hidden_size, files.fingerprint_path(target.model)
    question = target.layer_ids, hidden, config.extract.dtype, model
    try:
        states.check_header(header, item.row_id, item.input_ids(), *question)
    except RowError as error:
        states.check_header(header, item.row_id, header.token_ids, *question)
        raise Outdated(error.reason, error.detail) from None


def check_file(config: Config, item: Item, path: Path) -> IndexEntry:
    """Compare every byte of a published file with its row. Raises as `check_row_header` does."""
    check_row_header(config, item, path)
    states.check_content(path)
    return item.entry(path.stat().st_size)


def adopt_files(config: Config, folder: Path, todo: list[Item], share: Share) -> list[Item]:
    """Check files that are published but in no journal (after a kill); return the rows that are still to do.

    Correct files are added to the journal. Others keep their name until the new file replaces them.
    """
    left, sizes = [], _sizes(folder)
    with files.Journal(journal_path(folder, share)) as journal:
        for item in todo:
            path = folder / contracts.states_path(item.row_id)
            if path.name in sizes:
                try:
                    journal.append(check_file(config, item, path).to_record())
                    continue
                except (FileNotFoundError, Outdated):
                    pass
                except (RowError, ContractError) as error:
                    say("%s is extracted again: %s", item.row_id, error)
            left.append(item)
        files.sync_file_system(folder)
    return left


def outdated_rows(config: Config, folder: Path, todo: list[Item]) -> dict[Item, int]:
    """Rows whose file holds other token ids than they have now, with the file's size; reads headers only."""
    found, sizes = {}, _sizes(folder)
    for item in todo:
        path = folder / contracts.states_path(item.row_id)
        if path.name in sizes:
            try:
                check_row_header(config, item, path)
            except Outdated:
                found[item] = sizes[path.name]
            except (RowError, ContractError, FileNotFoundError):
                pass
    return found


def remove_unpublished(folder: Path, share: Share) -> int:
    """Remove this share's unpublished files, which a crash left; returns their number."""
    stray = [f for f in _files(folder) if not f.name.endswith(".safetensors") and f.name.partition(".")[0] in share]
    for file in stray:
        Path(file.path).unlink(missing_ok=True)
    return len(stray)


@contextlib.contextmanager
def locked_share(folder: Path, share: Share, who: str = "", reads: Iterable[Path] = ()) -> Iterator[None]:
    """Hold this share's lock: one client a share, one value of n at a time, no reader. Raises ConfigError.

    Temporary files of killed calls are removed unless another share is running.
    """
    with contextlib.ExitStack() as stack:
        others = [other for other in folder.glob(f"{locks.SHARES}/*") if not other.name.endswith(f"of{share.of}")]
        ours = [*others, folder / locks.SHARES / str(share)]
        for each in ours:
            stack.enter_context(locks.locked(each, who, reads))
        # Readers hold this lock while they read, and a share that starts now waits for it.
        with locks.locked(folder):
            if set(locks.shares_in_use(folder)) == set(ours):
                for place in (folder, *folder.glob(".*/")):
                    files.sweep(place, below=False)
        yield


@contextlib.contextmanager
def merge_lock(folder: Path) -> Iterator[None]:
    """Only one host at a time writes the common index and manifest. Raises ConfigError after MERGE_SECONDS."""
    if locks.in_use(folder / ".merge"):
        say("another host is writing the index of %s; waiting until it is done", folder)
    with locks.locked(folder / ".merge", seconds=MERGE_SECONDS):
        yield


def write_index(folder: Path, items: list[Item]) -> dict[str, IndexEntry]:
    """Write `index.jsonl` from the journals of all hosts, in the rows' order."""
    found = extracted_rows(folder, items)
    files.write_jsonl(folder / run_files.INDEX, (found[i.row_id].to_record() for i in items if i.row_id in found))
    return found


def index_changed(folder: Path, manifest: dict) -> bool:
    """Whether `index.jsonl` has other bytes than stage 02 recorded; an earlier version recorded nothing."""
    recorded, path = manifest["facts"].get("index_sha256"), folder / run_files.INDEX
    return recorded is not None and not (path.exists() and files.sha256_file(path) == recorded)


# The disk


def file_bytes(config: Config, item: Item, tokens: int, dtype: states.Dtype) -> int:
    target = config.target
    facts = state_file.file_metadata(
        item.row_id, target.served_name, target.layer_ids, dtype, files.fingerprint_path(target.model)
    )
    return states.file_bytes(tokens, target.architecture.hidden_size, facts)


def estimate_disk(config: Config, todo: list[Item], folder: Path, replaced: int = 0) -> dict[str, Any]:
    """Exact bytes that the rows in `todo` need, and free space; `advice` when they do not fit.

    `replaced`: bytes of existing files that will be replaced.
    """
    dtype = config.extract.dtype
    sizes = [file_bytes(config, item, item.tokens, dtype) for item in todo]
    free, reserve = files.free_bytes(folder), int(config.extract.reserve_gb * 1e9)
    found: dict[str, Any] = {
        "tokens": sum(item.tokens for item in todo),
        "bytes": sum(sizes),
        "free": free,
        "reserve": reserve,
    }
    room = free - reserve + replaced
    if found["bytes"] <= room:
        return found
    fitting, count = 0, 0
    for size in sizes:
        fitting += size
        count += fitting <= room
    ways = [f"--limit, for {count} of the {len(todo)} rows left"]
    if length := _longest(config, todo, room):
        ways.append(f"target.max_seq_len {length}")
    if dtype == "bf16" and sum(file_bytes(config, item, item.tokens, "fp8") for item in todo) <= room:
        ways.append("extract.dtype fp8 in another run.name")
    words = {key: text.size(found[key]) for key in ("bytes", "free", "reserve")}
    found["advice"] = (
        f"{len(todo)} rows of {found['tokens']} tokens take {words['bytes']}, but {folder} has {words['free']} free, "
        f"of which extract.reserve_gb keeps {words['reserve']}. Free some space, or use {', or '.join(ways)}"
    )
    return found


def _longest(config: Config, todo: list[Item], room: int) -> int | None:
    """The largest `max_seq_len` whose states fit."""
    low, high = 0, config.target.max_seq_len
    while low < high:
        middle = (low + high + 1) // 2
        need = sum(file_bytes(config, item, min(item.tokens, middle), config.extract.dtype) for item in todo)
        low, high = (middle, high) if need <= room else (low, middle - 1)
    return low if low >= 3 else None
