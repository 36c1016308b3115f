"""A connector that does wrong on purpose: how, is the first word of the file it is asked for.

vLLM loads it by `kv_connector_module_path`. The server captures the neighbours of the asked layers too, so that a
wrong layer is at hand.
"""

from dataclasses import replace
from pathlib import Path

from drafter.extract.connector import HiddenStatesWriter
from drafter.target.head import read_verifier


class CorruptingWriter(HiddenStatesWriter):
    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        self._folder = Path(vllm_config.model_config.model)
        self._last = None
        self._exchanged = False

    def _gather(self, group, region):
        files = [self._corrupt(save, region) for save in group]
        pair = [tensors for save, tensors in zip(group, files, strict=True) if save.part.name.startswith("exchanged")]
        if len(pair) == 2 and not self._exchanged:  # two rows of one request, once
            self._exchanged = True
            one, other = (tensors["hidden_states"] for tensors in pair)
            kept = one.clone()
            one.copy_(other)
            other.copy_(kept)
        return files, None

    def _corrupt(self, save, region):
        kind = save.part.name.partition("-")[0]
        *aux, final = save.layer_ids
        layers = {
            "early": [*aux, final - 1],  # the final layer, one too early
            "shifted": [*(layer + 1 for layer in aux), final],  # the auxiliary layers, one too late
            "permuted": [aux[1], aux[0], *aux[2:], final],
        }.get(kind, save.layer_ids)
        [tensors], event = super()._gather([replace(save, layer_ids=layers)], region)
        if event is not None:
            event.synchronize()
        hidden = tensors["hidden_states"]
        if kind == "normed":
            hidden[:, -1] = read_verifier(self._folder).normed(hidden[:, -1])
        elif kind == "other":  # another request's states
            hidden.copy_(self._last.repeat(-(-len(hidden) // len(self._last)), 1, 1)[: len(hidden)])
        elif kind == "late":  # one position off
            hidden.copy_(hidden.roll(1, dims=0))
        elif kind == "short":
            tensors["hidden_states"] = hidden[:-16]
        elif kind == "zeros":
            hidden.zero_()
        else:
            self._last = hidden.clone()
        return tensors
