"""From prompts to a trained drafter, each program started as its users do: ours, and speculators' own commands.

    python -m benchmarks.prompts_to_drafter ours --prompts mix.jsonl --out DIR --gpu 0
    python -m benchmarks.prompts_to_drafter speculators --prompts mix.jsonl --out DIR --gpu 1
    python -m benchmarks.prompts_to_drafter served --prompts mix.jsonl --out DIR --gpu 0 --measure gsm8k.jsonl ...

The same prompts, model, sampling, draft vocabulary, packs, epochs and learning rate. `ours` is run_pipeline.sh from
01b to 04. `speculators` is a plain vLLM server and `regenerate-responses`; then `prepare-data`; then a server with
vLLM's own extraction connector and `generate-offline-data`; then `train`. Both pay for their servers' starts.
`served` exports ours and measures both drafters and no drafter with stage 06, on the prompts of `--measure`.
All resume: the same command goes on after the last step that ended. Prints `METRIC name value` lines: wall seconds
of each step with its server, and of all. `--prompts` is JSON Lines with `messages`.
"""

import argparse
import contextlib
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from drafter import config, signals
from drafter.serve import roles

ROOT = Path(__file__).resolve().parents[1]

CLI = [sys.executable, "-c", "from speculators.cli import app; app()"]
# torch 2.11 cannot compile two kernels that share one list of configurations. Without a GPU there are no kernels.
TRAIN = """
import importlib.util
if importlib.util.find_spec("triton"):
    from speculators.losses import fused
    fused.loss_backward_kernel.configs = list(fused.loss_backward_kernel.configs)
from speculators.train.cli import main
from speculators.train.config import TrainConfig
if __name__ == "__main__":
    main(TrainConfig.resolve())
"""
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}  # without compilation, whose boots outlast the measuring
CELL = ("concurrency", "num_speculative_tokens", "temperature")
CELLS = ((32, 3, 0), (32, 3, 1), (8, 3, 0), (32, 7, 0), (32, 7, 1))
STAGES = {"01b_synthetic": "01b", "02_hidden_states": "02", "04_train": "04"}


def metric(name: str, value: float) -> None:
    print(f"METRIC {name} {value:.6g}", flush=True)


def settings(args: argparse.Namespace, name: str) -> list[str]:
    prompts = [{"name": "mix", "path": str(args.prompts.resolve()), "turns": "first"}]
    values = {
        "run.dir": args.out.resolve(), "run.name": name, "prompts": json.dumps(prompts),
        "generate.max_tokens": args.max_tokens, "generate.temperature": 0.7, "generate.top_p": 1,
        "train.draft_vocab_size": args.draft_vocab, "train.epochs": args.epochs, "train.lr": args.lr,
        "target.max_seq_len": args.pack, "acceptance.smoke": "false", "train.validate_every": 300,
        "train.save_every": 600,
    }  # fmt: skip
    gpus = [] if args.gpu is None else [args.gpu]
    for number, role in enumerate(("generate", "extract", "evaluate")):
        values |= {f"servers.{role}.gpus": gpus, f"servers.{role}.url": f"http://127.0.0.1:{args.port + number}"}
    values["servers.extract.args.max-model-len"] = args.pack + 512
    return [*(f"{key}={value}" for key, value in values.items()), *args.overrides]


class Steps:
    """Timed steps, each run once: what an earlier call has finished is not repeated."""

    def __init__(self, folder: Path, program: str):
        self.path, self.program = folder / f"{program}.json", program
        folder.mkdir(parents=True, exist_ok=True)
        self.seconds = json.loads(self.path.read_text()) if self.path.exists() else {}

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[bool]:
        """Yields whether the step is still to be done, and times it."""
        if name in self.seconds:
            yield False
            return
        started = time.monotonic()
        yield True
        self.seconds[name] = time.monotonic() - started
        self.path.write_text(json.dumps(self.seconds))
        metric(f"{self.program}_{name}_s", self.seconds[name])

    def total(self) -> None:
        metric(f"{self.program}_all_s", sum(self.seconds.values()))


def ours(args: argparse.Namespace) -> None:
    steps, sets = Steps(args.out, "ours"), settings(args, "ours")
    for stage, number in STAGES.items():
        with steps.step(number) as wanted:
            if wanted:
                line = [str(ROOT / "run_pipeline.sh"), str(args.config), "--only", number]
                line += ["--limit", str(args.count)]
                run([*line, *(part for entry in sets for part in ("--set", entry))], os.environ | gpu(args))
                manifest = json.loads((args.out / "ours" / stage / "manifest.json").read_text())
                metric(f"ours_{number}_stage_s", manifest["seconds"])
                metric(f"ours_{number}_rows", manifest["out"])
                print(json.dumps({stage: manifest["facts"]})[:4000], flush=True)
    steps.total()


