"""Stage 02 of one target on 1, 2 and 4 GPUs with tensor parallelism: speed, and whether the states are the same.

    python -m benchmarks.extract_parallel --out DIR [--degrees 1,2,4]
    python -m benchmarks.extract_parallel --out DIR --degrees 1,2 --tiny      on a CPU

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

from benchmarks.extract import ROOT, distances, metric, post_all, write_rows
from drafter import config
from drafter.errors import StageError
from drafter.extract import probe
from drafter.serve import roles
from tests import tiny_models

LAYERS = 8
SHAPE = {
    "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": LAYERS,
    "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "q_lora_rank": 1536, "vocab_size": 32768,
}  # fmt: skip
TINY = SHAPE | {
    "hidden_size": 512, "intermediate_size": 1024, "moe_intermediate_size": 256, "num_attention_heads": 8,
    "num_key_value_heads": 8, "q_lora_rank": 256, "vocab_size": 4096,
}  # fmt: skip
LAYER_IDS = [2, LAYERS // 2, LAYERS - 3, LAYERS]
COMPARED = 24  # rows whose states are compared
LOG_LINES = 40
STARTED = time.monotonic()


def make_target(folder: Path, shape: dict) -> None:
    """The tests' tiny target with other sizes: random weights that keep every state's size near one.

    Every token has a likely successor, as in text: without one, the best of many equal tokens is a tie that bf16
    decides.
    """
    tiny_models.make_tiny_mla(folder)
    (folder / "model.safetensors").unlink()
    s = json.loads((folder / "config.json").read_text()) | shape
    (folder / "config.json").write_text(json.dumps(s))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)

    def normal(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        """Makes vectors of size `gain` out of vectors of size one."""
        return (torch.randn(rows, columns, device=device, generator=generator) * gain / columns**0.5).bfloat16()

    hidden, heads, vocab = s["hidden_size"], s["num_attention_heads"], s["vocab_size"]
    nope, rope, value = s["qk_nope_head_dim"], s["qk_rope_head_dim"], s["v_head_dim"]

    def mlp(prefix: str, inner: int, gain: float = 1.0) -> dict[str, torch.Tensor]:
        return {
            f"{prefix}.gate_proj.weight": normal(inner, hidden),
            f"{prefix}.up_proj.weight": normal(inner, hidden),
            f"{prefix}.down_proj.weight": normal(hidden, inner, gain),
        }

    placed: dict[str, str] = {}

    def write(tensors: dict[str, torch.Tensor], file: str) -> None:
        own = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        save_file(own, folder / file, metadata={"format": "pt"})
        placed.update(dict.fromkeys(tensors, file))

    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        tensors = {
            f"{name}.input_layernorm.weight": torch.ones(hidden).bfloat16(),
            f"{name}.post_attention_layernorm.weight": torch.ones(hidden).bfloat16(),
            f"{name}.self_attn.q_a_proj.weight": normal(s["q_lora_rank"], hidden),
            f"{name}.self_attn.q_a_layernorm.weight": torch.ones(s["q_lora_rank"]).bfloat16(),
            # Scores of a deviation of two: a position looks at a handful of others.
            f"{name}.self_attn.q_b_proj.weight": normal(heads * (nope + rope), s["q_lora_rank"], 2.0),
            f"{name}.self_attn.kv_a_proj_with_mqa.weight": normal(s["kv_lora_rank"] + rope, hidden),
            f"{name}.self_attn.kv_a_layernorm.weight": torch.ones(s["kv_lora_rank"]).bfloat16(),
            f"{name}.self_attn.kv_b_proj.weight": normal(heads * (nope + value), s["kv_lora_rank"]),
            f"{name}.self_attn.o_proj.weight": normal(hidden, heads * value),
        }
        if layer < s["first_k_dense_replace"]:
            tensors |= mlp(f"{name}.mlp", s["intermediate_size"])
        else:
            tensors[f"{name}.mlp.gate.weight"] = normal(s["n_routed_experts"], hidden)
            tensors[f"{name}.mlp.gate.e_score_correction_bias"] = torch.zeros(s["n_routed_experts"])
            tensors |= mlp(f"{name}.mlp.shared_experts", s["moe_intermediate_size"])
            for expert in range(s["n_routed_experts"]):
                # A random router has ties, which bf16 decides: what hangs on them weighs little.
                tensors |= mlp(f"{name}.mlp.experts.{expert}", s["moe_intermediate_size"], 0.1)
        write(tensors, f"model-{layer}.safetensors")
    embed = normal(vocab, hidden, hidden**0.5)
    successors = torch.randperm(vocab, device=device, generator=generator)
    outer = {
        "model.embed_tokens.weight": embed,
        "model.norm.weight": torch.empty(hidden).uniform_(0.5, 1.5).bfloat16(),
        "lm_head.weight": (embed.float()[successors] * 28 / hidden).bfloat16(),
    }
    write(outer, "model-outer.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))


def settings_of(degree: int, position: int, model: Path, args: argparse.Namespace) -> list[str]:
    """Overrides of a config for one degree, on a separate port."""
    flags = {"max-num-batched-tokens": 16384, "max-model-len": 8192, "gpu-memory-utilization": args.memory}
    flags |= {"kv-cache-memory-bytes": 20_000_000_000}  # servers that start together cannot measure what is free
    if not torch.cuda.is_available():
        # There vLLM cannot cut a row in MLA, and its kernel for rotary embeddings (0.32) misreads MLA's slices.
        flags = {"max-num-batched-tokens": 8192, "max-model-len": 8192}
        flags["compilation-config"] = {"custom_ops": ["all", "-rotary_embedding"]}
    flags |= {"dtype": "bfloat16", "enforce-eager": True, "enable-prefix-caching": False}
    flags |= {"tensor-parallel-size": degree, "disable-custom-all-reduce": True}
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # one NUMA node has several ranks
    # NVLink multicast is not to be had everywhere; NCCL's rings are what a PCIe box has, too.
    env |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
    env |= {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_ALLREDUCE_USE_FLASHINFER": "0"}
    own = {
        "run.name": f"degree{degree}", "run.dir": args.out, "target.model": model, "target.served_name": "random",
        "target.layer_ids": LAYER_IDS, "target.max_seq_len": 2000,
        "target.special_tokens": {}, "servers.extract.kind": "command", "servers.extract.gpus": [],
        "servers.extract.url": f"http://127.0.0.1:{args.port + position}", "servers.extract.args": flags,
        "servers.extract.env": env, "servers.extract.start_minutes": args.start_seconds / 60,
        "servers.extract.stop_seconds": 5,
        "extract.concurrency": 64, "extract.reserve_gb": 1, "extract.rows_per_shard": 1000,
    }  # fmt: skip
    return [f"{key}={json.dumps(value, default=str)}" for key, value in own.items()]


def log_of(run_config: config.Config) -> str:
    """The end of the server's log, and before it the errors of its processes that came first."""
    path = run_config.run_dir / "servers" / "extract.log"
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    errors = [line for line in lines[:-LOG_LINES] if "ERROR" in line]
    return "\n".join(line[:300] for line in [*errors[:LOG_LINES], *lines[-LOG_LINES:]])


