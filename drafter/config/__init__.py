"""The run's schema and its loader: one YAML a run, strict, frozen, overridable from the command line.

`python -m drafter.config` prints every setting with its default and meaning.
"""

import shlex
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import AfterValidator, BaseModel, Field, JsonValue, ValidationError, model_validator

from drafter.config import mistakes, strict_yaml
from drafter.config.fields import (
    MAX_COUNT,
    Beta,
    DraftTokens,
    Epochs,
    LoaderThreads,
    LocalPath,
    Minutes,
    NonBlankStrings,
    NonNegativeFloat,
    NonNegativeInt,
    Parallel,
    Penalty,
    PositiveFloat,
    PositiveInt,
    Section,
    SequenceLength,
    Share,
    StrictFloat,
    StrictInt,
    Temperature,
    in_home,
)
from drafter.config.servers import Server, Servers
from drafter.config.tree import read_tree
from drafter.errors import ConfigError
from drafter.model_folder import Architecture, read_added_tokens, read_architecture

ROOT = Path(__file__).resolve().parents[2]

StageName = Literal["01b_synthetic", "02_hidden_states", "04_train", "05_export", "06_acceptance"]
STAGES: tuple[StageName, ...] = get_args(StageName)
Role = Literal["generate", "extract", "evaluate"]
Part = Literal["layer", "fc", "norms", "lm_head"]  # of a drafter
Turns = Literal["first", "last", "all"]  # which user turns are answered
Column = Literal["messages", "prompt", "turns", "input", "system", "answer", "tools"]  # of a prompt record


HubId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")]  # of a repository


