"""Whether a warm start drafts from these hidden states as it did in serving, before it is trained on them.

Three comparisons on held-out conversations, each with a false alarm rate that is stated and practically zero:

- with the auxiliary layers in every other order: states whose layers were exchanged give a better loss there;
- with one constant guess: a drafter whose head or vocabulary map is not its own guesses no better;
- with the acceptance length that the smoke test measured when vLLM served the same drafter.
"""

import itertools
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from drafter.config import Config
from drafter.contracts import Counts, IndexEntry
from drafter.errors import ConfigError
from drafter.intervals import student_t
from drafter.serve import smoke_record
from drafter.target.head import Verifier
from drafter.train import examples
from drafter.train.batch import Pack
from drafter.train.dataset import Dataset, make_reader
from drafter.train.draft_model import STATS, Drafter

# With a right drafter at least nine conversations of ten beat a constant guess and every other order of layers. That
# half of 24 independent ones do not then has a probability of 8.5e-7, half of more a smaller one.
MIN_CONVERSATIONS = 24
CONVERSATIONS = 40  # looked at
CLEARLY = 0.98  # share of the loss that the better order of layers must be below, too
FALSE_ALARM = 1e-6  # of the comparison with serving, for a drafter at its bound
# Lowest share of (length - 1) that other prompts may leave. Measured (docs/measurements.md): a drafter trained on one
# narrow set is accepted with 2.64 there and 1.30 on code, which leaves 0.30 / 1.64 = 0.18.
OTHER_PROMPTS = 0.15
MAX_SHIFT, SHIFTED = 8, 0.05  # ids looked at either way; share outside above which a shift is looked for
COUNT, LOSS, CORRECT, PREFIX = (STATS.index(name) for name in ("count", "loss", "correct", "prefix"))


@dataclass(frozen=True, slots=True)
class Look:
    """Sums over N conversations, K steps of a draft. A hit is a guess of the target's own likeliest token."""

    sums: np.ndarray  # [N, K, 5] draft.STATS, with the layers in their own order
    losses: dict[tuple[int, ...], np.ndarray]  # order of the layers -> [N] summed loss of step 0
    hits: dict[tuple[int, ...], np.ndarray]  # the same, hits of step 0
    constant: np.ndarray  # [N] hits of the best constant guess at step 0


def check_warm_start(drafter: Drafter, verifier: Verifier, config: Config, dataset: Dataset) -> dict[str, float]:
    """Facts about the warm start's first guesses; empty with fewer than MIN_CONVERSATIONS held-out conversations.

    Raises ConfigError naming what does not belong together.
    """
    rows = _rows(dataset, config)
    if len(rows) < MIN_CONVERSATIONS:
        return {}
    look = _look(drafter, verifier, config, dataset, rows)
    _check_order(look, config)
    smoke = smoke_record.find(config)
    steps = min(drafter.steps, smoke_record.DRAFT_TOKENS)
    guessed = _length(look.sums[:, :steps, PREFIX], look.sums[:, :steps, COUNT])
    facts = {"first_look_length": round(guessed[0], 4)}
    if smoke and len(smoke.tallies) >= MIN_CONVERSATIONS:
        hits, drafts = smoke.tallies[:, 1 : 1 + steps], smoke.tallies[:, :1].repeat(steps, 1)
        reached = _length(hits, drafts)
        facts["served_length"] = round(reached[0], 4)
        _check_served(guessed, reached, min(len(rows), len(smoke.tallies)), config)
    _check_chance(look, config)
    return facts


def share_outside_vocabulary(kept: Tensor, counts: Tensor) -> float:
    """Share of `counts` [V] (how often the target wrote each token) outside the draft vocabulary `kept` [V] bool.

    Raises ConfigError when the vocabulary has none of the tokens, or would have nearly all if its ids were shifted.
    """
    if not counts[kept].any():
        raise ConfigError(
            "train.warm_start: its vocabulary has none of the tokens that the target wrote, so no draft could be "
            "accepted; take a drafter of this target's tokenizer"
        )
    shifts = [shift for shift in range(-MAX_SHIFT, MAX_SHIFT + 1) if shift]
    outside = {shift: 1 - float(counts[kept.roll(shift)].sum() / counts.sum()) for shift in (0, *shifts)}
    best = min(shifts, key=lambda shift: (round(outside[shift], 6), abs(shift)))
    if outside[0] > SHIFTED and outside[best] < outside[0] / 4:
        raise ConfigError(
            f"train.warm_start: {outside[0]:.1%} of the tokens that the target wrote are outside its vocabulary, but "
            f"only {outside[best]:.1%} if all ids in d2t and t2d were {abs(best)} {'higher' if best > 0 else 'lower'}"
            ": the vocabulary map is shifted, or of another tokenizer; fetch the drafter again or take another"
        )
    return outside[0]


def _rows(dataset: Dataset, config: Config) -> list[examples.Example]:
    """One row of each held-out conversation that the target answered itself, up to where the smoke test ends."""
    replayed = {source.name for source in config.prompts if source.mode == "replay"}
    first: dict[str, IndexEntry] = {}
    for row in dataset.validation:
        if row.entry.source not in replayed:
            spans = [[start, min(end, start + smoke_record.TOKENS)] for start, end in row.supervised[:1]]
            first.setdefault(row.entry.conv_id, replace(row.entry, supervised=spans))
    chosen = list(first.values())[:CONVERSATIONS]
    return examples.learnable_rows(
        chosen, config.target.max_seq_len, config.train.ttt_steps, Counts(total=len(chosen))
    )


