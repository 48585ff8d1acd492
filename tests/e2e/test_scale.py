"""Engines come and go while points run: asked for, and by the queued work; no sample and no point is lost.

The service of this module has its ledger in a real PostgreSQL where one is installed, and loses it there too.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil
import pytest

from eval_service.contract.client import EvalClient
from eval_service.contract.errors import Forbidden, InvalidRequest, Unavailable
from eval_service.contract.states import PointState
from eval_service.contract.token import bearer
from eval_service.contract.wire import DispatchRequest, EngineState, GroupView, RunSpec, Source, StatusView
from eval_service.ledger.database import Database
from eval_service.ledger.events import Event, EventKind, EventLog
from tests.support import postgres
from tests.support.live import DONE, PROMPTS, SUITE, Live, lane, serving, wait_for
from tests.support.relay import Lost, Relay
from tests.support.work import Work

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]
# All that the service of this module is told in confidence.
NAMES = ("OPS", "LOOK", "HOOK", "LANES", "LEDGER")
SECRETS = {f"EVALFLEET_TEST_{name}": f"{name.lower()}-{uuid.uuid4().hex}" for name in NAMES}
SERVICE = """
webhook_hosts = ["127.0.0.1:9"]
proxy_api_key_env = "EVALFLEET_TEST_LANES"
"""
TOKENS = """
[tokens.ops]
scope = "admin"
token_env = "EVALFLEET_TEST_OPS"

[tokens.look]
scope = "read"
token_file = "look.token"

