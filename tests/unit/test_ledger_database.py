"""The ledger's file: who may write, where it may lie, and what a broken one is told as."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import event, insert, update

from eval_service.contract.errors import ConfigError, Unavailable
from eval_service.contract.states import PointState, Reason
from eval_service.contract.wire import FleetView
from eval_service.controller.housekeeping import CHECKPOINT_S
from eval_service.ledger import sqlite as sqlite_store
from eval_service.ledger.database import Database, Fenced
from eval_service.ledger.lock import FileLock, lock_of
from eval_service.ledger.moves import Facts, Moves
from eval_service.ledger.place import NETWORK, check_local
from eval_service.ledger.retention import Retention
from eval_service.ledger.schema import commands, points, runs
from eval_service.ledger.store import file_of, parsed
from tests.support.ledger import EXPIRY_S, Ledger, result

S = PointState


@pytest.fixture
def ledger(tmp_path: Path, database_url: str) -> Ledger:
    return Ledger(tmp_path, database_url)


# --- the epoch


def writes(old: Moves, stale: Retention, ledger: Ledger, queued: str, scoring: str) -> dict[str, Callable[[], object]]:
    snapshot = ledger.snapshot(1)["id"]
    facts = Facts(ledger.manifest(1), 32)
    return {
        "recover": old.recover,
        "take_intents": lambda: old.take_intents(reservation_timeout_s=EXPIRY_S),
        "tend_drains": old.tend_drains,
        "show_life": lambda: old.show_life(FleetView(groups=(), seen_at=None)),
        "admit": lambda: old.admit(snapshot, facts),
        "refuse": lambda: old.refuse(snapshot, Reason.CKPT_MISSING, ""),
        "begin_attempt": lambda: old.begin_attempt(queued),
        "advance": lambda: old.advance(scoring, S.SCORING),
        "finish": lambda: old.finish(scoring, result()),
        "end": lambda: old.end(queued, S.CANCELLED, Reason.USER, ""),
        "requeue": lambda: old.requeue(scoring, "engine", ""),
        "end_unserved": lambda: old.end_unserved(queued, ""),
        "note_links": lambda: old.note_links(snapshot, "/x"),
        "forget_links": lambda: old.forget_links(snapshot),
        "let_go": stale.let_go,
        "claim": lambda: stale.claim(snapshot),
        "deleted": lambda: stale.deleted(snapshot),
        "forget_events": stale.forget_events,
        "forget": lambda: stale.forget("r1"),
    }


def test_a_controller_that_was_replaced_writes_nothing_at_all(ledger: Ledger) -> None:
    queued, scoring = ledger.queued(1), ledger.live(S.SCORING, 2)
    old, stale = ledger.moves, ledger.retention
    ledger.take_over()
    before = (ledger.point(queued), ledger.point(scoring), dict(ledger.snapshot(1)))
    calls = writes(old, stale, ledger, queued, scoring)
    for name, call in calls.items():
        with pytest.raises(Fenced):
            call()
        assert (ledger.point(queued), ledger.point(scoring), dict(ledger.snapshot(1))) == before, name
    readers = {"unadmitted", "runnable", "manifest", "overdue", "overtaken", "strays", "state", "changes", "close"}
    readers |= {"time_matters"}
    public = {name for name in vars(Moves) if not name.startswith("_")}
    assert public - readers <= set(calls), "a write that this test does not know"


def test_a_ledger_is_opened_while_a_hung_process_holds_its_write_lock(ledger: Ledger) -> None:
    with ledger.db.writing():
        again = Database(ledger.db.url)
        assert again.read_meta("epoch") is not None
        again.close()


def test_one_bad_row_keeps_no_other_from_being_carried_out_or_read(ledger: Ledger) -> None:
    bad, good, gone = ledger.queued(1), ledger.queued(2), ledger.queued(3)
    ledger.put_run("odd")
    ledger.queued(1, run="odd")
    ledger.orders.cancel(gone)
    with ledger.db.writing() as connection:
        connection.execute(insert(commands).values(kind="of a later version", target=good, created_at=0.0))
        connection.execute(insert(commands).values(kind="cancel", target=bad, created_at=0.0))
        connection.execute(update(points).where(points.c.id == bad).values(state="of a later version"))
        connection.execute(update(runs).where(runs.c.run == "odd").values(spec="{"))
    ledger.look()
    assert ledger.state(gone) is S.CANCELLED
    assert [point.id for point in ledger.moves.runnable()] == [good]
    assert ledger.look() == 0, "what can't be done is not asked for again"
    assert [place.run for place in ledger.retention.places()] == ["r1"]


def test_every_epoch_is_higher_than_all_before(database_url: str) -> None:
    first, second = Database(database_url), Database(database_url)
    assert [first.take_epoch(), second.take_epoch(), first.take_epoch()] == [1, 2, 3]
    assert Database(database_url).take_epoch() == 4


def test_a_write_that_fails_half_way_leaves_nothing(ledger: Ledger) -> None:
    point = ledger.live(S.RUNNING)
    with pytest.raises(ValueError, match="no reason"):
        ledger.moves.end(point, S.FAILED, Reason.BUSY, "")
    found = ledger.point(point)
    assert (found.state, found.history[0].outcome) == (S.RUNNING, None)


# --- the lock


def test_the_lock_is_one_processs_and_ends_with_it(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db.lock"
    code = (
        "import sys, pathlib; from eval_service.ledger.lock import FileLock\n"
        "lock = FileLock(pathlib.Path(sys.argv[1])); print(lock.try_take(), flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        mine = FileLock(path)
        assert not mine.try_take()
        assert not mine.held
        holder.kill()
        holder.wait(timeout=30)
        assert mine.try_take()
    assert mine.try_take(), "a second time is as good"
    assert not FileLock(path).try_take()
    mine.release()
    mine.release()
    assert FileLock(path).try_take()


def test_a_ledgers_lock_lies_beside_it_and_one_without_is_refused(tmp_path: Path) -> None:
    lock = lock_of(f"sqlite:///{tmp_path}/ledger.db")
    assert isinstance(lock, FileLock)
    assert lock.path == tmp_path / "ledger.db.lock"
    for url in ("sqlite://", "mysql://host/db"):
        with pytest.raises(ConfigError) as caught:
            lock_of(url)
        assert caught.value.field == "service.ledger"


# --- where it lies

MOUNTS = """\
/dev/sda1 / ext4 rw,relatime 0 0
server:/export /shared nfs4 rw,vers=4.2 0 0
/dev/sdb1 /shared/local xfs rw 0 0
user@host:/d /home/My\\040Files fuse.sshfs rw 0 0
junk
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/shared/state/ledger.db", "nfs4"), ("/home/My Files/ledger.db", "fuse.sshfs"), ("/shared", "nfs4")],
)
def test_a_ledger_on_a_network_file_system_is_refused_by_name(path: str, kind: str) -> None:
    with pytest.raises(ConfigError, match=kind) as caught:
        check_local(Path(path), mounts=lambda: MOUNTS)
    assert caught.value.field == "service.ledger"
    assert "state_dir" in (caught.value.hint or "")