@contextlib.contextmanager
def servers(runs: dict[int, config.Config]) -> Iterator[list[int]]:
    """Start a server for every degree; returns those that became ready, prints the others' log tails."""

    def up(degree: int) -> bool:
        try:
            roles.up(runs[degree], "extract")
        except StageError as error:
            print(f"degree {degree} is left out: {error}\n{log_of(runs[degree])}", flush=True)
            return False
        metric(f"tp{degree}_start_s", time.monotonic() - STARTED)
        return True

    try:
        with ThreadPoolExecutor() as threads:
            came = list(threads.map(up, runs))
        yield [degree for degree, ready in zip(runs, came, strict=True) if ready]
    finally:
        with ThreadPoolExecutor() as threads:
            list(threads.map(lambda run_config: roles.down(run_config, "extract"), runs.values()))


def measure(run_config: config.Config, overrides: list[str], degree: int, rows: list, deadline: float) -> bool:
    """The same rows as bare requests, nothing written, then by stage 02; whether all went well before `deadline`."""
    try:
        for name, some in (("first", rows[:COMPARED]), ("bare", rows)):  # it compiles at its first large steps
            seconds = post_all(run_config, "extract", some, 64, limit=deadline - time.monotonic())
            metric(f"tp{degree}_{name}_tokens_per_s", sum(map(len, some)) / seconds)
        summary = extract(overrides, deadline - time.monotonic())
        for probed in summary.get("facts", {}).get("probes", [])[:1]:
            metric(f"tp{degree}_probe_mean_nat", probed["mean_nat"])
            metric(f"tp{degree}_probe_top1", probed["top1"])
        if "error" not in summary:
            metric(f"tp{degree}_tokens_per_s", float(summary["facts"]["tokens_per_second"]))
            return True
        why = summary["error"]
    except (TimeoutError, subprocess.TimeoutExpired, StageError, LookupError, ValueError) as error:
        why = repr(error)[-300:]
    print(f"degree {degree} failed: {why}\n{log_of(run_config)}", flush=True)
    return False


def extract(overrides: list[str], seconds: float) -> dict:
    """Run stage 02 as a user does, on the running server; returns its summary."""
    line = [sys.executable, "02_extract_hidden_states.py"]
    for entry in [*overrides, "servers.extract.kind=external"]:
        line += ["--set", entry]
    done = subprocess.run(line, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=seconds)
    return json.loads(done.stdout.splitlines()[-1])


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
    parser.add_argument("--memory", type=float, default=0.1, help="share of a GPU that must be free for a server")
    parser.add_argument("--port", type=int, default=9260, help="of the first server")
    parser.add_argument("--start-seconds", type=float, default=110, help="later servers are left out")
    parser.add_argument("--seconds", type=float, default=190, help="nothing is begun or waited for later")
    parser.add_argument("--tiny", action="store_true", help="a target for a CPU")
    args = parser.parse_args()
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    model = args.out / "model"
    if not model.exists():
        make_target(model, TINY if args.tiny else SHAPE)
    metric("make_target_s", time.monotonic() - STARTED)
    degrees = [int(degree) for degree in args.degrees.split(",")]
    overrides = {d: settings_of(d, i, model, args) for i, d in enumerate(degrees)}
    runs = {d: config.load(ROOT / "configs/smollm2_cpu.yaml", overrides[d]) for d in degrees}
    vocab = (TINY if args.tiny else SHAPE)["vocab_size"]
    rows = torch.randint(vocab, (args.rows, args.tokens), generator=torch.Generator().manual_seed(0)).tolist()
    done: list[int] = []
    with servers(runs) as ready:
        for degree in ready:
            write_rows(runs[degree], rows)
            if measure(runs[degree], overrides[degree], degree, rows, STARTED + args.seconds):
                done.append(degree)
                if len(done) > 1:
                    compare(runs[done[0]], runs[degree], min(args.rows, COMPARED), f"tp{degree}_against_tp{done[0]}")
            metric("wall_s", time.monotonic() - STARTED)
    sys.exit(0 if done == degrees else 1)


if __name__ == "__main__":
    main()
