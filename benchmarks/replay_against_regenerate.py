"""Whether training on the model's own answers pays off: the same questions, steps, tokens a step and seed, both ways.

    python -m benchmarks.replay_against_regenerate --prompts questions.jsonl --evaluate eval_a.jsonl eval_b.jsonl

1. The whole pipeline with answers that the model writes itself (`mode: regenerate`).
2. The same with the original answers of the file (`mode: replay`), on as many rows as make the same number of tokens.
3. Stage 06 serves both drafters, and none, on the same prompts; 05 --smoke passes the first through its door.

Every step resumes, so a host that ends a command after some minutes is called again with the same command until it
exits 0; 3 means: once more. Prints `METRIC name value` lines and leaves small files in $OUT. Nothing is downloaded.
"""

import argparse
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tarfile
import time
from pathlib import Path

from drafter import config, contracts, files
from drafter.serve import roles

ROOT = Path(__file__).resolve().parents[1]

AGAIN = 3
SAVE_SECONDS = 60  # for a stage to save after it was asked to stop
ROW_TOKENS = 100  # at least, of a question with its answer: bounds the epochs that a number of steps can take
SHOWN = (
    "prompts", "output_tokens", "seconds", "tokens_per_second", "speed_up", "drafts", "accepted", "acceptance_length",
    "low", "high", "per_position", "streams_agree", "unseen_steps",
)  # fmt: skip
KEPT = ("manifest.json", "config.yaml", "acceptance.json", "metrics.jsonl", "pipeline.json", "rejected.jsonl")


