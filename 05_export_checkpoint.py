"""Stage 05: export the best checkpoint as a folder that vLLM serves, in the format of the reference drafter.

Reads a complete step of 04_train; writes 05_export/model (weights, config, model card) after checking every tensor by
name, shape, dtype and value, and the logits on real rows. --smoke also serves the untrained warm start and then the
export for a minute each (before training, only the warm start), and fails if drafts are accepted no more than by
chance.
"""

import sys

from drafter import stage
from drafter.acceptance import model_card
from drafter.acceptance import stage as acceptance
from drafter.export import stage as export


def body(this: stage.Stage) -> dict:
    if this.args.dry_run:
        return acceptance.dry_run_smoke(this) if this.args.smoke else export.dry_run(this)
    this.lock("04_train", "02_hidden_states")
    if this.args.smoke and not export.is_trained(this.config):
        return acceptance.smoke_test(this)
    summary = export.run(this)
    model_card.write_card(this.config)
    return acceptance.smoke_test(this) if this.args.smoke else summary


def main(argv: list[str] | None = None) -> int:
    parser = stage.parser(__doc__)
    parser.add_argument("--smoke", action="store_true", help="also serve it and require an acceptance length above 1")
    return stage.run_stage("05_export", body, parser, argv)


if __name__ == "__main__":
    sys.exit(main())
