"""The run's schema and its loader: one YAML a run, strict, frozen, overridable from the command line."""

import difflib
import shlex
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    field_validator,
    model_validator,
)

from drafter import config_tree, strict_yaml
from drafter.errors import ConfigError
from drafter.model_folder import Architecture, read_added_tokens, read_architecture

ROOT = Path(__file__).resolve().parents[1]

STAGES = ("01b_synthetic", "02_hidden_states", "04_train", "05_export", "06_acceptance")
StageName = Literal["01b_synthetic", "02_hidden_states", "04_train", "05_export", "06_acceptance"]
Role = Literal["generate", "extract", "evaluate"]
Part = Literal["layer", "fc", "norms", "lm_head"]  # of a drafter
Column = Literal["messages", "prompt", "turns", "input", "system", "answer", "tools"]  # of a prompt record

# Numbers, which true and "5" are none of, within bounds that only a slip of the hand goes beyond.
Whole = Annotated[int, Field(strict=True)]
Real = Annotated[float, Field(strict=True)]
MOST = 10**8  # of anything counted
PositiveInt = Annotated[Whole, Field(gt=0, le=MOST)]
NonNegativeInt = Annotated[Whole, Field(ge=0, le=MOST)]
Parallel = Annotated[Whole, Field(gt=0, le=10_000)]  # of anything done at once
Epochs = Annotated[Whole, Field(gt=0, le=10_000)]
Readers = Annotated[Whole, Field(ge=0, le=256)]  # each holds a pack
SequenceLength = Annotated[Whole, Field(ge=32, le=MOST)]  # shorter: no row has an answer left
DraftTokens = Annotated[Whole, Field(gt=0, le=64)]
PositiveFloat = Annotated[Real, Field(gt=0, le=MOST)]
Minutes = Annotated[Real, Field(gt=0, le=7 * 24 * 60)]
Share = Annotated[Real, Field(ge=0, le=1)]
Beta = Annotated[Real, Field(ge=0, lt=1)]
Temperature = Annotated[Real, Field(ge=0, le=2)]
Penalty = Annotated[Real, Field(ge=-2, le=2)]
Words = Annotated[tuple[Annotated[str, Field(pattern=r"\S")], ...], Field(min_length=1)]

# Of vLLM's flags those that other settings give.
OURS = {"model": "target.model", "served-model-name": "target.served_name", "port": "url"}


class Section(BaseModel):
    """Frozen, and an unknown key is an error: a misspelt setting must never be ignored in silence."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _something(cls, value: Any) -> Any:
        if isinstance(value, str) and not value.strip():
            raise ValueError("is blank: give it a value, or leave the key out")
        return value


class Run(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    dir: Path = Path("runs")
    seed: NonNegativeInt = 0
    take: dict[StageName, Path] = {}  # finished stages of other runs: stage -> that stage's folder
    keep: tuple[StageName, ...] = ()  # what `drafter.artifacts clean` never proposes
    on_event: str | None = None  # a command, run with EVENT, STAGE and RUN in its environment


class Target(Section):
    """What several stages share about the served model."""

    model: Path
    served_name: str
    layer_ids: tuple[NonNegativeInt, ...]  # vLLM's ids: i is the input of layer i; the last is num_layers
    max_seq_len: SequenceLength  # tokens of a training row; the rest is cut at the end
    chat_template_kwargs: dict[str, JsonValue] = {}
    prompt_suffix: tuple[NonNegativeInt, ...] = ()  # token ids that every generation prompt ends with
    think_end: NonNegativeInt | None = None  # token id of </think>
    special_tokens: dict[str, NonNegativeInt] = {}  # text -> id, compared with the served tokenizer
    trust_remote_code: bool = False

    @model_validator(mode="after")
    def _ascending(self):
        if len(self.layer_ids) < 2 or list(self.layer_ids) != sorted(set(self.layer_ids)):
            raise ValueError("layer_ids must be at least two distinct ids in ascending order")
        return self

    @property
    def aux_layer_ids(self) -> tuple[int, ...]:
        return self.layer_ids[:-1]

    @property
    def architecture(self) -> Architecture:
        return read_architecture(self.model)

    def check_special_tokens(self) -> None:
        """The model folder's tokenizer must agree with `special_tokens`. Raises ConfigError."""
        local = read_added_tokens(self.model)
        told = [("special_tokens", text, token) for text, token in self.special_tokens.items()]
        if self.think_end is not None:
            told.append(("think_end", "</think>", self.think_end))
        for key, text, token in told:
            if local.get(text, token) != token:
                raise ConfigError(f"target.{key}: {self.model} has {text!r} as {local[text]}, not as {token}")


