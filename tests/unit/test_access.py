"""Who may ask for what: tokens, scopes, rates, other sites' pages, and the addresses that nobody is made to call."""

from __future__ import annotations

import hashlib
import logging
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from eval_service.access.config import Scope, TokenConfig
from eval_service.access.hosts import checked_address, is_loopback
from eval_service.access.keyring import Access, Keyring, digest_of, load_keyring
from eval_service.access.needs import needed
from eval_service.access.rates import MOST_NAMES, Rates
from eval_service.cli import options
from eval_service.cli.main import main
from eval_service.contract.client import EvalClient
from eval_service.contract.errors import ConfigError, Forbidden, RateLimited, Unauthorized
from eval_service.contract.token import given_token
from eval_service.fleet_config import FleetConfig
from eval_service.launch.run import _token_for
from eval_service.secrets_apart import without_secrets
from eval_service.serve.settings import Settings, check_exposure
from eval_service.trackers.sinks.to_webhook import Sink
from router.proxy.config import load_config
from tests.support.api import Api

READER, TRAINER, ADMIN = ("reader-" + "r" * 20, "trainer-" + "t" * 20, "admin-" + "a" * 20)
TOKENS = {READER: Scope.READ, TRAINER: Scope.DISPATCH, ADMIN: Scope.ADMIN}
ROOT = Path(__file__).parents[2]


def keyring() -> Keyring:
    return load_keyring(
        {scope.value: TokenConfig(scope=scope, token_env=scope.value) for scope in Scope},
        {scope.value: token for token, scope in TOKENS.items()},
    )


def guarded(base: Path, **changes: Any) -> Api:
    return Api(base, access=Access(keyring(), **changes))


def bearing(token: str | None) -> dict[str, str]:
    return {} if token is None else {"authorization": f"Bearer {token}"}


def named(path: str) -> str:
    return re.sub(r"\{\w+\}", "x", path)


# --- scopes


def test_every_route_wants_the_scope_that_the_docs_say_and_nothing_is_open_but_the_page(tmp_path: Path) -> None:
    """Somebody on the network can read all runs and cancel them."""
    api = guarded(tmp_path)
    document = api.request("GET", "/openapi.json", headers=bearing(READER)).json()
    routes = [(method.upper(), path) for path, methods in document["paths"].items() for method in methods]
    documented = dict(
        re.findall(r"^\| `(\w+ /[^`]*)` \| (\w+) \|$", (ROOT / "docs/security.md").read_text(), re.MULTILINE)
    )
    told = {f"{method} {path}": str(needed(method, named(path)) or "none") for method, path in routes}
    assert documented == told | {"GET /": "none", "GET /dashboard/{path}": "none", "GET /openapi.json": "read"}
    assert len(routes) > 30
    for method, path in [*routes, ("GET", "/openapi.json"), ("GET", "/nothing"), ("DELETE", "/nothing")]:
        need = needed(method, named(path))
        if need is None or path == "/events":  # an endless answer
            continue
        asked: dict[str, Any] = {"json": {}} if method in ("POST", "PUT") else {}
        for token in (None, *TOKENS):
            status = api.request(method, named(path), headers=bearing(token), **asked).status_code
            wanted = 401 if token is None else 403 if not TOKENS[token].reaches(need) else None
            assert status == wanted if wanted else status not in (401, 403, 500), (method, path, token, status)


def test_events_are_refused_without_a_token_and_the_page_and_its_health_are_not(tmp_path: Path) -> None:
    api = guarded(tmp_path)
    refused = api.request("GET", "/events")
    assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
    assert [api.request("GET", path).status_code for path in ("/", "/dashboard/main.js", "/healthz")] == [200] * 3
    assert api.request("GET", "/docs", headers=bearing(ADMIN)).status_code == 404, "its scripts are another host's"