def speculators(args: argparse.Namespace) -> None:
    steps, folder = Steps(args.out, "speculators"), args.out.resolve() / "speculators"
    folder.mkdir(exist_ok=True)
    run_config = config.load(args.config, settings(args, "servers"))
    model, endpoint = str(run_config.target.model), run_config.servers.generate.url + "/v1"
    with steps.step("regenerate_responses") as wanted:
        if wanted:
            source = folder / "source.jsonl"
            source.write_text("".join(map(conversation, args.prompts.read_text().splitlines()[: args.count])))
            with serving(args, "generate", {"compilation-config": None}):
                sampling = json.dumps({"temperature": 0.7, "top_p": 1})
                run(
                    [
                        *CLI, "regenerate-responses", "--endpoint", endpoint + "/chat/completions", "--model", model,
                        "--dataset", str(source), "--concurrency", "200", "--max-tokens", str(args.max_tokens),
                        "--sampling-params", sampling, "--outfile", str(folder / "answers.jsonl"), "--resume",
                    ],
                    os.environ | gpu(args),
                )  # fmt: skip
    with steps.step("prepare_data") as wanted:
        if wanted:
            run(
                [
                    *CLI, "prepare-data", "--model", model, "--data", str(folder / "answers.jsonl"), "--output",
                    str(folder / "data"), "--seq-length", str(args.pack), "--no-skip-token-freq", "--overwrite",
                ],
                os.environ | gpu(args),
            )  # fmt: skip
    connector = {
        "kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(folder / "files")},
    }  # fmt: skip
    with steps.step("generate_offline_data") as wanted:
        if wanted:
            with serving(args, "extract", {"kv-transfer-config": connector}):
                run(
                    [
                        *CLI, "generate-offline-data", "--preprocessed-data", str(folder / "data"), "--endpoint",
                        run_config.servers.extract.url + "/v1", "--output", str(folder / "data/hidden_states"),
                        "--concurrency", "32",
                    ],
                    os.environ | gpu(args),
                )  # fmt: skip
    with steps.step("train") as wanted:
        if wanted:
            script = folder / "train.py"
            script.write_text(TRAIN)
            options = {
                "speculator-type": "eagle3", "verifier-name-or-path": model, "data-path": folder / "data",
                "draft-vocab-size": args.draft_vocab, "mask-token-id": 0, "full-attention-indices": 0,
                "target-layer-ids": " ".join(map(str, run_config.target.aux_layer_ids)), "on-missing": "raise",
                "total-seq-len": args.pack, "optimizer": "adamw", "lr": args.lr, "epochs": args.epochs,
                "train-data-ratio": 0.9, "num-workers": 4, "log-dir": folder / "logs",
                "save-path": folder / "drafter",
            }  # fmt: skip
            line = [sys.executable, str(script)]
            for name, value in options.items():
                line += [f"--{name}", *str(value).split()]
            run(line, os.environ | gpu(args))
    steps.total()


def served(args: argparse.Namespace) -> None:
    others = [args.out.resolve() / "speculators/drafter/checkpoint_best"]
    rivals = [str(folder) for folder in others if folder.exists()]
    prompts = [{"name": path.stem, "path": str(path.resolve()), "turns": "first"} for path in args.measure]
    values = {
        "acceptance.drafters": ["none", "run", *rivals], "acceptance.prompts": prompts, "acceptance.max_prompts": 80,
        "acceptance.max_tokens": 256, "acceptance.cells": [dict(zip(CELL, cell, strict=True)) for cell in CELLS],
        "servers.evaluate.args.compilation-config": GRAPHS,
    }  # fmt: skip
    sets = [
        *settings(args, "ours"),
        *(f"{key}={json.dumps(value)}" for key, value in values.items()),
        *args.overrides,
    ]
    for script in ("05_export_checkpoint.py", "06_measure_acceptance.py"):
        line = [sys.executable, str(ROOT / script), "--config", str(args.config)]
        run([*line, *(part for entry in sets for part in ("--set", entry))], os.environ | gpu(args))
    report = json.loads((args.out / "ours/06_acceptance/acceptance.json").read_text())
    for each in report["measurements"]:
        name = "_".join(str(each[key]) for key in ("drafter", "prompt_set", *CELL)).rpartition("/")[2]
        for figure in ("acceptance_length", "tokens_per_second"):
            metric(f"{name}_{figure}", each[figure] or 0)


def conversation(line: str) -> str:
    question = next(m["content"] for m in json.loads(line)["messages"] if m["role"] == "user")
    return json.dumps({"conversations": [{"from": "human", "value": question}]}) + "\n"


@contextlib.contextmanager
def serving(args: argparse.Namespace, role: config.Role, flags: dict) -> Iterator[None]:
    """A server of the config's role with these flags besides; its model is served under its path."""
    model = config.load(args.config, settings(args, "servers")).target.model  # as the library asks for it
    sets = [f"servers.{role}.args.{flag}={json.dumps(value)}" for flag, value in flags.items()]
    with roles.serving(
        config.load(args.config, [*settings(args, "servers"), f"target.served_name={model}", *sets]), role
    ):
        yield


def gpu(args: argparse.Namespace) -> dict[str, str]:
    return {} if args.gpu is None else {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": str(args.gpu)}


def run(line: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(line, env=environment | {"PYTHON": sys.executable}, stdout=sys.stderr)
    if done.returncode:
        sys.exit(f"{shlex.join(line)[:300]} ended with {done.returncode}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", choices=("ours", "speculators", "served"))
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--config", type=Path, default=ROOT / "configs/smollm2_gpu.yaml")
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--gpu", type=int, help="the one to use; without it, whatever there is")
    parser.add_argument("--port", type=int, default=8201)
    parser.add_argument("--measure", type=Path, nargs="*", default=[], help="prompts for `served`")
    parser.add_argument("--count", type=int, default=6000)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--draft-vocab", type=int, default=32000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-3, help="of both trainers")
    parser.add_argument("--pack", type=int, default=4096)
    args = parser.parse_args()
    signals.listen(*signals.wanted())  # a cut call takes its server down
    {"ours": ours, "speculators": speculators, "served": served}[args.program](args)


if __name__ == "__main__":
    main()