def _spelled(flag: str) -> str:
    """vLLM takes a flag with underscores, too."""
    return flag.replace("_", "-")


class Server(Section):
    """One vLLM role. `args` are vLLM's own flags without the dashes; true stands for a bare flag."""

    kind: Literal["systemd", "command", "external"]
    url: str
    api_key_env: str | None = None
    unit: Annotated[str, Field(pattern=r"^[^/]+$")] | None = None
    link: Path | None = None  # a unit's command names this folder; starting the unit links it to the run's own
    systemctl: Words = ("systemctl",)
    args: dict[Annotated[str, Field(pattern=r"^[A-Za-z]")], JsonValue] = {}
    env: dict[Annotated[str, Field(pattern=r"^[^=]+$")], str] = {}
    python: str | None = None  # interpreter that has vLLM; default: the one that runs the script
    start_minutes: Minutes = 60
    stop_seconds: PositiveFloat = 300
    hang_minutes: Minutes = 10  # without an answer and without progress of the stage, then it is restarted
    restarts: NonNegativeInt = 3  # of a server that dies or hangs during one stage
    gpus: tuple[NonNegativeInt, ...] = ()  # it runs there: they hold the model while it is up and are free after down

    @field_validator("url")
    @classmethod
    def _address(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:  # raises on a wrong port
            raise ValueError(f"{url!r} is no http address")
        if parts.path.rstrip("/").endswith("/v1"):
            raise ValueError(f"give {url!r} without /v1, which is put behind it")
        return url

    @field_validator("args")
    @classmethod
    def _ours(cls, args: dict) -> dict:
        for flag in args:
            if setting := OURS.get(_spelled(flag)):
                raise ValueError(f"{flag} follows from {setting}: leave it out")
        return args

    @property
    def flags(self) -> dict[str, JsonValue]:
        """`args` by the one name that vLLM shows for each."""
        return {_spelled(flag): value for flag, value in self.args.items()}

    @model_validator(mode="after")
    def _unit(self):
        if self.kind == "systemd" and not self.unit:
            raise ValueError("a systemd server needs `unit`")
        if self.kind == "command" and (not self.url.startswith("http:") or urlsplit(self.url).path.strip("/")):
            raise ValueError(f"a server that is started here listens at http://HOST:PORT, not at {self.url}")
        return self


class Servers(Section):
    generate: Server
    extract: Server
    evaluate: Server


class Source(Section):
    """Where conversations come from: a local file or folder (JSON, Parquet, `save_to_disk`), or a hub dataset."""

    name: str
    path: Path | None = None
    hub: str | None = None
    revision: str | None = None
    split: str = "train"
    count: PositiveInt | None = None  # conversations drawn; default all
    turns: Literal["first", "last", "all"] | None = None  # default: by the schema, docs/data_formats.md
    mode: Literal["regenerate", "replay"] = "regenerate"
    columns: dict[Column, str] = {}  # what the source calls them, where a name is unusual
    max_bad_share: Share = 0.1  # of its conversations; more that cannot be used are an error

    @model_validator(mode="after")
    def _one_origin(self):
        if (self.path is None) == (self.hub is None):
            raise ValueError("give either path or hub")
        if self.hub and not self.revision:
            raise ValueError("a hub source needs a pinned revision")
        return self


def _distinct(prompts: tuple[Source, ...]) -> tuple[Source, ...]:
    names = [source.name for source in prompts]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"two sources are called {twice}: give each a name of its own")
    return prompts


Named = Annotated[tuple[Source, ...], AfterValidator(_distinct)]


class Generate(Section):
    concurrency: Parallel = 200
    max_tokens: PositiveInt = 8192
    temperature: Temperature
    top_p: Annotated[Real, Field(gt=0, le=1)]
    top_k: Annotated[Whole, Field(ge=-1, le=MOST)] = -1
    min_p: Share = 0.0
    repetition_penalty: Annotated[Real, Field(gt=0, le=2)] = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    seed_rows: bool = True  # derive each request's seed from its row id
    rows_per_shard: PositiveInt = 1000
    min_rows: NonNegativeInt = 0  # with a deadline: fewer rows than this is not a success
    floor_tokens_per_second: PositiveFloat = 2.0  # of one request; bounds its timeout
    max_failure_share: Share = 0.05
    outage_minutes: Minutes = 60  # how long a server may be away before the stage gives up


