"""Four errors and their exit codes: the type says what ends (a stage or a row) and who must act."""

import re
import signal

LONGEST_WORD, LONGEST_MESSAGE = 300, 2000  # characters of an error message, which may quote user input of any length


class StageError(Exception):
    """Ends a stage with one line on stderr and `exit_code`."""

    exit_code = 1

    def __str__(self) -> str:
        return shortened(super().__str__())


class ConfigError(StageError):
    """The user must act: the message says what to change."""

    exit_code = 2


class ResumableError(StageError):
    """No mistake (server down too long, disk reserve reached): run the same command again."""

    exit_code = 3


class ContractError(StageError):
    """A broken file, an exceeded failure budget, or our bug."""

    exit_code = 1


def shortened(text: str) -> str:
    """The message with the middle of overlong words, and of the whole, left out."""
    text = re.sub(rf"\S{{{LONGEST_WORD + 1},}}", lambda word: _without_middle(word[0], LONGEST_WORD), text)
    return _without_middle(text, LONGEST_MESSAGE)


def _without_middle(text: str, longest: int) -> str:
    if len(text) <= longest:
        return text
    head, tail = longest * 2 // 3, longest // 6
    return f"{text[:head]}...({len(text) - head - tail} more characters)...{text[-tail:]}"


class RowError(Exception):
    """One row cannot be used. It is counted under `reason` and never ends a stage.

    `reason` is one of `contracts.REJECT_REASONS`.
    """

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


def next_action(exit_code: int | None) -> str:
    """What the user does about a stage that ended with this exit code, for the end of a sentence."""
    same = "the same command continues there"
    return f"once that is fixed, {same}" if exit_code in (1, 2) else same


class Interrupted(BaseException):
    """A signal asked the program to stop. It saves its state; the exit code is 128 + signal."""

    def __init__(self, signum: int):
        super().__init__(f"interrupted by {signal.Signals(signum).name}")
        self.exit_code = 128 + signum
