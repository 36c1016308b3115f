"""Speed and memory of the training step and of the whole stage, compared with speculators' own step.

    python -m benchmarks.train                       every part, under 8 minutes on one H200
    python -m benchmarks.train --parts step,profile  some of them
    python -m benchmarks.train --tiny                the same code on a small shape, on a CPU too

Every part runs in a separate process with a time limit, so that one that fails or hangs does not stop the others.
Figures are printed as `METRIC name value` as soon as they are known.
"""

import argparse
import contextlib
import functools
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

PEAK = 790e12  # dense bf16 matrix FLOP/s measured on an H200
PARTS = {"step": 210, "long": 90, "files": 120, "profile": 60, "stage": 400}  # name -> seconds at most


@dataclass(frozen=True)
class Shape:
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    draft_vocab: int
    pack: int
    row: int
    supervised: float = 0.85
    steps: int = 3


KIMI = Shape(7168, 18432, 64, 64, 128, 163840, 32000, pack=8192, row=2048)
TINY = Shape(64, 128, 4, 2, 16, 512, 256, pack=256, row=64)


def metric(name: str, value: float | str) -> None:
    text = f"{value:.6g}" if isinstance(value, float) else value
    print(f"METRIC {name} {text}", flush=True)


# FLOPs that the algorithm needs


def needed_flops(shape: Shape, slots: int, anchors: int, train_head: bool) -> float:
    """Matrix FLOPs of one step, attention scores left out.

    2 a weight and row forward, 2 for the weight's gradient, 2 for the input's. `fc` needs no input gradient, a frozen
    head no weight gradient, the teacher's head only the forward pass. Keys and values of step 0 are needed at every
    slot, everything else at anchors; a token's half of q, k and v is needed once, whatever the number of steps.
    """
    s, hidden = shape, shape.hidden
    q, kv = s.heads * s.head_dim * hidden, 2 * s.kv_heads * s.head_dim * hidden
    per_anchor = s.heads * s.head_dim * hidden + 3 * s.intermediate * hidden
    head = s.draft_vocab * hidden
    return (
        4 * 3 * hidden * hidden * slots
        + 6 * (q * anchors + kv * slots)  # token halves
        + 6 * (q * anchors + kv * slots)  # state halves, step 0
        + 6 * (q + kv) * anchors * (s.steps - 1)
        + 6 * per_anchor * anchors * s.steps
        + ((6 if train_head else 4) * s.steps + 2) * head * anchors
    )


def library_flops(shape: Shape, slots: int) -> float:
    """The same for every slot in every step, which is what speculators computes: 18.36 GFLOP a token for Kimi."""
    s, hidden = shape, shape.hidden
    layer = 2 * hidden * (s.heads + 2 * s.kv_heads) * s.head_dim + s.heads * s.head_dim * hidden
    layer += 3 * s.intermediate * hidden
    head = s.draft_vocab * hidden
    return (4 * 3 * hidden * hidden + s.steps * (6 * layer + 4 * head) + 2 * head) * slots


# Models and data on random numbers


def native_config(shape: Shape) -> dict:
    ids = [2, 30, 58]
    return {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate, "num_hidden_layers": 1, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim, "vocab_size": shape.vocab,
        "draft_vocab_size": shape.draft_vocab, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_scaling": None,
        "max_position_embeddings": 131072, "eagle_aux_hidden_state_layer_ids": ids,
    }  # fmt: skip


