"""Ledgers of every schema that there was open, with what they hold; a later one's is refused and left as it is."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import update

from eval_service.contract.errors import ConfigError
from eval_service.contract.states import PointState
from eval_service.ledger import migrations
from eval_service.ledger.bounds import Bounds
from eval_service.ledger.database import Database
from eval_service.ledger.intents import Intents
from eval_service.ledger.moves import Moves
from eval_service.ledger.schema import SCHEMA_VERSION, meta, metadata
from eval_service.ledger.store import open_store, parsed
from eval_service.ledger.upkeep import survey
from eval_service.ledger.views import Views
from tests.support import postgres

OLD = Path(__file__).parents[1] / "support" / "ledgers"
RELEASED = (1, 2, 3)


@pytest.mark.parametrize("schema", RELEASED)
def test_a_ledger_of_each_released_schema_is_brought_up_to_date_with_what_it_holds(schema: int, tmp_path: Path) -> None:
    file = tmp_path / "ledger.db"
    with sqlite3.connect(file) as connection:
        connection.executescript((OLD / f"schema_{schema}.sql").read_text())
    connection.close()
    url = f"sqlite:///{file}"
    assert survey(url).schema == schema
    for _ in range(2):  # a second start finds nothing to do
        database = Database(url)
        assert differences(database) == []
        database.close()
    database = Database(url)
    views = Views(database, version="0")
    point = views.point("p1")
    assert (point.state, point.score, point.headline, point.alarms) == (PointState.DONE, 0.75, None, ())
    assert [attempt.outcome for attempt in point.history] == ["done"]
    assert views.run("r1").step == 20
    epoch = database.take_epoch()
    assert epoch == 8, "an epoch is never used twice"
    moves = Moves(database, epoch, max_attempts=3)
    moves.take_intents(reservation_timeout_s=1e12)
    assert views.point("p2").state is PointState.CANCELLED, "what was asked of the older version is carried out"
    Intents(database, Bounds((tmp_path,), ("main",))).progress("r1", 30)
    moves.close()
    with sqlite3.connect(file) as connection:
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    connection.close()
    database.close()


def test_the_steps_from_the_first_schema_on_lead_to_what_a_new_ledger_is(database_url: str) -> None:
    store = open_store(parsed(database_url))
    with store.shaping() as connection:
        metadata.drop_all(connection)
        command_upgrade(connection)
    store.engine.dispose()
    store = open_store(parsed(database_url))
    with store.reading() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    with store.shaping() as connection:
        metadata.drop_all(connection)
    store.engine.dispose()
    Database(database_url).close()


def command_upgrade(connection: object) -> None:
    """Every step, from nothing."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def test_every_schema_has_its_step_and_the_newest_is_the_last() -> None:
    scripts = ScriptDirectory(str(Path(migrations.__file__).parent))
    assert [step.revision for step in scripts.walk_revisions()] == [f"{n:04}" for n in range(SCHEMA_VERSION, 0, -1)]


def test_a_ledger_of_a_later_version_is_refused_and_left_as_it_is(database_url: str) -> None:
    database = Database(database_url)
    with database.writing() as connection:
        connection.execute(update(meta).where(meta.c.key == "schema_version").values(value="999"))
    with pytest.raises(ConfigError, match="schema 999") as caught:
        Database(database_url)
    assert "version that wrote it" in (caught.value.hint or "")
    assert survey(database_url).schema == 999
    with database.writing() as connection:
        connection.execute(update(meta).where(meta.c.key == "schema_version").values(value=str(SCHEMA_VERSION)))
    database.close()


def test_many_that_open_a_ledger_at_once_make_one(tmp_path: Path, database_url: str) -> None:
    store = open_store(parsed(database_url))
    with store.shaping() as connection:
        metadata.drop_all(connection)
    store.engine.dispose()
    failed: list[Exception] = []

    def opens() -> None:
        try:
            Database(database_url).close()
        except Exception as exc:  # noqa: BLE001 - a thread's edge
            failed.append(exc)

    threads = [threading.Thread(target=opens) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert failed == []
    database = Database(database_url)
    assert differences(database) == []
    database.close()


def test_tables_of_anothers_are_not_taken_for_a_ledger(database_url: str) -> None:
    store = open_store(parsed(database_url))
    with store.shaping() as connection:
        metadata.drop_all(connection)
        connection.exec_driver_sql("CREATE TABLE runs (theirs INTEGER)")
    try:
        with pytest.raises(ConfigError, match="runs"):
            Database(database_url)
    finally:
        with store.shaping() as connection:
            connection.exec_driver_sql("DROP TABLE runs")
        store.engine.dispose()
        Database(database_url).close()


def differences(database: Database) -> list[object]:
    """Between the tables that are there and those of the newest schema."""
    with database.reading() as connection:
        return list(compare_metadata(MigrationContext.configure(connection), metadata))


def test_a_database_that_knows_only_some_letters_is_refused(postgres_server: postgres.Server) -> None:
    postgres_server.sql("CREATE DATABASE odd ENCODING 'LATIN1' TEMPLATE template0")
    with pytest.raises(ConfigError, match="LATIN1"):
        Database(postgres_server.url("odd"))
