"""`scripts/docs [--check]`: write the pages, or tell which are not as the code has it (exit code 1)."""

from __future__ import annotations

import sys
from pathlib import Path

from scripts.reference.pages import pages

REFERENCE = Path(__file__).resolve().parents[2] / "docs/reference"


def main(arguments: list[str]) -> int:
    """Write or compare; returns the exit code."""
    made = pages()
    if "--check" in arguments:
        there = {path.name: path.read_text() for path in REFERENCE.glob("*")}
        stale = sorted(name for name in made.keys() | there.keys() if made.get(name) != there.get(name))
        print("\n".join(f"docs/reference/{name} is not as the code has it; run scripts/docs" for name in stale) or "ok")
        return int(bool(stale))
    REFERENCE.mkdir(parents=True, exist_ok=True)
    for name, text in made.items():
        (REFERENCE / name).write_text(text)
        print(f"docs/reference/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
