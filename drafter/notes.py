"""What a run's own files hold, as far as another program reads them, and the one check of it.

A file that somebody edited or copied may be whole JSON and still wrong. What is not listed here may be anything;
numbers are bounded so that they can be shown as a time, a count or a size.
"""

import contextlib
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict  # pydantic refuses typing's own before Python 3.12

from drafter import artifacts, config
from drafter.errors import ContractError

CHECKED = with_config(ConfigDict(strict=True, extra="allow"))
LISTED = with_config(ConfigDict(strict=True, extra="ignore"))

Count = Annotated[int, Field(ge=0, le=2**63)]
Bytes = Annotated[float, Field(ge=0, le=2**63)]
Seconds = Annotated[float, Field(ge=-1e9, le=1e9, allow_inf_nan=False)]  # below 0 once a clock was set back
Moment = Annotated[float, Field(ge=0, le=2**33, allow_inf_nan=False)]  # since 1970
Figure = float | None  # may be NaN


class Process(TypedDict, total=False):
    """As `process.identity` gives it."""

    pid: Annotated[int, Field(ge=0, le=2**32)]
    birth: str | None
    boot: str


class Seen(TypedDict, total=False):
    """What the pipeline noted of a stage."""

    status: str
    started: Moment
    ended: Moment
    seconds: Seconds
    exit_code: int | None


class Deadline(TypedDict):
    """When 01b is to stop: as it was given on the command line, and the moment that it meant."""

    given: str
    at: Moment


@CHECKED
class State(Process):
    """pipeline.json"""

    status: str
    stage: NotRequired[config.StageName | None]
    stages: dict[str, Seen]
    asked: NotRequired[list[config.StageName]]
    error: NotRequired[str | None]
    production: NotRequired[list[str]]
    home: NotRequired[str]
    deadline: NotRequired[Deadline]


@LISTED
class Spread(TypedDict):
    typical: Seconds
    low: NotRequired[Seconds]
    high: NotRequired[Seconds]


class Planned(TypedDict):
    seconds: Spread
    rows: NotRequired[Count]
    bytes: NotRequired[Bytes]


Plan = CHECKED(TypedDict("Plan", dict.fromkeys(config.STAGES, Planned), total=False))  # plan.json


class Facts(TypedDict, total=False):
    steps: Count  # of 04
    deadline: Moment  # of 01b, when it ended by it with requests left


Manifest = CHECKED(
    TypedDict(
        "Manifest",  # manifest.json of a stage
        {
            "status": str,
            "in": Count,
            "out": Count,
            "rejected": dict[str, Count],
            "pending": Count,
            "seconds": Seconds,
            "started": str,
            "updated": str,
            "facts": Facts,
            "versions": dict[str, str],
            "error": str,
            "process": Process,
        },
        total=False,
    )
)


class Judged(TypedDict):
    expected_acceptance: Figure


@CHECKED
class Metric(TypedDict):
    """A line of metrics.jsonl"""

    kind: str
    step: Count
    loss: NotRequired[Figure | Annotated[list[Figure], Field(min_length=1)]]
    tokens_per_s: NotRequired[Figure]
    expected_acceptance: NotRequired[Figure]
    reasoning: NotRequired[Judged]
    answer: NotRequired[Judged]


@CHECKED
class Rejected(TypedDict, total=False):
    """A line of rejected.jsonl"""

    source: str
    reason: str


@CHECKED
class Indexed(TypedDict):
    """A line of index.jsonl"""

    row_tokens: Count


class Headline(TypedDict):
    verdict: str
    recommended: str | None
    drafter: str
    baseline: str | None
    acceptance_length: Figure
    low: Figure
    high: Figure
    tokens_per_second: Figure
    speed_up: Figure
    difference: Figure
    difference_low: Figure
    difference_high: Figure


class Unit(TypedDict):
    """What one drafter did, or was left out of, in one cell."""

    drafter: str
    prompt_set: str
    concurrency: Count
    num_speculative_tokens: Count
    temperature: float


class Measured(Unit):
    per_position: list[Figure]
    prompts_refused: NotRequired[Count]
    streams_agree: NotRequired[bool]


class LeftOut(Unit):
    prompts_skipped: Count


class Agreement(Unit):
    equal_outputs: float
    equal_tokens: float
    reference_concurrency: Count


class Overlap(TypedDict):
    words: Count
    prompts: Count
    of: Count
    too_short: Count


class PromptSet(TypedDict):
    name: str
    ngram_overlap: Overlap | None


@CHECKED
class Acceptance(TypedDict):
    """acceptance.json"""

    headline: Headline
    measurements: list[Measured]
    comparisons: list[dict[str, Any]]
    left_out: NotRequired[list[LeftOut]]
    prompt_sets: NotRequired[list[PromptSet]]
    greedy_agreement: NotRequired[list[Agreement]]


def check(kind: Any, value: Any) -> Any:
    """The value, once it is of that kind. Raises ContractError saying what is not."""
    try:
        return _adapter(kind).validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ContractError(f"{where}: {first['msg']}" if where else first["msg"]) from None


def read(path: Path, kind: Any) -> dict[str, Any]:
    """A file that the reader can do without: {} where there is none, or not one of its kind."""
    with contextlib.suppress(ContractError):
        if found := artifacts.read_note(path):
            return check(kind, found)
    return {}


def records(path: Path, kind: Any, limit: int | None = None) -> list[dict]:
    """The records of a JSONL file, at most `limit`; none of one that is not there, or has another kind in it."""
    try:
        return [check(kind, record) for record in islice(artifacts.read_jsonl(path, journal=True), limit)]
    except (OSError, ContractError):
        return []


_adapter = cache(TypeAdapter)