class Run(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = Field(
        description="the run's folder in run.dir; another name is another run"
    )
    dir: LocalPath = Field(Path("runs"), description="folder of all runs")
    seed: NonNegativeInt = Field(0, description="seed of prompt order, sampling and training")
    take: dict[StageName, LocalPath] = Field(
        {}, description="finished stages of other runs: stage -> that stage's folder; read, never written"
    )
    keep: tuple[StageName, ...] = Field((), description="stages that `drafter.disk clean` never proposes")
    rehearsal: bool = Field(
        False,
        description="set by --rehearse: the target is a part of the real one, so no drafter's guesses are judged",
    )
    on_event: str | None = Field(None, description="a command, run with EVENT, STAGE and RUN in its environment")


class Target(Section):
    """The served model, as several stages use it."""

    model: LocalPath = Field(description="Hugging Face folder: config.json, safetensors, tokenizer")
    hub: HubId | None = Field(None, description="the model on the Hugging Face hub, for the model card")
    served_name: str = Field(description="the model's name on the servers")
    layer_ids: tuple[NonNegativeInt, ...] = Field(
        description="captured layers in vLLM's ids: i is the input of layer i; the last id is the number of layers"
    )
    max_seq_len: SequenceLength = Field(description="tokens of a training row; longer rows are cut at the end")
    chat_template_kwargs: dict[str, JsonValue] = Field({}, description="sent with each request")
    prompt_suffix: tuple[NonNegativeInt, ...] = Field(
        (), description="token ids that each generation prompt ends with"
    )
    think_end: NonNegativeInt | None = Field(None, description="token id of </think>; none: no reasoning")
    special_tokens: dict[str, NonNegativeInt] = Field(
        {}, description="text -> id, compared with the served tokenizer and the model's folder"
    )
    trust_remote_code: bool = Field(False, description="run the code in the model's folder")

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
        expected = [("special_tokens", text, token) for text, token in self.special_tokens.items()]
        if self.think_end is not None:
            expected.append(("think_end", "</think>", self.think_end))
        for key, text, token in expected:
            if local.get(text, token) != token:
                raise ConfigError(f"target.{key}: {self.model} has {text!r} as {local[text]}, not as {token}")


class Source(Section):
    """A source of conversations: a local file or folder (JSON, Parquet, `save_to_disk`), or a hub dataset."""

    name: str = Field(description="name in logs, tables and rows")
    path: LocalPath | None = Field(None, description="local file or folder; give either this or hub")
    hub: str | None = Field(None, description="dataset on the Hugging Face hub")
    revision: str | None = Field(None, description="the dataset's commit")
    split: str = Field("train", description="the dataset's split")
    count: PositiveInt | None = Field(None, description="conversations drawn; default: all")
    turns: Turns | None = Field(
        None, description="user turns to answer; default: by the schema, see docs/data_formats.md"
    )
    mode: Literal["regenerate", "replay"] = Field(
        "regenerate", description="regenerate: the target answers; replay: train on the given answers"
    )
    columns: dict[Column, str] = Field({}, description="the source's own names of columns, if they are unusual")
    max_bad_share: Share = Field(0.1, description="share of conversations that may be unusable; more are an error")

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
        raise ValueError(f"two sources are called {twice}: give them different names")
    return prompts


UniqueSources = Annotated[tuple[Source, ...], AfterValidator(_distinct)]


class Generate(Section):
    concurrency: Parallel = Field(200, description="requests in flight")
    max_tokens: PositiveInt = Field(8192, description="tokens of an answer at most, its reasoning included")
    temperature: Temperature = Field(description="as the model is served")
    top_p: Annotated[StrictFloat, Field(gt=0, le=1)] = Field(description="as the model is served")
    top_k: Annotated[StrictInt, Field(ge=-1, le=MAX_COUNT)] = Field(-1, description="-1: all tokens")
    min_p: Share = Field(0.0, description="of the most probable token's probability")
    repetition_penalty: Annotated[StrictFloat, Field(gt=0, le=2)] = Field(1.0, description="1: none")
    presence_penalty: Penalty = Field(0.0, description="0: none")
    frequency_penalty: Penalty = Field(0.0, description="0: none")
    seed_rows: bool = Field(True, description="derive each request's seed from its row id")
    rows_per_shard: PositiveInt = Field(1000, description="rows of a file")
    min_rows: NonNegativeInt = Field(0, description="with a deadline: fewer rows than this are a failure")
    floor_tokens_per_second: PositiveFloat = Field(2.0, description="slowest rate of one request; sets its timeout")
    max_failure_share: Share = Field(0.05, description="share of requests that may fail; more end the stage")
    outage_minutes: Minutes = Field(60, description="minutes that the stage waits for a server that is down")


class Extract(Section):
    dtype: Literal["bf16", "fp8"] = Field(
        "bf16", description="format of stored auxiliary states; fp8 takes 0.63 of the disk"
    )
    concurrency: Parallel = Field(32, description="requests in flight")
    tokens_per_request: PositiveInt = Field(
        4096, description="short rows share a request of up to this many tokens; a longer row has its own"
    )
    reserve_gb: NonNegativeFloat = Field(50, description="disk that stays free, in GB")
    probe_rows: PositiveInt = Field(4, description="rows of a probe, which compares them with the target's own head")
    rows_per_shard: PositiveInt = Field(1000, description="rows between two probes")
    writer_threads: Parallel = Field(8, description="threads of the server that write files")
    queue_gb: PositiveFloat = Field(
        4, description="states that may wait for the disk before decoding is slowed down, in GB"
    )
    neighbour_ids: bool = Field(False, description="the server also captures ids + 1, stored for probe rows only")
    max_failure_share: Share = Field(0.02, description="share of rows that may fail; more end the stage")
    outage_minutes: Minutes = Field(60, description="minutes that the stage waits for a server that is down")


class Train(Section):
    warm_start: LocalPath | None = Field(None, description="a native EAGLE-3 folder; none: from scratch")
    draft_vocab_size: PositiveInt | None = Field(
        None, description="from scratch: number of most frequent tokens that the drafter can predict; default: all"
    )
    draft_intermediate_size: PositiveInt | None = Field(None, description="from scratch; default: the target's")
    parallel: Literal["auto", "ddp", "fsdp2"] = Field("auto", description="how ranks share the work")
    processes: Parallel = Field(1, description="ranks on each host, one for each GPU")
    epochs: Epochs = Field(1, description="passes over the rows")
    max_steps: PositiveInt | None = Field(None, description="default: all of the epochs")
    tokens_per_step: PositiveInt | None = Field(
        None, description="tokens of the global batch; default: one pack of max_seq_len for each rank"
    )
    lr: Share = Field(description="peak learning rate: about 1e-3 from scratch, 2e-5 from a warm start")
    warmup_share: Share = Field(0.05, description="share of the steps")
    min_lr_share: Share = Field(0.0, description="share of lr at the end of the cosine")
    weight_decay: Share = Field(0.0, description="AdamW's")
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), description="AdamW's")
    grad_clip: PositiveFloat = Field(1.0, description="largest norm of the gradient")
    l2_sp: NonNegativeFloat = Field(0.0, description="pull towards the warm start; times lr at most 1")
    trainable: Annotated[tuple[Part, ...], Field(min_length=1)] = Field(
        ("layer", "fc", "norms", "lm_head"), description="parts that are trained; the others keep their values"
    )
    ttt_steps: DraftTokens = Field(3, description="consecutive draft tokens that each position is trained on")
    ttt_decay: Share = Field(1.0, description="weight of each draft token relative to the one before")
    precision: Literal["bf16", "fp32"] = Field("bf16", description="of compute; master weights are always fp32")
    validation_share: Annotated[StrictFloat, Field(gt=0, lt=1)] = Field(0.05, description="share of conversations")
    validate_every: PositiveInt = Field(100, description="steps")
    save_every: PositiveInt = Field(500, description="steps")
    keep_checkpoints: PositiveInt = Field(2, description="latest checkpoints to keep, besides the best")
    patience: PositiveInt | None = Field(None, description="validations without improvement before it stops")
    loader_workers: LoaderThreads = Field(4, description="threads that read packs ahead; 0: read when needed")

    @model_validator(mode="after")
    def _pull(self):
        if self.lr * self.l2_sp > 1:  # each step would move the weights away instead of closer
            raise ValueError(f"l2_sp times lr is {self.lr * self.l2_sp:g}, but must be at most 1")
        return self


