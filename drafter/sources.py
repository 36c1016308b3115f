"""Where conversations come from: files and the hub, read into one form, some of them drawn by content."""

import contextlib
import hashlib
import json
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from drafter import contracts
from drafter.config import Source
from drafter.errors import ConfigError, ResumableError, RowError

ROLES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "model": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool",
}  # fmt: skip
EXTRAS = ("name", "tool_calls", "tool_call_id")  # of a message, beside role and content


class BrokenLine(str):
    """The text of a line that is not JSON; `why` says what is wrong with it."""

    why: str


def read_conversation(record: Any) -> tuple[list[dict], list | None, str]:
    """Messages in OpenAI form, tools, and the default for `turns`: `first` for the open sets' schema, else `last`.

    Repairs, and nothing else: role spellings, outer white space, blank system prompts left out, assistant turns
    before the first user turn dropped, neighbouring user turns joined by a blank line.
    Raises RowError (`no_user_turn`, `bad_conversation`).
    """
    if isinstance(record, BrokenLine):
        raise RowError("bad_conversation", record.why)
    if not isinstance(record, dict):
        raise RowError("bad_conversation", "not a JSON object")
    if not record.keys() & {"messages", "conversations"}:
        raise RowError("no_user_turn", f"neither messages nor conversations, but {', '.join(map(str, record))}"[:200])
    turns = "last" if "messages" in record else "first"
    raw = record.get("messages" if turns == "last" else "conversations") or []
    if not isinstance(raw, list):
        raise RowError("bad_conversation", "messages are not a list")
    messages: list[dict] = []
    for entry in raw:
        message = _read_message(entry)
        previous = messages[-1]["role"] if messages else None
        role, content = message["role"], message["content"]
        if role == "system":
            if previous not in (None, "system"):
                raise RowError("bad_conversation", "a system prompt inside the conversation")
            if content:
                messages.append(message)
        elif previous in (None, "system") and role != "user":
            if role != "assistant":
                raise RowError("bad_conversation", f"begins with a {role} turn")
        elif role == "user" and previous == "user":
            messages[-1]["content"] = f"{messages[-1]['content']}\n\n{content}".strip()
        elif role == "assistant" and previous == "assistant":
            raise RowError("bad_conversation", "two assistant turns in a row")
        else:
            messages.append(message)
    users = [m["content"] for m in messages if m["role"] == "user"]
    if not any(users):
        raise RowError("no_user_turn", "nothing that a user says")
    if not all(users):
        raise RowError("bad_conversation", "a blank user turn")
    return messages, _read_tools(record.get("tools")), turns


def _read_message(entry: Any) -> dict:
    if not isinstance(entry, dict):
        raise RowError("bad_conversation", "a message that is not an object")
    spelling = entry.get("role", entry.get("from"))
    role = ROLES.get(spelling.strip().casefold()) if isinstance(spelling, str) else None
    if role is None:
        raise RowError("bad_conversation", f"unknown role {spelling!r}")
    content = entry.get("content", entry.get("value"))
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        content = "".join(part["text"] for part in content)
    if content is None:
        content = ""
    if not isinstance(content, str):
        raise RowError("bad_conversation", "content that is not text")
    message = {"role": role, "content": content.strip()}
    return message | {key: entry[key] for key in EXTRAS if entry.get(key)}


def _read_tools(tools: Any) -> list | None:
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError:
            raise RowError("bad_conversation", "tools are not JSON") from None
    if tools and not isinstance(tools, list):
        raise RowError("bad_conversation", "tools are not a list")
    return tools or None


Placed = tuple[str, Any]  # where a record is, for a person, and the record


def read_source(source: Source) -> Iterator[Placed]:
    """The source's records; a line that is not JSON comes as a BrokenLine, to be rejected by name.

    Raises ConfigError for what is not there, ResumableError when the hub does not answer.
    """
    if source.hub:
        return _read_hub(source)
    if not source.path.exists():
        raise ConfigError(f"prompts {source.name}: {source.path} does not exist")
    if source.path.is_dir() or source.path.suffix == ".parquet":
        return _read_parquet(source.path)
    return _read_lines(source.path)


def _read_lines(path: Path) -> Iterator[Placed]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):  # by line feed only: U+2028 is text
            if line.strip():
                try:
                    record = json.loads(line.rstrip())  # or what is cut off would be missed on the next line
                except json.JSONDecodeError as error:
                    record = BrokenLine(line.decode("utf-8", errors="replace"))
                    record.why = f"not JSON: {error.msg.removesuffix(' at')} at column {error.colno}"
                except (ValueError, RecursionError) as error:
                    record = BrokenLine(line.decode("utf-8", errors="replace"))
                    record.why = f"not JSON: {error}"
                yield f"{path} line {number}", record


def count(source: Source) -> int | None:
    """Conversations that a local source holds, whatever is wrong with them; None on the hub or where nothing is."""
    if not source.path or not source.path.exists():
        return None
    if source.path.is_dir() or source.path.suffix == ".parquet":
        return sum(table.metadata.num_rows for _, table in _tables(source.path))
    with open(source.path, "rb") as file:
        return sum(1 for line in file if line.strip())


def _read_parquet(path: Path) -> Iterator[Placed]:
    for file, table in _tables(path):
        records = (record for batch in table.iter_batches(batch_size=1024) for record in batch.to_pylist())
        with _readable(file):
            yield from ((f"{file} row {number}", record) for number, record in enumerate(records, 1))


def _tables(path: Path) -> Iterator[tuple[Path, Any]]:
    import pyarrow.parquet  # 0.3 s, only for those who need it

    for file in sorted(path.glob("*.parquet")) if path.is_dir() else [path]:
        with _readable(file):
            table = pyarrow.parquet.ParquetFile(file)
        yield file, table


@contextlib.contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, OSError) as error:  # pyarrow's own are both
        raise ConfigError(f"prompts: {file} cannot be read ({str(error).splitlines()[0]})") from None


def _read_hub(source: Source) -> Iterator[Placed]:
    import datasets  # 2 s, only for those who need it

    try:
        records = datasets.load_dataset(source.hub, revision=source.revision, split=source.split)
        yield from ((f"{source.hub} row {number}", record) for number, record in enumerate(records, 1))
    except (datasets.exceptions.DatasetNotFoundError, ValueError) as error:
        raise ConfigError(f"prompts {source.name}: {error}") from None
    except (OSError, TimeoutError) as error:  # the hub client's network errors are OSErrors
        copy = "without the hub, name a copy of it with the source's `path`"
        if datasets.config.HF_HUB_OFFLINE:
            raise ResumableError(
                f"prompts {source.name}: {source.hub} is not on this machine yet; 01b fetches it, or {copy}"
            ) from None
        raise ResumableError(f"prompts {source.name}: {source.hub} cannot be read now ({error}); {copy}") from None


def draw(read: Callable[[], Iterator[Placed]], count: int | None, seed: int) -> Iterator[Placed]:
    """`count` of the records, those with the smallest hashes under `seed`; all of them when there are fewer."""
    if count is None:
        yield from read()
        return
    keys = array("Q", (shuffle_key(seed, contracts.content_id(record)) for _, record in read()))
    limit = sorted(keys)[count - 1] if count < len(keys) else 2**64
    ties = count - sum(key < limit for key in keys)  # equal records have equal keys
    for key, placed in zip(keys, read(), strict=True):
        if key < limit:
            yield placed
        elif key == limit and ties > 0:
            ties -= 1
            yield placed


def shuffle_key(seed: int, identity: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {identity}".encode()).digest()[:8], "big")
