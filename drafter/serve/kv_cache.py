"""The KV cache of a server: bytes per token, and the figures in the server's /metrics."""

import re
from dataclasses import dataclass
from pathlib import Path

from drafter import model_folder

SERIES = re.compile(r"^vllm:(\w+?)(?:_total)?\{([^}]*)\} (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class KvCache:
    """One reading of /metrics, summed over engines."""

    tokens: int  # 0: unknown
    running: int
    waiting: int
    preemptions: int  # since the server started

    def fitting(self, tokens_each: float) -> int:
        """Number of requests of so many tokens each that fit at once."""
        return int(self.tokens / tokens_each)


def read(metrics: str) -> KvCache:
    """From Prometheus text; 0 for missing figures. Raises ValueError when a figure is no number."""
    found = dict.fromkeys(("num_requests_running", "num_requests_waiting", "num_preemptions"), 0)
    tokens = 0
    for name, labels, value in SERIES.findall(metrics):
        if name == "cache_config_info":
            tokens += _tokens(dict(re.findall(r'(\w+)="([^"]*)"', labels)))
        elif name in found:
            found[name] += int(float(value))
    return KvCache(tokens, *found.values())


def _tokens(labels: dict[str, str]) -> int:
    """vLLM before 0.32 reports only blocks, without decode context parallelism."""
    if labels.get("kv_cache_size_tokens", "").isdecimal():
        return int(labels["kv_cache_size_tokens"])
    blocks, size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
    return int(blocks) * int(size) if blocks.isdecimal() and size.isdecimal() else 0


def bytes_per_token(model: Path, tensor_parallel: int = 1) -> int:
    """bf16 bytes of a token on each GPU; with MLA one vector for all heads, which every GPU holds completely.

    Raises ConfigError when `model` is no model folder.
    """
    text = model_folder.read_text_config(model, "num_hidden_layers", "num_attention_heads", "hidden_size")
    layers, heads = text["num_hidden_layers"], text["num_attention_heads"]
    if text.get("kv_lora_rank"):
        return layers * (text["kv_lora_rank"] + text.get("qk_rope_head_dim", 0)) * 2
    kept = max(1, (text.get("num_key_value_heads") or heads) // tensor_parallel)
    return layers * 2 * kept * (text.get("head_dim") or text["hidden_size"] // heads) * 2
