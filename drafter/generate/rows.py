"""Rows of stage 01b: made from a reply and checked, stored in shards, read back, summarised."""

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from drafter import contracts, files, run_files, text
from drafter.config import Target
from drafter.contracts import Row
from drafter.errors import ContractError, RowError
from drafter.generate import replay
from drafter.generate.prompts import Request, Requests
from drafter.generate.replay import find_think_end

JOURNAL = "journal.jsonl"  # the open shard
MISPARSED = {  # flag of a row -> its fault, for a message
    "all_in_content": "have their reasoning in `content`, though their </think> shows where it ends",
    "all_in_reasoning": "have their answer in `reasoning`",
}
TEXT_TOKENS = 4  # so many ordinary tokens always give some text
OPENING = re.compile(rb'{"row_id":"([0-9a-f]{32})"')  # start of a row's line


def thinks(target: Target) -> bool:
    """Whether the target writes reasoning: it has a `</think>` token, and the prompt does not end with it."""
    return target.think_end is not None and target.prompt_suffix[-1:] != (target.think_end,)


def read_reply(reply: dict, request: Request, sampling: dict, target: Target) -> Row:
    """Make a row from a chat reply after checking all its fields. Raises RowError."""
    try:
        choice = reply["choices"][0]
        message, finish_reason = choice["message"], choice["finish_reason"]
        prompt_ids, completion_ids, usage = reply["prompt_token_ids"], choice["token_ids"], reply["usage"]
        counted = [usage["prompt_tokens"], usage["completion_tokens"]]
        details = usage.get("completion_tokens_details") or {}
        reasoning_tokens = details.get("reasoning_tokens")
        reasoning, content = _texts(message)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise RowError("bad_reply", f"no {error}") from None
    if not all(isinstance(text, str | None) for text in (reasoning, content)):
        raise RowError("bad_reply", "reasoning or content is not text")
    for name, ids in (("prompt_token_ids", prompt_ids), ("token_ids", completion_ids)):
        if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
            raise RowError("bad_reply", f"{name} is not a list of token ids")
    if not completion_ids:
        raise RowError("empty_completion")
    if counted != [len(prompt_ids), len(completion_ids)]:
        raise RowError("token_count_mismatch", f"{[len(prompt_ids), len(completion_ids)]} ids, usage says {counted}")
    if finish_reason not in contracts.FINISH_REASONS[:3]:
        raise RowError("bad_reply", f"finish_reason {finish_reason!r}")
    _check_ids(prompt_ids, completion_ids, target)
    _check_end(choice, completion_ids, sampling.get("max_tokens"), target)
    think_end = find_think_end(prompt_ids, completion_ids, target.think_end)
    flags = []
    if thinks(target) and think_end is None:
        flags.append("cut_in_reasoning" if finish_reason == "length" and not content else "no_think_end")
    if any(mark in text for mark in target.special_tokens for text in (reasoning, content) if text):
        flags.append("special_in_text")
    if not message.get("tool_calls"):
        flags += _misparsed(completion_ids, reasoning, content, target)
    return Row(
        row_id=request.row_id,
        conv_id=request.conv_id,
        source=request.source,
        turn=request.turn,
        input_ids=prompt_ids + completion_ids,
        supervised=[[len(prompt_ids), len(prompt_ids) + len(completion_ids)]],
        think_end=think_end,
        reasoning=reasoning,
        content=content,
        finish_reason=finish_reason,
        sampling=sampling,
        usage={
            "prompt_tokens": counted[0],
            "completion_tokens": counted[1],
            "reasoning_tokens": reasoning_tokens,
        },
        model=str(reply.get("model")),
        flags=flags,
    )


def _check_ids(prompt_ids: list[int], completion_ids: list[int], target: Target) -> None:
    suffix = list(target.prompt_suffix)
    if suffix and prompt_ids[-len(suffix) :] != suffix:
        raise RowError("prompt_mismatch", f"the prompt ends with {prompt_ids[-len(suffix) :]}, not with {suffix}")
    vocab_size = target.architecture.vocab_size
    ids = prompt_ids + completion_ids
    if not 0 <= min(ids) <= max(ids) < vocab_size:
        raise RowError("bad_token_ids", f"ids from {min(ids)} to {max(ids)} in a vocabulary of {vocab_size}")


def _check_end(choice: dict, ids: list[int], max_tokens: int | None, target: Target) -> None:
    """Compare how the completion ended with its ids. Raises RowError."""
    if max_tokens is not None and len(ids) > max_tokens:
        raise RowError("token_count_mismatch", f"{len(ids)} tokens, asked for at most {max_tokens}")
    stops = replay.stop_ids(target.model)
    if choice["finish_reason"] == "stop" and stops and ids[-1] not in (*stops, choice.get("stop_reason")):
        ends = f"the last token is {ids[-1]}, not one of {sorted(stops)}"
        raise RowError("bad_reply", f"finish_reason is stop, but {ends}")


