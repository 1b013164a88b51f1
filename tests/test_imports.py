"""Rooms by role: each package says what it may import, imports go one way, and looking loads no torch."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "isthmus"

# A package may import those before it, and the small modules at the root that belong to everybody.
ROOT = ("crowd", "disk", "errors", "files", "gpu", "memory", "printing", "reading")
ORDER = (
    "config", "layout", "planner", "runlog", "store", "data", "model", "subspace", "sparse", "outer",
    "replica", "protocol", "page", "simulator", "runtime", "loop", "doctor", "export", "api", "cli",
)  # fmt: skip
STANDARD_LIBRARY_ONLY = ("config", "layout", "planner")


def imports_of(path: Path) -> set[str]:
    """Names of isthmus' packages and root modules, and of other packages, that a file imports anywhere."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            parts = node.module.split(".")
            if parts == ["isthmus"]:
                found |= {f"isthmus.{name.name}" for name in node.names if not name.name.startswith("__")}
            else:
                found.add(".".join(parts[:2]) if parts[0] == "isthmus" else parts[0])
        elif isinstance(node, ast.Import):
            for name in node.names:
                parts = name.name.split(".")
                found.add(".".join(parts[:2]) if parts[0] == "isthmus" else parts[0])
    return found


def imports_of_package(name: str) -> set[str]:
    return set().union(*(imports_of(path) for path in (PACKAGE / name).glob("*.py")))


def stated(name: str) -> set[str]:
    """The packages that a package's docstring says it may import."""
    text = " ".join(
        (ast.get_docstring(ast.parse((PACKAGE / name / "__init__.py").read_text())) or "").split()
    )
    found = re.search(r"May import ([a-z, ]+?)(?:[;.:]|$)", text)
    assert found, f"{name}/__init__.py does not say what it may import"
    return set(re.findall(r"[a-z]+", found.group(1))) - {"and", "nothing", "else", "all", "packages"}


def test_every_package_has_its_place_in_the_order():
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} == set(ORDER)
    assert {path.stem for path in PACKAGE.glob("*.py")} == {*ROOT, "__init__", "__main__", "hf", "worker"}


@pytest.mark.parametrize("name", ORDER)
def test_imports_go_one_way_and_are_those_that_the_package_states(name):
    ours = {full.split(".")[1] for full in imports_of_package(name) if full.startswith("isthmus.")}
    ours -= {name, *ROOT}
    assert ours <= set(ORDER[: ORDER.index(name)]), "imports a package that comes later"
    if name != "cli":  # which may import all of them
        assert ours <= stated(name), "imports a package that its docstring does not name"
        assert stated(name) <= set(ORDER[: ORDER.index(name)])


@pytest.mark.parametrize("name", STANDARD_LIBRARY_ONLY)
def test_arithmetic_needs_the_standard_library_only(name):
    others = {full for full in imports_of_package(name) if not full.startswith("isthmus")}
    assert others <= set(sys.stdlib_module_names)


@pytest.mark.parametrize(
    "name", ["isthmus.planner.plan", "isthmus.runlog", "isthmus.page.state", "isthmus.cli.main"]
)
def test_looking_and_planning_load_no_torch(name):
    code = f"import sys, {name}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


# By file, the private modules of torch that it may name, and why.
PRIVATE_TORCH = {
    "runtime/worker.py": {"torch._dynamo", "torch._inductor.compile_fx"},  # loaded early, to save seconds
}


def private_torch(path: Path) -> set[str]:
    """Names below `torch` with a part that begins with one underscore."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            names.add(ast.unparse(node))
    private = re.compile(r"torch\.(.*\.)?_[a-z]")
    return {name for name in names if private.match(name)}


def test_no_private_name_of_torch_is_used_but_those_that_are_listed():
    found = {str(path.relative_to(PACKAGE)): private_torch(path) for path in PACKAGE.rglob("*.py")}
    assert {name: names for name, names in found.items() if names} == PRIVATE_TORCH
