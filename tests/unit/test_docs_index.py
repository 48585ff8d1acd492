"""Whoever begins at the README reaches every page, and every place within one that a link names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """What GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> list[tuple[Path, str]]:
    """The files that a page links to, with the place in each."""
    found = [target for target in LINK.findall(page.read_text()) if "://" not in target]
    parts = [target.partition("#") for target in found]
    return [((page.parent / path).resolve() if path else page, place) for path, _, place in parts]


def test_the_index_of_the_docs_leads_to_every_page() -> None:
    index = {page for page, _ in links(ROOT / "docs/README.md")}
    through = {page for hub in index if hub.name == "README.md" for page, _ in links(hub)}
    assert {page for page in ROOT.glob("docs/**/*.md") if page.name != "README.md"} - index - through == set()
    assert ROOT / "docs/README.md" in {page for page, _ in links(ROOT / "README.md")}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_link_to_a_place_in_a_page_finds_it(page: Path) -> None:
    dead = [(target.name, place) for target, place in links(page) if place and place not in anchors(target)]
    assert dead == []


def test_every_alert_has_what_to_do() -> None:
    alerts = re.findall(r"- alert: (\w+)", (ROOT / "deploy/prometheus/rules.yml").read_text())
    told = re.findall(r"^\| `(Evalfleet\w+)` \|", (ROOT / "docs/operate.md").read_text(), re.MULTILINE)
    assert sorted(told) == sorted(alerts)
