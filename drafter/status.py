"""`run_pipeline.sh status`: where the run is, read from another terminal and changing nothing.

By hand: `python -m drafter.status --config FILE`.
"""

import contextlib
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from drafter import artifacts, config, gpu, report, stage

TAIL = 3  # lines of the current stage's log


def lines(run_config: config.Config) -> Iterator[str]:
    """The page, line by line."""
    found = report.Found(run_config)
    state, standing = found.state, {name: found.stands(name) for name in config.STAGES}
    if not found.begun():
        yield f"run {run_config.run.name} has not begun ({run_config.run_dir})"
        return
    alive, trouble = found.alive(), found.trouble()
    yield f"run {run_config.run.name}: {_whole(found, standing)}, {run_config.run_dir}"
    for name, stands in standing.items():
        manifest = found.manifest(name)
        counts = f"{manifest['out']} of {manifest['in']}" if manifest.get("in") else ""
        yield f"  {name:<17} {stands:<12} {counts:<16} {_time(found, name)}".rstrip()
    if left := _left(found):
        yield f"  done at about {datetime.fromtimestamp(time.time() + left):%a %H:%M}, as planned for what is left"
    if not alive and state.get("production"):
        yield f"  the next run gives back: {', '.join(state['production'])}"
    if trouble:
        yield f"  last error: {trouble[1]}"
    if state.get("stage"):
        for line in _tail(run_config.run_dir / "logs" / f"{state['stage']}.log"):
            yield f"  | {line}"
    yield f"  disk: {artifacts.size(artifacts.free_bytes(run_config.run_dir))} free"
    for index, used in gpu.memory_used().items():
        yield f"  GPU {index}: {used / 1024:.1f} GiB in use"


def _whole(found: report.Found, standing: dict[str, str]) -> str:
    """How the run stands: as the pipeline says, as long as nobody went on by hand."""
    if set(standing.values()) == {"complete"}:
        return "complete"
    said = found.state.get("status")
    if said == "running":
        return said if found.alive() else "killed; the same command continues it"
    if said and found.trouble():
        return said
    return "by hand" if "running" in standing.values() else "not complete"


def _time(found: report.Found, name: str) -> str:
    seen = found.state.get("stages", {}).get(name, {})
    if found.stands(name) == "running" and "started" in seen:
        return f"since {datetime.fromtimestamp(seen['started']):%H:%M}"
    minutes = found.minutes(name)
    return f"{minutes:.1f} min" if minutes is not None else ""


def _left(found: report.Found) -> float:
    """Seconds of the plan that are left, as far as there is one; of a stage that is late, as late as planned."""
    if not found.alive() or found.state["status"] != "running":
        return 0
    left = 0.0
    for name in config.STAGES:
        seen = found.state["stages"].get(name, {})
        if name in found.plan and seen.get("status") != "complete":
            passed = time.time() - seen["started"] if "started" in seen else 0
            planned = found.plan[name]["seconds"]
            left += planned["typical"] - passed
            if passed > planned["typical"]:
                left += max(planned["typical"], planned.get("high", 0)) - planned["typical"]
    return max(0, left)


def _tail(path: Path) -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return path.read_text(errors="replace").splitlines()[-TAIL:]
    return []


def main(argv: list[str] | None = None) -> int:
    arguments = stage.tool_parser(__doc__, "python -m drafter.status")
    return stage.run_tool("status", lambda run_config, _: print("\n".join(lines(run_config))), arguments, argv)


if __name__ == "__main__":
    raise SystemExit(main())
