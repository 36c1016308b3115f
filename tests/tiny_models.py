"""Model folders small enough for a test: random weights, true shapes and names.

- `make_tiny_mla`: a DeepSeek-V3 (MLA, experts, untied head) with a byte-level tokenizer.
- `make_tiny_kimi`: the same, nested the way Kimi-K2.5 is (`language_model.` names, `text_config`).
- `make_int4`: either of them with experts in the published INT4 form (compressed-tensors, pack-quantized).
- `make_drafter`: an EAGLE-3 drafter in the published native layout, for any target folder.
"""

import json
import math
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

NUM_LAYERS = 8
HIDDEN = 128
VOCAB = 288
LAYER_IDS = (2, 4, 5, 8)  # the three default EAGLE-3 layers and the final one

# The turn tokens of Kimi-K2.5 in its order; text that the model writes itself is not "special" there.
SPECIAL = ("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>",
           "<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>", "[UNK]", "[PAD]")  # fmt: skip
WRITTEN = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
           "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<think>", "</think>")  # fmt: skip
TOKEN_IDS = {token: 256 + position for position, token in enumerate(SPECIAL + WRITTEN)}
THINK, THINK_END, IM_END = TOKEN_IDS["<think>"], TOKEN_IDS["</think>"], TOKEN_IDS["<|im_end|>"]

GROUP = 32  # weights that share a scale
QUANTIZATION = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
    "config_groups": {"group_0": {
        "targets": ["Linear"], "input_activations": None, "output_activations": None,
        "weights": {
            "num_bits": 4, "type": "int", "symmetric": True, "dynamic": False,
            "strategy": "group", "group_size": GROUP,
        },
    }},
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
}  # fmt: skip

CHAT_TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string -%}{{ content }}{%- elif content is none -%}{%- else -%}
{%- for part in content -%}{{ part['text'] }}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{%- endif -%}
{%- for message in messages -%}
{%- set role = message['role'] -%}
{%- set marker = {'user': '<|im_user|>', 'assistant': '<|im_assistant|>'}.get(role, '<|im_system|>') -%}
{{ marker }}{{ message.get('name') or role }}<|im_middle|>
{%- if role == 'assistant' -%}<think></think>{%- endif -%}
{{ text(message['content']) }}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>
{%- if thinking is defined and thinking is false -%}<think></think>{%- else -%}<think>{%- endif -%}
{%- endif -%}
"""


def make_tiny_mla(folder: Path, seed: int = 0) -> Path:
    """Write the flat model and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(_weights(seed), folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", _text_config() | {"architectures": ["DeepseekV3ForCausalLM"]})
    write_tokenizer(folder)
    return folder


def make_tiny_kimi(folder: Path, seed: int = 0) -> Path:
    """Write the nested model and return its folder. vLLM serves it with `--language-model-only`."""
    folder.mkdir(parents=True, exist_ok=True)
    nested = {f"language_model.{name}": tensor for name, tensor in _weights(seed).items()}
    save_file(nested, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": _text_config() | {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]},
        "vision_config": {
            "num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128,
        },
        "bos_token_id": TOKEN_IDS["[BOS]"],
        "eos_token_id": TOKEN_IDS["[EOS]"],
        "pad_token_id": TOKEN_IDS["[PAD]"],
        "media_placeholder_token_id": TOKEN_IDS["<|media_pad|>"],
        "image_token_id": TOKEN_IDS["<|media_pad|>"],
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }  # fmt: skip
    _write_json(folder / "config.json", config)
    write_tokenizer(folder)
    # The engine builds the image processor even when it serves text only.
    vision = {
        "in_patch_limit": 256, "patch_size": 14, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
        "merge_kernel_size": 2, "fixed_output_tokens": None, "patch_limit_on_one_side": 64,
        "in_patch_limit_each_frame": 256, "in_patch_limit_video": None, "sample_fps": 2.0,
        "max_num_frames_each_video": None, "temporal_merge_kernel_size": 4, "timestamp_mode": "hh:mm:ss.fff",
    }  # fmt: skip
    _write_json(folder / "preprocessor_config.json", {"media_proc_cfg": vision})
    return folder


def make_int4(folder: Path) -> Path:
    """Quantize the routed experts of a model folder in place, as Kimi-K2.5's are, and return it."""
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if ".mlp.experts." in name]:
        weight, stem = weights.pop(name).float(), name.removesuffix("weight")
        groups = weight.view(len(weight), -1, GROUP)
        scale = groups.abs().amax(-1, keepdim=True).div(7).bfloat16()
        codes = (groups / scale.float()).round().clamp(-8, 7).add(8).to(torch.int64).view(len(weight), -1, 8)
        words = (codes << torch.arange(0, 32, 4)).sum(-1)
        weights[f"{stem}weight_packed"] = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
        weights[f"{stem}weight_scale"] = scale[..., 0].contiguous()
        weights[f"{stem}weight_shape"] = torch.tensor(weight.shape)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (config.get("text_config") or config)["quantization_config"] = QUANTIZATION
    _write_json(folder / "config.json", config)
    return folder


