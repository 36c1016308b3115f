"""What stage 01b costs in addition to the server: requests a second, output tokens a second, start-up, memory.

    python -m benchmarks.generate loopback                   # a server that answers at once with 1 KB
    python -m benchmarks.generate memory --count 1000000     # the same with a million prompts in the mix
    python -m benchmarks.generate server --config configs/smollm2_gpu.yaml --url http://127.0.0.1:8101 \\
        --prompts questions.jsonl --count 2000 --concurrency 200 --max-tokens 512

`server` needs the role's running server. Rounds alternate between a bare aiohttp load generator (A) and stage 01b
(B), with the same request bodies, each in a separate process; `--speculators` adds its regenerate-responses (the
server must then list the model's path as a second name), and `--seed-cost` rounds of A without per-row seeds. Idle
shares are computed from the answers' true lengths: what the order of the requests costs at the end of a run, and
could cost. Prints `METRIC name value` lines. Nothing is downloaded."""

import argparse
import asyncio
import contextlib
import heapq
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import mean

import aiohttp

from drafter import config, run_files, versions
from drafter.generate import answering, chat, mix, prompts, rows
from drafter.serve import client

ROOT = Path(__file__).resolve().parents[1]

REPLY = json.dumps(
    {
        "model": "toy",
        "prompt_token_ids": list(range(30)),
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "token_ids": list(range(100, 200)),
                "message": {"role": "assistant", "content": "x" * 330, "reasoning": None},
            }
        ],
        "usage": {"prompt_tokens": 30, "completion_tokens": 100, "total_tokens": 130},
    }
).encode()


class Loopback(asyncio.Protocol):
    """A minimal server: reads a request, writes always the same answer."""

    ANSWERS = {
        b"/v1/chat": REPLY,
        b"/v1/models": json.dumps({"data": [{"id": "toy", "max_model_len": 4096}]}).encode(),
        b"/v1/completions": b'{"choices": [{"token_ids": [1]}]}',
        b"/health": b"{}",
    }

    def connection_made(self, transport):
        self.transport, self.buffer = transport, b""

    def data_received(self, data):
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = self.buffer[:end].lower()
            mark = head.find(b"content-length:")
            length = int(head[mark + 15 :].split(b"\r\n", 1)[0]) if mark >= 0 else 0
            if len(self.buffer) < end + 4 + length:
                return
            path = head.split(b" ", 2)[1]
            body = next(answer for start, answer in self.ANSWERS.items() if path.startswith(start))
            self.buffer = self.buffer[end + 4 + length :]
            self.transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body
            )


async def serve_loopback(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Loopback, "127.0.0.1", port, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@contextlib.contextmanager
def loopback() -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.generate", "serve"], stdout=subprocess.PIPE, text=True
    )
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()


async def bare(run_config: config.Config, path: Path, seeds: bool) -> dict:
    """A: the same bodies with nothing around them; one connection a worker, replies parsed and counted."""
    requests = prompts.Requests(path)
    bodies = [chat.chat_body(requests[i], [], run_config) for i in range(len(requests))]
    if not seeds:
        bodies = [{key: value for key, value in body.items() if key != "seed"} for body in bodies]
    url, tokens, queue = run_config.servers.generate.url + chat.CHAT, 0, iter(bodies)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
    ) as session:

        async def worker():
            nonlocal tokens
            for body in queue:
                async with session.post(url, json=body) as reply:
                    tokens += json.loads(await reply.read())["usage"]["completion_tokens"]

        started, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(worker() for _ in range(run_config.generate.concurrency)))
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    return {"tok_s": tokens / seconds, "req_s": len(bodies) / seconds, "cpu_ms": 1000 * cpu / len(bodies)}


async def client_only(run_config: config.Config, path: Path) -> dict:
    """Our client without the stage: what its retries and counts cost."""
    requests, settings = prompts.Requests(path), run_config.generate
    bodies = [chat.chat_body(requests[i], [], run_config) for i in range(len(requests))]
    queue = iter(bodies)
    async with client.Client(run_config.servers.generate, concurrency=settings.concurrency, outage_minutes=1) as one:

        async def worker():
            for body in queue:
                await one.post(chat.CHAT, body, timeout=600)

        started, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(worker() for _ in range(settings.concurrency)))
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    return {"req_s": len(bodies) / seconds, "cpu_ms": 1000 * cpu / len(bodies)}


def idle_share(lengths: Iterable[int], slots: int) -> float:
    """Share of slot time idle at the end when requests of these lengths, in this order, fill `slots` slots."""
    busy = [0] * slots
    total = 0
    for length in lengths:
        heapq.heapreplace(busy, busy[0] + length)
        total += length
    return 1 - total / (slots * max(busy))


