"""A new drafter for a target that has none yet: its config, vocabulary and first weights."""

from typing import Any

import torch
from torch import Tensor

from drafter.config import Target
from drafter.errors import ConfigError
from drafter.model_folder import read_text_config
from drafter.target import eagle3_folder
from drafter.target.head import Verifier


def first_config(target: Target, draft_vocab_size: int | None, intermediate_size: int | None) -> dict[str, Any]:
    """The native config of a drafter with the shape of the target's layers."""
    inner = read_text_config(target.model, "num_attention_heads", "intermediate_size")
    hidden, heads = inner["hidden_size"], inner["num_attention_heads"]
    ids = list(target.aux_layer_ids)
    rope = inner.get("rope_parameters") or {"rope_theta": inner.get("rope_theta", 10000.0), "rope_type": "default"}
    return {
        "architectures": [eagle3_folder.ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate_size or inner["intermediate_size"],
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": inner.get("num_key_value_heads") or heads,
        "head_dim": inner.get("head_dim") or hidden // heads,
        "vocab_size": inner["vocab_size"],
        "draft_vocab_size": draft_vocab_size or inner["vocab_size"],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None,
        "rope_parameters": {"rope_theta": rope["rope_theta"], "rope_type": "default"},
        "max_position_embeddings": inner["max_position_embeddings"],
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": inner.get("bos_token_id"),
        "eos_token_id": inner.get("eos_token_id"),
        "torch_dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": ids,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True},
    }


def first_weights(
    config: dict[str, Any],
    verifier: Verifier,
    vocabulary: Tensor | None,
    seed: int,
    last_layer: dict[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """First weights of a new drafter: the target's last layer, norm and head, applied to the last auxiliary state.

    States of a trained model have a few huge components, so a random `fc` would start at a wrong scale. If
    `last_layer` has another form than a drafter's layer (MLA, experts), the layer starts as the identity.

    `vocabulary` [D] holds the drafted token ids in ascending order; None drafts the whole vocabulary.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    aux = len(config["eagle_aux_hidden_state_layer_ids"])

    def normal(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * 0.02

    weights = {
        "midlayer.self_attn.q_proj.weight": normal(heads, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": normal(kv_heads, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": normal(kv_heads, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": torch.zeros(hidden, heads),
        "midlayer.mlp.gate_proj.weight": normal(inner, hidden),
        "midlayer.mlp.up_proj.weight": normal(inner, hidden),
        "midlayer.mlp.down_proj.weight": torch.zeros(hidden, inner),
        "midlayer.input_layernorm.weight": torch.ones(hidden),
        "midlayer.hidden_norm.weight": torch.ones(hidden),
        "midlayer.post_attention_layernorm.weight": torch.ones(hidden),
        "fc.weight": torch.cat([torch.zeros(hidden, (aux - 1) * hidden), torch.eye(hidden)], 1),
        "norm.weight": verifier.norm.to(torch.float32, copy=True),  # a copy, since the teacher's is frozen
    }
    if last_layer:
        weights |= _layer_of_target(weights, last_layer, hidden)
    if vocabulary is None:
        return weights | {"lm_head.weight": verifier.head.to(torch.float32, copy=True)}
    kept = torch.zeros(config["vocab_size"], dtype=torch.bool)
    kept[vocabulary] = True
    offsets = vocabulary - torch.arange(len(vocabulary))
    return weights | {"lm_head.weight": verifier.head[vocabulary].float(), "d2t": offsets, "t2d": kept}


def _layer_of_target(weights: dict[str, Tensor], layer: dict[str, Tensor], hidden: int) -> dict[str, Tensor]:
    """The target's layer as weights of a drafter's, which reads token and state; empty if their forms differ."""
    taken = {}
    for name, own in weights.items():
        if not name.startswith("midlayer.") or name == "midlayer.input_layernorm.weight":
            continue
        source = layer.get(name.removeprefix("midlayer.").replace("hidden_norm", "input_layernorm"))
        token_half = own[:, :hidden] if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")) else None
        if source is not None and token_half is not None and len(source) == len(own):
            source = torch.cat([token_half, source.float()], 1)
        if source is None or source.shape != own.shape:
            return {}
        taken[name] = source.float()
    return taken


def draft_vocabulary(counts: Tensor, size: int) -> Tensor:
    """The `size` most frequent token ids, ascending [size]; if fewer occur, the lowest unseen ids are added.

    `counts` [V]. Raises ConfigError when the target's vocabulary is smaller than `size`.
    """
    if size > len(counts):
        raise ConfigError(f"train.draft_vocab_size: {size} is more than the target's {len(counts)} tokens")
    order = counts.sort(descending=True, stable=True).indices
    return order[:size].sort().values
