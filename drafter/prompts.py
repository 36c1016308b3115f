"""Prompt sources -> requests with content ids, materialised once to a local file.

Everything is chosen and ordered by content hashes under the run's seed, so neither the order of a source nor the
order of the sources matters, a larger count contains the smaller one, and resuming needs no position.
"""

import hashlib
import heapq
import json
import mmap
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafter import artifacts, contracts
from drafter.config import Config, Source
from drafter.errors import ConfigError, ResumableError, RowError

ROLES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "model": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool",
}  # fmt: skip
EXTRAS = ("name", "tool_calls", "tool_call_id")  # of a message, beside role and content
OWN_ANSWER = {"role": "assistant", "content": None}  # stands for what the model will have answered by then

PROMPTS, HELD_OUT, REJECTED, META = "prompts.jsonl", "held_out.jsonl", "rejected.jsonl", "prompts.json"


@dataclass(frozen=True, slots=True)
class Request:
    """One row to be: messages to answer (`regenerate`), or a conversation to keep (`replay_last`, `replay_all`).

    `turn` counts user turns from 0. `parent` is the row whose answer this request's last OWN_ANSWER stands for.
    """

    row_id: str
    parent: str | None
    conv_id: str
    source: str
    turn: int
    mode: str
    messages: list[dict]
    tools: list | None

    def to_record(self) -> dict:
        return contracts.shallow(self)


# ---- conversations


def read_conversation(record: Any) -> tuple[list[dict], list | None, str]:
    """Messages in OpenAI form, tools, and the default for `turns`: `first` for the open sets' schema, else `last`.

    Repairs, and nothing else: role spellings, outer white space, blank system prompts left out, assistant turns
    before the first user turn dropped, neighbouring user turns joined by a blank line.
    Raises RowError (`no_user_turn`, `bad_conversation`).
    """
    if not isinstance(record, dict):
        raise RowError("bad_conversation", "not a JSON object")
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
        raise RowError("no_user_turn")
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


def requests_of(record: Any, source: Source, template_kwargs: dict) -> list[Request]:
    """The requests one conversation gives under its source's `turns` and `mode`. Raises RowError."""
    messages, tools, default_turns = read_conversation(record)
    turns = source.turns or default_turns
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if source.mode == "replay":
        made = [_replayed(messages, users, turns)]
    elif turns == "first":
        made = [("regenerate", 0, messages[: users[0] + 1])]
    elif turns == "last":
        made = [("regenerate", len(users) - 1, messages[: users[-1] + 1])]
    elif any(message["role"] == "tool" for message in messages):
        raise RowError("bad_conversation", "tool results answer calls that the model may not make: use turns: last")
    else:
        own = [OWN_ANSWER if message["role"] == "assistant" else message for message in messages]
        made = [("regenerate", turn, own[: user + 1]) for turn, user in enumerate(users)]
    conv_id = contracts.conv_id(messages)
    result: list[Request] = []
    for mode, turn, sent in made:
        row_id = contracts.row_id(sent, tools, template_kwargs, mode)
        parent = result[-1].row_id if result else None
        result.append(Request(row_id, parent, conv_id, source.name, turn, mode, sent, tools))
    return result


def _replayed(messages: list[dict], users: list[int], turns: str) -> tuple[str, int, list[dict]]:
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i > users[0]]
    if not answers:
        raise RowError("bad_conversation", "no answer to keep")
    end = answers[0] if turns == "first" else answers[-1]
    turn = sum(user < end for user in users) - 1
    return "replay_all" if turns == "all" else "replay_last", turn, messages[: end + 1]


# ---- sources


def read_source(source: Source) -> Iterator[Any]:
    """The source's records; a line that is not JSON comes as its text, to be rejected by name.

    Raises ConfigError for what is not there, ResumableError when the hub does not answer.
    """
    if source.hub:
        return _read_hub(source)
    if not source.path.exists():
        raise ConfigError(f"prompts {source.name}: {source.path} does not exist")
    if source.path.is_dir() or source.path.suffix == ".parquet":
        return _read_parquet(source.path)
    return _read_lines(source.path)


def _read_lines(path: Path) -> Iterator[Any]:
    with open(path, "rb") as file:
        for line in file:  # by line feed only: U+2028 is text
            if line.strip():
                try:
                    yield json.loads(line)
                except ValueError:
                    yield line.decode("utf-8", errors="replace")


def _read_parquet(path: Path) -> Iterator[Any]:
    import pyarrow.parquet  # 0.3 s, only for those who need it

    for file in sorted(path.glob("*.parquet")) if path.is_dir() else [path]:
        for batch in pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=1024):
            yield from batch.to_pylist()


def _read_hub(source: Source) -> Iterator[Any]:
    import datasets  # 2 s, only for those who need it

    try:
        yield from datasets.load_dataset(source.hub, revision=source.revision, split=source.split)
    except (OSError, TimeoutError) as error:  # the hub client's network errors are OSErrors
        raise ResumableError(f"prompts {source.name}: {source.hub} cannot be read now ({error})") from None