def test_what_is_public_is_read_without_a_token_and_nothing_more(tmp_path: Path) -> None:
    api = guarded(tmp_path, public_read=True)
    assert api.request("GET", "/runs").status_code == 200
    assert api.request("GET", "/runs", headers=bearing("wrong" * 8)).status_code == 401
    assert api.request("POST", "/runs/r1/pause").status_code == 401
    assert api.request("POST", "/runs/r1/pause", headers=bearing(TRAINER)).status_code == 200


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Bearer ",
        f"Basic {ADMIN}",
        f"Token {ADMIN}",
        f"Bearer {ADMIN[:-1]}",
        f"Bearer {ADMIN}x",
        f"Bearer {ADMIN.upper()}",
        f"Bearer {ADMIN} {ADMIN}",
        f"Bearer sha256:{hashlib.sha256(ADMIN.encode()).hexdigest()}",
        f"Bearer {hashlib.sha256(ADMIN.encode()).hexdigest()}",
        "Bearer " + "x" * 5000,
        "Bearer \xff\xfe" + "x" * 30,
    ],
)
def test_what_is_no_token_is_401_and_is_not_repeated(tmp_path: Path, header: str) -> None:
    response = guarded(tmp_path).request("GET", "/runs", headers={"authorization": header.encode("latin-1")})
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "unauthorized"
    assert header.removeprefix("Bearer ").strip() not in response.text or len(header) < 9


def test_two_tokens_in_one_request_are_none(tmp_path: Path) -> None:
    lines = [("authorization", f"Bearer {ADMIN}"), ("authorization", f"Bearer {READER}")]
    assert guarded(tmp_path).request("GET", "/runs", headers=lines).status_code == 401


# --- tokens


def test_a_file_has_a_token_a_line_while_it_is_changed_and_may_hold_the_hash_alone(tmp_path: Path) -> None:
    (tmp_path / "t").write_text(f"# of November\n{READER}\n\nsha256:{digest_of(TRAINER.encode()).hex()}\n")
    known = load_keyring({"r": TokenConfig(scope=Scope.READ, token_file=tmp_path / "t")}, {})
    assert [token.name for one in (READER, TRAINER) if (token := known.holder(one.encode()))] == ["r", "r"]
    assert known.holder(ADMIN.encode()) is None
    assert READER not in repr(known)
    assert READER.encode() not in b"".join(known.reaching(Scope.READ))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("short", "20 characters"),
        ("with spaces in the middle", "printable"),
        ("\u00e9" * 30, "printable"),
        ("sha256:" + "A" * 64, "no hash"),
        ("sha256:" + "a" * 63, "no hash"),
        ("", "holds no"),
    ],
)
def test_what_cannot_be_a_token_is_refused_by_name_and_not_shown(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "t").write_text(text + "\n")
    with pytest.raises(ConfigError, match=why) as caught:
        load_keyring({"r": TokenConfig(scope=Scope.READ, token_file=tmp_path / "t")}, {})
    assert str(caught.value.field).startswith("tokens.r")
    assert not text or text not in str(caught.value)


def test_a_variable_that_is_not_set_and_a_token_of_two_names_are_refused() -> None:
    one = TokenConfig(scope=Scope.READ, token_env="ONE")
    with pytest.raises(ConfigError, match="ONE"):
        load_keyring({"a": one}, {})
    with pytest.raises(ConfigError, match="also the token of 'a'"):
        load_keyring({"a": one, "b": TokenConfig(scope=Scope.ADMIN, token_env="ONE")}, {"ONE": READER})
    with pytest.raises(ValueError, match="one of the two"):
        TokenConfig(scope=Scope.READ)


def test_the_service_keeps_hashes_and_takes_tokens_out_of_what_its_processes_inherit() -> None:
    environment = {"MINE": ADMIN, "EVALFLEET_TOKEN": READER, "PATH": "/bin"}
    settings = Settings.of(fleet(tokens={"a": {"scope": "admin", "token_env": "MINE"}}), Path("s.toml"), environment)
    assert environment == {"PATH": "/bin"}
    assert ADMIN not in repr(settings)
    assert settings.access.keyring.holder(ADMIN.encode())
    assert settings.lane_key
    assert settings.lane_key not in repr(settings)


# --- beyond loopback


