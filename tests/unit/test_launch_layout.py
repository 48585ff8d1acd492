"""Who gets which GPU, over every size of host; no GPU is needed to know."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from eval_service import launch
from eval_service.contract.errors import ConfigError
from eval_service.fleet_config import FleetConfig
from eval_service.launch.facts import RunFacts
from eval_service.launch.layout import Layout, lay_out, refuse_greed, visible_gpus

FRACTION = {"mem_fraction_static": 0.3}


def run(ranks: int = 1, **changes: Any) -> RunFacts:
    """A run with so many ranks."""
    table: dict[str, Any] = {
        "run": "r",
        "root": "/r",
        "output_dir": "/o",
        "tensor": ranks,
        "pipeline": 1,
        "data": 1,
        "ranks": ranks,
        "starts_inference_engines": True,
        "has_engines": True,
        "allow_shared_gpu": False,
        "evaluates": True,
        "url": "http://127.0.0.1:8700",
        "suites": ["s"],
        "drain_timeout_s": 60.0,
        "on_timeout": "leave",
        "start": None,
        "num_steps": 10,
        "points": [],
        "plan": "",
        "buffer_bytes": 0,
    }
    return RunFacts.model_validate({**table, **changes})


def fleet(engines: int | tuple[int, int] = 1, each: int = 1, **groups: dict[str, Any]) -> FleetConfig:
    """An eval group, and others."""
    group = {"model": "/m", "num_engines": engines, "num_gpus_per_engine": each}
    return FleetConfig.model_validate({"service": {"roots": ["/r"]}, "groups": {"eval": group, **groups}})


def host(count: int) -> tuple[str, ...]:
    """The ids of a host's GPUs."""
    return tuple(str(number) for number in range(count))


def engines(layout: Layout) -> list[tuple[str, ...]]:
    """GPUs by engine."""
    return [slot.gpus for slot in layout.engines]


@pytest.mark.parametrize(
    ("gpus", "ranks", "the_fleet", "trainer", "each_engine"),
    [
        (2, 1, fleet(1), "0", [("1",)]),
        (4, 2, fleet(2), "0,1", [("2",), ("3",)]),
        (8, 4, fleet(4), "0,1,2,3", [("4",), ("5",), ("6",), ("7",)]),
        (8, 4, fleet(2, each=2), "0,1,2,3", [("4", "5"), ("6", "7")]),
        (8, 1, fleet((0, 2)), "0", [("1",), ("2",)]),
        (8, 2, fleet(1, later={"kind": "placeholder", "num_engines": 2}), "0,1", [("2",), ("3",), ("4",)]),
        (8, 2, fleet(0, each=1), "0,1", []),
        (0, 2, fleet(2), "", [(), ()]),
        (4, 4, fleet(2, each=0), "0,1,2,3", [(), ()]),
    ],
)
def test_the_trainer_has_the_first_gpus_and_the_engines_those_after_them(
    gpus: int, ranks: int, the_fleet: FleetConfig, trainer: str, each_engine: list[tuple[str, ...]]
) -> None:
    layout = lay_out(run(ranks), the_fleet, host(gpus))
    assert ",".join(layout.trainer_gpus) == trainer
    assert engines(layout) == each_engine
    assert layout.shared == ()


def test_the_ids_are_those_that_the_environment_allows() -> None:
    layout = lay_out(run(1), fleet(1), visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-a, 5,7"}))
    assert (layout.trainer_gpus, layout.fleet_gpus) == (("GPU-a",), ("5",))


@pytest.mark.parametrize("value", ["", "-1", "NoDevFiles"])
def test_an_environment_that_hides_all_gpus_is_a_host_without_any(value: str) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": value}) == ()


def test_without_a_word_of_the_environment_the_device_files_are_counted(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == ("0", "1")
    assert visible_gpus({}, tmp_path / "none") == ()


def test_nothing_is_reserved_when_no_engine_starts_whatever_the_groups_say() -> None:
    layout = lay_out(run(8, starts_inference_engines=False, has_engines=False), fleet(4), host(8))
    assert layout.engines == ()
    assert len(layout.trainer_gpus) == 8


def test_where_only_attached_engines_evaluate_no_other_group_may_start_one() -> None:
    none = run(starts_inference_engines=False)
    theirs: dict[str, Any] = {"kind": "attached", "model": "/m", "urls": ["http://gpu-7:30000"]}
    assert lay_out(none, fleet(0, theirs=theirs), host(1)).fleet_gpus == ()
    with pytest.raises(ConfigError) as caught:
        lay_out(none, fleet(0, theirs=theirs, judge={"kind": "frozen", "model": "/j"}), host(2))
    assert caught.value.field == "groups.judge.num_engines"


def test_whether_engines_start_is_read_from_the_one_property_and_not_from_what_it_is_made_of() -> None:
    """`bounds` are read to tell the trainer of them, and to count what is to be laid out."""
    package = Path(launch.__file__).parent
    read: dict[str, set[str]] = {}
    for source in package.glob("*.py"):
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.Attribute):
                read.setdefault(node.attr, set()).add(source.name)
    assert "num_eval_engines" not in read
    assert "num_engines" not in read
    assert read["bounds"] == {"facts.py", "layout.py"}
    assert read["starts_inference_engines"] == {"layout.py"}


def test_a_gpu_is_shared_only_if_the_run_says_so_and_the_engines_know_their_share() -> None:
    with pytest.raises(ConfigError) as refused:
        lay_out(run(1), fleet(1), host(1))
    assert refused.value.field == "fleet.allow_shared_gpu"
    assert "mem_fraction_static" in str(refused.value.hint)
    allowed = run(1, allow_shared_gpu=True)
    layout = lay_out(allowed, fleet(1), host(1))
    assert (layout.trainer_gpus, layout.fleet_gpus, layout.shared) == (("0",), ("0",), ("0",))
    with pytest.raises(ConfigError) as greedy:
        refuse_greed(layout, fleet(1))
    assert greedy.value.field == "groups.eval.overrides.mem_fraction_static"
    refuse_greed(layout, fleet(1).model_copy(update={"overrides": FRACTION}))
    group = fleet(1).groups["eval"].model_copy(update={"overrides": {"mem-fraction-static": 0.3}})
    refuse_greed(layout, fleet(1).model_copy(update={"groups": {"eval": group}}))


def test_of_several_gpus_only_the_last_of_the_trainers_are_shared() -> None:
    layout = lay_out(run(2, allow_shared_gpu=True), fleet(3), host(4))
    assert (layout.trainer_gpus, layout.fleet_gpus, layout.shared) == (("0", "1"), ("1", "2", "3"), ("1",))
    with pytest.raises(ConfigError, match="GPU 1 is shared"):
        refuse_greed(layout, fleet(3))


@pytest.mark.parametrize(
    ("ranks", "the_fleet", "gpus", "field"),
    [
        (4, fleet(1), 2, "parallel"),
        (1, fleet(4), 2, "num_gpus"),
        (1, fleet(1, judge={"kind": "frozen", "model": "/j", "grade": "sglang"}), 0, "groups.judge.grade"),
    ],
)
def test_a_host_that_is_too_small_is_refused_by_name(ranks: int, the_fleet: FleetConfig, gpus: int, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        lay_out(run(ranks), the_fleet, host(gpus))
    assert caught.value.field == field
    assert caught.value.hint