@pytest.mark.parametrize("path", ["/var/ledger.db", "/shared/local/ledger.db", "/sharedness/ledger.db"])
def test_a_ledger_on_a_local_disk_is_taken(path: str) -> None:
    check_local(Path(path), mounts=lambda: MOUNTS)
    check_local(Path(path), mounts=lambda: "")


@pytest.mark.parametrize("kind", ["nfs", "cifs", "fuse.sshfs", "lustre", "gpfs", "beegfs", "ceph", "glusterfs"])
def test_the_usual_network_file_systems_are_known(kind: str) -> None:
    assert kind in NETWORK


def test_a_mount_that_hides_another_is_the_one_that_counts(tmp_path: Path) -> None:
    hidden = f"server:/x {tmp_path} nfs rw 0 0\ntmpfs {tmp_path} tmpfs rw 0 0\n"
    Database(f"sqlite:///{tmp_path}/ledger.db", mounts=lambda: hidden).close()
    shown = "\n".join(reversed(hidden.splitlines()))
    with pytest.raises(ConfigError, match="network file system"):
        Database(f"sqlite:///{tmp_path}/other.db", mounts=lambda: shown)
    assert not (tmp_path / "other.db").exists()


def test_a_link_to_a_network_file_system_is_followed(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "near").symlink_to(tmp_path / "far")
    with pytest.raises(ConfigError):
        check_local(tmp_path / "near" / "ledger.db", mounts=lambda: f"server:/x {tmp_path / 'far'} nfs rw 0 0\n")


def test_what_the_driver_says_is_told_as_unavailable(tmp_path: Path) -> None:
    (tmp_path / "ledger.db").write_bytes(b"this is no database, it is a text of some length" * 40)
    with pytest.raises(Unavailable) as caught:
        Database(f"sqlite:///{tmp_path / 'ledger.db'}")
    assert caught.value.field == "ledger"
    with pytest.raises(Unavailable):
        Database(f"sqlite:///{tmp_path / 'nowhere' / 'ledger.db'}")


def test_a_ledger_that_another_process_writes_to_is_unavailable_and_not_broken(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    blocker = sqlite3.connect(ledger.base / "ledger.db", isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    event.listen(ledger.db.engine, "connect", lambda connection, _: connection.execute("PRAGMA busy_timeout=1"))
    ledger.db.engine.dispose()
    with pytest.raises(Unavailable):
        ledger.intents.probe()
    blocker.close()
    ledger.intents.probe()


def wal(ledger: Ledger) -> Path:
    file = file_of(parsed(ledger.db.url))
    assert file is not None
    return Path(f"{file}-wal")


def test_no_commit_makes_a_checkpoint_where_a_controller_makes_them(tmp_path: Path) -> None:
    """All writers wait for a commit that does; 16 callers make some 700 dispatches a second on two cores."""
    ledger = Ledger(tmp_path)
    ledger.db.checkpoint()
    ledger.send(0)
    before, number = wal(ledger).stat().st_size, 50
    for step in range(1, number + 1):
        ledger.send(step)
    page = 4096 + 24
    pages = (wal(ledger).stat().st_size - before) / page / number
    assert pages > 3, "they were counted"
    assert CHECKPOINT_S * 1000 * pages < sqlite_store._MOST_WAL_PAGES


def test_what_a_burst_took_of_the_disk_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_store, "_KEPT_WAL_BYTES", 1 << 16)
    ledger = Ledger(tmp_path)
    for step in range(100):
        ledger.send(step)
    assert wal(ledger).stat().st_size > 1 << 20
    ledger.db.checkpoint()
    ledger.send(100)
    assert wal(ledger).stat().st_size < 1 << 18
