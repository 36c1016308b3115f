"""Turn a served reasoning model into a better EAGLE-3 drafter, overnight."""

import signal
import sys
from pathlib import Path

# One of our own programs: until its handlers are there, Ctrl-C ends it as SIGTERM does, without a traceback out of
# whatever it is importing. In other programs (the server, a notebook) their handlers stay.
OURS = sys.argv[0] == "-m" or Path(sys.argv[0]).resolve().parent == Path(__file__).resolve().parents[1]
if OURS and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