class Export(Section):
    step: PositiveInt | None = Field(None, description="default: the best complete step")
    license: str | None = Field(None, description="of the drafter, for the model card, such as mit")
    reference: LocalPath | None = Field(
        None, description="folder whose format the export must have; default: train.warm_start"
    )


class Cell(Section):
    """One measuring condition."""

    concurrency: Parallel = Field(8, description="requests in flight")
    num_speculative_tokens: DraftTokens = Field(3, description="tokens of a draft")
    temperature: Temperature | None = Field(None, description="default: generate.temperature")


class Acceptance(Section):
    held_out: PositiveInt = Field(40, description="conversations kept out of training")
    prompts: UniqueSources = Field((), description="sources to measure on instead of the held-out conversations")
    drafters: NonBlankStrings = Field(
        ("warm_start", "run"), description="what is served and compared: these, none, and folders of drafters"
    )
    cells: Annotated[tuple[Cell, ...], Field(min_length=1)] = Field(
        (Cell(),), description="measuring conditions; the first one decides"
    )
    max_tokens: PositiveInt = Field(1024, description="tokens of an answer at most")
    max_prompts: PositiveInt = Field(40, description="of each prompt set")
    budget_minutes: Minutes = Field(90, description="minutes of measuring, server starts not included")
    smoke: bool = Field(True, description="the pipeline serves an untrained warm start once, before the first night")


class Origin(NamedTuple):
    path: str = ""
    overrides: tuple[str, ...] = ()


class Config(Section):
    run: Run = Field(description="the run and its folder")
    target: Target = Field(description="the served model")
    servers: Servers = Field(description="the vLLM roles")
    prompts: Annotated[UniqueSources, Field(min_length=1)] = Field(description="sources of conversations")
    generate: Generate = Field(description="stage 01b")
    extract: Extract = Field(Extract(), description="stage 02")
    train: Train = Field(description="stage 04")
    export: Export = Field(Export(), description="stage 05")
    acceptance: Acceptance = Field(Acceptance(), description="stage 06")

    @cached_property
    def origin(self) -> Origin:
        """How the config was loaded; not part of its value."""
        return Origin()

    @property
    def arguments(self) -> tuple[str, ...]:
        """The arguments with which a command loads this config again; empty if it was not loaded from a file."""
        path, overrides = self.origin
        return ("--config", path, *_set(overrides)) if path else ()

    def pipeline(self, *flags: str) -> str:
        """The command line of the pipeline for this config, for a message."""
        path, overrides = self.origin
        path = path or str(self.run_dir / "01b_synthetic/config.yaml")
        return shlex.join(["./run_pipeline.sh", path, *flags, *_set(overrides)])

    def server(self, role: Role) -> Server:
        return getattr(self.servers, role)

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
        """Check settings that depend on the target's folder. Raises ConfigError."""
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
                raise ConfigError(f"target.{key}: {max(ids)} is not a token id, the model has {tokens} tokens")
        self.target.check_special_tokens()


def _set(overrides: tuple[str, ...]) -> list[str]:
    return [part for override in overrides for part in ("--set", override)]


def load(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """Read a config file and apply `section.key=value` overrides (values are YAML, `@FILE` takes them from a file).

    Relative paths are taken from the project's root. Raises ConfigError, one line.
    """
    if not str(path).strip():
        raise ConfigError("--config: the name of the file is blank")
    try:
        path = in_home(str(path))
    except ValueError as error:
        raise ConfigError(f"--config: {error}") from None
    tree = read_tree(path, overrides, ROOT)
    try:
        loaded = _rooted(Config.model_validate(tree))
        loaded.servers.refuse_shown_secrets(overrides)
        loaded.__dict__["origin"] = Origin(path, tuple(overrides))
        return loaded
    except ValidationError as error:
        problems = error.errors()
        # A wrong entry causes further errors: its list is then too short.
        inner = {e["loc"][:depth] for e in problems for depth in range(len(e["loc"]))}
        problems = [e for e in problems if e["loc"] not in inner]
        unknown = [e for e in problems if e["type"] == "extra_forbidden"]
        raise ConfigError(f"{path}: " + "; ".join(mistakes.explain(Config, e) for e in unknown or problems)) from None


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
