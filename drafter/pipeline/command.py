"""The command `run_pipeline.sh`: what its arguments ask for."""

import argparse
import json
import logging
from collections.abc import Iterator
from datetime import datetime

from drafter import cli, errors, model_folder, signals
from drafter.config import Config, load
from drafter.config.default import default_config
from drafter.errors import Interrupted
from drafter.pipeline import deadline, plan, rate_probe, result, status
from drafter.pipeline.run import Pipeline, chosen
from drafter.stage import run_command, wants_json
from drafter.target import default_model

log = logging.getLogger("drafter")


def main(argv: list[str] | None = None) -> int:
    runs: list[tuple[Pipeline, argparse.Namespace]] = []

    def body() -> int:
        args = cli.parse(argv)
        config = load(args.config or default_config(), args.overrides)
        if args.status:
            print("\n".join(status.lines(config)))
            return 0
        now = datetime.now()
        until = deadline.resolve(config, args.deadline, now)
        pipeline = Pipeline(config, chosen(args.first, args.only), args.limit, until)
        pipeline.redo = args.redo
        if args.plan:
            if args.probe and plan.guesses(config):
                rate_probe.measure(config)
            print(plan.show(config, None, until and until.moment, cli.next_time(args.done_by, now)))
            return 0
        if args.dry_run:
            print("\n".join(_dry_run(config, pipeline)))
            return 0
        if config.target.model == model_folder.DEFAULT_MODEL:
            default_model.ensure()
        if args.rehearse:
            from drafter.pipeline import rehearsal  # needs torch

            return rehearsal.rehearse(config)
        runs.append((pipeline, args))
        return pipeline.run()

    def conclude(code: int) -> None:
        if code - 128 in signals.SIGNALS:
            log.info("%s: finished work is kept, %s", Interrupted(code - 128), errors.next_action(None))
        for pipeline, args in runs:
            if pipeline.begun and not code:  # last, so that it stays on the screen
                for line in result.lines(pipeline.config):
                    log.info("%s", line)
            if pipeline.begun and wants_json(args):
                print(json.dumps(pipeline.record.state | {"exit_code": code}), flush=True)

    return run_command("run_pipeline.sh", body, conclude)


def _dry_run(config: Config, pipeline: Pipeline) -> Iterator[str]:
    """The page of --dry-run; meanwhile the log says how far it is, since imports and checks take a while."""
    steps = pipeline.steps
    log.info("asking %d stages what is left to do", len(steps))
    plans = pipeline.dry_runs(steps, ended=lambda at: log.info("%s has answered", steps[at].stage))
    log.info("checking this machine, the engine and the model")
    from drafter.pipeline import dry_run  # needs torch

    return dry_run.lines(config, plans)
