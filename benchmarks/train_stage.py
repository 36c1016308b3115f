"""Speed of the whole of training as a user starts it, ours and speculators' in turns on the same rows: A B A B.

    python -m benchmarks.train --parts stage                      random states; or this file itself
    python -m benchmarks.train_stage --captured runs/smollm2_gpu  those of a run, and how good both drafters are

3 epochs, packs of 4,096; random states are 2,000 rows in SmolLM2's shape. The caches of compiled kernels are empty in
the first turn and kept for the second. Both train on the same rows and hold out the same ones, with one vocabulary.
"""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch
import yaml
from safetensors.torch import save_file

from benchmarks import train as bench
from drafter import config, contracts
from drafter.extract import state_file, states
from drafter.target import head
from drafter.train import checkpoint, draft_model, examples, new_drafter

VALIDATION_SHARE = 0.1
SMOLLM2 = bench.Shape(576, 1536, 9, 3, 64, 49152, 32000, pack=4096, row=300)
TINY = bench.Shape(64, 170, 1, 1, 64, 512, 256, pack=512, row=300)
ROWS = {False: (SMOLLM2, 2000), True: (TINY, 40)}  # by --tiny


def make_run(folder: Path, shape: bench.Shape, rows: int) -> list[str]:
    """A finished stage 02 of random states, rows of half to one and a half `shape.row` tokens; the command line that
    trains on it."""
    hidden, vocab = shape.hidden, shape.vocab
    model = folder / "model"
    model.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 30,
        "hidden_size": hidden, "intermediate_size": shape.intermediate, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim, "vocab_size": vocab, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2 * shape.pack, "tie_word_embeddings": True, "rope_theta": 1e5,
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    embed = (torch.randn(vocab, hidden, generator=generator) * 0.05).bfloat16()
    norm = torch.ones(hidden).bfloat16()
    save_file({"model.embed_tokens.weight": embed, "model.norm.weight": norm}, model / "model.safetensors")
    captured = folder / "runs/bench/02_hidden_states"
    captured.mkdir(parents=True)
    records = []
    drawn = torch.randn(2 * shape.row, 4, hidden, generator=generator).bfloat16()  # each row is a stretch of these
    for index in range(rows):
        row_id = f"{index:032x}"[::-1]
        tokens = int(torch.randint(shape.row // 2, shape.row * 3 // 2, (), generator=generator))
        first = int(torch.randint(len(drawn) - tokens, (), generator=generator))
        path = captured / contracts.states_path(row_id)
        path.parent.mkdir(exist_ok=True)
        tensors = {
            "token_ids": torch.randint(vocab, (tokens,), generator=generator),
            "hidden_states": drawn[first : first + tokens].clone(),
        }
        size = states.write_states(path, tensors, state_file.file_metadata(row_id, "bench", (2, 15, 27, 30), "bf16"))
        spans = [[tokens // 3, tokens]]
        entry = contracts.IndexEntry(row_id, row_id, "bench", tokens, tokens, spans, None, size)
        records.append(json.dumps(entry.to_record()))
    (captured / "index.jsonl").write_text("\n".join(records) + "\n")
    manifest = {"stage": "02_hidden_states", "status": "complete", "question": {"schema": contracts.SCHEMA}}
    (captured / "manifest.json").write_text(json.dumps(manifest))
    return train_command(folder, model, [2, 15, 27, 30], shape)


def train_command(folder: Path, model: Path, layer_ids: list[int], shape: bench.Shape) -> list[str]:
    """04_train.py over the stage 02 of `folder`/runs/bench, with the settings that speculators gets as well."""
    settings = {
        "run.name": "bench", "run.dir": folder / "runs", "target.model": model, "target.layer_ids": layer_ids,
        "target.max_seq_len": shape.pack, "train.draft_vocab_size": shape.draft_vocab,
        "train.lr": 1e-4, "train.epochs": 3, "train.precision": "bf16" if torch.cuda.is_available() else "fp32",
        "train.trainable": "[layer, fc, norms]", "train.validation_share": VALIDATION_SHARE,
        "train.validate_every": 150, "train.save_every": 150,
    }  # fmt: skip
    command = [str(bench.ROOT / "04_train.py"), "--config", str(bench.ROOT / "configs/smollm2_cpu.yaml")]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    return command


def take_run(folder: Path, captured: Path, shape: bench.Shape) -> list[str]:
    """The same over the finished stage 02 of another run, with that run's target."""
    (folder / "runs/bench").mkdir(parents=True)
    (folder / "runs/bench/02_hidden_states").symlink_to(captured.resolve() / "02_hidden_states")
    target = yaml.safe_load((captured / "02_hidden_states/config.yaml").read_text())["target"]
    (folder / "model").symlink_to(Path(target["model"]).resolve())
    return train_command(folder, folder / "model", target["layer_ids"], shape)


def config_of(line: list[str]) -> config.Config:
    """What a command line of `train_command` says, with what was added to it."""
    return config.load(Path(line[2]), [part for part in line if "=" in part])


def split_rows(run_config: config.Config) -> tuple[list[examples.Example], list[examples.Example]]:
    """Rows that train and rows that are held out, as stage 04 splits them."""
    target, train = run_config.target, run_config.train
    entries = examples.read_index(run_config.stage_dir("02_hidden_states"))
    return examples.split_rows(
        examples.learnable_rows(entries, target.max_seq_len, train.ttt_steps, contracts.Counts()),
        train.validation_share,
    )


def records(folder: Path, kind: str) -> list[dict]:
    """Those of a stage 04 folder's metrics that are whole by now."""
    log = folder / "metrics.jsonl"
    found = map(json.loads, log.read_text().split("\n")[:-1]) if log.exists() else ()
    return [record for record in found if record["kind"] == kind]


def stage_turn(line: list[str], environment: dict[str, str], name: str, folder: Path) -> None:
    started = time.perf_counter()
    done = subprocess.run(line, env=environment, stdout=subprocess.PIPE, text=True)
    seconds = time.perf_counter() - started
    summary = json.loads(done.stdout.splitlines()[-1])
    if done.returncode:
        raise SystemExit(f"stage 04 failed: {summary.get('error')}")
    seen = summary["facts"]["tokens_seen"]
    bench.metric(f"{name}_process_s", seconds)
    bench.metric(f"{name}_process_tokens_per_s", seen / seconds)
    bench.metric(f"{name}_body_s", summary["seconds"])
    train, validations = records(folder, "train"), records(folder, "validation")
    spent = [(r["tokens"] - p["tokens"]) / r["tokens_per_s"] for p, r in zip(train, train[1:], strict=False)]
    bench.metric(f"{name}_first_step_s", train[0]["tokens"] / train[0]["tokens_per_s"])
    bench.metric(f"{name}_steps_s", sum(spent))
    rates = sorted(record["tokens_per_s"] for record in train)
    bench.metric(f"{name}_step_tokens_per_s_median", rates[len(rates) // 2])
    slow = [s for s in spent if s > 0.5]
    bench.metric(f"{name}_steps_beyond_half_a_second", str(len(slow)))
    bench.metric(f"{name}_validations_s", sum(record["seconds"] for record in validations))
    bench.metric(f"{name}_first_validation_s", validations[0]["seconds"])
    bench.metric(f"{name}_expected_acceptance", validations[-1]["expected_acceptance"])
    bench.metric(f"{name}_event_files", str(len(list(folder.glob("tensorboard/*")))))


LIBRARY_TRAIN = """
from speculators.losses import fused
# torch 2.11 cannot compile two kernels that share one list of configurations.
fused.loss_backward_kernel.configs = list(fused.loss_backward_kernel.configs)
from speculators.train.cli import main
from speculators.train.config import TrainConfig
if __name__ == "__main__":
    main(TrainConfig.resolve())
"""


def make_library_run(folder: Path, ours: list[str]) -> tuple[list[str], int]:
    """The same rows as speculators reads them; its command line, and the tokens of an epoch."""
    from datasets import Dataset

    run_config = config_of(ours)
    target, captured = run_config.target, run_config.stage_dir("02_hidden_states")
    vocab, draft_vocab = target.architecture.vocab_size, run_config.train.draft_vocab_size
    dataset = folder / "library"
    (dataset / "hidden_states").mkdir(parents=True)
    training, validation = split_rows(run_config)
    columns: dict[str, list] = {"input_ids": [], "loss_mask": [], "seq_len": []}
    for number, row in enumerate(training + validation):
        ids = states.read_header(captured / row.entry.path).token_ids
        mask = np.zeros(len(ids), dtype=np.int64)
        for start, end in row.entry.supervised:
            mask[start:end] = 1
        columns["input_ids"].append(ids.tolist())
        columns["loss_mask"].append(mask.tolist())
        columns["seq_len"].append(len(ids))
        (dataset / f"hidden_states/hs_{number}.safetensors").symlink_to((captured / row.entry.path).resolve())
    rows = Dataset.from_dict(columns)
    rows.set_format("torch")
    rows.save_to_disk(str(dataset))
    kept = new_drafter.draft_vocabulary(examples.token_counts(training, captured, vocab), draft_vocab).numpy()
    marked = np.zeros(vocab, dtype=bool)
    marked[kept] = True
    np.save(dataset / f"d2t-{draft_vocab}.npy", kept - np.arange(draft_vocab))
    np.save(dataset / f"t2d-{draft_vocab}.npy", marked)
    script = folder / "library_train.py"
    script.write_text(LIBRARY_TRAIN)
    options = {
        "speculator-type": "eagle3", "verifier-name-or-path": folder / "model", "data-path": dataset,
        "draft-vocab-size": draft_vocab, "target-layer-ids": " ".join(map(str, target.aux_layer_ids)),
        "mask-token-id": 0, "full-attention-indices": 0, "total-seq-len": target.max_seq_len,
        "on-missing": "raise", "optimizer": "adamw",
        "train-data-ratio": (len(training) + 0.5) / (len(training) + len(validation)), "lr": 1e-4, "num-workers": 4,
        "log-dir": folder / "library_logs",
    }  # fmt: skip
    command = [sys.executable, str(script)]
    for name, value in options.items():
        command += [f"--{name}", *str(value).split()]
    return command, sum(columns["seq_len"][: len(training)])


def library_loaders(run_config: config.Config, dataset: Path, dtype: torch.dtype):
    """speculators' own loaders, of the training and of the held-out rows, split as stage 04 splits them."""
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.dataloader import create_train_val_loaders

    target = run_config.target
    training, held_out = split_rows(run_config)
    return create_train_val_loaders(
        data_path=str(dataset), total_seq_len=target.max_seq_len, hidden_states_dtype=dtype, vllm_endpoint="",
        on_missing="raise", verifier_name_or_path=str(target.model), request_timeout=None, max_retries=0,
        generation_validation_retries=0, max_consecutive_generation_failures=1,
        hidden_size=target.architecture.hidden_size, num_target_layers=3, num_workers=0,
        prefetch_factor=None, preprocess=shift_batch,
        train_data_ratio=(len(training) + 0.5) / (len(training) + len(held_out)),
    )  # fmt: skip


def by_its_yardstick(run_config: config.Config, dataset: Path, models: dict[str, torch.nn.Module]) -> None:
    """speculators' own validation of models of its class: k guesses in a row that the target thinks likeliest."""
    for name, model in models.items():
        counts: Counter = Counter()
        dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
        for batch in library_loaders(run_config, dataset, dtype)[1]:
            batch = {key: t.to(bench.device()) for key, t in batch.items() if isinstance(t, torch.Tensor)}
            with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=torch.cuda.is_available()):
                _, _, found = model(**batch, ttt_steps=run_config.train.ttt_steps, loss_config=bench.library_loss())
            counts.update({key: float(value) for key, value in found.items()})
        steps = range(run_config.train.ttt_steps)
        right = [counts[f"full_acc_{k}_sum"] / counts[f"full_acc_{k}_total"] for k in steps]
        bench.metric(f"held_out_{name}_right_in_a_row", " ".join(f"{share:.4f}" for share in right))
        bench.metric(f"held_out_{name}_one_and_their_sum", 1 + sum(right))


def best_of(run_config: config.Config, own: Path) -> torch.nn.Module:
    """The best step of a stage 04, as a model of speculators' class."""
    target = run_config.target
    weights, settings = checkpoint.read_draft(checkpoint.best_step(own))
    return bench.library_model(draft_model.build_drafter(weights, settings, head.read_verifier(target.model), target))


def main() -> None:
    arguments = bench.parse(__doc__)
    with bench.scratch() as folder:
        shape, rows = ROWS[arguments.tiny]
        if arguments.captured:
            ours = take_run(folder, Path(arguments.captured), shape)
        else:
            ours = make_run(folder, shape, rows)
        theirs, rows = make_library_run(folder, ours)
        ours += ["--set", f"train.epochs={arguments.epochs}", "--set", f"train.loader_workers={arguments.workers}"]
        ours += ["--set", f"run.take.02_hidden_states={folder}/runs/bench/02_hidden_states"]
        theirs, trained = [*theirs, "--epochs", str(arguments.epochs)], arguments.epochs * rows
        for turn, state in enumerate(("cold", "cached")[: arguments.turns]):
            caches = {f"{name}_CACHE_DIR": str(folder / "caches" / name) for name in ("TORCHINDUCTOR", "TRITON")}
            environment = os.environ | caches
            own = folder / f"runs/turn{turn}/04_train"
            line = [sys.executable, *ours, "--set", f"run.name=turn{turn}"]
            stage_turn(line, environment, f"stage_{state}", own)
            if bench.device().type == "cuda":  # its trainer runs on nothing else
                library = folder / f"library{turn}"
                started = time.perf_counter()
                done = subprocess.run(
                    [*theirs, "--save-path", str(library)], env=environment, capture_output=True, text=True
                )
                seconds = time.perf_counter() - started
                print(done.stdout[-3000:], done.stderr[-6000:], file=sys.stderr)
                if done.returncode:
                    print((done.stdout + done.stderr)[-2000:], flush=True)
                    raise SystemExit(f"speculators train failed: {done.returncode}")
                bench.metric(f"stage_{state}_speculators_process_s", seconds)
                bench.metric(f"stage_{state}_speculators_process_tokens_per_s", trained / seconds)
                if arguments.captured and turn == 0:
                    from speculators import SpeculatorModel

                    theirs_best = SpeculatorModel.from_pretrained(str(library / "checkpoint_best")).float()
                    theirs_best.load_verifier_weights()
                    run_config = config_of(ours)
                    models = {"ours": best_of(run_config, own), "speculators": theirs_best.to(bench.device())}
                    by_its_yardstick(run_config, folder / "library", models)


if __name__ == "__main__":
    main()
