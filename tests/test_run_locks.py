"""Who may work on a run: real scripts and stages beside pipelines and other stages that are at work."""

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from drafter import config, locks, run_locks
from drafter.errors import ConfigError
from drafter.extract import worklist
from tests.conftest import CPU_CONFIG
from tests.holding import held

SCRIPTS = {
    "01b_synthetic": "01b_generate_synthetic.py",
    "02_hidden_states": "02_extract_hidden_states.py",
    "04_train": "04_train.py",
    "05_export": "05_export_checkpoint.py",
    "06_acceptance": "06_measure_acceptance.py",
}
# A stage that locks as the real one does, says so, and works until its input ends.
STAGE = """
import sys
from functools import partial
from drafter import stage

def body(this):
    own = None
    if this.name == "02_hidden_states":
        from drafter.extract import worklist

        own = partial(worklist.locked_share, this.folder, worklist.Share())
    this.lock(*sys.argv[2].split(), own=own)
    this.begin(["run.seed"])
    print("locked", file=sys.stderr, flush=True)
    sys.stdin.read()
    this.counts.total = this.counts.done = 1
    return this.finish()

sys.exit(stage.run_stage(sys.argv[1], body, stage.parser("test"), sys.argv[3:]))
"""
READS = {
    "01b_synthetic": "",
    "02_hidden_states": "01b_synthetic",
    "04_train": "02_hidden_states",
    "05_export": "04_train 02_hidden_states",
    "06_acceptance": "05_export 01b_synthetic",
}


LEFT = ("model.4242.part", "config.yaml.4242.part", "prompts.jsonl.4242.part", "manifest.json.4242.part")


@pytest.fixture
def run(tmp_path) -> config.Config:
    """A run whose stages have folders with content."""
    found = config.load(CPU_CONFIG, [f"run.dir={tmp_path}"])
    for name in config.STAGES:
        folder = found.run_dir / name
        folder.mkdir(parents=True)
        (folder / locks.LOCK).touch()
        (folder / "manifest.json").write_text(json.dumps({"stage": name, "status": "running", "question": {}}))
        (folder / "data").write_text(name)
    return found


def snapshot(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != locks.LOCK)
    return {str(path): path.read_bytes() for path in files}


def line_of(name: str, run_config: config.Config, *overrides: str) -> list[str]:
    sets = [part for one in (f"run.dir={run_config.run.dir}", *overrides) for part in ("--set", one)]
    return [sys.executable, "-c", STAGE, name, READS[name], *sets]


@contextlib.contextmanager
def at_work(name: str, run_config: config.Config, *overrides: str) -> Iterator[subprocess.Popen]:
    """A stage by hand, at work as long as the block lasts; it ends well."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(line_of(name, run_config, *overrides), cwd=config.ROOT, **pipes) as process:
        said = process.stderr.readline()
        assert said == "locked\n", said
        yield process
        process.stdin.close()
    assert process.returncode == 0


def call(line: list[str], **options) -> tuple[int, str]:
    done = subprocess.run(
        line, cwd=config.ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120, **options
    )
    return done.returncode, done.stderr.strip()


def script(name: str, run_config: config.Config, *arguments: str) -> list[str]:
    return [sys.executable, SCRIPTS[name], "--set", f"run.dir={run_config.run.dir}", *arguments]


@pytest.mark.parametrize("name", config.STAGES)
def test_no_script_runs_manually_beside_its_pipeline(run, name):
    """Seam U2: 02 took the states from under 04, 01b wrote `failed` into the live manifest."""
    with held("working", run.run_dir, run_locks.PIPELINE) as pipeline:
        before = snapshot(run.run_dir)
        code, said = call(script(name, run))
        assert snapshot(run.run_dir) == before
    who = f"run_pipeline.sh, process {pipeline.pid} on {socket.gethostname()}"
    assert code == 2
    assert said == (
        f"{name}: {name} cannot run manually now: another process is working in {run.run_dir} ({who}); "
        "wait for it or stop it"
    )


def test_a_stage_that_the_pipeline_starts_runs_however_deep_below_it(run):
    """Seam U2: known by descent from the lock's holder, which no environment can claim."""
    child = shlex.join(line_of("04_train", run))
    code = f"""
        import subprocess, sys
        from pathlib import Path
        from drafter import locks
        with locks.locked(Path({str(run.run_dir)!r}), {run_locks.PIPELINE!r}):
            sys.exit(subprocess.run(["/bin/sh", "-c", {child + "; exit $?"!r}], stdin=subprocess.DEVNULL).returncode)
        """
    code, said = call([sys.executable, "-c", "\n".join(line[8:] for line in code.splitlines())])
    assert (code, "locked" in said) == (0, True), said


