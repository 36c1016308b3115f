"""Speed of extracting hidden states: the whole stage compared with its server's own speed, and the writer alone.

    python -m benchmarks.extract serve --prompts questions.jsonl --out DIR [--config FILE] [--set SECTION.KEY=VALUE]
    python -m benchmarks.extract long --prompts questions.jsonl --out DIR
    python -m benchmarks.extract write --out DIR

`serve` starts vLLM servers of the config's target side by side on one device, with no prefix caching and
`--kv-gb` of cache each (which also spares them the memory profiling that servers starting together would disturb):
  unread       vLLM's own connector; its files are not read
  ours         our connector, with the config's flags
  plain        the same flags, but nothing is extracted
  profile      our connector under a clock (timed_connector.py)
each also as `NAME-graphs`: compiled, with CUDA graphs of large batches.
Then, in turns and one busy at a time, the same rows go through them: as bare requests with nothing done with the
replies (plain, unread; `together`: as many rows a request as stage 02 sends), as 02_extract_hidden_states.py (ours,
profile) and as `speculators generate-offline-data` (on unread's server). A server that does not start is left out; no
pass starts after `--seconds`.
`long` sends rows of 16K tokens through a server that takes them in chunks over cached prefixes and through one that
does not, and compares the states.
`write` drives our connector over a cache of Kimi-K2.5's width without a model, beside plain writes of the same bytes.

Prints `METRIC name value` lines, each as soon as it is known. `--prompts` is JSONL with `conversations`; nothing is
downloaded.
"""

import argparse
import asyncio
import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from drafter import config, contracts, files, stage
from drafter.errors import StageError
from drafter.extract import states
from drafter.serve import roles, vllm_command
from drafter.serve.client import Client

ROOT = Path(__file__).resolve().parents[1]

LOCAL = "http://127.0.0.1"
KIMI = {"layer_ids": (2, 30, 58, 61), "hidden": 7168}
SERVERS = ["unread", "ours", "unread-graphs", "ours-graphs", "profile", "plain"]
GRAPHS = {
    "enforce-eager": False,
    "max-num-batched-tokens": 16384,  # a saturated engine fills every step: no padding to the largest graph
    "compilation-config": {
        "cudagraph_mode": "PIECEWISE",
        "cudagraph_capture_sizes": [256, 512, 1024, 2048, 4096, 6144, 8192, 12288, 16384],
    },
}
STARTED = time.monotonic()


def metric(name: str, value: float) -> None:
    print(f"METRIC {name} {value:.6g}", flush=True)


# serve


def serve(args: argparse.Namespace) -> None:
    with ExitStack() as stack:
        running = start(variants(args), stack, args.one_by_one)
        first = next(iter(running.values()))[0]
        rows = text_rows(first.target.model, args.prompts, args.rows, args.tokens)
        for run_config, _role in running.values():
            write_rows(run_config, rows)
        dataset = write_dataset(args.out / "dataset", rows)
        tokens = sum(map(len, rows))
        metric("rows", len(rows))
        metric("tokens", tokens)
        for run_config, role in running.values():
            post_all(run_config, role, rows[:200], 64)  # a server compiles and allocates at its first requests
        best: dict[str, float] = {}
        for name, level, rate in passes(args, running, rows, dataset):
            if time.monotonic() - STARTED > args.seconds:
                break
            found = rate()
            metric(f"{name}_c{level}_tokens_per_s", found)
            metric("wall_s", time.monotonic() - STARTED)
            best[name] = max(best.get(name, 0), found)
        for name, rate in best.items():
            metric(f"{name}_best_tokens_per_s", rate)
            for ours in {"ours", "ours-graphs"} & best.keys():
                metric(f"{ours}_against_{name}", best[ours] / rate)


