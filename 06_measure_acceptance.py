"""Stage 06: serve the target with each drafter and measure how many tokens are accepted per step.

Reads 05_export, the warm start and held-out prompts; owns the role `evaluate`. Writes 06_acceptance/acceptance.json.
"""

import sys

from drafter import acceptance, stage


def body(this: stage.Stage) -> dict:
    return acceptance.run(this)


def main(argv: list[str] | None = None) -> int:
    return stage.run("06_acceptance", body, stage.parser(__doc__), argv)


if __name__ == "__main__":
    sys.exit(main())
