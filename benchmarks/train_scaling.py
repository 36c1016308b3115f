"""Training on 1, 2, 4 and 8 GPUs: DDP against FSDP2, with and without peer-to-peer copies.

    python benchmarks/train_scaling.py                 every number of GPUs that this machine has
    python benchmarks/train_scaling.py --worlds 1,2    some
    python benchmarks/train_scaling.py --tiny          the same code on gloo ranks of a CPU

The Kimi-shaped drafter on random states, a pack of 8,192 a rank, 3 TTT steps, head frozen. PCIe machines without
peer-to-peer copies behave as with `NCCL_P2P_DISABLE=1`. At the end one epoch in SmolLM2's shape on one rank and on
all, at equal global batch: the same losses. Figures are printed as `METRIC name value` as soon as they are known.
"""

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import train as bench

KINDS = {"ddp": ("ddp", True), "fsdp2": ("fsdp2", True), "fsdp2_gathered": ("fsdp2", False)}  # kind, reshard
SECONDS = 120  # of one measurement at most


def launch(world: int, script: list[str], environment: dict[str, str], **options) -> subprocess.CompletedProcess:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world)]
    command += ["--master-port", str(port), *script]
    return subprocess.run(command, env=os.environ | environment, timeout=SECONDS, **options)


def measure(kind: str, arguments) -> None:
    """Inside torchrun: steps of one kind; rank 0 prints one JSON line."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from drafter import parallel

    shape = bench.TINY if arguments.tiny else bench.KIMI
    with parallel.ranks() as ranks, bench.scratch() as folder:
        wrapper, reshard = KINDS[kind]
        runner = bench.Ours(
            shape,
            shape.pack,
            folder,
            wrap=lambda model, compute: parallel.wrap(model, wrapper, ranks, compute, reshard),
        )
        for _ in range(3):
            runner.step()
        bench.synchronize()
        ranks.barrier()
        started = time.perf_counter()
        for _ in range(arguments.steps):
            runner.step()
        bench.synchronize()
        ranks.barrier()
        seconds = (time.perf_counter() - started) / arguments.steps
        activities = [ProfilerActivity.CUDA] if torch.cuda.is_available() else [ProfilerActivity.CPU]
        with profile(activities=activities) as trace:
            for _ in range(2):
                runner.step()
            bench.synchronize()
        moved = sum(
            event.self_device_time_total if torch.cuda.is_available() else event.self_cpu_time_total
            for event in trace.key_averages()
            if "nccl" in event.key.lower() or "gloo" in event.key.lower()
        )
        if ranks.main:
            facts = {"seconds": seconds, "peak_gib": bench.peak_gb(), "communication_s": moved / 2 / 1e6}
            print("RESULT " + json.dumps(facts), flush=True)


def scaling(worlds: list[int], arguments) -> None:
    shape = bench.TINY if arguments.tiny else bench.KIMI
    alone = None
    for world in worlds:
        for kind in KINDS if world > 1 else ("ddp",):
            for peer in (True, False) if world > 1 and not arguments.tiny else (True,):
                name = f"scaling_{world}_{kind}" + ("" if peer else "_nop2p") if world > 1 else "scaling_1"
                script = [__file__, "--measure", kind, "--steps", str(arguments.steps)]
                script += ["--tiny"] if arguments.tiny else []
                threads = {"OMP_NUM_THREADS": "1"} if arguments.tiny else {}
                try:
                    done = launch(
                        world, script, threads | ({} if peer else {"NCCL_P2P_DISABLE": "1"}),
                        stdout=subprocess.PIPE, text=True,
                    )  # fmt: skip
                except subprocess.TimeoutExpired:
                    print(f"{name}: time limit", flush=True)
                    continue
                lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
                if not lines:
                    print(f"{name}: failed, exit code {done.returncode}", flush=True)
                    continue
                facts = json.loads(lines[-1].removeprefix("RESULT "))
                rate = world * shape.pack / facts["seconds"]
                alone = alone or rate
                bench.metric(f"{name}_tokens_per_s", rate)
                bench.metric(f"{name}_efficiency", rate / (alone * world))
                bench.metric(f"{name}_peak_gib", facts["peak_gib"])
                bench.metric(f"{name}_communication_share", facts["communication_s"] / facts["seconds"])


def equal_losses(world: int, arguments) -> None:
    """One epoch on one rank and on `world`, at equal global batch."""
    losses = {}
    for ranks in (1, world):
        with bench.scratch() as folder:
            script = bench.make_run(folder, arguments.tiny)
            pack = 512 if arguments.tiny else 4096
            script += ["--set", "train.epochs=1", "--set", f"train.tokens_per_step={world * pack}"]
            done = launch(ranks, script, {}, stdout=subprocess.DEVNULL)
            if done.returncode:
                print(f"equal losses: {ranks} ranks failed", flush=True)
                return
            log = folder / "runs/bench/04_train/metrics.jsonl"
            records = [json.loads(line) for line in log.read_text().splitlines()]
            losses[ranks] = [record["loss_total"] for record in records if record["kind"] == "train"]
    pairs = list(zip(losses[1], losses[world], strict=True))
    bench.metric("equal_steps", len(pairs))
    bench.metric("equal_largest_relative_difference", max(abs(a - b) / a for a, b in pairs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", help="numbers of ranks; default 1, 2, 4, 8 as far as there are GPUs")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--measure", help=argparse.SUPPRESS)  # inside torchrun
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.measure, arguments)
        return
    if arguments.worlds:
        worlds = [int(world) for world in arguments.worlds.split(",")]
    else:
        gpus = 2 if arguments.tiny or not shutil.which("nvidia-smi") else _gpus()
        worlds = [world for world in (1, 2, 4, 8) if world <= gpus]
    scaling(worlds, arguments)
    if worlds[-1] > 1:
        equal_losses(worlds[-1], arguments)


def _gpus() -> int:
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True)
    return len(listed.stdout.splitlines())


if __name__ == "__main__":
    main()
