"""`evalfleet ledger`: an operator looks at the ledger and copies it, whether or not a service runs."""

from __future__ import annotations

import json
import sqlite3
import stat
from pathlib import Path

import pytest

from eval_service.contract.errors import Unavailable
from eval_service.ledger.database import Database
from eval_service.ledger.upkeep import backup
from eval_service.ledger.views import Views
from tests.support.command import Command
from tests.support.fake_service import FakeService
from tests.support.ledger import Ledger

OLD = Path(__file__).parents[1] / "support" / "ledgers" / "schema_2.sql"


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys, FakeService(points=[]))


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    path = tmp_path / "fleet.toml"
    path.write_text('[service]\nroots = ["."]\nstate_dir = "."\n[groups.eval]\nmodel = "."\n')
    return path


def test_show_changes_nothing_and_migrate_brings_an_old_ledger_up_to_date(command: Command, fleet: Path) -> None:
    file = fleet.with_name("ledger.db")
    asked = ("--fleet", str(fleet))
    assert "there is none yet" in command("ledger", "show", *asked).out
    assert not file.exists()
    with sqlite3.connect(file) as connection:
        connection.executescript(OLD.read_text())
    connection.close()
    found = json.loads(command("ledger", "show", *asked, "--json").out)
    assert (found["schema"], found["newest"], found["epoch"], found["runs"], found["points"]) == (2, 4, 7, 1, 2)
    assert command("ledger", "migrate", *asked).out == "schema 2 -> 4\n"
    assert json.loads(command("ledger", "migrate", *asked, "--json").out) == {"before": 4, "after": 4}
    assert "4 (this version writes 4)" in command("ledger", "show", *asked).out


def test_a_backup_is_of_one_moment_and_replaces_nothing(command: Command, fleet: Path) -> None:
    ledger = Ledger(fleet.parent)
    point = ledger.done(1)
    target = fleet.with_name("copy.db")
    asked = ("ledger", "backup", str(target), "--fleet", str(fleet))
    with ledger.db.writing() as connection:  # while somebody writes
        connection.exec_driver_sql("UPDATE points SET score = 0.1")
        assert command(*asked).code == 0
    again = command(*asked)
    assert (again.code, "is there already" in again.err) == (2, True)
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    copy = Database(f"sqlite:///{target}")
    assert Views(copy, version="0").point(point).score == 0.5
    copy.close()
    ledger.db.close()
    other = fleet.with_name("other.db")
    told = json.loads(command("ledger", "backup", str(other), "--fleet", str(fleet), "--json").out)
    assert told == {"file": str(other), "size_bytes": other.stat().st_size}


def test_a_backup_of_nothing_or_of_a_broken_file_leaves_no_copy(command: Command, fleet: Path) -> None:
    target = fleet.with_name("copy.db")
    asked = ("ledger", "backup", str(target), "--fleet", str(fleet))
    assert command(*asked).code == 2
    fleet.with_name("ledger.db").write_bytes(b"no database at all, but a text" * 100)
    assert command(*asked).code == 4
    with pytest.raises(Unavailable, match="can't be written"):
        backup(f"sqlite:///{fleet}", fleet / "below" / "copy.db")
    assert sorted(path.name for path in fleet.parent.iterdir()) == ["fleet.toml", "ledger.db"]
