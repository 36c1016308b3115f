"""Stage 06: serve the target with each drafter and measure how many tokens are accepted per step.

Reads 05_export, the warm start and held-out prompts; brings the role `evaluate` up once for each drafter and draft
length. Writes 06_acceptance/acceptance.json: acceptance lengths with intervals, speed, and a verdict.
"""

import sys

from drafter import acceptance, stage


def body(this: stage.Stage) -> dict:
    return acceptance.plan(this) if this.args.dry_run else acceptance.run(this)


def main(argv: list[str] | None = None) -> int:
    return stage.run("06_acceptance", body, stage.parser(__doc__), argv)


if __name__ == "__main__":
    sys.exit(main())
