"""All prompt sources of a run -> one shuffled file of requests, made once, and the conversations held out of it.

Everything is chosen and ordered by content hashes under the run's seed, so neither the order of a source nor the
order of the sources matters, a larger count contains the smaller one, and resuming needs no position.
"""

import heapq
import json
from array import array
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from drafter import checked, contracts, files
from drafter.config import Config, Source
from drafter.errors import ConfigError, RowError
from drafter.generate import conversations, prompts, sources
from drafter.generate.prompts import Request
from drafter.run_files import HELD_OUT, PROMPTS, PROMPTS_META

BAD_ALLOWED = 2  # unusable conversations of a source that are always accepted
READ_SHOWN = 3  # ways of reading a source that a message names


def materialise(config: Config, folder: Path, earlier: Path | None = None) -> dict:
    """Write the mix to `folder`: requests, held-out conversations, rejected rows. Does nothing if it exists already.

    Conversations that an earlier mix in the folder `earlier` (default `folder`) held out stay held out, as far as
    each source's share allows. The requests are shuffled; a conversation's turns stay together.

    Returns the content of prompts.json: for each source the `conversations` drawn, the `requests` kept, those
    `rejected`, how it was `read` and how many are `held_out`, and the `sha256` of the requests' file. Raises
    ConfigError for sources that cannot be used.
    """
    earlier = earlier or folder
    if meta := current_meta(config, folder):
        return meta
    key = _key(config)  # before reading, so that a file that changes meanwhile changes the key
    folder.mkdir(parents=True, exist_ok=True)
    mix = _Mix(config, folder / f"{PROMPTS}.unsorted{files.PART}")
    try:
        mix.read()
        with files.publish(folder / PROMPTS) as part:
            held_out = mix.write(part, folder / HELD_OUT, _held_before(config, earlier))
    finally:
        mix.close()
    replies = [r for r in prompts.read_rejections(earlier) if r["at"] == "reply"]
    prompts.write_rejections(folder, mix.rejections + replies)
    meta = {
        "key": key,
        "sha256": files.sha256_file(folder / PROMPTS),
        "sources": mix.table(),
        "read": mix.read_as(),
        "held_out": held_out,
    }
    files.write_json(folder / PROMPTS_META, meta)
    return meta


def current_meta(config: Config, folder: Path) -> dict | None:
    """The content of prompts.json if `folder` holds the mix that this config asks for."""
    meta = checked.read_or_empty(folder / PROMPTS_META, prompts.Meta)
    if not meta or meta["key"] != _key(config) or not (folder / PROMPTS).exists():
        return None
    return meta if meta["sha256"] == files.sha256_file(folder / PROMPTS) else None


def _key(config: Config) -> str:
    origins = [*config.prompts, *config.acceptance.prompts]
    question = {
        "schema": contracts.SCHEMA,
        "seed": config.run.seed,
        "prompts": config.value("prompts"),
        "held_out": [config.acceptance.held_out, config.value("acceptance.prompts")],
        "kwargs": config.target.chat_template_kwargs,
        "files": [sources.file_states(origin) for origin in origins if origin.path],
    }
    return contracts.content_id(question)


class _HeldBefore(NamedTuple):
    """Conversations that an earlier mix held out. `settled`: they stay held out, whatever the sources' shares."""

    ids: frozenset[str]
    settled: bool


def _held_before(config: Config, folder: Path) -> _HeldBefore:
    """The held-out conversations of the mix in `folder`.

    They are settled in a run of a version without shares, since its drafter may be trained on all others; not if the
    sources have changed or one of them gave no request.
    """
    path, meta = folder / HELD_OUT, files.read_note(folder / PROMPTS_META, sources=dict)
    ids = {r["conv_id"] for r in files.read_jsonl(path, conv_id=str)} if path.exists() else ()
    requests = {name: counts.get("requests") for name, counts in meta.get("sources", {}).items()}
    same = len(ids) == config.acceptance.held_out and requests.keys() == {source.name for source in config.prompts}
    return _HeldBefore(frozenset(ids), "held_out" not in meta and same and all(requests.values()))


