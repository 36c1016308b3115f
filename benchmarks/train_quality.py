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
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parent))
import train as bench
import train_stage

from drafter import config, data, draft, optimizer, verifier
from drafter.contracts import Counts
from drafter.dataset import Dataset
from drafter.loop import first_draft


def train_library(folder: Path, run_config: config.Config, dataset_folder: Path, steps: int) -> Path:
    """speculators' model after so many steps, as its checkpoints are."""
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.dataloader import create_train_val_loaders

    target, train = run_config.target, run_config.train
    captured = run_config.stage_dir("02_hidden_states")
    rows = data.examples(data.read_index(captured), target.max_seq_len, train.ttt_steps, Counts())
    training, held_out = data.split(rows, train.validation_share)
    weights, settings = first_draft(
        run_config, verifier.read_verifier(target.model), Dataset(captured, training, [], None)
    )
    built = draft.build(weights, settings, verifier.read_verifier(target.model), target)
    model = bench.library_model(built)
    draft.trainable(model, train.trainable)
    loader, _ = create_train_val_loaders(
        data_path=str(dataset_folder), total_seq_len=target.max_seq_len, hidden_states_dtype=torch.float32,
        vllm_endpoint="", on_missing="raise", verifier_name_or_path=str(target.model), request_timeout=None,
        max_retries=0, generation_validation_retries=0, max_consecutive_generation_failures=1,
        hidden_size=built.config.transformer_layer_config.hidden_size, num_target_layers=3, num_workers=0,
        prefetch_factor=None, preprocess=shift_batch,
        train_data_ratio=(len(training) + 0.5) / (len(training) + len(held_out)),
    )  # fmt: skip
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
        train_stage.as_served(ours, dict(os.environ), folder, library, own)


if __name__ == "__main__":
    main()