def make_target(shape: Shape, folder: Path):
    """Config section and tensors of a target with random embedding, norm and head."""
    import torch

    from drafter.config import Target
    from drafter.target.head import Verifier

    config = {
        "architectures": ["KimiK25ForConditionalGeneration"], "num_hidden_layers": 61, "hidden_size": shape.hidden,
        "vocab_size": shape.vocab, "rms_norm_eps": 1e-5, "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    target = Target(model=folder, served_name="random", layer_ids=(2, 30, 58, 61), max_seq_len=shape.pack)
    dtype = torch.bfloat16
    verifier = Verifier(
        embed=torch.randn(shape.vocab, shape.hidden, device=device(), dtype=dtype) * 0.02,
        norm=torch.ones(shape.hidden, device=device(), dtype=dtype),
        head=torch.randn(shape.vocab, shape.hidden, device=device(), dtype=dtype) * 0.02,
        eps=1e-5,
    )
    return target, verifier


def device():
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_gb() -> float:
    import torch

    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


def random_weights(shape: Shape) -> dict:
    import torch

    from drafter.target import eagle3_folder

    draw = {}
    for name, (size, dtype) in eagle3_folder.layout_of(native_config(shape)).items():
        if not dtype.is_floating_point:
            continue
        ones = name.endswith("norm.weight")
        draw[name] = torch.ones(size, device=device()) if ones else torch.randn(size, device=device()) * 0.02
    stride = shape.vocab // shape.draft_vocab
    kept = torch.arange(shape.draft_vocab, device=device()) * stride
    marked = torch.zeros(shape.vocab, dtype=torch.bool, device=device())
    marked[kept] = True
    return draw | {"d2t": kept - torch.arange(shape.draft_vocab, device=device()), "t2d": marked}


@functools.cache
def host_pack(shape: Shape, pack: int):
    """A pack of random states in (pinned) host memory."""
    import torch

    from drafter.train import examples
    from drafter.train.attention import Documents
    from drafter.train.batch import Pack

    pin = torch.cuda.is_available()
    rows = pack // shape.row
    prompt = int(shape.row * (1 - shape.supervised))
    depth = torch.from_numpy(examples.depths([[prompt + 1, shape.row + 1]], shape.row, shape.steps))
    queries = shape.row - prompt
    anchors = torch.cat([torch.arange(prompt, shape.row) + shape.row * i for i in range(rows)])
    made = Pack(
        states=torch.randn(pack, 4, shape.hidden).bfloat16(),
        aux=None,
        aux_scale=None,
        input_ids=torch.randint(shape.vocab, (pack,)),
        positions=torch.arange(shape.row).repeat(rows),
        anchors=anchors,
        labels=torch.randint(shape.vocab, (len(anchors),)),
        depth=depth[prompt:].repeat(rows),
        region=torch.ones(len(anchors), dtype=torch.long),
        documents=Documents(
            torch.arange(rows + 1, dtype=torch.int32) * queries,
            torch.arange(rows + 1, dtype=torch.int32) * shape.row,
            queries,
            shape.row,
        ),
    )
    return made.map(lambda t: t.pin_memory()) if pin else made


class Ours:
    """The project's step: copy of the next pack on its own stream, forward, backward, clipping, AdamW."""

    name = "ours"

    def __init__(self, shape: Shape, pack: int, folder: Path, wrap: Callable | None = None):
        import torch

        from drafter.train import draft_model

        target, verifier = make_target(shape, folder)
        self.model = draft_model.build_drafter(random_weights(shape), native_config(shape), verifier, target)
        compute = torch.bfloat16 if torch.cuda.is_available() else torch.float32
        self.model.prepare(verifier, compute, shape.steps)
        self.model.to(device())
        groups = ("layer", "fc", "norms")
        draft_model.freeze_all_but(self.model, groups)
        self.wrapped = wrap(self.model, compute) if wrap else self.model
        self.parameters = list(draft_model.freeze_all_but(self.model, groups).values())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-5, fused=True)
        self.host = host_pack(shape, pack)
        self.scale = torch.full((shape.steps,), 1.0 / len(self.host.anchors), device=device())
        self.stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        self.next = self._copy()

    def _copy(self):
        import torch

        if self.stream is None:
            return self.host.map(lambda t: t.clone()), None
        with torch.cuda.stream(self.stream):
            moved = self.host.map(lambda t: t.to(device(), non_blocking=True))
            return moved, self.stream.record_event()

    def step(self, mark: Callable[[str], None] = lambda name: None) -> float:
        import torch

        from drafter.train import distributed

        mark("copy")
        pack, copied = self.next
        if copied is not None:
            torch.cuda.current_stream().wait_event(copied)
            for tensor in pack.tensors().values():
                tensor.record_stream(torch.cuda.current_stream())
        self.next = self._copy()
        mark("forward")
        loss, stats = self.wrapped(pack, self.scale)
        mark("backward")
        loss.backward()
        mark("optimizer")
        norm = distributed.gather(torch.nn.utils.clip_grad_norm_(self.parameters, 1.0))
        *_, norm = torch.cat([stats.flatten(), norm.reshape(1)]).tolist()  # the one transfer a step
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        mark("end")
        return loss.item()

    def step_from(self, pack) -> None:
        """One step on a pack that is on the device already."""
        self.next = (pack, None)
        self._copy = lambda: (None, None)
        self.step()


def library_model(built):
    """speculators' own model with a drafter's config and weights, all in fp32, on the device."""
    import torch
    from speculators.models.eagle3 import Eagle3DraftModel

    attention = "simple_flex_attention" if torch.cuda.is_available() else "sdpa"
    built.config.transformer_layer_config._attn_implementation = attention
    with torch.device("meta"):
        model = Eagle3DraftModel(built.config)
    model.rotary_emb = built.rotary_emb
    state = {name: t.float() if t.is_floating_point() else t for name, t in built.state_dict().items()}
    model.load_state_dict(state, strict=True, assign=True)
    return model.to(device())


