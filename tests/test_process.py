"""What counts as a live process."""

import subprocess
import sys
import time

from drafter import process

# Its first thread ends, another holds a port: as a process that was killed while it still gives back its memory.
LEADERLESS = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
print(flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_process_lives_until_its_last_thread_is_gone():
    child = subprocess.Popen([sys.executable, "-c", LEADERLESS], stdout=subprocess.PIPE, start_new_session=True)
    child.stdout.readline()
    record = process.identity(child.pid)
    while (state := process._fields(child.pid)) and state[0] != "Z":
        time.sleep(0.01)
    assert state and process.lives(record) and process.members(child.pid) == [child.pid]
    child.kill()
    while process.lives(record):
        time.sleep(0.01)
    assert process.members(child.pid) == []  # dead, and not yet waited for
    assert child.wait() == -9
    child.stdout.close()