class Experiment:
    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.deadline = time.monotonic() + args.seconds
        self.own = self._load("regenerate", args.count)
        self.original = self._load("replay", None)
        self.progress_path = self.own.run.dir / "progress.json"
        try:
            self.progress = json.loads(self.progress_path.read_text())
        except FileNotFoundError:
            self.progress = {"done": [], "seconds": {}}

    def _load(self, mode: str, count: int | None) -> config.Config:
        source = {"name": "questions", "path": str(self.args.prompts.resolve()), "turns": "first", "mode": mode}
        evaluated = [
            {"name": path.stem.removeprefix("eval_"), "path": str(path.resolve()), "turns": "first"}
            for path in self.args.evaluate
        ]
        settings = {
            "run.dir": str(self.args.runs.resolve()),
            "run.name": mode,
            "prompts": [source | ({"count": count} if count else {})],
            "generate.max_tokens": self.args.max_tokens,
            # max_steps ends it: both runs take the same steps, and rows are shuffled as often as that needs
            "train.epochs": 2 + self.args.steps * self.args.tokens_per_step // (self.args.count * ROW_TOKENS),
            "train.max_steps": self.args.steps,
            "train.tokens_per_step": self.args.tokens_per_step,
            "train.validate_every": max(1, self.args.steps // 15),
            "train.save_every": max(1, self.args.steps // 3),
            "acceptance.prompts": evaluated,
            "acceptance.drafters": ["none", "run"],
            # As served; greedy, to agree with plain decoding; busy, where plain decoding differs from itself too
            "acceptance.cells": [
                {"concurrency": 8},
                {"concurrency": 8, "temperature": 0},
                {"concurrency": 32, "temperature": 0},
            ],
            "acceptance.max_tokens": self.args.measured_tokens,
            "acceptance.max_prompts": self.args.max_prompts,
        }
        if model := os.environ.get("MODEL"):
            settings["target.model"] = model
        overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()] + self.args.overrides
        return config.load(self.args.config.resolve(), overrides)

    def run(self) -> int:
        """Every step that is not done; AGAIN when time is up, else the exit code of the step that failed."""
        own, original = self.own.arguments, self.original.arguments
        # Replayed rows only need the chat template, which the server that reads them back knows as well.
        template = {"kind": "external", "url": self.original.servers.extract.url}
        other = self.original.stage_dir("05_export") / "model"
        eager = "servers.evaluate.args.enforce-eager=true"  # a minute of use is not worth capturing graphs
        steps = {
            "regenerate": lambda: [_pipeline(self.own)],
            "replay_rows": lambda: [
                [sys.executable, "-m", "drafter.serve", "up", "extract", *original],
                _script("01b_generate_synthetic", *original, "--set", f"servers.generate={json.dumps(template)}"),
            ],
            "replay_states": lambda: [_pipeline(self.original, "--only", "02", "--limit", self._rows())],
            "replay_train": lambda: [_pipeline(self.original, "--only", "04")],
            "replay_export": lambda: [_pipeline(self.original, "--only", "05")],
            "compare": lambda: [
                _script("06_measure_acceptance", *own, "--set", f'acceptance.drafters=["none", "{other}", "run"]')
            ],
            "smoke": lambda: [_script("05_export_checkpoint", *own, "--set", eager, "--smoke")],
        }
        try:
            for name, commands in steps.items():
                if name in self.progress["done"]:
                    continue
                for command in commands():
                    if code := self._call(name, command):
                        return code
                self.progress["done"].append(name)
                files.write_json(self.progress_path, self.progress)
            return 0
        finally:
            if roles.alive(self.original, "extract"):  # from replay_rows, and not used up by replay_states
                roles.down(self.original, "extract")

    def _rows(self) -> str:
        """How many rows of original answers hold as many tokens as all of the model's own."""
        wanted = sum(_tokens(self.own))
        total = count = 0
        for tokens in _tokens(self.original):
            if total >= wanted:
                break
            total, count = total + tokens, count + 1
        return str(count)

    def _call(self, name: str, command: list[str]) -> int:
        left = self.deadline - time.monotonic()
        if left < self.args.least:
            return AGAIN
        print(f"== {name}: {shlex.join(command)}", file=sys.stderr, flush=True)
        started = time.monotonic()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=ROOT, start_new_session=True)
        try:
            code = process.wait(left)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(SAVE_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
            code = AGAIN
        seconds = self.progress["seconds"]
        seconds[name] = round(seconds.get(name, 0) + time.monotonic() - started, 1)
        files.write_json(self.progress_path, self.progress)
        return code

    def metrics(self) -> None:
        for name, seconds in self.progress["seconds"].items():
            _metric(f"wall_{name}_s", seconds)
        for run in (self.own, self.original):
            self._run_metrics(run)
        report = _read(self.own.stage_dir("06_acceptance") / "acceptance.json") or {}
        for m in report.get("measurements", []):
            for key in SHOWN:
                _metric(f"{_cell(m)}_{key}", m[key])
        for c in report.get("comparisons", []):
            if c["part"] == "all":
                for key in ("prompts", "difference", "low", "high", "verdict"):
                    _metric(f"{_cell(c)}_against_{_label(c['baseline'])}_{key}", c[key])
        for g in report.get("greedy_agreement", []):
            for key in ("equal_outputs", "equal_tokens"):
                _metric(f"{_cell(g)}_against_none_c{g['reference_concurrency']}_{key}", g[key])
        if report:
            agree = [m["streams_agree"] for m in report["measurements"]]
            _metric("streams_agree", f"{sum(agree)} of {len(agree)}")
            _metric("left_out", len(report["left_out"]))

    def _run_metrics(self, run: config.Config) -> None:
        """Wall time and throughput of each stage, what it was given, and how training went."""
        mode = run.run.name
        for stage, told in (_read(run.run_dir / "pipeline.json") or {}).get("stages", {}).items():
            _metric(f"{mode}_{stage}_with_servers_s", told.get("seconds"))
        for stage in config.STAGES:
            if manifest := _read(run.stage_dir(stage) / "manifest.json"):
                for key in ("status", "in", "out", "pending", "seconds"):
                    _metric(f"{mode}_{stage}_{key}", manifest[key])
                _facts(f"{mode}_{stage}", manifest["facts"])
        entries = list(_index(run))
        _metric(f"{mode}_rows", len(entries))
        _metric(f"{mode}_tokens", sum(entry.tokens for entry in entries))
        spans = [span for entry in entries for span in contracts.cut(entry.supervised, entry.tokens)]
        _metric(f"{mode}_supervised_tokens", sum(end - start for start, end in spans))
        path = run.stage_dir("04_train") / "metrics.jsonl"
        records = list(files.read_jsonl(path, journal=True)) if path.exists() else []
        if rates := [r["tokens_per_s"] for r in records if r["kind"] == "train"]:
            _metric(f"{mode}_train_step_tokens_per_s_median", statistics.median(rates))
        for r in records:
            if r["kind"] == "validation":
                _metric(f"{mode}_validation_at_{r['step']}", r["expected_acceptance"])

    def keep(self, folder: Path) -> None:
        """Manifests, configs, metrics and results in one archive."""
        with tarfile.open(folder / "results.tar.gz", "w:gz") as archive:
            for path in sorted(self.own.run.dir.rglob("*")):
                wanted = path.name in KEPT or path.suffix == ".log" or path.parent.name == "units"
                if wanted and path.is_file() and path.stat().st_size < 4 << 20:
                    archive.add(path, path.relative_to(self.own.run.dir))


def _pipeline(run: config.Config, *verbs: str) -> list[str]:
    """run_pipeline.sh's own program, which takes the config's file without a flag."""
    _flag, path, *overrides = run.arguments
    return [sys.executable, "-m", "drafter.pipeline", path, *overrides, *verbs]


def _script(name: str, *arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / f"{name}.py"), *arguments]


