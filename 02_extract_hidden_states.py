"""Stage 02: hidden states of every row of stage 01b.

Each row's token ids go through the target once more as prefill; the extract server's connector writes the states of
`target.layer_ids` to `02_hidden_states/<xx>/<row_id>.safetensors`, checked before they get that name. Before the
first row, and on a few rows of every shard, a probe shows that they are the right states.

    python 02_extract_hidden_states.py --config configs/smollm2_cpu.yaml
    python 02_extract_hidden_states.py --probe         # check the running server and stop
    python 02_extract_hidden_states.py --verify        # check every byte of every file, rebuild the index; no server
    python 02_extract_hidden_states.py --shard 2/3     # host 2 of 3 that share a file system
    python 02_extract_hidden_states.py --redo          # replace finished files that a new max_seq_len cuts elsewhere
"""

import sys

from drafter import stage
from drafter.config import Config
from drafter.extract import stage as extract


def body(this: stage.Stage) -> dict:
    return extract.dry_run(this) if this.args.dry_run else extract.run(this, first_loss)


def first_loss(config: Config):
    """Measures what the compact format costs the warm start; None without either. Imports speculators, slowly."""
    if config.extract.dtype != "fp8" or not config.train.warm_start:
        return None
    from drafter.train.fp8_cost import FirstLoss

    return FirstLoss(config)


def main(argv: list[str] | None = None) -> int:
    parser = stage.parser(__doc__)
    parser.add_argument("--probe", action="store_true", help="check the server's states and stop")
    parser.add_argument("--verify", action="store_true", help="check every published byte and rebuild the index")
    parser.add_argument(
        "--redo",
        action="store_true",
        help=f"replace more than {extract.REDO_ROWS} finished files whose token ids a changed setting changes",
    )
    parser.add_argument("--shard", default="1/1", metavar="I/N", help="extract this part of the rows")
    return stage.run_stage("02_hidden_states", body, parser, argv)


if __name__ == "__main__":
    sys.exit(main())
