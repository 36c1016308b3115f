"""The layout of the package: who may import whom. Read from the source, imports inside functions included."""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from drafter.config import ROOT

# The core, then what every stage uses, then the stages in the order of their numbers, then what runs them.
# A module imports its own package and those before it.
ORDER = ("", "target", "serve", "generate", "extract", "train", "export", "acceptance", "pipeline")
CORE = {
    "__init__", "checked", "cli", "config", "contracts", "disk", "errors", "files", "gpu", "intervals",
    "locks", "model_folder", "process", "progress", "run_files", "run_locks", "signals", "stage", "text",
    "torchrun_env", "user_files", "versions",
}  # fmt: skip


@cache
def modules() -> dict[str, Path]:
    """Name below `drafter` -> file. A package goes by its own name."""
    found = {}
    for path in sorted((ROOT / "drafter").rglob("*.py")):
        parts = path.relative_to(ROOT / "drafter").with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of every import of a file; the name is empty for `import module`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (("." * node.level + (node.module or ""), alias.name) for alias in node.names)


@cache
def arrows() -> dict[str, set[str]]:
    """Module below `drafter` -> the modules of ours that it imports."""
    found: dict[str, set[str]] = {name: set() for name in modules()}
    for name, path in modules().items():
        for module, what in imports(path):
            if module.partition(".")[0] != "drafter":
                continue
            below = module.partition(".")[2]
            part = f"{below}.{what}" if below else what
            found[name].add(part if part in modules() else below)
    return found


def package(name: str) -> str:
    """ "" for the core."""
    first = name.partition(".")[0]
    return first if first in ORDER else ""


def test_every_module_lies_in_a_known_package():
    inside = {name for name in modules() if "." not in name and package(name) == ""}
    assert {name or "__init__" for name in inside} == CORE
    assert {package(name) for name in modules()} == set(ORDER)


def test_imports_go_one_way():
    against = {
        (name, other)
        for name, others in arrows().items()
        for other in others
        if ORDER.index(package(other)) > ORDER.index(package(name))
    }
    assert not against


def test_no_module_imports_itself_by_way_of_others():
    try:
        TopologicalSorter(arrows()).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_imports_name_their_module_in_full():
    assert not [name for name, path in modules().items() for module, _ in imports(path) if module.startswith(".")]


@pytest.mark.parametrize(
    ("library", "allowed"), [("vllm", {"extract.connector"}), ("speculators", {"train.draft_model"})]
)
def test_a_heavy_library_is_imported_in_one_place(library, allowed):
    found = {
        name for name, path in modules().items() for module, _ in imports(path) if module.split(".")[0] == library
    }
    assert found == allowed


def test_the_package_imports_no_script_test_or_benchmark():
    scripts = {path.stem for path in ROOT.glob("*.py")}
    for name, path in modules().items():
        for module, _ in imports(path):
            assert module.split(".")[0] not in scripts | {"tests", "benchmarks"}, f"{name} imports {module}"


def test_no_module_hides_one_of_python():
    """A reader, and a script that is run from its folder, take `statistics` for Python's."""
    assert not [name for name in modules() if name.split(".")[-1] in sys.stdlib_module_names]
