"""The speed of this machine: from earlier manifests if there are any, else from a platform's profile."""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from drafter import checked, gpu, model_folder, run_files, stage
from drafter.config import Config
from drafter.errors import ConfigError, StageError
from drafter.pipeline import disk_rate, kv_room, rehearsal_record
from drafter.pipeline.profiles import LARGE_MODEL, Profile, Range, mean_when_cut, profile, profiles
from drafter.serve import boot_times

EXPORT_SECONDS = Range(3, 7, 20)  # imports, and the logits of two rows
EXPORT_BYTES_PER_S = Range(3e7, 1.5e8, 3.5e8)  # 6 bytes a parameter: fp32 is read, bf16 written


# Rates that a profile gives if nothing was measured; the others follow from these.
OF_PROFILE = frozenset({"generate", "extract", "train", "answer_tokens", "row_tokens"})


@dataclass(frozen=True)
class Rates:
    """The rates behind the plan, and where each comes from."""

    start_seconds: Range
    generate: Range  # tokens a second
    extract: Range
    train: Range
    answer_tokens: Range  # generated tokens of a row
    row_tokens: Range  # all tokens of a row, the prompt included
    evaluate: Range  # prompts a second of 06 in its first cell
    export: Range  # seconds of 05
    train_start: Range  # seconds of 04 before its first step, if a rehearsal measured them
    sources: dict[str, str]  # rate -> where it comes from
    measured: frozenset[str] = frozenset()  # rates that were measured on this machine
    train_steps_only: bool = False  # as in Profile; a measured rate covers the whole stage
    disk: float | None = None  # bytes a second read from the disk of the states; None: unknown
    smoke_test: bool = False  # the untrained warm start is to be tested first


def of_profile(config: Config, platform: Profile) -> Rates:
    """The rates of a profile."""
    cut_at = config.generate.max_tokens
    answer = _answer(platform, cut_at)
    return Rates(
        start_seconds=platform.start_minutes * 60,
        generate=platform.generate_tokens_per_s,
        extract=platform.extract_tokens_per_s,
        train=platform.train_tokens_per_s,
        train_steps_only=platform.train_steps_only,
        answer_tokens=answer,
        row_tokens=answer + Range.point(platform.prompt_tokens),
        evaluate=_evaluate(config, platform, platform.generate_tokens_per_s),
        train_start=Range.point(0),
        export=EXPORT_SECONDS + Range.point(platform.model["drafter_parameters"] * 6).over(EXPORT_BYTES_PER_S),
        sources=dict.fromkeys(OF_PROFILE, f"profile {platform.title}")
        | {
            "start": f"profile {platform.title}",
            "evaluate": "counted from generate",
            "export": "counted from the drafter's size",
        },
    )


def with_kv_room(config: Config, platform: Profile) -> Rates:
    """The rates of a profile, that of 01b reduced to what its server's KV cache allows."""
    rates = of_profile(config, platform)
    room = kv_room.of(config, platform)
    if room is None or room.rate == 1:
        return rates
    source = f"{rates.sources['generate']}, {room.rate:.2f} of it by the KV cache"
    return dataclasses.replace(
        rates, generate=rates.generate * room.rate, sources=rates.sources | {"generate": source}
    )


def _answer(platform: Profile, cut_at: float) -> Range:
    return Range(*(mean_when_cut(mean, cut_at) for mean in dataclasses.astuple(platform.answer_tokens)))


def _evaluate(config: Config, platform: Profile, generate: Range) -> Range:
    """Prompts a second of 06's first cell if not measured: 01b's rate, adjusted to the requests in flight."""
    acceptance = config.acceptance
    rate = in_flight(generate, acceptance.cells[0].concurrency / config.generate.concurrency)
    return rate.over(_answer(platform, acceptance.max_tokens))


def in_flight(rate: Range, share: float) -> Range:
    """A server's rate with `share` times the requests in flight: between unchanged and proportional.

    The typical value takes the square root, which fits 06 on both machines of docs/measurements.md.
    """
    return Range(rate.low * min(1, share), rate.typical * math.sqrt(share), rate.high * max(1, share))


