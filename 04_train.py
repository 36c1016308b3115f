"""Stage 04: fine-tune the drafter on the captured hidden states.

Reads 02_hidden_states, the target's embedding, norm and head, and the warm start; writes 04_train/step-*/ and
metrics.jsonl. Start it with python for one process, or with `torchrun --nproc-per-node N 04_train.py` for N. A rerun
continues at the last complete step.
"""

import sys

from drafter import stage
from drafter.train import stage as train


def body(this: stage.Stage) -> dict:
    this.config.check_against_model()
    return train.dry_run(this) if this.args.dry_run else train.run(this)


def main(argv: list[str] | None = None) -> int:
    return stage.run_stage("04_train", body, stage.parser(__doc__), argv)


if __name__ == "__main__":
    sys.exit(main())
