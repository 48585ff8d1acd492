"""The rules of the house: who may import whom, how long a function or file may be, and no cycles."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("trainer", "eval_service", "router")
STANDINS = ROOT / "eval_service" / "engine" / "standins"  # bodies of other people's modules, not ours to shape
MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 420
CONTRACT = "eval_service.contract"
CONTRACT_NEEDS = {"pydantic", "httpx", "xxhash", "safetensors"}
HEAVY = ("torch", "ray", "sglang", "fastapi", "starlette", "numpy", "aiohttp", "sqlalchemy", "megatron", "transformers")


def sources() -> list[Path]:
    found = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return [path for path in found if not path.is_relative_to(STANDINS)]


def trees() -> Iterator[tuple[str, ast.Module]]:
    for path in sources():
        yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def imported(tree: ast.AST, package: str) -> Iterator[str]:
    """Absolute names of all modules that a file imports, wherever in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] + "." if node.level else ""
            module = base + (node.module or "")
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def imports_of(package: str) -> Iterator[tuple[str, str]]:
    for name, tree in trees():
        module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        if module == package or module.startswith(package + "."):
            parent = module if name.endswith("__init__.py") else module.rpartition(".")[0]
            yield from ((name, target) for target in imported(tree, parent))


def within(target: str, package: str) -> bool:
    return target == package or target.startswith(package + ".")


@cache
def graph() -> grimp.ImportGraph:
    return grimp.build_graph(*PACKAGES, cache_dir=None)


def test_the_import_rules_of_pyproject_hold() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_the_trainer_imports_nothing_of_ours_but_the_contract() -> None:
    strays = [
        (name, target)
        for name, target in imports_of("trainer")
        if within(target, "router") or (within(target, "eval_service") and not within(target, CONTRACT))
        if target not in ("eval_service",)
    ]
    assert strays == []


def test_the_router_imports_nothing_else_of_ours() -> None:
    strays = [(name, t) for name, t in imports_of("router") if within(t, "eval_service") or within(t, "trainer")]
    assert strays == []


def test_the_service_never_imports_the_trainer() -> None:
    assert [(name, target) for name, target in imports_of("eval_service") if within(target, "trainer")] == []


def test_the_contract_imports_four_libraries_and_nothing_else() -> None:
    allowed = CONTRACT_NEEDS | set(sys.stdlib_module_names)
    strays = [
        (name, target)
        for name, target in imports_of(CONTRACT)
        if target.partition(".")[0] not in allowed and not within(target, CONTRACT)
    ]
    assert strays == []


def test_importing_the_contract_loads_none_of_the_heavy_libraries() -> None:
    """What the libraries that it needs pull in themselves counts too."""
    modules = sorted(f"{CONTRACT}.{path.stem}" for path in (ROOT / "eval_service/contract").glob("[a-z]*.py"))
    code = (
        f"import importlib, sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        f"[importlib.import_module(name) for name in {modules}]\n"
        f"loaded = {{name.partition('.')[0] for name in sys.modules}}\n"
        f"print(sorted(loaded & set({HEAVY})))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"


def test_admission_and_gc_load_no_framework() -> None:
    """So that the doctor runs where the trainer's author is."""
    frameworks = {"torch", "ray", "sglang", "fastapi", "sqlalchemy", "transformers", "safetensors.torch"}
    for package in ("eval_service.admission", "eval_service.gc", "eval_service.intake"):
        assert [(n, t) for n, t in imports_of(package) if t.partition(".")[0] in frameworks] == []


def test_no_two_of_our_modules_import_each_other_in_a_circle() -> None:
    edges = {
        module: {target for target in graph().find_modules_directly_imported_by(module) if target in graph().modules}
        for module in graph().modules
    }
    while leaves := {module for module, targets in edges.items() if not targets}:
        edges = {module: targets - leaves for module, targets in edges.items() if module not in leaves}
    assert edges == {}, "these modules are in a cycle, or import one"


def test_no_function_is_longer_than_a_screen() -> None:
    long = [
        f"{name}:{node.lineno} {node.name} ({node.end_lineno - node.lineno + 1} lines)"
        for name, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert long == []


def test_no_file_is_longer_than_can_be_read_in_one_sitting() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources()}
    assert {name: length for name, length in lengths.items() if length > MAX_FILE_LINES} == {}


def test_every_module_says_what_it_is_and_none_is_called_utils() -> None:
    nameless = [name for name, tree in trees() if ast.get_docstring(tree) is None]
    assert nameless == []
    parts = {part for path in sources() for part in path.relative_to(ROOT).with_suffix("").parts}
    assert parts.isdisjoint({"utils", "helpers", "misc", "common"})


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_is_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()
