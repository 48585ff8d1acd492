"""What PostgreSQL adds to a ledger: a connection that may be lost at any moment, and controllers on several hosts."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from sqlalchemy import Engine, event, select

from eval_service.contract.errors import ConfigError, Unavailable
from eval_service.contract.states import PointState, Reason
from eval_service.contract.wire import DispatchRequest, FleetView
from eval_service.fleet_config import FleetConfig
from eval_service.ledger.database import Database
from eval_service.ledger.events import EventLog
from eval_service.ledger.lock import LeaseLock
from eval_service.ledger.moves import Moves
from eval_service.ledger.schema import events, points
from eval_service.ledger.store import parsed
from eval_service.ledger.upkeep import backup, survey
from eval_service.ledger.views import Views
from tests.support import postgres
from tests.support.api import Api
from tests.support.ledger import Ledger, result
from tests.support.relay import Lost, Relay

S = PointState
FAILOVER_S = 30.0  # 10 s are promised, to who has a machine that tests don't share
ENDLESS_S = 3600.0  # the lease of who finds everybody alive who has shown himself at all
SECRET = "hunter2"


@pytest.fixture
def ledger(tmp_path: Path, postgres_url: str) -> Ledger:
    return Ledger(tmp_path, postgres_url)


# --- who acts


HOLDER = """
import sys
from sqlalchemy import text
from eval_service.ledger.database import Database, Fenced
from eval_service.ledger.lock import LeaseLock
from eval_service.ledger.store import parsed
database = Database(sys.argv[1])
lock = LeaseLock(parsed(sys.argv[1]))
assert lock.try_take()
epoch = database.take_epoch()
def write():
    with database.acting(epoch) as connection:
        connection.execute(text("UPDATE runs SET step = 99"))
        print("in it", flush=True)
        sys.stdin.readline()
for _ in range(2):
    try:
        write()
    except Exception as exc:
        print(type(exc).__name__, flush=True)