def _misparsed(ids: list[int], reasoning: str | None, content: str | None, target: Target) -> list[str]:
    """The flag of a reply with all text on one side of `</think>` although its ids are on both sides."""
    if target.think_end in ids:
        place = ids.index(target.think_end)
        reasoning_ids, answer_ids = ids[:place], ids[place + 1 :]
    else:  # a reply of a reasoning model without `</think>`: unknown where its reasoning ends
        reasoning_ids, answer_ids = [], [] if thinks(target) else ids
    silent = replay.stop_ids(target.model) | set(target.special_tokens.values())
    reasoned, answered = (bool((text or "").strip()) for text in (reasoning, content))
    if answered and not reasoned and sum(token not in silent for token in reasoning_ids) >= TEXT_TOKENS:
        return ["all_in_content"]
    if reasoned and not answered and sum(token not in silent for token in answer_ids) >= TEXT_TOKENS:
        return ["all_in_reasoning"]
    return []


def check_row(row: Row, target: Target) -> None:
    """Raises RowError unless the row's fields agree with each other and with the target's `</think>`."""
    ids = row.input_ids
    if problem := row.contradiction():
        raise RowError("token_count_mismatch", problem)
    if row.think_end is not None and ids[row.think_end] != target.think_end:
        raise RowError("bad_reply", f"the token at think_end is {ids[row.think_end]}, not {target.think_end}")
    written = ids[row.usage["prompt_tokens"] :] if row.finish_reason != "replay" else []
    if row.think_end is None and target.think_end in written:
        raise RowError("bad_reply", "the tokens contain </think>, but think_end is null")


def check_positions(row: Row, target: Target) -> None:
    """Raises ContractError when prompt suffix or `</think>` are not where the row's positions say."""
    ids, suffix, replayed = row.input_ids, list(target.prompt_suffix), row.finish_reason == "replay"
    for start, _ in row.supervised:
        # If the template writes `</think>` itself, a replayed answer begins one token later.
        prompts_before = [ids[:end] for end in ((start, start - 1) if replayed else (start,))]
        if suffix and all(before[-len(suffix) :] != suffix for before in prompts_before):
            raise ContractError(f"row {row.row_id}: no target.prompt_suffix {suffix} before the answer at {start}")
    start, end = row.supervised[0]
    found = find_think_end(ids[:start], ids[start:end], target.think_end)
    if target.think_end is not None and found != row.think_end:
        raise ContractError(f"row {row.row_id}: think_end is {row.think_end}, but the token is at {found}")


def _texts(message: dict) -> tuple[str | None, str | None]:
    """Reasoning and content, whether the server sends `reasoning`, `reasoning_content` or all in `content`."""
    reasoning, content = message.get("reasoning"), message.get("content")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning is None and isinstance(content, str) and "</think>" in content:
        reasoning, _, content = content.partition("</think>")
        reasoning = reasoning.removeprefix("<think>")
    return reasoning, content


def may_continue(row: Row) -> bool:
    """Whether the answer can be part of the history of a next turn."""
    spoilt = {"special_in_text", "no_think_end", *MISPARSED} & set(row.flags)
    return row.finish_reason == "stop" and row.content is not None and not spoilt


# ---- the rows on disk


class Store:
    """Shards of finished rows, and the journal that becomes the next shard. Call `keep_whole_rows` first."""

    def __init__(self, folder: Path, rows_per_shard: int):
        self.folder = folder
        self._rows_per_shard = rows_per_shard
        self._open()

    def _open(self) -> None:
        path = self.folder / JOURNAL
        self._in_journal = sum(1 for _ in files.read_jsonl(path, journal=True)) if path.exists() else 0
        self._journal = files.Journal(path)

    def add(self, row: Row) -> None:
        self._journal.append(row.to_record())
        self._in_journal += 1
        if self._in_journal >= self._rows_per_shard:
            self.publish()

    def publish(self) -> None:
        """Rename the journal to the next shard."""
        self._journal.close()
        if self._in_journal:
            taken = [int(path.stem.removeprefix("shard-")) for path in shards(self.folder)]
            (self.folder / JOURNAL).rename(self.folder / f"shard-{max(taken, default=-1) + 1:05d}.jsonl")
            files.fsync_dir(self.folder)
        self._open()

    def close(self) -> None:
        self._journal.close()


