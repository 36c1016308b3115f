"""Times our connector: where an engine step spends its time.

For `benchmarks/extract.py` alone; vLLM loads it by `kv_connector_module_path`. Twice a second the totals of a process
(scheduler and worker may share one) are written to `timings/<pid>.json` in the folder of the connector: {name:
[seconds, calls]}. Times are wall-clock, of the engine's thread, and nested where their names say so.
"""

import json
import os
import threading
import time
from collections import defaultdict

from drafter.extract.connector import HiddenStatesWriter

TOTALS: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])


def timed(owner, method: str, name: str) -> None:
    """Replace `owner.method` by one whose calls are counted under `name`."""
    inner = getattr(owner, method)

    def outer(*args, **kwargs):
        started = time.perf_counter()
        try:
            return inner(*args, **kwargs)
        finally:
            total = TOTALS[name]
            total[0] += time.perf_counter() - started
            total[1] += 1

    setattr(owner, method, outer)


class TimedWriter(HiddenStatesWriter):
    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        if not TOTALS:
            TOTALS["started"] = [0.0, 1]
            _time_engine()
            (self._root / "timings").mkdir(exist_ok=True)
            path = self._root / "timings" / f"{os.getpid()}.json"
            threading.Thread(target=_report, args=(path,), daemon=True).start()


def _time_engine() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore, EngineCoreProc
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    timed(EngineCoreProc, "_process_input_queue", "wait")  # for requests, and taking them in
    timed(EngineCore, "step", "step")
    timed(EngineCore, "post_step", "after_step")
    timed(Scheduler, "schedule", "step.schedule")
    timed(Scheduler, "update_from_output", "step.update")
    timed(GPUModelRunner, "execute_model", "step.execute")  # inputs and launches
    timed(GPUModelRunner, "sample_tokens", "step.sample")  # waits for the device; the connector's part is in it
    timed(HiddenStatesWriter, "request_finished", "connector.request_finished")
    timed(HiddenStatesWriter, "get_finished", "connector.get_finished")
    timed(HiddenStatesWriter, "_gather", "connector.gather")


def _report(path) -> None:
    while True:
        time.sleep(0.5)
        own = path.with_suffix(".new")
        own.write_text(json.dumps(dict(TOTALS)))
        os.replace(own, path)
