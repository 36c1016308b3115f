"""A stage for the tests: does as FAKE_STAGE says, else nothing at all, and remembers that it is done.

FAKE_STAGE holds STAGE=WORD, WORD being: fail (exit 1), talks (200 KiB), resumable (exit 3), killed (SIGKILL),
server (works until its server has been restarted), lost (until its server is being restarted, then fails), outage
(exit 3, until its server has been restarted), forever (until a signal; then saves a second), knows (its --dry-run
refuses the config), ponders (its --dry-run takes long), redo (its plan refuses to replace finished files without
--redo), late (ends by its deadline, with a request left), stale (nothing is left, but its manifest is of other rows),
more (rows are added to those it has), unprepared (its prompts are to be fetched by --prepare), unreachable (and
cannot be).
"""

import json
import os
import sys
import time
from pathlib import Path

from drafter import cli, config, stage
from drafter.errors import ConfigError, ContractError, ResumableError
from drafter.serve import roles

ROLES = {"01b_synthetic": "generate", "02_hidden_states": "extract"}


def body(this: stage.Stage) -> dict:
    fake = dict(word.split("=") for word in os.environ.get("FAKE_STAGE", "").split()).get(this.name, "")
    done = this.folder / "done"
    if fake == "knows":
        raise ConfigError("the reference drafter has no lm_head")
    if this.args.dry_run and fake == "ponders":
        this.folder.mkdir(parents=True, exist_ok=True)
        (this.folder / "pondering").touch()
        time.sleep(600)
    refused = {"refused": "3 finished rows; add --redo"} if fake == "redo" and not this.args.redo else {}
    if this.args.dry_run and fake in ("stale", "more"):
        plan = {
            "stage": this.name,
            "dry_run": True,
            "pending": int(fake == "more"),
            "findings": [],
            "row_set": "other",
        }
        return plan | ({"stale": "its manifest is of other rows"} if fake == "stale" else {})
    if this.args.dry_run and fake in ("unprepared", "unreachable"):
        refused |= {"unprepared": not (this.folder / "prepared").exists()}
    if this.args.prepare:
        if fake == "unreachable":
            raise ResumableError("the hub does not answer")
        this.folder.mkdir(parents=True, exist_ok=True)
        (this.folder / "prepared").write_text(str(roles.alive(this.config, "generate")))
        return {"stage": this.name}
    if this.args.dry_run:
        return refused | {"stage": this.name, "dry_run": True, "pending": int(not done.exists()), "findings": []}
    this.lock()
    this.begin(["target.served_name"])
    this.counts.total = 1
    role = ROLES.get(this.name)
    late = fake == "late" and this.args.deadline
    if role and fake != "stale" and not (late and time.time() >= late.timestamp()):
        roles.require_ready(this.config, role)
    if fake == "fail":
        raise ContractError("the states are wrong")
    if fake == "talks":
        for number in range(3000):
            print("line", number, "x" * 60, file=sys.stderr)
    if fake == "killed":
        os.kill(os.getpid(), 9)
    if fake == "resumable":
        raise ResumableError("the disk reserve is reached")
    if fake in ("server", "lost"):
        first = pid(this.config, role)
        while pid(this.config, role) in (None, first):
            time.sleep(0.2)
        if fake == "lost":
            raise ContractError("the states are wrong")
        while roles.why_unready(this.config, role):
            time.sleep(0.2)
    if fake == "outage" and not (this.folder / "outage").exists():
        (this.folder / "outage").touch()
        os.kill(pid(this.config, role), 9)
        raise ResumableError("no answer for 60 minutes")
    if fake == "forever":
        (this.folder / "working").write_text(str(os.getpid()))
        try:
            time.sleep(600)
        finally:
            time.sleep(1)
            (this.folder / "saved").touch()
    if late:
        this.facts["deadline"] = late.timestamp()
        return this.finish() | {"deadline": True}
    done.touch()
    this.counts.done = 1
    return this.finish()


def pid(run_config: config.Config, role: str) -> int | None:
    path = run_config.run_dir / "servers" / f"{role}.json"
    return json.loads(path.read_text())["pid"] if path.exists() else None


def main(name: str) -> int:
    parser = stage.parser(__doc__)
    parser.add_argument("--deadline", type=cli.moment)
    parser.add_argument("--redo", action="store_true")
    parser.add_argument("--prepare", action="store_true")
    return stage.run_stage(name, body, parser, sys.argv[1:])


if __name__ == "__main__":
    # One file, linked under each stage's name.
    raise SystemExit(main(Path(sys.argv[0]).stem))
