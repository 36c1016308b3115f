"""Check that a file holds the states of its row, by the log-probabilities at the row's last position.

The server's reply to each row contains the log-probabilities of the few likeliest next tokens, which are cheap since
it samples one token anyway. The target's norm and head give the same numbers from the file's final layer at the last
position; only these tokens' rows of the head are needed, since logits and log-probabilities differ by a constant.
States of another row, of a shifted position or layer, or from a reused cache block give other numbers.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from drafter.errors import RowError
from drafter.target.head import Verifier

TOKENS = 8  # number of likeliest next tokens to compare
BAR_NAT = 0.3  # above the largest difference of correct rows, below nearly all wrong ones (docs/measurements.md)
PREFIX = "token_id:"

REQUEST = {"logprobs": TOKENS, "return_tokens_as_token_ids": True}  # extra fields of a completion request


@dataclass(frozen=True, slots=True)
class Likeliest:
    """The server's likeliest next tokens after a row, and their log-probabilities."""

    tokens: list[int]
    log_probs: list[float]


def read_reply(reply: dict, rows: int) -> list[Likeliest]:
    """The likeliest tokens after each row of a request, in order. Raises RowError("bad_reply")."""
    try:
        choices = {choice["index"]: choice for choice in reply["choices"]}
        tables = [choices[number]["logprobs"]["top_logprobs"][0] for number in range(rows)]
        found = [_likeliest(table) for table in tables]
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise RowError("bad_reply", f"the reply has no log-probabilities for some row ({error!r})") from None
    return found


def _likeliest(table: dict[str, float]) -> Likeliest:
    log_probs = [float(value) for value in table.values()]
    if len(table) < 2 or not all(map(math.isfinite, log_probs)):
        raise ValueError(f"{len(table)} log-probabilities")
    return Likeliest([int(name.removeprefix(PREFIX)) for name in table], log_probs)


def difference(verifier: Verifier, final: Tensor, served: Likeliest) -> float:
    """Mean difference in nat between file and server, each side centred. final [H]: before the norm."""
    logits = (verifier.normed(final[None]) @ verifier.head[served.tokens].T).float()[0]
    theirs = torch.tensor(served.log_probs)
    return ((logits - logits.mean()) - (theirs - theirs.mean())).abs().mean().item()


def difference_limit(noise: float) -> float:
    """Limit above which a row is wrong, if the probe measured a mean difference of `noise` nat on correct rows."""
    return max(BAR_NAT, 10 * noise)


def checked_difference(verifier: Verifier, final: Tensor, served: Likeliest, most: float) -> float:
    """The difference in nat. Raises RowError("bad_states") when it is not below `most`."""
    found = difference(verifier, final, served)
    if not found < most:
        what = "the log-probabilities after its last token differ from the server's by"
        raise RowError("bad_states", f"{what} {found:.3f} nat (limit {most:.2f})")
    return found