class Extract(Section):
    dtype: Literal["bf16", "fp8"] = "bf16"
    concurrency: Parallel = 32  # requests in flight
    tokens_per_request: PositiveInt = 4096  # short rows share a request up to this many; a longer row goes alone
    reserve_gb: Annotated[Real, Field(ge=0, le=MOST)] = 50
    probe_rows: PositiveInt = 4
    rows_per_shard: PositiveInt = 1000  # rows between two probes
    writer_threads: Parallel = 8
    queue_gb: PositiveFloat = 4  # states waiting for the disk before decoding is slowed down
    neighbour_ids: bool = False  # the server also captures ids + 1, stored for probe rows only
    max_failure_share: Share = 0.02
    outage_minutes: Minutes = 60


class Train(Section):
    warm_start: Path | None = None  # a native EAGLE-3 folder; none: from scratch
    draft_vocab_size: PositiveInt | None = None  # from scratch only
    draft_intermediate_size: PositiveInt | None = None  # from scratch only; default the target's
    parallel: Literal["auto", "ddp", "fsdp2"] = "auto"
    processes: Parallel = 1  # ranks a host
    epochs: Epochs = 1
    max_steps: PositiveInt | None = None
    tokens_per_step: PositiveInt | None = None  # global batch; default one pack a rank
    lr: Share
    warmup_share: Share = 0.05
    min_lr_share: Share = 0.0
    weight_decay: Share = 0.0
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    grad_clip: PositiveFloat = 1.0
    l2_sp: Annotated[Real, Field(ge=0, le=MOST)] = 0.0  # pull towards the warm start
    trainable: Annotated[tuple[Part, ...], Field(min_length=1)] = ("layer", "fc", "norms", "lm_head")
    ttt_steps: DraftTokens = 3
    ttt_decay: Share = 1.0
    precision: Literal["bf16", "fp32"] = "bf16"  # of compute; masters are always fp32
    validation_share: Annotated[Real, Field(gt=0, lt=1)] = 0.05
    validate_every: PositiveInt = 100
    save_every: PositiveInt = 500
    keep_checkpoints: PositiveInt = 2
    patience: PositiveInt | None = None  # validations without improvement before stopping
    loader_workers: Readers = 4  # threads reading packs ahead; 0 reads when needed

    @model_validator(mode="after")
    def _pull(self):
        if self.lr * self.l2_sp > 1:  # each step would throw the weights further off than they were
            raise ValueError(f"l2_sp times lr is {self.lr * self.l2_sp:g}, must be 1 (which undoes a step) or less")
        return self


class Export(Section):
    step: PositiveInt | None = None  # default: the best complete step
    reference: Path | None = None  # native folder whose form the export must have; default train.warm_start


class Cell(Section):
    """One measuring condition."""

    concurrency: Parallel = 8
    num_speculative_tokens: DraftTokens = 3
    temperature: Temperature | None = None  # default: generate.temperature


class Acceptance(Section):
    held_out: PositiveInt = 40  # conversations of the run's own sources kept out of training
    prompts: Named = ()  # instead of the held-out slice
    drafters: Words = ("warm_start", "run")  # also "none", and the path of any native folder
    cells: Annotated[tuple[Cell, ...], Field(min_length=1)] = (Cell(),)
    max_tokens: PositiveInt = 1024
    max_prompts: PositiveInt = 40  # of each prompt set
    budget_minutes: Minutes = 90
    smoke: bool = True  # the pipeline serves an untrained warm start before the night, once for drafter and engine


class Origin(NamedTuple):
    path: str = ""
    overrides: tuple[str, ...] = ()


