"""What verifying every row costs training: loader waiting with and without checksums, at the pace of a training step.

    python -m benchmarks.train_verify [--workers 4] [--gb 12] [--rate 20000] [--folder /data/tmp]

Kimi-shaped rows (57,344 B a token) are written, then read twice by the loader: in the first epoch each row is
compared with its checksum, in the second none is. Each epoch is run at a consumer's pace (--rate) and unpaced, from
files outside the page cache and in it. Figures are printed as `METRIC name value`.
"""

import argparse
import itertools
import os
import tempfile
import time
from pathlib import Path

LAYER_IDS, HIDDEN, VOCAB, ROW, PACK, STEPS = (2, 30, 58, 61), 7168, 163840, 2048, 8192, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4, help="loader threads")
    parser.add_argument("--gb", type=float, default=12, help="size of the rows")
    parser.add_argument("--folder", type=Path, help="where to write them; default: a temporary folder")
    parser.add_argument("--rate", type=int, default=20_000, help="tokens/s of a paced epoch")
    arguments = parser.parse_args()

    import torch

    from drafter import contracts
    from drafter.train import examples

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as place:
        folder = Path(place)
        entries = write(folder, max(8, round(arguments.gb * 1e9 / (ROW * HIDDEN * 8))))
        rows = examples.learnable_rows(entries, PACK, STEPS, contracts.Counts(total=len(entries)))
        for cache, rate in itertools.product(("cold", "warm"), (arguments.rate, None)):
            reader = examples.Reader(
                folder, LAYER_IDS, HIDDEN, VOCAB, STEPS, think_end=None, pin=device.type == "cuda"
            )
            for verified in ("verified", "not_verified"):
                if cache == "cold":
                    forget([folder / entry.path for entry in entries])
                used = time.process_time()
                tokens, seconds, waited = epoch(examples, reader, device, arguments.workers, rows, rate)
                name = f"{cache}_{'paced' if rate else 'unpaced'}_{verified}"
                print(f"METRIC {name}_tokens_per_s {tokens / seconds:.0f}", flush=True)
                print(f"METRIC {name}_cpu_s {time.process_time() - used:.2f}", flush=True)
                if rate:
                    print(f"METRIC {name}_waiting_share {waited / seconds:.4f}", flush=True)


def write(folder: Path, count: int) -> list:
    import torch

    from drafter import contracts
    from drafter.extract import state_file, states

    hidden, entries = torch.randn(ROW, len(LAYER_IDS), HIDDEN).bfloat16(), []
    for index in range(count):
        row_id = f"{index:032x}"[::-1]
        path = folder / contracts.states_path(row_id)
        path.parent.mkdir(exist_ok=True)
        ids = torch.randint(VOCAB, (ROW,))
        facts = state_file.file_metadata(row_id, "random", LAYER_IDS, "bf16")
        size = states.write_states(path, {"token_ids": ids, "hidden_states": hidden}, facts)
        digest = states.ids_digest(ids.tolist())
        spans = [[ROW // 8, ROW]]
        entries.append(contracts.IndexEntry(row_id, row_id, "random", ROW, ROW, spans, None, size, digest))
    os.sync()
    return entries


def epoch(data, reader, device, workers: int, rows: list, rate: int | None) -> tuple[int, float, float]:
    """Tokens, seconds and seconds of waiting of one pass after its first pack, whose wait is a start's."""
    loader = data.Loader(reader, device, workers)
    plan = data.Plan(rows, PACK, 1, 1, seed=0)
    feed = loader.packs((members, True) for step in plan.steps for members in step.packs)
    next(feed)
    tokens, waited, started = 0, loader.waited, time.perf_counter()
    for pack in feed:
        tokens += len(pack.input_ids)
        if rate:  # where a step would have ended by now
            time.sleep(max(0.0, started + tokens / rate + loader.waited - waited - time.perf_counter()))
    return tokens, time.perf_counter() - started, loader.waited - waited


def forget(paths: list[Path]) -> None:
    """Out of the page cache, as after a night of extraction."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


if __name__ == "__main__":
    main()
