"""What a unit's files say of vLLM's flags and environment."""

import pytest

from drafter import config
from drafter.serve import unit_file

UNIT = """[Service]
# Environment=NOT=this
Environment=HOME=/data/vllm "WITH=two words"
EnvironmentFile=-{folder}/kimi.env
EnvironmentFile=-/nowhere.env
ExecStart=/opt/vllm/bin/vllm serve /models/k2 \\
    --served_model_name kimi --port=8000 --language-model-only \\
    --cudagraph-capture-sizes 1 2 --speculative-config '{{"method": \\
    "x"}}'
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(unit_file, "UNIT_FOLDERS", (tmp_path / "etc", tmp_path / "usr"))
    (tmp_path / "usr").mkdir()
    (tmp_path / "usr/mine.service").write_text(UNIT.format(folder=tmp_path))
    (tmp_path / "kimi.env").write_text("# a key\nVLLM_API_KEY='secret'\nNCCL_P2P_LEVEL=SYS\n")
    return tmp_path


def test_flags_and_environment_are_read_as_systemd_reads_them(folder):
    found = unit_file.read("mine")
    assert found.flags == {
        "served-model-name": "kimi",
        "port": "8000",
        "language-model-only": True,
        "cudagraph-capture-sizes": "1 2",
        "speculative-config": '{"method":      "x"}',
    }
    assert found.environment == {
        "HOME": "/data/vllm",
        "WITH": "two words",
        "VLLM_API_KEY": "secret",
        "NCCL_P2P_LEVEL": "SYS",
    }
    assert found.unread == [] and unit_file.read("yours") is None


def test_a_drop_in_replaces_the_command_and_adds_to_the_environment(folder):
    (folder / "etc/mine.service.d").mkdir(parents=True)
    drop_in = folder / "etc/mine.service.d/night.conf"
    drop_in.write_text("[Service]\nEnvironment=HOME=/tmp\nExecStart=\nExecStart=/opt/run.sh\n")
    found = unit_file.read("mine.service")
    assert found.flags == {} and found.environment["HOME"] == "/tmp" and found.environment["WITH"] == "two words"
    server = config.Server(kind="systemd", url="http://h:1", unit="mine")
    assert unit_file.flags_of(server) is None, "what a script starts is unknown"


def test_what_cannot_be_read_is_named(folder):
    (folder / "kimi.env").unlink()
    (folder / "kimi.env").mkdir()
    assert unit_file.read("mine").unread == [folder / "kimi.env"]


def test_a_commands_flags_are_the_configs():
    server = config.Server(kind="command", url="http://h:1", args={"max_model_len": 9})
    assert unit_file.flags_of(server) == {"max-model-len": 9}
    assert unit_file.flags_of(config.Server(kind="external", url="http://h:1")) is None
