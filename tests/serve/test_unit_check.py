"""A unit of one's own is compared with what the night needs, flag by flag, without a question to any server."""

import pytest

from drafter import config
from drafter.pipeline import preflight
from drafter.serve import roles, unit_check, unit_file

CONFIG = config.ROOT / "configs/kimi_k25.yaml"
THEIRS = """[Service]
Environment=VLLM_API_KEY=x
ExecStart=/root/venv/bin/vllm serve /data/models/Kimi-K2.5 --served-model-name Kimi-K2.5 --port 8000 \\
    --tensor-parallel-size 8 --max-model-len 8000 --max-num-seqs 64 --kv-cache-dtype fp8
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    monkeypatch.setattr(unit_file, "UNIT_FOLDERS", (tmp_path,))

    def install(text: str, name: str = "vllm-kimi-k25-int4") -> None:
        (tmp_path / f"{name}.service").write_text(text)

    return install


def check(role: str, capsys) -> tuple[int, list[str]]:
    code = roles.main(["check", role, "--config", str(CONFIG)])
    return code, capsys.readouterr().out.splitlines()


def test_every_flag_that_is_missing_or_advised_is_named(installed, capsys):
    installed(THEIRS)
    code, lines = check("generate", capsys)
    assert code == 2
    verdicts = {line.split(": ")[0].strip() for line in lines[1:]}
    assert {
        "MISSING  --served-model-name kimi-k2.5",
        "fits     --port 8000",
        "MISSING  --max-model-len 8193",
        "MISSING  --reasoning-parser",
        "MISSING  servers.generate.api_key_env",
        "advised  --max-num-seqs 200",
        "advised  --decode-context-parallel-size 4",
        "advised  --watermark 0.05",
        "advised  no --kv-cache-dtype fp8",
    } <= verdicts
    findings = list(unit_check.findings(config.load(CONFIG), ["generate"]))
    assert len(findings) == sum("MISSING" in line for line in lines) == 4
    assert any(check is unit_check.findings for _, check in preflight.CHECKS)


@pytest.mark.parametrize("role", ["generate", "extract"])
def test_the_shipped_units_have_what_the_night_needs(installed, capsys, role):
    name = {"generate": "vllm-kimi-k25-int4", "extract": "vllm-kimi-k25-extract"}[role]
    installed((config.ROOT / f"configs/systemd/vllm-kimi-k25-{role}.service").read_text(), name)
    code, lines = check(role, capsys)
    assert code == 0 and all(line.split()[0] == "fits" for line in lines[1:]), lines
    assert list(unit_check.findings(config.load(CONFIG), [role])) == []


def test_a_unit_that_starts_a_script_is_not_judged_and_said_so(installed, capsys):
    installed("[Service]\nExecStart=/opt/serve.sh\n")
    code, lines = check("generate", capsys)
    assert code == 2 and "its flags are unknown, it starts /opt/serve.sh" in lines[1]
    assert list(unit_check.findings(config.load(CONFIG), ["generate"])) == [], "it may well be right"


def test_a_unit_that_is_not_installed_is_named(installed, capsys):
    code, [line] = check("generate", capsys)
    assert code == 2 and "vllm-kimi-k25-int4 is not installed here" in line
    assert check("evaluate", capsys)[0] == 0, "the pipeline starts it with the config's flags"
