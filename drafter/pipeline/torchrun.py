"""torchrun with the manners of a stage: what a rank says and its exit code, and no traceback of the launcher's own.

    python -m drafter.pipeline.torchrun --standalone --nproc-per-node 8 04_train.py --config FILE

A signal goes on to every rank, which saves and ends by itself; torchrun's own way gives them 30 s.
"""

import logging
import os
import signal
import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from drafter import process, signals


def main(arguments: list[str]) -> int:
    """Exit code of the first rank that failed, as a shell says it."""
    logging.disable()  # the ranks say what happened, as every stage does
    args = run.parse_args(arguments)
    args.signals_to_handle = "SIGQUIT"  # the others are ours
    for signum in signals.wanted():
        signal.signal(signum, _forward)
    os.environ |= process.parent_here()  # ranks are in sessions of their own
    try:
        run.run(args)
    except SignalException as stop:
        return 128 + stop.sigval
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0 and -failure.exitcode not in signals.SIGNALS:
            print(f"04_train: rank {rank} was killed by signal {-failure.exitcode}", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    return 0


def _forward(signum: int, _frame) -> None:
    ranks = process.children(os.getpid())
    if not ranks:
        raise SystemExit(128 + signum)
    process.send(ranks, signum)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
