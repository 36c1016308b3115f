"""Turn a served reasoning model into a better EAGLE-3 drafter, overnight."""

import os
import signal
import sys
from pathlib import Path

# In our own programs Ctrl-C during imports ends the process without a traceback, until `signals.listen` is called.
# Other programs that import this package (the server, a notebook) keep their handlers.
OURS = sys.argv[0] == "-m" or Path(sys.argv[0]).resolve().parent == Path(__file__).resolve().parents[1]
if OURS and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _without_packages(kind, error, trace) -> None:
    """Print one line if a package of requirements.txt is not installed; show every other error as usual.

    A missing module of our own, of Python, or inside an installed package is a bug or a broken installation.
    """
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    if not name or "." in name or name == __name__ or name in sys.stdlib_module_names:
        sys.__excepthook__(kind, error, trace)
        return
    print(
        f"no module {name!r} in this Python ({sys.executable}): source .venv/bin/activate, "
        "or run ./run_pipeline.sh once, which creates it",
        file=sys.stderr,
    )
    raise SystemExit(2)


if OURS:
    sys.excepthook = _without_packages

if "DRAFTER_PARENT" in os.environ:  # already here, since the imports of a stage take seconds
    from drafter.process import follow_parent

    follow_parent()
