"""The token that a caller brings: given, or from the environment; it is in no message of an error."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from eval_service.contract.errors import ConfigError

VARIABLE = "EVALFLEET_TOKEN"
FILE_VARIABLE = "EVALFLEET_TOKEN_FILE"
LEAST_CHARACTERS = 20


def check_token(token: str, field: str) -> str:
    """The token, if it can be one.

    Raises:
        ConfigError: it is short, or holds what can't stand in a header; it is not shown.
    """
    if len(token) < LEAST_CHARACTERS:
        raise ConfigError(
            f"a token has {LEAST_CHARACTERS} characters or more", field=field, hint="make one: openssl rand -hex 32"
        )
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError("a token is of printable ASCII without spaces", field=field, hint="openssl rand -hex 32")
    return token


def read_token_lines(path: Path, field: str) -> tuple[str, ...]:
    """A token file's lines, without blank ones and comments.

    Raises:
        ConfigError: it can't be read, or holds none.
    """
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, ValueError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else "it is no text"
        raise ConfigError(f"{path} can't be read: {why}", field=field, hint="one token a line") from exc
    found = tuple(line for line in lines if line and not line.startswith("#"))
    if not found:
        raise ConfigError(f"{path} holds no token", field=field, hint="one token a line")
    return found


def given_token(environment: Mapping[str, str] | None = None) -> str | None:
    """What the environment gives a client: `EVALFLEET_TOKEN`, else the first line of `EVALFLEET_TOKEN_FILE`.

    Raises:
        ConfigError: the file can't be read.
    """
    environment = os.environ if environment is None else environment
    if token := environment.get(VARIABLE):
        return token
    if path := environment.get(FILE_VARIABLE):
        return read_token_lines(Path(path), FILE_VARIABLE)[0]
    return None


def bearer(token: str | None) -> dict[str, str]:
    """The headers that bring it."""
    return {"authorization": f"Bearer {check_token(token, 'token')}"} if token else {}
