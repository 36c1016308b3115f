"""The prompts that drafters are measured on, and checks that none of them was used for training."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from drafter import checked, contracts, files, run_files
from drafter.config import ROOT, Config, Source
from drafter.errors import ConfigError, RowError
from drafter.generate import mix, prompts, sources

HELD_OUT = "held_out"
NGRAM = 13  # words; shorter sequences are shared by chance
SAMPLE = ROOT / "configs/prompts_sample.jsonl"
WORD = re.compile(r"\w+")


@checked.OPEN
class Message(TypedDict):
    role: str
    content: str | None


@checked.OPEN
class Prompt(TypedDict):
    """A line of held_out.jsonl: a conversation that ends in a user turn."""

    conv_id: str
    source: str
    messages: Annotated[list[Message], Field(min_length=1)]
    tools: list[Any] | None


PromptSets = dict[str, list[Prompt]]


def read_prompt_sets(config: Config, limit: int | None = None) -> PromptSets:
    """At most `acceptance.max_prompts` of each set: `acceptance.prompts`, or the run's held-out conversations.

    Raises ConfigError when a set is empty, or shares a conversation with the training rows.
    """
    count = min(limit or config.acceptance.max_prompts, config.acceptance.max_prompts)
    if config.acceptance.prompts:
        sets = {source.name: _draw(config, source, count) for source in config.acceptance.prompts}
    else:
        path = _held_out(config)
        if not path.exists():
            raise ConfigError(f"{path} is missing: run 01b_generate_synthetic.py, or set acceptance.prompts")
        sets = {
            HELD_OUT: _shared_out(list(checked.lines(path, Prompt, "01b_generate_synthetic.py writes it")), count)
        }
    trained = _trained(config)
    for name, records in sets.items():
        if not records:
            place = "acceptance.prompts" if config.acceptance.prompts else str(_held_out(config))
            raise ConfigError(f"acceptance: prompt set {name} is empty ({place})")
        if shared := [record["conv_id"] for record in records if record["conv_id"] in trained]:
            raise ConfigError(
                f"acceptance: {len(shared)} of {len(records)} prompts of {name} are also in the training rows (first "
                f"conv_id {shared[0]}); measure on prompts that no drafter was trained on"
            )
    return sets


def _shared_out(records: list[Prompt], count: int) -> list[Prompt]:
    """The first records of each source, in order: `count` in total, divided by the sources' sizes."""
    left = mix.shares(Counter(record["source"] for record in records), count)
    kept = []
    for record in records:
        if left[record["source"]] > 0:
            left[record["source"]] -= 1
            kept.append(record)
    return kept


def _held_out(config: Config) -> Path:
    return config.stage_dir("01b_synthetic") / run_files.HELD_OUT


def sample_prompts(config: Config, count: int) -> list[Prompt]:
    """Sample questions, for use before a run has its own prompts."""
    return _draw(config, Source(name="sample", path=SAMPLE), count)


def _draw(config: Config, source: Source, count: int) -> list[Prompt]:
    """`count` prompts of a source without repetitions, the same for the same seed."""
    source = source.model_copy(update={"count": min(count, source.count or count)})
    drawn: dict[str, Any] = {}
    for place, record in sources.draw(source, config.run.seed):
        try:
            request = prompts.requests_of(record, source, config.target.chat_template_kwargs)[0]
        except RowError as error:
            raise mix.unusable_prompt(source, place, error) from None
        drawn[request.conv_id] = {
            "conv_id": request.conv_id,
            "source": source.name,
            "messages": request.messages,
            "tools": request.tools,
        }
    return list(drawn.values())


def _trained(config: Config) -> set[str]:
    """Ids of the conversations in the training rows; empty if the index is not on this machine."""
    index = config.stage_dir("02_hidden_states") / run_files.INDEX
    return {entry["conv_id"] for entry in files.read_jsonl(index, conv_id=str)} if index.exists() else set()


def prompts_fingerprint(records: Sequence[Prompt]) -> str:
    """Hash of the prompts in order; a set with another fingerprint is measured again."""
    return contracts.content_id([[record["messages"], record["tools"]] for record in records])


def describe_sets(sets: PromptSets, materialised: Path) -> list[dict]:
    """Name, size, prompts by source, hash and overlap of each set, for acceptance.json."""
    shared = ngram_overlap(sets, materialised)
    return [
        {
            "name": name,
            "prompts": len(records),
            "sources": dict(sorted(Counter(record["source"] for record in records).items())),
            "identity": prompts_fingerprint(records),
            "ngram_overlap": shared[name],
        }
        for name, records in sets.items()
    ]


def ngram_overlap(sets: PromptSets, materialised: Path) -> dict[str, dict | None]:
    """For each set, how many prompts share NGRAM consecutive words with a training prompt (01b's `prompts.jsonl`).

    Shorter prompts are only counted as `too_short`. None if the training prompts are not on this machine.
    """
    if not materialised.exists():
        return dict.fromkeys(sets)
    # There are far more training prompts than measured ones, so the word sequences of the latter are kept in memory.
    runs = {name: [_runs(record) for record in records] for name, records in sets.items()}
    wanted = {run for prompts_runs in runs.values() for run in set().union(*prompts_runs)}
    found: set[tuple[str, ...]] = set()
    for record in files.read_jsonl(materialised):
        found |= wanted & _runs(record)
    return {
        name: {
            "words": NGRAM,
            "prompts": sum(bool(found & run) for run in prompts_runs),
            "of": len(prompts_runs),
            "too_short": sum(not run for run in prompts_runs),
        }
        for name, prompts_runs in runs.items()
    }


def _runs(record: Mapping[str, Any]) -> set[tuple[str, ...]]:
    """Every sequence of NGRAM words in the user turns."""
    result: set[tuple[str, ...]] = set()
    for message in record["messages"]:
        if message["role"] == "user":
            words = WORD.findall(message["content"].lower())
            result.update(zip(*(words[start:] for start in range(NGRAM)), strict=False))
    return result
