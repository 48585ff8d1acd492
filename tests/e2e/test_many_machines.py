"""Several nodes: a node that dies in mid-point costs no sample, and a head that dies costs no point.

Each node is a raylet with its own workers; the engines are fakes, since what is asked is what becomes of their node.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
import yaml

from eval_service.contract.states import ENDS
from eval_service.contract.wire import EngineView
from eval_service.demo.processes import Child, Family
from tests.support.cluster import TOLD
from tests.support.live import ENGINES, SUITE, Live, wait_for
from tests.support.work import Work

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.real, pytest.mark.destructive, pytest.mark.timeout(600)]
MORE = """
[groups.eval.overrides]
latency_s = 1.2

[groups.eval.node_resources]
engines = 1
"""


@dataclass
class Machines:
    """A cluster, and the service that has joined it."""

    live: Live
    directory: Path
    address: str = ""
    head: list[int] = field(default_factory=list)
    child: Child | None = None

    def start(self, workers: int, command: Callable[[Machines], tuple[str, ...]]) -> None:
        """Start a cluster, and the service on it, over the ledger that there is."""
        self.begin(workers)
        self.serve(command)

    def begin(self, workers: int) -> None:
        """Start a cluster."""
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir()
        log = self.live.base / "cluster.log"
        arguments = ["tests.support.cluster", str(self.directory), str(workers)]
        self.child = self.live.family.start(
            "the cluster", arguments, log=log, cwd=Path.cwd(), env=self.live.environment
        )

    def serve(self, command: Callable[[Machines], tuple[str, ...]]) -> None:
        """Start the service once the cluster is there."""
        child = self.child
        assert child is not None

        def told() -> dict[str, list[int] | str] | None:
            child.must_run()
            path = self.directory / TOLD
            return json.loads(path.read_text()) if path.exists() else None

        found = wait_for(told, "the cluster")
        self.address, self.head = str(found["address"]), [int(pid) for pid in found["head"]]
        self.live.close()
        self.live.command = command(self)
        self.live.start()


def joined(machines: Machines) -> tuple[str, ...]:
    """The command, on a cluster that others started."""
    files = ("--fleet", "fleet.toml", "--suites", "suites.toml", "--port", str(machines.live.port))
    return ("eval_service.cli.main", "serve", *files, "--address", machines.address)


def deployed(machines: Machines) -> tuple[str, ...]:
    """The Serve config file of one node, with this test's files in it, as Serve's own command deploys it."""
    base, port = machines.live.base, machines.live.port
    config = yaml.safe_load((ROOT / "deploy/serve/one-node.yaml").read_text())
    (base / "deployed.toml").write_text(
        (base / "fleet.toml").read_text().replace("[service]", f"[service]\nport = {port}")
    )
    config["applications"][0]["args"] |= {"fleet": str(base / "deployed.toml"), "suites": str(base / "suites.toml")}
    (base / "serve.yaml").write_text(yaml.safe_dump(config))
    return ("ray.serve.scripts", "run", "serve.yaml", "--address", machines.address)


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """Two nodes beside the head, each with room for one engine, and the service."""
    place = Path(tempfile.mkdtemp(prefix="evalfleet-nodes-"))  # Ray's sockets want a short path
    environment = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
        "RAY_kill_worker_timeout_milliseconds": "500",
        "RAY_worker_niceness": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_gcs_rpc_server_reconnect_timeout_s": "2",  # how long nodes look for a head that has gone, rather than 60
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
    }
    base = Path(tmp_path_factory.mktemp("machines"))
    live = Live(base, Family(), grade="fake", bounds=f"[{ENGINES}, {ENGINES}]", more=MORE, environment=environment)
    found = Machines(live, place / "ray")
    try:
        found.begin(workers=ENGINES)
        live.build()
        found.serve(joined)
        live.wait_engines()
        yield found
    finally:
        live.close()
        left = live.family.end()
        shutil.rmtree(place, ignore_errors=True)
    assert left == [], f"these had to be killed: {left}"


def raylet_of(engine: EngineView) -> psutil.Process:
    assert engine.replica_pid is not None
    return next(each for each in psutil.Process(engine.replica_pid).parents() if each.name() == "raylet")


def gone(pids: list[int | None]) -> bool:
    return not any(pid is not None and psutil.pid_exists(pid) for pid in pids)


def test_engines_are_known_by_an_address_that_other_nodes_reach(machines: Machines) -> None:
    found = machines.live.wait_engines()
    node = machines.address.rpartition(":")[0]
    assert len({raylet_of(engine).pid for engine in found}) == ENGINES, "one on each node"
    assert {raylet_of(engine).pid for engine in found}.isdisjoint(machines.head)
    assert {engine.node for engine in found} == {node}
    assert {urlsplit(str(engine.url)).hostname for engine in found} == {node}
    assert not node.startswith("127."), "this host has no other address"


def test_a_node_lost_in_mid_point_costs_no_sample_and_leaves_no_process(machines: Machines) -> None:
    live = machines.live
    work = Work(live, "lose-node", SUITE, at_once=2)
    victim = work.stop_engine()
    raylet_of(victim).kill()
    work.whole()
    work.let_go(victim)
    assert {sample.engine for sample in live.samples(str(victim.point))} - {victim.id}, "the other node took over"
    wait_for(lambda: gone([victim.replica_pid, victim.server_pid, victim.supervisor_pid]), "its processes to end")


@pytest.mark.skipif("EVALFLEET_MACHINES" not in os.environ, reason="a second cluster takes a minute: make machines")
def test_after_the_head_was_lost_and_started_again_from_a_serve_config_every_point_ends_once(
    machines: Machines,
) -> None:
    live = machines.live
    work = Work(live, "lose-head", SUITE, at_once=2)
    survivor = work.stop_engine()
    before = {point.id for point in live.points("lose-head")}
    for pid in machines.head:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    work.let_go(survivor)
    # Without a GCS that outlives its head the nodes end too, and with them their engines.
    assert live.child.wait(120), "the command ends, so that whoever watches it starts it again"
    assert live.child.process.returncode != 0
    wait_for(lambda: gone([survivor.replica_pid, survivor.server_pid, survivor.supervisor_pid]), "its engines' end")
    assert machines.child is not None
    machines.child.stop(30)
    machines.start(0, deployed)
    assert {point.id for point in work.whole()} == before, "no point twice"
    assert all(point.state in ENDS for point in live.points("lose-node")), "what had ended stays as it is"
