"""Stage 01b: the target answers every question; kept are its own tokens, reasoning and answer.

Reads the prompt sources of the config; the role `generate` must be up. Writes 01b_synthetic/shard-*.jsonl, one row a
request, with prompts.jsonl (what was asked), rejected.jsonl (what gave no row, and why), held_out.jsonl (kept for
measuring) and the manifest. A rerun goes on where this one stopped.
"""

import sys

from drafter import cli, stage
from drafter.generate import chat
from drafter.generate import stage as generate


def body(this: stage.Stage) -> dict:
    if this.args.dry_run:
        return generate.dry_run(this)
    this.config.check_against_model()
    chat.check_template(this.config)
    this.lock()
    work = generate.prepare(this)
    if this.args.prepare:
        return this.finish() | {"deadline": True}
    if work.pending:
        generate.ask(this, work)
    else:
        stage.say("nothing to do: every request has its row or its reason")
    return generate.conclude(this)


def main(argv: list[str] | None = None) -> int:
    parser = stage.parser(__doc__)
    parser.add_argument(
        "--deadline",
        type=cli.moment,
        metavar="HH:MM",
        help="stop asking then, finish what is in flight, go on with what there is; or YYYY-MM-DDTHH:MM",
    )
    parser.add_argument(
        "--prepare", action="store_true", help="fetch, choose and order the prompts and end; needs no server"
    )
    return stage.run_stage("01b_synthetic", body, parser, argv)


if __name__ == "__main__":
    sys.exit(main())