@pytest.mark.parametrize("name", config.STAGES)
def test_two_calls_of_one_stage_never_work_at_once(run, name):
    """Seam M1, Seam K1: 05 and 06 took no lock. Seam K5: what looks left behind is what the first is writing."""
    with at_work(name, run) as first:
        (run.run_dir / name / LEFT[0]).write_text("of the call at work")
        before = snapshot(run.run_dir)
        code, said = call(line_of(name, run))
        assert snapshot(run.run_dir) == before
    assert code == 2 and len(said.splitlines()) == 1
    assert "another process is working in" in said and f"({name}, process {first.pid} on" in said


@pytest.mark.parametrize("name", ["05_export", "06_acceptance"])
def test_the_second_of_two_measurements_or_exports_is_refused_and_the_first_server_untouched(run, name):
    """Seam K1: the real scripts; the second stopped the first one's server and replaced the record of it."""
    record = run.run_dir / "servers/evaluate.json"
    record.parent.mkdir()
    with at_work(name, run) as first, held("working", run.run_dir / "unrelated") as server:
        record.write_text(json.dumps({"pid": server.pid}))
        before = snapshot(run.run_dir)
        code, said = call(script(name, run, *(["--smoke"] if name == "05_export" else [])))
        assert snapshot(run.run_dir) == before and server.poll() is None
    assert code == 2
    assert said.endswith(
        f"another process is working in {run.run_dir / name} ({name}, process {first.pid} on "
        f"{socket.gethostname()}); wait for it or stop it"
    )


@pytest.mark.parametrize(
    ("name", "reader", "taken"),
    [(upstream, name, False) for name in config.STAGES for upstream in READS[name].split()]
    + [("02_hidden_states", "04_train", True)],
)
def test_no_stage_works_in_a_folder_that_another_reads(run, name, reader, taken):
    """Seam U2, Seam M1: of the same run, or of one that takes the folder."""
    overrides = ["run.name=other", f"run.take={{{name}: {run.run_dir / name}}}"] if taken else []
    with at_work(reader, run, *overrides) as other:
        before = snapshot(run.run_dir)
        code, said = call(line_of(name, run))
        assert snapshot(run.run_dir) == before
    folder, who = run.run_dir / name, f"({reader}, process {other.pid} on {socket.gethostname()})"
    assert code == 2
    assert said == f"{name}: another process is reading {folder} {who}; wait for it or stop it"


@pytest.mark.parametrize(
    ("name", "upstream"), [(name, up) for name in ("05_export", "06_acceptance") for up in READS[name].split()]
)
def test_no_stage_reads_a_folder_in_which_another_works(run, name, upstream):
    """Seam M1: the real scripts; what they read would change under them."""
    with at_work(upstream, run) as other:
        before = snapshot(run.run_dir / name)
        code, said = call(script(name, run))
        assert snapshot(run.run_dir / name) == before
    assert code == 2
    assert f"({upstream}, process {other.pid} on {socket.gethostname()}); wait for it or stop it" in said


@pytest.mark.parametrize("name", ["02_hidden_states", "06_acceptance"])
def test_a_pipeline_does_not_start_beside_a_manual_stage(run, name):
    """Seam U2: it would end the stage's server, and fail hours later where it meets the stage's lock."""
    with at_work(name, run) as stage:
        with pytest.raises(ConfigError, match=rf"\({name}, process {stage.pid} on .*; wait for it or stop it"):
            run_locks.pipeline(run).__enter__()
        assert not locks.in_use(run.run_dir)


