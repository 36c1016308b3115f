"""Names and schemas of a run's files: the fields that other programs read, with bounds that keep them displayable."""

from typing import Annotated, Any, NotRequired

from pydantic import Field
from typing_extensions import TypedDict  # pydantic refuses typing's own before Python 3.12

from drafter.checked import LISTED, OPEN
from drafter.config import STAGES, StageName

# Names of files. In each stage's folder:
MANIFEST, CONFIG, REJECTED = "manifest.json", "config.yaml", "rejected.jsonl"
# In 01b_synthetic (PROMPTS in 06_acceptance too), 02_hidden_states, 04_train, 06_acceptance and the run's folder:
PROMPTS, PROMPTS_META, HELD_OUT = "prompts.jsonl", "prompts.json", "held_out.jsonl"
INDEX = "index.jsonl"
METRICS = "metrics.jsonl"
ACCEPTANCE = "acceptance.json"
PIPELINE, PLAN = "pipeline.json", "plan.json"

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


class StageRecord(TypedDict, total=False):
    """What the pipeline recorded of a stage."""

    status: str
    started: Moment
    ended: Moment
    seconds: Seconds
    exit_code: int | None


class Deadline(TypedDict):
    """When 01b must stop: as given on the command line, and as a timestamp."""

    given: str
    at: Moment


@OPEN
class State(Process):
    """pipeline.json"""

    status: str
    stage: NotRequired[StageName | None]
    stages: dict[str, StageRecord]
    asked: NotRequired[list[StageName]]
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


class Keeping(TypedDict, total=False):
    keep: list[str]
    take: dict[str, str]


class Target(TypedDict):
    model: str


class Asked(TypedDict):
    max_tokens: Count


@OPEN
class Resolved(TypedDict):
    """config.yaml beside a manifest, as other runs read it."""

    run: Keeping
    target: NotRequired[Target]
    acceptance: NotRequired[Asked]


PlanByStage: Any = TypedDict("PlanByStage", dict.fromkeys(STAGES, Planned), total=False)  # type: ignore[misc]  # computed names
Plan = OPEN(PlanByStage)  # plan.json


class Generation(TypedDict, total=False):
    kv_cache_tokens: Count
    preemptions: Count


class Facts(TypedDict, total=False):
    generation: Generation  # of 01b
    steps: Count  # of 04
    deadline: Moment  # of 01b, if it ended 01b with requests left
    requests: Count  # of 01b, that it had at its deadline
    best: str


ManifestFields = TypedDict(  # "in" is no name of a class's field
    "ManifestFields",
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
Manifest = OPEN(ManifestFields)  # manifest.json of a stage


class Judged(TypedDict):
    expected_acceptance: Figure


@OPEN
class Freed(TypedDict):
    """A line of freed.jsonl"""

    freed: str
    bytes: Count


@OPEN
class Progressed(TypedDict):
    """A line of progress.jsonl"""

    at: Moment
    done: Count
    total: Count
    unit: str


@OPEN
class Boot(TypedDict):
    """A line of boots.jsonl"""

    model: str
    seconds: Annotated[float, Field(gt=0, le=1e6)]


@OPEN
class Metric(TypedDict):
    """A line of metrics.jsonl"""

    kind: str
    step: Count
    loss: NotRequired[Figure | Annotated[list[Figure], Field(min_length=1)]]
    tokens_per_s: NotRequired[Figure]
    expected_acceptance: NotRequired[Figure]
    reasoning: NotRequired[Judged]
    answer: NotRequired[Judged]


@OPEN
class Rejected(TypedDict, total=False):
    """A line of rejected.jsonl"""

    source: str
    reason: str


@OPEN
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
    """One drafter on one prompt set in one cell."""

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
    sources: NotRequired[dict[str, Count]]  # prompts by source
    ngram_overlap: Overlap | None


class Report(TypedDict):
    headline: Headline
    comparisons: list[dict[str, Any]]
    left_out: NotRequired[list[LeftOut]]
    prompt_sets: NotRequired[list[PromptSet]]
    by_source: NotRequired[list[dict[str, Any]]]
    greedy_agreement: NotRequired[list[Agreement]]
    expected: NotRequired[dict[str, float]]


@OPEN
class Acceptance(Report):
    """acceptance.json"""

    measurements: list[Measured]


class Load(TypedDict):
    """Duration of one measurement."""

    concurrency: Count
    prompts: Count
    seconds: Seconds


@OPEN
class Loads(TypedDict):
    """acceptance.json as the plan reads it."""

    measurements: list[Load]


class Tabled(Measured, Load):
    """What a table of measurements shows."""

    acceptance_length: Figure
    low: Figure
    high: Figure
    tokens_per_second: float
    speed_up: Figure


@OPEN
class Results(Report):
    """acceptance.json as the model card reads it."""

    measurements: list[Tabled]
