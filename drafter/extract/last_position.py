"""Whether a file holds the states of its row: the log-probabilities at the row's last position, from both sides.

The reply to each row carries the server's log-probabilities of the few likeliest next tokens, which cost it little,
as it samples one token anyway. The final layer of the file's last position gives the same numbers through the
target's norm and head; only these tokens' rows of the head are needed, since logits and log-probabilities differ by
a constant.
Another row's states, a position or a layer off, or a cache block that was used twice give other numbers.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from drafter.errors import RowError
from drafter.target.head import Verifier

TOKENS = 8  # likeliest next tokens that are compared
BAR_NAT = 0.3  # between the largest difference of right rows and nearly all of wrong ones, see docs/measurements.md
PREFIX = "token_id:"

REQUEST = {"logprobs": TOKENS, "return_tokens_as_token_ids": True}  # beside a completion request's other fields


@dataclass(frozen=True, slots=True)
class Likeliest:
    """The server's likeliest next tokens after a row, and their log-probabilities."""

    tokens: list[int]
    log_probs: list[float]


def read_reply(reply: dict, rows: int) -> list[Likeliest]:
    """Of each row of a request, in its order. Raises RowError("bad_reply")."""
    try:
        choices = {choice["index"]: choice for choice in reply["choices"]}
        tables = [choices[number]["logprobs"]["top_logprobs"][0] for number in range(rows)]
        found = [_likeliest(table) for table in tables]
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise RowError("bad_reply", f"the reply lacks the log-probabilities of a row ({error!r})") from None
    return found


def _likeliest(table: dict[str, float]) -> Likeliest:
    log_probs = [float(value) for value in table.values()]
    if len(table) < 2 or not all(map(math.isfinite, log_probs)):
        raise ValueError(f"{len(table)} log-probabilities")
    return Likeliest([int(name.removeprefix(PREFIX)) for name in table], log_probs)


def difference(verifier: Verifier, final: Tensor, served: Likeliest) -> float:
    """Mean difference in nat between both sides' numbers, each less its mean. final [H]: before the norm."""
    logits = (verifier.normed(final[None]) @ verifier.head[served.tokens].T).float()[0]
    theirs = torch.tensor(served.log_probs)
    return ((logits - logits.mean()) - (theirs - theirs.mean())).abs().mean().item()


def difference_limit(noise: float) -> float:
    """Above which difference a row is wrong, where the probe found `noise` nat of mean difference in right rows."""
    return max(BAR_NAT, 10 * noise)


def checked_difference(verifier: Verifier, final: Tensor, served: Likeliest, most: float) -> float:
    """The difference. Raises RowError("bad_states") when it is not below `most`."""
    found = difference(verifier, final, served)
    if not found < most:
        what = "the log-probabilities after its last token differ by"
        raise RowError("bad_states", f"{what} {found:.3f} nat from the server's (the bar is {most:.2f})")
    return found
