"""`auto` becomes a grade by what the cluster has, before any replica is placed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eval_service.access.keyring import digest_of
from eval_service.contract.errors import ConfigError
from eval_service.fleet_config import FleetConfig
from eval_service.ledger.store import parsed
from eval_service.serve.settings import Settings


def _settings(grade: str, **service: Any) -> Settings:
    table = {"service": {"roots": ["/"], **service}, "groups": {"eval": {"grade": grade, "model": "/model"}}}
    return Settings(FleetConfig.model_validate(table), Path("suites.toml"))


@pytest.mark.parametrize(("cuda", "grade"), [(True, "sglang"), (False, "sglang-cpu")])
def test_auto_is_the_gpu_engine_where_the_cluster_has_gpus(cuda: bool, grade: str) -> None:
    assert _settings("auto").with_grades(cuda=cuda).fleet.groups["eval"].grade == grade


@pytest.mark.parametrize(("cuda", "grade"), [(True, "sglang-cpu"), (False, "sglang")])
def test_a_grade_that_cannot_be_there_is_refused_by_name(cuda: bool, grade: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _settings(grade).with_grades(cuda=cuda)
    assert caught.value.field == "grade"


def test_the_proxy_is_off_unless_it_has_a_port_and_listens_where_the_service_does_unless_told() -> None:
    assert _settings("auto").proxy is None
    proxy = _settings("auto", proxy_port=8710).proxy
    assert proxy is not None
    assert (proxy.host, proxy.port, proxy.keys) == ("127.0.0.1", 8710, ())
    assert _settings("auto", proxy_port=1, proxy_host="0.0.0.0", host="10.0.0.1").proxy_address == ("0.0.0.0", 1)


def test_the_proxys_key_comes_from_the_environment_and_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = _settings("auto", proxy_port=8710, proxy_api_key_env="PROXY_KEY")
    with pytest.raises(ConfigError, match="PROXY_KEY"):
        _ = settings.proxy
    monkeypatch.setenv("PROXY_KEY", "a-key-of-some-length")
    assert settings.proxy is not None
    assert settings.proxy.keys == (digest_of(b"a-key-of-some-length"),)
    assert "a-key" not in repr(settings.proxy)


def test_where_ray_shows_the_ledgers_url_its_password_is_in_a_file_that_only_its_owner_reads(tmp_path: Path) -> None:
    state_dir = tmp_path / "of-this-node" / "state"  # the application was built on another one
    settings = _settings("auto", ledger="postgresql://svc:pass%3Aword@db/evalfleet", state_dir=str(state_dir))
    for _ in range(2):
        settings.make_home()
    file = state_dir / "ledger.pass"
    assert sorted(path.name for path in state_dir.iterdir()) == ["ledger.pass", "logs"]
    assert file.read_text() == "*:*:*:*:pass\\:word\n"
    assert file.stat().st_mode & 0o777 == 0o600
    assert "word" not in settings.told_ledger + repr(settings)
    assert parsed(settings.told_ledger).query["passfile"] == str(file)
    assert parsed(settings.told_ledger).password is None
    plain = _settings("auto", state_dir=str(tmp_path))
    plain.keep_password()
    assert plain.told_ledger == plain.ledger == f"sqlite:///{tmp_path}/ledger.db"
