"""What groups of engines may be, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from eval_service.contract.errors import ConfigError
from eval_service.engine.attached import keys_of
from eval_service.fleet_config import FleetConfig, GroupConfig, validated

EVAL: dict[str, Any] = {"model": "/m", "num_engines": [1, 4], "num_gpus_per_engine": 1}
ATTACHED: dict[str, Any] = {"kind": "attached", "model": "/m", "urls": ["http://gpu-7:30000"]}


def fleet(num_gpus: int = 0, **groups: dict[str, Any]) -> FleetConfig:
    return FleetConfig.model_validate({"service": {"roots": ["/r"]}, "num_gpus": num_gpus, "groups": groups})


def test_the_gpus_of_all_groups_add_up_and_attached_engines_use_none_of_ours() -> None:
    placeholder = {"kind": "placeholder", "num_engines": 3}
    assert fleet(7, eval=EVAL, later=placeholder, theirs=ATTACHED).groups["later"].desired == 0
    with pytest.raises(ValidationError, match=r"num_gpus: the groups' GPUs are 4 \(eval\) \+ 3 \(later\)"):
        fleet(8, eval=EVAL, later=placeholder)


@pytest.mark.parametrize(
    ("table", "field", "fix"),
    [
        ({"num_gpus": 3, "eval": {"num_engines": 1, "num_gpus_per_engine": 2}}, "num_gpus", "take a multiple"),
        ({"num_gpus": 4, "eval": {"num_engines": 3}}, "num_gpus", "must add up"),
        ({"num_gpus": 8, "eval": {}, "judge": {"kind": "frozen", "model": "/m"}}, "num_gpus", "must add up"),
        (
            {"eval": {"num_engines": 0, "overrides": {"context_length": 1}}},
            "groups.eval.overrides",
            "allow some with num_engines",
        ),
        ({"eval": {}, "pre": {"kind": "prefill", "model": "/m"}}, "groups.pre.kind", "use one pinned group"),
        ({"eval": {}, "dec": {"kind": "decode", "model": "/m"}}, "groups.dec.kind", "use one pinned group"),
    ],
)
def test_a_fleet_that_cannot_be_is_refused_with_the_field_and_the_fix(
    table: dict[str, Any], field: str, fix: str, tmp_path: Path
) -> None:
    groups = {name: group for name, group in table.items() if name != "num_gpus"}
    groups["eval"] = {"model": "/m", **groups["eval"]}
    whole = {"service": {"roots": ["/r"]}, "num_gpus": table.get("num_gpus", 0), "groups": groups}
    with pytest.raises(ConfigError) as caught:
        validated(FleetConfig, whole, tmp_path / "fleet.toml")
    assert caught.value.field == field
    assert fix in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("group", "said"),
    [
        ({"kind": "attached", "model": "/m"}, "urls: name the engines"),
        ({**ATTACHED, "urls": ["gpu-7:30000"]}, "is no http"),
        ({**ATTACHED, "urls": ["http://me:hidden@a:1"]}, "credentials"),
        ({**ATTACHED, "urls": ["http://a:1", "http://a:1"]}, "named twice"),
        ({"kind": "attached", "urls": ["http://a:1"]}, "model: name"),
        ({"model": "/m", "urls": ["http://a:1"]}, "kind = 'attached'"),
        ({"kind": "frozen"}, "model: name"),
        ({"kind": "prefill", "model": "/m"}, "prefill groups are not served"),
    ],
)
def test_a_group_that_cannot_be_is_refused_and_the_key_is_named(group: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        GroupConfig.model_validate(group)


def test_attached_engines_take_as_many_requests_as_ours() -> None:
    with pytest.raises(ValidationError, match=r"groups\.theirs\.server_concurrency"):
        fleet(eval=EVAL, theirs={**ATTACHED, "server_concurrency": 5})
    assert fleet(eval=EVAL, theirs=ATTACHED).groups["theirs"].desired == 1


def test_keys_come_from_the_environment_and_a_missing_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    group = GroupConfig.model_validate({**ATTACHED, "api_key_env": "A_KEY", "admin_api_key_env": "AN_ADMIN_KEY"})
    monkeypatch.setenv("A_KEY", "a")
    monkeypatch.delenv("AN_ADMIN_KEY", raising=False)
    with pytest.raises(ConfigError, match="AN_ADMIN_KEY is not set"):
        keys_of(group)
    monkeypatch.setenv("AN_ADMIN_KEY", "b")
    assert (keys_of(group).api, keys_of(group).admin) == ("a", "b")
    assert "a" not in repr(keys_of(group)).replace("Keys", "")
    one = keys_of(group.model_copy(update={"admin_api_key_env": None}))
    assert one.admin == "a"
