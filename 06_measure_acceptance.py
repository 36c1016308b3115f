"""Stage 06: serve the target with each drafter and measure how many tokens are accepted per step.

Reads 05_export, the warm start and held-out prompts; starts the server of the role `evaluate` once for each drafter
and draft length. Writes 06_acceptance/acceptance.json with acceptance lengths, intervals, speed and a verdict, and
updates the export's model card.
"""

import sys

from drafter import stage
from drafter.acceptance import model_card
from drafter.acceptance import stage as acceptance


def body(this: stage.Stage) -> dict:
    if this.args.dry_run:
        return acceptance.dry_run(this)
    this.lock("05_export", "01b_synthetic")
    summary = acceptance.run(this)
    model_card.write_card(this.config)
    return summary


def main(argv: list[str] | None = None) -> int:
    return stage.run_stage("06_acceptance", body, stage.parser(__doc__), argv)


if __name__ == "__main__":
    sys.exit(main())
