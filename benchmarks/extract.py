"""How fast hidden states come out: of the whole stage beside what its server could do, and of the writer alone.

    python benchmarks/extract.py serve --prompts questions.jsonl --out DIR [--config FILE] [--set SECTION.KEY=VALUE]
    python benchmarks/extract.py write --out DIR

`serve` starts three vLLM servers of the config's target on one device, with the same flags and no prefix caching:
plain, extracting with vLLM's own connector, extracting with ours. Then, round after round on the same rows:
  plain        the rows as prompts, nothing extracted
  unread       the same requests to vLLM's own connector; nobody reads its files
  ours         02_extract_hidden_states.py: probed, compared, published, durable, indexed
  speculators  `speculators generate-offline-data` on vLLM's own connector
`write` drives our connector over a cache of Kimi-K2.5's width without a model, beside plain writes of the same bytes.

Prints `METRIC name value` lines. `--prompts` is JSONL with `conversations`; nothing is downloaded.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from drafter import artifacts, config, contracts, server, stage  # noqa: E402
from drafter.client import Client  # noqa: E402

KIMI = {"layer_ids": (2, 30, 58, 61), "hidden": 7168}


def metric(name: str, value: float) -> None:
    print(f"METRIC {name} {value:.6g}", flush=True)


# serve


def serve(args: argparse.Namespace) -> None:
    shared = [*args.overrides, f"run.dir={args.out}", "servers.generate.gpus=[]", "servers.extract.gpus=[]"]
    for role in ("generate", "extract"):
        shared += [f"servers.{role}.args.enable-prefix-caching=false"]
        if args.memory:
            shared += [f"servers.{role}.args.gpu-memory-utilization={args.memory}"]
    own = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(args.out / "unread")},
    }
    plain = config.load(args.config, [*shared, "run.name=plain", "servers.generate.url=http://127.0.0.1:9250"])
    unread = [*shared, "run.name=unread", "servers.extract.url=http://127.0.0.1:9251"]
    unread = config.load(args.config, [*unread, f"servers.extract.args.kv-transfer-config={json.dumps(own)}"])
    ours = config.load(args.config, [*shared, "run.name=ours", "servers.extract.url=http://127.0.0.1:9252"])
    roles = [(plain, "generate"), (unread, "extract"), (ours, "extract")]
    with contextlib.ExitStack() as stack, ThreadPoolExecutor() as threads:
        for run_config, role in roles:
            stack.callback(server.down, run_config, role)
        if args.one_by_one:
            for run_config, role in roles:
                server.up(run_config, role)
        else:
            list(threads.map(lambda pair: server.up(*pair), roles))
        rows = text_rows(ours.target.model, args.prompts, args.rows, args.tokens)
        write_rows(ours, rows)
        dataset = write_dataset(args.out / "dataset", rows)
        tokens = sum(map(len, rows))
        metric("rows", len(rows))
        metric("tokens", tokens)
        best: dict[str, float] = {}
        for number in range(1, args.rounds + 1):
            for level in args.concurrency:
                found = {
                    "plain": tokens / post_all(plain, "generate", rows, level),
                    "unread": tokens / post_all(unread, "extract", rows, level),
                    "ours": extract_rate(ours, level, args.overrides, args.out, args.config),
                }
                shutil.rmtree(args.out / "unread", ignore_errors=True)
                if level <= 128 and args.speculators:
                    found["speculators"] = tokens / speculators(unread, dataset, level, args.out)
                for name, rate in found.items():
                    metric(f"{name}_c{level}_round{number}_tokens_per_s", rate)
                    best[name] = max(best.get(name, 0), rate)
        for name, rate in best.items():
            metric(f"{name}_best_tokens_per_s", rate)
            metric(f"ours_against_{name}", best["ours"] / rate)


def text_rows(model: Path, prompts: Path, count: int, tokens: int) -> list[list[int]]:
    """Token ids of real text: `count` rows whose lengths spread around `tokens`."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = []
    with open(prompts, encoding="utf-8") as file:
        for line in file:
            texts.append("\n\n".join(turn["value"] for turn in json.loads(line)["conversations"]))
    stream = tokenizer("\n\n".join(texts), add_special_tokens=False)["input_ids"]
    while len(stream) < count * tokens * 3 // 2:
        stream += stream
    choose = random.Random(0)
    rows, position = [], 0
    for _ in range(count):
        length = choose.randint(tokens // 2, tokens * 3 // 2)
        rows.append(stream[position : position + length])
        position += length
    return rows


def write_rows(run_config: config.Config, rows: list[list[int]]) -> None:
    """A finished stage 01b of these token ids."""
    args = argparse.Namespace(limit=None, dry_run=False)
    upstream = stage.Stage("01b_synthetic", run_config, args)
    upstream.begin(["target.model"])
    with open(upstream.folder / "shard-00000.jsonl", "w") as file:
        for number, ids in enumerate(rows):
            name = contracts.content_id(number)
            row = contracts.Row(
                row_id=name, conv_id=name, source="bench", turn=0, input_ids=ids, supervised=[[1, len(ids)]],
                think_end=None, reasoning=None, content="",
                finish_reason="stop", sampling={},
                usage={}, model="bench",
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


def post_all(run_config: config.Config, role: config.Role, rows: list[list[int]], concurrency: int) -> float:
    """Seconds for all rows as prompts, one a request, nothing done with the replies."""
    settings, name = getattr(run_config.servers, role), run_config.target.served_name

    async def main() -> float:
        async with Client(settings, concurrency=concurrency, outage_minutes=1) as client:
            started = time.monotonic()
            bodies = ({"model": name, "prompt": ids, "max_tokens": 1, "temperature": 0} for ids in rows)
            await asyncio.gather(*(client.post("/v1/completions", body, 600) for body in bodies))
            return time.monotonic() - started

    return asyncio.run(main())


def extract_rate(run_config, concurrency: int, overrides: list[str], out: Path, config_path: Path) -> float:
    """Tokens a second of stage 02 from its first to its last row; its wall time is printed beside."""
    folder = run_config.stage_dir("02_hidden_states")
    for path in folder.iterdir():
        if path.name != ".writers":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    line = [sys.executable, "02_extract_hidden_states.py", "--config", str(config_path)]
    sets = [
        *overrides, f"run.dir={out}", "run.name=ours", f"servers.extract.url={run_config.servers.extract.url}",
        "servers.extract.kind=external", "servers.extract.gpus=[]", f"extract.concurrency={concurrency}",
        "extract.reserve_gb=1",
    ]  # fmt: skip
    for entry in sets:
        line += ["--set", entry]
    started = time.monotonic()
    done = subprocess.run(line, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    summary = json.loads(done.stdout.splitlines()[-1])
    if done.returncode != 0:
        sys.exit(f"stage 02 failed: {summary.get('error')}")
    metric(f"ours_c{concurrency}_wall_s", time.monotonic() - started)
    metric(f"ours_c{concurrency}_mean_nat", summary["facts"]["probes"][0]["mean_nat"])
    return summary["facts"]["tokens_per_second"]


def speculators(run_config, dataset: Path, concurrency: int, out: Path) -> float:
    """Seconds of the library's own extraction of the same rows."""
    output = out / "speculators"
    shutil.rmtree(output, ignore_errors=True)
    line = [
        sys.executable, "-m", "speculators", "generate-offline-data",
        "--preprocessed-data", str(dataset), "--endpoint", run_config.servers.extract.url + "/v1",
        "--output", str(output), "--concurrency", str(concurrency),
    ]  # fmt: skip
    started = time.monotonic()
    with open(out / "speculators.log", "a") as log:
        subprocess.run(line, stdout=log, stderr=log, check=True)
    seconds = time.monotonic() - started
    shutil.rmtree(output, ignore_errors=True)
    return seconds


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
        rig = Rig(folder, layers, hidden, blocks, device, num_writer_threads=args.threads, queue_gb=args.queue_gb)
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
        while rig.worker._waiting or rig.worker._copying or rig.worker._queued:
            longest = max(longest, step(rig, owner, free))
            time.sleep(0.001)
        seconds = time.monotonic() - started
        artifacts.sync_file_system(folder)
        durable = time.monotonic() - started
        written = len(list(folder.glob("*/*.part")))
        if written != count:
            sys.exit(f"{written} of {count} files were written")
        metric(f"connector_round{number}_MB_per_s", size / seconds / 1e6)
        metric(f"connector_durable_round{number}_MB_per_s", size / durable / 1e6)
        metric(f"connector_round{number}_longest_step_ms", longest * 1e3)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        metric(f"connector_round{number}_memory_growth_GB", grown * 1024 / 1e9)
        rig.worker.shutdown()
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
    artifacts.sync_file_system(folder)
    return written, time.monotonic() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["serve", "write"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--config", type=Path, default=ROOT / "configs/smollm2_gpu.yaml")
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=322, help="of a row, on average")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--memory", type=float, default=0.25, help="share of the device for each server; 0: config's")
    parser.add_argument("--one-by-one", action="store_true", help="start the servers one after the other")
    parser.add_argument("--no-speculators", action="store_false", dest="speculators")
    parser.add_argument("--gigabytes", type=float, default=10)
    parser.add_argument("--row-tokens", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--queue-gb", type=float, default=4)
    parser.add_argument("--dtype", choices=["bf16", "fp8"], default="bf16")
    args = parser.parse_args()
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    (serve if args.part == "serve" else write)(args)


if __name__ == "__main__":
    main()
