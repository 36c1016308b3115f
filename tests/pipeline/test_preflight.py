"""Preflight: what is knowable before the first stage is said before the first stage, all of it at once."""

import json
import os
import pwd
import shutil
import socket
import stat
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from drafter import config
from drafter.errors import ConfigError
from drafter.pipeline import engine_check, extract_unit, folder_permissions, preflight
from drafter.serve import smoke_record, systemd, unit_file
from tests.conftest import CPU_CONFIG, free_port
from tests.serve.test_roles import SCRIPTS, machine  # noqa: F401 - a fixture


@pytest.fixture
def load(tmp_path, model):
    """The default config with its own ports and the scripted server as the engine that is asked."""

    def make(*overrides, fake="", ports=None):
        sets = [f"run.dir={tmp_path / 'runs'}", f"servers.evaluate.python={SCRIPTS / 'fake_vllm'}"]
        for role in ("generate", "extract", "evaluate"):
            url = ports.server(role).url if ports else f"http://127.0.0.1:{free_port()}"
            sets.append(f"servers.{role}.url={url}")
        return config.load(CPU_CONFIG, [*sets, f"servers.evaluate.env={{FAKE: '{fake}'}}", *overrides])

    return make


def found(run_config, stages=config.STAGES):
    return list(preflight.findings(run_config, stages))


def test_a_machine_that_is_ready_has_no_findings(load):
    assert found(load()) == []


def test_an_engine_without_eagle3_for_the_target_is_known_before_generation(load):
    """X06"""
    assert found(load(fake="no_eagle3")) == [
        "this vLLM knows no EAGLE-3 drafter for LlamaForCausalLM; Kimi needs 0.25.0 or newer"
    ]


def test_a_tokenizer_that_vllm_cannot_build_is_known_before_the_first_boot(load):
    (finding,) = found(load(fake="no_tokenizer"))
    assert finding.startswith("target.special_tokens: vLLM's tokenizer for ") and "for 2 tokens" in finding


@pytest.mark.parametrize(
    ("cuda", "driver", "old"),
    [("13.0", "570.133.20", True), ("13.0", "580.95.05", False), ("12.9", "570.133.20", False), ("13.0", "", False)],
)
def test_a_driver_that_is_too_old_for_the_wheels_is_named(load, machine, cuda, driver, old):  # noqa: F811
    (machine.gpus / "driver").write_text(f"{driver}\n" if driver else "")
    said = f"the NVIDIA driver {driver} is too old for this torch's CUDA {cuda}: install 580 or newer"
    assert found(load(fake=f"cuda={cuda}")) == ([said] if old else [])


@pytest.mark.parametrize("program", ["/usr/bin/false", "/usr/bin/true"])
def test_an_interpreter_without_vllm_is_named(load, program):
    """One that ended well and had said nothing was a traceback."""
    (finding,) = found(load(f"servers.evaluate.python={program}"))
    assert f"{program} cannot import vLLM" in finding


def test_an_engine_is_asked_once_for_all_runs_and_again_for_another_version_or_other_flags(load, tmp_path):
    """Seam G3: importing vLLM took 20 s of each call. Seam H4: a dry run keeps nothing."""
    asked, version = tmp_path / "asked", tmp_path / "version"
    version.write_text("1")
    fake = f"asked={asked} version_of={version}"

    def times() -> int:
        return len(asked.read_text().splitlines())

    first = load("run.name=first", fake=fake)
    first.run.dir.mkdir()
    for _ in range(2):
        assert found(first) == []
    assert times() == 2 and list(first.run.dir.iterdir()) == [], "a dry run"
    for name in ("first", "second"):
        preflight.refuse_findings(load(f"run.name={name}", fake=fake, ports=first), config.STAGES)
    assert times() == 3
    (answer,) = json.loads((kept := first.run.dir / engine_check.KEPT).read_text()).values()
    assert answer == {"eagle3": True, "refused": {}, "tokenizer": None, "cuda": None}
    preflight.refuse_findings(load("servers.evaluate.args.seed=7", fake=fake, ports=first), config.STAGES)
    version.write_text("2")
    preflight.refuse_findings(first, config.STAGES)
    assert times() == 5 and len(json.loads(kept.read_text())) == 3
    for broken in ("", "[]", '{"a": 7}', "[" * 100000):
        kept.write_text(broken)
        assert found(first) == []


