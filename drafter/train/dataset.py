"""Stage 02's rows as a training run uses them: training rows, validation rows, and their order."""

from dataclasses import dataclass
from pathlib import Path

from drafter import files, run_files
from drafter.config import Config
from drafter.contracts import Counts
from drafter.errors import ContractError
from drafter.extract import worklist
from drafter.stage import Stage, read_manifest, say
from drafter.train import examples

VALIDATION_ROWS = 256  # more rows in a validation only cost time


@dataclass(slots=True)
class Dataset:
    """`validation` holds at most VALIDATION_ROWS of the held-out rows."""

    folder: Path
    train: list[examples.Example]
    validation: list[examples.Example]
    schedule: examples.Schedule


def read_dataset(stage: Stage, world: int) -> Dataset:
    """Rows, split and schedule. Raises ContractError when no row has anything to learn, or 02's counts differ."""
    config, train = stage.config, stage.config.train
    folder = config.stage_dir("02_hidden_states")
    entries = sorted(examples.read_index(folder), key=lambda entry: entry.row_id)
    if manifest := read_manifest(folder):
        compare_with_manifest(folder, manifest, len(entries))
    entries = entries[: stage.args.limit]
    stage.counts = Counts(total=len(entries))
    rows = examples.learnable_rows(entries, config.target.max_seq_len, train.ttt_steps, stage.counts)
    if not rows:
        raise ContractError(f"none of the {len(entries)} rows in {folder} has a supervised token to learn from")
    training, validation = examples.split_rows(rows, train.validation_share)
    if not training:
        conversations = len({row.entry.conv_id for row in rows})
        raise ContractError(
            f"all {len(rows)} rows ({conversations} conversations) are for validation, none is left to train on; "
            f"lower train.validation_share ({train.validation_share}), or capture more conversations"
        )
    capacity = config.target.max_seq_len
    packs_per_step = max(1, round((train.tokens_per_step or capacity * world) / capacity))
    order = examples.Schedule(training, capacity, packs_per_step, train.epochs, config.run.seed, train.max_steps)
    return Dataset(folder, training, validation[:VALIDATION_ROWS], order)


def compare_with_manifest(folder: Path, manifest: dict, listed: int) -> None:
    """Compare stage 02's index with its manifest; log pending rows. Raises ContractError when they differ."""
    status, counted = manifest["status"], manifest.get("out", listed)
    if counted != listed:
        raise ContractError(
            f"{folder}: index.jsonl lists {listed} rows, manifest.json counts {counted} (out; status {status}); run "
            "02_extract_hidden_states.py, which writes both again"
        )
    if worklist.index_changed(folder, manifest):
        raise ContractError(
            f"{folder / run_files.INDEX} was changed after stage 02 wrote it (manifest.json has another sha256); run "
            "02_extract_hidden_states.py, which writes both again"
        )
    if pending := manifest.get("pending", 0):
        say("02_hidden_states is not complete (status %s): %d rows train, %d are pending", status, listed, pending)


def make_reader(config: Config, folder: Path, pin: bool) -> examples.Reader:
    """A reader of stage 02's files for this run's target. `pin`: into pinned memory."""
    target = config.target
    return examples.Reader(
        folder,
        target.layer_ids,
        target.architecture.hidden_size,
        target.architecture.vocab_size,
        config.train.ttt_steps,
        think_end=target.think_end,
        pin=pin,
        target=files.fingerprint_path(target.model),
    )
