"""Engines come and go while points run: asked for, and by the queued work; no sample and no point is lost."""

from __future__ import annotations

import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from eval_service.contract.client import EvalClient
from eval_service.contract.errors import Forbidden, InvalidRequest
from eval_service.contract.states import PointState
from eval_service.contract.token import bearer
from eval_service.contract.wire import DispatchRequest, EngineState, GroupView, RunSpec, Source
from tests.support.live import DONE, PROMPTS, SUITE, Live, serving, wait_for

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]
# All that the service of this module is told in confidence.
SECRETS = {f"EVALFLEET_TEST_{name}": f"{name.lower()}-{uuid.uuid4().hex}" for name in ("OPS", "LOOK", "HOOK", "LANES")}
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
SLOW = "\n[groups.eval.overrides]\nlatency_s = 1.0\n"


@pytest.fixture(scope="module")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A service of its own with up to four fake engines, each slow enough to be caught at work."""
    base = Path(tmp_path_factory.mktemp("fakes"))
    (base / "look.token").write_text(SECRETS["EVALFLEET_TEST_LOOK"])
    shape = {"grade": "fake", "bounds": "[1, 4]", "settings": SERVICE, "more": SLOW + TOKENS}
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            for name, secret in SECRETS.items():
                if name != "EVALFLEET_TEST_LOOK":
                    patch.setenv(name, secret)
            patch.setenv("EVALFLEET_TOKEN", SECRETS["EVALFLEET_TEST_OPS"])
            service = stack.enter_context(serving(base, **shape))
        yield service


def group(live: Live) -> GroupView:
    return next(group for group in live.client.fleet().groups if group.name == "eval")


def dispatch(live: Live, run: str, step: int, suite: str) -> None:
    request = DispatchRequest(
        run=run,
        step=step,
        suites=(suite,),
        reservation=str(uuid.uuid4()),
        snapshot=str(live.model),
        source=Source.CALLER,
        force=True,
    )
    live.client.dispatch(request)


def settled(live: Live, engines: int, timeout_s: float = 60.0) -> None:
    """Wait until there are as many as wanted, all of them ready, and none more."""

    def look() -> bool:
        found = group(live)
        return (found.desired, found.actual, found.ready) == (engines, engines, engines)

    wait_for(look, f"{engines} engines", timeout_s)


def settled_at(live: Live, engines: int) -> None:
    """Wait until so many are there, in whatever state."""
    wait_for(lambda: group(live).actual == engines, f"{engines} engines")


def test_the_fleet_follows_scale_up_and_down_and_shows_desired_and_actual(fakes: Live) -> None:
    settled(fakes, 1)
    assert (group(fakes).least, group(fakes).most, group(fakes).sized_by) == (1, 4, "config")
    fakes.client.scale("eval", 4)
    settled(fakes, 4)
    fakes.client.scale("eval", 2)
    settled(fakes, 2)
    assert group(fakes).sized_by == "scale"
    assert [engine.state for engine in group(fakes).engines] == [EngineState.READY] * 2, "who left in order is not lost"
    with pytest.raises(InvalidRequest, match="1 to 4 engines"):
        fakes.client.scale("eval", 5)


def test_points_under_way_lose_nothing_while_engines_come_and_go(fakes: Live) -> None:
    fakes.client.put_run("swings", RunSpec(root=str(fakes.root), suites=("slow",), max_in_flight=9))
    fakes.client.scale("eval", 4)
    settled(fakes, 4)
    for step in range(6):
        dispatch(fakes, "swings", step, "slow")
    for engines in (1, 4, 2):
        wait_for(lambda: any(engine.in_flight for engine in group(fakes).engines), "work in flight")
        fakes.client.scale("eval", engines)
        settled_at(fakes, engines)
    points = fakes.ended("swings", 6)
    assert [point.state for point in points] == [DONE] * 6
    assert [point.attempts for point in points] == [1] * 6, "an engine that leaves costs a point no attempt"
    for point in points:
        samples = fakes.samples(point.id)
        assert len({sample.index for sample in samples}) == len(samples) == PROMPTS
        assert not any(sample.error for sample in samples)
        assert {sample.weight_version for sample in samples} == {point.weight_version}


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


def test_no_secret_is_in_a_log_the_ledger_a_command_line_or_what_processes_inherit(fakes: Live) -> None:
    """Users find their keys in log files: whatever the service is told in confidence stays where it was put."""
    ops, look = SECRETS["EVALFLEET_TEST_OPS"], SECRETS["EVALFLEET_TEST_LOOK"]
    fakes.client.put_run("secret", RunSpec(root=str(fakes.root), suites=(SUITE,)))
    dispatch(fakes, "secret", 0, SUITE)
    assert [point.state for point in fakes.ended("secret", 1)] == [DONE]
    serving = fakes.client.serve(fakes.points("secret")[0].id)
    body = {"text": "hi", "sampling_params": {"max_new_tokens": 2}}
    for token, status in ((ops, 200), (SECRETS["EVALFLEET_TEST_LANES"], 200), (look, 401), ("", 401)):
        asked = httpx.post(f"{serving.url}/generate", json=body, headers=bearer(token or None), timeout=60.0)
        assert asked.status_code == status
    assert fakes.http.get("/runs").status_code == 401
    assert fakes.http.get("/runs", headers=bearer(look)).status_code == 200
    with EvalClient(fakes.url, token=look) as reader, pytest.raises(Forbidden):
        reader.pause("secret")
    command = [sys.executable, "-m", "eval_service.cli.main", "runs", "--url", fakes.url, "--token"]
    ran = [subprocess.run([*command, token], capture_output=True, text=True, timeout=60) for token in (ops, look + "x")]  # noqa: PLW1510
    assert [one.returncode for one in ran] == [0, 2]
    lines, inherited = processes_of(fakes)
    assert not inherited & {ops, look}
    rays = {Path(found) for line in lines for found in re.findall(r"(/[^\s=:]*/evalfleet-[^/\s]+)/", line)}
    assert rays
    files = [path for place in (fakes.base, *rays) for path in place.rglob("*") if path.is_file()]
    assert {"ledger.db", "service.log", "gcs_server.out"} <= {path.name for path in files}
    written = b"".join(content(path) for path in files if path.name != "look.token")
    told = written + "\n".join([*lines, *(one.stdout + one.stderr for one in ran)]).encode()
    assert [name for name, secret in SECRETS.items() if secret.encode() in told] == []


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
        wait_for(lambda: group(live).actual == 2, "two engines")
        points = live.ended("tide", 3, timeout_s=180)
        assert {point.state for point in points} == {PointState.DONE}
        wait_for(lambda: (group(live).desired, group(live).actual) == (0, 0), "no engine again")
    finally:
        live.client.scale("eval", 2)  # they come while whatever runs next begins