def test_a_pipeline_waits_for_a_stage_of_a_killed_one_to_end(run, monkeypatch):
    """Seam U2: that stage has been asked to stop, and saves; it is nobody's work by hand."""
    line = line_of("04_train", run)
    code = f"""
import subprocess, sys
from pathlib import Path
from drafter import locks
with locks.locked(Path({str(run.run_dir)!r}), {run_locks.PIPELINE!r}):
    stage = subprocess.Popen({line!r})
    print(stage.pid, flush=True)
    stage.wait()
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], cwd=config.ROOT, **pipes) as killed:
        stage = int(killed.stdout.readline())
        assert killed.stderr.readline() == "locked\n"
        killed.kill()
        killed.wait()
        waited = []

        def sleep(_seconds):
            if not waited:
                os.kill(stage, signal.SIGTERM)
            waited.append(1)

        monkeypatch.setattr(run_locks.time, "sleep", sleep)
        with run_locks.pipeline(run):
            assert waited and not locks.in_use(run.run_dir / "04_train")
    assert json.loads((run.run_dir / "04_train/manifest.json").read_text())["status"] == "interrupted"


def test_a_pipeline_holds_what_it_takes_from_another_run(run):
    """Seam H2: nobody works in it or frees it between two stages that read it."""
    taken = run.run_dir / "02_hidden_states"
    other = config.load(
        CPU_CONFIG, [f"run.dir={run.run.dir}", "run.name=other", f"run.take={{02_hidden_states: {taken}}}"]
    )
    with run_locks.pipeline(other), pytest.raises(ConfigError, match="another process is reading"):
        worklist.locked_share(taken, worklist.Share()).__enter__()
    with pytest.raises(ConfigError), held("working", taken), run_locks.pipeline(other):
        pass


@pytest.mark.parametrize("name", config.STAGES)
def test_every_stage_removes_what_its_own_killed_calls_left(run, name):
    """Seam K5: 05 never did, nor 01b, nor 06."""
    for left in LEFT:
        (run.run_dir / name / left).write_text("half")
    neighbour = next(run.run_dir / other for other in config.STAGES if other != name) / LEFT[0]
    neighbour.write_text("of a stage that may be at work")
    with at_work(name, run):
        assert [path.name for path in (run.run_dir / name).iterdir() if path.suffix == ".part"] == []
        assert neighbour.exists()


def test_a_share_removes_nothing_beside_the_rows_while_another_share_works(run):
    """Seam K5"""
    folder = run.run_dir / "02_hidden_states"
    left = folder / "manifest.json.4242.part"
    left.write_text("of another host, perhaps")
    with held("working", folder / locks.SHARES / "1of2"), worklist.locked_share(folder, worklist.Share(2, 2)):
        assert left.exists()
    with worklist.locked_share(folder, worklist.Share(2, 2)):
        assert not left.exists()


def test_the_pipeline_removes_what_killed_calls_left_in_the_run(run):
    """Seam K5"""
    (run.run_dir / "servers").mkdir()
    left = [run.run_dir / "pipeline.json.4242.part", run.run_dir / "servers/evaluate.json.4242.part"]
    for path in left:
        path.write_text("{")
    with run_locks.pipeline(run):
        assert not any(path.exists() for path in left)


def test_a_failure_is_written_before_the_next_call_can_begin(run):
    """Seam M1: a manifest written after the lock was given back could overwrite the next call's."""
    code = STAGE.replace("sys.stdin.read()", "raise ValueError").replace(
        "sys.exit(",
        """from drafter import locks
writing = stage._failure
def failure(this, *rest):
    print("in use", locks.in_use(this.folder), file=sys.stderr)
    return writing(this, *rest)
stage._failure = failure
sys.exit(""",
    )
    line = line_of("06_acceptance", run)
    line[2] = code
    code, said = call(line)
    assert code == 1 and "in use True" in said
    assert not locks.in_use(run.run_dir / "06_acceptance")


@pytest.fixture(scope="session")
def noflock(tmp_path_factory) -> Path:
    """A library under which flock fails as on a file system without locks."""
    if not (compiler := shutil.which("gcc") or shutil.which("cc")):
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("noflock")
    source = "#include <errno.h>\nint flock(int fd, int op) { (void)fd; (void)op; errno = ENOLCK; return -1; }\n"
    (folder / "noflock.c").write_text(source)
    library = folder / "noflock.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, folder / "noflock.c"], check=True, timeout=60)
    return library


@pytest.mark.parametrize("name", config.STAGES)
def test_a_file_system_without_locks_ends_every_stage_in_one_line(run, noflock, name):
    """Seam B05: it was "our bug: OSError(37, 'No locks available')"."""
    with locks.locked(run.run_dir):
        pass
    code, said = call(script(name, run), env=os.environ | {"LD_PRELOAD": str(noflock)})
    assert code == 2
    assert said == (
        f"{name}: the file system of {run.run_dir} has no locks (No locks available): mount it with locks, or set "
        "run.dir to a folder on another one"
    )


@pytest.mark.parametrize("name", config.STAGES)
def test_a_dry_run_names_a_file_system_without_locks(tmp_path, noflock, name, model):
    """Seam B05: a finding of every stage's plan, before the run has a folder; nothing is left."""
    line = [sys.executable, SCRIPTS[name], "--set", f"run.dir={tmp_path}", "--dry-run"]
    done = subprocess.run(
        line, cwd=config.ROOT, capture_output=True, text=True, env=os.environ | {"LD_PRELOAD": str(noflock)}
    )
    assert done.returncode == 0, done.stderr
    findings = json.loads(done.stdout)["findings"]
    assert any(f"the file system of {tmp_path} has no locks" in finding for finding in findings)
    assert list(tmp_path.iterdir()) == []
