"""Every shipped config loads and plans; the night's figures are the night's; the units agree with the config."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from typing import get_args

import pytest
import yaml

from drafter import config
from drafter.config import ROOT, reference
from drafter.errors import ConfigError
from drafter.generate import prompts
from drafter.serve import readiness, roles, systemd

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
UNITS = sorted((ROOT / "configs/systemd").glob("*.service"))
PYTHON = "/opt/drafter/.venv/bin/python"  # of the box, in the units

each_config = pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
each_unit = pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)


@pytest.fixture
def kimi() -> config.Config:
    return config.load(ROOT / "configs/kimi_k25.yaml")


def test_every_setting_is_described_and_listed_with_its_default(capsys):
    assert reference.main([]) == 0
    shown = capsys.readouterr().out
    listed = {setting.key: setting for setting in reference.settings()}
    assert [key for key, setting in listed.items() if not setting.meaning] == []
    assert all(f"{key}: {setting.default}\n    {setting.meaning}\n" in shown for key, setting in listed.items())
    for key, default in (("train.lr", "required"), ("train.betas", "[0.9, 0.95]"), ("run.dir", '"runs"')):
        assert listed[key].default == default
    assert listed["servers.extract"].meaning.endswith("[settings as of servers.generate]")
    assert listed["extract.dtype"].meaning.endswith("[bf16, fp8]")
    places = {re.sub(r"\.\d+\b", ".N", place) for place in leaves(yaml.safe_load(CONFIGS[0].read_text()))}
    places = {re.sub("^servers.(extract|evaluate)", "servers.generate", place) for place in places}
    missing = [place for place in places if not any(place == key or place.startswith(f"{key}.") for key in listed)]
    assert missing == []


def leaves(tree, prefix=""):
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        inside = isinstance(value, dict) or (isinstance(value, list) and value and isinstance(value[0], dict))
        yield from leaves(value, f"{prefix}{key}.") if inside else [f"{prefix}{key}"]


@each_config
def test_every_shipped_config_loads_and_its_dump_is_the_same_config(path, tmp_path):
    loaded = config.load(path)
    (tmp_path / "resolved.yaml").write_text(loaded.dump())
    assert config.load(tmp_path / "resolved.yaml") == loaded


def test_the_readmes_config_of_ones_own_model_loads_and_needs_the_keys_it_calls_required(tmp_path):
    section = (ROOT / "configs/README.md").read_text().partition("## Your own model")[2]
    lines = [line for line in section.splitlines() if line.startswith("    ")]
    path = tmp_path / "mine.yaml"
    path.write_text(textwrap.dedent("\n".join(lines)))
    loaded = config.load(path)
    target = loaded.target
    for role in get_args(config.Role):
        assert readiness.context_needed(loaded, role) <= loaded.server(role).flags["max-model-len"]
    layers = target.layer_ids[-1]
    assert target.aux_layer_ids == (2, layers // 2, layers - 3)
    tree = yaml.safe_load(path.read_text())
    for section, key in [("run", "name"), *(("target", key) for key in tree["target"]), ("train", "lr")]:
        less = tree | {section: {name: value for name, value in tree[section].items() if name != key}}
        path.write_text(yaml.safe_dump(less))
        with pytest.raises(ConfigError, match=f"{section}.{key}"):
            config.load(path)


def test_the_readmes_prompts_of_ones_own_are_read_as_it_says(tmp_path, monkeypatch):
    """Seam B20, B22, U3: each source of the example, with a file as its comment shows, gives requests."""
    monkeypatch.setenv("HOME", str(tmp_path))
    section = (ROOT / "configs/README.md").read_text().partition("## Your own prompts")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("    ")]
    tree = yaml.safe_load(textwrap.dedent("\n".join(lines[: lines.index(lines[-1])])))
    records = {
        "cooking": {"prompt": "How long?"},
        "mt_bench": {"turns": ["Why?", "And why that?"]},
        "support": {"body": "It does not start.", "persona": "Be kind."},
    }
    loaded = config.load(ROOT / "configs/smollm2_cpu.yaml", [f"prompts={json.dumps(tree['prompts'])}"])
    assert {source.name for source in loaded.prompts} == set(records)
    assert loaded.prompts[0].path == tmp_path / "data/cooking.jsonl"
    for source in loaded.prompts:
        requests = prompts.requests_of(records[source.name], source, {})
        assert [m["role"] for m in requests[-1].messages][-1] == "user" and len(requests) == 1
    line = "prompts cooking: {}/data/cooking.jsonl (JSON Lines), read by prompt, turns: last; the first: 'How long"
    assert lines[-1].strip().startswith(line.format("/home/me"))


@each_config
def test_every_shipped_config_dry_runs_on_a_machine_that_has_none_of_it(path, tmp_path):
    """And where the model is there, vLLM itself says that it knows all flags but the misspelt one."""
    sets = ["--set", f"run.dir={tmp_path}", "--set", "servers.evaluate.args.max-modle-len=9"]
    line = [sys.executable, "-m", "drafter.pipeline", str(path), "--dry-run", *sets]
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    stages = [line.split()[0] for line in done.stdout.splitlines() if re.match(r"  \S", line)]
    assert stages == list(config.STAGES) and "nothing to do" not in done.stdout
    assert list(tmp_path.iterdir()) == [], "a dry run leaves nothing"
    refused = re.findall(r"servers\.(\w+)\.args: vLLM refuses them: (.*)", done.stdout)
    here = config.load(path).target.model.exists()
    assert refused == ([("evaluate", "unrecognized arguments: --max-modle-len")] if here else [])


def test_the_night_is_200_way_8192_tokens_and_four_layers(kimi):
    assert (kimi.generate.concurrency, kimi.generate.max_tokens) == (200, 8192)
    assert (kimi.generate.temperature, kimi.generate.top_p) == (1.0, 0.95)
    assert kimi.target.layer_ids == (2, 30, 58, 61) and kimi.run_dir.is_relative_to("/data")
    assert (kimi.target.prompt_suffix, kimi.target.think_end) == ((163606,), 163607)
    assert kimi.servers.extract.unit in {unit.stem for unit in UNITS}
    assert kimi.servers.generate.unit not in {unit.stem for unit in UNITS}, (
        "production's own, which nothing overwrites"
    )


def command_of(path) -> list[str]:
    """A unit's ExecStart as systemd reads it: continuation lines joined by a space, quotes taken off."""
    text = re.sub(r"\\\n", " ", path.read_text())
    return shlex.split(re.search(r"^ExecStart=(.*)$", text, re.M).group(1))


