"""Stage 04: train the drafter. The checks and the manifest around the training loop."""

import contextlib

from drafter import locks, run_files
from drafter.errors import ContractError, ResumableError, StageError
from drafter.stage import Stage, is_main_process, read_manifest, say
from drafter.target import eagle3_folder, weights_fingerprint
from drafter.train import checkpoint
from drafter.train.dataset import Dataset, read_dataset
from drafter.train.resume import check_resumable

QUESTION = (
    "run.seed", "target.model", "target.layer_ids", "target.max_seq_len", "train.warm_start",
    "train.draft_vocab_size", "train.draft_intermediate_size", "train.trainable", "train.lr", "train.warmup_share",
    "train.min_lr_share", "train.weight_decay", "train.betas", "train.grad_clip", "train.l2_sp", "train.ttt_steps",
    "train.ttt_decay", "train.precision", "train.validation_share",
)  # fmt: skip


def run(stage: Stage) -> dict:
    """Train to the end, an early stop or a signal. Raises Interrupted, after saving, when a signal came."""
    if is_main_process():
        # So that the hidden states cannot be deleted during the imports. `lock` reports what is wrong.
        states = stage.config.stage_dir("02_hidden_states")
        with contextlib.suppress(StageError):
            stage.held.enter_context(locks.reading(states, theirs=states.parent != stage.config.run_dir))
    from drafter.train import distributed  # takes ten seconds to import, which a dry run does not need
    from drafter.train.loop import Training

    with distributed.joined_ranks() as ranks:
        stage.require("02_hidden_states")
        eagle3_folder.check_settings(stage.config)
        ranks.on_main(lambda: stage.lock("02_hidden_states"))
        dataset = read_dataset(stage, ranks.world)
        rows = [dataset.schedule.fingerprint, *(row.entry.row_id for row in dataset.validation)]
        if not ranks.all(ranks.decide(lambda: rows) == rows):
            raise ResumableError(
                f"the ranks read different rows from {dataset.folder / run_files.INDEX}: one host still sees an "
                "older file; run the same command again"
            )

        def look() -> tuple[bool, dict | None]:
            stage.refuse_another_question()  # before anything is written: a refusal changes nothing
            finished = is_finished(stage, dataset)
            if not finished:
                weights_fingerprint.check_same_weights(stage.config, recording=False)
                check_resumable(stage, dataset)
            return finished, read_manifest(stage.folder)

        finished, before = ranks.decide(look)

        def claim() -> None:
            stage.facts |= {"steps": len(dataset.schedule.steps), **index_row_set(dataset)}
            stage.begin(QUESTION)

        ranks.on_main(claim)
        if finished:
            stage.facts = before["facts"] | index_row_set(dataset)
            say("nothing left to train; best step: %s", stage.facts["best"])
        else:
            Training(stage, dataset, ranks).run()
        stage.counts.done = stage.counts.total - stage.counts.rejected.total()
        return stage.finish() if ranks.main else {}


def dry_run(stage: Stage) -> dict:
    """What `run` would do, and what is missing. `refused`: why it would stop before its first step."""
    config, findings, pending, refused = stage.config, [], 1, {}
    folder = config.stage_dir("02_hidden_states")
    if not (folder / run_files.INDEX).exists():
        findings.append(f"no hidden states in {folder}")
    else:
        try:
            dataset = read_dataset(stage, config.train.processes)
        except ContractError as error:  # 02 may have written no rows yet, or may repair them
            findings.append(str(error))
        else:
            done = checkpoint.complete_steps(stage.folder)
            pending = max(1, len(dataset.schedule.steps) - (checkpoint.step_number(done[-1]) if done else 0))
            pending = 0 if is_finished(stage, dataset) else pending
            if pending and done:
                try:
                    check_resumable(stage, dataset)
                except StageError as error:
                    findings.append(str(error))
                    refused = {"refused": str(error)}
    try:
        eagle3_folder.check_settings(config)
    except StageError as error:
        findings.append(str(error))
    return {"stage": stage.name, "dry_run": True, "pending": pending, **refused, "findings": findings}


def index_row_set(dataset: Dataset) -> dict[str, str]:
    """The rows that stage 02 built its index from, as in its manifest; empty if an earlier version wrote that."""
    facts = (read_manifest(dataset.folder) or {"facts": {}})["facts"]
    return {"row_set": facts["row_set"]} if "row_set" in facts else {}


def is_finished(stage: Stage, dataset: Dataset) -> bool:
    """Whether the last run trained all steps that are asked for now."""
    manifest = read_manifest(stage.folder)
    facts = manifest["facts"] if manifest else {}
    return (
        facts.get("steps") == len(dataset.schedule.steps)
        and facts.get("plan") == dataset.schedule.fingerprint
        and not checkpoint.missing_files(stage.folder / facts.get("best", "none"))
    )