def variants(args: argparse.Namespace) -> dict[str, tuple[config.Config, config.Role]]:
    """The config and role of each server, by name."""
    foreign = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(args.out / "unread" / "files")},
    }
    found = {}
    for number, name in enumerate(args.servers):
        role = "generate" if name.startswith("plain") else "extract"
        flags = {"enable-prefix-caching": False, "kv-cache-memory-bytes": int(args.kv_gb * 1e9)}
        flags["gpu-memory-utilization"] = 0.05  # what must be free; the size of the cache is given
        sets = [
            f"run.dir={args.out}",
            f"run.name={name}",
            f"servers.{role}.url={LOCAL}:{args.port + number}",
        ]
        kind, _, graphs = name.partition("-")
        flags |= GRAPHS if graphs else {}
        if kind == "plain":
            own = config.load(args.config, args.overrides).servers.extract.args
            sets += [f"servers.generate.args={json.dumps(own)}"]
        if kind == "unread":
            flags["kv-transfer-config"] = foreign
        if kind == "profile":
            timed = vllm_command.command(config.load(args.config, [*args.overrides, *sets]), "extract")
            timed = json.loads(timed[timed.index("--kv-transfer-config") + 1])
            module = {"kv_connector": "TimedWriter", "kv_connector_module_path": "benchmarks.timed_connector"}
            flags["kv-transfer-config"] = timed | module
        sets += [f"servers.{role}.args.{flag}={json.dumps(value)}" for flag, value in flags.items()]
        sets += [f"servers.{role}.gpus=[]", "extract.reserve_gb=1"]
        found[name] = config.load(args.config, [*args.overrides, *sets]), role
    return found


def start(wanted: dict, stack: ExitStack, one_by_one: bool) -> dict:
    """Start servers; returns those that became ready, in the requested order. `stack` stops them."""

    def bring(name: str) -> str | None:
        try:
            roles.up(*wanted[name])
        except StageError as error:
            print(f"{name} is left out: {error}", file=sys.stderr, flush=True)
            return None
        metric(f"{name}_start_s", time.monotonic() - STARTED)
        return name

    for pair in wanted.values():
        stack.callback(roles.down, *pair)
    with ThreadPoolExecutor(1 if one_by_one else len(wanted)) as threads:
        came = set(threads.map(bring, wanted))
    return {name: pair for name, pair in wanted.items() if name in came}


def passes(args: argparse.Namespace, running: dict, rows, dataset: Path) -> Iterator[tuple[str, int, Callable]]:
    """The measurements, most important first: name, number of requests in flight, function."""
    tokens = sum(map(len, rows))

    def bare(name: str, level: int, together: int = 1) -> float:
        rate = tokens / post_all(*running[name], rows, level, together)
        shutil.rmtree(args.out / "unread" / "files", ignore_errors=True)
        return rate

    for number in range(args.rounds):
        for name, (run_config, _role) in running.items():
            for level in args.bare_concurrency if name.startswith(("plain", "unread")) else ():
                yield name, level, partial(bare, name, level)
                size = run_config.extract.tokens_per_request
                yield f"{name}-together", level, partial(bare, name, level, size)
            for level in args.concurrency if name.startswith("ours") else ():
                yield name, level, partial(extract_rate, run_config, level)
        for name in running if number == 0 else ():
            if name.startswith("profile"):
                yield name, args.concurrency[0], partial(profile, running[name][0], args.concurrency[0], len(rows))
        if number == 0 and args.speculators:
            reader = next(pair[0] for name, pair in running.items() if name.startswith("unread"))
            yield "speculators", 32, partial(speculators, reader, dataset, 32, args.out, tokens)


