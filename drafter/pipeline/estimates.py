"""Duration and output size of each stage, computed from the config and the rates alone."""

import math
from dataclasses import astuple, dataclass

from drafter.config import Config, Source
from drafter.errors import ConfigError
from drafter.generate import sources
from drafter.pipeline.rates import Profile, Range, Rates, in_flight

SMOKE_TEST = "smoke test"
ROW_BYTES_PER_TOKEN = 11  # of a 01b row: ids as JSON and the text
FORWARD_SHARE = 1 / 3  # of the work of a training step: a validation has no backward pass
STATE_BYTES_PER_PARAMETER = 12  # fp32 master and two moments, in each checkpoint


@dataclass(frozen=True)
class Estimate:
    stage: str
    seconds: Range
    start_seconds: Range  # of servers, not part of `seconds`
    tokens: float
    bytes: float


@dataclass(frozen=True)
class Sizes:
    """Sizes that follow from the config and the model."""

    state_bytes_per_token: int
    drafter_parameters: float


def sizes(config: Config, fallback: Profile) -> Sizes:
    """`fallback` replaces a model folder that is not on this machine."""
    try:
        hidden = config.target.architecture.hidden_size
    except ConfigError:
        hidden = fallback.model["hidden_size"]
    layers = len(config.target.layer_ids)
    compact = (layers - 1) * (hidden + 4) + 2 * hidden
    per_token = compact if config.extract.dtype == "fp8" else layers * hidden * 2
    return Sizes(per_token, fallback.model["drafter_parameters"])


def estimate(config: Config, known: Rates, size: Sizes, conversations: int) -> list[Estimate]:
    """Estimates by stage for so many conversations (held-out ones included), with the smoke test first if needed.

    A stage that is taken from another run costs nothing.
    """
    train, rows = config.train, num_rows(config, conversations)
    written = known.answer_tokens * rows
    longest = config.target.max_seq_len
    read = Range(*(rows * min(tokens, longest) for tokens in astuple(known.row_tokens)))
    trained = read * ((1 - train.validation_share) * train.epochs)
    checkpoint = size.drafter_parameters * STATE_BYTES_PER_PARAMETER
    start, none = known.start_seconds, Range.point(0)
    smoke_test = [Estimate(SMOKE_TEST, Range(10, 60, 300), start, 0, 0)] if known.smoke_test else []
    parts = [
        *smoke_test,
        Estimate(
            "01b_synthetic",
            written.over(known.generate),
            start,
            written.typical,
            read.typical * ROW_BYTES_PER_TOKEN,
        ),
        Estimate(
            "02_hidden_states",
            read.over(known.extract),
            start,
            read.typical,
            read.typical * size.state_bytes_per_token,
        ),
        Estimate(
            "04_train",
            known.train_start + _training(config, known, size, trained, read * train.validation_share),
            none,
            trained.typical,
            (train.keep_checkpoints + 1) * checkpoint,
        ),
        Estimate("05_export", known.export, none, 0, size.drafter_parameters * 2),
        _acceptance(config, known),
    ]
    return [Estimate(p.stage, none, none, 0, 0) if p.stage in config.run.take else p for p in parts]


def num_validations(config: Config, trained: float) -> int:
    """Validations of a training on so many tokens: also at each save, and of the warm start before the first step."""
    train = config.train
    steps = max(1, round(trained / (train.tokens_per_step or config.target.max_seq_len * train.processes)))
    steps = min(steps, train.max_steps or steps)
    both = math.lcm(train.validate_every, train.save_every)
    return 1 + steps // train.validate_every + steps // train.save_every - steps // both


def bytes_read(config: Config, size: Sizes, trained: Range, validated: Range) -> Range:
    """Bytes of hidden states that 04 reads: once per epoch and for each validation."""
    tokens = trained + validated * num_validations(config, trained.typical)
    return tokens * size.state_bytes_per_token


def _training(config: Config, known: Rates, size: Sizes, trained: Range, validated: Range) -> Range:
    """Seconds of 04: of its steps and validations, or of reading the states if that is slower."""
    if not known.train_steps_only:
        return trained.over(known.train)
    work = (trained + validated * (FORWARD_SHARE * num_validations(config, trained.typical))).over(known.train)
    reading = bytes_read(config, size, trained, validated) * (1 / known.disk if known.disk else 0)
    return Range(*map(max, astuple(work), astuple(reading)))


def _acceptance(config: Config, known: Rates) -> Estimate:
    """Estimate of 06: every prompt set in every cell for every drafter, at most the budget, and the server starts."""
    acceptance = config.acceptance
    budget, usual = acceptance.budget_minutes * 60, acceptance.cells[0].concurrency
    work = Range.point(0)
    for _, _, concurrency, _ in _measurements(config):
        for count in prompt_counts(config):
            work += Range.point(count).over(in_flight(known.evaluate, min(concurrency, count) / usual))
    within = Range(*(min(each, budget) for each in astuple(work)))
    return Estimate("06_acceptance", within, known.start_seconds * num_server_starts(config), 0, 0)


def _measurements(config: Config) -> set[tuple[str, int, int, float | None]]:
    """What 06 measures: drafter, tokens of a draft (0 without a drafter), requests in flight, temperature."""
    return {
        (drafter, 0 if drafter == "none" else cell.num_speculative_tokens, cell.concurrency, cell.temperature)
        for drafter in config.acceptance.drafters
        for cell in config.acceptance.cells
        if drafter != "warm_start" or config.train.warm_start
    }


def prompt_counts(config: Config) -> list[int]:
    """Number of prompts that 06 takes of each set."""
    acceptance = config.acceptance
    counts = [num_drawn(source) or acceptance.max_prompts for source in acceptance.prompts] or [acceptance.held_out]
    return [min(count, acceptance.max_prompts) for count in counts]


def num_server_starts(config: Config) -> int:
    """Server starts of 06: one for each drafter and draft length."""
    return len({(drafter, tokens) for drafter, tokens, _, _ in _measurements(config)})


def total_seconds(estimates: list[Estimate]) -> Range:
    """Seconds of all stages, server starts included."""
    return sum((each.seconds + each.start_seconds for each in estimates), Range.point(0))


def total_bytes(estimates: list[Estimate]) -> float:
    return sum(each.bytes for each in estimates)


def num_held_out(config: Config) -> int:
    """Conversations of the run's own sources that are kept for 06 and give no rows."""
    return 0 if config.acceptance.prompts else config.acceptance.held_out


def num_rows(config: Config, conversations: int) -> int:
    return max(0, conversations - num_held_out(config))


def num_drawn(source: Source) -> int | None:
    """Conversations drawn from a source: `count`, at most what it holds. None when both are unknown."""
    known = [count for count in (source.count, sources.count_records(source)) if count is not None]
    return min(known, default=None)


def conversations_asked(config: Config) -> int | None:
    """Conversations that the configured sources give. None when one of them is unknown."""
    return _sum_known([num_drawn(source) for source in config.prompts])


def conversations_held(config: Config) -> int | None:
    """All conversations that the sources hold. None when one is on the hub, whose size is unknown offline."""
    return _sum_known([sources.count_records(source) for source in config.prompts])


def _sum_known(counts: list[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None