def shares(sizes: dict[str, int], total: int) -> dict[str, int]:
    """`total` divided in proportion to `sizes`; each size of at least two gets one, as long as `total` suffices."""
    whole = max(1, sum(sizes.values()))
    total = min(total, whole)
    result = {name: total * size // whole for name, size in sizes.items()}
    by_rest = sorted(sizes, key=lambda name: (-(total * sizes[name] % whole), name))
    for name in by_rest[: total - sum(result.values())]:
        result[name] += 1
    for name in sorted(sizes):
        richest = max(sorted(result), key=lambda each: result[each])
        if result[name] == 0 and sizes[name] > 1 and result[richest] > 1:
            result[richest], result[name] = result[richest] - 1, 1
    return result


class _Mix:
    """All sources in one unsorted file; only what ordering and holding out need is in memory."""

    def __init__(self, config: Config, unsorted: Path):
        self.config = config
        self.rejections: list[dict] = []
        self._path = unsorted
        self._file = open(unsorted, "w+b")  # noqa: SIM115 - closed by close()
        self._offsets, self._keys, self._turns = array("Q"), array("Q"), array("L")
        self._conv_ids: list[bytes] = []
        self._owners: dict[bytes, str] = {}  # conversation -> the first of its sources by name
        self._seen: set[bytes] = set()
        self._kept: dict[str, Counter] = {}
        self._read_by: dict[str, Counter] = {}
        self._first: dict[str, str] = {}

    def close(self) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)

    def read(self) -> None:
        """Raises ConfigError when a source is empty or too many of its conversations are unusable."""
        for source in self.config.prompts:
            counts = self._kept.setdefault(source.name, Counter())
            bad: list[dict] = []
            for place, record in sources.draw(source, self.config.run.seed):
                counts["conversations"] += 1
                try:
                    requests = self._requests(record, source, place)
                except RowError as error:
                    why = f"{place}: {error.detail}"
                    self._reject(contracts.content_id(record), source.name, error.reason, why)
                    bad.append(self.rejections[-1])
                    continue
                for request in requests:
                    self._add(request, counts)
            if not counts["conversations"]:
                raise ConfigError(f"prompts {source.name}: {source.path or source.hub} holds no conversation")
            _refuse_bad_share(source, bad, counts["conversations"])

    def _requests(self, record: Any, source: Source, place: str) -> list[Request]:
        conversation = prompts.parse_conversation(record, source)
        made = prompts.requests(conversation, source, self.config.target.chat_template_kwargs, place)
        self._read_by.setdefault(source.name, Counter())[conversation.read_by, conversation.turns] += 1
        if source.name not in self._first:
            last = next(m for m in reversed(made[-1].messages) if m["role"] == "user")
            unread = [name for name in record if name not in conversation.read_by]
            more = f" (not read: {conversations.join_names(unread)})" if unread else ""
            self._first[source.name] = conversations.shorten(last["content"]) + more
        return made

    def _add(self, request: Request, counts: Counter) -> None:
        identity, conv_id = bytes.fromhex(request.row_id), bytes.fromhex(request.conv_id)
        self._owners[conv_id] = min(self._owners.get(conv_id, request.source), request.source)
        if identity in self._seen:
            self._reject(request.row_id, request.source, "duplicate")
            return
        self._seen.add(identity)
        counts["requests"] += 1
        self._offsets.append(self._file.tell())
        self._keys.append(sources.shuffle_key(self.config.run.seed, request.conv_id))
        self._turns.append(request.turn)
        self._conv_ids.append(conv_id)
        self._file.write(prompts.json_line(request.to_record()))

    def _reject(self, row_id: str, source: str, reason: str, detail: str = "") -> None:
        self.rejections.append(prompts.rejection(row_id, source, reason, detail, at="prompts"))

    def write(self, part: Path, held_out_path: Path, before: _HeldBefore) -> dict[str, int]:
        """Write the requests in their final order to `part` and the held-out conversations to `held_out_path`.

        Returns the number of held-out conversations by source.
        """
        order = sorted(range(len(self._offsets)), key=lambda i: (self._keys[i], self._turns[i]))
        held = self._held_out(before)
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
                raise ConfigError(
                    f"acceptance.held_out takes all {len(held)} conversations; lower it or add prompts"
                    f"{self._unusable()}"
                )
        seed = self.config.run.seed
        records = sorted(
            (record for record in held.values() if record),
            key=lambda record: sources.shuffle_key(seed, f"held out {record['conv_id']}"),
        )
        with files.publish(held_out_path) as held_part, open(held_part, "wb") as out:
            out.writelines(map(prompts.json_line, records))
        return dict(sorted(Counter(record["source"] for record in records).items()))

    def _unusable(self) -> str:
        broken = prompts.unusable_conversations(self.rejections)
        return f"; {len(broken)} are rejected, the first: {broken[0]['detail']}" if broken else ""

    def _held_out(self, before: _HeldBefore) -> dict[str, dict | None]:
        """Ids of the conversations to hold out, with their records if known already.

        Each source gives its share, first the conversations that were held out before.
        """
        acceptance, seed = self.config.acceptance, self.config.run.seed
        if acceptance.prompts:
            return self._measured_on()
        if before.settled and {bytes.fromhex(conv_id) for conv_id in before.ids} <= self._owners.keys():
            return dict.fromkeys(before.ids)
        by_source: dict[str, list[str]] = {}
        for conv_id, source in self._owners.items():
            by_source.setdefault(source, []).append(conv_id.hex())
        held: dict[str, dict | None] = {}
        for source, count in shares({s: len(ids) for s, ids in by_source.items()}, acceptance.held_out).items():
            chosen = heapq.nsmallest(
                count,
                by_source[source],
                key=lambda c: (c not in before.ids, sources.shuffle_key(seed, f"held out {c}")),
            )
            held |= dict.fromkeys(chosen)
        return held

    def _measured_on(self) -> dict[str, dict | None]:
        held: dict[str, dict | None] = {}
        for source in self.config.acceptance.prompts:
            for place, record in sources.draw(source, self.config.run.seed):
                try:
                    request = prompts.requests_of(record, source, self.config.target.chat_template_kwargs)[0]
                except RowError as error:
                    raise unusable_prompt(source, place, error) from None
                held.setdefault(request.conv_id, _as_prompt(request.to_record()))
        return held

    def table(self) -> dict[str, dict]:
        rejected: dict[str, Counter] = {}
        for record in self.rejections:
            rejected.setdefault(record["source"], Counter())[record["reason"]] += 1
        return {
            name: {"conversations": 0, "requests": 0, **counts, "rejected": dict(rejected.get(name, {}))}
            for name, counts in self._kept.items()
        }

    def read_as(self) -> dict[str, str]:
        """A sentence for each source: its files and their form, the columns read, and the first question."""
        result = {}
        for source in self.config.prompts:
            ways = self._read_by[source.name].most_common()
            several = len(ways) > 1
            shown = [
                f"{' + '.join(by)}, turns: {turns}" + f" ({count:,})" * several
                for (by, turns), count in ways[:READ_SHOWN]
            ]
            more = f" and in {len(ways) - READ_SHOWN} other ways" if len(ways) > READ_SHOWN else ""
            result[source.name] = (
                f"{sources.source_text(source)}, read by {'; '.join(shown)}{more}; "
                f"the first: {self._first[source.name]}"
            )
        return result


