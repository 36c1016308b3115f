"""Does a step teach as much as speculators' own? Both drafters trained on a run's rows, measured by one yardstick.

    python benchmarks/train_quality.py --captured runs/smollm2_cpu       on a CPU too, in two minutes

speculators' model, loss, loader and mask, in the plain loop of its trainer (which wants a GPU). Both begin
with the same weights and take as many steps under the same AdamW and schedule. The yardstick is the validation of
stage 04: what serving would ask, on rows that neither has seen. Figures are printed as `METRIC name value`.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parent))
import train as bench
import train_stage

from drafter import checkpoint, config, data, draft, native, optimizer, verifier
from drafter.contracts import Counts
from drafter.dataset import Dataset
from drafter.loop import first_draft


def train_library(folder: Path, run_config: config.Config, dataset_folder: Path, steps: int) -> Path:
    """speculators' model after so many steps, as its checkpoints are."""
    target, train = run_config.target, run_config.train
    captured = run_config.stage_dir("02_hidden_states")
    rows = data.examples(data.read_index(captured), target.max_seq_len, train.ttt_steps, Counts())
    training, _ = data.split(rows, train.validation_share)
    weights, settings = first_draft(
        run_config, verifier.read_verifier(target.model), Dataset(captured, training, [], None)
    )
    built = draft.build(weights, settings, verifier.read_verifier(target.model), target)
    model = bench.library_model(built)
    draft.trainable(model, train.trainable)
    loader, _ = train_stage.library_loaders(run_config, dataset_folder, torch.float32)
    parameters = [p for p in model.parameters() if p.requires_grad]
    adamw = torch.optim.AdamW(parameters, betas=train.betas, weight_decay=train.weight_decay)
    loss_config, done, epoch = bench.library_loss(), 0, 0
    while done < steps:
        loader.batch_sampler.set_epoch(epoch)
        epoch += 1
        for batch in loader:
            done += 1
            batch = {name: t.to(bench.device()) for name, t in batch.items() if isinstance(t, torch.Tensor)}
            _, loss, _ = model(**batch, ttt_steps=train.ttt_steps, loss_config=loss_config)
            adamw.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, train.grad_clip)
            for group in adamw.param_groups:
                group["lr"] = optimizer.learning_rate(done, steps, train)
            adamw.step()
            if done % 20 == 0 or done == steps:
                bench.metric(f"library_step_{done}_loss", loss.item())
            if done == steps:
                break
    best = folder / "library0/checkpoint_best"
    best.mkdir(parents=True)
    save_file({name: t.contiguous() for name, t in model.state_dict().items()}, best / "model.safetensors")
    return best.parent


def as_served(ours: list[str], environment: dict[str, str], folder: Path, library: Path, own: Path) -> None:
    """The library's drafter on the rows that were held out, by the figures of our validation."""
    best = library / "checkpoint_best"
    weights = {name.replace("layers.0.", "midlayer."): t for name, t in load_file(best / "model.safetensors").items()}
    weights = {
        name: t for name, t in weights.items() if name != native.EMBEDDING and not name.startswith("verifier_")
    }
    drafter = folder / "library_drafter"
    drafter.mkdir()
    save_file(weights, drafter / native.WEIGHTS)
    settings = checkpoint.read_draft(checkpoint.best_step(own))[1]
    (drafter / native.CONFIG).write_text(json.dumps(settings))
    changes = {"run.name": "library", "train.warm_start": drafter, "train.draft_vocab_size": "null", "train.lr": 0}
    changes |= {"train.max_steps": 1}
    line = [*ours, *(part for key, value in changes.items() for part in ("--set", f"{key}={value}"))]
    done = subprocess.run([sys.executable, *line], env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"speculators' drafter was not measured: {done.stdout[-2000:]}")
    for name, log, number in (("ours", own, -1), ("speculators", folder / "runs/library/04_train", 0)):
        records = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
        figures = [record for record in records if record["kind"] == "validation"][number]
        for key in ("loss", "accuracy", "conditional_accuracy", "expected_acceptance"):
            bench.metric(f"held_out_{name}_{key}", str(figures[key]))


def main() -> None:
    arguments = bench.parse(__doc__)
    with bench.scratch() as folder:
        ours = train_stage.take_run(folder, Path(arguments.captured), train_stage.SMOLLM2)
        changes = {"train.epochs": arguments.epochs, "train.lr": 1e-3, "train.draft_vocab_size": 4096}
        changes |= {"target.max_seq_len": 512, "train.precision": "fp32"}
        changes |= {"run.take.02_hidden_states": folder / "runs/bench/02_hidden_states"}
        ours += [part for key, value in changes.items() for part in ("--set", f"{key}={value}")]
        theirs, _ = train_stage.make_library_run(folder, ours)
        own = folder / "runs/turn0/04_train"
        started = time.perf_counter()
        subprocess.run([sys.executable, *ours, "--set", "run.name=turn0"], check=True, stdout=subprocess.DEVNULL)
        bench.metric("ours_s", time.perf_counter() - started)
        steps = json.loads((own / "manifest.json").read_text())["facts"]["steps"]
        bench.metric("steps", str(steps))
        overrides = [part for part in ours if "=" in part]
        started = time.perf_counter()
        library = train_library(folder, config.load(Path(ours[2]), overrides), folder / "library", steps)
        bench.metric("library_s", time.perf_counter() - started)
        as_served(ours, dict(os.environ), folder, library, own)


if __name__ == "__main__":
    main()
