"""Stage 02: hidden states of every row of stage 01b.

Each row's token ids go through the target once more as prefill; the extract server's connector writes the states of
`target.layer_ids` to `02_hidden_states/<xx>/<row_id>.safetensors`, checked before they get that name. Before the
first row, and on a few rows of every shard, a probe shows that they are the right states.

    python 02_extract_hidden_states.py --config configs/smollm2_cpu.yaml
    python 02_extract_hidden_states.py --probe         # only the probe
    python 02_extract_hidden_states.py --verify        # every byte of every file; the index anew; no server needed
    python 02_extract_hidden_states.py --shard 2/3     # host 2 of 3 that share a file system
    python 02_extract_hidden_states.py --redo          # replace finished files that a new max_seq_len cuts elsewhere
"""

import sys
from functools import partial

from drafter import stage
from drafter.config import Config
from drafter.extract import stage as extract
from drafter.extract import worklist
from drafter.extract.loop import Extraction
from drafter.progress import RECORDS, Progress
from drafter.serve import client
from drafter.target import weights_fingerprint


def main(argv: list[str] | None = None) -> int:
    arguments = stage.parser(__doc__)
    arguments.add_argument("--probe", action="store_true", help="check the server's states and stop")
    arguments.add_argument("--verify", action="store_true", help="check every published byte and rebuild the index")
    arguments.add_argument(
        "--redo",
        action="store_true",
        help=f"replace finished files whose token ids a changed setting changes (more than {extract.REDO_ROWS})",
    )
    arguments.add_argument("--shard", default="1/1", metavar="I/N", help="extract this part of the rows")
    return stage.run_stage("02_hidden_states", body, arguments, argv)


def body(run: stage.Stage) -> dict:
    config, folder = run.config, run.folder
    share = worklist.Share.parse(run.args.shard)
    items, rejected = worklist.read_items(config, run.args.limit)
    done = worklist.extracted_rows(folder, items)
    todo = [item for item in items if item.row_id in share and item.row_id not in done]
    if run.args.dry_run:
        return extract.dry_run(run, items, rejected, todo)

    extract.check_upstream(run, items, rejected)
    run.lock("01b_synthetic", own=partial(worklist.locked_share, folder, share))
    if run.args.probe:
        return extract.probe_only(run, items, share)
    run.refuse_another_question()
    if run.args.verify:
        run.begin(extract.QUESTION)
        return extract.verify(run, items, rejected, share)
    if todo := worklist.adopt_files(config, folder, todo, share):
        extract.check_ready(run, todo)
    weights_fingerprint.check_same_weights(config, recording=True)
    run.begin(extract.QUESTION)
    worklist.remove_unpublished(folder, share)
    if not todo:
        stage.say("nothing left to extract: %d rows", len(items))
        return extract.settle(run, items, rejected, share)
    own = sum(item.row_id in share for item in items)
    record = folder / RECORDS if own == len(items) else None  # a share's counts are not the stage's
    progress = Progress(own, "rows", own - len(todo), at_once=config.extract.concurrency, record=record)
    extraction = Extraction(config, folder, todo, share, progress, first_loss(config))
    try:
        client.run_interruptible(extraction.run())
    except BaseException:
        worklist.remove_unpublished(folder, share)
        with worklist.merge_lock(folder):
            extract.record_counts(run, items, rejected, share, extraction)
        raise
    worklist.remove_unpublished(folder, share)
    return extract.settle(run, items, rejected, share, extraction)


def first_loss(config: Config):
    """What the compact format is measured with, where there is a drafter to start from; it loads speculators."""
    if config.extract.dtype == "fp8" and config.train.warm_start:
        from drafter.train.fp8_cost import FirstLoss

        return FirstLoss(config)
    return None


if __name__ == "__main__":
    sys.exit(main())
