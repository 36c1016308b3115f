"""Platforms as `configs/profiles` describes them: their rates with a model of Kimi's or of SmolLM2's size."""

import math
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import yaml

from drafter.config import ROOT
from drafter.errors import ConfigError

PROFILES = ROOT / "configs/profiles"
LARGE_MODEL = 4096  # hidden size above which profiles of Kimi-K2.5 are nearer than those of SmolLM2


@dataclass(frozen=True)
class Range:
    low: float
    typical: float
    high: float

    @classmethod
    def point(cls, value: float) -> "Range":
        return cls(value, value, value)

    def __add__(self, other: "Range") -> "Range":
        return Range(self.low + other.low, self.typical + other.typical, self.high + other.high)

    def __mul__(self, factor: float) -> "Range":
        return Range(self.low * factor, self.typical * factor, self.high * factor)

    def over(self, rate: "Range") -> "Range":
        """Time for this much at that rate: low at the high rate."""
        return Range(self.low / rate.high, self.typical / rate.typical, self.high / rate.low)


@dataclass(frozen=True)
class Profile:
    """A platform, from a file in `configs/profiles`. Rates are Ranges."""

    title: str
    model: dict
    answer_tokens: Range  # mean, where nothing is cut
    start_minutes: Range
    generate_tokens_per_s: Range
    extract_tokens_per_s: Range
    train_tokens_per_s: Range
    train_steps_only: bool = False  # whether that is the rate of steps, without validations and the disk
    usd_per_hour: Range = Range(0, 0, 0)
    prompt_tokens: float = 0
    gpu: str = ""  # in the name that nvidia-smi shows; without: a CPU
    gpus: int = 0
    gpu_gib: float = 0  # memory of one
    resident_gib: float = 0  # of that what the weights and a step take, the model spread over all GPUs
    dcp_rate: dict[int, float] = field(default_factory=dict)  # decode context parallel size -> share of the rate

    def is_of(self, large: bool, gpus: list[str]) -> bool:
        """Whether it was measured with a model of this size on a machine with such GPUs."""
        if large != (self.model["hidden_size"] > LARGE_MODEL):
            return False
        return sum(self.gpu in name for name in gpus) >= self.gpus if self.gpu else not gpus


def profiles() -> list[str]:
    return sorted(path.stem for path in PROFILES.glob("*.yaml"))


@cache
def profile(name: str) -> Profile:
    """Raises ConfigError naming the profiles there are."""
    path = PROFILES / f"{name}.yaml"
    if name not in profiles():
        raise ConfigError(f"no profile {name}: choose from {', '.join(profiles())}")
    listed = yaml.safe_load(path.read_text()).items()
    fields: dict[str, Any] = {key: Range(*value) if isinstance(value, list) else value for key, value in listed}
    return Profile(**fields)


def mean_when_cut(mean: float, cut_at: float) -> float:
    """Mean length of answers that are cut there: as measured, their lengths fall off exponentially."""
    return mean * (1 - math.exp(-cut_at / mean))


def held_when_cut(mean: float, cut_at: float) -> float:
    """Tokens that an answer in progress holds on average: a long one is in progress for longer."""
    share = cut_at / mean
    return mean * (1 - math.exp(-share) * (1 + share)) / (1 - math.exp(-share))
