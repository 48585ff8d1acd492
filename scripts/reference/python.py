"""The public classes and functions that a trainer's author uses, read as text: nothing of it is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# In the order in which somebody would want them.
MODULES = (
    "eval_service.contract.client",
    "eval_service.contract.errors",
    "eval_service.contract.states",
    "eval_service.contract.snapshot",
    "eval_service.contract.manifest",
    "eval_service.contract.canary",
    "eval_service.contract.outbox",
    "eval_service.contract.names",
    "eval_service.functions",
    "trainer.integrations.huggingface",
    "trainer.integrations.lightning",
    "trainer.integrations.evaluations",
    "trainer.integrations.settings",
    "trainer.integrations.model",
    "trainer.weights",
)
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def python_page() -> str:
    """Signatures and docstrings; the wire types are with the API."""
    parts = [
        "# Python\n\n`eval_service.contract` is what any trainer may install alone; `trainer.integrations` are the "
        "callbacks. The types of requests and answers (`eval_service.contract.wire`, `results`) are in "
        "[the API](api.md#types), the keys of callbacks in [configuration](../configuration.md#eval)."
    ]
    for module in MODULES:
        tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())
        parts += [f"## `{module}`", _text(tree), *_members(tree.body)]
    return "\n\n".join(filter(None, parts))


def _members(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            bases = ", ".join(map(ast.unparse, node.bases))
            yield f"### `class {node.name}{f'({bases})' if bases else ''}`"
            yield _text(node)
            yield from _inside(node)
        elif isinstance(node, _Function) and not node.name.startswith("_"):
            yield f"### `{_signature(node)}`"
            yield _text(node)


def _inside(owner: ast.ClassDef) -> Iterator[str]:
    """Values of an enum and fields of a record as one block, then the methods."""
    values = [
        ast.unparse(node)
        for node in owner.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and not ast.unparse(node).startswith("_")
    ]
    if values:
        yield "```\n" + "\n".join(values) + "\n```"
    for node in owner.body:
        # What a host calls (`on_...`) is nobody else's to call.
        if isinstance(node, _Function) and (node.name == "__init__" or not node.name.startswith(("_", "on_"))):
            yield f"#### `{_signature(node)}`"
            yield _text(node)


def _signature(node: _Function) -> str:
    mark = "property " if any(ast.unparse(one) == "property" for one in node.decorator_list) else ""
    if mark:
        return f"{mark}{node.name} -> {ast.unparse(node.returns) if node.returns else 'Any'}"
    arguments = ast.unparse(node.args).removeprefix("self, ").removeprefix("self")
    returns = "" if node.returns is None or node.name == "__init__" else f" -> {ast.unparse(node.returns)}"
    return f"{node.name}({arguments}){returns}"


def _text(node: ast.Module | ast.ClassDef | _Function) -> str:
    """A docstring; its sections and drawings keep their lines."""
    return "\n\n".join(map(_paragraph, (ast.get_docstring(node) or "").split("\n\n")))


def _paragraph(text: str) -> str:
    drawn = any(line.startswith((" ", "├", "└")) for line in text.splitlines())
    return f"```\n{text}\n```" if drawn else text
