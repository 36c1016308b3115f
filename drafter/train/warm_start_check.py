"""Checks, before training, that a warm start drafts as well from the captured hidden states as when vLLM served it.

Three comparisons on held-out conversations, each with a stated false alarm rate that is practically zero:

- with the auxiliary layers in every other order: if layers were exchanged, another order has a lower loss;
- with one constant guess: a drafter with a wrong head or vocabulary map guesses no better;
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

# With a correct drafter at least nine of ten conversations beat a constant guess and every other order of layers. The
# probability that half of 24 independent ones do not is then 8.5e-7; for more conversations it is smaller.
MIN_CONVERSATIONS = 24
CONVERSATIONS = 40  # used at most
MAX_LOSS_SHARE = 0.98  # another order of layers is better only if its loss is below this share as well
FALSE_ALARM = 1e-6  # probability of a false alarm in the comparison with serving, for a drafter at its bound
# Lowest share of (length - 1) that may be left on other prompts. Measured (docs/measurements.md): a drafter trained
# on one narrow set reaches length 2.64 there and 1.30 on code, which leaves 0.30 / 1.64 = 0.18.
OTHER_PROMPTS = 0.15
MAX_SHIFT, SHIFTED = 8, 0.05  # shifts of ids that are tried; share outside the vocabulary above which they are tried
COUNT, LOSS, CORRECT, PREFIX = (STATS.index(name) for name in ("count", "loss", "correct", "prefix"))


@dataclass(frozen=True, slots=True)
class Look:
    """Sums over N conversations and K draft steps. A hit is a guess of the target's likeliest token."""

    sums: np.ndarray  # [N, K, 5] draft.STATS, with the layers in their own order
    losses: dict[tuple[int, ...], np.ndarray]  # order of the layers -> [N] summed loss of step 0
    hits: dict[tuple[int, ...], np.ndarray]  # the same, hits of step 0
    constant: np.ndarray  # [N] hits of the best constant guess at step 0


def check_warm_start(drafter: Drafter, verifier: Verifier, config: Config, dataset: Dataset) -> dict[str, float]:
    """Facts about the warm start's first guesses; empty with fewer than MIN_CONVERSATIONS held-out conversations.

    Raises ConfigError naming the part that does not match the target or the states.
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


def share_outside_vocabulary(kept: Tensor, counts: Tensor, judged: bool = True) -> float:
    """Share of `counts` [V] (how often the target wrote each token) outside the draft vocabulary `kept` [V] bool.

    If `judged`, raises ConfigError when none of the tokens is in the vocabulary, or nearly all would be if its ids
    were shifted.
    """
    if not judged:
        return 1 - float(counts[kept].sum() / counts.sum())
    if not counts[kept].any():
        raise ConfigError(
            "train.warm_start: none of the tokens that the target wrote is in its vocabulary, so no draft could be "
            "accepted; use a drafter made for this target's tokenizer"
        )
    shifts = [shift for shift in range(-MAX_SHIFT, MAX_SHIFT + 1) if shift]
    outside = {shift: 1 - float(counts[kept.roll(shift)].sum() / counts.sum()) for shift in (0, *shifts)}
    best = min(shifts, key=lambda shift: (round(outside[shift], 6), abs(shift)))
    if outside[0] > SHIFTED and outside[best] < outside[0] / 4:
        raise ConfigError(
            f"train.warm_start: {outside[0]:.1%} of the tokens that the target wrote are outside its vocabulary, but "
            f"only {outside[best]:.1%} if all ids in d2t and t2d were {abs(best)} {'higher' if best > 0 else 'lower'}"
            ": the vocabulary map is shifted or belongs to another tokenizer; fetch the drafter again or use another"
        )
    return outside[0]


def _rows(dataset: Dataset, config: Config) -> list[examples.Example]:
    """One row of each held-out conversation that the target itself answered, cut at the smoke test's length."""
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
    if pack.aux is None or pack.aux_scale is None:
        return replace(pack, states=pack.states[:, [*order, len(order)]].contiguous())
    index = list(order)
    bits = pack.aux.view(torch.uint8)[:, index].contiguous().view(pack.aux.dtype)  # float8 has no indexing everywhere
    return replace(pack, aux=bits, aux_scale=pack.aux_scale[:, index].contiguous())


def _beats_chance(hits: np.ndarray, look: Look) -> bool:
    return (hits > look.constant).sum() > len(hits) / 2


def _check_order(look: Look, config: Config) -> None:
    """Raises ConfigError when the drafter drafts well, and better, from the layers in another order."""
    own, *others = look.losses
    best = min(others, key=lambda order: look.losses[order].sum(), default=own)
    better = look.losses[best] < look.losses[own]
    clearly = look.losses[best].sum() < MAX_LOSS_SHARE * look.losses[own].sum()
    if better.sum() > len(better) / 2 and clearly and _beats_chance(look.hits[best], look):
        ids = config.target.aux_layer_ids
        raise ConfigError(
            f"the hidden states do not hold layers {list(ids)} in this order: the warm start drafts better with the "
            f"order {[ids[i] for i in best]} (loss {_mean(look, best):.3f}, not {_mean(look, own):.3f}, on "
            f"{len(better)} held-out conversations); check the extract server's layer ids and extract again"
        )


def _mean(look: Look, order: tuple[int, ...]) -> float:
    return float(look.losses[order].sum() / look.sums[:, 0, COUNT].sum())


def _check_chance(look: Look, config: Config) -> None:
    hits, asked = look.sums[:, 0, CORRECT], look.sums[:, 0, COUNT].sum()
    if not _beats_chance(hits, look):
        ours, constant = hits.sum() / asked, look.constant.sum() / asked
        raise ConfigError(
            f"train.warm_start: {config.train.warm_start} guesses {ours:.1%} of the target's likeliest tokens on "
            f"{len(hits)} held-out conversations; guessing one constant token reaches {constant:.1%}. Its head, "
            "vocabulary map (d2t, t2d) or layers are not those it was trained with, or it drafts for another "
            "model: use another drafter, or remove train.warm_start to train from scratch"
        )


def _length(hits: np.ndarray, asked: np.ndarray) -> tuple[float, float]:
    """Acceptance length and its standard error, from [N, K] counts of correct guesses so far and of all guesses."""
    count, totals = len(hits), asked.sum(0).clip(min=1)
    shares = hits.sum(0) / totals
    residuals = ((hits - shares * asked) / totals).sum(1)
    return 1 + float(shares.sum()), float(np.sqrt(count / (count - 1) * (residuals**2).sum()))


def _check_served(
    guessed: tuple[float, float], reached: tuple[float, float], conversations: int, config: Config
) -> None:
    """Raises ConfigError when the length is below OTHER_PROMPTS of the served one, at level FALSE_ALARM."""
    missing = OTHER_PROMPTS * (reached[0] - 1) - (guessed[0] - 1)
    error = float(np.hypot(OTHER_PROMPTS * reached[1], guessed[1]))
    if missing > student_t(FALSE_ALARM, conversations - 1) * error:
        raise ConfigError(
            f"train.warm_start reached acceptance length {reached[0]:.2f} when vLLM served it, but only "
            f"{guessed[0]:.2f} on these hidden states: their layers {list(config.target.aux_layer_ids)} are "
            "not those that the drafter was trained on (exchanged, or off by one layer); compare target.layer_ids "
            "with the drafter's config.json and the extract server's layer ids, and extract again"
        )
