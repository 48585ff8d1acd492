"""A plan out of three files: what they may not say together, and how it is told."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from eval_service.contract.errors import ConfigError
from eval_service.launch.facts import RunFacts
from eval_service.launch.plan import Asked, LaunchPlan, as_json, as_text, make_plan

FLEET = """
[service]
roots = ["."]
[groups.eval]
model = "model"
num_engines = {engines}
{more}
"""


class Trainer:
    """Answers in the trainer's place, and keeps what it was asked."""

    def __init__(self, base: Path, **changes: Any) -> None:
        self.asked: list[str] = []
        self._facts: dict[str, Any] = {
            "run": "r",
            "root": base / "runs",
            "output_dir": base / "out",
            "tensor": 2,
            "pipeline": 1,
            "data": 1,
            "ranks": 2,
            "starts_inference_engines": True,
            "has_engines": True,
            "allow_shared_gpu": False,
            "evaluates": True,
            "suites": ["s"],
            "drain_timeout_s": 60.0,
            "on_timeout": "leave",
            "start": None,
            "num_steps": 10,
            "points": [{"step": 0, "kind": "baseline", "force": False}, {"step": 10, "kind": "final", "force": True}],
            "plan": "points at steps 0, 10 (final)",
            "buffer_bytes": 0,
            **changes,
        }

    def __call__(self, arguments: Sequence[str], url: str | None) -> RunFacts:
        self.asked = list(arguments)
        return RunFacts.model_validate({"url": url, **self._facts})


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """The three files, a model and a dataset."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "fleet.toml").write_text(FLEET.format(engines=2, more=""))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    (tmp_path / "suites.toml").write_text('[suites.s]\ndatasets = [{ name = "d", path = "rows.jsonl" }]\n')
    (tmp_path / "run.toml").touch()
    return tmp_path


def plan_of(base: Path, gpus: int = 4, trainer: Trainer | None = None, **asked: Any) -> LaunchPlan:
    """The plan on a host with so many GPUs."""
    host = tuple(str(number) for number in range(gpus))
    return make_plan(Asked(base / "run.toml", gpus=host, **asked), trainer or Trainer(base))


def test_the_files_beside_the_runs_are_taken_and_the_trainer_is_told_of_the_fleet(base: Path) -> None:
    trainer = Trainer(base)
    plan = plan_of(base, trainer=trainer, settings=("train.lr=1",))
    assert plan.service is not None
    assert plan.service.fleet_path == base / "fleet.toml"
    assert trainer.asked[:4] == ["--config", str(base / "run.toml"), "--set", "train.lr=1"]
    assert json.loads(trainer.asked[-1]) == {"num_eval_engines": [2, 2], "num_attached_engines": 0}
    assert plan.trainer == tuple(trainer.asked)


def test_a_plan_is_told_to_people_and_to_programs(base: Path) -> None:
    plan = plan_of(base)
    assert as_text(plan).splitlines() == [
        "run r: fresh run; trains to step 10",
        "trainer: 2 ranks (tensor 2 x pipeline 1 x data 1), CUDA_VISIBLE_DEVICES=0,1",
        "  rank 0: GPU 0",
        "  rank 1: GPU 1",
        "service: http://127.0.0.1:8700, CUDA_VISIBLE_DEVICES=2,3",
        "  engine eval/0: GPU 2",
        "  engine eval/1: GPU 3",
        "plan: points at steps 0, 10 (final)",
    ]
    told = json.loads(json.dumps(as_json(plan)))
    assert told["trainer"]["ranks"] == [{"rank": 0, "gpu": "0"}, {"rank": 1, "gpu": "1"}]
    assert told["service"]["engines"][1] == {"group": "eval", "number": 1, "gpus": ["3"]}
    assert [point["step"] for point in told["points"]] == [0, 10]


def test_without_engines_there_is_no_service_and_the_plan_says_so(base: Path) -> None:
    none = {"starts_inference_engines": False, "has_engines": False, "evaluates": False, "suites": []}
    plan = plan_of(base, 2, Trainer(base, **none, points=[], plan="no points: nothing is evaluated"))
    assert plan.service is None
    assert "service: none; no engine starts, and nothing is reserved for one" in as_text(plan)
    assert "plan: no points: nothing is evaluated" in as_text(plan)
    assert as_json(plan)["service"] is None
    for name in ("fleet", "suites"):
        (base / f"{name}.toml").unlink()
    assert plan_of(base, 2, Trainer(base, **none)).service is None


def test_a_shared_gpu_is_named(base: Path) -> None:
    (base / "fleet.toml").write_text(FLEET.format(engines=1, more="overrides = { mem_fraction_static = 0.3 }"))
    plan = plan_of(base, 2, Trainer(base, allow_shared_gpu=True))
    assert "shared: GPU 1" in as_text(plan)
    assert as_json(plan)["shared_gpus"] == ["1"]


def test_the_memory_of_the_export_buffers_is_stated_before_anything_starts(base: Path) -> None:
    plan = plan_of(base, trainer=Trainer(base, buffer_bytes=1_192_099_840))
    assert "  export buffer: 1,192 MB of host memory on each rank" in as_text(plan)
    assert as_json(plan)["trainer"]["buffer_bytes"] == 1_192_099_840


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"suites": ["s", "strange"]}, "eval.suites"),
        ({"root": "/elsewhere"}, "run.root"),
        ({"url": "http://127.0.0.1:9"}, "eval.url"),
        ({"url": "http://eval.example:8700"}, "eval.url"),
    ],
)
def test_what_the_files_may_not_say_together_is_refused_by_name(
    base: Path, changes: dict[str, Any], field: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of(base, trainer=Trainer(base, **changes))
    assert caught.value.field == field
    assert caught.value.hint


def test_the_address_may_be_spelled_otherwise(base: Path) -> None:
    assert plan_of(base, trainer=Trainer(base, url="http://localhost:8700/")).service is not None
    assert plan_of(base, port=9000).service.url == "http://127.0.0.1:9000"  # type: ignore[union-attr]


def test_a_run_that_is_evaluated_needs_a_fleet_file_and_that_a_suites_file(base: Path) -> None:
    def refuses(arguments: Sequence[str], url: str | None) -> RunFacts:
        raise ConfigError("an interval needs engines", field="fleet.num_eval_engines")

    (base / "suites.toml").rename(base / "other.toml")
    with pytest.raises(ConfigError) as caught:
        plan_of(base)
    assert caught.value.field == "--suites"
    assert plan_of(base, suites=base / "other.toml").service is not None
    (base / "fleet.toml").unlink()
    with pytest.raises(ConfigError) as caught:
        make_plan(Asked(base / "run.toml"), refuses)
    assert caught.value.field == "--fleet"
    assert "--fleet" in str(caught.value.hint)


@pytest.mark.parametrize("lacks", ["model", "rows.jsonl"])
def test_what_the_service_would_refuse_is_refused_with_the_plan(base: Path, lacks: str) -> None:
    (base / lacks).rename(base / "gone")
    with pytest.raises(ConfigError):
        plan_of(base)
    assert not (base / "evalfleet-state").exists()
