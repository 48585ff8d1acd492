"""The proxy's page tells the truth: every route, error code, key and default."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from router import errors
from router.proxy import ROUTES
from router.proxy.config import ProxyConfig, TargetConfig, load_config

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/proxy.md").read_text()


def test_every_route_is_documented_with_its_method() -> None:
    rows = re.findall(r"^\| (`/.+`) \| (\w+) \|$", PAGE, re.MULTILINE)
    told = {route: method for row, method in rows for route in re.findall(r"`([^`]+)`", row)}
    assert told == {route.decode(): method.decode() for route, method in ROUTES.items()}


def test_every_error_is_documented_with_its_status() -> None:
    told = {(int(status), code) for status, code in re.findall(r"^\| (\d{3}) \| `(\w+)` \|", PAGE, re.MULTILINE)}
    source = "".join(path.read_text() for path in sorted((ROOT / "router/proxy").glob("*.py")))
    made = {(int(status), code) for status, code in re.findall(r'Refused\(\s*(\d{3}),\s*"(\w+)"', source)}
    router = {
        (cls.status, cls.code)
        for cls in vars(errors).values()
        if isinstance(cls, type)
        and issubclass(cls, errors.RouterError)
        and cls not in (errors.RouterError, errors.CutShort)
    }
    assert told == made | router


@pytest.mark.parametrize("section", ["limits", "clients"])
def test_every_bound_is_documented_with_its_default(section: str, tmp_path: Path) -> None:
    path = tmp_path / "proxy.toml"
    path.write_text('[targets.one]\nurls = ["http://host"]\n')
    config = load_config(path)
    bounds = config.router_limits() if section == "limits" else config.client_limits()
    table = PAGE.split(f"\n`[{section}]`", 1)[1].split("\n`[", 1)[0]
    told = dict(re.findall(r"^\| `(\w+)` \| `(.+?)` \|", table, re.MULTILINE))
    assert told == {field.name: str(getattr(bounds, field.name)) for field in fields(bounds)}


def test_every_other_key_is_documented() -> None:
    names = {f"targets.NAME.{name}" for name in TargetConfig.model_fields} | set(ProxyConfig.model_fields)
    assert [name for name in names - {"targets", "limits", "clients"} if f"`{name}`" not in PAGE] == []
