"""`auto` becomes a grade by what the cluster has, before any replica is placed."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval_service.contract.errors import ConfigError
from eval_service.fleet_config import FleetConfig
from eval_service.serve.settings import Settings


def _settings(grade: str) -> Settings:
    table = {"service": {"roots": ["/"]}, "groups": {"eval": {"grade": grade, "model": "/model"}}}
    return Settings(FleetConfig.model_validate(table), Path("suites.toml"))


@pytest.mark.parametrize(("cuda", "grade"), [(True, "sglang"), (False, "sglang-cpu")])
def test_auto_is_the_gpu_engine_where_the_cluster_has_gpus(cuda: bool, grade: str) -> None:
    assert _settings("auto").with_grades(cuda=cuda).fleet.groups["eval"].grade == grade


@pytest.mark.parametrize(("cuda", "grade"), [(True, "sglang-cpu"), (False, "sglang")])
def test_a_grade_that_cannot_be_there_is_refused_by_name(cuda: bool, grade: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _settings(grade).with_grades(cuda=cuda)
    assert caught.value.field == "grade"
