"""The state of a run, read from its files for `status` and the report, also after stages that were run manually."""

import contextlib
import re
import time
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from drafter import checked, disk, files, process, progress, run_files, stage
from drafter.config import STAGES, Config, StageName
from drafter.errors import StageError
from drafter.pipeline.deadline import ended_at

NOT_ASKED = ("held_out", "duplicate")  # reject reasons of conversations that are not meant to be answered
BEGINS = "begins: "  # in a stage's log, before the output of each call
BEGIN = re.compile(rf"^\d\d:\d\d:\d\d {BEGINS}.*\n?", re.MULTILINE)
WORDS = {"01b_synthetic": "rows", "02_hidden_states": "rows", "06_acceptance": "measurements"}


class Trouble(NamedTuple):
    """Why a run has stopped: `how` is `failed` or `interrupted`, `at` the stage or empty."""

    how: str
    at: str
    reason: str


class RunState:
    """The files of a run, as far as they exist."""

    def __init__(self, config: Config):
        self.config = config
        self.state = checked.read_or_empty(config.run_dir / run_files.PIPELINE, run_files.State)
        self.plan = checked.read_or_empty(config.run_dir / run_files.PLAN, run_files.Plan)
        self.manifests: dict[str, dict | None] = {}
        for name in STAGES:
            try:
                self.manifests[name] = stage.read_manifest(config.stage_dir(name))
            except StageError:
                self.manifests[name] = {"stage": name, "status": "unreadable"}
        self.taken = self._taken()
        self.freed = disk.freed(config.run_dir)
        self.acceptance = checked.read_or_empty(
            config.stage_dir("06_acceptance") / run_files.ACCEPTANCE, run_files.Acceptance
        )
        self.metrics = checked.records_or_empty(config.stage_dir("04_train") / run_files.METRICS, run_files.Metric)

    def _taken(self) -> dict[str, Path]:
        """Folders of stages taken from other runs, by this config or by the one that a stage was made with."""
        recorded: dict[str, Path] = {}
        for name in STAGES:
            with contextlib.suppress(StageError, OSError):
                made_with = (stage.read_resolved(self.config.run_dir / name) or {"run": {}})["run"]
                recorded |= {taken: Path(folder) for taken, folder in made_with.get("take", {}).items()}
        return {name: folder for name, folder in recorded.items() if not self.manifests[name]} | self.config.run.take

    def manifest(self, name: str) -> dict:
        return self.manifests[name] or {}

    def pipeline_record(self, name: str) -> dict:
        """The pipeline's record of a stage; {} for a finished one whose folder was removed since."""
        noted = self.state.get("stages", {}).get(name, {})
        return {} if noted.get("status") == "complete" and not self.manifests[name] else noted

    def progress_records(self, name: StageName) -> list[dict]:
        """Progress of a stage over time, of all its calls."""
        return checked.records_or_empty(self.config.stage_dir(name) / progress.RECORDS, run_files.Progressed)

    def log(self, name: str) -> str:
        """Log of a stage, of all its calls by the pipeline."""
        path = self._log(name)
        return path.read_text(errors="replace") if path.exists() else ""

    def latest_log(self, name: str) -> str:
        """Log of the stage's latest call by the pipeline; empty if it was called manually since."""
        path = self._log(name)
        began = max(seconds_of(self.manifest(name).get("started")), self.pipeline_record(name).get("started", 0))
        if not path.exists() or path.stat().st_mtime < began:
            return ""
        return BEGIN.split(self.log(name))[-1]

    def _log(self, name: str) -> Path:
        return self.config.run_dir / "logs" / f"{name}.log"

    def alive(self) -> bool:
        """Whether the pipeline is running; False for a copy of a run, since it works on the original."""
        return process.lives(self.state) and self.state.get("home") == files.inode_id(self.config.run_dir)

    def has_begun(self) -> bool:
        """Whether this run has done anything itself."""
        stages = (self.status(name) not in ("not begun", "taken") for name in STAGES)
        return self.config.run_dir.exists() and (bool(self.state) or any(stages))

    def status(self, name: str) -> str:
        """Status of a stage, from its manifest and from the pipeline's record where that is newer."""
        if name in self.taken:
            return "taken"
        seen, manifest = self.pipeline_record(name), self.manifest(name)
        if self.alive() and self.state.get("stage") == name and seen.get("status") == "running":
            return "running"
        if not manifest and name in self.freed:
            return "freed"
        if not manifest:
            said = seen.get("status") or "not begun"
            return "interrupted" if said == "running" else said
        if manifest["status"] == "running":
            return _at_work(manifest.get("process") or {})
        if seen.get("status") == "failed" and seen.get("ended", 0) > seconds_of(manifest.get("updated")):
            status = "failed"  # it failed before it wrote its manifest
        else:
            status = manifest["status"]
        if status == "failed" and self._is_outdated(name):
            return "begun"
        return "complete" if ended_at(manifest) else status

    def _is_outdated(self, name: str) -> bool:
        """Whether an earlier stage was finished after this one failed, so that the failure may no longer exist."""
        failed = max(self.pipeline_record(name).get("ended", 0), seconds_of(self.manifest(name).get("updated")))
        before = STAGES[: STAGES.index(name)]
        finished = [
            self.manifest(each) for each in before if self.manifest(each).get("status") in ("complete", "partial")
        ]
        return any(seconds_of(manifest.get("updated")) > failed for manifest in finished)

    def trouble(self) -> Trouble | None:
        """Why the run has stopped; None if that stage or an earlier one was finished since."""
        at, how = self.state.get("stage") or "", self.state.get("status")
        if how == "running":
            if self.alive():
                return None
            how = "interrupted"
        repaired = at and (self.status(at) == "complete" or (how == "failed" and self._is_outdated(at)))
        if how in ("failed", "interrupted") and not repaired:
            killed = "the pipeline was killed, or the machine restarted"
            reason = "see the log of the stage" if how == self.state["status"] else killed
            return Trouble(how, at, self.state.get("error") or reason)
        for name, manifest in self.manifests.items():
            if manifest and manifest.get("error") and self.status(name) != "running" and not self._is_outdated(name):
                return Trouble(manifest["status"], name, manifest["error"])
        return None

    def progress(self, name: StageName) -> str:
        """Progress of a stage in its own unit; empty when unknown."""
        manifest = self.manifest(name)
        if name == "04_train":
            done = next((record["step"] for record in reversed(self.metrics) if "step" in record), 0)
            steps = manifest.get("facts", {}).get("steps")
            return f"{done:,} of {steps:,} steps" if steps else ""
        if name not in WORDS:
            return ""
        if manifest.get("status") == "running":  # the counts are written at the end
            began = seconds_of(manifest.get("started"))
            last = next((each for each in reversed(self.progress_records(name)) if each["at"] >= began), None)
            return f"{last['done']:,} of {last['total']:,} {last['unit']}" if last else ""
        if not manifest.get("in"):
            return ""
        rejected, out = manifest.get("rejected", {}), manifest.get("out", 0)
        asked = manifest["in"] - sum(rejected.get(reason, 0) for reason in NOT_ASKED)
        lost = sum(count for reason, count in rejected.items() if reason not in NOT_ASKED)
        return (
            f"{out:,} of {asked:,} {WORDS[name]}"
            + (f", {lost:,} rejected" if lost else "")
            + (", ended by its deadline" if ended_at(manifest) else "")
        )

    def seconds(self, name: str) -> float:
        """Seconds of a stage so far, all calls together, including server starts by the pipeline; 0 if taken."""
        if name in self.taken:
            return 0
        seen = self.pipeline_record(name)
        spent = seen.get("seconds", 0)
        if seen.get("status") == "running" and "started" in seen:
            log = self._log(name)
            # A killed call is known to have lasted at least until its last log line.
            until = time.time() if self.alive() else log.stat().st_mtime if log.exists() else 0
            spent += max(0, until - seen["started"])
        manifest = self.manifest(name)
        own = manifest.get("seconds", 0)
        if manifest.get("status") == "running" and _at_work(manifest.get("process") or {}) == "running":
            now = time.time()
            own += now - (seconds_of(manifest.get("updated")) or now)
        return max(spent, own)

    def started_at(self, name: str) -> float:
        """Timestamp at which a running stage (with its server) was started; 0 if it is not running."""
        if self.status(name) != "running":
            return 0
        seen = self.pipeline_record(name)
        ours = self.alive() and seen.get("status") == "running"
        return seen.get("started", 0) if ours else seconds_of(self.manifest(name).get("started"))

    def minutes(self, name: str) -> float | None:
        seconds = self.seconds(name)
        return round(seconds / 60, 1) if seconds else None

    def planned(self, name: str) -> dict[str, float]:
        """Planned minutes of a stage: typical, low, high."""
        return {part: round(value / 60, 1) for part, value in self.plan.get(name, {}).get("seconds", {}).items()}


def seconds_of(moment: str | None) -> float:
    """A time of a manifest as a timestamp; 0 without one."""
    try:
        return checked.validate(run_files.Moment, datetime.fromisoformat(moment or "").timestamp())
    except (TypeError, ValueError, OverflowError, StageError):
        return 0


def _at_work(record: dict) -> str:
    """Status of a stage that has begun and not ended; on another host it is unknown whether it still runs."""
    if process.lives(record):
        return "running"
    return "interrupted" if record.get("boot") == process.boot_id() else "begun"
