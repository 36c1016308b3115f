"""Finds out which layers a warm start was trained on, by its loss before training.

Published drafters count layers in two ways: an id means a layer's input, as in vLLM, or its output, which is the next
layer's input. A drafter that gets the wrong ones still learns, but from a worse start. Rows that were captured both
ways (`extract.neighbour_ids`) show which way is right.
"""

from dataclasses import replace

import torch

from drafter.config import Config
from drafter.errors import ConfigError
from drafter.train import examples
from drafter.train.draft_model import STATS, Drafter

FOLDER = "neighbours"  # below 02_hidden_states: files like the others, with every layer and its upper neighbour
MAX_LOSS_SHARE = 0.98  # a smaller difference of losses may have other reasons


def losses_by_layer_ids(drafter: Drafter, config: Config, rows: list[examples.Example]) -> dict[str, float]:
    """Step-0 loss of the warm start by layer ids, on the rows that were captured both ways. Empty without such rows.

    Raises ConfigError when the upper neighbours are clearly better.
    """
    folder = config.stage_dir("02_hidden_states") / FOLDER
    rows = [row for row in rows if (folder / row.entry.path).exists()]
    if not rows:
        return {}
    *aux, final = config.target.layer_ids
    upper = [layer + 1 for layer in aux]
    captured = tuple(sorted({*aux, *upper, final}))
    architecture = config.target.architecture
    shape = architecture.hidden_size, architecture.vocab_size
    reader = examples.Reader(folder, captured, *shape, drafter.steps, think_end=None, pin=False)
    device = drafter.fc.weight.device
    losses = {}
    for ids in (aux, upper):
        columns = [captured.index(layer) for layer in (*ids, final)]
        sums = torch.zeros(len(STATS), device=device)
        for row in rows:
            pack = reader.read([row])
            pack = replace(pack, states=pack.states[:, columns].contiguous()).map(lambda t: t.to(device))
            with torch.no_grad():
                sums += drafter(pack, torch.ones(drafter.steps, device=device))[1].sum(0)[0]
        losses[", ".join(map(str, ids))] = round(float(sums[STATS.index("loss")] / sums[STATS.index("count")]), 4)
    own, other = losses.values()
    if other < MAX_LOSS_SHARE * own:
        raise ConfigError(
            f"train.warm_start drafts better from layers {upper} (loss {other}) than from {aux} (loss {own}): "
            f"its ids mean layer outputs; set target.layer_ids to {[*upper, final]} and extract again"
        )
    return losses
