"""Requests with content ids, made from conversations, and the file that holds a run's requests."""

import json
import mmap
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from drafter import checked, contracts, files
from drafter.config import Source
from drafter.errors import ContractError
from drafter.generate.conversations import (
    OWN_ANSWER,
    Conversation,
    bad_conversation,
    read_conversation,
    with_inline_reasoning,
    without_reasoning,
)
from drafter.run_files import PROMPTS, PROMPTS_META, REJECTED

DETAIL = 500  # characters of a rejection's detail


@checked.OPEN
class Rejection(TypedDict):
    """A line of rejected.jsonl."""

    row_id: Annotated[str, Field(pattern="^([0-9a-f]{2})+$")]
    source: str
    reason: str
    at: str


@checked.OPEN
class SourceMeta(TypedDict):
    """Of one source, in prompts.json."""

    rejected: dict[str, contracts.Count]


@checked.OPEN
class Meta(TypedDict):
    """prompts.json"""

    key: str
    sha256: str
    sources: dict[str, SourceMeta]
    read: dict[str, str]
    held_out: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Request:
    """A row to make: messages to answer (`regenerate`), or a conversation to keep (`replay_last`, `replay_all`).

    `turn` counts user turns from 0. `parent` is the row whose answer replaces this request's last OWN_ANSWER.
    `place` is the conversation's file and line, for messages.
    """

    row_id: str
    parent: str | None
    conv_id: str
    source: str
    turn: int
    mode: str
    messages: list[dict]
    tools: list | None
    place: str = ""

    def to_record(self) -> dict:
        return contracts.shallow(self)


def parse_conversation(record: Any, source: Source) -> Conversation:
    """The conversation in a source's record; `turns` is the source's, or else its form's. Raises RowError."""
    by_default = None if source.turns is None else source.turns == "first"
    first_only = by_default if source.mode == "regenerate" else False
    found = read_conversation(record, source.columns, first_only)
    return found._replace(turns=source.turns or found.turns)


def requests_of(record: Any, source: Source, template_kwargs: dict) -> list[Request]:
    """The requests made from a record under its source's `turns` and `mode`. Raises RowError."""
    return requests(parse_conversation(record, source), source, template_kwargs)


def requests(conversation: Conversation, source: Source, template_kwargs: dict, place: str = "") -> list[Request]:
    """The requests made from a parsed conversation; `place` is its file and line. Raises RowError."""
    messages, tools, turns, _ = conversation
    if source.mode != "replay":
        messages = without_reasoning(messages)
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if source.mode == "replay":
        made = [_replayed(with_inline_reasoning(messages), users, turns)]
    elif turns == "first":
        made = [("regenerate", 0, messages[: users[0] + 1])]
    elif turns == "last" and OWN_ANSWER in messages:
        raise bad_conversation(
            "turns: last needs the answers before the last turn, which are missing: use turns: all or first"
        )
    elif turns == "last":
        made = [("regenerate", len(users) - 1, messages[: users[-1] + 1])]
    elif any(message["role"] == "tool" for message in messages):
        raise bad_conversation("tool results answer calls that the model may not make: use turns: last")
    else:
        own = [OWN_ANSWER if message["role"] == "assistant" else message for message in messages]
        made = [("regenerate", turn, own[: user + 1]) for turn, user in enumerate(users)]
    conv_id = contracts.conv_id(without_reasoning(messages))
    result: list[Request] = []
    for mode, turn, sent in made:
        row_id = contracts.row_id(sent, tools, template_kwargs, mode)
        parent = result[-1].row_id if result else None
        result.append(Request(row_id, parent, conv_id, source.name, turn, mode, sent, tools, place))
    return result


def _replayed(messages: list[dict], users: list[int], turns: str) -> tuple[str, int, list[dict]]:
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i > users[0]]
    if not answers or OWN_ANSWER in messages:
        raise bad_conversation("no answer to keep")
    end = answers[0] if turns == "first" else answers[-1]
    turn = sum(user < end for user in users) - 1
    return "replay_all" if turns == "all" else "replay_last", turn, messages[: end + 1]


