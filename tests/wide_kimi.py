"""A Kimi-K2.5 of true widths with random weights, few layers and few experts, and a drafter for it.

`python -m tests.wide_kimi FOLDER [tiny]` makes `FOLDER/kimi` and `FOLDER/drafter`; with `tiny` in the widths of the
other tests, which a machine without a GPU computes.
"""

import json
import sys
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import save_file

from tests import tiny_models

LAYERS = 8
WIDE = {
    "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_attention_heads": 64,
    "num_key_value_heads": 64, "n_routed_experts": 8, "q_lora_rank": 1536, "vocab_size": 163840,
}  # fmt: skip
HEADS, HEAD_DIM, DRAFT_VOCAB = 64, 128, 32000  # of the published drafter


def make(folder: Path, wide: bool = True) -> tuple[Path, Path]:
    """Write target and drafter and return their folders."""
    if not wide:
        target = tiny_models.make_tiny_kimi(folder / "kimi")
        return target, tiny_models.make_drafter(target, folder / "drafter")
    config = tiny_models._text_config() | WIDE | {"num_hidden_layers": LAYERS}
    with (
        mock.patch.object(tiny_models, "_text_config", lambda: dict(config)),
        mock.patch.object(tiny_models, "_weights", lambda seed: _weights(config, seed)),
    ):
        target = tiny_models.make_tiny_kimi(folder / "kimi")
    _name_every_token(target / "tokenizer.json")
    return target, _drafter(folder / "drafter")


def _name_every_token(path: Path) -> None:
    """Give each id of the vocabulary a text, so that all that random weights sample can be decoded."""
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary |= tiny_models.TOKEN_IDS
    vocabulary |= {f"<{token}>": token for token in range(len(vocabulary), WIDE["vocab_size"])}
    path.write_text(json.dumps(tokenizer))


def _normal(*shape: int) -> torch.Tensor:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.randn(*shape, device=device, dtype=torch.bfloat16).mul_(0.02).cpu()


def _weights(config: dict, seed: int) -> dict[str, torch.Tensor]:
    """Tensors under DeepSeek-V3's names; all expert layers are the same."""
    torch.manual_seed(seed)
    hidden, vocab, heads = config["hidden_size"], config["vocab_size"], config["num_attention_heads"]
    nope, rope, value = (config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    q, kv = config["q_lora_rank"], config["kv_lora_rank"]

    def mlp(inner: int) -> dict[str, torch.Tensor]:
        shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
        return {f"{name}.weight": _normal(*shape) for name, shape in shapes.items()}

    def layer(dense: bool) -> dict[str, torch.Tensor]:
        made = {
            "input_layernorm.weight": torch.ones(hidden), "post_attention_layernorm.weight": torch.ones(hidden),
            "self_attn.q_a_proj.weight": _normal(q, hidden), "self_attn.q_a_layernorm.weight": torch.ones(q),
            "self_attn.q_b_proj.weight": _normal(heads * (nope + rope), q),
            "self_attn.kv_a_proj_with_mqa.weight": _normal(kv + rope, hidden),
            "self_attn.kv_a_layernorm.weight": torch.ones(kv),
            "self_attn.kv_b_proj.weight": _normal(heads * (nope + value), kv),
            "self_attn.o_proj.weight": _normal(hidden, heads * value),
        }  # fmt: skip
        if dense:
            return made | {f"mlp.{name}": tensor for name, tensor in mlp(config["intermediate_size"]).items()}
        inner = config["moe_intermediate_size"]
        for expert in range(config["n_routed_experts"]):
            made |= {f"mlp.experts.{expert}.{name}": tensor for name, tensor in mlp(inner).items()}
        made |= {f"mlp.shared_experts.{name}": tensor for name, tensor in mlp(inner).items()}
        made["mlp.gate.weight"] = _normal(config["n_routed_experts"], hidden)
        made["mlp.gate.e_score_correction_bias"] = torch.zeros(config["n_routed_experts"])
        return made

    found = {"model.embed_tokens.weight": _normal(vocab, hidden), "lm_head.weight": _normal(vocab, hidden)}
    found["model.norm.weight"] = torch.empty(hidden).uniform_(0.5, 1.5)
    kinds = {True: layer(True), False: layer(False)}
    for number in range(config["num_hidden_layers"]):
        for name, tensor in kinds[number < config["first_k_dense_replace"]].items():
            found[f"model.layers.{number}.{name}"] = tensor.clone()
    return {name: tensor.to(torch.bfloat16) for name, tensor in found.items()}


def _drafter(folder: Path) -> Path:
    hidden, inner, vocab = WIDE["hidden_size"], WIDE["intermediate_size"], WIDE["vocab_size"]
    ones = torch.ones(hidden, dtype=torch.bfloat16)
    weights = {f"midlayer.self_attn.{name}_proj.weight": _normal(HEADS * HEAD_DIM, 2 * hidden) for name in "qkv"}
    weights |= {
        "midlayer.self_attn.o_proj.weight": _normal(hidden, HEADS * HEAD_DIM),
        "midlayer.mlp.gate_proj.weight": _normal(inner, hidden),
        "midlayer.mlp.up_proj.weight": _normal(inner, hidden),
        "midlayer.mlp.down_proj.weight": _normal(hidden, inner), "midlayer.input_layernorm.weight": ones,
        "midlayer.hidden_norm.weight": ones.clone(), "midlayer.post_attention_layernorm.weight": ones.clone(),
        "fc.weight": _normal(hidden, 3 * hidden), "norm.weight": ones.clone(),
        "lm_head.weight": _normal(DRAFT_VOCAB, hidden), "d2t": torch.zeros(DRAFT_VOCAB, dtype=torch.int64),
        "t2d": torch.arange(vocab) < DRAFT_VOCAB,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    ids = [2, LAYERS // 2, LAYERS - 3]
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": hidden,
        "intermediate_size": inner, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
        "head_dim": HEAD_DIM, "num_hidden_layers": 1, "vocab_size": vocab, "draft_vocab_size": DRAFT_VOCAB,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_scaling": None, "hidden_act": "silu",
        "max_position_embeddings": 262144, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "bos_token_id": None, "eos_token_id": None,
        "eagle_aux_hidden_state_layer_ids": ids,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


if __name__ == "__main__":
    print(*make(Path(sys.argv[1]), wide="tiny" not in sys.argv[2:]), sep="\n")
