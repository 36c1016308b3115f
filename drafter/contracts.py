"""The formats between stages, and the checks at every border. `docs/data_formats.md` shows one of each."""

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from drafter.errors import ContractError

SCHEMA = 1  # of rows, hidden-state files and the index; part of every fingerprint

FINISH_REASONS = ("stop", "length", "tool_calls", "replay")

REJECT_REASONS = (
    "no_user_turn",  # nothing for the model to answer
    "bad_conversation",  # roles or fields that have no honest reading
    "duplicate",  # the same request as an earlier row
    "held_out",  # kept for measuring acceptance
    "prompt_too_long",  # does not fit the server's context
    "request_refused",  # a 4xx that will not change
    "failed",  # retries used up
    "bad_reply",  # a reply without the fields it must have
    "token_count_mismatch",  # ids and usage disagree
    "prompt_mismatch",  # prompt ids do not end as configured
    "conversation_ended",  # an earlier answer of the conversation is missing, cut or unusable
    "empty_completion",  # 200 with nothing in it
    "no_supervised_tokens",  # after the cut at max_seq_len nothing is left to learn from
    "too_short",  # too few tokens to predict one from another
    "bad_token_ids",  # ids outside the target's vocabulary
    "bad_states",  # hidden states failed a check
    "no_states",  # a reply whose file never came
)


def content_id(value: Any) -> str:
    """32 hex digits over canonical JSON."""
    # Parquet columns hold dates and bytes, which JSON has no word for.
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:32]


def row_id(messages: list[dict], tools: list | None, template_kwargs: dict, mode: str) -> str:
    """Identity of a row: the request that was sent. Generated text and positions are no part of it."""
    return content_id({"messages": messages, "tools": tools, "kwargs": template_kwargs, "mode": mode})


def conv_id(messages: list[dict]) -> str:
    """Identity of a conversation: its first user turn with the system prompt before it. Splits are made on it."""
    opening = []
    for message in messages:
        opening.append([message["role"], message["content"]])
        if message["role"] == "user":
            break
    return content_id(opening)


def shallow(instance: Any) -> dict:
    """The fields of a dataclass as they are; `asdict` copies every token id by itself."""
    return {f.name: getattr(instance, f.name) for f in fields(instance)}


@dataclass(frozen=True, slots=True)
class Row:
    """One captured sequence: prompt and completion as the server's own token ids.

    `supervised` holds half-open spans of `input_ids`; `think_end` is the position of `</think>` or None.
    Text (`reasoning`, `content`) is for people only.
    """

    row_id: str
    conv_id: str
    source: str
    turn: int
    input_ids: list[int]
    supervised: list[list[int]]
    think_end: int | None
    reasoning: str | None
    content: str | None
    finish_reason: str
    sampling: dict
    usage: dict
    model: str
    flags: list[str] = field(default_factory=list)  # e.g. special_in_text, cut_in_reasoning

    def to_record(self) -> dict:
        return shallow(self)

    @classmethod
    def from_record(cls, record: dict) -> "Row":
        """Raises ContractError when the record is not a valid row."""
        names = {f.name for f in fields(cls)}
        if set(record) != names:
            odd = sorted(set(record) ^ names)
            raise ContractError(f"row {record.get('row_id', '?')}: missing or unknown fields {odd}")
        row = cls(**record)
        row.check()
        return row

    def check(self) -> None:
        """Raises ContractError when spans, ids or positions contradict each other."""
        problem = wrong_places(self.supervised, self.think_end, len(self.input_ids))
        if not self.supervised:
            problem = "no supervised span"
        elif self.finish_reason not in FINISH_REASONS:
            problem = f"finish_reason {self.finish_reason!r}"
        if problem:
            raise ContractError(f"row {self.row_id}: {problem}")


def wrong_places(supervised: list[list[int]], think_end: int | None, length: int) -> str | None:
    """What contradicts itself in the spans and positions of a row of `length` tokens."""
    if any(not 0 <= start < end <= length for start, end in supervised):
        return f"a supervised span outside 0..{length}"
    if any(a[1] > b[0] for a, b in zip(supervised, supervised[1:], strict=False)):
        return "supervised spans overlap or are out of order"
    if think_end is not None and not 0 <= think_end < length:
        return f"think_end {think_end} outside 0..{length}"
    return None


def cut(spans: list[list[int]], length: int) -> list[list[int]]:
    """Supervised spans of a row cut at `length` tokens."""
    return [[start, min(end, length)] for start, end in spans if start < length]


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One published hidden-state file, with what training needs of its row."""

    row_id: str
    conv_id: str
    source: str
    tokens: int
    row_tokens: int  # before the cut at max_seq_len
    supervised: list[list[int]]
    think_end: int | None
    bytes: int
    digest: str = ""  # of the token ids in the file

    def to_record(self) -> dict:
        return shallow(self)

    @classmethod
    def from_record(cls, record: dict) -> "IndexEntry":
        """Raises ContractError when the record is no entry, or its positions contradict each other."""
        try:
            entry = cls(**record)
            problem = wrong_places(entry.supervised, entry.think_end, entry.tokens)
        except (TypeError, ValueError) as error:
            raise ContractError(f"{record.get('row_id')!r} is no entry ({error})") from None
        if problem:
            raise ContractError(f"row {entry.row_id}: {problem}")
        return entry

    @property
    def path(self) -> Path:
        return states_path(self.row_id)


def states_path(row_id: str) -> Path:
    """Place of a row's hidden states below the stage folder."""
    return Path(row_id[:2]) / f"{row_id}.safetensors"


@dataclass(slots=True)
class Counts:
    """Nothing is lost in silence: `total = done + rejected + pending`, enforced whenever it is reported."""

    total: int = 0
    done: int = 0
    rejected: Counter = field(default_factory=Counter)

    @property
    def pending(self) -> int:
        return self.total - self.done - self.rejected.total()

    def reject(self, reason: str) -> None:
        if reason not in REJECT_REASONS:
            raise ContractError(f"{reason!r} is not a known reject reason")
        self.rejected[reason] += 1

    def to_record(self) -> dict:
        if self.pending < 0:
            raise ContractError(f"{self.total} in, but {self.done} out and {self.rejected.total()} rejected")
        return {
            "in": self.total,
            "out": self.done,
            "rejected": dict(sorted(self.rejected.items())),
            "pending": self.pending,
        }
