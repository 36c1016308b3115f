"""`run_pipeline.sh --dry-run`: what each stage would do, and what must be fixed before."""

from collections.abc import Iterator

from drafter import disk, text
from drafter.config import Config, StageName
from drafter.errors import StageError
from drafter.generate import prompts
from drafter.model_folder import DEFAULT_MODEL
from drafter.pipeline import preflight, rehearsal_record
from drafter.stage import read_taken

UNITS: dict[StageName, str] = {
    "01b_synthetic": "request{} to answer",
    "02_hidden_states": "row{} to read back",
    "04_train": "step{} to train",
    "05_export": "drafter{} to write",
    "06_acceptance": "measurement{} to make",
}


def lines(config: Config, plans: list[dict]) -> Iterator[str]:
    """Lines of the page, from the summaries of the stages' `--dry-run`. Raises ContractError on a broken manifest."""
    asked = [each["stage"] for each in plans if each["stage"] not in config.run.take]
    if config.target.model == DEFAULT_MODEL and not DEFAULT_MODEL.exists():
        yield f"run {config.run.name} in {config.run_dir}"
        yield f"  the first run creates the target {DEFAULT_MODEL}; nothing more can be checked without it"
        return
    found = preflight.findings(config, asked)
    without_input = preflight.missing_inputs(config, asked).values()
    yield f"run {config.run.name} in {config.run_dir}"
    freed = disk.freed(config.run_dir)
    to_come: set[StageName] = set()  # stages whose output is not complete yet
    for each in plans:
        name = each["stage"]
        if name in config.run.take:
            yield f"  {name:<17} taken from {config.run.take[name]}"
            try:
                read_taken(config, name)
            except StageError as error:
                to_come.add(name)
                found[str(error)] = name
                yield f"      ! {error}"
            continue
        before = [needed for needed in preflight.inputs(config, name) if needed in to_come]
        lacks_input = name in without_input
        if not before and not lacks_input:  # otherwise its findings are about missing input
            for finding in each["findings"]:
                found.setdefault(finding, name)
        if before or lacks_input or each["pending"] or each.get("stale"):
            to_come.add(name)
        again = "freed by drafter.disk clean, will be made again: " if name in freed else ""
        yield f"  {name:<17} {again}{_work(each, before, lacks_input)}"
        for finding in (line for line, stopped in found.items() if stopped == name):
            yield f"      ! {finding}"
        for note in (*each.get("read", ()), *each.get("broken", ()), *each.get("notes", ())):
            yield f"      {note}"
    if line := rehearsal_record.advice(config):
        yield line
    if found:
        yield f"{len(found)} to fix (!) before `run_pipeline.sh` starts anything"
    else:
        yield "nothing to fix was found"


def _work(plan: dict, before: list[StageName], lacks_input: bool) -> str:
    if before:
        return f"waits for {before[0]}"
    if lacks_input or plan["findings"]:
        return "cannot begin"
    if "notes" in plan:
        return "everything is left to do; the number is unknown offline"
    if not plan["pending"] and "stale" in plan:
        return f"its counts to write again: {plan['stale']}"
    if not plan["pending"]:
        return plan.get("left") or "nothing to do"
    details = [text.size(plan["bytes"])] if "bytes" in plan else []
    for name, entry in plan.get("sources", {}).items():
        details.append(f"{name}: {prompts.count_text(entry)}")
    more = f" ({'; '.join(details)})" if details else ""
    pending = plan["pending"]
    return f"{pending:,} {UNITS[plan['stage']].format('s' * (pending != 1))}{more}"