def text_rows(model: Path, prompts: Path, count: int, tokens: int, spread=0.5) -> list[list[int]]:
    """Token ids of real text: `count` rows whose lengths spread around `tokens`."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = []
    with open(prompts, encoding="utf-8") as file:
        for line in file:
            texts.append("\n\n".join(turn["value"] for turn in json.loads(line)["conversations"]))
    stream = tokenizer("\n\n".join(texts), add_special_tokens=False)["input_ids"]
    choose = random.Random(0)
    lengths = [round(tokens * choose.uniform(1 - spread, 1 + spread)) for _ in range(count)]
    while len(stream) < sum(lengths):
        stream += stream
    ends = [sum(lengths[: i + 1]) for i in range(count)]
    return [stream[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def write_rows(run_config: config.Config, rows: list[list[int]]) -> None:
    """A finished stage 01b of these token ids."""
    upstream = stage.Stage("01b_synthetic", run_config, argparse.Namespace(limit=None, dry_run=False))
    upstream.begin(["target.model"])
    with open(upstream.folder / "shard-00000.jsonl", "w") as file:
        for number, ids in enumerate(rows):
            name = contracts.content_id(number)
            row = contracts.Row(
                row_id=name, conv_id=name, source="bench", turn=0, input_ids=ids, supervised=[[1, len(ids)]],
                think_end=None, reasoning=None, content="", finish_reason="stop",
                sampling={}, usage={"prompt_tokens": 1, "completion_tokens": len(ids) - 1}, model="bench",
            )  # fmt: skip
            file.write(json.dumps(row.to_record()) + "\n")
    upstream.counts.total = upstream.counts.done = len(rows)
    upstream.finish()


def write_dataset(folder: Path, rows: list[list[int]]) -> Path:
    """The same rows as speculators prepares them."""
    from datasets import Dataset

    columns = {
        "input_ids": rows,
        "loss_mask": [[1] * len(row) for row in rows],
        "seq_len": [len(row) for row in rows],
    }
    dataset = Dataset.from_dict(columns)
    dataset.set_format("torch")
    dataset.save_to_disk(str(folder))
    return folder


def post_all(
    run_config: config.Config, role: config.Role, rows, concurrency: int, together=1, limit: float | None = None
) -> float:
    """Seconds for all rows as prompts, `together` tokens a request, nothing done with the replies.

    Raises TimeoutError after `limit` seconds.
    """
    settings, name = run_config.server(role), run_config.target.served_name
    prompts: list[list[list[int]]] = [[]]
    for ids in rows:
        if prompts[-1] and sum(map(len, prompts[-1])) + len(ids) > together:
            prompts.append([])
        prompts[-1].append(ids)

    async def main() -> float:
        async with asyncio.timeout(limit), Client(settings, concurrency=concurrency, outage_minutes=1) as client:
            started = time.monotonic()
            bodies = ({"model": name, "prompt": ids, "max_tokens": 1, "temperature": 0} for ids in prompts)
            await asyncio.gather(*(client.post("/v1/completions", body, 600) for body in bodies))
            return time.monotonic() - started

    return asyncio.run(main())


def extract(run_config: config.Config, *sets: str) -> dict:
    """Run stage 02 from the beginning; returns its summary, with the seconds of its process and of its start."""
    folder = run_config.stage_dir("02_hidden_states")
    for path in folder.iterdir():
        if path.name not in (".writers", "timings"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    line = [sys.executable, "02_extract_hidden_states.py", *run_config.arguments]
    for entry in ("servers.extract.kind=external", *sets):
        line += ["--set", entry]
    started, probed = time.monotonic(), None
    with subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        for said in process.stderr:
            print(said, end="", file=sys.stderr, flush=True)
            if probed is None and " probe: " in said:
                probed = time.monotonic() - started
        summary = json.loads(process.stdout.read().splitlines()[-1])
    if process.returncode != 0:
        sys.exit(f"stage 02 failed: {summary.get('error')}")
    return summary | {"process_s": time.monotonic() - started, "probed_s": probed}


def extract_rate(run_config: config.Config, concurrency: int) -> float:
    """Tokens a second of stage 02 from its first to its last row; its wall time is printed beside."""
    summary = extract(run_config, f"extract.concurrency={concurrency}")
    metric(f"{run_config.run.name}_c{concurrency}_until_probed_s", summary["probed_s"])
    metric(f"{run_config.run.name}_c{concurrency}_extracting_s", summary["facts"]["extract_seconds"])
    metric(f"{run_config.run.name}_c{concurrency}_process_s", summary["process_s"])
    metric(f"{run_config.run.name}_c{concurrency}_mean_nat", summary["facts"]["probes"][0]["mean_nat"])
    return summary["facts"]["tokens_per_second"]


def profile(run_config: config.Config, concurrency: int, rows: int) -> float:
    """As `extract_rate`, with the CPU time of every process and the engine's own clocks."""
    own = run_config.run.name
    api = json.loads((run_config.run_dir / "servers" / "extract.json").read_text())["pid"]
    processes = {"api": api} | {f"engine{i}": pid for i, pid in enumerate(engines(api))}
    time.sleep(1)  # until the clocks have been written out
    before, clocks = {name: cpu(pid) for name, pid in processes.items()}, read_clocks(run_config)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    rate = extract_rate(run_config, concurrency)
    time.sleep(1)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    metric(f"{own}_client_cpu_s", used.ru_utime + used.ru_stime - children.ru_utime - children.ru_stime)
    for name, pid in processes.items():
        for part, seconds in cpu(pid).items():
            if (spent := seconds - before[name][part]) > 0.1:
                metric(f"{own}_{name}_{part}_cpu_ms_a_row", 1e3 * spent / rows)
    for name, (seconds, calls) in read_clocks(run_config).items():
        earlier = clocks.get(name, (0, 0))
        metric(f"{own}_{name}_s", seconds - earlier[0])
        metric(f"{own}_{name}_calls", calls - earlier[1])
    return rate


