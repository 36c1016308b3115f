"""How long stage 04 needs at Kimi's shape from a signal to its exit, with everything saved and durable.

    python -m benchmarks.train_signal              on every GPU of this machine, about three minutes
    python -m benchmarks.train_signal --tiny       the same code on a small shape, on a CPU too

`04_train.py` as the pipeline starts it, on random states read from disk. SIGTERM comes in a step, SIGINT in a
validation; the run is resumed after each. Figures are printed as `METRIC name value`.
"""

import signal
import subprocess
import sys
import time

import torch

from benchmarks import train as bench
from benchmarks import train_stage

SECONDS = 120  # of one call at most, until its signal
EVERY = 8  # steps between validations


def wait_for(condition, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise SystemExit(f"stage 04 ended before its signal: {process.poll()}")
        time.sleep(0.01)


def main() -> None:
    arguments = bench.parse(__doc__)
    world = max(1, torch.cuda.device_count())
    with bench.scratch() as folder:
        started = time.perf_counter()
        shape, rows = (train_stage.TINY, 40) if arguments.tiny else (bench.KIMI, 12 * world)
        line = train_stage.make_run(folder, shape, rows)
        bench.metric("signal_rows_written_s", time.perf_counter() - started)
        settings = {
            "run.name": "signal", "run.take.02_hidden_states": folder / "runs/bench/02_hidden_states",
            "train.epochs": 100, "train.save_every": 10_000, "train.validate_every": EVERY,
            "train.validation_share": 0.5,
        }  # fmt: skip
        line += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        if world > 1:
            line = ["-m", "drafter.pipeline.torchrun", "--standalone", "--nproc-per-node", str(world), *line]
        own = folder / "runs/signal/04_train"
        for number in (signal.SIGTERM, signal.SIGINT):
            begun = len(train_stage.records(own, "train"))
            step = begun // EVERY * EVERY + (EVERY if begun else 3)
            process = subprocess.Popen([sys.executable, *line], cwd=bench.ROOT, stdout=subprocess.DEVNULL)
            wait_for(lambda step=step: [r for r in train_stage.records(own, "train") if r["step"] == step], process)
            sent = time.perf_counter()
            process.send_signal(number)
            code = process.wait()
            name = f"signal_{world}_{number.name}"
            bench.metric(f"{name}_exit_code", str(code))
            bench.metric(f"{name}_exit_s", time.perf_counter() - sent)
            bench.metric(f"{name}_at_step", str(len(train_stage.records(own, "train"))))
            bench.metric(f"{name}_validated", str(max(r["step"] for r in train_stage.records(own, "validation"))))
        saved = sorted(path.name for path in own.glob("step-*"))
        size = sum(file.stat().st_size for file in (own / saved[-1]).iterdir())
        bench.metric("signal_saved", f"{saved}, {size / 1e9:.2f} GB each")


if __name__ == "__main__":
    main()
