"""Every check of every stage that can be made before the first: what is knowable at 19:00 must not fail at 04:00."""

import contextlib
import os
import re
import shlex
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

from drafter import files, gpu, process
from drafter.acceptance.comparison import NONE, RUN, WARM_START
from drafter.config import ROOT, STAGES, Config, Role, StageName
from drafter.errors import ConfigError, StageError
from drafter.generate import chat
from drafter.pipeline import engine_check, estimates, plan, rates, sharing, unit_layers
from drafter.serve import address, readiness, roles, smoke_record, systemd
from drafter.target import eagle3_folder, head
from drafter.text import size

SHARED = Path("/dev/shm")
QUEUE_BYTES = 10 * 2**24  # of a vLLM's message queue: 10 chunks of 16 MiB
CPU_CACHE = "VLLM_CPU_KVCACHE_SPACE"  # GiB
GIB = 2**30  # of vLLM's own settings
CONTEXT = {"generate": "generate.max_tokens", "extract": "target.max_seq_len", "evaluate": "acceptance.max_tokens"}

ROLES: tuple[Role, ...] = get_args(Role)
STARTS: dict[StageName, Role] = {
    "01b_synthetic": "generate",
    "02_hidden_states": "extract",
    "06_acceptance": "evaluate",
}

Check = Callable[..., Iterable[str]]


def findings(config: Config, stages: Iterable[StageName], keep: bool = False) -> dict[str, StageName]:
    """What would stop one of these stages later, one line each, with the first that it would stop.

    Changes nothing, but for the engine's answers, which are kept with `keep`.
    """
    stages = [name for name in STAGES if name in set(stages)]
    found = missing_inputs(config, stages)
    started = roles_started(config, stages)
    for needed_by, check in CHECKS:
        stopped = next((name for name in stages if name in needed_by), None)
        if stopped:
            given: dict[str, Any] = {"started": started} if check in OF_ROLES else {}
            if check is engine_check.findings:
                given["keep"] = keep
            try:
                for line in check(config, **given):
                    found.setdefault(line, stopped)
            except (StageError, OSError) as error:
                found.setdefault(str(error), stopped)
    return found


def roles_started(config: Config, stages: Collection[StageName]) -> list[Role]:
    """The roles that these stages start, and the test of the warm start before them when it is still to be made."""
    needed = {STARTS[name] for name in stages if name in STARTS}
    if "evaluate" not in needed and "04_train" in stages and config.acceptance.smoke and config.train.warm_start:
        try:
            tested = smoke_record.key(config) in smoke_record.read_all(config)
        except (StageError, OSError):  # `reference` or `target` names what is missing
            tested = False
        if not tested:
            needed.add("evaluate")
    return [role for role in ROLES if role in needed]


def inputs(config: Config, name: StageName) -> list[StageName]:
    """The stages whose output a stage reads."""
    if name != "06_acceptance":
        return [before for before, after in pairwise(STAGES) if after == name]
    exported: list[StageName] = ["05_export"] if RUN in config.acceptance.drafters else []
    return exported + ([] if config.acceptance.prompts else ["01b_synthetic"])


def missing_inputs(config: Config, stages: list[StageName]) -> dict[str, StageName]:
    """What a stage reads and neither is there nor is made by an earlier one of `stages`, each once."""

    def is_there(name: StageName) -> bool:
        return name in config.run.take or (config.stage_dir(name) / "manifest.json").exists()

    found = {}
    told: list[StageName] = []
    for number, name in enumerate(stages):
        for needed in inputs(config, name):
            if needed in (*stages[:number], *told) or is_there(needed):
                continue
            told.append(needed)
            first = needed
            while (before := inputs(config, first)) and not is_there(before[0]):
                first = before[0]
            found[
                f"{name} needs {needed}, which has not run: nothing in {config.stage_dir(needed)}; make it with "
                f"{config.pipeline('--from', first.partition('_')[0])}, or take another run's with "
                f"run.take.{needed}=FOLDER"
            ] = name
            break
    return found


def target(config: Config) -> Iterator[str]:
    """Layer ids and lengths against the model, and its three tensors, which training and the probe need."""
    config.check_against_model()
    head.read_verifier(config.target.model)
    yield from ()


def reference(config: Config) -> Iterator[str]:
    """The drafters to start from, to export like and to compare with open, and draft for this target."""
    checks = {config.train.warm_start: eagle3_folder.check_folder}
    checks |= {config.export.reference: eagle3_folder.check_folder}
    for label in config.acceptance.drafters:
        if label not in (NONE, WARM_START, RUN):
            checks.setdefault(ROOT / label, eagle3_folder.check_rival)
    for folder, check in checks.items():
        try:
            if folder:
                check(folder, config.target)
        except StageError as error:
            yield str(error)