def read_clocks(run_config: config.Config) -> dict[str, list[float]]:
    """What timed_connector.py has counted so far, in all processes of a server."""
    found: dict[str, list[float]] = {}
    for path in sorted(run_config.stage_dir("02_hidden_states").glob("timings/*.json")):
        for name, (seconds, calls) in json.loads(path.read_text()).items():
            total = found.setdefault(name, [0, 0])
            total[0] += seconds
            total[1] += calls
    return found


def engines(api: int) -> list[int]:
    """The descendants of a server's API process."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = [api]
    for pid in sorted(parents):
        found += [pid] if parents[pid] in found else []
    return found[1:]


def cpu(pid: int) -> dict[str, float]:
    """Seconds of CPU of a process's first thread, and of all others together."""
    seconds = {"main": 0.0, "others": 0.0}
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        fields = path.read_text().rpartition(")")[2].split()
        part = "main" if path.parent.name == str(pid) else "others"
        seconds[part] += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds


def speculators(run_config, dataset: Path, concurrency: int, out: Path, tokens: int) -> float:
    """Tokens a second of the library's own extraction of the same rows, by its own clock; its process beside."""
    output, log = out / "speculators", out / "speculators.log"
    shutil.rmtree(output, ignore_errors=True)
    line = [
        sys.executable, "-m", "speculators", "generate-offline-data",
        "--preprocessed-data", str(dataset), "--endpoint", run_config.servers.extract.url + "/v1",
        "--output", str(output), "--concurrency", str(concurrency),
    ]  # fmt: skip
    started = time.monotonic()
    with open(log, "w") as file:
        subprocess.run(line, stdout=file, stderr=file, check=True)
    seconds = time.monotonic() - started
    shutil.rmtree(output, ignore_errors=True)
    metric(f"speculators_c{concurrency}_process_s", seconds)
    own = re.findall(r"([\d.]+)s elapsed", log.read_text())
    return tokens / (float(own[-1]) if own else seconds)


# long


