"""What the smoke test measured when vLLM served an untrained warm start: `smoke.json` in `run.dir`."""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
from pydantic import Field
from typing_extensions import TypedDict

from drafter import checked, contracts, files
from drafter.config import Cell, Config
from drafter.errors import ContractError
from drafter.serve.decoding import Decoded
from drafter.target import eagle3_folder
from drafter.versions import versions

NAME = "smoke.json"
CELL = Cell(concurrency=4, temperature=0)
DRAFT_TOKENS = CELL.num_speculative_tokens
PROMPTS, TOKENS = 32, 64  # tokens a reply


@dataclass(frozen=True, slots=True)
class Smoke:
    """tallies [N, 1 + DRAFT_TOKENS]: by prompt, drafted steps and those with at least 1, 2, ... tokens accepted."""

    length: float
    tallies: np.ndarray


@checked.OPEN
class Entry(TypedDict):
    """The smoke test of one warm start in smoke.json."""

    length: float
    drafter: str
    target: str
    tallies: list[Annotated[list[contracts.Count], Field(min_length=1 + DRAFT_TOKENS, max_length=1 + DRAFT_TOKENS)]]


def read_all(config: Config) -> dict[str, Any]:
    return files.read_note(config.run.dir / NAME)


def key(config: Config) -> str:
    """Hash of what decides how the warm start is served: its content, the target's, the engine and its arguments."""
    return contracts.content_id([*_models(config), *engine(config)])


def engine(config: Config) -> list[Any]:
    """The interpreter, arguments and vLLM versions of the server that drafts."""
    own, known = config.servers.evaluate, versions()
    return [own.python, own.args, *(known.get(name) for name in eagle3_folder.ENGINES)]


def record(config: Config, decoded: Decoded, length: float) -> None:
    drafter, target = _models(config)
    tallies = [_tally(reply.chunks) for reply in decoded.replies] if decoded.streams_agree else []
    entry = {"length": length, "drafter": drafter, "target": target, "tallies": tallies}
    files.write_json(config.run.dir / NAME, read_all(config) | {key(config): entry})


def find(config: Config) -> Smoke | None:
    """The latest record of this warm start on this target, with any engine arguments; None without one."""
    drafter, target = _models(config)
    for found in reversed(read_all(config).values()):
        with contextlib.suppress(ContractError):  # a record of an earlier version has no tallies
            entry = checked.validate(Entry, found)
            if (entry["drafter"], entry["target"]) == (drafter, target):
                tallies = np.array(entry["tallies"], dtype=np.float64).reshape(-1, 1 + DRAFT_TOKENS)
                return Smoke(entry["length"], tallies[tallies[:, 0] > 0])
    return None


def _models(config: Config) -> list[str]:
    return [
        eagle3_folder.fingerprint(cast(Path, config.train.warm_start)),
        files.fingerprint_path(config.target.model),
    ]


def _tally(chunks: list[int]) -> list[int]:
    """Drafted steps, and steps with at least 1, 2, ... tokens accepted. The first chunk has no draft."""
    accepted = [size - 1 for size in chunks[1:]]
    return [len(accepted), *(sum(count >= k for count in accepted) for k in range(1, 1 + DRAFT_TOKENS))]