"""


@contextmanager
def holder(url: str) -> Iterator[subprocess.Popen[str]]:
    """A controller in a process of its own, within a write transaction."""
    command = [sys.executable, "-c", HOLDER, url]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "in it\n"
            another = LeaseLock(parsed(url), lease_s=ENDLESS_S)
            assert not another.try_take()
            another.release()
            yield process
        finally:
            process.kill()


def taken_after_s(ledger: Ledger, lock: LeaseLock) -> float:
    """How long another one waits until it acts, from now on."""
    began = time.monotonic()
    while not lock.try_take():
        assert time.monotonic() - began < FAILOVER_S
        time.sleep(0.1)
    ledger.take_over().recover()
    return time.monotonic() - began


def test_a_controller_that_hangs_within_a_write_is_replaced_and_writes_nothing_after(ledger: Ledger) -> None:
    """Its session is open and its host answers for it: only its lease and its silence tell."""
    lock = LeaseLock(parsed(ledger.db.url))
    with holder(ledger.db.url) as hung:
        hung.send_signal(signal.SIGSTOP)
        assert taken_after_s(ledger, lock) < FAILOVER_S
        point = ledger.live(S.RUNNING, 1)
        hung.send_signal(signal.SIGCONT)
        told, _ = hung.communicate("\n\n", timeout=30)
    assert told.split() == ["Unavailable", "Fenced"]
    assert ledger.views.run("r1").step != 99
    assert ledger.state(point) is S.RUNNING
    assert lock.held
    lock.release()


def test_a_controller_that_is_killed_is_replaced_and_its_write_is_undone(ledger: Ledger) -> None:
    lock = LeaseLock(parsed(ledger.db.url), lease_s=1.5)
    with holder(ledger.db.url) as killed:
        killed.kill()
        assert taken_after_s(ledger, lock) < FAILOVER_S
    assert ledger.views.run("r1").step != 99
    lock.release()


def test_one_of_many_has_the_lock_and_gives_it_up_at_once(ledger: Ledger) -> None:
    locks = [LeaseLock(parsed(ledger.db.url), lease_s=ENDLESS_S) for _ in range(4)]
    taken: list[bool] = []
    threads = [threading.Thread(target=lambda lock=lock: taken.append(lock.try_take())) for lock in locks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert sorted(taken) == [False, False, False, True]
    (first,) = [lock for lock in locks if lock.held]
    other = next(lock for lock in locks if not lock.held)
    first.release()
    assert not first.held
    assert other.try_take()
    for lock in locks:
        lock.release()


def test_a_renewal_that_was_under_way_does_not_take_back_what_was_given_up(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eval_service.ledger.lock.RENEW_S", 0.02)
    under_way, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def hold_up(*_: object) -> None:
        if threading.current_thread().name == "lease" and not under_way.is_set():
            under_way.set()
            assert go_on.wait(30)

    class Slow(LeaseLock):
        def _renew(self, engine: Engine, released: threading.Event) -> None:
            event.listen(engine, "before_cursor_execute", hold_up)
            super()._renew(engine, released)
            event.remove(engine, "before_cursor_execute", hold_up)
            ended.set()

    lock, other = Slow(parsed(ledger.db.url)), LeaseLock(parsed(ledger.db.url))
    assert lock.try_take()
    assert under_way.wait(30)
    lock.release()
    go_on.set()
    assert ended.wait(30)
    assert other.try_take()
    other.release()


def asked(step: int) -> DispatchRequest:
    values = {"run": "r1", "step": step, "reservation": str(uuid.uuid4()), "wait_s": 0}
    return DispatchRequest.model_validate(values)


def test_writers_in_many_places_number_points_and_events_in_the_order_of_their_commits(ledger: Ledger) -> None:
    others = [Database(ledger.db.url) for _ in range(3)]
    sides = [type(ledger.intents)(database, ledger.bounds) for database in others]
    ledger.put_run(max_in_flight=100)
    seen: list[int] = []
    done = threading.Event()

    def follow() -> None:
        log = EventLog(ledger.db)
        while not (done.is_set() and len(seen) >= 30):
            seen.extend(event.seq for event in log.after(seen[-1] if seen else 0))

    def dispatch(place: int) -> None:
        for step in range(10):
            sides[place].dispatch(asked(step * 3 + place))

    follower = threading.Thread(target=follow)
    follower.start()
    threads = [threading.Thread(target=dispatch, args=(place,)) for place in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    done.set()
    follower.join(timeout=30)
    for database in others:
        database.close()
    with ledger.db.reading() as connection:
        assert seen == list(connection.execute(select(events.c.seq).order_by(events.c.seq)).scalars())
        seqs = list(connection.execute(select(points.c.seq).order_by(points.c.seq)).scalars())
    assert seqs == list(range(1, 31))


# --- a connection that is lost


def test_a_connection_that_is_cut_in_mid_transaction_leaves_nothing_and_the_next_write_goes_through(
    ledger: Ledger, postgres_server: postgres.Server
) -> None:
    point = ledger.live(S.SCORING)

    def write() -> None:
        with ledger.db.acting(ledger.moves.epoch) as connection:
            connection.exec_driver_sql("UPDATE points SET score = 0.9")
            assert postgres_server.cut("ledger") >= 1
            connection.exec_driver_sql("UPDATE points SET stderr = 0.9")

    with pytest.raises(Unavailable):
        write()
    assert ledger.point(point).score is None
    assert ledger.moves.finish(point, result())
    assert ledger.point(point).score == 0.5


@pytest.fixture
def relay(postgres_server: postgres.Server) -> Iterator[tuple[Relay, str]]:
    """What loses answers, and the URL of the ledger through it."""
    with tempfile.TemporaryDirectory(prefix="evalfleet-relay-") as place:
        made = Relay(postgres_server.base, Path(place))
        yield made, f"postgresql://evalfleet@/ledger?host={place}"
        made.close()


@pytest.mark.parametrize("lost", Lost)
def test_a_result_whose_commits_answer_was_lost_is_there_once_and_is_not_taken_for_undone(
    ledger: Ledger, relay: tuple[Relay, str], lost: Lost
) -> None:
    point = ledger.live(S.SCORING)
    between, url = relay
    database = Database(url, clock=ledger.clock)
    moves = Moves(database, ledger.moves.epoch, max_attempts=3)
    between.lose = lost
    if lost is Lost.ANSWER:
        assert moves.finish(point, result()), "it is asked for what became of it"
    else:
        with pytest.raises(Unavailable):
            moves.finish(point, result())
        assert ledger.state(point) is S.SCORING
        assert moves.finish(point, result())
    found = ledger.point(point)
    assert (found.state, found.score, len(found.history)) == (S.DONE, 0.5, 1)
    told = [event for event in EventLog(ledger.db).after(0) if '"done"' in event.data]
    assert len(told) == 1
    between.lose = lost
    with suppress(Unavailable):
        moves.show_life(FleetView(groups=(), seen_at=None))
    moves.show_life(FleetView(groups=(), seen_at=None))  # over the connection that is kept
    moves.close()
    database.close()


def test_what_a_lane_writes_again_is_the_same_move(ledger: Ledger) -> None:
    """As when the answer to the commit was lost and the server did not come back in time."""
    point = ledger.live(S.RUNNING)
    assert ledger.moves.advance(point, S.SCORING)
    assert ledger.moves.advance(point, S.SCORING)
    assert ledger.moves.finish(point, result())
    assert ledger.moves.finish(point, result()), "its samples are those that the ledger names: they must stay"
    assert not ledger.moves.finish(point, result(samples_path="/another")), "somebody else's result"
    assert len(ledger.point(point).history) == 1


def test_while_the_server_is_away_a_gateway_answers_503_and_when_it_is_back_the_same_point(
    tmp_path: Path, postgres_url: str, postgres_server: postgres.Server
) -> None:
    api = Api(tmp_path, url=postgres_url)
    body = {"run": "r1", "step": 1, "reservation": "8e4b5b0e-7d9f-4d2b-8a55-0f3f6b7c9d10", "wait_s": 0}
    first = api.post("/dispatch", body, status=202)
    postgres_server.end()
    try:
        for method, path, json in (("POST", "/dispatch", body | {"step": 2}), ("GET", "/points", None)):
            answer = api.request(method, path, json=json)
            assert answer.status_code == 503, answer.text
            assert answer.headers["retry-after"] == "1"
            assert answer.json()["error"]["code"] == "unavailable"
    finally:
        postgres_server.start()
    again = api.post("/dispatch", body)
    assert again["points"][0]["id"] == first["points"][0]["id"]
    assert api.get("/points")["total"] == 1
    api.services.close()


def test_a_lock_outlives_a_server_that_was_away_for_a_moment(ledger: Ledger, postgres_server: postgres.Server) -> None:
    lock = LeaseLock(parsed(ledger.db.url))
    assert lock.try_take()
    postgres_server.end(signal.SIGQUIT)
    postgres_server.start()
    with pytest.raises(Unavailable):
        LeaseLock(parsed(ledger.db.url.replace("evalfleet@", "nobody@"))).try_take()
    other = LeaseLock(parsed(ledger.db.url), lease_s=ENDLESS_S)
    assert not other.try_take()
    assert lock.held
    lock.release()
    other.release()


# --- what is not shown, and what is kept


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://evalfleet:{SECRET}@127.0.0.1:1/ledger",
        f"postgresql://evalfleet:{SECRET}@/ledger?host=/nowhere",
        f"postgresql://evalfleet:{SECRET}@host:port/ledger",
        f"mysql://evalfleet:{SECRET}@host/ledger",
        f"postgresql://evalfleet@/ledger?password={SECRET}",
        f"{SECRET}",
    ],
)
def test_no_error_shows_the_password(url: str) -> None:
    with pytest.raises((ConfigError, Unavailable)) as caught:
        Database(url)
    assert SECRET not in str(caught.value)
    with pytest.raises((ConfigError, Unavailable)) as caught:
        survey(url)
    assert SECRET not in str(caught.value)


def test_neither_a_fleet_nor_a_look_at_the_ledger_shows_the_password(
    postgres_url: str, postgres_server: postgres.Server
) -> None:
    url = postgres_server.url("ledger", password=SECRET)
    fleet = FleetConfig.model_validate({"service": {"roots": ["/"], "ledger": url}, "groups": {"eval": {"model": "/"}}})
    assert SECRET not in repr(fleet)
    Database(url).close()
    assert SECRET not in repr(survey(url))
    assert survey(url).schema is not None


def test_a_text_that_postgresql_can_not_keep_is_no_broken_ledger(ledger: Ledger) -> None:
    point = ledger.queued(1)
    assert ledger.moves.end(point, S.FAILED, Reason.DEADLINE, "an engine said \0 and more")
    assert ledger.point(point).detail == "an engine said \ufffd and more"


def test_a_backup_is_whole_and_its_password_is_on_no_command_line(
    ledger: Ledger, postgres_server: postgres.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = ledger.done(1)
    monkeypatch.setenv("PATH", str(postgres.programs()), prepend=":")
    seen: list[list[str]] = []
    run = subprocess.run

    def noted(command: list[str], **options: object) -> object:
        seen.append(command)
        return run(command, **options)  # type: ignore[call-overload]  # whatever it is called with

    monkeypatch.setattr("eval_service.ledger.upkeep.subprocess.run", noted)
    size_bytes = backup(postgres_server.url("ledger", password=SECRET), tmp_path / "ledger.dump")
    assert size_bytes == (tmp_path / "ledger.dump").stat().st_size
    assert SECRET not in str(seen)
    assert "@" in seen[0][-1]
    assert "***" not in seen[0][-1], "a password that is shown so is one that is sent so"
    postgres_server.sql("CREATE DATABASE restored")
    monkeypatch.undo()
    copy = postgres_server.base / "ledger.dump"
    copy.write_bytes((tmp_path / "ledger.dump").read_bytes())
    copy.chmod(0o644)
    postgres_server.run("pg_restore", "-d", "restored", str(copy))
    again = Database(postgres_server.url("restored"))
    assert Views(again, version="0").point(point).score == 0.5
    again.close()


def test_without_pg_dump_a_backup_says_what_to_run(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="pg_dump") as caught:
        backup(ledger.db.url, tmp_path / "copy")
    assert "pg_dump -Fc" in (caught.value.hint or "")
    assert not (tmp_path / "copy").exists()
