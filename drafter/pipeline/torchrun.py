"""torchrun that behaves like a stage: the output and the exit code of the ranks, without the launcher's traceback.

    python -m drafter.pipeline.torchrun --standalone --nproc-per-node 8 04_train.py --config FILE

Signals are forwarded to every rank, which saves and ends; torchrun itself would kill the ranks after 30 s.
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
    """Exit code of the first rank that failed, as a shell reports it."""
    logging.disable()  # the ranks report errors like every stage
    args = run.parse_args(arguments)
    args.signals_to_handle = "SIGQUIT"  # the others are handled here
    for signum in signals.wanted():
        signal.signal(signum, _forward)
    os.environ |= process.parent_here()  # each rank leads its own session
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
