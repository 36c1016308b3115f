"""What counts as a live process."""

import ast
import subprocess
import sys
import time

import pytest

from drafter import config, process

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


@pytest.mark.parametrize("line", [["no-such-program"], ["/etc/hostname"], ["/bin/echo", "a\0b"]])
def test_a_program_that_cannot_be_run_is_one_line_for_the_user(line):
    """Seam M5: missing, forbidden, or an impossible command line."""
    with pytest.raises(process.NoProgram, match=f"^{line[0]}: [^\n]+$"):
        process.run(line)


def test_a_command_that_does_not_end_is_killed_and_can_be_resumed_from(tmp_path):
    """Seam M5"""
    line = ["/bin/sh", "-c", f"echo $$ > {tmp_path}/pid; sleep 60"]
    with pytest.raises(process.TimedOut, match="has not ended after 0.5 s") as caught:
        process.run(line, timeout=0.5)
    assert caught.value.exit_code == 3
    while process.members(int((tmp_path / "pid").read_text())):  # a killed process is gone a moment later
        time.sleep(0.01)


def test_output_that_is_no_text_is_read():
    """Seam M5"""
    done = process.run(["/bin/sh", "-c", r"printf 'a\377b'; printf '\377' >&2"])
    assert (done.stdout, done.stderr) == ("a�b", "�")


def test_commands_are_run_to_their_end_by_one_runner_only():
    """Seam M5: whoever calls subprocess otherwise starts a process that lives on, and none waits without a bound."""
    running = {"run", "call", "check_call", "check_output", "getoutput", "Popen", "system", "popen"}
    calls: dict[str, set[str]] = {}
    for path in (config.ROOT / "drafter").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            module = getattr(node.value, "id", "") if isinstance(node, ast.Attribute) else ""
            if module in ("subprocess", "os") and node.attr in running:
                calls.setdefault(path.stem, set()).add(node.attr)
    assert calls.pop("process") == {"Popen"}
    assert calls == {"command_server": {"Popen"}, "supervise": {"Popen"}, "writer": {"Popen"}}


def test_an_answer_is_found_before_what_a_program_writes_as_it_ends():
    said = ["loading", '{"a": 0}', '{"a": 1}', "[W] process group was not destroyed", "[1, 2]", "[" * 100_000, ""]
    assert process.last_object(said) == {"a": 1}
    assert process.last_object([line.encode() for line in said]) == {"a": 1}
    assert process.last_object([b"\xff", b"nothing"]) == {}


def test_each_of_several_commands_is_reported_once_in_order_when_it_has_ended():
    ended = []
    done = process.run_all([["echo", "a"], ["false"], ["echo", "c"]], ended=ended.append)
    assert ended == [0, 1, 2] and [each.returncode for each in done] == [0, 1, 0]
