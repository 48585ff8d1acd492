"""Debian's Chromium, headless, driven by playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, sync_playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_START_MS = 90_000
_QUIET = ("--no-sandbox", "--disable-background-networking", "--disable-component-update", "--disable-gpu")


def find_chromium() -> str:
    """Where Chromium is.

    Raises:
        FileNotFoundError: it is not installed.
    """
    found = next((path for name in _NAMES if (path := shutil.which(name))), None)
    if found is None:
        raise FileNotFoundError(
            "there is no Chromium: scripts/browser installs Debian's, as root; or install it yourself"
        )
    return found


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser, for as long as it is needed."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=_QUIET, timeout=_START_MS)
        try:
            yield browser
        finally:
            browser.close()