@torch.no_grad()
def _look(
    drafter: Drafter, verifier: Verifier, config: Config, dataset: Dataset, rows: list[examples.Example]
) -> Look:
    reader = make_reader(config, dataset.folder, pin=False)
    device = drafter.fc.weight.device
    head, scale = verifier.head.to(device), torch.ones(drafter.steps, device=device)
    likeliest, sums = [], []
    orders = list(itertools.permutations(range(len(config.target.aux_layer_ids))))
    for row in rows:
        pack = reader.read([row]).map(lambda t: t.to(device))
        final = verifier.normed(pack.teacher_states(torch.float32).cpu()).to(device)
        pack = replace(pack, labels=(final @ head.T).argmax(-1))
        likeliest.append(pack.labels[pack.depth > 0].cpu())
        by_order = [drafter(_reordered(pack, order), scale)[1].sum(0).double().cpu() for order in orders]
        sums.append(torch.stack(by_order))
    found = torch.stack(sums).numpy()  # [N, orders, K, 5]
    favourite = torch.cat(likeliest).bincount().argmax()
    constant = np.array([int((labels == favourite).sum()) for labels in likeliest])
    losses, hits = ({order: found[:, i, 0, what] for i, order in enumerate(orders)} for what in (LOSS, CORRECT))
    return Look(found[:, 0], losses, hits, constant)


def _reordered(pack: Pack, order: tuple[int, ...]) -> Pack:
    """The pack with its auxiliary layers in another order."""
    if pack.aux is None:
        return replace(pack, states=pack.states[:, [*order, len(order)]].contiguous())
    index = list(order)
    bits = pack.aux.view(torch.uint8)[:, index].contiguous().view(pack.aux.dtype)  # float8 has no indexing everywhere
    return replace(pack, aux=bits, aux_scale=pack.aux_scale[:, index].contiguous())


def _beats_chance(hits: np.ndarray, look: Look) -> bool:
    return (hits > look.constant).sum() > len(hits) / 2


def _check_order(look: Look, config: Config) -> None:
    """Raises ConfigError when the drafter drafts well from another order of the layers, and better than from this."""
    own, *others = look.losses
    best = min(others, key=lambda order: look.losses[order].sum(), default=own)
    better = look.losses[best] < look.losses[own]
    clearly = look.losses[best].sum() < CLEARLY * look.losses[own].sum()
    if better.sum() > len(better) / 2 and clearly and _beats_chance(look.hits[best], look):
        ids = config.target.aux_layer_ids
        raise ConfigError(
            f"the hidden states do not hold layers {list(ids)} in this order: the warm start drafts better from them "
            f"as {[ids[i] for i in best]} (loss {_mean(look, best):.3f} against {_mean(look, own):.3f} on "
            f"{len(better)} held-out conversations); extract again, and check the extract server's layer ids"
        )


def _mean(look: Look, order: tuple[int, ...]) -> float:
    return float(look.losses[order].sum() / look.sums[:, 0, COUNT].sum())


def _check_chance(look: Look, config: Config) -> None:
    hits, asked = look.sums[:, 0, CORRECT], look.sums[:, 0, COUNT].sum()
    if not _beats_chance(hits, look):
        ours, constant = hits.sum() / asked, look.constant.sum() / asked
        raise ConfigError(
            f"train.warm_start: {config.train.warm_start} guesses {ours:.1%} of the target's likeliest tokens on "
            f"{len(hits)} held-out conversations; one constant token is {constant:.1%} of them. Its head, "
            "vocabulary map (d2t, t2d) or layers are not those it was trained with, or it drafts for another "
            "model: take another drafter, or leave train.warm_start out to train from scratch"
        )


def _length(hits: np.ndarray, asked: np.ndarray) -> tuple[float, float]:
    """Acceptance length and its standard error from [N, K] guesses that were right so far, and [N, K] of all."""
    count, totals = len(hits), asked.sum(0).clip(min=1)
    shares = hits.sum(0) / totals
    residuals = ((hits - shares * asked) / totals).sum(1)
    return 1 + float(shares.sum()), float(np.sqrt(count / (count - 1) * (residuals**2).sum()))


def _check_served(
    guessed: tuple[float, float], reached: tuple[float, float], conversations: int, config: Config
) -> None:
    """Raises ConfigError when even OTHER_PROMPTS of what serving reached is excluded, at FALSE_ALARM."""
    missing = OTHER_PROMPTS * (reached[0] - 1) - (guessed[0] - 1)
    error = float(np.hypot(OTHER_PROMPTS * reached[1], guessed[1]))
    if missing > student_t(FALSE_ALARM, conversations - 1) * error:
        raise ConfigError(
            f"train.warm_start reached acceptance length {reached[0]:.2f} when vLLM served it, but these hidden "
            f"states let expect {guessed[0]:.2f}: their auxiliary layers {list(config.target.aux_layer_ids)} are not "
            "those that the drafter was trained on (exchanged, or one layer too early or too late); compare "
            "target.layer_ids with the drafter's config.json and the extract server's layer ids, and extract again"
        )
