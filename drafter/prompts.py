"""Prompt sources -> requests with content ids, materialised once to a local file.

Everything is chosen and ordered by content hashes under the run's seed, so neither the order of a source nor the
order of the sources matters, a larger count contains the smaller one, and resuming needs no position.
"""

import heapq
import json
import mmap
from array import array
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafter import artifacts, contracts, sources
from drafter.config import Config, Source
from drafter.errors import ConfigError, RowError

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


def requests_of(record: Any, source: Source, template_kwargs: dict) -> list[Request]:
    """The requests one conversation gives under its source's `turns` and `mode`. Raises RowError."""
    messages, tools, default_turns = sources.read_conversation(record)
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
        same = meta["key"] == _key(config) and meta["sha256"] == artifacts.sha256_file(folder / PROMPTS)
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        return None
    return meta if same and "sources" in meta else None


def _key(config: Config) -> str:
    origins = [*config.prompts, *config.acceptance.prompts]
    question = {
        "schema": contracts.SCHEMA,
        "seed": config.run.seed,
        "prompts": config.value("prompts"),
        "held_out": [config.acceptance.held_out, config.value("acceptance.prompts")],
        "kwargs": config.target.chat_template_kwargs,
        "files": [_state_of(origin) for origin in origins if origin.path],
    }
    return contracts.content_id(question)


def _state_of(origin: Source) -> list:
    """Sizes and times of a local source's files: reading it again needlessly is harmless, a stale mix is not."""
    path = origin.path
    if not path.exists():
        raise ConfigError(f"prompts {origin.name}: {path} does not exist")
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]


def read_rejections(folder: Path) -> list[dict]:
    path = folder / REJECTED
    if not path.exists():
        return []
    return list(artifacts.read_jsonl(path, "row_id", "source", "reason", "at", journal=True))


def unusable(rejections: list[dict]) -> list[dict]:
    """Those of conversations that cannot be used as they are: a person can mend them."""
    return [r for r in rejections if r["at"] == "prompts" and r["reason"] in ("bad_conversation", "no_user_turn")]


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
        self._conv_ids: list[bytes] = []
        self._seen: set[bytes] = set()
        self._kept: dict[str, Counter] = {}

    def close(self) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)

    def read(self) -> None:
        for source in self.config.prompts:
            counts = self._kept.setdefault(source.name, Counter())
            for place, record in sources.draw(
                lambda source=source: sources.read_source(source), source.count, self.config.run.seed
            ):
                counts["conversations"] += 1
                try:
                    requests = requests_of(record, source, self.config.target.chat_template_kwargs)
                except RowError as error:
                    why = f"{place}: {error.detail}"
                    self._reject(contracts.content_id(record), source.name, error.reason, why)
                    continue
                for request in requests:
                    self._add(request, counts)
            if not counts["conversations"]:
                raise ConfigError(f"prompts {source.name}: {source.path or source.hub} holds no conversation")
        if not self._offsets:
            raise ConfigError(f"prompts: no conversation can be used{self._unusable()}")

    def _unusable(self) -> str:
        broken = unusable(self.rejections)
        return f"; {len(broken)} are rejected, the first: {broken[0]['detail']}" if broken else ""

    def _add(self, request: Request, counts: Counter) -> None:
        identity = bytes.fromhex(request.row_id)
        if identity in self._seen:
            self._reject(request.row_id, request.source, "duplicate")
            return
        self._seen.add(identity)
        counts["requests"] += 1
        self._offsets.append(self._file.tell())
        self._keys.append(sources.shuffle_key(self.config.run.seed, request.conv_id))
        self._turns.append(request.turn)
        self._conv_ids.append(bytes.fromhex(request.conv_id))
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
                if self._conv_ids[index].hex() not in held:
                    out.write(line)
                    continue
                record = json.loads(line)
                self._kept[record["source"]]["requests"] -= 1
                self._reject(record["row_id"], record["source"], "held_out")
                if held[record["conv_id"]] is None:
                    held[record["conv_id"]] = _as_prompt(record)
            if held and not out.tell():
                why = f"takes all {len(held)} conversations; lower it or add prompts{self._unusable()}"
                raise ConfigError(f"acceptance.held_out {why}")
        with artifacts.publish(held_out_path) as held_part, open(held_part, "wb") as out:
            out.writelines(_line(record) for record in held.values() if record)

    def _held_out(self, path: Path) -> dict[str, dict | None]:
        """Ids of the conversations to hold out, with their record when it is known already."""
        acceptance, seed = self.config.acceptance, self.config.run.seed
        held: dict[str, dict | None] = {}
        for source in acceptance.prompts:
            for place, record in sources.draw(lambda source=source: sources.read_source(source), source.count, seed):
                try:
                    request = requests_of(record, source, self.config.target.chat_template_kwargs)[0]
                except RowError as error:
                    raise ConfigError(f"acceptance.prompts {source.name}: {place} is no prompt: {error}") from None
                held.setdefault(request.conv_id, _as_prompt(request.to_record()))
        if acceptance.prompts:
            return held
        before = {r["conv_id"] for r in artifacts.read_jsonl(path)} if path.exists() else set()
        conversations = {identity.hex() for identity in set(self._conv_ids)}
        chosen = heapq.nsmallest(
            acceptance.held_out,
            conversations,
            key=lambda c: (c not in before, sources.shuffle_key(seed, f"held out {c}")),
        )
        return dict.fromkeys(chosen)

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


def drawn(entry: dict) -> str:
    """What became of a source's conversations, in words."""
    counts = {"conversations": entry["conversations"], **entry["rejected"]}
    return ", ".join(f"{count} {what}" for what, count in counts.items())


def rejection(row_id: str, source: str, reason: str, detail: str, at: str) -> dict:
    """A line of rejected.jsonl; `at` says whether the prompt or its reply was at fault."""
    return {"row_id": row_id, "source": source, "reason": reason, "detail": detail, "at": at}


# A request's line begins with these two; a million lines are not parsed for them.
ROW_ID = slice(len('{"row_id":"'), len('{"row_id":"') + 32)
PARENT = slice(ROW_ID.stop + len('","parent":"'), ROW_ID.stop + len('","parent":"') + 32)
QUOTE = ord('"')


def asked_for(folder: Path) -> set[str] | None:
    """Ids of the rows that the mix in `folder` asks for; others on disk belong to no run now. None: no mix there."""
    path = folder / PROMPTS
    if not path.exists():
        return None
    with open(path, "rb") as file:
        return {line[ROW_ID].decode() for line in file}


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
            if line[PARENT.start - 1] == QUOTE:
                parent = bytes.fromhex(line[PARENT].decode())
                self.children.setdefault(parent, []).append(len(self.ids))
                self.parents[len(self.ids)] = parent
            self.offsets.append(offset)
            self.ids.append(bytes.fromhex(line[ROW_ID].decode()))
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
