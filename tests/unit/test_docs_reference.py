"""docs/reference/ is what the code says today."""

from __future__ import annotations

import re

import pytest

from scripts.reference.__main__ import REFERENCE
from scripts.reference.pages import pages

PAGES = pages()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_of_the_reference_is_as_the_code_has_it(name: str) -> None:
    assert (REFERENCE / name).read_text() == PAGES[name], "run scripts/docs"


def test_there_is_no_page_that_nothing_makes() -> None:
    assert {path.name for path in REFERENCE.iterdir()} == set(PAGES)


@pytest.mark.parametrize("name", PAGES)
def test_a_link_within_a_page_leads_to_a_heading_of_it(name: str) -> None:
    headings = re.findall(r"^#+ (.+)$", PAGES[name], re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]+)\)", PAGES[name])) <= anchors
