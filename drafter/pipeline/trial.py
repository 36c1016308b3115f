"""`--plan --probe`: a short run that measures this machine's rates."""

import shutil

from drafter import locks, run_locks
from drafter.config import Config, load
from drafter.errors import ResumableError
from drafter.pipeline.run import STEPS, Pipeline

ROWS = 64


def measure(config: Config) -> None:
    """Measure this machine: 01b, 02 and 04 on some rows, in a run of which only the manifests stay, for the plan.

    What the run takes from other runs stays theirs. Raises ResumableError when a stage fails, ConfigError while the
    run itself is working: it has the machine.
    """
    path, overrides = config.origin
    short = load(path, [*overrides, f"run.name={config.run.name}-probe", "train.epochs=1"])
    rows = max(ROWS, 2 * config.generate.concurrency)  # fewer would not fill the server for long
    with locks.locked(config.run_dir, f"{run_locks.PIPELINE} --plan --probe"):
        if code := Pipeline(short, STEPS[:3], rows, None).run():
            raise ResumableError(f"the probe ended with exit code {code}: see {short.run_dir / 'logs'}")
        for step in STEPS[:3]:
            if step.stage in short.run.take:
                continue
            for path in short.stage_dir(step.stage).iterdir():
                if path.name not in ("manifest.json", "config.yaml"):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