def read_rejections(folder: Path) -> list[dict]:
    path = folder / REJECTED
    if not path.exists():
        return []
    return list(checked.lines(path, Rejection, "without such lines these rows are tried again", journal=True))


def unusable_conversations(rejections: list[dict]) -> list[dict]:
    """Rejections of unusable conversations, which the user can correct."""
    return [r for r in rejections if r["at"] == "prompts" and r["reason"] in ("bad_conversation", "no_user_turn")]


def forget_rejections(folder: Path, reasons: frozenset[str]) -> None:
    """Drop the rejections of replies for one of `reasons`, so that these rows are tried again."""
    before = read_rejections(folder)
    kept = [r for r in before if r["at"] == "prompts" or r["reason"] not in reasons]
    if len(kept) < len(before):
        write_rejections(folder, kept)


def write_rejections(folder: Path, records: list[dict]) -> None:
    with files.publish(folder / REJECTED) as part, open(part, "wb") as file:
        file.writelines(map(json_line, records))


def json_line(record: dict) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode("ascii") + b"\n"


def count_text(entry: dict) -> str:
    """How many conversations of a source were drawn and rejected, for a message."""
    counts = {"conversations": entry["conversations"], **entry["rejected"]}
    return ", ".join(f"{count} {what}" for what, count in counts.items())


def held_out_advice(meta: dict) -> str:
    """A line if 06 keeps more than a quarter of the conversations; empty otherwise."""
    tables = meta["sources"].values()
    held = sum(table["rejected"].get("held_out", 0) for table in tables)
    of = held + sum(table["requests"] for table in tables)
    if held * 4 <= of:
        return ""
    return (
        f"{held} of {of} prompts are held out for 06, which leaves {of - held} to train on; "
        "add prompts, or lower acceptance.held_out"
    )


def rejection(row_id: str, source: str, reason: str, detail: str, at: str) -> dict:
    """A line of rejected.jsonl; `at` is "prompts" or "reply"."""
    return {"row_id": row_id, "source": source, "reason": reason, "detail": detail[:DETAIL], "at": at}


# Every request's line begins with these two fields, so that a million lines need not be parsed.
ROW_ID = slice(len('{"row_id":"'), len('{"row_id":"') + 32)
PARENT = slice(ROW_ID.stop + len('","parent":"'), ROW_ID.stop + len('","parent":"') + 32)
QUOTE = ord('"')


def requested_ids(folder: Path) -> set[str] | None:
    """Ids of the rows that the mix in `folder` requests; None if there is no mix. Other rows on disk are ignored."""
    path = folder / PROMPTS
    if not path.exists():
        return None
    with open(path, "rb") as file:
        return {line[ROW_ID].decode(errors="replace") for line in file}


def _broken_request(path: Path | str, index: int) -> ContractError:
    return ContractError(
        f"{path}: line {index + 1} is not a request; remove {PROMPTS_META}, and 01b writes both again"
    )


class Requests:
    """The mix's requests in order, by index; only offsets and ids are in memory."""

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
            try:
                parent = bytes.fromhex(line[PARENT].decode()) if line[PARENT.start - 1] == QUOTE else None
                identity = bytes.fromhex(line[ROW_ID].decode())
            except (ValueError, IndexError):
                raise _broken_request(path, len(self.ids)) from None
            if parent is not None:
                self.children.setdefault(parent, []).append(len(self.ids))
                self.parents[len(self.ids)] = parent
            self.offsets.append(offset)
            self.ids.append(identity)
            offset += len(line)
        size = self._file.seek(0, 2)
        self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Request:
        start = self.offsets[index]
        try:
            return Request(**json.loads(self._map[start : self._map.find(b"\n", start)]))
        except (ValueError, TypeError, RecursionError):
            raise _broken_request(self._file.name, index) from None

    def line(self, index: int, place: dict[bytes, int]) -> list[bytes]:
        """Ids of the rows whose answers form the history, first turn first; `place` maps ids to indices."""
        result: list[bytes] = []
        while (parent := self.parents.get(index)) is not None:
            result.append(parent)
            index = place[parent]
        return result[::-1]

    def close(self) -> None:
        if isinstance(self._map, mmap.mmap):
            self._map.close()
        self._file.close()