def library_loss():
    """Its loss, fused on a GPU."""
    import torch
    from speculators.losses import resolve_loss_config

    if not torch.cuda.is_available():
        return resolve_loss_config("kl_div", "eager")
    from speculators.losses import fused

    # torch 2.11 cannot compile two kernels that share one list of configurations.
    fused.loss_backward_kernel.configs = list(fused.loss_backward_kernel.configs)
    return resolve_loss_config("kl_div", "fused")


class Library:
    """speculators' step as its Trainer makes it: autocast, its fused loss, compiled forward, AdamW."""

    name = "speculators"

    def __init__(self, shape: Shape, pack: int, folder: Path):
        import torch

        from drafter.train import draft_model

        cuda = torch.cuda.is_available()
        target, verifier = make_target(shape, folder)
        self.model = library_model(
            draft_model.build_drafter(random_weights(shape), native_config(shape), verifier, target)
        )
        for name in ("embed_tokens", "verifier_lm_head", "verifier_norm", "lm_head"):
            getattr(self.model, name).requires_grad_(False)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.model.named_parameters(), lr=1e-5, weight_decay=0.01)
        self.loss = library_loss()
        self.steps = shape.steps
        host = host_pack(shape, pack)
        mask = torch.zeros(pack, dtype=torch.bool)
        mask[host.anchors] = True
        documents = torch.arange(pack // shape.row).repeat_interleave(shape.row)
        pin = (lambda t: t.pin_memory()) if cuda else (lambda t: t)
        self.host = {
            "hidden_states": pin(host.states[:, :-1].flatten(1)[None].contiguous()),
            "verifier_last_hidden_states": pin(host.states[:, -1][None].contiguous()),
            "input_ids": pin(host.input_ids[None]),
            "document_ids": pin(documents[None]),
            "loss_mask": pin(mask[None]),
            "position_ids": pin(host.positions[None] + 1),
        }

    def step(self, mark: Callable[[str], None] = lambda name: None) -> float:
        import torch

        mark("copy")
        batch = {name: t.to(device(), non_blocking=True) for name, t in self.host.items()}
        mark("forward")
        with torch.autocast(device().type, dtype=torch.bfloat16):
            _, loss, _ = self.model(**batch, ttt_steps=self.steps, loss_config=self.loss)
        mark("backward")
        self.optimizer.zero_grad()
        loss.backward()
        mark("optimizer")
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        mark("end")
        return loss.item()


class Clock:
    """Milliseconds between marks, on the GPU's clock where there is one."""

    def __init__(self):
        self.marks: list[tuple[str, object]] = []

    def __call__(self, name: str) -> None:
        import torch

        if torch.cuda.is_available():
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append((name, event))
        else:
            self.marks.append((name, time.perf_counter()))

    def spans(self) -> dict[str, float]:
        synchronize()
        result: dict[str, float] = {}
        for (name, start), (_, end) in zip(self.marks, self.marks[1:], strict=False):
            length = start.elapsed_time(end) if hasattr(start, "elapsed_time") else 1000 * (end - start)
            if name != "end":
                result[name] = result.get(name, 0.0) + length
        return result


def timed(runner, steps: int, warmup: int) -> tuple[float, dict[str, float]]:
    """Seconds of one step, and milliseconds of its parts."""
    started = time.perf_counter()
    runner.step()
    synchronize()
    metric(f"{runner.name}_first_step_s", time.perf_counter() - started)
    for _ in range(warmup):
        runner.step()
    synchronize()
    clock = Clock()
    started = time.perf_counter()
    for _ in range(steps):
        runner.step(clock)
    synchronize()
    seconds = (time.perf_counter() - started) / steps
    return seconds, {name: total / steps for name, total in clock.spans().items()}


@contextlib.contextmanager
def scratch():
    folder = Path(tempfile.mkdtemp(prefix="train-bench-", dir=os.environ.get("BENCH_DIR")))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def free() -> None:
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def report(prefix: str, shape: Shape, runner, pack: int, seconds: float, spans: dict[str, float]) -> None:
    anchors = int(pack // shape.row * (shape.row - int(shape.row * (1 - shape.supervised))))
    flops = library_flops(shape, pack) if runner.name == "speculators" else needed_flops(shape, pack, anchors, False)
    metric(f"{prefix}_tokens_per_s", pack / seconds)
    metric(f"{prefix}_ms", 1000 * seconds)
    for name, value in spans.items():
        metric(f"{prefix}_{name}_ms", value)
    metric(f"{prefix}_peak_gib", peak_gb())
    metric(f"{prefix}_gflop_per_token", flops / pack / 1e9)
    metric(f"{prefix}_matrix_share", flops / seconds / PEAK)


# Parts


def part_step(shape: Shape, arguments) -> None:
    """Both steps in turns, the heads frozen in both: A B A B."""
    speeds: dict[str, list[float]] = {"speculators": [], "ours": []}
    for turn, maker in enumerate([Library, Ours, Library, Ours]):
        with scratch() as folder:
            free()
            runner = maker(shape, shape.pack, folder)
            seconds, spans = timed(runner, steps=arguments.steps, warmup=3)
            report(f"step_{runner.name}_{turn // 2}", shape, runner, shape.pack, seconds, spans)
            speeds[runner.name].append(seconds)
            del runner
    metric("step_ratio", sum(speeds["speculators"]) / sum(speeds["ours"]))


def part_long(shape: Shape, arguments) -> None:
    """A pack twice as long, of rows twice as long, and the same pack as one row."""
    for name, row in (("long", 2 * shape.row), ("one_row", 2 * shape.pack)):
        longer = Shape(**{**shape.__dict__, "row": row})
        with scratch() as folder:
            free()
            runner = Ours(longer, 2 * shape.pack, folder)
            seconds, spans = timed(runner, steps=max(2, arguments.steps // 2), warmup=2)
            report(name, longer, runner, 2 * shape.pack, seconds, spans)
            del runner


def part_profile(shape: Shape, arguments) -> None:
    """Where our step spends the GPU's time, kernel by kernel."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with scratch() as folder:
        runner = Ours(shape, shape.pack, folder)
        for _ in range(4):
            runner.step()
        synchronize()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        steps = 3
        with profile(activities=activities) as trace:
            for _ in range(steps):
                runner.step()
            synchronize()
    on_gpu = torch.cuda.is_available()
    rows = []
    for event in trace.key_averages():
        total = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if total and (not on_gpu or "cuda" in str(event.device_type).lower()):
            rows.append((total / steps / 1000, event.count // steps, event.key))
    whole = sum(ms for ms, _, _ in rows)
    for kind, words in KERNELS.items():
        metric(f"profile_{kind}_ms", sum(ms for ms, _, key in rows if any(w in key.lower() for w in words)))
    metric("profile_all_kernels_ms", whole)
    for ms, count, key in sorted(rows, reverse=True)[:25]:
        print(f"  {ms:9.3f} ms {count:5d}x {key[:110]}", flush=True)


KERNELS = {
    "matmul": ("gemm", "cutlass", "nvjet", "xmma", "aten::mm", "aten::addmm", "aten::bmm"),
    "attention": ("flash",),
    "triton": ("triton",),
    "optimizer": ("adam",),
    "copy": ("memcpy",),
}


def part_files(shape: Shape, arguments) -> None:
    """The same step fed from files on disk by the project's own loader, beside plain readers of the same files."""
    import torch

    from drafter import contracts
    from drafter.extract import state_file, states
    from drafter.train import examples

    with scratch() as folder:
        rows_per_pack, packs = shape.pack // shape.row, 14
        free_gb = shutil.disk_usage(folder).free / 1e9
        row_gb = shape.row * 4 * shape.hidden * 2 / 1e9
        packs = max(3, min(packs, int(free_gb * 0.4 / (row_gb * rows_per_pack))))
        facts_ids, entries, written = [2, 30, 58, 61], [], 0
        hidden = torch.randn(shape.row, 4, shape.hidden).bfloat16()
        prompt = int(shape.row * (1 - shape.supervised))
        started = time.perf_counter()
        for index in range(packs * rows_per_pack):
            row_id = f"{index:032x}"[::-1]
            path = folder / contracts.states_path(row_id)
            path.parent.mkdir(exist_ok=True)
            ids = torch.randint(shape.vocab, (shape.row,))
            facts = state_file.file_metadata(row_id, "random", facts_ids, "bf16")
            size = states.write_states(path, {"token_ids": ids, "hidden_states": hidden}, facts)
            written += size
            supervised = [[prompt, shape.row]]
            entries.append(
                contracts.IndexEntry(row_id, row_id, "random", shape.row, shape.row, supervised, None, size)
            )
        os.sync()
        metric("files_write_gb_per_s", written / 1e9 / (time.perf_counter() - started))
        paths = [folder / entry.path for entry in entries]
        for threads, name in itertools.product((4, 16), ("buffered", "direct")):
            with contextlib.suppress(OSError):  # a file system may know no direct reads
                seconds = plain_reads(paths, threads, os.O_DIRECT if name == "direct" else 0)
                metric(f"files_plain_{name}_{threads}_threads_gb_per_s", written / 1e9 / seconds)
        rows = examples.learnable_rows(entries, shape.pack, shape.steps, contracts.Counts(total=len(entries)))
        runner, started = Ours(shape, shape.pack, folder), time.perf_counter()
        for _ in range(3):
            runner.step()
        synchronize()
        metric("files_three_first_steps_s", time.perf_counter() - started)
        form = tuple(facts_ids), shape.hidden, shape.vocab
        reader = examples.Reader(folder, *form, shape.steps, think_end=None, pin=torch.cuda.is_available())
        own, unused = arguments.workers, float("inf")
        turns = [("cold_at_20k", 20_000, own), ("cold", None, own), ("warm", None, own)]
        turns += [
            ("cold_at_20k_again", 20_000, own),
            ("cold_unused", unused, own),
            ("cold_unused_12_workers", unused, 12),
        ]
        for epoch, (name, rate, workers) in enumerate(turns):
            if name != "warm":
                forget(paths)
            loader = examples.Loader(reader, device(), workers)
            plan = examples.Schedule(rows, shape.pack, 1, 1, seed=epoch)
            feed = loader.packs((members, True) for step in plan.steps for members in step.packs)
            begun = time.perf_counter()
            first = next(feed)
            synchronize()
            waited, tokens = loader.waited, 0  # the first wait is a start's, not a step's
            started = begun if rate == unused else time.perf_counter()
            for pack in itertools.chain([first], feed):
                if rate != unused:
                    runner.step_from(pack)
                    synchronize()
                tokens += len(pack.input_ids)
                if rate:
                    time.sleep(max(0.0, started + tokens / rate + loader.waited - waited - time.perf_counter()))
            seconds = time.perf_counter() - started
            metric(f"files_{name}_tokens_per_s", tokens / seconds)
            metric(f"files_{name}_read_gb_per_s", tokens * 4 * shape.hidden * 2 / 1e9 / seconds)
            if rate != unused:
                metric(f"files_{name}_waiting_share", (loader.waited - waited) / seconds)


def forget(paths: list[Path]) -> None:
    """Out of the page cache, as after a night of extraction."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def plain_reads(paths: list[Path], threads: int, flags: int) -> float:
    """Seconds to read every file once, by nothing but reads of 8 MiB into one buffer a thread."""
    import mmap
    import queue
    from concurrent.futures import ThreadPoolExecutor

    forget(paths)
    waiting: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for path in paths:
        waiting.put(path)

    def read() -> None:
        block = mmap.mmap(-1, 8 << 20)  # page aligned, as direct reads need it
        with contextlib.suppress(queue.Empty):
            while True:
                fd, position = os.open(waiting.get_nowait(), os.O_RDONLY | flags), 0
                try:
                    while got := os.preadv(fd, [block], position):
                        position += got
                        if position % mmap.PAGESIZE:
                            break  # the end of the file
                finally:
                    os.close(fd)

    started = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(read) for _ in range(threads)]:
            done.result()
    return time.perf_counter() - started


def parse(description: str) -> argparse.Namespace:
    """The arguments of every part."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--steps", type=int, default=8, help="measured steps of each turn")
    parser.add_argument("--workers", type=int, default=4, help="loader threads")
    parser.add_argument("--turns", type=int, default=2, choices=(1, 2), help="of the whole stage")
    parser.add_argument("--epochs", type=int, default=3, help="of the whole stage")
    parser.add_argument("--captured", help="a run whose hidden states the whole stage trains on")
    parser.add_argument("--run", help=argparse.SUPPRESS)  # one part, in this process
    return parser.parse_args()


def main() -> None:
    arguments = parse(__doc__)
    if arguments.run:
        globals()[f"part_{arguments.run}"](TINY if arguments.tiny else KIMI, arguments)
        return
    failed = []
    for part in arguments.parts.split(","):
        started = time.perf_counter()
        script = ["-m", "benchmarks.train_stage"] if part == "stage" else ["-m", "benchmarks.train", "--run", part]
        command = [sys.executable, *script, *sys.argv[1:]]
        try:
            code = subprocess.run(command, timeout=PARTS[part]).returncode
        except subprocess.TimeoutExpired:
            code = "time limit"
        metric(f"part_{part}_s", time.perf_counter() - started)
        if code:
            print(f"part {part} failed: {code}", flush=True)
            failed.append(part)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