def measured_or(config: Config, platform: Profile) -> Rates:
    """Rates measured by earlier runs with the same target in this `run.dir`, the others from the profile."""
    rates = dataclasses.replace(with_kv_room(config, platform), smoke_test=_needs_smoke_test(config))
    measured = _measured(config)
    for name, (value, run) in measured.items():
        spread = Range(0.8 * value, value, 1.25 * value)
        changed: dict[str, Any] = {name: spread, "sources": rates.sources | {name: f"measured in run {run}"}}
        rates = dataclasses.replace(rates, **changed)
    if boots := boot_times.seconds_of(config):
        spread = Range(boots[0], boots[len(boots) // 2], boots[-1])
        starts = {"start": f"measured at the last {len(boots)} starts"}
        rates = dataclasses.replace(rates, start_seconds=spread, sources=rates.sources | starts)
    steps_only = rates.train_steps_only and "train" not in measured
    disk = disk_rate.bytes_per_second(config) if steps_only else None
    rates = dataclasses.replace(rates, measured=frozenset(measured), train_steps_only=steps_only, disk=disk)
    if "evaluate" not in rates.measured:
        ample = rates.generate if "generate" in rates.measured else platform.generate_tokens_per_s
        rates = dataclasses.replace(rates, evaluate=_evaluate(config, platform, ample))
    return _with_rehearsal(config, rates)


def _with_rehearsal(config: Config, rates: Rates) -> Rates:
    """With what a rehearsal measured: a lower bound of a server's start, 04's imports and kernels, and 05."""
    if (found := rehearsal_record.find(config)) is None:
        return rates
    least = found["start_seconds"]
    start = Range(*(max(each, least) for each in dataclasses.astuple(rates.start_seconds)))
    note = f"{rates.sources['start']}, at least the {least:.0f} s of {found['run']} with {found['layers']} layers"
    changes: dict[str, Any] = {"start_seconds": start, "sources": rates.sources | {"start": note}}
    if "train" not in rates.measured:  # a measured rate covers the whole stage, its imports too
        changes["train_start"] = Range.point(found["train_start_seconds"])
    if "export" not in rates.measured:
        changes["export"] = Range.point(found["export_seconds"])
    return dataclasses.replace(rates, **changes)


def _needs_smoke_test(config: Config) -> bool:
    if not (config.acceptance.smoke and config.train.warm_start):
        return False
    from drafter.acceptance import stage as acceptance  # needs torch, which other plans do not

    try:
        return acceptance.needs_smoke_test(config)
    except StageError:  # the drafter or the target is not on this machine
        return True


def _measured(config: Config) -> dict[str, tuple[float, str]]:
    """Rate -> (value, run), each from the newest manifest that has it."""
    found: dict[str, tuple[float, str]] = {}
    for name, stage_name, read in (
        ("generate", "01b_synthetic", lambda facts, _: facts["generation"]["output_tokens_per_second"]),
        ("answer_tokens", "01b_synthetic", lambda facts, _: facts["rows"]["all"]["mean_tokens"]),
        ("row_tokens", "02_hidden_states", lambda facts, made: facts["tokens"] / made["out"]),
        ("extract", "02_hidden_states", lambda facts, _: facts["tokens_per_second"]),
        ("train", "04_train", lambda facts, _: facts["tokens_per_second"]),
        ("export", "05_export", lambda _, made: made["seconds"]),
        ("evaluate", "06_acceptance", lambda _, made: _prompts_per_second(config, made)),
    ):
        for manifest in finished_manifests(config, stage_name):
            try:
                value = read(manifest["facts"], manifest)
                if value > 0:
                    found[name] = (value, manifest["folder"].parent.name)
                    break
            except (KeyError, TypeError, ZeroDivisionError):
                continue
    return found


def _prompts_per_second(config: Config, made: dict) -> float:
    """Rate of an earlier 06 with the same concurrency and max_tokens, else 0."""
    acceptance = config.acceptance
    if made["config"]["acceptance"]["max_tokens"] != acceptance.max_tokens:
        return 0
    report = checked.read_or_empty(made["folder"] / run_files.ACCEPTANCE, run_files.Loads)
    like = [each for each in report["measurements"] if each["concurrency"] == acceptance.cells[0].concurrency]
    return sum(each["prompts"] for each in like) / sum(each["seconds"] for each in like)


def finished_manifests(config: Config, stage_name: str) -> Iterable[dict]:
    """Manifests of finished stages with this target, newest first, with their `folder` and `config`."""
    found = []
    for path in config.run.dir.glob(f"*/{stage_name}/manifest.json"):
        try:
            manifest = stage.read_manifest(path.parent)
            resolved = stage.read_resolved(path.parent)
        except (StageError, OSError):
            continue
        if (
            manifest
            and resolved
            and manifest["status"] == "complete"
            and resolved.get("target", {}).get("model") == str(config.target.model)
        ):
            found.append((path.stat().st_mtime, manifest | {"folder": path.parent, "config": resolved}))
    return [manifest for _, manifest in sorted(found, key=lambda each: -each[0])]


def default_profile(config: Config) -> str:
    """The profile for this machine and size of model; if none fits, the nearest one."""
    large, gpus = _is_large(config), gpu.names()
    nearest = "rtx_pro_6000_x8" if large else "h200_x1" if gpus else "cpu_2cores"
    return next((name for name in profiles() if profile(name).is_of(large, gpus)), nearest)


def other_machine(config: Config, platform: Profile) -> str | None:
    """Description of this machine if the profile is for another one or another size of model, else None."""
    gpus = gpu.names()
    if platform.is_of(_is_large(config), gpus):
        return None
    return ", ".join(f"{count}x {name}" for name, count in Counter(gpus).items()) or "no NVIDIA GPU"


def _is_large(config: Config) -> bool:
    try:
        return config.target.architecture.hidden_size > LARGE_MODEL
    except ConfigError:
        # The default model is created on demand; a missing model is planned as a large one.
        return config.target.model != model_folder.DEFAULT_MODEL
