"""What the night needs of a systemd unit, flag by flag, as its files say: `python -m drafter.serve check ROLE`."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from drafter.config import Config, Role
from drafter.serve import readiness, unit_file
from drafter.serve.unit_file import UnitFile

FITS, MISSING, ADVISED = "fits", "MISSING", "advised"


@dataclass(frozen=True)
class Line:
    """One flag or setting of a unit. Only what is MISSING keeps the night from starting."""

    verdict: str
    flag: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.verdict:<8} {self.flag}{self.why and f': {self.why}'}"


def lines(config: Config, role: Role, unit: UnitFile) -> Iterator[Line]:
    """What the role needs of its unit; nothing for a unit whose flags are unknown."""
    flags, target = unit.flags, config.target
    if not flags:
        return
    names = str(flags.get("served-model-name", "")).split()
    yield _line(target.served_name in names, f"--served-model-name {target.served_name}", "or set target.served_name")
    port = urlsplit(config.server(role).url).port or 80
    yield _line(str(flags.get("port", 8000)) == str(port), f"--port {port}", f"or set servers.{role}.url")
    needed = readiness.context_needed(config, role)
    context = str(flags.get("max-model-len", needed))
    yield _line(not context.isdecimal() or int(context) >= needed, f"--max-model-len {needed}", "or more")
    model = flags.get("model")
    if model:
        same = Path(str(model)).resolve() == target.model.resolve()
        yield _line(same, f"--model {target.model}", "or set target.model")
    if role == "generate":
        yield from _generate(config, unit)
    elif role == "extract":
        yield _line("kv-transfer-config" in flags, "--kv-transfer-config", "as in configs/systemd")


def _generate(config: Config, unit: UnitFile) -> Iterator[Line]:
    flags, target, many = unit.flags, config.target, config.generate.concurrency
    if target.think_end is not None:
        yield _line("reasoning-parser" in flags, "--reasoning-parser", "the model's own, such as kimi_k2")
    keyed = "VLLM_API_KEY" in unit.environment or "api-key" in flags
    if keyed:
        named = config.server("generate").api_key_env is not None
        yield _line(
            named, "servers.generate.api_key_env", "the unit sets an API key: name the variable that holds it"
        )
    at_once = str(flags.get("max-num-seqs", many))
    enough = not at_once.isdecimal() or int(at_once) >= many
    yield _line(enough, f"--max-num-seqs {many}", "fewer run at once than generate.concurrency", ADVISED)
    for flag, value in unit_file.KV_ADVICE.items():
        why = "more requests fit in the KV cache, see --plan"
        yield _line(flag in flags, f"--{flag} {value}", why, ADVISED)
    if "fp8" in str(flags.get("kv-cache-dtype", "")):
        why = "vLLM 0.32's MLA decode kernel does not fit the shared memory of an RTX PRO 6000 with it"
        yield Line(ADVISED, "no --kv-cache-dtype fp8", why)
    if "disable-log-stats" in flags:
        yield Line(ADVISED, "no --disable-log-stats", "preemptions are counted in its /metrics")


def _line(fits: bool, flag: str, why: str, otherwise: str = MISSING) -> Line:
    return Line(FITS, flag) if fits else Line(otherwise, flag, why)


def findings(config: Config, started: list[Role]) -> Iterator[str]:
    """What is MISSING in the units of the roles that will be started."""
    for role in started:
        own = config.server(role)
        unit = unit_file.read(own.systemd_unit) if own.kind == "systemd" else None
        for line in lines(config, role, unit) if unit else ():
            if line.verdict == MISSING:
                yield f"servers.{role}: the unit {own.unit} lacks {line.flag}: {line.why}"


def report(config: Config, role: Role) -> tuple[list[str], bool]:
    """The page for the user, and whether nothing is MISSING."""
    own = config.server(role)
    if own.kind != "systemd":
        return [f"servers.{role} is no systemd unit: its flags come from the config, or it is another's"], True
    unit = unit_file.read(own.systemd_unit)
    if unit is None:
        return [f"the unit {own.unit} is not installed here, or its file cannot be found"], False
    found = list(lines(config, role, unit))
    page = [f"{own.unit}, {unit.path}", *(f"  {line}" for line in found)]
    if not found:
        page.append(f"  its flags are unknown, it starts {' '.join(unit.command) or 'nothing that can be read'};")
        page.append("  see that they hold what configs/systemd/vllm-kimi-k25-generate.service holds")
    page += [f"  not readable for this user: {path}" for path in unit.unread]
    return page, bool(found) and all(line.verdict != MISSING for line in found)
