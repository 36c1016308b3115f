"""Stage 05: the best checkpoint as a folder that vLLM serves, in the form of the reference drafter.

Reads a complete step of 04_train; writes 05_export/model (model.safetensors, config.json), renamed into place whole
and checked: every tensor by name, shape, dtype and value.
"""

import sys

from drafter import export, stage


def body(this: stage.Stage) -> dict:
    return export.plan(this) if this.args.dry_run else export.run(this)


def main(argv: list[str] | None = None) -> int:
    return stage.run("05_export", body, stage.parser(__doc__), argv)


if __name__ == "__main__":
    sys.exit(main())