def _tokens(run: config.Config) -> list[int]:
    """Token counts of stage 01b's rows, in file order."""
    shards = sorted(run.stage_dir("01b_synthetic").glob("shard-*.jsonl"))
    limit = run.target.max_seq_len
    return [min(len(row["input_ids"]), limit) for shard in shards for row in files.read_jsonl(shard)]


def _index(run: config.Config) -> list[contracts.IndexEntry]:
    path = run.stage_dir("02_hidden_states") / "index.jsonl"
    return [contracts.IndexEntry(**record) for record in files.read_jsonl(path)] if path.exists() else []


def _read(path: Path) -> dict | None:
    return json.loads(path.read_text()) if path.exists() else None


def _facts(place: str, facts: dict) -> None:
    for key, value in facts.items():
        if isinstance(value, dict):
            _facts(f"{place}_{key}", value)
        elif isinstance(value, int | float | str):
            _metric(f"{place}_{key}", value)


def _label(drafter: str) -> str:
    return {"run": "regenerate"}.get(drafter, "replay" if "/" in drafter else drafter)


def _cell(record: dict) -> str:
    """Drafter, prompt set and cell in a metric's name."""
    drafter, load = _label(record["drafter"]), f"c{record['concurrency']}_t{record['temperature']:g}"
    return f"{drafter}_{record['prompt_set']}_{load}"


def _metric(name: str, value: object) -> None:
    print(f"METRIC {name.replace(' ', '_')} {value}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True, help="questions with their original answers")
    parser.add_argument("--evaluate", type=Path, nargs="+", required=True, help="prompt files for stage 06")
    parser.add_argument("--config", type=Path, default=ROOT / "configs/smollm2_gpu.yaml")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs/replay_against_regenerate")
    parser.add_argument("--count", type=int, default=4000, help="questions that the model answers itself")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--tokens-per-step", type=int, default=8192)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--max-prompts", type=int, default=80, help="of each prompt file")
    parser.add_argument("--measured-tokens", type=int, default=512, help="of a reply to one of them")
    parser.add_argument("--seconds", type=float, default=520, help="stop and save after this long")
    parser.add_argument("--least", type=float, default=60, help="begin no step with less time left than this")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="overrides")
    experiment = Experiment(parser.parse_args())
    code = experiment.run()
    experiment.metrics()
    if out := os.environ.get("OUT"):
        experiment.keep(Path(out))
    print({0: "complete", AGAIN: "not finished: run the same command again"}.get(code, f"failed with {code}"))
    return code


if __name__ == "__main__":
    raise SystemExit(main())