[webhooks.chat]
url = "http://127.0.0.1:9/hook"
secret_env = "EVALFLEET_TEST_HOOK"
"""
STARTS_S = 180.0  # several processes at once, on a busy host
SLOW = "\n[groups.eval.overrides]\nlatency_s = 1.0\n"


@dataclass
class Remote:
    """The ledger in PostgreSQL, and what stands between it and the service."""

    server: postgres.Server
    relay: Relay
    place: str
    database: str = field(default_factory=lambda: f"fleet_{uuid.uuid4().hex[:8]}")

    @property
    def settings(self) -> str:
        """As `fleet.toml` has it, with a password."""
        url = self.server.url(self.database, password=SECRETS["EVALFLEET_TEST_LEDGER"])
        return f'ledger = "{url.replace(str(self.server.base), self.place)}"\n'


@pytest.fixture(scope="module")
def remote(request: pytest.FixtureRequest) -> Iterator[Remote | None]:
    """None: no PostgreSQL is installed, and the service has SQLite."""
    if postgres.programs() is None:
        yield None
        return
    server = request.getfixturevalue("postgres_server")
    with tempfile.TemporaryDirectory(prefix="evalfleet-relay-") as place:
        found = Remote(server, Relay(server.base, Path(place)), place)
        server.sql(f"CREATE DATABASE {found.database}")
        yield found
        found.relay.close()


@pytest.fixture(scope="module")
def fakes(tmp_path_factory: pytest.TempPathFactory, remote: Remote | None) -> Iterator[Live]:
    """A service of its own with up to four fake engines, each slow enough to be caught at work."""
    base = Path(tmp_path_factory.mktemp("fakes"))
    (base / "look.token").write_text(SECRETS["EVALFLEET_TEST_LOOK"])
    settings = SERVICE + (remote.settings if remote is not None else "")
    shape = {"grade": "fake", "bounds": "[1, 4]", "settings": settings, "more": SLOW + TOKENS}
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            for name, secret in SECRETS.items():
                if name not in ("EVALFLEET_TEST_LOOK", "EVALFLEET_TEST_LEDGER"):
                    patch.setenv(name, secret)
            patch.setenv("EVALFLEET_TOKEN", SECRETS["EVALFLEET_TEST_OPS"])
            service = stack.enter_context(serving(base, **shape))
        yield service


def group(live: Live) -> GroupView:
    return next(group for group in live.client.fleet().groups if group.name == "eval")


def dispatch(live: Live, run: str, step: int, suite: str, reservation: str | None = None) -> str:
    request = DispatchRequest(
        run=run,
        step=step,
        suites=(suite,),
        reservation=reservation or str(uuid.uuid4()),
        snapshot=str(live.model),
        source=Source.CALLER,
        force=True,
    )
    return live.client.dispatch(request).points[0].id


def settled(live: Live, engines: int) -> GroupView:
    """Wait until there are as many as wanted, all of them ready, and none more."""

    def look() -> GroupView | None:
        found = group(live)
        return found if (found.desired, found.actual, found.ready) == (engines, engines, engines) else None

    return wait_for(look, f"{engines} engines", STARTS_S)


def settled_at(live: Live, engines: int) -> None:
    """Wait until so many are there, in whatever state."""
    wait_for(lambda: group(live).actual == engines, f"{engines} engines", STARTS_S)


def test_the_fleet_follows_scale_up_and_down_and_shows_desired_and_actual(fakes: Live) -> None:
    first = settled(fakes, 1)
    assert (first.least, first.most, first.sized_by) == (1, 4, "config")
    fakes.client.scale("eval", 4)
    settled(fakes, 4)
    fakes.client.scale("eval", 2)
    last = settled(fakes, 2)
    assert last.sized_by == "scale"
    assert [engine.state for engine in last.engines] == [EngineState.READY] * 2, "who left in order is not lost"
    with pytest.raises(InvalidRequest, match="1 to 4 engines"):
        fakes.client.scale("eval", 5)


def test_points_under_way_lose_nothing_while_engines_come_and_go(fakes: Live) -> None:
    work = Work(fakes, "swings", "slow", at_once=2)
    fakes.client.scale("eval", 4)
    settled(fakes, 4)
    for engines in (1, 4, 2):
        work.begin()  # of its own: on a busy host a swing outlasts what was there
        # In the view, which is written once a second: points may come and go between one and the next.
        work.until(lambda: any(engine.in_flight for engine in group(fakes).engines), "work in flight")
        fakes.client.scale("eval", engines)
        settled_at(fakes, engines)
    points = work.whole()
    assert {point.attempts for point in points} == {1}, "an engine that leaves costs a point no attempt"
    assert not any(sample.error for point in points for sample in fakes.samples(point.id))


def processes_of(live: Live) -> tuple[set[str], set[str]]:
    """Command lines, and the values of variables, of all that the service has started."""
    lines, values = set(), set()
    for one in psutil.Process(live.child.process.pid).children(recursive=True):
        with suppress(psutil.Error):
            lines.add(" ".join(one.cmdline()))
            values |= set(one.environ().values())
    return lines, values


def content(path: Path) -> bytes:
    """Of a file that may be going."""
    with suppress(OSError):
        return path.read_bytes()
    return b""


def test_no_secret_is_in_a_log_the_ledger_a_command_line_or_what_processes_inherit(
    fakes: Live, remote: Remote | None
) -> None:
    """Users find their keys in log files: whatever the service is told in confidence stays where it was put."""
    ops, look = SECRETS["EVALFLEET_TEST_OPS"], SECRETS["EVALFLEET_TEST_LOOK"]
    fakes.client.put_run("secret", RunSpec(root=str(fakes.root), suites=(SUITE,)))
    dispatch(fakes, "secret", 0, SUITE)
    assert [point.state for point in fakes.ended("secret", 1)] == [DONE]
    serving = fakes.client.serve(fakes.points("secret")[0].id)
    wait_for(lambda: fakes.client.serving(serving.point).engines, "an engine to serve it")
    body = {"text": "hi", "sampling_params": {"max_new_tokens": 2}}
    with lane(serving.url) as http:
        for token, status in ((ops, 200), (SECRETS["EVALFLEET_TEST_LANES"], 200), (look, 401), ("", 401)):
            assert http.post("/generate", json=body, headers=bearer(token or None)).status_code == status
    assert fakes.http.get("/runs").status_code == 401
    assert fakes.http.get("/runs", headers=bearer(look)).status_code == 200
    with EvalClient(fakes.url, token=look) as reader, pytest.raises(Forbidden):
        reader.pause("secret")
    command = [sys.executable, "-m", "eval_service.cli.main", "runs", "--url", fakes.url, "--token"]
    ran = [subprocess.run([*command, token], capture_output=True, text=True, timeout=60) for token in (ops, look + "x")]  # noqa: PLW1510
    assert [one.returncode for one in ran] == [0, 2]
    lines, inherited = processes_of(fakes)
    assert not inherited & {ops, look, SECRETS["EVALFLEET_TEST_LEDGER"]}
    rays = {Path(found) for line in lines for found in re.findall(r"(/[^\s=:]*/evalfleet-[^/\s]+)/", line)}
    assert rays
    # Unlike `rglob`, a walk does not mind what goes meanwhile.
    walked = [Path(at, name) for place in (fakes.base, *rays) for at, _, names in os.walk(place) for name in names]
    files = [path for path in walked if path.is_file()]
    kept = "ledger.db"
    if remote is not None:
        kept, dump, log = "ledger.pass", fakes.base / "ledger.dump", remote.server.base / "log"
        dump.write_text(remote.server.run("pg_dump", remote.database))
        assert "COPY public.points" in dump.read_text()
        files += [dump, log]
    assert {kept, "service.log", "gcs_server.out"} <= {path.name for path in files}
    given = {"look.token", "fleet.toml", "ledger.pass"}  # where they were put, for their owner's eyes
    assert {path.stat().st_mode & 0o077 for path in files if path.name == "ledger.pass"} <= {0}
    written = b"".join(content(path) for path in files if path.name not in given)
    told = written + "\n".join([*lines, *(one.stdout + one.stderr for one in ran)]).encode()
    assert [name for name, secret in SECRETS.items() if secret.encode() in told] == []


def whole(live: Live, run: str, steps: int) -> None:
    """Wait until each of so many points is done, once, with each of its samples once."""
    points = live.ended(run, steps, 180.0)
    assert [(point.step, point.state) for point in points] == [(step, DONE) for step in range(steps)]
    assert live.client.points(run=run).total == steps
    for point in points:
        samples = live.samples(point.id)
        assert sorted(sample.index for sample in samples) == list(range(PROMPTS))
        assert {sample.weight_version for sample in samples} == {point.weight_version}


@pytest.fixture
def lossy(remote: Remote | None) -> Remote:
    if remote is None:
        pytest.skip(postgres.MISSING)
    return remote


def done_by_events(remote: Remote, run: str) -> list[int]:
    """The steps that a reader of the events hears to be done, as often as it hears it."""
    ledger = Database(remote.server.url(remote.database))
    try:
        log, told = EventLog(ledger), list[Event]()
        while page := log.after(told[-1].seq if told else 0):
            told += page
    finally:
        ledger.close()
    moves = [json.loads(event.data) for event in told if event.run == run and event.kind == EventKind.POINT]
    return [move["step"] for move in moves if move["state"] == "done"]


def test_commits_answers_the_server_and_the_controller_are_lost_on_postgresql_and_nothing_else(
    fakes: Live, lossy: Remote
) -> None:
    """Connections in mid-write, of gateway, controller and lease; then the server, and then who acts."""
    fakes.client.put_run("lossy", RunSpec(root=str(fakes.root), suites=(SUITE,), max_in_flight=9))

    def taken(step: int, reservation: str) -> str:
        def asked() -> str | None:
            with suppress(Unavailable):
                return dispatch(fakes, "lossy", step, SUITE, reservation)
            return None

        return wait_for(asked, "a dispatch to be taken, under the same reservation")

    points: dict[str, str] = {}
    for step, lost in enumerate(Lost):
        lossy.relay.lose = lost
        reservation = str(uuid.uuid4())
        points[reservation] = taken(step, reservation)
    beside = Work(fakes, "beside", SUITE)
    beside.until(lambda: any(engine.point for engine in group(fakes).engines), "an engine that is leased")
    for lost in Lost:
        lossy.relay.lose = lost
        wait_for(lambda: lossy.relay.lose is None, "a commit of whoever makes the next one")
    lossy.server.end(signal.SIGQUIT)
    try:
        with pytest.raises(Unavailable):
            fakes.client.status()
    finally:
        lossy.server.start()
    assert [taken(step, reservation) for step, reservation in enumerate(points)] == list(points.values())
    replace_controller(fakes)
    whole(fakes, "lossy", len(points))
    beside.whole()
    assert sorted(done_by_events(lossy, "lossy")) == list(range(len(points))), "each is told once"


def replace_controller(live: Live) -> None:
    """Kill the controller that acts, and wait until another one does."""

    def acting(epoch: int) -> StatusView | None:
        now = reached(live.client.status)
        return now if now is not None and now.epoch > epoch and now.controller_alive else None

    epoch = wait_for(partial(acting, -1), "a controller").epoch
    with suppress(psutil.NoSuchProcess):
        live.replica("controller").kill()
    wait_for(partial(acting, epoch), "the next controller")


def reached(ask: Callable[[], StatusView]) -> StatusView | None:
    with suppress(Unavailable):
        return ask()
    return None


@pytest.mark.destructive
def test_queued_points_bring_real_engines_up_from_zero_and_idleness_back_to_zero(live: Live) -> None:
    """The session's own engines: all of them end, two come for the work, and go when it is done."""
    live.client.put_run("tide", RunSpec(root=str(live.root), suites=("letters",), max_in_flight=9))
    live.client.scale("eval", None)  # the config's say: by the work
    try:
        wait_for(lambda: group(live).actual == 0, "no engine")
        assert group(live).sized_by == "work"
        for step in range(3):
            dispatch(live, "tide", step, "letters")
        wait_for(lambda: group(live).desired == 2, "two wanted")
        wait_for(lambda: group(live).actual == 2, "two engines", STARTS_S)
        points = live.ended("tide", 3, timeout_s=180)
        assert {point.state for point in points} == {PointState.DONE}
        wait_for(lambda: (group(live).desired, group(live).actual) == (0, 0), "no engine again")
    finally:
        live.client.scale("eval", 2)  # they come while whatever runs next begins
