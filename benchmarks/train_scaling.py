"""Training on 1, 2, 4 and 8 GPUs: DDP against FSDP2, with and without peer-to-peer copies.

    python -m benchmarks.train_scaling                 every number of GPUs that this machine has
    python -m benchmarks.train_scaling --worlds 1,2    some
    python -m benchmarks.train_scaling --parts equal   only whether the losses are equal
    python -m benchmarks.train_scaling --tiny          the same code on gloo ranks of a CPU

The Kimi-shaped drafter on random states, a pack of 8,192 a rank, 3 TTT steps, head frozen. PCIe machines without
peer-to-peer copies behave as with `NCCL_P2P_DISABLE=1`. Then one epoch in SmolLM2's shape on one rank, twice, and
on all by DDP and by FSDP2 (`equal`); by what `auto` chooses without peer-to-peer copies, and by FSDP2 ended and
resumed on half of them (`ended`).
Figures are printed as `METRIC name value` as soon as they are known; the most important come first, and what would
begin after `--seconds` is left out.
"""

import argparse
import itertools
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

from benchmarks import train as bench
from benchmarks import train_stage

KINDS = {"ddp": ("ddp", False), "fsdp2": ("fsdp2", True), "fsdp2_gathered": ("fsdp2", False)}  # kind, reshard
PARTS = ("scaling", "equal", "ended")
SECONDS = 120  # of one launch at most
EQUAL_SECONDS = 75  # the same, where losses are compared: what is there by then is compared
TOLERANCE = {"bf16": 2e-3, "fp32": 1e-5}  # of a loss, relative


# Inside torchrun


def measure(arguments) -> None:
    """Steps of each kind; rank 0 prints one JSON line a kind."""
    import torch

    from drafter.train import distributed

    shape = bench.TINY if arguments.tiny else bench.KIMI
    with distributed.joined_ranks() as ranks:
        for kind in arguments.measure.split(","):
            bench.free()
            with build(kind, shape, ranks) as runner:
                for _ in range(3):
                    runner.step()
                if torch.cuda.is_available():
                    torch.cuda.reset_peak_memory_stats()
                seconds = timed(runner, ranks, arguments.steps)
                facts = {"kind": kind, "seconds": seconds, "peak_gib": bench.peak_gb()}
                report(ranks, facts | {"communication_s": communication(runner)})
        for kind in arguments.save.split(",") if arguments.save else ():
            bench.free()
            with build(kind, shape, ranks) as runner:
                runner.step()
                bench.synchronize()
                ranks.barrier()
                report(ranks, {"kind": kind} | save(runner, ranks))


@contextmanager
def build(kind: str, shape: "bench.Shape", ranks):
    from drafter.train import distributed

    wrapper, reshard = KINDS[kind]
    with bench.scratch() as folder:
        yield bench.Ours(
            shape,
            shape.pack,
            folder,
            wrap=lambda model, compute: distributed.wrap(model, wrapper, ranks, compute, reshard),
        )


def timed(runner, ranks, steps: int) -> float:
    """Seconds of one step."""
    bench.synchronize()
    ranks.barrier()
    started = time.perf_counter()
    for _ in range(steps):
        runner.step()
    bench.synchronize()
    ranks.barrier()
    return (time.perf_counter() - started) / steps


