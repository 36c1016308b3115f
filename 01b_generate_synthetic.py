"""Stage 01b: the target answers every prompt; its token ids are kept, reasoning included.

Reads the config's prompt sources; the server of the role `generate` must be running. Writes
01b_synthetic/shard-*.jsonl, one row a request, with prompts.jsonl (the requests), rejected.jsonl (requests without a
row, and why), held_out.jsonl (prompts kept for 06) and the manifest. A rerun continues where the last call stopped.
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
        stage.say("nothing left to generate: every request has a row or was rejected")
    return generate.conclude(this)


def main(argv: list[str] | None = None) -> int:
    parser = stage.parser(__doc__)
    parser.add_argument(
        "--deadline",
        type=cli.moment,
        metavar="HH:MM",
        help="send no request after this time, finish those in flight, keep the rows; or YYYY-MM-DDTHH:MM",
    )
    parser.add_argument(
        "--prepare", action="store_true", help="fetch, choose and order the prompts and end; needs no server"
    )
    return stage.run_stage("01b_synthetic", body, parser, argv)


if __name__ == "__main__":
    sys.exit(main())
