"""The environment of processes that run others' code or read others' files: without what opens doors.

Ray's ports stand open behind its token alone, and keys of attached engines, trackers and hubs are in the environment.
"""

from __future__ import annotations

from collections.abc import Mapping

_SECRET_WORDS = frozenset(
    {"KEY", "APIKEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "PGPASSWORD", "CREDENTIAL", "CREDENTIALS"}
)


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Leave out Ray's authentication, and whatever its name says is a key, token, secret or password."""
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith("RAY_AUTH_") and not _SECRET_WORDS & set(name.upper().split("_"))
    }