def draw(read: Callable[[], Iterator[Any]], count: int | None, seed: int) -> Iterator[Any]:
    """`count` of the records, those with the smallest hashes under `seed`; all of them when there are fewer."""
    if count is None:
        yield from read()
        return
    keys = array("Q", (_shuffle_key(seed, contracts.content_id(record)) for record in read()))
    limit = sorted(keys)[count - 1] if count < len(keys) else 2**64
    ties = count - sum(key < limit for key in keys)  # equal records have equal keys
    for key, record in zip(keys, read(), strict=True):
        if key < limit:
            yield record
        elif key == limit and ties > 0:
            ties -= 1
            yield record


def _shuffle_key(seed: int, identity: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {identity}".encode()).digest()[:8], "big")


# ---- materialising


def materialise(config: Config, folder: Path) -> dict:
    """Write the mix to `folder`: requests, held-out conversations, rejected rows. Nothing when it is there already.

    Returns per source how many `conversations` were drawn, `requests` kept, and what was `rejected`; and the
    `sha256` of the requests' file. The order of the requests is a shuffle in which a conversation's turns stay
    together. Conversations held out before stay held out.
    """
    if meta := current(config, folder):
        return meta
    folder.mkdir(parents=True, exist_ok=True)
    mix = _Mix(config, folder / f"{PROMPTS}.unsorted{artifacts.PART}")
    try:
        mix.read()
        with artifacts.publish(folder / PROMPTS) as part:
            mix.write(part, folder / HELD_OUT)
    finally:
        mix.close()
    _write_rejections(folder, mix.rejections + [r for r in read_rejections(folder) if r["at"] == "reply"])
    meta = {"key": _key(config), "sha256": artifacts.sha256_file(folder / PROMPTS), "sources": mix.table()}
    artifacts.write_json(folder / META, meta)
    return meta


def current(config: Config, folder: Path) -> dict | None:
    """What `materialise` returned for this very mix, when it lies in `folder`."""
    try:
        meta = json.loads((folder / META).read_text())
    except (FileNotFoundError, ValueError):
        return None
    return meta if meta["key"] == _key(config) and (folder / PROMPTS).exists() else None


def _key(config: Config) -> str:
    sources = [*config.prompts, *config.acceptance.prompts]
    question = {
        "schema": contracts.SCHEMA,
        "seed": config.run.seed,
        "prompts": config.value("prompts"),
        "held_out": [config.acceptance.held_out, config.value("acceptance.prompts")],
        "kwargs": config.target.chat_template_kwargs,
        "files": [artifacts.fingerprint_path(s.path) for s in sources if s.path],
    }
    return contracts.content_id(question)


def read_rejections(folder: Path) -> list[dict]:
    path = folder / REJECTED
    return list(artifacts.read_jsonl(path)) if path.exists() else []


def forget_rejections(folder: Path, reasons: frozenset[str]) -> None:
    """Give rows another chance whose replies were rejected for one of `reasons`."""
    before = read_rejections(folder)
    kept = [r for r in before if r["at"] == "prompts" or r["reason"] not in reasons]
    if len(kept) < len(before):
        _write_rejections(folder, kept)


def _write_rejections(folder: Path, records: list[dict]) -> None:
    with artifacts.publish(folder / REJECTED) as part, open(part, "wb") as file:
        file.writelines(map(_line, records))


def _line(record: dict) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode("ascii") + b"\n"


class _Mix:
    """All sources in one unsorted file, with as little in memory as ordering and holding out need."""

    def __init__(self, config: Config, unsorted: Path):
        self.config = config
        self.rejections: list[dict] = []
        self._path = unsorted
        self._file = open(unsorted, "w+b")  # noqa: SIM115 - closed by close()
        self._offsets, self._keys, self._turns = array("Q"), array("Q"), array("L")
        self._seen: set[bytes] = set()
        self._kept: dict[str, Counter] = {}

    def close(self) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)

    def read(self) -> None:
        for source in self.config.prompts:
            counts = self._kept.setdefault(source.name, Counter())
            for record in draw(lambda source=source: read_source(source), source.count, self.config.run.seed):
                counts["conversations"] += 1
                try:
                    requests = requests_of(record, source, self.config.target.chat_template_kwargs)
                except RowError as error:
                    self._reject(contracts.content_id(record), source.name, error.reason, error.detail)
                    continue
                for request in requests:
                    self._add(request, counts)

    def _add(self, request: Request, counts: Counter) -> None:
        identity = bytes.fromhex(request.row_id)
        if identity in self._seen:
            self._reject(request.row_id, request.source, "duplicate")
            return
        self._seen.add(identity)
        counts["requests"] += 1
        self._offsets.append(self._file.tell())
        self._keys.append(_shuffle_key(self.config.run.seed, request.conv_id))
        self._turns.append(request.turn)
        self._file.write(_line(request.to_record()))

    def _reject(self, row_id: str, source: str, reason: str, detail: str = "") -> None:
        self.rejections.append(rejection(row_id, source, reason, detail, at="prompts"))

    def write(self, part: Path, held_out_path: Path) -> None:
        """The requests in their final order to `part`, the held-out conversations to `held_out_path`."""
        order = sorted(range(len(self._offsets)), key=lambda i: (self._keys[i], self._turns[i]))
        held = self._held_out(held_out_path)
        self._file.flush()
        with open(part, "wb") as out:
            for index in order:
                self._file.seek(self._offsets[index])
                line = self._file.readline()
                record = json.loads(line)
                if record["conv_id"] not in held:
                    out.write(line)
                    continue
                self._kept[record["source"]]["requests"] -= 1
                self._reject(record["row_id"], record["source"], "held_out")
                if held[record["conv_id"]] is None:
                    held[record["conv_id"]] = _as_prompt(record)
            if held and not out.tell():
                raise ConfigError(f"acceptance.held_out takes all {len(held)} conversations; lower it or add prompts")
        with artifacts.publish(held_out_path) as held_part, open(held_part, "wb") as out:
            out.writelines(_line(record) for record in held.values() if record)

    def _held_out(self, path: Path) -> dict[str, dict | None]:
        """Ids of the conversations to hold out, with their record when it is known already."""
        acceptance, seed = self.config.acceptance, self.config.run.seed
        held: dict[str, dict | None] = {}
        for source in acceptance.prompts:
            for record in draw(lambda source=source: read_source(source), source.count, seed):
                try:
                    request = requests_of(record, source, self.config.target.chat_template_kwargs)[0]
                except RowError as error:
                    raise ConfigError(f"acceptance.prompts {source.name}: a record is no prompt: {error}") from None
                held.setdefault(request.conv_id, _as_prompt(request.to_record()))
        if acceptance.prompts:
            return held
        before = {r["conv_id"] for r in artifacts.read_jsonl(path)} if path.exists() else set()
        conversations = {self._conv_id(index) for index in range(len(self._offsets))}
        chosen = heapq.nsmallest(
            acceptance.held_out, conversations, key=lambda c: (c not in before, _shuffle_key(seed, f"held out {c}"))
        )
        return dict.fromkeys(chosen)

    def _conv_id(self, index: int) -> str:
        self._file.seek(self._offsets[index])
        return json.loads(self._file.readline())["conv_id"]

    def table(self) -> dict[str, dict]:
        rejected: dict[str, Counter] = {}
        for record in self.rejections:
            rejected.setdefault(record["source"], Counter())[record["reason"]] += 1
        return {
            name: {"conversations": 0, "requests": 0, **counts, "rejected": dict(rejected.get(name, {}))}
            for name, counts in self._kept.items()
        }


