"""Which flags should serve the role `generate`: boot and stage 01b for each set of them, in turns on one GPU.

    python -m benchmarks.generate_flags --prompts mix.jsonl --out DIR [--counts 93 2000] [--rounds 2]

Each turn of a variant brings the role up, answers `--counts` prompts by stage 01b, a run each, and brings it down.
  eager      no graphs, no compilation
  graphs     graphs of decode steps, no compilation
  compiled   vLLM's default
vLLM's caches of compiled code are empty before the first round and kept for the later ones. No turn starts after
`--seconds`. Prints `METRIC name value` lines; `--prompts` is JSON Lines with `messages` or `conversations`.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from drafter import config, signals
from drafter.serve import roles

ROOT = Path(__file__).resolve().parents[1]

VARIANTS = {
    "eager": {"enforce-eager": True, "compilation-config": None},
    "graphs": {"enforce-eager": False, "compilation-config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
    "compiled": {"enforce-eager": False, "compilation-config": None},
}
ROLE = "generate"


def metric(name: str, value: float) -> None:
    print(f"METRIC {name} {value:.6g}", flush=True)


def settings(args: argparse.Namespace, variant: str, name: str) -> list[str]:
    prompts = [{"name": "mix", "path": str(args.prompts.resolve()), "turns": "first"}]
    flags = [f"servers.{ROLE}.args.{flag}={json.dumps(value)}" for flag, value in VARIANTS[variant].items()]
    own = [f"run.dir={args.out.resolve()}", f"run.name={name}", f"prompts={json.dumps(prompts)}"]
    return [*own, f"generate.max_tokens={args.max_tokens}", *flags, *args.overrides]


def turn(args: argparse.Namespace, variant: str, number: int) -> None:
    run_config = config.load(args.config, settings(args, variant, f"{variant}-{number}"))
    started = time.monotonic()
    roles.up(run_config, ROLE)
    boot = time.monotonic() - started
    metric(f"{variant}_{number}_boot_s", boot)
    try:
        for count in args.counts:
            summary, seconds = answer(args, variant, f"{variant}-{number}-{count}", run_config, count)
            facts = summary["facts"]["generation"]
            metric(f"{variant}_{number}_{count}_stage_s", seconds)
            metric(f"{variant}_{number}_{count}_boot_and_stage_s", boot + seconds)
            metric(f"{variant}_{number}_{count}_tokens_per_s", facts["output_tokens_per_second"])
            metric(f"{variant}_{number}_{count}_rows", summary["out"])
    finally:
        started = time.monotonic()
        roles.down(run_config, ROLE)
        metric(f"{variant}_{number}_down_s", time.monotonic() - started)


def answer(args, variant: str, name: str, served: config.Config, count: int) -> tuple[dict, float]:
    """Stage 01b over `count` prompts on the server that is up: its summary and wall seconds."""
    url = served.server(ROLE).url
    sets = [*settings(args, variant, name), f"servers.{ROLE}.kind=external", f"servers.{ROLE}.url={url}"]
    line = [sys.executable, str(ROOT / "01b_generate_synthetic.py"), "--config", str(args.config)]
    line += ["--limit", str(count), *(part for entry in sets for part in ("--set", entry))]
    started = time.monotonic()
    done = subprocess.run(line, stdout=subprocess.PIPE, text=True)
    seconds = time.monotonic() - started
    summary = json.loads(done.stdout.splitlines()[-1])
    if done.returncode:
        sys.exit(f"stage 01b ended with {done.returncode}: {summary.get('error')}")
    return summary, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--config", type=Path, default=ROOT / "configs/smollm2_gpu.yaml")
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--counts", type=int, nargs="+", default=[93, 2000])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=480)
    args = parser.parse_args()
    signals.listen(*signals.wanted())  # a cut call takes its server down
    caches = args.out / "caches"
    shutil.rmtree(caches, ignore_errors=True)
    os.environ |= {"VLLM_CACHE_ROOT": str(caches / "vllm"), "TRITON_CACHE_DIR": str(caches / "triton")}
    started = time.monotonic()
    for number in range(1, args.rounds + 1):
        for variant in args.variants:
            if time.monotonic() - started < args.seconds:
                turn(args, variant, number)


if __name__ == "__main__":
    main()
