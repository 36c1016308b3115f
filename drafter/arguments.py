"""The command line of `run_pipeline.sh`."""

import argparse
from datetime import datetime

from drafter import plan
from drafter.errors import ConfigError
from drafter.stage import Parser, positive


def read(argv: list[str] | None) -> argparse.Namespace:
    """Raises ConfigError for arguments that are wrong, or say nothing together: none is ignored in silence."""
    args = parser().parse_args(argv)
    for time_of_day in (args.deadline, args.done_by):
        plan.next_time(time_of_day, datetime.now())  # a wrong one is told now, not once 01b begins
    if (args.probe or args.done_by) and not args.plan:
        raise ConfigError("--probe and --done-by belong to a plan: write --plan before them")
    part = {"--from": args.first, "--only": args.only, "--limit": args.limit}
    given = [flag for flag, value in part.items() if value is not None]
    if args.plan and given:
        raise ConfigError(f"--plan is of the whole run: leave out {given[0]}")
    flags = [*given, *(["--deadline"] if args.deadline else []), *(["--plan"] if args.plan else [])]
    if "status" in args.config and (flags or args.dry_run):
        raise ConfigError(f"status shows what is there: leave out {[*flags, '--dry-run'][0]}")
    if args.deadline and (args.only or args.first or "01b") != "01b":
        raise ConfigError("--deadline ends 01b, which is not to run: leave out one of the two")
    return args


def parser() -> Parser:
    result = Parser(prog="run_pipeline.sh", description="Every stage in its turn, each with the server it needs.")
    result.add_argument("config", nargs="*", metavar="[status] [CONFIG]", help="default: SmolLM2 on this machine")
    which = result.add_mutually_exclusive_group()
    which.add_argument("--from", dest="first", metavar="NN", help="start at this stage (01b, 02, 04, 05, 06)")
    which.add_argument("--only", metavar="NN", help="this stage alone")
    result.add_argument("--limit", type=positive, metavar="N", help="at most N rows a stage")
    result.add_argument("--deadline", metavar="HH:MM", help="when 01b stops generating")
    instead = result.add_mutually_exclusive_group()
    instead.add_argument("--plan", action="store_true", help="disk, time and cost, then nothing")
    instead.add_argument(
        "--dry-run",
        action="store_true",
        help="offline: what each stage would do, what is missing; exits 0",
    )
    result.add_argument(
        "--probe", action="store_true", help="with --plan: measure first what was never measured here"
    )
    result.add_argument("--done-by", metavar="HH:MM", help="with --plan: say what is done by then, and propose it")
    result.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="overrides")
    return result
