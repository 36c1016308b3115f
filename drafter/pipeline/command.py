"""The command `run_pipeline.sh`: what its arguments ask for, one line for what goes wrong, and the exit code."""

import logging
import sys
from datetime import datetime

from drafter import cli, errors, model_folder, signals
from drafter.config import load
from drafter.config.default import default_config
from drafter.errors import Interrupted, StageError
from drafter.pipeline import deadline, plan, status, trial
from drafter.pipeline.run import Pipeline, chosen
from drafter.stage import of_the_machine, summarise
from drafter.target import default_model

log = logging.getLogger("drafter")


def main(argv: list[str] | None = None) -> int:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    sys.stdout.reconfigure(errors="backslashreplace")  # a file's name may be no text
    signals.listen(*signals.wanted())
    pipeline: Pipeline | None = None
    try:
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
                trial.measure(config)
            print(plan.show(config, None, until and until.moment, cli.next_time(args.done_by, now)))
            return 0
        if args.dry_run:
            from drafter.pipeline import dry_run  # needs torch

            print("\n".join(dry_run.lines(config, pipeline.dry_runs(pipeline.steps))))
            return 0
        if config.target.model == model_folder.DEFAULT_MODEL:
            default_model.ensure()
        code = pipeline.run()
    except BrokenPipeError:  # whoever reads has seen enough
        return 1
    except Interrupted as stop:
        log.info("%s: what is done is kept, %s", stop, errors.next_action(None))
        code = stop.exit_code
    except (StageError, OSError) as error:
        known = error if isinstance(error, StageError) else of_the_machine(error)
        if known is None:
            raise
        print(f"run_pipeline.sh: {known}", file=sys.stderr)
        code = known.exit_code
    if pipeline and pipeline.begun:
        summarise(pipeline.state, code)
    return code
