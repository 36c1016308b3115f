"""The KV cache: its size a token follows from the model, the rest is read from the server's own metrics."""

import json

import pytest

from drafter.serve import kv_cache

METRICS = """# HELP vllm:num_requests_running x
vllm:num_requests_running{engine="0",model_name="k"} 61.0
vllm:num_requests_waiting{engine="0",model_name="k"} 139.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="k",reason="capacity"} 139.0
vllm:num_preemptions_total{engine="0",model_name="k"} 12.0
vllm:num_preemptions_created{engine="0",model_name="k"} 1.7e+09
"""
CONFIG = 'vllm:cache_config_info{block_size="16",engine="0",%s} 1.0\n'


def test_the_server_says_how_many_tokens_it_holds_and_what_it_preempted():
    found = kv_cache.read(METRICS + CONFIG % 'kv_cache_size_tokens="758367",num_gpu_blocks="11849"')
    assert found == kv_cache.KvCache(758_367, 61, 139, 12)
    assert found.fitting(4096) == 185


def test_of_an_older_server_the_tokens_are_its_blocks():
    assert kv_cache.read(METRICS + CONFIG % 'num_gpu_blocks="11875"').tokens == 190_000


@pytest.mark.parametrize("text", ["", "# nothing\n", CONFIG % 'num_gpu_blocks="None"', "<html>"])
def test_a_server_that_does_not_say_has_no_tokens(text):
    assert kv_cache.read(text).tokens == 0


KIMI = {"num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 64, "num_key_value_heads": 64}
KIMI |= {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
GROUPED = {"num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3}


@pytest.mark.parametrize(
    ("text", "ranks", "size"),
    [(KIMI, 1, 70_272), (KIMI, 8, 70_272), (GROUPED, 1, 30 * 2 * 3 * 64 * 2), (GROUPED, 3, 30 * 2 * 64 * 2)],
)
def test_a_token_takes_one_vector_a_layer_with_mla_and_two_a_key_head_without(tmp_path, text, ranks, size):
    others = {"vocab_size": 100, "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text | others}))
    assert kv_cache.bytes_per_token(tmp_path, ranks) == size
