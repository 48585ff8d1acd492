"""Where in a TOML text a key is set. The parser keeps no positions, so this looks for the key's names in their order.

A key that isn't in the text (one that is missing, say) is where the nearest table or item around it begins.
"""

from __future__ import annotations

import re


def line_of(text: str, key: list[str]) -> int | None:
    """The line (from 1) of a dotted key, whose numbers count the items of arrays; None if nothing of it is found."""
    at: int | None = None
    for depth, part in enumerate(key):
        if part.isdecimal():
            found = _item(text, at or 0, key[:depth], int(part))
        else:
            found = _name(text, at or 0, part, is_leaf=depth == len(key) - 1)
        if found is None:
            break
        at = found
    return None if at is None else text.count("\n", 0, at) + 1


def _name(text: str, start: int, name: str, *, is_leaf: bool) -> int | None:
    """A name as a key, or as part of a table's header; a leaf is looked for in its own table alone."""
    pattern = re.compile(rf"""(?<![\w-])["']?({re.escape(name)})["']?\s*[=\].]""")
    found = pattern.search(text, start, _end_of_table(text, start) if is_leaf else len(text))
    return found.start(1) if found else None


def _end_of_table(text: str, start: int) -> int:
    inline = re.compile(r"""[\w-]*["']?\s*=?\s*\{""").match(text, start)
    found = re.compile(r"}" if inline else r"\n[ \t]*\[").search(text, start)
    return found.start() if found else len(text)


def _item(text: str, start: int, array: list[str], number: int) -> int | None:
    """The item of an array: its `[[header]]`, or the brace that opens it."""
    header = r"\s*\.\s*".join(rf"""["']?{re.escape(part)}["']?""" for part in array)
    tables = [found.start(1) for found in re.finditer(rf"(?m)^[ \t]*(\[\[\s*{header}\s*\]\])", text)]
    braces = [found.start() for found in re.finditer(r"\{", text[start:])]
    if tables:
        return tables[number] if number < len(tables) else None
    return start + braces[number] if number < len(braces) else None
