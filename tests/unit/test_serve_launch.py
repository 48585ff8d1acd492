"""Joining a cluster: without its token the command refuses at once and says how to give it one."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from eval_service.contract.errors import ConfigError, Unavailable
from eval_service.ports import free_port
from eval_service.serve.launch import _check_port, _deploy, _make_token, _stay

FLEET = """
[service]
roots = ["."]

[groups.eval]
model = "model"
"""


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "fleet.toml").write_text(FLEET)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a", "answer": "b"}) + "\n")
    (tmp_path / "suites.toml").write_text('[suites.s]\ndatasets = [{ name = "d", path = "rows.jsonl" }]\n')
    return ("--fleet", str(tmp_path / "fleet.toml"), "--suites", str(tmp_path / "suites.toml"))


def test_a_cluster_is_not_joined_without_its_token_and_the_hint_says_how(
    files: tuple[str, ...], tmp_path: Path
) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    command = [sys.executable, "-m", "eval_service.cli.main", "serve", *files, "--address", "127.0.0.1:6379"]
    # Refusing needs no Ray: importing it alone would take longer than this may.
    end = subprocess.run(
        command, env=kept | {"HOME": str(tmp_path)}, capture_output=True, text=True, timeout=60, check=False
    )
    assert end.returncode == 2
    assert "RAY_AUTH_TOKEN" in end.stderr
    assert "address" in end.stderr
    assert len(end.stderr.strip().splitlines()) == 1


def test_what_cannot_work_is_refused_by_name_before_anything_starts(files: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "eval_service.cli.main", "serve", *files]
    end = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert end.returncode == 2
    assert "groups.eval.model" in end.stderr


def test_a_clusters_token_is_its_own_and_no_second_service_replaces_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "")
    tokens = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        _make_token(tmp_path / name)
        path = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
        assert path.stat().st_mode & 0o077 == 0
        tokens.append((path, path.read_text()))
    assert [path.read_text() for path, _ in tokens] == [token for _, token in tokens]
    assert tokens[0][1] != tokens[1][1]


def test_the_command_ends_with_an_error_once_ray_has_died_and_without_one_when_told_to_stop() -> None:
    looks = iter((True, False))
    with pytest.raises(Unavailable, match="Ray has died"):
        _stay(threading.Event(), lambda: next(looks), look_s=0.0)
    told = threading.Event()
    told.set()
    _stay(told, lambda: False)


class Serve:
    """What is asked of Serve."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.deleted: list[str] = []

    def run(self, _application: object, *, name: str, route_prefix: str | None) -> None:
        assert (name, route_prefix) == ("evalfleet", None)
        if self.error is not None:
            raise self.error

    def delete(self, name: str) -> None:
        self.deleted.append(name)


def test_an_application_that_does_not_come_up_is_not_left_on_the_cluster() -> None:
    for error in (RuntimeError("no GPU"), KeyboardInterrupt()):
        serve = Serve(error)
        with pytest.raises(type(error)):
            _deploy(serve, object(), "evalfleet")
        assert serve.deleted == ["evalfleet"]
    well = Serve()
    _deploy(well, object(), "evalfleet")
    assert well.deleted == []


def test_a_port_that_another_service_keeps_is_refused_by_name() -> None:
    """The gateway's replicas share their port, and would share another service's too."""
    for key in ("service.port", "service.proxy_port"):
        with _listening() as other, pytest.raises(ConfigError) as caught:
            _check_port("127.0.0.1", other.getsockname()[1], key, patience_s=0.3)
        assert caught.value.field == key
    _check_port("127.0.0.1", 0, "service.proxy_port")


def test_a_port_that_a_killed_service_still_has_is_waited_for() -> None:
    other = _listening()
    port = other.getsockname()[1]
    closer = threading.Timer(0.5, other.close)
    closer.start()
    _check_port("127.0.0.1", port, "service.port", patience_s=30.0)
    closer.join()


def _listening() -> socket.socket:
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    found.bind(("127.0.0.1", free_port("127.0.0.1")))  # one that the kernel gives nobody else once it is free
    found.listen()
    return found