def _refuse_bad_share(source: Source, bad: list[dict], conversations_read: int) -> None:
    """Raises ConfigError when a larger share of a source's conversations is unusable than its `max_bad_share`."""
    if len(bad) < conversations_read and len(bad) <= max(BAD_ALLOWED, source.max_bad_share * conversations_read):
        return
    first, remedy = bad[0]["detail"], "correct the source, or name its unusual columns with the source's `columns`"
    if len(bad) == conversations_read:
        raise ConfigError(
            f"prompts {source.name}: no conversation can be used; all {len(bad)} are rejected, the first: {first}; "
            f"{remedy}; {conversations.WANTED}"
        )
    reasons = ", ".join(f"{count} {reason}" for reason, count in Counter(r["reason"] for r in bad).most_common())
    raise ConfigError(
        f"prompts {source.name}: {len(bad)} of {conversations_read} conversations cannot be used ({reasons}), more "
        f"than the source's max_bad_share of {source.max_bad_share:g} allows, the first: {first}; {remedy}, or raise "
        f"max_bad_share; {conversations.WANTED}"
    )


def unusable_prompt(source: Source, place: str, error: RowError) -> ConfigError:
    why = str(error)[: prompts.DETAIL]
    return ConfigError(f"acceptance.prompts {source.name}: {place} is not a prompt: {why}; {conversations.WANTED}")


def _as_prompt(record: dict) -> dict:
    """A held-out conversation: the request's messages up to their last user turn."""
    last = max(i for i, message in enumerate(record["messages"]) if message["role"] == "user")
    return {
        "conv_id": record["conv_id"],
        "source": record["source"],
        "messages": record["messages"][: last + 1],
        "tools": record["tools"],
    }