@each_unit
def test_a_unit_serves_what_its_role_asks_for(path, kimi):
    roles = {role: kimi.server(role) for role in ("generate", "extract")}
    role, own = next((role, own) for role, own in roles.items() if path.stem.endswith(role))
    line = command_of(path)
    flags = dict(zip(line[3:], line[4:], strict=False))
    assert line[:3] == [PYTHON, "-m", "vllm.entrypoints.openai.api_server"]
    assert flags["--model"] == str(kimi.target.model) and flags["--served-model-name"] == kimi.target.served_name
    assert own.url == f"http://{flags['--host']}:{flags['--port']}"
    assert int(flags["--max-model-len"]) >= readiness.context_needed(kimi, role)
    assert "--disable-custom-all-reduce" in line and "--trust-remote-code" in line
    if role == "generate":
        assert int(flags["--max-num-seqs"]) >= kimi.generate.concurrency
        assert flags["--reasoning-parser"] == "kimi_k2"


def test_the_extract_unit_captures_what_the_config_asks_for(kimi):
    line = command_of(ROOT / "configs/systemd/vllm-kimi-k25-extract.service")
    built = roles.command(kimi, "extract")
    for flag in ("--speculative-config", "--kv-transfer-config"):
        unit, ours = (json.loads(each[each.index(flag) + 1]) for each in (line, built))
        for settings in (unit, ours):
            settings.get("kv_connector_extra_config", {}).pop("shared_storage_path", None)
        assert unit == ours
    extra = json.loads(line[line.index("--kv-transfer-config") + 1])["kv_connector_extra_config"]
    assert extra["shared_storage_path"] == str(kimi.servers.extract.link)


def test_the_extract_unit_sets_nothing_that_vllm_refuses_beside_a_connector():
    """vLLM 0.32 does not start where a connector meets segments that grow: the KV cache may move under it."""
    text = (ROOT / "configs/systemd/vllm-kimi-k25-extract.service").read_text()
    assert "expandable_segments" not in text


def test_sudo_permits_what_the_pipeline_asks_of_the_units_and_nothing_else(kimi):
    text = re.sub(r"\\\n", " ", (ROOT / "configs/systemd/sudoers").read_text())
    allowed = re.search(r"^Cmnd_Alias DRAFTER =(.*)$", text, re.M).group(1).split(",")
    roles = (kimi.servers.generate, kimi.servers.extract)
    asked = {f"/usr/bin/{' '.join(line[2:])}" for own in roles for line in systemd.commands(own)}
    assert {" ".join(command.split()) for command in allowed} == asked
    assert all(own.systemctl == ("sudo", "-n", "systemctl") for own in (kimi.servers.generate, kimi.servers.extract))


@each_unit
def test_systemd_accepts_the_unit(path, tmp_path):
    analyze = shutil.which("systemd-analyze")
    if not analyze:
        pytest.skip("no systemd-analyze on this machine (Debian: apt install systemd)")
    copy = tmp_path / path.name
    copy.write_text(path.read_text().replace(PYTHON, sys.executable))
    done = subprocess.run([analyze, "verify", str(copy)], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