@pytest.mark.parametrize(
    ("override", "finding"),
    [
        ("target.model=/nowhere", "no model at /nowhere"),
        ("target.layer_ids=[2, 15, 27, 31]", "the last id must be 30"),
        ("target.max_seq_len=100000", "more than the model's"),
        ("train.warm_start=/nowhere", "no drafter at /nowhere"),
        ("prompts.0.path=/nowhere.jsonl", "/nowhere.jsonl does not exist"),
        ("extract.reserve_gb=1000000", "are free beside the reserve"),
        ("export.reference=/nowhere", "no drafter at /nowhere"),
        ("acceptance.drafters=[none, /nowhere]", "no drafter at /nowhere"),
        ("acceptance.drafters=[none, models/nowhere]", f"no drafter at {config.ROOT}/models/nowhere"),
        ("servers.evaluate.gpus=[0, 99]", "this machine has no GPU"),
        ("servers.generate.api_key_env=NO_SUCH_KEY", "servers.generate.api_key_env: it names a"),
        ("servers.extract.python=/nowhere/python", "servers.extract.python: no program /nowhere/python"),
        (
            "generate.max_tokens=1024",
            "generate.max_tokens: 1024 tokens and at least one more do not fit",
        ),
        (
            "target.max_seq_len=1024",
            "do not fit in 1024, servers.extract.args.max-model-len",
        ),
        ("acceptance.max_tokens=5000", "acceptance.max_tokens: 5000 tokens and at least one"),
        (
            "servers.evaluate.args={what: true}",
            "servers.evaluate.args: vLLM refuses them: unrecognized",
        ),
        ("servers.evaluate.kind=external", "servers.evaluate.kind: a drafter is a launch argument"),
        ("servers.evaluate.args={disable_log_stats: true}", "disable-log-stats prevents counting drafts"),
        ("servers.generate.args={}", None),
        ("generate.max_tokens=1023", None),
        ("extract.queue_gb=100000", "of states would wait in this machine's"),
        ("run.on_event='echo \"$EVENT'", "run.on_event: /bin/sh: "),
        ("train.l2_sp=0.1", "train.l2_sp needs a warm start"),
        ("train.draft_vocab_size=50000", "train.draft_vocab_size: 50000 is more than the target's 49152 tokens"),
        ("generate.min_rows=94", "generate.min_rows: 94 is more than the 93 rows that prompts give"),
        ("generate.min_rows=93", None),
        ("prompts.0.path=/dev/null", "/dev/null is a device, not a regular file"),
        ("acceptance.held_out=101", "acceptance.held_out takes all 101 conversations"),
        ("target.think_end=49152", "target.think_end: 49152 is not a token id, the model has 49152"),
    ],
)
def test_what_a_later_stage_would_stop_at_is_found(load, override, finding):
    """Or, where nothing would stop, that nothing is."""
    findings = found(load(override))
    assert any(finding in each for each in findings) if finding else findings == []


@pytest.mark.parametrize(("mib", "said"), [(64, "/dev/shm: 67.11 MB are free, and vLLM"), (200, "")])
def test_a_small_dev_shm_is_found_before_a_server_dies_of_it(model, mib, said):
    """Seam B07: a container's default is 64 MiB."""
    code = "from drafter import config; from drafter.pipeline import preflight\n"
    code += f"run = config.load({str(CPU_CONFIG)!r}, ['servers.evaluate.args.tensor-parallel-size=2'])\n"
    code += "print(*preflight.shared_memory(run))"
    mounted = f'mount -t tmpfs -o size={mib}m none /dev/shm && exec {sys.executable} -c "$0"'
    line = ["unshare", "-m", "sh", "-c", mounted, code]
    done = subprocess.run(line, cwd=config.ROOT, capture_output=True, text=True)
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip("no mount namespaces here")
    assert done.returncode == 0 and done.stdout.startswith(said) and bool(done.stdout.strip()) == bool(said)


def test_a_kv_cache_larger_than_memory_is_found(load, monkeypatch):
    """Seam B07"""
    (finding,) = found(load("servers.extract.env.VLLM_CPU_KVCACHE_SPACE='100000'"))
    assert finding.startswith("servers.extract.env.VLLM_CPU_KVCACHE_SPACE: 100000 GiB of KV cache do not fit in the ")
    monkeypatch.setattr(preflight, "memory_limit", lambda: 2**29)  # a container's
    assert len([line for line in found(load()) if "1 GiB of KV cache do not fit in the 0.54 GB" in line]) == 2


