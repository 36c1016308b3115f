"""Turn a served reasoning model into a better EAGLE-3 drafter, overnight."""

import os
import signal
import sys
from pathlib import Path

# One of our own programs: until its handlers are there, Ctrl-C ends it as SIGTERM does, without a traceback out of
# whatever it is importing. In other programs (the server, a notebook) their handlers stay.
OURS = sys.argv[0] == "-m" or Path(sys.argv[0]).resolve().parent == Path(__file__).resolve().parents[1]
if OURS and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _without_packages(kind, error, trace) -> None:
    """One line for an interpreter without a package of requirements.txt; every other error is shown as ever.

    A missing module of our own, of Python or inside an installed package is a bug or a broken install.
    """
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    if not name or "." in name or name == __name__ or name in sys.stdlib_module_names:
        sys.__excepthook__(kind, error, trace)
        return
    print(
        f"no module {name!r} in this Python ({sys.executable}): source .venv/bin/activate, "
        "or run ./run_pipeline.sh once, which makes it",
        file=sys.stderr,
    )
    raise SystemExit(2)


if OURS:
    sys.excepthook = _without_packages

if "DRAFTER_PARENT" in os.environ:  # here, because what a stage imports next takes seconds
    from drafter.process import follow_parent

    follow_parent()
