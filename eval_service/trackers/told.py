"""What a worker is given to tell: light, since a worker imports it beside its library and nothing else of ours."""

from __future__ import annotations

from typing import Any

# `id` (the same whenever it is repeated), `event`, `run`, `at`, `data`; of a point also `point` (a PointView),
# `scalars` (its keys in a tracker, with their values) and `directory` (the run's).
Item = dict[str, Any]


class Refusal(Exception):
    """The receiver will never take an item; the others may go on."""