def _as_prompt(record: dict) -> dict:
    """A held-out conversation: the request's messages up to their last user turn."""
    last = max(i for i, message in enumerate(record["messages"]) if message["role"] == "user")
    return {
        "conv_id": record["conv_id"],
        "source": record["source"],
        "messages": record["messages"][: last + 1],
        "tools": record["tools"],
    }


def rejection(row_id: str, source: str, reason: str, detail: str, at: str) -> dict:
    """A line of rejected.jsonl; `at` says whether the prompt or its reply was at fault."""
    return {"row_id": row_id, "source": source, "reason": reason, "detail": detail, "at": at}


class Requests:
    """The materialised requests, in order, by index; in memory are offsets and ids alone."""

    def __init__(self, path: Path, limit: int | None = None):
        self.offsets = array("Q")
        self.ids: list[bytes] = []
        self.children: dict[bytes, list[int]] = {}
        self.parents: dict[int, bytes] = {}
        self._file = open(path, "rb")  # noqa: SIM115 - held for the life of the object
        offset = 0
        for line in self._file:
            if limit is not None and len(self.ids) >= limit:
                break
            record = json.loads(line)
            if record["parent"]:
                parent = bytes.fromhex(record["parent"])
                self.children.setdefault(parent, []).append(len(self.ids))
                self.parents[len(self.ids)] = parent
            self.offsets.append(offset)
            self.ids.append(bytes.fromhex(record["row_id"]))
            offset += len(line)
        size = self._file.seek(0, 2)
        self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Request:
        start = self.offsets[index]
        return Request(**json.loads(self._map[start : self._map.find(b"\n", start)]))

    def line(self, index: int, place: dict[bytes, int]) -> list[bytes]:
        """Ids of the rows whose answers the history needs, first turn first; `place` maps ids to indices."""
        result: list[bytes] = []
        while (parent := self.parents.get(index)) is not None:
            result.append(parent)
            index = place[parent]
        return result[::-1]

    def close(self) -> None:
        if self._map:
            self._map.close()
        self._file.close()