def make_drafter(target: Path, folder: Path, draft_vocab_size: int = 128, seed: int = 1) -> Path:
    """Write a random drafter in the native EAGLE-3 layout for `target` and return its folder.

    No embedding (the engine shares the target's), offsets that all differ, layer ids at top level and nested.
    """
    config = json.loads((target / "config.json").read_text())
    config = config.get("text_config", config)
    hidden, vocab, layers = config["hidden_size"], config["vocab_size"], config["num_hidden_layers"]
    heads, kv_heads, head_dim, wide = 4, 2, 32, 2 * hidden
    generator = torch.Generator().manual_seed(seed)
    kept = torch.arange(draft_vocab_size) * (vocab // draft_vocab_size)

    def normal(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * 0.02).to(torch.bfloat16)

    def ones() -> Tensor:
        return torch.ones(hidden, dtype=torch.bfloat16)

    weights = {
        "midlayer.self_attn.q_proj.weight": normal(heads * head_dim, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": normal(kv_heads * head_dim, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": normal(kv_heads * head_dim, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": normal(hidden, heads * head_dim),
        "midlayer.mlp.gate_proj.weight": normal(wide, hidden),
        "midlayer.mlp.up_proj.weight": normal(wide, hidden),
        "midlayer.mlp.down_proj.weight": normal(hidden, wide),
        "midlayer.input_layernorm.weight": ones(),
        "midlayer.hidden_norm.weight": ones(),
        "midlayer.post_attention_layernorm.weight": ones(),
        "fc.weight": normal(hidden, 3 * hidden),
        "norm.weight": ones(),
        "lm_head.weight": normal(draft_vocab_size, hidden),
        "d2t": kept - torch.arange(draft_vocab_size),
        "t2d": torch.zeros(vocab, dtype=torch.bool).index_fill_(0, kept, True),
    }
    ids = [2, layers // 2, layers - 3]
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    drafter = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": hidden,
        "intermediate_size": wide, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": head_dim, "num_hidden_layers": 1, "vocab_size": vocab, "draft_vocab_size": draft_vocab_size,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "hidden_act": "silu",
        "max_position_embeddings": 4096, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
        "dtype": "bfloat16", "torch_dtype": "bfloat16", "bos_token_id": config.get("bos_token_id"),
        "eos_token_id": config.get("eos_token_id"), "eagle_aux_hidden_state_layer_ids": ids,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True},
    }  # fmt: skip
    _write_json(folder / "config.json", drafter)
    return folder


def _text_config() -> dict:
    # Ranks and head sizes are Kimi's: the engine's MLA kernels know no others.
    return {
        "model_type": "deepseek_v3", "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 256,
        "moe_intermediate_size": 64, "num_hidden_layers": NUM_LAYERS, "num_attention_heads": 4,
        "num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
        "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
        "norm_topk_prob": True, "routed_scaling_factor": 2.5, "q_lora_rank": 64, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "first_k_dense_replace": 1,
        "moe_layer_freq": 1, "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 32768,
        "rope_theta": 50000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
        "attention_bias": False, "tie_word_embeddings": False, "num_nextn_predict_layers": 0, "dtype": "bfloat16",
        "torch_dtype": "bfloat16", "bos_token_id": TOKEN_IDS["[BOS]"], "eos_token_id": TOKEN_IDS["[EOS]"],
        "pad_token_id": TOKEN_IDS["[PAD]"],
    }  # fmt: skip


def _weights(seed: int) -> dict[str, Tensor]:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(seed)
    # Wider than the usual 0.02: every layer visibly changes the state, and tokens differ in likelihood.
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**_text_config(), initializer_range=0.1)).bfloat16()
    # A final norm of ones would hide a missing or a doubled norm.
    model.model.norm.weight.data.uniform_(0.5, 1.5)
    _make_likely(model, {THINK_END: 1 / 5, IM_END: 1 / 10})
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)  # back to the published names, one tensor an expert
        return load_file(Path(folder) / "model.safetensors")


@torch.no_grad()
def _make_likely(model, shares: dict[int, float]) -> None:
    """Let tokens win now and then in every context: their head rows follow the mean final state."""
    ids = torch.randint(0, 256, (4, 128))
    final = model.model(ids).last_hidden_state.float().flatten(0, 1)
    mean = final.mean(dim=0)
    level = torch.logsumexp(final @ model.lm_head.weight.float().T, dim=-1).mean()
    for token, share in shares.items():
        model.lm_head.weight[token] = (mean / mean.norm() ** 2 * (level + math.log(share))).to(torch.bfloat16)


def write_tokenizer(folder: Path) -> None:
    """The byte-level tokenizer with its chat template alone."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in WRITTEN])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "[BOS]", "eos_token": "[EOS]",
        "pad_token": "[PAD]", "unk_token": "[UNK]", "clean_up_tokenization_spaces": False,
        "model_max_length": 32768,
    }  # fmt: skip
    _write_json(folder / "tokenizer_config.json", settings)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    # As in the published model: generation stops at <|im_end|>, which is not the config's eos.
    _write_json(folder / "generation_config.json", {"eos_token_id": IM_END, "max_length": 32768})


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")