class Bench:
    def __init__(self, folder: Path, args: argparse.Namespace, url: str, prompts_path: Path):
        self.folder, self.args = folder, args
        self.base = [
            f"run.dir={folder}",
            f"servers.generate.url={url}",
            "servers.generate.kind=external",
            f"prompts={json.dumps([{'name': 'bench', 'path': str(prompts_path), 'turns': 'first'}])}",
            f"generate.concurrency={args.concurrency}",
            f"generate.max_tokens={args.max_tokens}",
            f"generate.temperature={args.temperature}",
            "generate.rows_per_shard=1000",
            "acceptance.held_out=1",
            *args.overrides,
        ]
        self.config = config.load(args.config, self.base)
        self.requests = folder / "requests.jsonl"
        self.count = 0
        if args.what != "memory":
            self.prepare_bodies()

    def prepare_bodies(self) -> None:
        mix.materialise(self.config, self.folder / "mix")
        with open(self.folder / "mix" / run_files.PROMPTS, "rb") as asked, open(self.requests, "wb") as file:
            for line in itertools.islice(asked, self.args.count):
                file.write(line)
                self.count += 1

    def inner(self, what: str, *extra: str) -> dict:
        path = self.folder / "config.yaml"
        path.write_text(self.config.dump())
        command = [
            sys.executable,
            "-m",
            "benchmarks.generate",
            what,
            "--config",
            str(path),
            "--requests",
            str(self.requests),
            *extra,
        ]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    def stage(self, name: str, *arguments: str) -> tuple[int, dict, float]:
        """B: the stage as users run it; exit code, summary, wall seconds."""
        sets = [part for override in [*self.base, f"run.name={name}"] for part in ("--set", override)]
        script = ROOT / "01b_generate_synthetic.py"
        started = time.perf_counter()
        done = subprocess.run(
            [sys.executable, str(script), "--config", str(self.args.config), *arguments, *sets],
            stdout=subprocess.PIPE,
            text=True,
        )
        return done.returncode, json.loads(done.stdout.splitlines()[-1]), time.perf_counter() - started

    def ours(self, name: str) -> dict:
        code, summary, wall = self.stage(name, "--limit", str(self.count))
        if code or summary["out"] != self.count:
            raise SystemExit(f"stage 01b ended with {code}: {summary}")
        facts = summary["facts"]["generation"]
        made = {row.row_id: row for row in rows.read_rows(self.folder / name / "01b_synthetic", self.count)}
        assert len(made) == self.count
        self.lengths = {row_id: row.usage["completion_tokens"] for row_id, row in made.items()}
        return {
            "tok_s": facts["output_tokens_per_second"],
            "req_s": self.count / facts["seconds"],
            "cpu_ms": 1000 * facts["cpu_seconds"] / self.count,
            "around_seconds": wall - facts["seconds"],
            "tail_seconds": facts["tail_seconds"],
            "tail_idle_share": facts["tail_idle_share"],
            "tokens": summary["facts"]["rows"]["all"]["completion_tokens"],
        }

    def speculators(self) -> dict:
        """speculators' own tool on the same prompts and sampling; its start-up is part of its wall time.

        It takes a tokenizer's path and a served name in one argument, so the server must list the model's path too.
        """
        settings, out = self.config.generate, self.folder / f"regenerated-{time.time_ns()}.jsonl"
        source = self.folder / "source.jsonl"
        with open(source, "w") as file:
            for line in self.requests.read_text().splitlines():
                question = json.loads(line)["messages"][-1]["content"]
                file.write(json.dumps({"conversations": [{"from": "human", "value": question}]}) + "\n")
        sampling = {"temperature": settings.temperature, "top_p": settings.top_p}
        command = [
            sys.executable, "-c", "from speculators.cli import app; app()", "regenerate-responses",
            "--endpoint", self.config.servers.generate.url + chat.CHAT, "--model", str(self.config.target.model),
            "--dataset", str(source), "--concurrency", str(settings.concurrency),
            "--max-tokens", str(settings.max_tokens), "--sampling-params", json.dumps(sampling),
            "--outfile", str(out),
        ]  # fmt: skip
        started = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"regenerate-responses ended with {done.returncode}: {done.stderr[-2000:]}")
        seconds = time.perf_counter() - started
        tokens = sum(sum(json.loads(line)["loss_mask"]) for line in out.read_text().splitlines())
        return {"tok_s": tokens / seconds, "seconds": seconds, "tokens": tokens}


def metric(name: str, value: float) -> None:
    print(f"METRIC {name} {value:.6g}", flush=True)


def toy_model(folder: Path) -> Path:
    shape = {"num_hidden_layers": 30, "hidden_size": 16, "vocab_size": 49152, "max_position_embeddings": 4096}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["Toy"], **shape}))
    return folder


def write_toy_prompts(path: Path, count: int) -> None:
    with open(path, "w") as file:
        for i in range(count):
            question = f"Question {i}: {'why ' * 40}?"
            file.write(json.dumps({"conversations": [{"from": "human", "value": question}], "source": "toy"}) + "\n")


