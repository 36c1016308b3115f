"""`--plan --probe`: a short run that measures this machine's rates."""

import shutil

from drafter import locks, run_files, run_locks
from drafter.config import Config, load
from drafter.errors import ResumableError
from drafter.pipeline.run import STEPS, Pipeline

ROWS = 64


def measure(config: Config) -> None:
    """Run 01b, 02 and 04 on a few rows, in a run of which only the manifests and configs are kept, for the plan.

    Folders taken from other runs are not touched. Raises ResumableError when a stage fails, and ConfigError while the
    run itself uses the machine.
    """
    path, overrides = config.origin
    short = load(path, [*overrides, f"run.name={config.run.name}-probe", "train.epochs=1"])
    rows = max(ROWS, 2 * config.generate.concurrency)  # fewer would not keep the server full
    with locks.locked(config.run_dir, f"{run_locks.PIPELINE} --plan --probe"):
        if code := Pipeline(short, STEPS[:3], rows, None).run():
            raise ResumableError(f"the probe ended with exit code {code}: see {short.run_dir / 'logs'}")
        for step in STEPS[:3]:
            if step.stage in short.run.take:
                continue
            for kept in short.stage_dir(step.stage).iterdir():
                if kept.name not in (run_files.MANIFEST, run_files.CONFIG):
                    shutil.rmtree(kept) if kept.is_dir() else kept.unlink()