class Config(Section):
    run: Run
    target: Target
    servers: Servers
    prompts: Annotated[Named, Field(min_length=1)]
    generate: Generate
    extract: Extract = Extract()
    train: Train
    export: Export = Export()
    acceptance: Acceptance = Acceptance()

    @cached_property
    def origin(self) -> Origin:
        """How the config was loaded, which is no part of its value."""
        return Origin()

    @property
    def arguments(self) -> tuple[str, ...]:
        """The arguments with which a command loads this config again; none where it was not loaded."""
        path, overrides = self.origin
        return ("--config", path, *_set(overrides)) if path else ()

    def pipeline(self, *flags: str) -> str:
        """The command line of the pipeline for this config, as a person types it."""
        path, overrides = self.origin
        path = path or str(self.run_dir / "01b_synthetic/config.yaml")
        return shlex.join(["./run_pipeline.sh", path, *flags, *_set(overrides)])

    @property
    def run_dir(self) -> Path:
        return self.run.dir / self.run.name

    def stage_dir(self, stage: StageName) -> Path:
        """The stage's folder: this run's own, or the one taken from another run."""
        return self.run.take.get(stage) or self.run_dir / stage

    def dump(self) -> str:
        """The resolved config as YAML, which `load` reads back to an equal one."""
        return strict_yaml.dump(self.model_dump(mode="json"))

    def value(self, key: str) -> Any:
        """The setting under a dotted key, as JSON types."""
        node = self.model_dump(mode="json")
        for part in key.split("."):
            node = node[part]
        return node

    def check_against_model(self) -> None:
        """Settings that only the target's own folder can judge. Raises ConfigError."""
        architecture = self.target.architecture
        layers = architecture.num_layers
        if self.target.layer_ids[-1] != layers:
            raise ConfigError(
                f"target.layer_ids: the last id must be {layers}, the final layer of {self.target.model}, "
                f"not {self.target.layer_ids[-1]}"
            )
        if self.target.max_seq_len > architecture.max_position_embeddings:
            raise ConfigError(
                f"target.max_seq_len: {self.target.max_seq_len} is more than the model's "
                f"{architecture.max_position_embeddings} positions"
            )
        for key, ids in (("prompt_suffix", self.target.prompt_suffix), ("think_end", (self.target.think_end or 0,))):
            if max(ids, default=0) >= (tokens := architecture.vocab_size):
                raise ConfigError(f"target.{key}: {max(ids)} is no token, the model has {tokens}")
        self.target.check_special_tokens()


def _set(overrides: tuple[str, ...]) -> list[str]:
    return [part for override in overrides for part in ("--set", override)]


def load(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """Read a config file and apply `section.key=value` overrides (values are YAML, `@FILE` takes them from a file).

    Relative paths are taken from the project's root. Raises ConfigError, one line.
    """
    tree = config_tree.read(path, overrides, ROOT)
    try:
        loaded = _rooted(Config.model_validate(tree))
        loaded.__dict__["origin"] = Origin(str(path), tuple(overrides))
        return loaded
    except ValidationError as error:
        problems = error.errors()
        # A wrong entry drags follow-ups behind it: its list is too short without it.
        inner = {e["loc"][:depth] for e in problems for depth in range(len(e["loc"]))}
        problems = [e for e in problems if e["loc"] not in inner]
        unknown = [e for e in problems if e["type"] == "extra_forbidden"]
        raise ConfigError(f"{path}: " + "; ".join(_explain(e) for e in unknown or problems)) from None


def _explain(error: dict) -> str:
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] != "extra_forbidden":
        return f"{where}: {error['msg'].removeprefix('Value error, ')}"
    known = list(_fields_at(Config, error["loc"][:-1]))
    nearest = difflib.get_close_matches(str(error["loc"][-1]), known, n=1)
    return f"unknown key {where}, " + (f"did you mean {nearest[0]}?" if nearest else f"there are {', '.join(known)}")


def _fields_at(model: type[BaseModel], loc: tuple) -> dict:
    """Fields of the section that an error's location leads to."""
    for part in loc:
        if isinstance(part, int):
            continue
        annotation = model.model_fields[part].annotation
        candidates = [annotation, *get_args(annotation)]
        model = next(c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))
    return model.model_fields


def _rooted(value):
    """Every relative path in a section, taken from the project's root."""
    if isinstance(value, Path):
        return value if value.is_absolute() else ROOT / value
    if isinstance(value, BaseModel):
        return value.model_copy(update={name: _rooted(getattr(value, name)) for name in type(value).model_fields})
    if isinstance(value, tuple):
        return tuple(_rooted(item) for item in value)
    if isinstance(value, dict):
        return {key: _rooted(item) for key, item in value.items()}
    return value
