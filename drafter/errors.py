"""Four errors and their exit codes: the type says who dies and what to do next."""

import re
import signal

LONGEST_WORD, LONGEST_MESSAGE = 300, 2000  # letters of an error message; what the user gave may be of any length


class StageError(Exception):
    """Ends a stage with one line on stderr and `exit_code`."""

    exit_code = 1

    def __str__(self) -> str:
        return shortened(super().__str__())


class ConfigError(StageError):
    """Yours: the message says what to change."""

    exit_code = 2


class ResumableError(StageError):
    """Nobody's mistake (server gone past its bound, disk reserve reached): run the same command again."""

    exit_code = 3


class ContractError(StageError):
    """Ours, or a broken file, or a blown failure budget."""

    exit_code = 1


def shortened(text: str) -> str:
    """A message without the middle of its overlong words, and of itself."""
    text = re.sub(rf"\S{{{LONGEST_WORD + 1},}}", lambda word: _without_middle(word[0], LONGEST_WORD), text)
    return _without_middle(text, LONGEST_MESSAGE)


def _without_middle(text: str, longest: int) -> str:
    if len(text) <= longest:
        return text
    head, tail = longest * 2 // 3, longest // 6
    return f"{text[:head]}...({len(text) - head - tail} more letters)...{text[-tail:]}"


class RowError(Exception):
    """One row cannot be used. Counted under `reason`, never fatal.

    `reason` is one of `contracts.REJECT_REASONS`.
    """

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


def next_action(exit_code: int | None) -> str:
    """What a person does about a stage that ended with this code."""
    same = "the same command continues there"
    return f"once that is put right, {same}" if exit_code in (1, 2) else same


class Interrupted(BaseException):
    """A signal asked the stage to stop. State is saved on the way out; exit code is 128 + signal."""

    def __init__(self, signum: int):
        super().__init__(f"interrupted by {signal.Signals(signum).name}")
        self.exit_code = 128 + signum
