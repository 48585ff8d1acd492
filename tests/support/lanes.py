"""How pytest-xdist deals tests out here: a file to a worker, and the e2e tests to one.

They share one Ray, one Serve and two engines, and what is destructive ends those last; a second worker would start them
all again, and not know of what the first has killed. A file that has a cluster of its own goes to who has time for it.
"""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling

SHARED = "tests/e2e"
APART = ("tests/e2e/test_many_machines.py",)


class Lanes(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """Tests of one scope go to one worker, in the order in which they were collected."""

    def _split_scope(self, nodeid: str) -> str:
        file = str(super()._split_scope(nodeid))
        return SHARED if file.startswith(f"{SHARED}/") and file not in APART else file