def test_a_model_without_a_chat_template_is_found_before_its_server_boots(load, model, tmp_path):
    """Seam B23"""
    bare = tmp_path / "bare"
    shutil.copytree(model, bare, ignore=shutil.ignore_patterns("chat_template*"))
    settings = json.loads((bare / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (bare / "tokenizer_config.json").write_text(json.dumps(settings))
    (finding,) = found(load(f"target.model={bare}"), ["01b_synthetic"])
    assert f"target.model: {bare} has no chat template" in finding


def test_a_model_that_is_not_here_is_one_finding(load):
    """How long its server would take, and what its rows, is then unknown and no finding."""
    findings = found(load("target.model=/nowhere", "extract.reserve_gb=1000000"))
    assert findings == ["target.model: no model at /nowhere (no config.json there)"]


def test_more_ranks_than_gpus_are_found(load, monkeypatch):
    monkeypatch.setattr(preflight.gpu, "query_memory", lambda: preflight.gpu.Memory({0: 5, 1: 5}))
    assert list(preflight.ranks(load("train.processes=2"))) == []
    assert list(preflight.ranks(load("train.processes=4"))) == [
        "train.processes: 4 ranks, and this machine has 2 GPUs"
    ]


@pytest.mark.parametrize(("visible", "hidden"), [("", None), ("0,1", None), ("1", "0"), ("GPU-58ca22cc", None)])
def test_a_servers_gpu_that_the_environment_hides_is_found(load, monkeypatch, visible, hidden):
    monkeypatch.setattr(preflight.gpu, "query_memory", lambda: preflight.gpu.Memory({0: 5, 1: 5}))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    wanted = [f"servers.*.gpus: CUDA_VISIBLE_DEVICES={visible} hides GPU {hidden}"] if hidden else []
    assert list(preflight.gpus(load("servers.evaluate.gpus=[0, 1]"))) == wanted


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


LEFT = {"generate": "01b_synthetic", "extract": "02_hidden_states", "evaluate": "06_acceptance"}


def finish(run_config, *names):
    for name in names:
        (manifest := run_config.stage_dir(name) / "manifest.json").parent.mkdir(parents=True, exist_ok=True)
        manifest.touch()


OF_A_ROLE = {
    "": "url: cannot listen",
    "python=/nowhere/python": "python: no program",
    "api_key_env=NO_SUCH_KEY": "api_key_env: it names",
    "env={VLLM_CPU_KVCACHE_SPACE: '999999'}": "GiB of KV cache do not fit",
    "gpus=[99]": "no GPU 99",
}


@pytest.mark.parametrize("role", LEFT)
@pytest.mark.parametrize("override", OF_A_ROLE)
def test_a_role_is_checked_only_while_a_stage_that_starts_it_is_left(load, role, override):
    """With 01b and 02 complete, a taken port of `generate` stopped `--from 04`, and a finished run had a finding."""
    run_config = load("acceptance.smoke=false", *([f"servers.{role}.{override}"] if override else []))
    finish(run_config, *config.STAGES)
    with socket.socket() as taken:
        if not override:
            taken.bind(("127.0.0.1", int(run_config.server(role).url.rpartition(":")[2])))
            taken.listen()
        for name in config.STAGES:
            told = any(OF_A_ROLE[override] in line for line in found(run_config, (name,)))
            assert told == (name == LEFT[role]), name


def test_the_test_of_the_warm_start_needs_its_role_until_it_was_made(load, tmp_path):
    warm = tmp_path / "warm"
    warm.mkdir()
    (warm / "config.json").write_text("{}")
    run_config = load(f"train.warm_start={warm}")
    assert preflight.roles_started(run_config, ["04_train"]) == ["evaluate"]
    assert preflight.roles_started(run_config, ["05_export"]) == []
    assert preflight.roles_started(load(), ["04_train"]) == [], "without a warm start"
    assert preflight.roles_started(load("acceptance.smoke=false", f"train.warm_start={warm}"), ["04_train"]) == []
    run_config.run.dir.mkdir()
    note = run_config.run.dir / smoke_record.NAME
    note.write_text(json.dumps({smoke_record.key(run_config): {}}))
    assert preflight.roles_started(run_config, ["04_train"]) == []
    assert preflight.roles_started(run_config, ["01b_synthetic", "04_train"]) == ["generate"]


def test_all_findings_come_at_once_as_one_line(load):
    run_config = load("train.warm_start=/nowhere", "prompts.0.path=/nowhere.jsonl")
    with pytest.raises(ConfigError, match=r"/nowhere.jsonl does not exist; no drafter at /nowhere") as error:
        preflight.refuse_findings(run_config, config.STAGES)
    assert "\n" not in str(error.value)


def test_a_disk_that_is_too_small_is_refused_with_both_numbers(load, monkeypatch):
    """H15"""
    monkeypatch.setattr(preflight.plan.files, "free_bytes", lambda _: 1.2e9)
    (finding,) = found(load("prompts.0.path=configs/prompts_sample.jsonl"))
    assert "need about 0.36 GB" in finding and "0.20 GB are free" in finding


def test_only_the_checks_of_the_asked_stages_are_made(load):
    run_config = load("prompts.0.path=/nowhere.jsonl")
    (manifest := run_config.stage_dir("04_train") / "manifest.json").parent.mkdir(parents=True)
    manifest.touch()
    assert found(run_config, ("05_export",)) == []


def test_a_stage_without_its_input_is_refused_with_the_command_that_makes_it(load):
    run_config = load("run.name=new")
    with pytest.raises(ConfigError) as error:
        preflight.refuse_findings(run_config, ["06_acceptance"])
    assert f"06_acceptance needs 05_export, which has not run: nothing in {run_config.run_dir}" in str(error.value)
    assert f"make it with ./run_pipeline.sh {CPU_CONFIG} --from 01b --set" in str(error.value)
    for name in ("01b_synthetic", "02_hidden_states"):
        (manifest := run_config.stage_dir(name) / "manifest.json").parent.mkdir(parents=True)
        manifest.touch()
    with pytest.raises(ConfigError, match="--from 04 --set"):
        preflight.refuse_findings(run_config, ["06_acceptance"])
    assert found(load("run.name=new", "acceptance.drafters=[none]"), ["06_acceptance"]) == []


def test_a_unit_that_is_not_installed_or_may_not_be_asked_is_found_and_never_started_or_stopped(load, machine):  # noqa: F811
    """Seam H4: an idle unit was stopped and a running one started, to see whether that is permitted."""
    unit = ("servers.generate.kind=systemd", "servers.generate.unit=vllm-test")
    assert "no systemd unit vllm-test" in found(load(*unit))[0]
    (machine.units / "vllm-test").touch()
    assert found(load(*unit)) == []
    assert {call for call in machine.calls() if call} == {"show vllm-test"}
    (machine.units / "refuse-show").touch()
    assert "Access denied" in found(load(*unit))[0]


SUDO = """#!/bin/sh
[ "$1" = -l ] || {{ shift; exec "$@"; }}
shift 2
echo "$@" >> {asked}
[ "$2" != {unlisted} ] && [ "$1" != {unlisted} ]
"""


@pytest.mark.parametrize("forbidden", ["reset-failed", "start", "stop", "show", "journalctl", None])
def test_a_prefix_must_permit_exactly_what_is_run(load, machine, monkeypatch, forbidden):  # noqa: F811
    asked, sudo = machine.units / "asked", machine.units / "sudo"
    sudo.write_text(SUDO.format(asked=asked, unlisted=forbidden))
    sudo.chmod(0o755)
    (machine.units / "vllm-test").touch()
    monkeypatch.setenv("PATH", f"{machine.units}:{os.environ['PATH']}")
    prefix = "servers.generate.systemctl=[sudo, -n, systemctl]"
    run_config = load("servers.generate.kind=systemd", "servers.generate.unit=vllm-test", prefix)
    findings = found(run_config)
    assert len(findings) == bool(forbidden) and all(forbidden in line.split()[8:10] for line in findings)
    lines = [f"sudo -n {line}" for line in asked.read_text().splitlines()]
    assert lines == [" ".join(line) for line in systemd.commands(run_config.servers.generate)]


def test_rights_of_an_older_version_are_named_with_the_file_to_install(load, machine, monkeypatch):  # noqa: F811
    """Seam M10: sudoers without --no-pager."""
    sudo = machine.units / "sudo"
    sudo.write_text(
        '#!/bin/sh\n[ "$1" != -l ] && shift && exec "$@"\ncase "$*" in *show*--no-pager*) exit 1;; esac\n'
    )
    sudo.chmod(0o755)
    (machine.units / "vllm-test").touch()
    monkeypatch.setenv("PATH", f"{machine.units}:{os.environ['PATH']}")
    prefix = "servers.generate.systemctl=[sudo, -n, systemctl]"
    (finding,) = found(load("servers.generate.kind=systemd", "servers.generate.unit=vllm-test", prefix))
    assert "may not run sudo -n systemctl show --no-pager -p " in finding
    assert finding.endswith("install this version's configs/systemd/sudoers, see docs/operations.md")


# Who may write where: what preflight says is held against what two real users can do.

WRITER, ME, COMMON = "daemon", 65534, 1  # daemon's own group is the common one


def as_user(uid: int, gid: int, groups: list[int], umask: int, work) -> str:
    """What `work` returns when another user runs it, in a process of its own."""
    reader, writer = os.pipe()
    if not (child := os.fork()):
        try:
            os.setgroups(groups)
            os.setgid(gid)
            os.setuid(uid)
            os.umask(umask)
            text = work() or ""
        except OSError as error:
            text = f"refused: {error}"
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as two users")
@pytest.mark.parametrize("groups", [[ME, COMMON], [ME]])
@pytest.mark.parametrize("mode", [0o2775, 0o775, 0o2755, 0o777, 0o3775])
@pytest.mark.parametrize(("umask", "unit_umask"), [(0o002, 0o002), (0o022, 0o002), (0o002, 0o022)])
def test_a_finding_says_whether_this_user_may_rename_and_delete_the_servers_files(groups, mode, umask, unit_umask):
    daemon = pwd.getpwnam(WRITER)
    with tempfile.TemporaryDirectory() as place:
        runs, states = Path(place) / "runs", Path(place) / "runs/night/02_hidden_states"
        runs.mkdir()
        os.chown(runs, ME, COMMON)
        os.chmod(runs, mode)
        os.chmod(place, 0o755)
        said = as_user(
            ME, ME, groups, umask,
            lambda: "; ".join(
                folder_permissions.permissions(states, "u", {"User": WRITER, "UMask": f"{unit_umask:04o}"})
            ),
        )  # fmt: skip

        def publish():
            os.replace(states / "ab/row.part", states / "ab/row.safetensors")
            os.unlink(states / "ab/row.safetensors")

        def write():
            (states / "ab").mkdir()
            (states / "ab/row.part").write_text("states")

        happened = as_user(ME, ME, groups, umask, lambda: states.mkdir(parents=True))
        happened += as_user(daemon.pw_uid, daemon.pw_gid, [daemon.pw_gid], unit_umask, write)
        if (states / "ab/row.part").exists():
            happened += as_user(ME, ME, groups, umask, publish)
        assert bool(said) == bool(happened), (said, happened)
        assert not said or "02_hidden_states" in said or "rename or delete" in said
        assert list(runs.iterdir()) == [] or states.exists()


@pytest.mark.parametrize("mode", [0o755, 0o2775, 0o700])
@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
@pytest.mark.parametrize("acl", [None, {0x01: 7, 0x04: 5, 0x10: 7, 0x20: 0}, {0x01: 7, 0x04: 5, 0x20: 5}])
def test_a_new_folders_mode_and_group_are_foreseen_without_making_one(tmp_path, mode, umask, acl):
    """Seam H4: preflight made one to see."""
    (above := tmp_path / "above").mkdir()
    above.chmod(mode)
    if acl:
        entries = b"".join(struct.pack("<HHI", tag, granted, 0xFFFFFFFF) for tag, granted in acl.items())
        try:
            os.setxattr(above, "system.posix_acl_default", struct.pack("<I", 2) + entries)
        except OSError:
            pytest.skip("this file system has no ACLs")
    before = os.umask(umask)
    try:
        foreseen = folder_permissions._would_make(above)
        assert list(above.iterdir()) == []
        (above / "new").mkdir()
    finally:
        os.umask(before)
    made = (above / "new").stat()
    assert foreseen == (stat.S_IMODE(made.st_mode), made.st_gid)


def test_the_units_user_and_umask_come_from_systemd(load, machine):  # noqa: F811
    (machine.units / "vllm-test").touch()
    (machine.units / "user").write_text("User=nobody-here\nUMask=0022")
    unit = ("servers.extract.kind=systemd", "servers.extract.unit=vllm-test")
    assert found(load(*unit)) == ["vllm-test: getpwnam(): name not found: 'nobody-here'"]


def test_a_disk_that_is_not_there_is_one_line_whatever_would_lie_on_it(load, machine, tmp_path):  # noqa: F811
    (machine.units / "vllm-test").touch()
    unit = ("servers.extract.kind=systemd", "servers.extract.unit=vllm-test")
    disk = tmp_path / "data"
    there = load(*unit, f"run.dir={disk}/runs", f"servers.extract.link={disk}/runs/extract", "extract.reserve_gb=1e6")
    assert found(there) == [f"run.dir: {disk} does not exist; create it, or mount its file system"]
    disk.mkdir()
    assert [line for line in found(there) if "link" in line or "run.dir" in line] == []
    assert f"servers.extract.link: {tmp_path}/no does not exist" in found(
        load(*unit, f"servers.extract.link={tmp_path}/no/link")
    )


def test_a_systemd_that_does_not_run_is_one_finding_for_all_units(load, machine):  # noqa: F811
    (machine.units / "refuse").write_text("System has not been booted with systemd as init system")
    roles = ("generate", "extract")
    (finding,) = found(load(*(f"servers.{r}.{s}" for r in roles for s in ("kind=systemd", f"unit=vllm-{r}"))))
    assert "systemd does not run here" in finding


def test_a_link_that_cannot_be_made_is_found(load, machine, tmp_path):  # noqa: F811
    (machine.units / "vllm-test").touch()
    (tmp_path / "taken").mkdir()
    unit = ("servers.extract.kind=systemd", "servers.extract.unit=vllm-test")
    (finding,) = found(load(*unit, f"servers.extract.link={tmp_path / 'taken'}"))
    assert "cannot be replaced by a link" in finding


def test_a_unit_that_captures_too_few_layers_is_found_before_it_is_started(monkeypatch, tmp_path):
    """Seam L16: the docs advised a night with neighbour_ids, which the shipped unit's server refuses."""
    etc, usr = tmp_path / "etc", tmp_path / "usr"
    for folder in (etc, usr):
        folder.mkdir()
    monkeypatch.setattr(unit_file, "UNIT_FOLDERS", (etc, usr))
    kimi = SimpleNamespace(
        servers=SimpleNamespace(
            extract=SimpleNamespace(
                kind="systemd", unit="vllm-kimi-k25-extract", systemd_unit="vllm-kimi-k25-extract"
            )
        ),
        target=SimpleNamespace(layer_ids=(2, 30, 58, 61), aux_layer_ids=(2, 30, 58)),
        extract=SimpleNamespace(neighbour_ids=False),
    )
    assert list(extract_unit.findings(kimi)) == []  # no such file is known of
    shutil.copy(config.ROOT / "configs/systemd/vllm-kimi-k25-extract.service", etc)
    assert list(extract_unit.findings(kimi)) == []
    kimi.extract.neighbour_ids = True
    [finding] = extract_unit.findings(kimi)
    assert "captures layers [2, 30, 58, 61], not [3, 31, 59]" in finding and "[2, 3, 30, 31, 58, 59, 61]" in finding
    drop_in = etc / "vllm-kimi-k25-extract.service.d/layers.conf"
    drop_in.parent.mkdir()
    drop_in.write_text("ExecStart=x '{\"eagle_aux_hidden_state_layer_ids\": [2, 3, 30, 31, \\\n 58, 59, 61]}'\n")
    assert list(extract_unit.findings(kimi)) == []
    drop_in.unlink()
    kimi.servers.extract.kind = "command"
    assert list(extract_unit.findings(kimi)) == []


def test_expandable_segments_beside_the_connector_are_found_in_the_units_environment_file(tmp_path, monkeypatch):
    monkeypatch.setattr(unit_file, "UNIT_FOLDERS", (tmp_path,))
    (tmp_path / "kimi.env").write_text("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n")
    unit = tmp_path / "vllm-kimi-k25-extract.service"
    unit.write_text(f"[Service]\nEnvironmentFile=-{tmp_path}/kimi.env\nExecStart=/usr/bin/python3 -m x\n")
    kimi = config.load(config.ROOT / "configs/kimi_k25.yaml")
    [finding] = extract_unit.environment(kimi)
    assert "vllm-kimi-k25-extract or its EnvironmentFile sets PYTORCH_CUDA_ALLOC_CONF=expandable_segm" in finding
    (tmp_path / "kimi.env").write_text("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False\n")
    assert list(extract_unit.environment(kimi)) == []
