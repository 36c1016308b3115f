"""`run.on_event`: the user's own shell command, run when a stage or the run ends."""

import os

from drafter import process
from drafter.config import Config
from drafter.pipeline.production_units import log, only_logged

SECONDS = 60


def report(config: Config, event: str, stage: str = "") -> None:
    """Run the command with EVENT, STAGE and RUN in its environment. Its failure is logged and changes nothing."""
    if not config.run.on_event:
        return
    facts = {"EVENT": event, "STAGE": stage, "RUN": config.run.name}
    with only_logged("run.on_event"):
        done = process.run(["/bin/sh", "-c", config.run.on_event], SECONDS, env=os.environ | facts)
        if done.returncode:
            log.info("run.on_event: exit code %d: %s", done.returncode, " ".join(done.stderr.split()))