def fleet(**table: Any) -> FleetConfig:
    service = {"roots": ["/"], **table.pop("service", {})}
    return FleetConfig.model_validate({"service": service, "groups": {"eval": {"model": "/model"}}, **table})


def exposed(tokens: bool = False, **service: Any) -> None:
    configs = {"a": {"scope": "admin", "token_env": "MINE"}} if tokens else {}
    check_exposure(Settings.of(fleet(service=service, tokens=configs), Path("s.toml"), {"MINE": ADMIN}))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "gpu-7", "example.com", ""])
def test_beyond_loopback_the_service_wants_a_token_and_says_how(host: str) -> None:
    with pytest.raises(ConfigError) as caught:
        exposed(host=host)
    assert caught.value.field == "service.host"
    assert "[tokens.NAME]" in str(caught.value.hint)
    exposed(host=host, tokens=True)
    exposed(host=host, allow_anonymous=True)


def test_the_proxy_wants_one_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        exposed(proxy_port=1, proxy_host="0.0.0.0")
    assert caught.value.field == "service.proxy_host"
    exposed(proxy_port=1, proxy_host="0.0.0.0", tokens=True)
    monkeypatch.setenv("PROXY_KEY", "x" * 20)
    exposed(proxy_port=1, proxy_host="0.0.0.0", proxy_api_key_env="PROXY_KEY")
    (tmp_path / "proxy.toml").write_text('host = "0.0.0.0"\n[targets.one]\nurls = ["http://host"]\n')
    with pytest.raises(ValueError, match="set a key"):
        load_config(tmp_path / "proxy.toml")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost", "LOCALHOST"])
def test_loopback_needs_none(host: str) -> None:
    exposed(host=host, proxy_port=1)
    assert is_loopback(host)


# --- pages of other sites, and rates


def test_without_tokens_no_page_of_another_site_gets_through(tmp_path: Path) -> None:
    """A page open in a browser on the same host could pause every run: by a form, or under a name that leads here."""
    api = Api(tmp_path, access=Access(local=True))

    def status(method: str, **headers: str) -> int:
        return api.request(method, "/runs/r1/pause" if method == "POST" else "/runs", headers=headers).status_code

    assert status("GET", host="evil.example:8700") == 403
    assert [status("GET", host=host) for host in ("127.0.0.1:8700", "localhost:1", "[::1]:8700", "[::1]")] == [200] * 4
    assert status("POST", host="127.0.0.1:8700", origin="https://evil.example") == 403
    assert status("POST", host="127.0.0.1:8700", origin="null") == 403
    assert status("POST", host="127.0.0.1:8700", origin="http://[") == 403
    assert status("POST", host="127.0.0.1:8700", origin="http://127.0.0.1:8700") == 200
    assert status("POST", host="127.0.0.1:8700") == 200


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time passes, so that no bucket fills while the tests' requests are made."""
    monkeypatch.setattr("eval_service.gateway.guard.Rates", partial(Rates, clock=lambda: 0.0))


@pytest.mark.usefixtures("still")
def test_more_requests_than_the_bound_are_429_with_a_time_and_others_go_on(tmp_path: Path) -> None:
    api = guarded(tmp_path, requests_per_s=0.1)
    assert api.request("GET", "/runs", headers=bearing(READER)).status_code == 200
    response = api.request("GET", "/runs", headers=bearing(READER))
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    assert response.json()["error"]["code"] == "rate_limited"
    assert api.request("GET", "/runs", headers=bearing(ADMIN)).status_code == 200


@pytest.mark.usefixtures("still")
def test_wrong_tokens_are_counted_and_hold_up_no_good_one(tmp_path: Path) -> None:
    api = guarded(tmp_path)
    told = [api.request("GET", "/runs", headers=bearing("wrong" * 8)).status_code for _ in range(60)]
    assert (told[0], told[-1]) == (401, 429)
    assert api.request("GET", "/runs", headers=bearing(READER)).status_code == 200


