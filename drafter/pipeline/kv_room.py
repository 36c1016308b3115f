"""How many of 01b's requests fit in its server's KV cache with the unit's flags, and what the others cost."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drafter.config import Config
from drafter.errors import ConfigError
from drafter.files import GIB
from drafter.pipeline.profiles import Profile, Range, held_when_cut
from drafter.serve import kv_cache, unit_file

DEFAULTS = {"gpu-memory-utilization": 0.92, "watermark": 0}  # vLLM's
# Share of the requests in flight that fit -> share of the rate, without a watermark and with one of 0.05, as
# benchmarks/kv_cache.py simulates them. Requests beyond the cache wait, or are preempted and computed again.
CROWDED = (
    (0.0, 0.0, 0.0),
    (0.1, 0.229, 0.243),
    (0.2, 0.342, 0.384),
    (0.3, 0.432, 0.501),
    (0.45, 0.531, 0.629),
    (0.6, 0.633, 0.736),
    (0.8, 0.747, 0.846),
    (1.0, 0.885, 0.940),
    (1.2, 0.986, 0.991),
    (1.3, 1.0, 1.0),
)
SHIPPED_UNIT = "vllm-kimi-k25-generate"


@dataclass(frozen=True)
class Room:
    """A server's KV cache against the requests of 01b."""

    tokens: float
    wanted: float  # tokens that a running request holds on average
    concurrency: int
    watermark: bool
    dcp_rate: float  # share of the rate that decode context parallelism leaves

    @property
    def fitting(self) -> int:
        return int(self.tokens / self.wanted)

    @property
    def rate(self) -> float:
        """Share of the rate that a cache with room for all requests would give."""
        share = min(self.tokens / self.wanted / self.concurrency, CROWDED[-1][0])
        at = max(1, bisect_left([each[0] for each in CROWDED], share))
        (low, *low_rates), (high, *high_rates) = CROWDED[at - 1], CROWDED[at]
        low_rate, high_rate = low_rates[self.watermark], high_rates[self.watermark]
        return (low_rate + (high_rate - low_rate) * (share - low) / (high - low)) * self.dcp_rate


def of(config: Config, platform: Profile, flags: Mapping[str, Any] | None = None) -> Room | None:
    """The server's cache; None when the platform's memory or the server's flags are unknown."""
    flags = flags if flags is not None else _flags(config)
    if not platform.gpu_gib or flags is None:
        return None
    settings = config.generate
    try:
        dcp, tp = int(flags.get("decode-context-parallel-size", 1)), int(flags.get("tensor-parallel-size", 1))
        utilization, watermark = (float(flags.get(name, usual)) for name, usual in DEFAULTS.items())
        in_flight = min(settings.concurrency, int(flags.get("max-num-seqs", settings.concurrency)))
    except ValueError:  # a flag that is a variable of the unit
        return None
    try:
        each = kv_cache.bytes_per_token(config.target.model, tp)
    except ConfigError:  # the model is not on this machine
        each = platform.model["kv_bytes_per_token"]
    held = platform.prompt_tokens + held_when_cut(platform.answer_tokens.typical, settings.max_tokens)
    tokens = max(0, utilization * platform.gpu_gib - platform.resident_gib) * GIB / each * dcp
    dcp_rate = platform.dcp_rate.get(dcp, min(platform.dcp_rate.values(), default=1)) if dcp > 1 else 1
    return Room(tokens, held, in_flight, watermark > 0, dcp_rate)


def _flags(config: Config) -> Mapping[str, Any] | None:
    """Of 01b's server; where its unit is not installed those of the unit that is shipped, which a plan may assume."""
    own = config.server("generate")
    if own.kind == "systemd" and not unit_file.read(own.systemd_unit):
        shipped = unit_file.shipped(SHIPPED_UNIT)
        return shipped.flags if shipped else None
    return unit_file.flags_of(own)


def advised(config: Config, platform: Profile) -> Room | None:
    """The same server with the flags of KV_ADVICE, if that is faster; else None."""
    flags = _flags(config) or {}
    now, then = of(config, platform, flags), of(config, platform, {**flags, **unit_file.KV_ADVICE})
    return then if now and then and then.rate > now.rate * 1.02 else None


def lines(config: Config, platform: Profile, work: Range) -> list[str]:
    """The plan's line about the KV cache; `work` is the duration of 01b in seconds."""
    room = of(config, platform)
    if room is None:
        unknown = platform.gpu_gib and _flags(config) is None
        return ["  KV cache of 01b's server: not known, since its flags are not"] if unknown else []
    fit = "all" if room.fitting >= room.concurrency else f"{room.fitting} of"
    text = (
        f"  KV cache of 01b's server: {room.tokens:,.0f} tokens by its flags, {room.wanted:,.0f} for a running "
        f"request: {fit} {room.concurrency} fit, which leaves {room.rate:.2f} of the rate"
    )
    if better := advised(config, platform):
        hours = work.typical * room.rate / better.rate / 3600
        flags = " ".join(f"--{flag} {value}" for flag, value in unit_file.KV_ADVICE.items())
        text += f"; with {flags} it is {better.rate:.2f}, 01b then takes {hours:.1f} h"
    return [text]
