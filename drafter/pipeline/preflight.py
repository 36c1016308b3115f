"""All checks of all stages that can be made before the first one: no run must fail at 04:00 that could at 19:00."""

import contextlib
import os
import re
import shlex
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

from drafter import files, gpu, process, run_files
from drafter.acceptance.comparison import NONE, RUN, WARM_START
from drafter.config import ROOT, STAGES, Config, Role, StageName, Target
from drafter.errors import ConfigError, StageError
from drafter.generate import chat
from drafter.pipeline import active_servers, engine_check, estimates, extract_unit, folder_permissions, plan, rates
from drafter.serve import address, readiness, roles, smoke_record, systemd, unit_check
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

Check = Callable[..., Iterable[str] | None]  # yields findings, or raises the only one


def findings(config: Config, stages: Iterable[StageName], keep: bool = False) -> dict[str, StageName]:
    """Findings that would stop one of these stages later: one line each -> the first stage that it would stop.

    Changes nothing, except that `keep` caches the engine's answers.
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
                for line in check(config, **given) or ():
                    found.setdefault(line, stopped)
            except (StageError, OSError) as error:
                found.setdefault(str(error), stopped)
    return found


def roles_started(config: Config, stages: Collection[StageName]) -> list[Role]:
    """The roles that these stages start, including the one for the smoke test if that is pending."""
    needed = {STARTS[name] for name in stages if name in STARTS}
    if "evaluate" not in needed and "04_train" in stages and config.acceptance.smoke and config.train.warm_start:
        try:
            tested = smoke_record.key(config) in smoke_record.read_all(config)
        except (StageError, OSError):  # the checks `reference` and `target` report what is missing
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
    """Missing inputs that no earlier one of `stages` makes: a line for each -> the stage that needs it."""

    def exists(name: StageName) -> bool:
        return name in config.run.take or (config.stage_dir(name) / run_files.MANIFEST).exists()

    found = {}
    reported: list[StageName] = []
    for number, name in enumerate(stages):
        for needed in inputs(config, name):
            if needed in (*stages[:number], *reported) or exists(needed):
                continue
            reported.append(needed)
            first = needed
            while (before := inputs(config, first)) and not exists(before[0]):
                first = before[0]
            found[
                f"{name} needs {needed}, which has not run: nothing in {config.stage_dir(needed)}; make it with "
                f"{config.pipeline('--from', first.partition('_')[0])}, or take another run's with "
                f"run.take.{needed}=FOLDER"
            ] = name
            break
    return found


def target(config: Config) -> None:
    """Layer ids and lengths fit the model, and the tensors that training and the probe need can be read."""
    config.check_against_model()
    head.read_verifier(config.target.model)


def reference(config: Config) -> Iterator[str]:
    """The warm start, the export's reference and the drafters to compare can be read and draft for this target."""
    checks: dict[Path | None, Callable[[Path, Target], object]] = {
        config.train.warm_start: eagle3_folder.check_folder
    }
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
        return  # the number of rows is unknown
    if least > (rows := estimates.num_rows(config, asked)):
        yield f"generate.min_rows: {least:,} is more than the {rows:,} rows that prompts give"


def servers(config: Config, started: Collection[Role] = ROLES) -> Iterator[str]:
    """Interpreter and API key exist, and the context is long enough for the run."""
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
    """The role `evaluate` can serve a drafter and count its drafts."""
    own = config.servers.evaluate
    if set(config.acceptance.drafters) == {NONE}:
        return
    if own.kind != "command":
        yield f"servers.evaluate.kind: {roles.NEEDS_COMMAND}"
    if own.flags.get("disable-log-stats"):
        yield "servers.evaluate.args: disable-log-stats prevents counting drafts: leave it out"


def template(config: Config) -> None:
    """There is a chat template: without one a server boots and then refuses every conversation."""
    chat.check_template(config)


def memory(config: Config) -> Iterator[str]:
    has = memory_limit()
    asked = config.extract.queue_gb * 1e9
    if config.servers.extract.kind != "external" and asked > has:
        yield f"extract.queue_gb: {size(asked)} of states would wait in this machine's {size(has)} of memory"


