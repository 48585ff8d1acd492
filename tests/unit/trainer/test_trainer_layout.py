"""Layouts that can't be are refused by name, and so is an export buffer that does not fit the node's memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eval_service.contract.errors import ConfigError
from trainer.architecture import QWEN3, Architecture, Rope
from trainer.config import RunConfig
from trainer.layout import (
    Stages,
    buffer_bytes,
    check_checkpoint_memory,
    check_layout,
    check_memory,
    checkpoint_bytes,
    free_memory_bytes,
)

SHAPE = Architecture(
    name=QWEN3,
    num_layers=6,
    hidden_size=64,
    ffn_size=192,
    num_heads=8,
    num_kv_heads=4,
    head_dim=8,
    vocab_size=100,
    max_positions=128,
    norm_eps=1e-6,
    rope=Rope(1e4),
    tied=True,
    qk_norm=True,
    qkv_bias=False,
    dtype="bfloat16",
)


def _config(parallel: dict[str, Any] | None = None, **train: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "r", "root": "root"},
            "model": {"hf_path": "model"},
            "data": {"train": "train.jsonl"},
            "train": {"num_steps": 4, "global_batch_size": 8, "micro_batch_size": 2, **train},
            "parallel": parallel or {},
            "eval": {"url": "http://service", "interval": 2, "suites": ["main"]},
        }
    )


@pytest.mark.parametrize(
    ("parallel", "layers"),
    [
        ({"pipeline": 3}, (2, 2, 2)),
        ({"pipeline": 2, "first_stage_layers": 1}, (1, 5)),
        ({"pipeline": 4, "first_stage_layers": 1, "last_stage_layers": 1}, (1, 2, 2, 1)),
    ],
)
def test_layers_fall_into_stages(parallel: dict[str, Any], layers: tuple[int, ...]) -> None:
    assert check_layout(_config(parallel), SHAPE, parallel["pipeline"]).layers == layers


@pytest.mark.parametrize(
    ("parallel", "world", "field"),
    [
        ({"tensor": 8}, 8, "parallel.tensor"),
        ({"pipeline": 4}, 4, "parallel.pipeline"),
        ({"pipeline": 2, "first_stage_layers": 6}, 2, "parallel.pipeline"),
        ({"pipeline": 2, "first_stage_layers": 1, "last_stage_layers": 1}, 2, "parallel.pipeline"),
        ({}, 8, "train.global_batch_size"),
    ],
)
def test_what_does_not_divide_is_refused_by_name(parallel: dict[str, Any], world: int, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_layout(_config(parallel), SHAPE, world)
    assert caught.value.field == field
    assert caught.value.hint


def test_a_buffer_that_does_not_fit_is_refused_with_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.layout.free_memory_bytes", lambda: 3_000_000_000)
    check_memory(1_000_000_000, 3)
    with pytest.raises(ConfigError, match=r"1,000 MB of host memory on each of 4 ranks here; 3,000 MB are free"):
        check_memory(1_000_000_000, 4)


def test_a_checkpoints_copy_that_does_not_fit_beside_the_buffers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.layout.free_memory_bytes", lambda: 3_000_000_000)
    check_checkpoint_memory(1_000_000_000, 2, 1_000_000_000)
    with pytest.raises(
        ConfigError, match=r"1,000 MB on each of 2 ranks here, beside 1,100 MB for exports and offloading"
    ) as caught:
        check_checkpoint_memory(1_000_000_000, 2, 1_100_000_000)
    assert caught.value.field == "train.save_dir"


def test_free_memory_is_what_both_the_node_and_the_control_group_have_left(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 900 kB\nMemAvailable: 500 kB\n")
    assert free_memory_bytes(meminfo, tmp_path) == 500 * 1024
    (tmp_path / "memory.current").write_text("100\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory_bytes(meminfo, tmp_path) == 500 * 1024
    (tmp_path / "memory.max").write_text("1100\n")
    assert free_memory_bytes(meminfo, tmp_path) == 1000
    assert free_memory_bytes(tmp_path / "none", tmp_path / "none") is None


def test_nothing_is_held_where_nothing_is_exported_and_ranks_share_what_is() -> None:
    config = _config()
    quiet = config.model_copy(update={"eval": config.eval.model_copy(update={"interval": None, "suites": ()})})
    assert buffer_bytes(quiet, SHAPE, Stages((6,))) == 0
    whole = buffer_bytes(config, SHAPE, Stages((6,)))
    layer = 64 * (8 * (2 * 8 + 2 * 4) + 3 * 192) + 2 * 64 + 2 * 8
    assert whole == 2 * (6 * layer + 100 * 64 + 64)
    assert buffer_bytes(_config({"tensor": 2}), SHAPE, Stages((6,))) < 0.52 * whole


def test_a_checkpoint_has_parameters_main_parameters_and_two_moments() -> None:
    config = _config()
    parameters = buffer_bytes(config, SHAPE, Stages((6,))) // 2
    assert checkpoint_bytes(config, SHAPE, Stages((6,))) == 12 * parameters
    half = config.model_copy(update={"train": config.train.model_copy(update={"dtype": "bfloat16"})})
    assert checkpoint_bytes(half, SHAPE, Stages((6,))) == 14 * parameters