def long(args: argparse.Namespace) -> None:
    """Two rows that share three quarters, each twice, so that the second and later ones meet cached prefixes."""
    model = with_positions(config.load(args.config, args.overrides).target.model, args.out / "long" / "model", 32768)
    length = args.long_tokens
    sets = [f"target.model={model}", f"target.max_seq_len={length}", "extract.reserve_gb=1", "extract.concurrency=1"]
    flags = {
        "once": {"max-num-batched-tokens": length + 64, "enable-prefix-caching": False},
        "chunks": {"max-num-batched-tokens": args.chunk, "enable-prefix-caching": True},
    }
    both = {
        "enable-chunked-prefill": True,
        "max-model-len": length + 64,
        "enforce-eager": True,
        "compilation-config": None,
        "disable-log-stats": None,  # they tell what came from the cache
        "kv-cache-memory-bytes": int(args.kv_gb * 1e9),
        "gpu-memory-utilization": 0.05,
    }
    wanted = {}
    for number, (name, own) in enumerate(flags.items()):
        more = [*sets, f"run.dir={args.out / 'long'}", f"run.name={name}", "servers.extract.gpus=[]"]
        more += [f"servers.extract.url={LOCAL}:{args.port + number}"]
        own |= both
        more += [f"servers.extract.args.{flag}={json.dumps(value)}" for flag, value in own.items()]
        wanted[name] = config.load(args.config, [*args.overrides, *more]), "extract"
    with ExitStack() as stack:
        running = start(wanted, stack, args.one_by_one)
        once, chunks = running["once"][0], running["chunks"][0]
        [whole, other] = text_rows(once.target.model, args.prompts, 2, length, spread=0)
        rows = [whole, whole[: length * 3 // 4] + other[length * 3 // 4 :]]
        for run_config in (once, chunks):
            write_rows(run_config, rows)
        extract(once)
        for turn in ("fresh", "cached"):
            metric(f"long_{turn}_s", extract(chunks)["process_s"])
            with urllib.request.urlopen(chunks.servers.extract.url + "/metrics") as reply:
                hits = re.findall(r"^vllm:prefix_cache_hits_total\{.*\} (\S+)", reply.read().decode(), re.MULTILINE)
            metric(f"long_{turn}_tokens_from_cache", sum(map(float, hits)))
            compare(once, chunks, len(rows), f"long_{turn}")


def with_positions(model: Path, folder: Path, positions: int) -> Path:
    """The same model for longer rows; what it makes of positions it never saw does not matter here."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in model.iterdir():
        (folder / path.name).symlink_to(path.resolve())
    facts = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": positions}
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(facts))
    return folder


def distances(one: config.Config, other: config.Config, count: int):
    """The relative difference of two runs' states, of every token of `count` rows in every layer: [T, L]."""
    import torch

    found = []
    for number in range(count):
        path = contracts.states_path(contracts.content_id(number))
        pair = [states.read_states(run_config.stage_dir("02_hidden_states") / path) for run_config in (one, other)]
        assert torch.equal(pair[0].token_ids, pair[1].token_ids)
        left, right = (torch.cat([read.aux, read.final[:, None]], dim=1).float() for read in pair)
        found.append((left - right).norm(dim=-1) / left.norm(dim=-1))
    return torch.cat(found)


def compare(one: config.Config, other: config.Config, count: int, name: str) -> None:
    for layer, differences in zip(one.target.layer_ids, distances(one, other, count).T, strict=True):
        metric(f"{name}_layer{layer}_median", differences.median().item())
        metric(f"{name}_layer{layer}_p999", differences.quantile(0.999).item())
        metric(f"{name}_layer{layer}_largest", differences.max().item())


# write


def write(args: argparse.Namespace) -> None:
    import torch

    from tests.connector_rig import BLOCK, Rig, params

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.set_num_threads(1)  # the engine's part must not take the writers' cores
    layers, hidden, tokens = KIMI["layer_ids"], KIMI["hidden"], args.row_tokens
    blocks = 1 + 4 * -(-tokens // BLOCK)  # four rows in the cache at a time, as an engine would reuse its blocks
    folder = args.out / "write"
    count = max(1, round(args.gigabytes * 1e9 / (tokens * 57344)))
    size = count * tokens * 57344
    for number in range(1, args.rounds + 1):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        seconds, durable = plain_writes(folder, count, tokens * 57344, args.threads)
        metric(f"disk_round{number}_MB_per_s", size / seconds / 1e6)
        metric(f"disk_durable_round{number}_MB_per_s", size / durable / 1e6)
        shutil.rmtree(folder)
        rig = Rig(
            folder, layers, hidden, blocks, device, longest=tokens,
            num_writer_threads=args.threads, queue_gb=args.queue_gb,
        )  # fmt: skip
        rig.cache.normal_()
        held = [list(range(1 + i * (blocks // 4), 1 + i * (blocks // 4) + -(-tokens // BLOCK))) for i in range(4)]
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        longest, started, free = 0.0, time.monotonic(), {index: None for index in range(4)}
        owner = {}
        for row in range(count):
            while not free:
                longest = max(longest, step(rig, owner, free))
            slot, _ = free.popitem()
            ids = [row] * tokens
            part = folder / f"{row % 256:02x}" / f"{row:032d}.1.part"
            request, _kept, _reply = rig.finish(ids, params({part: ids}, layers, args.dtype), held[slot])
            owner[request] = slot
            longest = max(longest, step(rig, owner, free))
        while rig.busy:
            longest = max(longest, step(rig, owner, free))
            time.sleep(0.001)
        seconds = time.monotonic() - started
        files.sync_file_system(folder)
        durable = time.monotonic() - started
        written = len(list(folder.glob("*/*.part")))
        if written != count:
            sys.exit(f"{written} of {count} files were written")
        metric(f"connector_round{number}_MB_per_s", size / seconds / 1e6)
        metric(f"connector_durable_round{number}_MB_per_s", size / durable / 1e6)
        metric(f"connector_round{number}_longest_step_ms", longest * 1e3)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        metric(f"connector_round{number}_memory_growth_GiB", grown * 1024 / files.GIB)
        rig.close()
    shutil.rmtree(folder)


def step(rig, owner: dict, free: dict) -> float:
    """One engine step; slots of requests whose blocks may be reused go back to `free`. Seconds it took."""
    started = time.monotonic()
    done = rig.step()
    seconds = time.monotonic() - started
    for request in done:
        free[owner.pop(request)] = None
    return seconds


def plain_writes(folder: Path, count: int, size: int, threads: int) -> tuple[float, float]:
    """The disk's own rate: the same files, the same threads, nothing else. Seconds until written, until durable."""
    block = os.urandom(1 << 24)

    def one(number: int) -> None:
        with open(folder / str(number), "wb", buffering=0) as file:
            left = size
            while left:
                left -= file.write(block[: min(left, len(block))])

    started = time.monotonic()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(one, range(count)))
    written = time.monotonic() - started
    files.sync_file_system(folder)
    return written, time.monotonic() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["serve", "long", "write"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--config", type=Path, default=ROOT / "configs/smollm2_gpu.yaml")
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--servers", nargs="+", default=SERVERS)
    parser.add_argument("--kv-gb", type=float, default=8, help="of cache for each server")
    parser.add_argument("--port", type=int, default=9250, help="of the first server")
    parser.add_argument("--one-by-one", action="store_true", help="start the servers one after the other")
    parser.add_argument("--seconds", type=float, default=290, help="no measurement starts later")
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=322, help="of a row, on average")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[64], help="of stage 02, in its requests")
    parser.add_argument("--bare-concurrency", type=int, nargs="+", default=[256])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--no-speculators", action="store_false", dest="speculators")
    parser.add_argument("--long-tokens", type=int, default=16384)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--gigabytes", type=float, default=10)
    parser.add_argument("--row-tokens", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--queue-gb", type=float, default=4)
    parser.add_argument("--dtype", choices=["bf16", "fp8"], default="bf16")
    args = parser.parse_args()
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    {"serve": serve, "long": long, "write": write}[args.part](args)


if __name__ == "__main__":
    main()
