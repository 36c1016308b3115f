"""Whether a step learns as much as speculators' own: drafters trained on a run's rows, compared by two measures.

    python -m benchmarks.train_quality --captured runs/smollm2_cpu       on a CPU too, in three minutes

speculators' model, loss, loader and mask, in the plain loop of its trainer (which wants a GPU), under the same AdamW
and schedule and for as many steps; once with our drafter's form and first weights, once as its trainer would make it,
with norms that ours does not have. The first yardstick is the validation of stage 04: what serving would ask. The
second is its own: the target's likeliest tokens, wherever the mask is. Figures are printed as `METRIC name value`.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks import train as bench
from benchmarks import train_stage
from drafter import config
from drafter.target import eagle3_folder, head
from drafter.train import checkpoint, draft_model, optimizer
from drafter.train.dataset import Dataset
from drafter.train.loop import first_draft


def in_our_form(run_config: config.Config) -> torch.nn.Module:
    """speculators' model with the first weights of stage 04."""
    target, train = run_config.target, run_config.train
    captured = run_config.stage_dir("02_hidden_states")
    training, _ = train_stage.split_rows(run_config)
    known = head.read_verifier(target.model)
    weights, settings = first_draft(run_config, known, Dataset(captured, training, [], None))
    model = bench.library_model(draft_model.build_drafter(weights, settings, known, target))
    draft_model.freeze_all_but(model, train.trainable)
    return model


def in_its_form(run_config: config.Config, dataset: Path) -> torch.nn.Module:
    """What speculators' trainer makes of its defaults: norms before `fc`, before the residual and of the output."""
    from speculators.models.eagle3 import Eagle3DraftModel
    from transformers import AutoConfig, LlamaConfig

    target, size = run_config.target, run_config.train.draft_vocab_size
    whole = AutoConfig.from_pretrained(target.model)
    same = (
        "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
        "max_position_embeddings", "rms_norm_eps", "rope_parameters",
    )  # fmt: skip
    layer = LlamaConfig(num_hidden_layers=1, **{key: getattr(whole, key) for key in same})
    maps = {name: torch.from_numpy(np.load(dataset / f"{name}-{size}.npy")) for name in ("t2d", "d2t")}
    torch.manual_seed(0)
    model = Eagle3DraftModel.from_training_args(
        layer, **maps, draft_vocab_size=size, norm_before_residual=True, norm_before_fc=True, norm_output=True,
        ttt_steps=run_config.train.ttt_steps, verifier_name_or_path=str(target.model),
        target_layer_ids=list(target.layer_ids[:-1]),
        draft_attn_impl="simple_flex_attention" if torch.cuda.is_available() else "sdpa",
    )  # fmt: skip
    return model.float().to(bench.device())


def train_library(model: torch.nn.Module, run_config: config.Config, dataset: Path, steps: int) -> None:
    train = run_config.train
    loader, _ = train_stage.library_loaders(run_config, dataset, torch.float32)
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
            if done == steps:
                break


def as_served(ours: list[str], folder: Path, model: torch.nn.Module, own: Path) -> None:
    """A drafter of our form on the rows that were held out, by the figures of our validation."""
    weights = {name.replace("layers.0.", "midlayer."): t.contiguous() for name, t in model.state_dict().items()}
    left_out = (eagle3_folder.EMBEDDING, "verifier_")
    drafter = folder / "library_drafter"
    drafter.mkdir()
    weights = {name: t for name, t in weights.items() if not name.startswith(left_out)}
    save_file(weights, drafter / eagle3_folder.WEIGHTS)
    settings = checkpoint.read_draft(checkpoint.best_step(own))[1]
    (drafter / eagle3_folder.CONFIG).write_text(json.dumps(settings))
    changes = {"run.name": "library", "train.warm_start": drafter, "train.draft_vocab_size": "null", "train.lr": 0}
    changes |= {"train.max_steps": 1}
    line = [*ours, *(part for key, value in changes.items() for part in ("--set", f"{key}={value}"))]
    done = subprocess.run([sys.executable, *line], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"speculators' drafter was not measured: {done.stdout[-2000:]}")
    for name, log, number in (("ours", own, -1), ("speculators", folder / "runs/library/04_train", 0)):
        figures = train_stage.records(log, "validation")[number]
        for key in ("loss", "accuracy", "conditional_accuracy", "expected_acceptance"):
            bench.metric(f"held_out_{name}_{key}", str(figures[key]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--captured", type=Path, required=True, help="a run whose stage 02 is complete")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-3)
    arguments = parser.parse_args()
    with bench.scratch() as folder:
        ours = train_stage.take_run(folder, arguments.captured, train_stage.SMOLLM2)
        changes = {"train.epochs": arguments.epochs, "train.lr": arguments.lr, "train.draft_vocab_size": 4096}
        changes |= {"target.max_seq_len": 512, "train.precision": "fp32"}
        changes |= {"run.take.02_hidden_states": folder / "runs/bench/02_hidden_states"}
        ours += [part for key, value in changes.items() for part in ("--set", f"{key}={value}")]
        train_stage.make_library_run(folder, ours)
        own, dataset = folder / "runs/turn0/04_train", folder / "library"
        started = time.perf_counter()
        subprocess.run([sys.executable, *ours, "--set", "run.name=turn0"], check=True, stdout=subprocess.DEVNULL)
        bench.metric("ours_s", time.perf_counter() - started)
        steps = json.loads((own / "manifest.json").read_text())["facts"]["steps"]
        bench.metric("steps", str(steps))
        run_config = train_stage.config_of(ours)
        models = {"speculators": in_our_form(run_config), "speculators_default": in_its_form(run_config, dataset)}
        for name, model in models.items():
            started = time.perf_counter()
            train_library(model, run_config, dataset, steps)
            bench.metric(f"{name}_s", time.perf_counter() - started)
        as_served(ours, folder, models["speculators"], own)
        train_stage.by_its_yardstick(run_config, dataset, {"ours": train_stage.best_of(run_config, own)} | models)


if __name__ == "__main__":
    main()
