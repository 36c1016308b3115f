"""Stage 02 of one target on 1, 2 and 4 GPUs by tensor parallelism: how fast, and the same states.

    python benchmarks/extract_parallel.py --out DIR [--degrees 1,2,4]
    python benchmarks/extract_parallel.py --out DIR --tiny      one degree, on a CPU

The target is random and Kimi-shaped (MLA, experts, hidden 7168, 64 heads: 57,344 B a token), with few layers and few
experts. Its servers, eager, without prefix caching, start together and idle while another is measured. Every degree
extracts the same rows by `02_extract_hidden_states.py`, whose probe compares states with the server's own
log-probabilities; then the states are compared row by row with those of the first degree.
Figures are printed as `METRIC name value` as soon as they are known.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parent))
from extract import ROOT, distances, metric, write_rows

from drafter import config, probe, server
from drafter.errors import StageError
from tests import tiny_models

LAYERS, EXPERTS, VOCAB = 8, 8, 32768
SHAPE = {
    "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": LAYERS,
    "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": EXPERTS, "num_experts_per_tok": 2,
    "q_lora_rank": 1536, "vocab_size": VOCAB,
}  # fmt: skip
LAYER_IDS = [2, LAYERS // 2, LAYERS - 3, LAYERS]
COMPARED = 24  # rows whose states are compared


def make_target(folder: Path) -> None:
    """The tiny target's folder, blown up: its tensors' names, Kimi's sizes, random values."""
    tiny_models.make_tiny_mla(folder)
    (folder / "model.safetensors").unlink()
    settings = json.loads((folder / "config.json").read_text()) | SHAPE
    (folder / "config.json").write_text(json.dumps(settings))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)

    def normal(rows: int, columns: int, scale: float = 0.02) -> torch.Tensor:
        return (torch.randn(rows, columns, device=device, generator=generator) * scale).bfloat16().cpu()

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    s, hidden = settings, settings["hidden_size"]
    heads, nope, rope, value = (
        s["num_attention_heads"], s["qk_nope_head_dim"], s["qk_rope_head_dim"], s["v_head_dim"],
    )  # fmt: skip

    def mlp(prefix: str, inner: int, scale: float = 0.02) -> dict[str, torch.Tensor]:
        return {
            f"{prefix}.gate_proj.weight": normal(inner, hidden),
            f"{prefix}.up_proj.weight": normal(inner, hidden),
            f"{prefix}.down_proj.weight": normal(hidden, inner, scale),
        }

    placed: dict[str, str] = {}

    def write(tensors: dict[str, torch.Tensor], file: str) -> None:
        save_file(tensors, folder / file, metadata={"format": "pt"})
        placed.update(dict.fromkeys(tensors, file))

    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        tensors = {
            f"{name}.input_layernorm.weight": ones(hidden),
            f"{name}.post_attention_layernorm.weight": ones(hidden),
            f"{name}.self_attn.q_a_proj.weight": normal(s["q_lora_rank"], hidden),
            f"{name}.self_attn.q_a_layernorm.weight": ones(s["q_lora_rank"]),
            f"{name}.self_attn.q_b_proj.weight": normal(heads * (nope + rope), s["q_lora_rank"]),
            f"{name}.self_attn.kv_a_proj_with_mqa.weight": normal(s["kv_lora_rank"] + rope, hidden),
            f"{name}.self_attn.kv_a_layernorm.weight": ones(s["kv_lora_rank"]),
            f"{name}.self_attn.kv_b_proj.weight": normal(heads * (nope + value), s["kv_lora_rank"]),
            f"{name}.self_attn.o_proj.weight": normal(hidden, heads * value),
        }
        if layer < s["first_k_dense_replace"]:
            tensors |= mlp(f"{name}.mlp", s["intermediate_size"])
        else:
            tensors[f"{name}.mlp.gate.weight"] = normal(EXPERTS, hidden)
            tensors[f"{name}.mlp.gate.e_score_correction_bias"] = torch.zeros(EXPERTS)
            tensors |= mlp(f"{name}.mlp.shared_experts", s["moe_intermediate_size"])
            for expert in range(EXPERTS):  # a random router has many ties: what they decide must weigh little
                tensors |= mlp(f"{name}.mlp.experts.{expert}", s["moe_intermediate_size"], 0.002)
        write(tensors, f"model-{layer}.safetensors")
    # Rows of the head differ in length: as in text, a few tokens stand out, and the best one is no tie.
    lengths = torch.randn(VOCAB, 1, generator=torch.Generator().manual_seed(1)).exp().bfloat16()
    outer = {
        "model.embed_tokens.weight": normal(VOCAB, hidden, 1.0),
        "model.norm.weight": torch.empty(hidden, dtype=torch.bfloat16).uniform_(0.5, 1.5),
        "lm_head.weight": normal(VOCAB, hidden, 0.003) * lengths,
    }
    write(outer, "model-outer.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))


def settings_of(degree: int, position: int, model: Path, args: argparse.Namespace) -> list[str]:
    """Overrides of a config for one degree, on a port of its own."""
    flags = {"max-num-batched-tokens": 16384, "max-model-len": 8192, "gpu-memory-utilization": args.memory}
    flags |= {"kv-cache-memory-bytes": 20_000_000_000}  # servers that start together cannot measure what is free
    if args.tiny:
        flags = {"max-num-batched-tokens": 8192, "max-model-len": 8192}  # a CPU cannot cut a row in MLA
    flags |= {"dtype": "bfloat16", "enforce-eager": True, "enable-prefix-caching": False}
    flags |= {"tensor-parallel-size": degree, "disable-custom-all-reduce": True}
    # NVLink multicast is not to be had everywhere; NCCL's rings are what a PCIe box has, too.
    env = {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    own = {
        "run.name": f"degree{degree}", "run.dir": args.out, "target.model": model, "target.served_name": "random",
        "target.layer_ids": list(tiny_models.LAYER_IDS) if args.tiny else LAYER_IDS, "target.max_seq_len": 2000,
        "target.special_tokens": {}, "servers.extract.kind": "command", "servers.extract.gpus": [],
        "servers.extract.url": f"http://127.0.0.1:{args.port + position}", "servers.extract.args": flags,
        "servers.extract.env": env, "servers.extract.start_minutes": 2, "extract.concurrency": 64,
        "extract.reserve_gb": 1, "extract.rows_per_shard": 1000,
    }  # fmt: skip
    return [f"{key}={json.dumps(value, default=str)}" for key, value in own.items()]


@contextlib.contextmanager
def servers(runs: dict[int, config.Config]) -> Iterator[list[int]]:
    """Every degree's server, up; the degrees that came up."""

    def up(run_config: config.Config) -> bool:
        try:
            server.up(run_config, "extract")
        except StageError as error:
            print(f"{run_config.run.name}: {error}\n{server.tail(run_config, 'extract')[-3000:]}", flush=True)
            return False
        return True

    try:
        with ThreadPoolExecutor() as threads:
            started = time.perf_counter()
            done = list(threads.map(up, runs.values()))
            metric("start_s", time.perf_counter() - started)
        yield [degree for degree, ready in zip(runs, done, strict=True) if ready]
    finally:
        for run_config in runs.values():
            server.down(run_config, "extract")


def extract(degree: int, overrides: list[str]) -> bool:
    """Stage 02 as a user runs it, its server being there already."""
    line = [sys.executable, "02_extract_hidden_states.py"]
    for entry in [*overrides, "servers.extract.kind=external"]:
        line += ["--set", entry]
    done = subprocess.run(line, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=100)
    summary = json.loads(done.stdout.splitlines()[-1])
    if done.returncode:
        print(f"degree {degree}: {summary.get('error')}", flush=True)
        return False
    facts = summary["facts"]
    metric(f"tp{degree}_tokens_per_s", float(facts["tokens_per_second"]))
    metric(f"tp{degree}_probe_mean_nat", facts["probes"][0]["mean_nat"])
    metric(f"tp{degree}_probe_top1", facts["probes"][0]["top1"])
    return True


def compare(first: config.Config, other: config.Config, rows: int, name: str) -> None:
    """Relative distances, token by token, between the states of two runs."""
    for layer, column in zip(first.target.layer_ids, distances(first, other, rows).T, strict=True):
        metric(f"{name}_layer{layer}_mean_distance", float(column.mean()))
        metric(f"{name}_layer{layer}_median_distance", float(column.median()))
        metric(f"{name}_layer{layer}_share_beyond_{probe.RELATIVE}", float((column > probe.RELATIVE).float().mean()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--degrees", default="1,2,4")
    parser.add_argument("--rows", type=int, default=120)
    parser.add_argument("--tokens", type=int, default=1000, help="of a row")
    parser.add_argument("--memory", type=float, default=0.3, help="share of a GPU for each server on it")
    parser.add_argument("--port", type=int, default=9260)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    model, started = args.out / "model", time.perf_counter()
    if not model.exists():
        tiny_models.make_tiny_mla(model) if args.tiny else make_target(model)
    metric("make_target_s", time.perf_counter() - started)
    degrees = [1] if args.tiny else [int(degree) for degree in args.degrees.split(",")]
    overrides = {d: settings_of(d, i, model, args) for i, d in enumerate(degrees)}
    runs = {d: config.load(ROOT / "configs/smollm2_cpu.yaml", overrides[d]) for d in degrees}
    generator = torch.Generator().manual_seed(0)
    vocab = tiny_models.VOCAB - len(tiny_models.TOKEN_IDS) if args.tiny else VOCAB
    rows = torch.randint(vocab, (args.rows, args.tokens), generator=generator).tolist()
    with servers(runs) as ready:
        done = []
        for degree in ready:
            write_rows(runs[degree], rows)
            if extract(degree, overrides[degree]):
                done.append(degree)
    for degree in done[1:]:
        compare(runs[done[0]], runs[degree], min(args.rows, COMPARED), f"tp{degree}_against_tp{done[0]}")
    sys.exit(0 if done == degrees else 1)


if __name__ == "__main__":
    main()
