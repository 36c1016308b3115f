"""The formats between stages and their validation. `docs/data_formats.md` has an example of each."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, get_args

from pydantic import Field
from typing_extensions import TypedDict

from drafter import checked, files
from drafter.errors import ContractError

SCHEMA = 1  # of rows, hidden-state files and the index; part of every fingerprint

FinishReason = Literal["stop", "length", "tool_calls", "replay"]
FINISH_REASONS: tuple[FinishReason, ...] = get_args(FinishReason)

REJECT_REASONS = (
    "no_user_turn",  # no turn for the model to answer
    "bad_conversation",  # roles or fields without a clear meaning
    "duplicate",  # the same request as an earlier row
    "held_out",  # kept for measuring acceptance
    "prompt_too_long",  # does not fit the server's context
    "request_refused",  # a 4xx that will not change
    "failed",  # retries used up
    "bad_reply",  # a reply without the fields it must have
    "token_count_mismatch",  # ids and usage disagree
    "prompt_mismatch",  # prompt ids do not end as configured
    "conversation_ended",  # an earlier answer of the conversation is missing, cut or unusable
    "empty_completion",  # status 200 without tokens
    "no_supervised_tokens",  # no supervised token is left after the cut at max_seq_len
    "too_short",  # too few tokens to predict any
    "bad_token_ids",  # ids outside the target's vocabulary
    "bad_states",  # hidden states failed a check
    "no_states",  # a reply whose file never arrived
)


FileId = Annotated[str, Field(pattern=r"^[0-9A-Za-z_-]{2,64}$")]  # part of a file's name
Count = Annotated[int, Field(ge=0, le=2**53)]
Span = Annotated[list[Count], Field(min_length=2, max_length=2)]


@checked.OPEN
class Usage(TypedDict):
    """Tokens as the server counted them; in a replayed row, tokens before its first answer and in its answers."""

    prompt_tokens: Count
    completion_tokens: Count
    reasoning_tokens: NotRequired[int | None]


def content_id(value: Any) -> str:
    """32 hex digits over canonical JSON."""
    # Parquet columns may hold dates and bytes, which JSON cannot represent.
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:32]


def row_id(messages: list[dict], tools: list | None, template_kwargs: dict, mode: str) -> str:
    """Identity of a row: the request that was sent, without generated text and positions."""
    return content_id({"messages": messages, "tools": tools, "kwargs": template_kwargs, "mode": mode})


def row_set(row_ids: Iterable[str]) -> str:
    """Identity of a set of rows, as the manifests of 02 and 04 record it; the order of the ids does not matter."""
    return content_id(sorted(row_ids))


def conv_id(messages: list[dict]) -> str:
    """Identity of a conversation: its first user turn and the system prompt before it. Data splits use it."""
    opening = []
    for message in messages:
        opening.append([message["role"], message["content"]])
        if message["role"] == "user":
            break
    return content_id(opening)


def shallow(instance: Any) -> dict:
    """The fields of a dataclass without copies; `asdict` would copy every token id."""
    return {f.name: getattr(instance, f.name) for f in fields(instance)}


@dataclass(frozen=True, slots=True)
class Row:
    """One captured sequence: prompt and completion as the server's own token ids.

    `supervised` holds half-open spans of `input_ids`; `think_end` is the position of `</think>` or None.
    The text (`reasoning`, `content`) is only for human readers.
    """

    row_id: FileId
    conv_id: str
    source: str
    turn: Count
    input_ids: list[int]
    supervised: list[Span]
    think_end: Count | None
    reasoning: str | None
    content: str | None
    finish_reason: FinishReason
    sampling: dict[str, Any]
    usage: Usage
    model: str
    flags: list[str] = field(default_factory=list)  # e.g. special_in_text, cut_in_reasoning

    @property
    def id_bytes(self) -> bytes:
        """`row_id` in 16 bytes. Raises ContractError when it is no content id."""
        try:
            return bytes.fromhex(self.row_id)
        except ValueError:
            raise ContractError(f"row {self.row_id}: row_id must be 32 hexadecimal digits") from None

    def to_record(self) -> dict:
        return shallow(self)

    @classmethod
    def from_record(cls, record: dict) -> "Row":
        """Raises ContractError when the record is not a valid row."""
        row = _made(cls, record)
        if problem := row.contradiction():
            raise ContractError(f"row {row.row_id}: {problem}")
        return row

    def contradiction(self) -> str | None:
        """The first contradiction between the row's spans, positions and counts, or None."""
        return wrong_places(self.supervised, self.think_end, len(self.input_ids)) or self._miscounted()

    def _miscounted(self) -> str | None:
        """How the spans contradict `usage`, or None."""
        prompt, written = self.usage["prompt_tokens"], self.usage["completion_tokens"]
        spans, length = self.supervised, len(self.input_ids)
        if self.finish_reason == "replay":
            agree = [prompt, written] == [spans[0][0], sum(end - start for start, end in spans)]
        else:
            agree = spans == [[prompt, prompt + written]] and length == prompt + written
        counts = f"{prompt} prompt tokens and {written} completion tokens"
        return None if agree else f"usage counts {counts}, but supervised is {spans} of {length} input_ids"