def cache(config: Config, started: Collection[Role] = ROLES) -> Iterator[str]:
    """The KV cache of a server on the CPU fits in memory; vLLM's own message is hard to find in its log."""
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
    """Bytes of memory that processes may use: the machine's, or the container's limit."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # "max", or no control group
        return min(machine, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return machine


def shared_memory(config: Config, started: Collection[Role] = ROLES) -> Iterator[str]:
    """/dev/shm has room for the messages of a server with several processes, which every CPU server has."""
    found = gpu.query_memory()
    on_cpu = not found.gpus and not found.unknown
    for role in started:
        own = config.server(role)
        ranks = own.flags.get("tensor-parallel-size", 1)
        if own.kind != "command" or not SHARED.is_dir() or not (on_cpu or (isinstance(ranks, int) and ranks > 1)):
            continue
        if (free := files.free_bytes(SHARED)) < QUEUE_BYTES:
            yield (
                f"{SHARED}: {size(free)} are free, and vLLM with several processes needs "
                f"{size(QUEUE_BYTES)} there: start the container with --shm-size=1g or --ipc=host"
            )
            return


def training(config: Config) -> None:
    eagle3_folder.check_settings(config)


def versions(config: Config) -> None:
    eagle3_folder.check_engine(config)


def ports(config: Config, started: Collection[Role] = ROLES) -> Iterator[str]:
    """The port of a `command` role that is not up yet is free."""
    for role in started:
        own = config.server(role)
        if own.kind != "command" or roles.alive(config, role):
            continue
        if fault := address.fault(config, role):
            yield fault


def units(config: Config) -> Iterator[str]:
    """The units are installed, and sudo permits this user to start, stop and read them.

    Checked without starting or stopping anything. A command that sudo lists may still ask for a password, which only
    running it would show. The units of all roles are checked, since the pipeline stops and restores all of them.
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
    if absent := folder_permissions.missing_folder(config.run.dir):
        yield f"run.dir: {absent} does not exist; create it, or mount its file system"
        return
    folder = config.run_dir
    while not folder.exists():
        folder = folder.parent
    if not os.access(folder, os.W_OK | os.X_OK):
        yield f"run.dir: this user may not write in {folder}"


def event(config: Config) -> Iterator[str]:
    """The shell can parse the command: otherwise no event would be reported."""
    if config.run.on_event:
        done = process.run(["/bin/sh", "-n", "-c", config.run.on_event], timeout=30)
        if done.returncode:
            yield f"run.on_event: {' '.join(done.stderr.split())}"


def space(config: Config) -> Iterator[str]:
    """The hidden states fit the free disk minus the reserve."""
    _ = config.target.architecture  # raises ConfigError without a model, whose row size is unknown
    platform = rates.profile(rates.default_profile(config))
    known = rates.measured_or(config, platform)
    asked = estimates.conversations_asked(config)
    if asked is None or folder_permissions.missing_folder(config.run.dir):
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


# These take the roles that will be started.
OF_ROLES = (
    ports,
    servers,
    cache,
    shared_memory,
    gpus,
    engine_check.findings,
    active_servers.findings,
    unit_check.findings,
)
SERVED = ("01b_synthetic", "02_hidden_states", "06_acceptance")
CHECKS: tuple[tuple[tuple[str, ...], Check], ...] = (
    (STAGES, folders),
    (STAGES, event),
    (STAGES, target),
    (("01b_synthetic",), sources),
    (("01b_synthetic",), template),
    (("04_train", "05_export", "06_acceptance"), reference),
    (SERVED, units),
    (SERVED, active_servers.findings),
    (SERVED, unit_check.findings),
    (("02_hidden_states",), extract_unit.environment),
    (("02_hidden_states",), folder_permissions.shared_folder),
    (("02_hidden_states",), extract_unit.findings),
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
    (("06_acceptance",), engine_check.findings),
    (("02_hidden_states",), space),
)


def refuse_findings(config: Config, stages: Iterable[StageName]) -> None:
    """Before a real run. Raises ConfigError with all findings."""
    if found := missing_inputs(config, list(stages)) or findings(config, stages, keep=True):
        raise ConfigError("nothing was started: " + "; ".join(found))
