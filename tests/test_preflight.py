"""Preflight: what is knowable before the first stage is said before the first stage, all of it at once."""

import json
import os
import shutil
import socket

import pytest
from conftest import CPU_CONFIG, free_port
from test_server import SCRIPTS, machine  # noqa: F401 - a fixture

from drafter import config, preflight
from drafter.errors import ConfigError


@pytest.fixture
def load(tmp_path, model):
    """The default config with its own ports and the scripted server as the engine that is asked."""

    def make(*overrides, fake=""):
        sets = [f"run.dir={tmp_path / 'runs'}", f"servers.evaluate.python={SCRIPTS / 'fake_vllm'}"]
        sets += [f"servers.{role}.url=http://127.0.0.1:{free_port()}" for role in ("generate", "extract", "evaluate")]
        return config.load(CPU_CONFIG, [*sets, f"servers.evaluate.env={{FAKE: '{fake}'}}", *overrides])

    return make


def found(run_config, stages=config.STAGES):
    return preflight.findings(run_config, stages)


def test_a_machine_that_is_ready_has_no_findings(load):
    assert found(load()) == []


def test_an_engine_without_eagle3_for_the_target_is_known_before_generation(load):
    """X06"""
    assert found(load(fake="no_eagle3")) == [
        "this vLLM knows no EAGLE-3 drafter for LlamaForCausalLM; Kimi needs 0.25.0 or newer"
    ]


def test_an_interpreter_without_vllm_is_named(load):
    (finding,) = found(load("servers.evaluate.python=/usr/bin/false"))
    assert "/usr/bin/false cannot import vLLM" in finding


def test_the_engine_is_asked_once_a_run(load):
    run_config = load()
    run_config.run_dir.mkdir(parents=True)
    assert found(run_config) == []
    kept = json.loads((run_config.run_dir / preflight.ENGINE).read_text())
    assert kept["architecture"] == "LlamaForCausalLM" and kept["eagle3"] is True
    (run_config.run_dir / preflight.ENGINE).write_text(json.dumps(kept | {"eagle3": False}))
    assert len(found(run_config)) == 1


@pytest.mark.parametrize(
    ("override", "finding"),
    [
        ("target.model=/nowhere", "no model at /nowhere"),
        ("target.layer_ids=[2, 15, 27, 31]", "the last id must be 30"),
        ("target.max_seq_len=100000", "more than the model's"),
        ("train.warm_start=/nowhere", "no drafter at /nowhere"),
        ("prompts.0.path=/nowhere.jsonl", "no file /nowhere.jsonl"),
        ("extract.reserve_gb=1000000", "are free beside the reserve"),
    ],
)
def test_what_a_later_stage_would_stop_at_is_found(load, override, finding):
    assert any(finding in each for each in found(load(override)))


def test_a_model_without_one_of_the_three_tensors_is_found(load, model, tmp_path):
    broken = tmp_path / "model"
    broken.mkdir()
    shutil.copy(model / "config.json", broken)
    assert any("embed_tokens" in each for each in found(load(f"target.model={broken}")))


def test_a_taken_port_is_found_and_named(load):
    run_config = load()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", int(run_config.servers.extract.url.rpartition(":")[2])))
        taken.listen()
        assert any("servers.extract.url: cannot listen" in each for each in found(run_config))


def test_all_findings_come_at_once_as_one_line(load):
    run_config = load("train.warm_start=/nowhere", "prompts.0.path=/nowhere.jsonl")
    with pytest.raises(ConfigError, match=r"no file /nowhere.jsonl; no drafter at /nowhere") as error:
        preflight.check(run_config, config.STAGES)
    assert "\n" not in str(error.value)


def test_a_disk_that_is_too_small_is_refused_with_both_numbers(load, monkeypatch):
    """H15"""
    monkeypatch.setattr(preflight.plan.artifacts, "free_bytes", lambda _: 1.2e9)
    (finding,) = found(load("prompts.0.path=configs/prompts_sample.jsonl"), ("02_hidden_states",))
    assert "need about 0.4" in finding and "0.19 GiB are free" in finding


def test_only_the_checks_of_the_asked_stages_are_made(load):
    assert found(load("prompts.0.path=/nowhere.jsonl"), ("05_export",)) == []


def test_a_unit_that_is_not_installed_or_may_not_be_started_is_found(load, machine, monkeypatch):  # noqa: F811
    systemd = ("servers.generate.kind=systemd", "servers.generate.unit=vllm-test")
    assert "no systemd unit vllm-test" in found(load(*systemd))[0]
    (machine.units / "vllm-test").touch()
    assert found(load(*systemd)) == []
    sudo = machine.units / "sudo"
    sudo.write_text(
        '#!/bin/sh\n[ "$2" = -l ] && [ "$4" = stop ] && exit 1\n[ "$2" = -l ] && exit 0\nshift; exec "$@"\n'
    )
    sudo.chmod(0o755)
    monkeypatch.setenv("PATH", f"{machine.units}:{os.environ['PATH']}")
    assert found(load(*systemd, "servers.generate.systemctl=[sudo, -n, systemctl]")) == [
        "servers.generate: this user may not run sudo -n systemctl stop vllm-test"
    ]