def sources(config: Config) -> Iterator[str]:
    yield from plan.prompt_faults(config)
    least, asked = config.generate.min_rows, estimates.conversations_asked(config)
    if asked is None or any(source.turns == "all" for source in config.prompts):
        return  # nobody knows how many rows that gives
    if least > (rows := estimates.num_rows(config, asked)):
        yield f"generate.min_rows: {least:,} is more than the {rows:,} rows that prompts give"


def servers(config: Config, started: Collection[Role] = ROLES) -> Iterator[str]:
    """What a role is started and asked with: interpreter, API key, a context that the run fits in."""
    for role in started:
        own = config.server(role)
        if own.api_key_env and own.api_key_env not in os.environ:
            yield f"servers.{role}.api_key_env: it names a variable that is not set"
        if own.kind != "command":
            continue
        try:
            own.environment()
        except ConfigError as error:
            yield f"servers.{role}.{error}"
        if own.python and not shutil.which(own.python):
            yield f"servers.{role}.python: no program {own.python}"
        offered = own.flags.get("max-model-len", config.target.architecture.max_position_embeddings)
        needed = readiness.context_needed(config, role)
        if isinstance(offered, int) and 0 < offered < needed:
            where = f"servers.{role}.args.max-model-len" if "max-model-len" in own.flags else "the model's positions"
            yield f"{CONTEXT[role]}: {needed - 1} tokens and at least one more do not fit in {offered}, {where}"


def drafting(config: Config) -> Iterator[str]:
    """What a drafter asks of the role that serves it."""
    own = config.servers.evaluate
    if set(config.acceptance.drafters) == {NONE}:
        return
    if own.kind != "command":
        yield f"servers.evaluate.kind: {roles.NEEDS_COMMAND}"
    if own.flags.get("disable-log-stats"):
        yield "servers.evaluate.args: drafts are not counted with disable-log-stats: leave it out"


def template(config: Config) -> Iterator[str]:
    """Without a chat template a server boots, and refuses every conversation."""
    chat.check_template(config)
    yield from ()


def memory(config: Config) -> Iterator[str]:
    has = memory_limit()
    asked = config.extract.queue_gb * 1e9
    if config.servers.extract.kind != "external" and asked > has:
        yield f"extract.queue_gb: {size(asked)} of states would wait in this machine's {size(has)} of memory"


def cache(config: Config, started: Collection[Role] = ROLES) -> Iterator[str]:
    """The KV cache of a server on the CPU fits in memory. vLLM says so 50 lines before its log ends."""
    has = memory_limit()
    for role in started:
        own = config.server(role)
        asked = own.env.get(CPU_CACHE, os.environ.get(CPU_CACHE, ""))
        if own.kind == "command" and asked.isdecimal() and int(asked) * GIB > has:
            yield (
                f"servers.{role}.env.{CPU_CACHE}: {asked} GiB of KV cache do not fit in the {size(has)} of memory "
                "of this machine"
            )


