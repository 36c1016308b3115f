"""What the pipeline records while it runs: `pipeline.json`, `plan.json`, the report and the events."""

import os
import time
from pathlib import Path

from drafter import files, process, run_files
from drafter.config import STAGES, Config
from drafter.pipeline import deadline, events, plan
from drafter.pipeline.production_units import Machine, only_logged
from drafter.pipeline.report import page as report
from drafter.pipeline.run_state import RunState
from drafter.pipeline.steps import Step
from drafter.stage import read_manifest


def state_path(config: Config) -> Path:
    return config.run_dir / run_files.PIPELINE


class RunRecord:
    """`pipeline.json`, with earlier calls taken over: status of each stage, units to restore, the deadline."""

    def __init__(
        self, config: Config, machine: Machine, steps: tuple[Step, ...], until: deadline.Deadline | None
    ) -> None:
        self.config, self.machine, self.deadline = config, machine, until
        self.state: dict = {"run": config.run.name, "status": "running", "stage": None, "stages": {}}
        self.state["asked"] = [step.stage for step in steps]
        self.earlier: dict = {}  # how the previous call ended, and where

    def take_over(self) -> None:
        """Read what earlier calls did, and which production units a killed one did not restore.

        In a copy of a run the units are left to the original.
        """
        found = RunState(self.config)
        if not found.state:
            return
        self.earlier = {key: found.state[key] for key in ("status", "stage", "error") if key in found.state}
        if found.state.get("home") == files.inode_id(self.config.run_dir):
            killed = found.state["status"] == "running" and found.state.get("boot") == process.boot_id()
            self.machine.production = set(found.state.get("production", []))
            self.machine.restore_owed = killed or bool(self.machine.production)
        if "deadline" in found.state:
            self.state["deadline"] = found.state["deadline"]
        self.state["stages"] = {name: record for name in STAGES if (record := found.pipeline_record(name))}
        for name, record in self.state["stages"].items():
            if record.get("status") == "running":  # by a call that was killed
                record |= {"status": "interrupted", "seconds": round(found.seconds(name), 1)}

    def write_plan(self, limit: int | None) -> None:
        """Write `plan.json`, which the report compares with the run.

        A stage that has begun keeps its plan, unless more conversations are asked for now.
        """
        found, planned = RunState(self.config), plan.to_record(self.config, limit)
        for name in filter(found.manifest, STAGES):
            before, asked = found.plan.get(name, {"conversations": 0}), planned[name]["conversations"]
            if before.get("conversations", asked) >= asked:
                planned[name] = before
            elif self.state["stages"].get(name, {}).get("status") == "complete":
                self.state["stages"][name]["status"] = "begun"
        files.write_json(self.config.run_dir / run_files.PLAN, planned)

    def seconds(self, step: Step) -> float:
        """Seconds that earlier calls spent on a step; 0 if its folder was removed since."""
        spent = self.state["stages"].get(step.stage, {}).get("seconds", 0)
        return spent if read_manifest(self.config.stage_dir(step.stage)) else 0

    def note(self, step: Step, **facts) -> None:
        self.state["stage"] = step.stage
        self.state["stages"].setdefault(step.stage, {}).update(facts)
        self.save()

    def finish(self, status: str, error: str | None = None) -> None:
        """Record how this call ended, write the report and send the event; only the first time."""
        if self.state["status"] != "running":
            return
        self.state["status"] = status
        if error:
            self.state["error"] = error
        with only_logged(run_files.PIPELINE):  # the event must be sent even on a full disk
            self.save()
        self.write_report()
        if status in ("complete", "stopped"):
            events.report(self.config, "finish")
        else:
            name = self.state["stage"]
            finished = self.state["stages"].get(name, {}).get("status") == "complete"
            events.report(self.config, status, "" if finished else name or "")

    def write_report(self) -> None:
        with only_logged("report.html"):
            report.write(self.config)

    def save(self) -> None:
        self.config.run_dir.mkdir(parents=True, exist_ok=True)
        if self.deadline:
            self.state["deadline"] = self.deadline._asdict()
        self.state |= process.identity(os.getpid()) | {
            "production": sorted(self.machine.production),
            "home": files.inode_id(self.config.run_dir),
            "updated": time.time(),
        }
        files.write_json(state_path(self.config), self.state)