def test_a_rate_is_a_bucket_that_fills_and_names_beyond_a_bound_are_forgotten() -> None:
    now = 0.0
    rates = Rates(2.0, burst_s=2.0, clock=lambda: now)
    assert [rates.take("a") for _ in range(5)] == [0.0] * 4 + [0.5]
    now = 0.5
    assert [rates.take("a"), rates.take("a")] == [0.0, 0.5]
    for number in range(MOST_NAMES):
        rates.take(str(number))
    assert rates.take("a") == 0.0
    assert Rates(0.0).take("a") == 0.0


# --- clients


def test_the_client_brings_the_token_that_it_was_given_or_the_environments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers.get("authorization"))
        return httpx.Response(200, text='{"ok": true}')

    def ask(token: str | None = None) -> None:
        with EvalClient("http://service", transport=httpx.MockTransport(answer), token=token) as client:
            client.ready()

    for name in ("EVALFLEET_TOKEN", "EVALFLEET_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    ask()
    (tmp_path / "t").write_text(f"{TRAINER}\n{ADMIN}\n")
    monkeypatch.setenv("EVALFLEET_TOKEN_FILE", str(tmp_path / "t"))
    ask()
    monkeypatch.setenv("EVALFLEET_TOKEN", READER)
    ask()
    ask(token=ADMIN)
    assert seen == [None, *(f"Bearer {token}" for token in (TRAINER, READER, ADMIN))]
    with pytest.raises(ConfigError, match="printable") as caught:
        ask(token="injected-token-of-length\r\nx-more: 1")
    assert "injected" not in str(caught.value)
    assert given_token({}) is None


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [(401, "unauthorized", Unauthorized), (403, "forbidden", Forbidden), (429, "rate_limited", RateLimited)],
)
def test_the_clients_errors_say_which(status: int, code: str, kind: type[Exception]) -> None:
    body = f'{{"error": {{"code": "{code}", "message": "no"}}}}'
    with EvalClient(
        "http://service", transport=httpx.MockTransport(lambda _: httpx.Response(status, text=body))
    ) as client:
        with pytest.raises(kind):
            client.ready()


def test_a_token_is_in_no_log_of_the_client(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.DEBUG)
    with EvalClient("http://127.0.0.1:1", token=ADMIN) as client, pytest.raises(Exception, match="refused") as caught:
        client.ready()
    assert ADMIN not in caplog.text + str(caught.value) + repr(client)


def test_others_code_is_kept_from_the_ledgers_password_too() -> None:
    environment = {"PGPASSWORD": "x", "HF_TOKEN": "x", "RAY_AUTH_MODE": "token", "PGUSER": "us", "MONKEY": "m"}
    assert without_secrets(environment) == {"PGUSER": "us", "MONKEY": "m"}


# --- what the service calls


def leads_to(*addresses: str) -> Any:
    def answer(host: str, port: int) -> Sequence[str]:
        return addresses

    return answer


@pytest.mark.parametrize(
    "addresses",
    [
        ("169.254.169.254",),
        ("fd00:ec2::254",),
        ("100.100.100.200",),
        ("10.0.0.5",),
        ("127.0.0.1",),
        ("::1",),
        ("::ffff:10.0.0.5",),
        ("64:ff9b::10.0.0.5",),
        ("64:ff9b::169.254.169.254",),
        ("fe80::1%eth0",),
        ("0.0.0.0",),
        ("93.184.215.14", "10.0.0.5"),
        ("100.64.0.1",),
        ("224.0.0.1",),
    ],
)
def test_an_allowed_name_that_leads_to_an_address_inside_is_not_called(addresses: tuple[str, ...]) -> None:
    with pytest.raises(PermissionError, match=r"hooks\.example leads to"):
        checked_address("hooks.example", 443, resolver=leads_to(*addresses))


def test_what_may_be_called_is_called_at_the_address_that_was_judged() -> None:
    assert checked_address("hooks.example", 443, resolver=leads_to("93.184.215.14")) == "93.184.215.14"
    assert checked_address("hooks.corp", 443, ["10.0.0.0/8"], resolver=leads_to("10.0.0.5")) == "10.0.0.5"
    assert checked_address("10.0.0.5", 443) == "10.0.0.5", "a literal address is what it says"
    with pytest.raises(PermissionError):
        checked_address("hooks.corp", 443, ["169.254.0.0/16", "0.0.0.0/0"], resolver=leads_to("169.254.169.254"))
    for literal in ("169.254.169.254", "[fe80::1]", "::ffff:169.254.169.254"):
        with pytest.raises(PermissionError):
            checked_address(literal, 80)


