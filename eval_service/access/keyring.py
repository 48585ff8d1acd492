"""The tokens that a service knows, as SHA-256 of each: what is kept, and travels to where parts run, opens nothing.

A token is compared with all of them, each in constant time. They are long and random, so a fast hash is enough.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from eval_service.access.config import Scope, TokenConfig
from eval_service.contract.errors import ConfigError
from eval_service.contract.token import check_token, read_token_lines

_MOST_BYTES = 512
HASHED = "sha256:"  # what stands before a hash in a token's place
_HASHED = re.compile(rf"{HASHED}([0-9a-f]{{64}})")


@dataclass(frozen=True, slots=True)
class Token:
    """One name's; while it is being changed there are several."""

    name: str
    scope: Scope
    digests: tuple[bytes, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Keyring:
    """All of a service's tokens."""

    tokens: tuple[Token, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.tokens)

    def holder(self, presented: bytes) -> Token | None:
        """Whose token it is."""
        if len(presented) > _MOST_BYTES:
            return None
        digest, found = digest_of(presented), None
        for token in self.tokens:
            for known in token.digests:
                if hmac.compare_digest(known, digest):
                    found = token
        return found

    def reaching(self, scope: Scope) -> tuple[bytes, ...]:
        """The digests of those whose scope reaches so far."""
        return tuple(digest for token in self.tokens if token.scope.reaches(scope) for digest in token.digests)


@dataclass(frozen=True, slots=True)
class Access:
    """Who may ask for what.

    Args:
        public_read: what only reads needs no token.
        local: it listens on loopback alone, so that no name but those of loopback leads to it.
    """

    keyring: Keyring = field(default_factory=Keyring)
    public_read: bool = False
    local: bool = False
    requests_per_s: float = 0.0


def digest_of(token: bytes) -> bytes:
    """What is kept of a token."""
    return hashlib.sha256(token).digest()


def plain_tokens(name: str, config: TokenConfig, environment: Mapping[str, str]) -> tuple[str, ...]:
    """What a variable or a file holds: tokens, or `sha256:` and the hash of one.

    Raises:
        ConfigError: it is not there, or is none; it is not shown.
    """
    key = f"tokens.{name}"
    if config.token_file is not None:
        return read_token_lines(config.token_file, f"{key}.token_file")
    assert config.token_env is not None
    if not (token := environment.get(config.token_env)):
        raise ConfigError(
            f"the environment variable {config.token_env} is not set",
            field=f"{key}.token_env",
            hint="it is to hold the token; fleet.toml names the variable only",
        )
    return (token,)


def load_keyring(configs: Mapping[str, TokenConfig], environment: Mapping[str, str]) -> Keyring:
    """Read and hash all tokens.

    Raises:
        ConfigError: one is not there, is none, or is named twice.
    """
    tokens: list[Token] = []
    seen: dict[bytes, str] = {}
    for name, config in configs.items():
        digests = tuple(_digest(text, f"tokens.{name}") for text in plain_tokens(name, config, environment))
        for digest in digests:
            if seen.setdefault(digest, name) != name:
                raise ConfigError(
                    f"it is also the token of {seen[digest]!r}", field=f"tokens.{name}", hint="make another"
                )
        tokens.append(Token(name, config.scope, digests))
    return Keyring(tuple(tokens))


def _digest(text: str, field: str) -> bytes:
    if hashed := _HASHED.fullmatch(text):
        return bytes.fromhex(hashed[1])
    if text.lower().startswith(HASHED):  # taken as a token, it would let in whoever has read the file
        hint = "sha256: and 64 digits of 0-9 a-f: printf %s TOKEN | sha256sum"
        raise ConfigError("what follows sha256: is no hash", field=field, hint=hint)
    return digest_of(check_token(text, field).encode())
