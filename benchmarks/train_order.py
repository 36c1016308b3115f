"""The cost of adding in a fixed order in a training step, and whether two runs are then identical: A B A B.

    python -m benchmarks.train_order            on a GPU, under two minutes
    python -m benchmarks.train_order --tiny     the same code on a small shape, on a CPU too

The Kimi-shaped step of `train.py`. Every turn is a separate process and starts with the same weights.
"""

import hashlib
import subprocess
import sys

from benchmarks import train as bench

TURNS = {"any_order_1": False, "one_order_1": True, "any_order_2": False, "one_order_2": True}


def turn(name: str, one_order: bool, arguments) -> None:
    import torch

    from drafter.train import distributed, draft_model

    torch.manual_seed(0)
    if one_order:
        distributed.make_deterministic()
    shape = bench.TINY if arguments.tiny else bench.KIMI
    with bench.scratch() as folder:
        runner = bench.Ours(shape, shape.pack, folder)
        seconds, spans = bench.timed(runner, arguments.steps, warmup=3)
        bench.report(name, shape, runner, shape.pack, seconds, spans)
        digest = hashlib.sha256()
        for tensor in draft_model.native_weights(runner.model, keep_embedding=False).values():
            digest.update(tensor.detach().cpu().numpy().tobytes())
        bench.metric(f"{name}_last_loss", repr(runner.step()))
        bench.metric(f"{name}_weights", digest.hexdigest()[:16])


def main() -> None:
    arguments = bench.parse(__doc__)
    if arguments.run:
        turn(arguments.run, TURNS[arguments.run], arguments)
        return
    for name in TURNS:
        line = [sys.executable, "-m", "benchmarks.train_order", "--run", name, *sys.argv[1:]]
        subprocess.run(line, check=True, timeout=120)


if __name__ == "__main__":
    main()
