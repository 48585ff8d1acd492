"""What every part of the application is handed, checked before Ray is imported."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from eval_service.access.config import Scope
from eval_service.access.hosts import is_loopback
from eval_service.access.keyring import Access, Keyring, digest_of, load_keyring
from eval_service.contract.errors import ConfigError
from eval_service.contract.token import FILE_VARIABLE, VARIABLE
from eval_service.controller.board import LEASE_S
from eval_service.engine.attached import keys_of
from eval_service.engine.grades import resolve_grade
from eval_service.fleet_config import EVAL_GROUP, FleetConfig
from eval_service.ledger.database import Database
from eval_service.ledger.lock import lock_of
from eval_service.ledger.store import parsed, without_password
from eval_service.objects.store import ObjectStore
from eval_service.suites.scorer_config import Code, Judge
from eval_service.suites.suite import AnySuite, Suite, check_served, load_suites
from eval_service.trackers.bureau import check_targets
from router.limits import Limits
from router.proxy import ProxySettings

_WAIT_S = 60.0  # of a request for an engine; then 503, and the client may ask again


@dataclass(frozen=True, slots=True)
class Settings:
    """What every part is handed; it travels to wherever Serve places it."""

    fleet: FleetConfig
    suites: Path
    joined: bool = False  # a cluster that others started, which may have several nodes
    keyring: Keyring = field(default_factory=Keyring)
    lane_key: str | None = field(default=None, repr=False)  # what our own processes bring to the proxy

    @classmethod
    def of(cls, fleet: FleetConfig, suites: Path, environment: MutableMapping[str, str]) -> Settings:
        """With the tokens read and hashed; a variable that held one is taken out of the environment, which every
        process that is started from here would have.

        Raises:
            ConfigError: a token that is not there, or can't be one.
        """
        keyring = load_keyring(fleet.tokens, environment)
        held = {token.token_env or VARIABLE for token in fleet.tokens.values()} | {VARIABLE, FILE_VARIABLE}
        for name in held - {fleet.service.proxy_api_key_env}:
            environment.pop(name, None)
        guarded = bool(keyring) or fleet.service.proxy_api_key_env is not None
        lane_key = secrets.token_urlsafe(32) if guarded else None
        return cls(fleet, suites, keyring=keyring, lane_key=lane_key)

    @property
    def access(self) -> Access:
        """Who may ask the gateway for what."""
        service = self.fleet.service
        local = is_loopback(service.host) and not self.keyring
        return Access(self.keyring, service.public_read, local, service.requests_per_s)

    @property
    def ledger(self) -> str:
        """The ledger's URL."""
        return ledger_of(self.fleet)

    @property
    def told_ledger(self) -> str:
        """The same for where Ray shows it: its password is in a file, which `make_home` writes."""
        known = parsed(self.ledger)
        if known.password is None:
            return self.ledger
        hidden = without_password(known).update_query_dict({"passfile": str(self._password_file)})
        return hidden.render_as_string()

    @property
    def _password_file(self) -> Path:
        return self.fleet.service.state_dir / "ledger.pass"

    def make_home(self) -> None:
        """Make what lies on this node's own disk: Serve may have built the application on another one."""
        state_dir = self.fleet.service.state_dir
        state_dir.mkdir(parents=True, exist_ok=True)
        (state_dir / "logs").mkdir(exist_ok=True)
        self.keep_password()

    def keep_password(self) -> None:
        """Write the ledger's password, if its URL has one, to where only this user can read it."""
        password = parsed(self.ledger).password
        if password is None:
            return
        escaped = str(password).replace("\\", "\\\\").replace(":", "\\:")
        line = f"*:*:*:*:{escaped}\n"
        with suppress(OSError, ValueError):
            if self._password_file.read_text(encoding="utf-8") == line:
                return  # a part that comes back needs no room on the disk
        mine = self._password_file.with_name(f".{self._password_file.name}.{os.getpid()}")
        mine.unlink(missing_ok=True)
        handle = os.open(mine, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(handle, "w", encoding="utf-8") as file:
            file.write(line)
        mine.replace(self._password_file)  # whole at every moment: several parts may write it at once

    @property
    def proxy_address(self) -> tuple[str, int] | None:
        """Where the proxy listens; None: there is none."""
        service = self.fleet.service
        return None if service.proxy_port is None else (service.proxy_host or service.host, service.proxy_port)

    @property
    def proxy(self) -> ProxySettings | None:
        """What the proxy is made of; None: there is none.

        Raises:
            ConfigError: its key is not in the environment.
        """
        service, address = self.fleet.service, self.proxy_address
        if address is None:
            return None
        name = service.proxy_api_key_env
        if name is not None and not os.environ.get(name):
            hint = "it is to hold the key that the proxy's clients bring"
            raise ConfigError(
                f"the environment variable {name} is not set", field="service.proxy_api_key_env", hint=hint
            )
        keys = (os.environ[name] if name is not None else None, self.lane_key)
        return ProxySettings(
            host=address[0],
            port=address[1],
            keys=tuple(digest_of(key.encode()) for key in keys if key) + self.keyring.reaching(Scope.DISPATCH),
            lease_s=LEASE_S,
            handover_s=service.handover_s,
            limits=Limits(
                server_concurrency=self.fleet.groups[EVAL_GROUP].server_concurrency,
                request_timeout_s=service.sample_timeout_s,
                wait_timeout_s=_WAIT_S,
            ),
        )

    def with_grades(self, *, cuda: bool) -> Settings:
        """Turn `auto` into a grade by what the whole cluster has: a replica sees only the GPUs that it was given.

        Raises:
            ConfigError: a grade that can't be there.
        """
        groups = {
            name: group.model_copy(update={"grade": resolve_grade(group.grade, cuda=cuda).value})
            for name, group in self.fleet.groups.items()
        }
        return replace(self, fleet=self.fleet.model_copy(update={"groups": groups}))


def ledger_of(fleet: FleetConfig) -> str:
    """The URL of a fleet's ledger."""
    return fleet.service.ledger or f"sqlite:///{fleet.service.state_dir / 'ledger.db'}"


def check(settings: Settings) -> None:
    """Refuse, before anything starts, what can't work.

    Raises:
        ConfigError: a root or model that is not there, an unknown suite file, a ledger that can't be opened.
    """
    service = settings.fleet.service
    check_exposure(settings)
    suites = load_suites(settings.suites)
    check_suites(suites, settings.fleet)
    check_served(suites, has_proxy=service.proxy_port is not None)
    settings.make_home()
    check_places(settings.fleet)
    check_targets(settings.fleet, os.environ)
    if settings.fleet.objects is not None:
        ObjectStore(settings.fleet.objects).check()
    _ = settings.proxy
    lock_of(settings.ledger)
    Database(settings.ledger).close()


def check_exposure(settings: Settings) -> None:
    """Refuse to listen beyond this host for anybody at all.

    Raises:
        ConfigError: no token, though others can reach the gateway or the proxy.
    """
    service, address = settings.fleet.service, settings.proxy_address
    if service.allow_anonymous:
        return
    hint = "add [tokens.NAME] to fleet.toml (docs/security.md), or listen on 127.0.0.1"
    if not is_loopback(service.host) and not settings.keyring:
        raise ConfigError(
            f"{service.host} is reached from beyond this host, and no token is set", field="service.host", hint=hint
        )
    if address is not None and not is_loopback(address[0]) and not (settings.proxy and settings.proxy.keys):
        field = "service.host" if service.proxy_host is None else "service.proxy_host"
        raise ConfigError(
            f"the proxy is reached from beyond this host at {address[0]}, and no token is set",
            field=field,
            hint=f"{hint}; or set service.proxy_api_key_env",
        )


def check_suites(suites: Mapping[str, AnySuite], fleet: FleetConfig) -> None:
    """See that the fleet has, and the service allows, what suites need.

    Raises:
        ConfigError: a judge without a frozen group; code that is not allowed.
    """
    for name, suite in suites.items():
        if not isinstance(suite, Suite):
            continue
        scorer, key = suite.config.scorer, f"suites.{name}.scorer"
        if isinstance(scorer, Code) and not fleet.service.allow_code:
            raise ConfigError(
                "it runs what a model wrote, on this host and as this user",
                field=key,
                hint="docs/suites.md says what that risks; allow it with service.allow_code = true in fleet.toml",
            )
        if isinstance(scorer, Judge):
            group = fleet.groups.get(scorer.group)
            if group is None or group.kind != "frozen":
                frozen = sorted(name for name, group in fleet.groups.items() if group.kind == "frozen")
                told = f"there are {', '.join(frozen)}" if frozen else 'fleet.toml has none: add one of kind = "frozen"'
                raise ConfigError(f"there is no frozen group {scorer.group!r}", field=f"{key}.group", hint=told)


def check_places(fleet: FleetConfig) -> None:
    """See that what the fleet file names is there; only looks.

    Raises:
        ConfigError: a root, a model or a key that is not.
    """
    for root in fleet.service.roots:
        if not root.is_dir():
            raise ConfigError(f"{root} is no directory", field="service.roots", hint="make it, or name another")
    for name, group in fleet.groups.items():
        if group.model is not None and not (group.model / "config.json").is_file():
            raise ConfigError(f"{group.model} is no HF model directory", field=f"groups.{name}.model")
        if group.kind == "attached":
            keys_of(group)
