"""`run_pipeline.sh status`: where the run is, read from another terminal and changing nothing."""

import contextlib
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from drafter import artifacts, config, gpu, process, report

TAIL = 3  # lines of the current stage's log


def lines(run_config: config.Config) -> Iterator[str]:
    """The page, line by line."""
    found = report.Found(run_config)
    state = found.state
    if not state:
        yield f"run {run_config.run.name} has not begun ({run_config.run_dir})"
        return
    alive = process.lives(state) and state.get("home") == artifacts.home(run_config.run_dir)
    status = state["status"] if alive or state["status"] != "running" else "killed; the same command continues it"
    yield f"run {run_config.run.name}: {status}, {run_config.run_dir}"
    for name in config.STAGES:
        seen, manifest = state["stages"].get(name, {}), found.manifest(name)
        stands = seen.get("status") or manifest.get("status") or "not begun"
        counts = f"{manifest['out']} of {manifest['in']}" if manifest.get("in") else ""
        yield f"  {name:<17} {stands:<12} {counts:<16} {_time(seen)}".rstrip()
    if left := _left(found, alive):
        yield f"  done at about {datetime.fromtimestamp(time.time() + left):%a %H:%M}, as planned for what is left"
    if not alive and state.get("production"):
        yield f"  the next run gives back: {', '.join(state['production'])}"
    if state.get("error"):
        yield f"  last error: {state['error']}"
    if state.get("stage"):
        for line in _tail(run_config.run_dir / "logs" / f"{state['stage']}.log"):
            yield f"  | {line}"
    yield f"  disk: {artifacts.size(artifacts.free_bytes(run_config.run_dir))} free"
    for index, used in gpu.memory_used().items():
        yield f"  GPU {index}: {used / 1024:.1f} GiB in use"


def _time(seen: dict) -> str:
    if "seconds" in seen:
        return f"{seen['seconds'] / 60:.1f} min"
    return f"since {datetime.fromtimestamp(seen['started']):%H:%M}" if "started" in seen else ""


def _left(found: report.Found, alive: bool) -> float:
    """Seconds of the plan that are left, as far as there is one."""
    if not alive or found.state["status"] != "running":
        return 0
    left = 0.0
    for name in config.STAGES:
        seen = found.state["stages"].get(name, {})
        if name in found.plan and seen.get("status") != "complete":
            passed = time.time() - seen["started"] if "started" in seen else 0
            left += max(0, found.plan[name]["seconds"]["typical"] - passed)
    return left


def _tail(path: Path) -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return path.read_text(errors="replace").splitlines()[-TAIL:]
    return []
