"""A suites file as text: TOML or YAML, parsed, with the line of each key."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from eval_service.contract.errors import ConfigError
from eval_service.suites.toml_lines import line_of as toml_line_of

YAML = (".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class Parsed:
    """A file's table, and where a dotted key of it is set: the line from 1, None if nothing of it is found."""

    table: dict[str, Any]
    line_of: Callable[[list[str]], int | None]


def parse(path: Path) -> Parsed:
    """Read the file; its suffix says which of the two it is.

    Raises:
        ConfigError: it can't be read, with the line where it goes wrong.
    """
    try:
        text = path.read_text(encoding="utf-8")
        return _yaml(path, text) if path.suffix in YAML else _toml(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, yaml.YAMLError, RecursionError) as exc:
        raise ConfigError(f"{path} can't be read: {exc}", hint="see docs/suites.md") from exc


def _toml(text: str) -> Parsed:
    return Parsed(tomllib.loads(text), lambda key: toml_line_of(text, key))


def _yaml(path: Path, text: str) -> Parsed:
    """Plain data alone; an anchor that refers to itself, or a key that is there twice, is refused."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if root is None:
        return Parsed({}, lambda key: None)
    _check_keys(path, root, frozenset())
    loaded = yaml.safe_load(text)
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: line 1: it is no mapping", hint="begin with `suites:`")
    return Parsed(loaded, lambda key: _line(root, key))


def _check_keys(path: Path, node: yaml.Node, above: frozenset[int]) -> None:
    line = node.start_mark.line + 1
    if id(node) in above:
        raise ConfigError(f"{path}: line {line}: an anchor refers to itself")
    above |= {id(node)}
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(f"{path}: line {line}: a key is no text")
            if key.value in seen:
                raise ConfigError(f"{path}: line {line}: the key is there twice", field=key.value)
            seen.add(key.value)
            _check_keys(path, value, above)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check_keys(path, item, above)


def _line(node: yaml.Node, key: list[str]) -> int | None:
    """As far as the key can be followed; None if not even its first part is there."""
    found: int | None = None
    for part in key:
        if isinstance(node, yaml.MappingNode):
            pair = next((pair for pair in node.value if pair[0].value == part), None)
            if pair is None:
                break
            found, node = pair[0].start_mark.line + 1, pair[1]
        elif isinstance(node, yaml.SequenceNode) and part.isdecimal() and int(part) < len(node.value):
            node = node.value[int(part)]
            found = node.start_mark.line + 1
        else:
            break
    return found
