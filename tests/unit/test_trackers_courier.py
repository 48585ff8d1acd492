"""What couriers promise: nothing is left out, and one run's or receiver's trouble hinders nobody else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from sqlalchemy import delete

from eval_service.cli.exporting import curve_rows
from eval_service.contract.errors import ConfigError
from eval_service.contract.results import Alarm, AlarmKind
from eval_service.contract.states import PointState
from eval_service.fleet_config import FleetConfig, load_fleet
from eval_service.ledger.deliveries import Deliveries
from eval_service.ledger.schema import events
from eval_service.trackers.bureau import check_targets
from eval_service.trackers.config import TrackerConfig, WebhookConfig, WebhookEvent
from eval_service.trackers.items import scalars_of
from eval_service.trackers.lines import points_of
from eval_service.trackers.process import Worker
from tests.support.couriers import FakeReceiver, catch_up, courier, tell
from tests.support.ledger import Ledger, result
from tests.support.views import point

LINES = TrackerConfig(kind="jsonl")
SCALARS = TrackerConfig(kind="tensorboard")
FLEET = """
[service]
roots = ["."]
{service}
[groups.eval]
model = "."
{rest}
"""


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path)


def hook(*on: str) -> WebhookConfig:
    return WebhookConfig(url="https://h/x", secret_env="S", on=tuple(WebhookEvent(name) for name in on))


def test_every_end_is_told_once_in_any_order_of_steps_and_a_new_tracker_gets_what_was_before(ledger: Ledger) -> None:
    ledger.done(50)
    receiver = FakeReceiver()
    one = courier(ledger, SCALARS, receiver)
    catch_up(one)
    ledger.done(10)
    ledger.reach(PointState.SKIPPED, 20)
    ledger.reach(PointState.CANCELLED, 30)
    catch_up(one)
    assert receiver.seen == [("done", 50), ("done", 10), ("skipped", 20)]
    catch_up(courier(ledger, SCALARS, receiver))
    assert len(receiver.seen) == 3, "one that is started again goes on where it was"


def test_a_tracker_that_is_down_is_caught_up_with_nothing_missing(ledger: Ledger) -> None:
    receiver = FakeReceiver(down={"*"})
    one = courier(ledger, SCALARS, receiver)
    for step in (1, 2):
        ledger.done(step)
        catch_up(one)
    assert len(receiver.asked) == 1, "it is left alone until its time has come"
    (state,) = Deliveries(ledger.db).states()
    assert (state.waiting, state.failures, state.error) == (2, 1, "down")
    receiver.down.clear()
    ledger.clock.turn(5)
    catch_up(courier(ledger, SCALARS, receiver))
    assert receiver.seen == [("done", 1), ("done", 2)]
    assert Deliveries(ledger.db).states()[0].waiting == 0


def test_a_run_that_cannot_be_told_hinders_no_other(ledger: Ledger) -> None:
    ledger.put_run("r2")
    receiver = FakeReceiver(down={"r1"})
    one = courier(ledger, SCALARS, receiver)
    ledger.done(1)
    ledger.done(2, run="r2")
    catch_up(one)
    ledger.done(3, run="r2")
    catch_up(one)
    assert receiver.seen == [("done", 2), ("done", 3)]


def test_points_whose_events_are_pruned_are_told_from_the_ledger(ledger: Ledger) -> None:
    receiver = FakeReceiver()
    catch_up(courier(ledger, SCALARS, receiver))
    ledger.done(1)
    ledger.done(2)
    with ledger.db.writing() as connection:
        connection.execute(delete(events))
    ledger.reserve(3)
    catch_up(courier(ledger, SCALARS, receiver))
    assert sorted(receiver.seen) == [("done", 1), ("done", 2)]


def test_only_runs_that_it_takes_are_told(ledger: Ledger) -> None:
    receiver = FakeReceiver()
    ledger.put_run("other")
    ledger.done(1)
    ledger.done(1, run="other")
    catch_up(courier(ledger, TrackerConfig(kind="tensorboard", runs=("oth*",)), receiver))
    assert [item["run"] for item in receiver.told] == ["other"]


def test_a_webhook_is_told_of_news_of_each_kind_that_it_wants(ledger: Ledger) -> None:
    ledger.done(1, score=0.9)
    receiver, all_ = FakeReceiver(), FakeReceiver()
    catch_up(courier(ledger, hook("best"), receiver, "webhook:best"))
    catch_up(courier(ledger, hook(*WebhookEvent), all_, "webhook:all"))
    assert all_.told == [], "what was before is no news"
    ledger.done(2, score=0.5)
    ledger.done(3, score=0.95)
    ledger.reach(PointState.SKIPPED, 4)
    ledger.reach(PointState.FAILED, 5)
    alarmed = ledger.live(PointState.SCORING, 6)
    alarms = (Alarm(kind=AlarmKind.EOS_NEVER, message="none ended"),)
    assert ledger.moves.finish(alarmed, result(alarms=alarms, headline="exact", suite_digest="a" * 32))
    catch_up(courier(ledger, hook("best"), receiver, "webhook:best"))
    catch_up(courier(ledger, hook(*WebhookEvent), all_, "webhook:all"))
    assert receiver.seen == [("best", 3)]
    found = [("done", 2), ("done", 3), ("best", 3), ("skipped", 4), ("failed", 5), ("done", 6), ("alarm", 6)]
    assert all_.seen == found
    assert all_.told[-1]["data"]["alarms"] == ["eos_never"]


def test_keys_are_the_contracts_and_a_gap_has_one_too() -> None:
    found = scalars_of(point(10, 0.5))
    assert found["eval/letters/exact_match"] == 0.5
    assert {"eval/lag_steps", "eval/stall_s", "eval/export_s", "eval/queue_s", "eval/pin_s"} <= found.keys()
    skipped = scalars_of(point(10, state=PointState.SKIPPED, reason="busy"))
    assert skipped["eval/skipped_busy"] == 1.0


def test_the_curve_can_be_rebuilt_from_the_lines_beside_the_run(ledger: Ledger, tmp_path: Path) -> None:
    """By the real worker; a torn line, as a death in mid-write leaves it, spoils nothing."""
    ledger.done(2)
    ledger.done(1, score=0.25)
    tell(ledger, "jsonl", LINES, tmp_path)
    path = ledger.root / "r1/evals/points.jsonl"
    with path.open("a") as file:
        file.write('{"id": "torn')
    ledger.reach(PointState.SKIPPED, 3)
    ledger.done(2, digest="b" * 32, score=0.75)  # trained again: it takes the place of the first one
    tell(ledger, "jsonl", LINES, tmp_path)
    kept = [one for one in ledger.views.points(run="r1").points if not one.superseded]
    rebuilt = [one for one in points_of(path, "r1") if not one.superseded]
    assert [list(curve_rows(one)) for one in rebuilt] == [list(curve_rows(one)) for one in kept]
    assert [one.step for one in rebuilt] == [1, 2, 3]


def test_a_worker_that_hangs_is_ended_at_its_deadline_and_started_anew(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "evals")  # opening what lies under it fails, and the answer says so
    item = {"id": "i", "event": "done", "run": "r", "at": 1.0, "directory": str(tmp_path), "point": {}, "scalars": {}}
    worker = Worker("jsonl", LINES.model_copy(update={"timeout_s": 0.001}), state_dir=tmp_path, log=tmp_path / "log")
    assert "no answer within" in worker.deliver([item]).error
    assert worker.pid is None
    worker.close()
    patient = Worker("jsonl", LINES, state_dir=tmp_path, log=tmp_path / "log")
    assert "Error" in patient.deliver([item]).error
    patient.close()


@pytest.mark.parametrize("log", ["file/log", "directory"])
def test_a_worker_that_cannot_be_started_says_so_and_leaves_no_socket_open(tmp_path: Path, log: str) -> None:
    """A socket that its finalizer closes is a ResourceWarning, which no test may leave."""
    (tmp_path / "file").touch()
    (tmp_path / "directory").mkdir()
    worker = Worker("jsonl", LINES, state_dir=tmp_path, log=tmp_path / log)
    assert "its process ended" in worker.deliver([]).error
    assert worker.pid is None
    worker.close()


def fleet(tmp_path: Path, rest: str, service: str = "") -> FleetConfig:
    path = tmp_path / "fleet.toml"
    path.write_text(FLEET.format(rest=rest, service=service))
    return load_fleet(path)


@pytest.mark.parametrize(
    ("rest", "key"),
    [
        ('[webhooks.w]\nurl = "https://evil.example/x"\nsecret_env = "S"', "webhooks.w.url"),
        ('[webhooks.w]\nurl = "https://u:p@h/x"\nsecret_env = "S"', "webhooks.w.url"),
        ('[trackers.t]\nkind = "wandb"', "trackers.t.api_key_env"),
        ('[trackers.t]\nkind = "mlflow"', "trackers.t.url"),
        ('[trackers.t]\nkind = "jsonl"\nproject = "x"', "trackers.t.project"),
        ('[traces]\nendpoint = "collector"', "traces.endpoint"),
    ],
)
def test_a_mistake_in_the_file_is_named_with_its_key(tmp_path: Path, rest: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        fleet(tmp_path, rest)
    assert caught.value.field == key


def test_a_secret_that_is_not_there_is_refused_before_anything_starts(tmp_path: Path) -> None:
    config = fleet(tmp_path, '[webhooks.w]\nurl = "https://h/x"\nsecret_env = "HOOK"', 'webhook_hosts = ["h"]')
    with pytest.raises(ConfigError, match="HOOK") as caught:
        check_targets(config, {})
    assert caught.value.field == "webhooks.w"
    check_targets(config, {"HOOK": "s"})
