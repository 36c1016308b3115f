"""The platforms of `configs/profiles`: their rates with a model of Kimi's or SmolLM2's size."""

import math
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import yaml

from drafter.config import ROOT
from drafter.errors import ConfigError

PROFILES = ROOT / "configs/profiles"
LARGE_MODEL = 4096  # hidden size above which a profile of Kimi-K2.5 fits better than one of SmolLM2


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
        """Time for this amount at that rate; the low value is the one at the high rate."""
        return Range(self.low / rate.high, self.typical / rate.typical, self.high / rate.low)


@dataclass(frozen=True)
class Profile:
    """A platform, from a file in `configs/profiles`. Rates are Ranges."""

    title: str
    model: dict
    answer_tokens: Range  # mean without a limit
    start_minutes: Range
    generate_tokens_per_s: Range
    extract_tokens_per_s: Range
    train_tokens_per_s: Range
    train_steps_only: bool = False  # the train rate covers steps, without validations and the disk
    usd_per_hour: Range = Range(0, 0, 0)
    prompt_tokens: float = 0
    gpu: str = ""  # part of the name that nvidia-smi shows; empty: a CPU
    gpus: int = 0
    gpu_gib: float = 0  # memory of one
    resident_gib: float = 0  # of that, taken by the weights and a step, with the model split over all GPUs
    dcp_rate: dict[int, float] = field(default_factory=dict)  # decode context parallel size -> share of the rate

    def is_of(self, large: bool, gpus: list[str]) -> bool:
        """Whether the profile is for a model of this size on a machine with such GPUs."""
        if large != (self.model["hidden_size"] > LARGE_MODEL):
            return False
        return sum(self.gpu in name for name in gpus) >= self.gpus if self.gpu else not gpus


def profiles() -> list[str]:
    return sorted(path.stem for path in PROFILES.glob("*.yaml"))


@cache
def profile(name: str) -> Profile:
    """Raises ConfigError with the names of the profiles."""
    path = PROFILES / f"{name}.yaml"
    if name not in profiles():
        raise ConfigError(f"no profile {name}: choose from {', '.join(profiles())}")
    listed = yaml.safe_load(path.read_text()).items()
    fields: dict[str, Any] = {key: Range(*value) if isinstance(value, list) else value for key, value in listed}
    return Profile(**fields)


def mean_when_cut(mean: float, cut_at: float) -> float:
    """Mean length of answers that are cut at `cut_at`; their measured lengths are distributed exponentially."""
    return mean * (1 - math.exp(-cut_at / mean))


def held_when_cut(mean: float, cut_at: float) -> float:
    """Mean tokens of an answer in progress: long answers are in progress for longer."""
    share = cut_at / mean
    return mean * (1 - math.exp(-share) * (1 + share)) / (1 - math.exp(-share))
