"""The page of a rehearsal: a line for each piece of the night, and what only the night itself can show."""

from collections.abc import Iterator

from drafter import checked
from drafter.config import Config, Role, StageName
from drafter.pipeline.run_state import RunState
from drafter.pipeline.steps import STEPS
from drafter.run_files import Boot
from drafter.serve import boot_times
from drafter.target.shallow import Cut

SERVERS: dict[StageName, Role] = {
    "01b_synthetic": "generate",
    "02_hidden_states": "extract",
    "06_acceptance": "evaluate",
}


def starts(config: Config) -> dict[str, list[float]]:
    """Seconds of each start of the rehearsal's servers, by role; its target is a folder of its own."""
    found: dict[str, list[float]] = {}
    for each in checked.records_or_empty(config.run.dir / boot_times.NAME, Boot):
        if each["model"] == str(config.target.model) and each["at"] >= config.target.model.stat().st_ctime:
            found.setdefault(each["role"], []).append(each["seconds"])
    return found


def lines(rehearsed: Config, cut: Cut, how_started: dict[Role, str], error: str | None) -> Iterator[str]:
    """A line a piece: its name, passed, failed or not covered, and what was seen.

    `rehearsed` is the rehearsal's own config; `how_started` says how a role was started that is a unit in the night.
    """
    found, booted = RunState(rehearsed), starts(rehearsed)
    failed_at = found.state.get("stage") if error else None
    error = error or ""

    def line(name: str, status: str, note: str) -> str:
        return f"  {name:<17} {status:<11}  {note}".rstrip()

    ended = ""  # why the pieces from here on were not reached
    for step in STEPS:
        if (role := SERVERS.get(step.stage)) and not ended:
            died = failed_at == step.stage and error.startswith(f"server {role} ")
            seconds = ", ".join(f"{each:.0f}" for each in booted.get(role, ()))
            seen = "; ".join(filter(None, (seconds and f"ready after {seconds} s", how_started.get(role))))
            yield line(
                f"server {role}",
                "failed" if died else "passed" if seconds else "not covered",
                error if died else seen if seconds else "it was not started",
            )
            ended = "its server did not start" if died else ""
        if ended:
            yield line(step.stage, "not covered", ended)
        elif failed_at == step.stage:
            yield line(step.stage, "failed", error)
        else:
            yield line(step.stage, "passed", _seen(found, step.stage))
        if failed_at == step.stage:
            ended = f"the rehearsal ended in {failed_at}"
    yield from (f"not covered: {what}" for what in _not_covered(rehearsed, found, cut))


def _seen(found: RunState, name: StageName) -> str:
    """What a stage that passed did, in a few words."""
    facts, counts = found.manifest(name).get("facts", {}), found.manifest(name)
    minutes = f"{found.minutes(name) or 0:.1f} min"
    if name == "02_hidden_states":
        layers = "all layers" if _layers_compared(found) else "the final layer"
        probed = sum(each["positions"] for each in facts.get("probes", ()))
        return f"{counts.get('out')} rows, {layers} compared at {probed} positions; {minutes}"
    if name == "04_train":
        memory = max((each.get("memory_gib", 0) for each in found.metrics), default=0)
        shown = f", {memory:.1f} GiB a GPU" if memory else ""
        ranks = found.config.train.processes
        return f"2 steps on {ranks} rank{'s' * (ranks > 1)}{shown}; saved and resumed; {minutes}"
    if name == "06_acceptance":
        return f"{', '.join(found.config.acceptance.drafters)} served and measured; {minutes}"
    return (f"{counts.get('out')} rows; " if name == "01b_synthetic" else "") + minutes


def _layers_compared(found: RunState) -> bool:
    probes = found.manifest("02_hidden_states").get("facts", {}).get("probes", ())
    return any(each["layers"] for each in probes)


def pack_fill(found: RunState) -> tuple[int, int]:
    """Tokens of the fullest step of 04, and those of a step whose packs are full on every rank."""
    totals = [0, *(each["tokens"] for each in found.metrics if each["kind"] == "train" and "tokens" in each)]
    config = found.config
    steps = [after - before for before, after in zip(totals, totals[1:], strict=False)]
    return max(steps, default=0), config.target.max_seq_len * config.train.processes


def _not_covered(rehearsed: Config, found: RunState, cut: Cut) -> Iterator[str]:
    layers = f"all {cut.of} layers"
    yield f"memory of {layers}, and the KV cache that it leaves"
    yield f"the time that a server with {layers} takes to start, the speed of every stage, the length of answers"
    yield "how well a drafter drafts: the first layers write no sense, so neither the trial nor 06 is judged"
    if found.manifest("02_hidden_states").get("status") == "complete" and not _layers_compared(found):
        yield "02's auxiliary layers: transformers could not compute them (logs/02_hidden_states.log says why)"
    trained, full = pack_fill(found)
    if trained and trained < 0.8 * full:
        yield f"04's memory: the rows filled {trained:,} of the {full:,} tokens that its packs hold"
    if rehearsed.extract.neighbour_ids:
        yield "which layers the warm start was trained on (extract.neighbour_ids)"