def memory_limit() -> int:
    """Bytes of memory that processes here may use: the machine's, or what its container leaves of it."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # "max", or no such control group
        return min(machine, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return machine


def shared_memory(config: Config, started: Collection[Role] = ROLES) -> Iterator[str]:
    """A server of several processes, as every one on the CPU is, passes messages through /dev/shm."""
    found = gpu.query_memory()
    on_cpu = not found.gpus and not found.unknown
    for role in started:
        own = config.server(role)
        ranks = own.flags.get("tensor-parallel-size", 1)
        if own.kind != "command" or not SHARED.is_dir() or not (on_cpu or (isinstance(ranks, int) and ranks > 1)):
            continue
        if (free := files.free_bytes(SHARED)) < QUEUE_BYTES:
            yield (
                f"{SHARED}: {size(free)} are free, and a vLLM of several processes needs "
                f"{size(QUEUE_BYTES)} there: start the container with --shm-size=1g or --ipc=host"
            )
            return


def training(config: Config) -> Iterator[str]:
    eagle3_folder.check_settings(config)
    yield from ()


def versions(config: Config) -> Iterator[str]:
    eagle3_folder.check_engine(config)
    yield from ()


def ports(config: Config, started: Collection[Role] = ROLES) -> Iterator[str]:
    """A `command` role that is not up yet needs its port free."""
    for role in started:
        own = config.server(role)
        if own.kind != "command" or roles.alive(config, role):
            continue
        if fault := address.fault(config, role):
            yield fault


def units(config: Config) -> Iterator[str]:
    """The units are installed, and sudo lets this user start, stop and read them as configured.

    Nothing is started or stopped to find out. What sudo lists may still ask for a password, which only running it
    would show. Those of every role are looked at, since the pipeline stops and gives back all of them.
    """
    for role in ROLES:
        own = config.server(role)
        if own.kind != "systemd":
            continue
        if Path(own.systemctl[0]).name == "sudo":
            for line in systemd.commands(own):
                if process.run([line[0], "-l", *line[1:]], timeout=30).returncode:
                    yield f"servers.{role}: this user may not run {shlex.join(line)}; {systemd.INSTALL_RIGHTS}"
        systemd.properties(own)


def folders(config: Config) -> Iterator[str]:
    if absent := sharing.missing_folder(config.run.dir):
        yield f"run.dir: {absent} does not exist; make it, or mount what belongs there"
        return
    folder = config.run_dir
    while not folder.exists():
        folder = folder.parent
    if not os.access(folder, os.W_OK | os.X_OK):
        yield f"run.dir: this user may not write in {folder}"


def event(config: Config) -> Iterator[str]:
    """Nobody hears of a night whose command the shell cannot read."""
    if config.run.on_event:
        done = process.run(["/bin/sh", "-n", "-c", config.run.on_event], timeout=30)
        if done.returncode:
            yield f"run.on_event: {' '.join(done.stderr.split())}"


def budget(config: Config) -> Iterator[str]:
    """Each server start of 06 has an equal share of the budget, in which it must also measure."""
    _ = config.target.architecture  # without it, how long a start takes is anybody's guess
    known = rates.measured_or(config, rates.profile(rates.default_profile(config)))
    minutes, starts = config.acceptance.budget_minutes, estimates.num_server_starts(config)
    if minutes <= starts * (start := known.start_seconds.typical / 60):
        yield f"acceptance.budget_minutes: {minutes:g} are not enough for {starts} server starts of about {start:.1f}"


def space(config: Config) -> Iterator[str]:
    """The states that are still to be written, against the disk without its reserve."""
    _ = config.target.architecture  # without it, nobody knows what a row takes
    platform = rates.profile(rates.default_profile(config))
    known = rates.measured_or(config, platform)
    asked = estimates.conversations_asked(config)
    if asked is None or sharing.missing_folder(config.run.dir):
        return
    parts = estimates.estimate(config, known, estimates.sizes(config, platform), asked)
    free, needed = plan.disk_left(config), estimates.total_bytes(parts)
    if needed > free:
        rows = estimates.num_rows(config, asked)
        yield (
            f"{rows:,} rows need about {size(needed)} and {size(free)} are free beside the reserve; "
            f"what fits: {plan.proposal(config, known, platform, None)}"
        )


def gpus(config: Config, started: Collection[Role] = ROLES) -> Iterator[str]:
    found = gpu.query_memory()
    named = {number for role in started for number in config.server(role).gpus}
    if named and found.unknown and not found.lasting:
        numbers = ", ".join(map(str, sorted(named)))
        yield f"servers.*.gpus: it is unknown whether GPU {numbers} is free: {found.unknown}"
    elif not found.unknown and (absent := sorted(named - found.gpus)):
        yield f"servers.*.gpus: this machine has no GPU {', '.join(map(str, absent))}"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if re.fullmatch(r"\d+(,\d+)*", visible) and (hidden := sorted(named - set(map(int, visible.split(","))))):
        yield f"servers.*.gpus: CUDA_VISIBLE_DEVICES={visible} hides GPU {', '.join(map(str, hidden))}"


def ranks(config: Config) -> Iterator[str]:
    present, asked = gpu.query_memory().gpus, config.train.processes
    if present and asked > len(present):
        yield f"train.processes: {asked} ranks, and this machine has {len(present)} GPUs"


OF_ROLES = (ports, servers, cache, shared_memory, gpus, engine_check.findings)  # take the roles that will be started
SERVED = ("01b_synthetic", "02_hidden_states", "06_acceptance")
CHECKS: tuple[tuple[tuple[str, ...], Check], ...] = (
    (STAGES, folders),
    (STAGES, event),
    (STAGES, target),
    (("01b_synthetic",), sources),
    (("01b_synthetic",), template),
    (("04_train", "05_export", "06_acceptance"), reference),
    (SERVED, units),
    (("02_hidden_states",), sharing.shared_folder),
    (("02_hidden_states",), unit_layers.findings),
    ((*SERVED, "04_train"), ports),
    ((*SERVED, "04_train"), servers),
    (("02_hidden_states",), memory),
    ((*SERVED, "04_train"), cache),
    ((*SERVED, "04_train"), shared_memory),
    ((*SERVED, "04_train"), gpus),
    (("04_train",), ranks),
    (("04_train",), training),
    (("06_acceptance",), versions),
    (("06_acceptance",), drafting),
    (("06_acceptance",), budget),
    (("06_acceptance",), engine_check.findings),
    (("02_hidden_states",), space),
)


def refuse_findings(config: Config, stages: Iterable[StageName]) -> None:
    """Before a real run. Raises ConfigError with every finding."""
    if found := missing_inputs(config, list(stages)) or findings(config, stages, keep=True):
        raise ConfigError("before anything is started: " + "; ".join(found))