def communication(runner, steps: int = 2) -> float:
    """Seconds a step in which this rank's device moves numbers between ranks or waits for others to."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    on_gpu = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as trace:
        for _ in range(steps):
            runner.step()
        bench.synchronize()
    moving = [
        event for event in trace.key_averages() if re.match("nccl.*kernel" if on_gpu else "gloo:", event.key, re.I)
    ]
    return sum(e.self_device_time_total if on_gpu else e.cpu_time_total for e in moving) / steps / 1e6


def save(runner, ranks) -> dict[str, float]:
    """What a signal waits for: masters and moments gathered on rank 0, written, durable."""
    from drafter.train import checkpoint, distributed, draft_model

    started = time.perf_counter()
    weights = draft_model.native_weights(runner.model, keep_embedding=False)
    state = runner.optimizer.state
    kinds, parameters = ("exp_avg", "exp_avg_sq"), enumerate(runner.parameters)
    moments = {f"{n}.{kind}": state[p][kind] for n, p in parameters for kind in kinds}
    wholes = map(distributed.gather, checkpoint.tensors_in_file_order(weights, moments))
    with bench.scratch() as folder:
        path = checkpoint.step_path(folder, 1)
        ranks.on_main(lambda: checkpoint.save_step(path, weights, {}, moments, {}, wholes), wholes)
        seconds = time.perf_counter() - started
    size = sum(t.numel() * t.element_size() for t in (*weights.values(), *moments.values()))
    return {"save_s": seconds, "save_gb": size / 1e9}


def report(ranks, facts: dict) -> None:
    if ranks.main:
        print("RESULT " + json.dumps(facts), flush=True)


# Outside


class Launch:
    """Ranks of one script, as torchrun would start them, that end together."""

    def __init__(
        self, world: int, script: list[str], environment: dict[str, str], stdout: int, seconds: float = SECONDS
    ):
        self.deadline = time.monotonic() + seconds
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
        self.processes: list[subprocess.Popen] = []
        for rank in range(world):
            own = {"TORCHELASTIC_RUN_ID": "benchmark", "RANK": str(rank), "LOCAL_RANK": str(rank)}
            own |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, *script],
                    env=os.environ | address | environment | own,
                    stdout=subprocess.DEVNULL if rank else stdout,
                    text=True,
                )
            )
        self.main = self.processes[0]
        self.watch = threading.Thread(target=self._watch)
        self.watch.start()

    def _watch(self) -> None:
        """Until all have ended; the first that fails, or the time limit, ends the others."""
        deadline = self.deadline
        while any(process.poll() is None for process in self.processes):
            if any(process.returncode for process in self.processes):
                deadline = min(deadline, time.monotonic() + 5)
            if time.monotonic() > deadline:
                for process in self.processes:
                    process.kill()
            time.sleep(0.02)

    @property
    def over(self) -> bool:
        return not self.watch.is_alive()

    def wait(self) -> int:
        """Exit code of the first rank that failed, or 0."""
        self.watch.join()
        return next((process.returncode for process in self.processes if process.returncode), 0)


def scaling(world: int, peer: bool, arguments, alone: float | None, saves: str = "") -> float | None:
    """One line of the table for each kind. Returns tokens/s of the first."""
    shape = bench.TINY if arguments.tiny else bench.KIMI
    kinds = ",".join(KINDS) if world > 1 else "ddp"
    script = ["-m", "benchmarks.train_scaling", "--measure", kinds, "--save", saves, "--steps", str(arguments.steps)]
    script += ["--tiny"] if arguments.tiny else []
    launch = Launch(world, script, {} if peer else {"NCCL_P2P_DISABLE": "1"}, subprocess.PIPE)
    first = None
    for line in launch.main.stdout:
        if not line.startswith("RESULT "):
            continue
        facts = json.loads(line.removeprefix("RESULT "))
        kind = facts.pop("kind")
        name = f"scaling_{world}_{kind}" + ("" if peer else "_nop2p") if world > 1 else "scaling_1"
        if "save_s" in facts:
            for key, value in facts.items():
                bench.metric(f"{name}_{key}", value)
            continue
        rate = world * shape.pack / facts["seconds"]
        first = first or rate
        bench.metric(f"{name}_tokens_per_s", rate)
        if alone or world == 1:
            bench.metric(f"{name}_efficiency", rate / ((alone or rate) * world))
        bench.metric(f"{name}_peak_gib", facts["peak_gib"])
        bench.metric(f"{name}_communication_share", facts["communication_s"] / facts["seconds"])
    if code := launch.wait():
        print(f"scaling on {world}, peer to peer {peer}: exit code {code}", flush=True)
    return first


class Runs:
    """`04_train.py` over the same rows, one epoch, one global batch; every run under its own name."""

    def __init__(self, folder: Path, world: int, tiny: bool):
        self.folder = folder
        self.script = train_stage.make_run(folder, *train_stage.ROWS[tiny])
        self.tolerance = TOLERANCE["bf16" if "train.precision=bf16" in self.script else "fp32"]
        self.script += [
            "--set",
            "train.epochs=1",
            "--set",
            f"train.tokens_per_step={world * (512 if tiny else 4096)}",
        ]
        self.script += ["--set", f"run.take.02_hidden_states={folder}/runs/bench/02_hidden_states"]

    def start(self, name: str, ranks: int, kind: str, environment: dict[str, str]) -> Launch:
        own = ["--set", f"run.name={name}", "--set", f"train.parallel={kind}"]
        return Launch(ranks, [*self.script, *own], environment, subprocess.DEVNULL, EQUAL_SECONDS)

    def losses(self, name: str, kind: str = "train") -> list[float]:
        records = train_stage.records(self.folder / f"runs/{name}/04_train", kind)
        return [r["loss_total"] if kind == "train" else sum(r["loss"]) for r in records]

    def compare(self, name: str) -> None:
        """Step by step with the run on one rank: relative differences and whether they are within the tolerance."""
        kinds = ("train", "validation")
        pairs = {kind: list(zip(self.losses("one", kind), self.losses(name, kind), strict=False)) for kind in kinds}
        steps, expected = len(self.losses(name)), len(self.losses("one"))
        bench.metric(f"equal_{name}_steps", f"{steps} of {expected}")
        if not pairs["train"]:
            return
        differences = {kind: [abs(a - b) / a for a, b in pairs[kind]] for kind in kinds}
        bench.metric(f"equal_{name}_first_relative_difference", differences["train"][0])
        bench.metric(f"equal_{name}_median_relative_difference", statistics.median(differences["train"]))
        bench.metric(f"equal_{name}_largest_relative_difference", max(differences["train"]))
        bench.metric(f"equal_{name}_last_relative_difference", differences["train"][-1])
        for (a, b), difference in zip(pairs["validation"], differences["validation"], strict=True):
            bench.metric(f"equal_{name}_validation", f"{a:.6f} {b:.6f} differ by {difference:.2e}")
        within = max(itertools.chain(*differences.values())) <= self.tolerance
        verdict = ("equal" if within else "DIFFERENT") + ("" if steps == expected else ", INCOMPLETE")
        bench.metric(f"equal_{name}_verdict", f"{verdict} (tolerance {self.tolerance:.0e})")


def equal_losses(world: int, tiny: bool, ended: bool) -> None:
    """The same losses as on one rank, step by step, at equal global batch."""
    with bench.scratch() as folder:
        started = time.perf_counter()
        runs = Runs(folder, world, tiny)
        bench.metric("equal_rows_written_s", time.perf_counter() - started)
        launches: dict[str, Launch] = {}
        for name, ranks, kind, environment in (
            ("one", 1, "ddp", {"CUDA_VISIBLE_DEVICES": "0"}),
            ("ddp", world, "ddp", {}),
            ("fsdp2", world, "fsdp2", {}),
            ("again", 1, "ddp", {"CUDA_VISIBLE_DEVICES": "0"}),
        ):
            launches[name] = runs.start(name, ranks, kind, environment)
            if tiny:  # GPUs carry several small runs at once
                launches[name].wait()
        one = launches.pop("one")
        bench.metric("equal_one_exit_code", str(one.wait()))
        while launches:
            for name in [name for name, launch in launches.items() if launch.over]:
                bench.metric(f"equal_{name}_exit_code", str(launches.pop(name).wait()))
                runs.compare(name)
            time.sleep(0.02)
        bench.metric("equal_s", time.perf_counter() - started)
        if ended:
            end_and_resume(runs, world)


def end_and_resume(runs: Runs, world: int) -> None:
    auto = runs.start("auto", world, "auto", {"NCCL_P2P_DISABLE": "1"})
    bench.metric("equal_auto_exit_code", str(auto.wait()))
    manifest = runs.folder / "runs/auto/04_train/manifest.json"
    if manifest.exists():
        bench.metric("auto_chose", str(json.loads(manifest.read_text())["facts"].get("parallel")))
    runs.compare("auto")
    ended = runs.start("fsdp2_ended", world, "fsdp2", {})
    while not ended.over and len(runs.losses("fsdp2_ended")) < 4:
        time.sleep(0.02)
    started = time.perf_counter()
    ended.main.send_signal(signal.SIGTERM)
    bench.metric("sigterm_exit_code", str(ended.wait()))
    bench.metric("sigterm_exit_s", time.perf_counter() - started)
    bench.metric("sigterm_at_step", str(len(runs.losses("fsdp2_ended"))))
    resumed = runs.start("fsdp2_ended", max(1, world // 2), "fsdp2", {})
    bench.metric("resumed_exit_code", str(resumed.wait()))
    runs.compare("fsdp2_ended")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", help="numbers of ranks; default 1, 2, 4, 8 as far as there are GPUs")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=3600, help="nothing begins after so many")
    parser.add_argument("--measure", help=argparse.SUPPRESS)  # inside torchrun
    parser.add_argument("--save", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments)
        return
    if arguments.tiny:
        os.environ["OMP_NUM_THREADS"] = "1"
    if arguments.worlds:
        worlds = [int(world) for world in arguments.worlds.split(",")]
    else:
        gpus = 2 if arguments.tiny or not shutil.which("nvidia-smi") else _gpus()
        worlds = [world for world in (1, 2, 4, 8) if world <= gpus]
    begun = time.perf_counter()
    chosen, parts = arguments.parts.split(","), []
    many, alone = [world for world in worlds if world > 1], None
    if "scaling" in chosen and 1 in worlds:
        alone = scaling(1, True, arguments, None)
    if "scaling" in chosen and many:
        parts = [lambda: scaling(many[-1], True, arguments, alone, saves="ddp,fsdp2_gathered")]
        parts += [lambda: scaling(many[-1], False, arguments, alone)]
        parts += [lambda world=world: scaling(world, True, arguments, alone) for world in many[:-1]]
    if "equal" in chosen and many:
        parts += [lambda: equal_losses(many[-1], arguments.tiny, "ended" in chosen)]
    if "scaling" in chosen:
        parts += [lambda world=world: scaling(world, False, arguments, alone) for world in many[:-1]]
    for part in parts:
        if time.perf_counter() - begun < arguments.seconds:
            part()
            bench.metric("elapsed_s", time.perf_counter() - begun)


def _gpus() -> int:
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True)
    return len(listed.stdout.splitlines())


if __name__ == "__main__":
    main()
