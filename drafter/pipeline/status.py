"""`run_pipeline.sh status` or `python -m drafter.pipeline.status --config FILE`: the state of a run, read only."""

import time
from collections.abc import Iterator, Mapping
from datetime import datetime

from drafter import files, gpu, stage, text
from drafter.config import STAGES, Config, StageName
from drafter.pipeline.run_state import RunState

TAIL = 3  # lines of the current stage's log


def lines(config: Config) -> Iterator[str]:
    """The page, line by line."""
    found = RunState(config)
    state, statuses = found.state, {name: found.status(name) for name in STAGES}
    if not found.has_begun():
        yield f"run {config.run.name} has not begun ({config.run_dir})"
        return
    alive, trouble = found.alive(), found.trouble()
    yield f"run {config.run.name}: {_whole(found, statuses)}, {config.run_dir}"
    progress = {name: found.progress(name) for name in STAGES}
    width = max(map(len, progress.values()))
    for name, status in statuses.items():
        if name in found.taken:
            yield f"  {name:<17} taken from {found.taken[name]}"
            continue
        yield f"  {name:<17} {status:<12} {progress[name]:<{width}}  {_time(found, name)}".rstrip()
    if freed := [name for name, status in statuses.items() if status == "freed"]:
        yield f"  drafter.disk clean freed {', '.join(freed)}; the same command would make them again"
    if left := _left(found):
        yield f"  done at about {datetime.fromtimestamp(time.time() + left):%a %H:%M}, as planned"
    if not alive and state.get("production"):
        yield f"  the next call will restart: {', '.join(state['production'])}"
    if trouble:
        yield f"  last error: {trouble.reason}"
    if state.get("stage"):
        for line in found.latest_log(state["stage"]).splitlines()[-TAIL:]:
            yield f"  | {line}"
    yield f"  disk: {text.size(files.free_bytes(config.run_dir))} free"
    memory = gpu.query_memory()
    if memory.unknown:
        yield f"  GPU memory: unknown ({memory.unknown})"
    for index in sorted(memory.gpus):
        yield f"  GPU {index}: " + (
            f"{text.size(memory.used[index] * gpu.MIB)} in use" if index in memory.used else "unknown"
        )


def _whole(found: RunState, statuses: Mapping[StageName, str]) -> str:
    """Status of the run: the pipeline's, unless stages were run manually since."""
    if set(statuses.values()) <= {"complete", "taken", "freed"}:
        return "complete"
    trouble = found.trouble()
    if trouble and found.state:
        return f"{trouble.how}; the same command continues it" if trouble.how == "interrupted" else trouble.how
    if found.alive() and found.state["status"] == "running":
        return "running"
    return "running manually" if "running" in statuses.values() else "not complete"


def _time(found: RunState, name: str) -> str:
    """Minutes of all calls; for a running call also its own minutes and its start."""
    minutes, began = found.minutes(name) or 0, found.started_at(name)
    parts = [f"{minutes:.1f} min"] if minutes else []
    if began:
        own = (time.time() - began) / 60
        before = minutes - own > 0.1
        parts.append((f"{own:.1f} of them " if before else "") + f"since {datetime.fromtimestamp(began):%H:%M}")
    return ", ".join(parts)


def _left(found: RunState) -> float:
    """Seconds that are left by the plan, 0 without one; a late stage is counted with its high value."""
    if not found.alive() or found.state["status"] != "running":
        return 0
    left = 0.0
    for name in found.state.get("asked", STAGES):
        if name in found.plan and found.pipeline_record(name).get("status") != "complete":
            passed = found.seconds(name)
            planned = found.plan[name]["seconds"]
            left += planned["typical"] - passed
            if passed > planned["typical"]:
                left += max(planned["typical"], planned.get("high", 0)) - planned["typical"]
    return max(0, left)


def main(argv: list[str] | None = None) -> int:
    arguments = stage.tool_parser(__doc__, "python -m drafter.pipeline.status")
    return stage.run_tool("status", lambda config, _: print("\n".join(lines(config))), arguments, argv)


if __name__ == "__main__":
    raise SystemExit(main())