def run_loopback(args: argparse.Namespace, folder: Path) -> None:
    with loopback() as url:
        bench = toy_bench(args, folder, url)
        for turn in range(1, args.rounds + 1):
            taken = {
                "bare": bench.inner("bare"),
                "client": bench.inner("client"),
                "stage": bench.ours(f"round{turn}"),
            }
            for name, result in taken.items():
                metric(f"{name}_requests_per_second_{turn}", result["req_s"])
                metric(f"{name}_cpu_ms_per_request_{turn}", result["cpu_ms"])
            metric(f"stage_seconds_around_{turn}", taken["stage"]["around_seconds"])


def toy_bench(args: argparse.Namespace, folder: Path, url: str) -> Bench:
    write_toy_prompts(folder / "toy.jsonl", args.count + 1)
    args.overrides += [f"target.model={toy_model(folder / 'model')}", "target.served_name=toy"]
    args.overrides += ["target.special_tokens={}"]
    return Bench(folder, args, url, folder / "toy.jsonl")


def run_memory(args: argparse.Namespace, folder: Path) -> None:
    """The whole mix is requested, and a deadline ends the run after some minutes."""
    with loopback() as url:
        bench = toy_bench(args, folder, url)
        minutes = 2 + args.count // 100_000  # reading a million prompts takes some
        soon = time.strftime("%H:%M", time.localtime(time.time() + 60 * minutes))
        code, summary, wall = bench.stage("million", "--deadline", soon)
        if code:
            raise SystemExit(f"stage 01b ended with {code}: {summary}")
        metric("requests", summary["in"])
        metric("rows", summary["out"])
        metric("stage_seconds_around", wall - summary["facts"]["generation"]["seconds"])
        metric("stage_peak_mib", summary["facts"]["generation"]["peak_mib"])


def run_server(args: argparse.Namespace, folder: Path) -> None:
    bench = Bench(folder, args, args.url, Path(args.prompts).resolve())
    bench.inner("bare")  # warm up: compiled kernels, allocator
    taken: dict[str, list[dict]] = {"bare": [], "ours": []}
    for turn in range(1, args.rounds + 1):
        taken["bare"].append(bench.inner("bare"))
        metric(f"bare_tokens_per_second_{turn}", taken["bare"][-1]["tok_s"])
        taken["ours"].append(bench.ours(f"round{turn}"))
        metric(f"stage_tokens_per_second_{turn}", taken["ours"][-1]["tok_s"])
    metric("stage_to_bare", mean(r["tok_s"] for r in taken["ours"]) / mean(r["tok_s"] for r in taken["bare"]))
    metric("output_tokens", taken["ours"][-1]["tokens"])
    requests = prompts.Requests(bench.requests)
    shuffled = [requests[i] for i in range(len(requests))]
    drain = args.concurrency * answering.DRAIN
    by_size = sorted(shuffled[-drain:], key=lambda r: len(r.messages[-1]["content"]), reverse=True)
    for name, order in (("shuffled", shuffled), ("longest_prompt_first", [*shuffled[:-drain], *by_size])):
        metric(f"idle_share_{name}", idle_share((bench.lengths[r.row_id] for r in order), args.concurrency))
    best = sorted(bench.lengths.values(), reverse=True)
    metric("idle_share_longest_answer_first", idle_share(best, args.concurrency))
    for name in ("around_seconds", "tail_seconds", "tail_idle_share"):
        metric(f"stage_{name}", mean(r[name] for r in taken["ours"]))
    for turn in range(1, args.rounds + 1) if args.seed_cost else ():
        metric(f"bare_tokens_per_second_without_seeds_{turn}", bench.inner("bare", "--no-seeds")["tok_s"])
        metric(f"bare_tokens_per_second_with_seeds_{turn}", bench.inner("bare")["tok_s"])
    if args.speculators:
        theirs = bench.speculators()
        metric("speculators_tokens_per_second_with_start", theirs["tok_s"])
        metric("speculators_seconds", theirs["seconds"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("loopback", "memory", "server", "serve", "bare", "client"))
    parser.add_argument("--config", default=ROOT / "configs/smollm2_cpu.yaml")
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--url")
    parser.add_argument("--prompts")
    parser.add_argument("--count", type=int, default=20000)
    parser.add_argument("--concurrency", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--speculators", action="store_true")
    parser.add_argument("--seed-cost", action="store_true")
    parser.add_argument("--requests", type=Path)
    parser.add_argument("--no-seeds", action="store_true")
    args = parser.parse_args()
    if args.what == "serve":
        return client.run_interruptible(serve_loopback(0))
    if args.what in ("bare", "client"):
        run_config = config.load(args.config)
        work = client_only(run_config, args.requests) if args.what == "client" else None
        print(json.dumps(client.run_interruptible(work or bare(run_config, args.requests, seeds=not args.no_seeds))))
        return None
    print(f"{platform.platform()}, {os.cpu_count()} CPUs, {versions.versions()}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        {"loopback": run_loopback, "memory": run_memory, "server": run_server}[args.what](args, Path(folder))
    return None


if __name__ == "__main__":
    main()
