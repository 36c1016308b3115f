"""The command line of `run_pipeline.sh`. It is checked before the environment exists, so only with Python itself."""

import argparse
import difflib
import sys
from datetime import datetime, timedelta
from pathlib import Path
from typing import overload

from drafter.errors import ConfigError

EXAMPLES = """examples:
  ./run_pipeline.sh                                             the small default model, all stages
  ./run_pipeline.sh mine.yaml --dry-run                         what would be done, and what is missing
  ./run_pipeline.sh mine.yaml --limit 16 --set run.name=short   a short run beside the whole one
  ./run_pipeline.sh mine.yaml --set train.lr=3e-4               with another setting
  ./run_pipeline.sh status mine.yaml                            how far it is, from another terminal
"""
NUMBERS = ("01b", "02", "04", "05", "06")  # of the stages


class Parser(argparse.ArgumentParser):
    """Reports wrong arguments as a ConfigError."""

    def error(self, message: str):
        raise ConfigError(f"{message}; --help shows the arguments")


def positive(text: str) -> int:
    """A positive integer argument."""
    if not (text.isascii() and text.isdecimal() and len(text) < 19 and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)


@overload
def next_time(text: str, now: datetime) -> datetime: ...
@overload
def next_time(text: None, now: datetime) -> None: ...
def next_time(text: str | None, now: datetime) -> datetime | None:
    """The next HH:MM after `now`, or the moment YYYY-MM-DDTHH:MM; both local time. Raises ConfigError."""
    if text is None:
        return None
    try:
        if "T" in text:
            full = datetime.fromisoformat(text)
            return full.astimezone().replace(tzinfo=None) if full.tzinfo else full
        if not text.isascii():  # strptime accepts the digits of every script
            raise ValueError
        at = datetime.strptime(text, "%H:%M")
    except ValueError:
        raise ConfigError(f"{text!r} is not HH:MM or YYYY-MM-DDTHH:MM") from None
    when = now.replace(hour=at.hour, minute=at.minute, second=0, microsecond=0)
    return when if when > now else when + timedelta(days=1)


def moment(text: str) -> datetime:
    """A time argument, resolved when it is parsed."""
    try:
        return next_time(text, datetime.now())
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parsed arguments: `config` is a path or None, `status` whether that word was given.

    Raises ConfigError for wrong arguments and for combinations in which one would have no effect.
    """
    args = parser().parse_intermixed_args(argv)  # CONFIG and status may come before or after flags
    args.status = "status" in args.config
    paths = [*(word for word in args.config if word != "status"), *args.named]
    if len(paths) > 1:
        raise ConfigError(f"give one config, not {' and '.join(paths)}")
    args.config = paths[0] if paths else None
    if paths and not args.config.strip():
        raise ConfigError("the name of the config is blank: give a file, or leave it out for the default config")
    if paths and not Path(args.config).expanduser().exists():
        meant = ", did you mean status?" if difflib.get_close_matches(args.config, ["status"]) else ""
        raise ConfigError(f"no config file {args.config}{meant}")
    for number in (args.first, args.only):
        if number not in (None, *NUMBERS):
            raise ConfigError(f"no stage {number}: choose from {', '.join(NUMBERS)}")
    for time_of_day in (args.deadline, args.done_by):
        next_time(time_of_day, datetime.now())  # refuse a wrong time before the environment is made
    if (args.probe or args.done_by) and not args.plan:
        raise ConfigError("--probe and --done-by need --plan")
    part = {"--from": args.first, "--only": args.only, "--limit": args.limit, "--redo": args.redo or None}
    given = [flag for flag, value in part.items() if value is not None]
    if args.plan and given:
        raise ConfigError(f"--plan covers the whole run: leave out {given[0]}")
    flags = [*given, *(["--deadline"] if args.deadline else []), *(["--plan"] if args.plan else [])]
    if args.rehearse and flags:
        raise ConfigError(f"--rehearse covers the whole run: leave out {flags[0]}")
    flags += ["--rehearse"] * args.rehearse + ["--dry-run"] * args.dry_run
    if args.status and flags:
        raise ConfigError(f"status only reads the run: leave out {flags[0]}")
    if args.json and (args.status or args.plan or args.dry_run or args.rehearse):
        raise ConfigError("--json is about the end of a run: leave it out")
    if args.deadline and (args.only or args.first or "01b") != "01b":
        raise ConfigError("--deadline stops 01b, which this call does not run: leave it out")
    return args


def parser() -> Parser:
    result = Parser(
        prog="run_pipeline.sh",
        description="Run every stage in order, each with the server it needs. With status: show how far the run is.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("config", nargs="*", metavar="[status] [CONFIG]", help="default: SmolLM2 on this machine")
    result.add_argument(
        "--config",
        action="append",
        default=[],
        dest="named",
        metavar="CONFIG",
        help="the same, spelled as for the stages",
    )
    which = result.add_mutually_exclusive_group()
    which.add_argument("--from", dest="first", metavar="NN", help=f"start at this stage ({', '.join(NUMBERS)})")
    which.add_argument("--only", metavar="NN", help="only this stage")
    result.add_argument("--limit", type=positive, metavar="N", help="at most N rows per stage")
    result.add_argument(
        "--redo", action="store_true", help="let 02 replace finished hidden states whose token ids have changed"
    )
    result.add_argument("--deadline", metavar="HH:MM", help="when 01b stops generating; or YYYY-MM-DDTHH:MM")
    instead = result.add_mutually_exclusive_group()
    instead.add_argument("--plan", action="store_true", help="show disk, time and cost, and stop")
    instead.add_argument(
        "--dry-run",
        action="store_true",
        help="offline: show what each stage would do and what is missing; exits 0",
    )
    instead.add_argument(
        "--rehearse", action="store_true", help="the whole run on the first layers of the model, in minutes"
    )
    result.add_argument(
        "--probe", action="store_true", help="with --plan: first measure the rates that were never measured here"
    )
    result.add_argument("--done-by", metavar="HH:MM", help="with --plan: propose what is finished by then")
    add_set(result)
    add_json(result)
    return result


def add_set(arguments: argparse.ArgumentParser) -> None:
    arguments.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        dest="overrides",
        help="change a setting of the config for this call",
    )


def add_json(arguments: argparse.ArgumentParser) -> None:
    arguments.add_argument("--json", action="store_true", help="one line of JSON also on a terminal, as in a pipe")


def main(argv: list[str] | None = None) -> int:
    """Check the arguments: prints nothing if they are right, else the error that the pipeline would print."""
    try:
        parse(argv)
    except ConfigError as error:
        print(f"run_pipeline.sh: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
