"""On several machines an engine is known by an address that the others reach, or it is given no work."""

from __future__ import annotations

import asyncio

import pytest

from eval_service.contract.errors import ConfigError
from eval_service.contract.wire import EngineState
from eval_service.controller.fleet import Fleet
from eval_service.engine.addresses import engine_address, is_loopback
from eval_service.engine.protocol import EngineReport
from eval_service.fleet_config import GroupConfig

NODE = "10.1.0.7"
HAS = {"lo": ["127.0.0.1"], "eth0": ["192.0.2.7"], "ib0": ["10.1.0.7"], "wlan0": []}


def address(wanted: str | None, *, joined: bool = True) -> str:
    return engine_address(wanted, NODE, joined=joined, interfaces=lambda: HAS)


def test_engines_stay_on_loopback_with_a_ray_of_our_own_and_take_the_nodes_address_on_a_cluster() -> None:
    assert address(None, joined=False) == "127.0.0.1"
    assert address(None) == NODE


@pytest.mark.parametrize(
    ("wanted", "found"),
    [("ib0", "10.1.0.7"), ("10.1.0.0/16", "10.1.0.7"), ("192.0.2.7", "192.0.2.7"), ("192.0.2.0/24", "192.0.2.7")],
)
def test_an_interface_a_network_or_an_address_may_be_named(wanted: str, found: str) -> None:
    assert address(wanted) == found


@pytest.mark.parametrize("wanted", ["ib7", "10.9.0.0/16", "10.1.0.9", "wlan0"])
def test_what_a_node_does_not_have_is_refused_by_name(wanted: str) -> None:
    with pytest.raises(ConfigError) as caught:
        address(wanted)
    assert caught.value.field == "service.engine_host"
    assert wanted in caught.value.message


@pytest.mark.parametrize("wanted", ["lo", "127.0.0.1", "127.0.0.0/8"])
def test_loopback_is_refused_on_a_cluster_and_is_allowed_on_one_machine(wanted: str) -> None:
    with pytest.raises(ConfigError, match="own node alone"):
        address(wanted)
    assert address(wanted, joined=False) == "127.0.0.1"


def test_loopback_is_known_in_each_spelling() -> None:
    assert [is_loopback(host) for host in ("127.3.2.1", "::1", "[::1]", "localhost")] == [True] * 4
    assert [is_loopback(host) for host in (NODE, "0.0.0.0", "gpu-7", "")] == [False] * 4


@pytest.mark.parametrize(
    ("controller", "group", "node", "url", "given_work"),
    [
        ("10.1.0.1", "eval", NODE, "http://127.0.0.1:30000", False),
        ("10.1.0.1", "eval", NODE, "http://localhost:30000", False),
        ("10.1.0.1", "eval", NODE, f"http://{NODE}:30000", True),
        (NODE, "eval", NODE, "http://127.0.0.1:30000", True),  # the controller's own node
        (None, "eval", NODE, "http://127.0.0.1:30000", True),  # there is one node
        ("10.1.0.1", "others", "127.0.0.1", "http://127.0.0.1:30000", True),  # asked from the controller's node
    ],
)
def test_an_engine_that_tells_another_node_its_loopback_is_given_no_work_and_says_why(
    controller: str | None, group: str, node: str, url: str, given_work: bool
) -> None:
    ours = GroupConfig.model_validate({"model": "/m", "grade": "fake"})
    groups = {"eval": ours, "others": ours.model_copy(update={"kind": "attached", "urls": (url,)})}
    fleet = Fleet(groups, epoch=1, lost_after_s=5.0, node=controller)

    async def tell() -> None:
        for number in (1, 2):  # also once it was started anew
            report = EngineReport(
                engine="e",
                group=group,
                node=node,
                state=EngineState.READY,
                replica_pid=1,
                nonce=f"n{number}",
                url=url,
                number=number,
            )
            poll = asyncio.create_task(fleet.poll(report))
            await asyncio.sleep(0)
            poll.cancel()

    asyncio.run(tell())
    engine = fleet.engines["e"]
    assert engine.free is given_work
    assert (engine.quarantined is None) is given_work
    fleet.heal()
    assert not engine.sent, "starting it anew would change nothing"
    if not given_work:
        assert "service.engine_host" in str(engine.quarantined)
