"""How a server of each grade is started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eval_service.contract.errors import ConfigError
from eval_service.engine.grades import STANDINS, Grade, Keys, ServerPlan, plan_server, resolve_grade, to_argv
from eval_service.engine.launch import blot_out
from eval_service.fleet_config import GroupConfig
from tests.support.engine_model import make_model

KEYS = Keys("api-secret", "admin-secret")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model").path


def _plan(
    grade: Grade, model: Path, *, fleet: dict[str, Any] | None = None, keys: Keys = KEYS, **group: Any
) -> ServerPlan:
    config = GroupConfig.model_validate({"model": model, **group})
    return plan_server(
        grade, config, fleet_overrides=fleet or {}, host="127.0.0.1", port=1234, nccl_port=1235, keys=keys
    )


def _argv(plan: ServerPlan) -> list[str]:
    return [str(item) for item in json.loads(plan.boot)["argv"]]


def _value(argv: list[str], flag: str) -> str:
    return argv[argv.index(flag) + 1]


@pytest.mark.parametrize(
    ("wanted", "cuda", "grade"),
    [
        ("auto", True, "sglang"),
        ("auto", False, "sglang-cpu"),
        ("fake", True, "fake"),
        ("sglang-cpu", False, "sglang-cpu"),
    ],
)
def test_auto_is_the_gpu_engine_where_cuda_is_there(wanted: str, cuda: bool, grade: str) -> None:
    assert resolve_grade(wanted, cuda=cuda) == grade


def test_the_cpu_engine_is_refused_where_cuda_is_there_and_the_gpu_engine_where_not() -> None:
    with pytest.raises(ConfigError, match="refused where CUDA is there") as caught:
        resolve_grade("sglang-cpu", cuda=True)
    assert caught.value.field == "grade"
    with pytest.raises(ConfigError, match="no CUDA device"):
        resolve_grade("sglang", cuda=False)


def test_overrides_are_the_groups_over_the_fleets_over_the_grades(model: Path) -> None:
    fleet = {"max_total_tokens": 7, "chunked-prefill-size": 64, "schedule_policy": "fcfs"}
    argv = _argv(_plan(Grade.SGLANG_CPU, model, fleet=fleet, overrides={"schedule-policy": "lpm"}))
    assert _value(argv, "--max-total-tokens") == "7"
    assert _value(argv, "--chunked-prefill-size") == "64"
    assert _value(argv, "--schedule-policy") == "lpm"
    assert argv.count("--schedule-policy") == 1
    assert _value(argv, "--attention-backend") == "torch_native"


def test_the_gpu_engine_keeps_sglangs_own_defaults_and_knows_no_stand_ins(model: Path) -> None:
    plan = _plan(Grade.SGLANG, model, num_gpus_per_engine=2)
    argv = _argv(plan)
    assert "--attention-backend" not in argv
    assert _value(argv, "--tp-size") == "2"
    assert str(STANDINS) not in plan.env["PYTHONPATH"]
    assert str(STANDINS) not in os.environ.get("PYTHONPATH", "")


def test_the_cpu_engine_alone_sees_the_stand_ins(model: Path) -> None:
    plan = _plan(Grade.SGLANG_CPU, model)
    assert plan.env["PYTHONPATH"].split(os.pathsep)[0] == str(STANDINS)
    assert _value(_argv(plan), "--device") == "cpu"


def test_a_cpu_engine_starts_though_its_neighbours_take_memory_meanwhile(model: Path) -> None:
    """SGLang holds all that goes of the host's memory while it loads against the one; the other bounds its pool."""
    argv = _argv(_plan(Grade.SGLANG_CPU, model))
    assert float(_value(argv, "--mem-fraction-static")) >= 0.9
    assert _value(argv, "--max-total-tokens") == "20000"


def test_dtype_is_the_groups_else_the_models(model: Path) -> None:
    assert _value(_argv(_plan(Grade.SGLANG_CPU, model)), "--dtype") == "float32"
    assert _value(_argv(_plan(Grade.SGLANG_CPU, model, dtype="bfloat16")), "--dtype") == "bfloat16"


def test_keys_are_fresh_and_stand_in_neither_command_nor_environment(model: Path) -> None:
    assert Keys.fresh() != Keys.fresh()
    for grade in Grade:
        plan = _plan(grade, model)
        assert "secret" not in " ".join(plan.command) + json.dumps(dict(plan.env)) + repr(plan)
        assert json.loads(plan.boot)["admin_api_key"] == "admin-secret"


@pytest.mark.parametrize("key", ["model_path", "api-key", "host", "tp_size"])
def test_an_override_of_what_the_service_sets_is_refused_by_name(model: Path, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _plan(Grade.SGLANG_CPU, model, overrides={key: "x"})
    assert caught.value.field == f"overrides.{key.replace('-', '_')}"


def test_a_model_without_config_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json") as caught:
        _plan(Grade.FAKE, tmp_path)
    assert caught.value.field == "model"


def test_arguments_are_spelled_as_sglangs_parser_reads_them() -> None:
    arguments = {"a_b": 1, "flag": True, "off": False, "none": None, "many": [1, 2], "table": {"k": 1}}
    assert to_argv(arguments) == ["--a-b", "1", "--flag", "--many", "1", "2", "--table", '{"k": 1}']


def test_secrets_are_blotted_out_of_log_records(caplog: pytest.LogCaptureFixture) -> None:
    import logging

    before = logging.getLogRecordFactory()
    try:
        blot_out(["hunter2"])
        logging.getLogger("x").warning("args=%s", {"api_key": "hunter2"})
    finally:
        logging.setLogRecordFactory(before)
    assert "hunter2" not in caplog.text
    assert "***" in caplog.text


_IMPORTS = """
import triton, triton.language as tl, torchvision, sgl_kernel
from triton.experimental.gluon import language
from triton.runtime.errors import IntelGPUError
from torchvision.transforms import InterpolationMode
from sgl_kernel.scalar_type import scalar_types
assert issubclass(IntelGPUError, Exception) and InterpolationMode.BILINEAR and scalar_types.uint4
class Own(tl.dtype): pass
@triton.autotune(configs=[triton.Config({})], key=["N"])
@triton.jit
def kernel(x, N: tl.constexpr): pass
calls = [lambda: kernel[(1,)](1, 2), lambda: sgl_kernel.fill_bonus_tokens_cpu(1), lambda: torchvision.io.decode_jpeg()]
for call in calls:
    try: call()
    except (RuntimeError, TypeError): continue
    raise SystemExit("a stand-in computed")
"""


def test_stand_ins_can_be_imported_and_compute_nothing() -> None:
    env = {**os.environ, "PYTHONPATH": str(STANDINS)}
    subprocess.run([sys.executable, "-c", _IMPORTS], env=env, check=True, timeout=60)