def publish_journal(folder: Path) -> None:
    """Turn the journal into the last shard and remove the empty journal."""
    store = Store(folder, rows_per_shard=0)
    store.publish()
    store.close()
    (folder / JOURNAL).unlink()


def keep_whole_rows(path: Path) -> None:
    """Cut the journal before its first line that is not a row: after a crash of the machine it may end in zeros."""
    if not path.exists():
        return
    good = sum(len(line) for line, _ in _whole_rows(path))
    with open(path, "r+b") as file:
        file.truncate(good)


def _whole_rows(path: Path) -> Iterator[tuple[bytes, Row]]:
    """The journal's lines and rows, up to the first line that is not a row."""
    with open(path, "rb") as file:
        for line in file:
            try:
                row = Row.from_record(json.loads(line))
            except (ValueError, RecursionError, TypeError, AttributeError, ContractError):
                return
            if not line.endswith(b"\n"):
                return
            yield line, row


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("shard-*.jsonl"))


def row_files(folder: Path) -> list[Path]:
    journal = folder / JOURNAL
    return [*shards(folder), *([journal] if journal.exists() else [])]


def read_rows(folder: Path, limit: int | None = None) -> Iterator[Row]:
    """Rows on disk that belong to the first `limit` requests, in no particular order.

    Raises ContractError on a broken row.
    """
    asked = set(Requests(folder / run_files.PROMPTS, limit).ids)
    for path in row_files(folder):
        for _, row in contracts.read_rows(path, path.name == JOURNAL):
            if row.id_bytes in asked:
                yield row


def read_answers(folder: Path, wanted: set[bytes]) -> dict[bytes, str | None]:
    """The content of the wanted rows; None for a row that cannot be continued."""
    found = {}
    for path in row_files(folder) if wanted else []:
        for _, row in contracts.read_rows(path, path.name == JOURNAL):
            if (identity := row.id_bytes) in wanted:
                found[identity] = row.content if may_continue(row) else None
    return found


def done_ids(folder: Path) -> set[bytes]:
    """Ids of all complete rows on disk. A line begins with its row's id, so shards need no parsing."""
    found: set[bytes] = set()
    for path in shards(folder):
        with open(path, "rb") as file:
            whole = (OPENING.match(line) for line in file if line.endswith(b"\n"))
            found.update(bytes.fromhex(match[1].decode()) for match in whole if match)
    if (journal := folder / JOURNAL).exists():
        found.update(row.id_bytes for _, row in _whole_rows(journal))
    return found


def summarise_rows(made: Iterator[Row]) -> dict:
    """Token counts of rows, in total and by source: lengths, share of reasoning, share truncated."""
    lengths: dict[str, list[int]] = defaultdict(list)
    reasoning, truncated = Counter[str](), Counter[str]()
    for row in made:
        completion = row.usage["completion_tokens"]
        start = row.supervised[0][0]
        lengths[row.source].append(completion)
        truncated[row.source] += row.finish_reason == "length"
        if "cut_in_reasoning" in row.flags:
            reasoning[row.source] += completion
        elif row.think_end is not None and row.think_end >= start:
            reasoning[row.source] += row.think_end - start + 1
    table = {
        source: _describe(sorted(counts), reasoning[source], truncated[source]) for source, counts in lengths.items()
    }
    everything = sorted(length for counts in lengths.values() for length in counts)
    return {"all": _describe(everything, reasoning.total(), truncated.total()), "by_source": table}


def _describe(lengths: list[int], reasoning: int, truncated: int) -> dict:
    total = sum(lengths)
    return {
        "rows": len(lengths),
        "completion_tokens": total,
        "reasoning_share": round(reasoning / total, 4) if total else 0.0,
        "mean_tokens": round(total / len(lengths), 1) if lengths else 0.0,
        "p95_tokens": lengths[math.ceil(0.95 * len(lengths)) - 1] if lengths else 0,
        "truncated_share": round(truncated / len(lengths), 4) if lengths else 0.0,
    }


def advice(summary: dict, max_tokens: int) -> list[str]:
    """A line if most answers were cut, since a drafter trained on them rarely sees an answer end."""
    whole = summary["all"]
    if whole["truncated_share"] <= 0.5:
        return []
    cut = round(whole["truncated_share"] * whole["rows"])
    return [
        f"{cut} of {whole['rows']} answers were cut at generate.max_tokens = {max_tokens}: the drafter rarely learns "
        "how answers end; a larger value (and target.max_seq_len) needs another run.name"
    ]


def summary_table(summary: dict) -> str:
    rows = [*summary["by_source"].items(), ("all", summary["all"])]
    return text.table([("source", *summary["all"]), *((name, *map(str, entry.values())) for name, entry in rows)])
