"""How property tests run: the same examples each time, and no deadline that a busy machine could miss."""

from __future__ import annotations

from hypothesis import settings

steady = settings(max_examples=60, deadline=None, derandomize=True, database=None)