def read_rows(path: Path, journal: bool = False) -> Iterator[tuple[int, Row]]:
    """(offset of its line, row) for each row of a shard or `journal`. Raises ContractError on a broken row."""
    for number, (offset, record) in enumerate(files.read_placed(path, journal=journal), 1):
        try:
            row = Row.from_record(record)
        except ContractError as error:
            raise ContractError(f"{path}: record {number}: {error}") from None
        yield offset, row


def _made(cls: type, record: dict) -> Any:
    try:
        return cls(**checked.validate(checked.record_of(cls), record))
    except ContractError as error:
        name = record.get("row_id")
        raise ContractError(f"row {name}: {error}" if isinstance(name, str) else str(error)) from None


def wrong_places(supervised: list[list[int]], think_end: int | None, length: int) -> str | None:
    """The first contradiction in the spans and positions of a row of `length` tokens, or None."""
    if not supervised:
        return "no supervised span"
    if any(not 0 < start < end <= length for start, end in supervised):
        return f"a supervised span outside 0..{length}, or without a token before it"
    if any(a[1] > b[0] for a, b in zip(supervised, supervised[1:], strict=False)):
        return "supervised spans overlap or are out of order"
    if think_end is not None and not 0 <= think_end < length:
        return f"think_end {think_end} outside 0..{length}"
    # An answer without reasoning begins right after a </think> of the prompt.
    if think_end is not None and not any(start - 1 <= think_end < end for start, end in supervised):
        return f"think_end {think_end} is neither in a supervised span nor right before one"
    return None


def cut(spans: list[list[int]], length: int) -> list[list[int]]:
    """Supervised spans of a row cut at `length` tokens."""
    return [[start, min(end, length)] for start, end in spans if start < length]


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One published hidden-state file, with the facts of its row that training needs."""

    row_id: FileId
    conv_id: str
    source: str
    tokens: Count
    row_tokens: Count  # before the cut at max_seq_len
    supervised: list[Span]
    think_end: Count | None
    bytes: Count
    digest: str = ""  # of the token ids in the file

    def to_record(self) -> dict:
        return shallow(self)

    @classmethod
    def from_record(cls, record: dict) -> "IndexEntry":
        """Raises ContractError when the record is invalid or its positions contradict each other."""
        entry = _made(cls, record)
        problem = wrong_places(entry.supervised, entry.think_end, entry.tokens)
        if entry.tokens > entry.row_tokens:
            problem = f"{entry.tokens} tokens of a row of {entry.row_tokens}"
        if problem:
            raise ContractError(f"row {entry.row_id}: {problem}")
        return entry

    @property
    def path(self) -> Path:
        return states_path(self.row_id)


def states_path(row_id: str) -> Path:
    """Path of a row's hidden states below the stage folder."""
    return Path(row_id[:2]) / f"{row_id}.safetensors"


@dataclass(slots=True)
class Counts:
    """`total = done + rejected + pending`, checked whenever it is reported, so that no row is lost silently."""

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