def test_a_webhooks_name_is_looked_up_for_each_delivery_and_refused_where_it_has_moved_inside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOOK", "secret")
    config = {"url": "http://hooks.example:9/x", "secret_env": "HOOK", "timeout_s": 1.0}
    sink = Sink(config, "", resolver=leads_to("169.254.169.254"))
    item: Any = {"id": "1", "event": "done", "run": "r", "at": 0.0, "data": {}}
    with pytest.raises(PermissionError, match="must not be called"):
        sink.write(item)


@pytest.mark.parametrize("url", ["http://169.254.169.254/latest", "http://[fd00:ec2::254]/", "http://0.0.0.0:80/"])
def test_a_metadata_address_is_no_webhook_and_no_engine_even_where_it_is_allowed(url: str) -> None:
    host = url.removeprefix("http://").split("/")[0]
    hook = {"h": {"url": url, "secret_env": "S"}}
    with pytest.raises(ValueError, match="metadata"):
        fleet(webhooks=hook, service={"webhook_hosts": [host]})
    engine = {"kind": "attached", "model": "/model", "urls": [url]}
    with pytest.raises(ValueError, match="metadata"):
        FleetConfig.model_validate({"service": {"roots": ["/"]}, "groups": {"eval": {"model": "/m"}, "a": engine}})


# --- the commands


@pytest.mark.parametrize(
    ("given", "wanted"),
    [((), None), (("--token", READER), READER), (("--token-file", "FILE"), TRAINER)],
)
def test_a_command_brings_the_token_that_it_is_given(
    given: tuple[str, ...], wanted: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t").write_text(f"{TRAINER}\n")
    seen: list[str | None] = []

    def connect(url: str) -> EvalClient:
        seen.append(options._chosen.get())
        return EvalClient("http://service", transport=httpx.MockTransport(lambda _: httpx.Response(200, text="[]")))

    monkeypatch.setattr(options, "connect", connect)
    monkeypatch.setattr(
        "sys.argv", ["evalfleet", "runs", *(str(tmp_path / "t") if one == "FILE" else one for one in given)]
    )
    with pytest.raises(SystemExit):
        main()
    assert seen == [wanted]


def test_a_token_is_overwritten_in_the_command_line() -> None:
    """Every user of a host can read the command lines of all."""
    code = "import sys; from eval_service.cli.options import hide; hide(sys.argv[1])"
    code += "; print(open('/proc/self/cmdline').read())"
    told = subprocess.run([sys.executable, "-c", code, ADMIN], capture_output=True, text=True, check=True, timeout=60)
    assert ADMIN not in told.stdout
    assert "*" * len(ADMIN) in told.stdout


def test_a_launch_takes_the_first_token_that_may_dispatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t").write_text(f"sha256:{'0' * 64}\n{TRAINER}\n")
    configs = {
        "look": TokenConfig(scope=Scope.READ, token_env="LOOK"),
        "train": TokenConfig(scope=Scope.DISPATCH, token_file=tmp_path / "t"),
    }
    monkeypatch.delenv("EVALFLEET_TOKEN", raising=False)
    assert _token_for({}) is None
    assert _token_for(configs) == TRAINER
    with pytest.raises(ConfigError, match="the launch has none"):
        _token_for({"look": configs["look"]})
    monkeypatch.setenv("EVALFLEET_TOKEN", ADMIN)
    assert _token_for(configs) == ADMIN


@pytest.mark.parametrize(
    "name", ["PGPASSWORD", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "EVALFLEET_TOKEN_FILE", "RAY_AUTH_MODE"]
)
def test_what_opens_the_ledger_a_store_or_the_service_is_not_inherited_by_what_runs_others_code(name: str) -> None:
    assert without_secrets({name: "x", "PATH": "/bin"}) == {"PATH": "/bin"}
