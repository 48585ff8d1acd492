"""`run.toml`: what it takes, and what it refuses by name."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from eval_service.contract.errors import ConfigError
from trainer import architecture, launch, main
from trainer.architecture import read_architecture
from trainer.config import RunConfig, load_run, resolved_json
from trainer.launch import LaunchConfig

TOML = """
[run]
name = "r"
root = "snapshots"
[model]
hf_path = "base"
[data]
train = "train.jsonl"
[train]
num_steps = 10
[eval]
url = "http://127.0.0.1:1"
interval = 5
suites = ["main"]
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A run file that can work."""
    path = tmp_path / "run.toml"
    path.write_text(TOML)
    return path


def test_relative_paths_are_resolved_against_the_file(path: Path) -> None:
    config = load_run(path)
    assert config.run.root == path.parent / "snapshots"
    assert config.model.hf_path == path.parent / "base"
    assert config.output_dir == path.parent / "snapshots" / "r" / "trainer"
    assert config.save_dir == config.output_dir / "checkpoints"


def test_overrides_are_toml_values_else_strings_and_none_unsets(path: Path) -> None:
    config = load_run(path, ["train.lr=0.5", "run.name=other", "eval.interval=none", "eval.suites=[]"])
    assert (config.train.lr, config.run.name, config.eval.interval) == (0.5, "other", None)
    assert not config.eval.enabled


def test_the_resolved_config_loads_again(path: Path) -> None:
    config = load_run(path)
    table = json.loads(resolved_json(config))
    assert table["train"]["save_dir"] == str(config.save_dir)
    assert RunConfig.model_validate(table).eval == config.eval


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("train.colour=1", "train.colour"),
        ("colour.x=1", "colour"),
        ("train.num_steps=-1", "train.num_steps"),
        ("train.num_steps=none", "train.num_steps"),
        ("train.lr=0", "train.lr"),
        ("train.min_lr=1.0", "train.min_lr"),
        ("train.micro_batch_size=7", "train.micro_batch_size"),
        ("train.save_interval=0", "train.save_interval"),
        ("train.dtype=float16", "train.dtype"),
        ("eval.interval=0", "eval.interval"),
        ("eval.interval=none", "eval.interval"),
        ("eval.suites=[]", "eval.suites"),
        ("eval.url=none", "eval.url"),
        ("eval.url=somewhere", "eval.url"),
        ("eval.max_in_flight=0", "eval.max_in_flight"),
        ("eval.keep=-1", "eval.keep"),
        ("eval.snapshot_source=caller", "eval.snapshot_source"),
        ('eval.snapshot_source=""', "eval.snapshot_source"),
        ("eval.snapshot_source=reuse", "train.save_hf"),
        ("run.name=a/b", "run.name"),
        ("run.name=a..b", "run.name"),
        ("fleet.num_eval_engines=0", "fleet.num_eval_engines"),
        ("fleet.num_eval_engines=[2,1]", "fleet.num_eval_engines"),
        ("fleet.num_eval_engines=-1", "fleet.num_eval_engines"),
        ("parallel.data=0", "parallel.data"),
        ("data.load_debug_data=dumped", "data.load_debug_data"),
        ("nonsense", "--set"),
    ],
)
def test_what_cannot_work_is_refused_by_name(path: Path, override: str, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run(path, [override])
    assert str(caught.value.field).startswith(field)
    assert caught.value.hint
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("train.debug_rollout_only", "no rollouts"),
        ("eval.rollout_only", "no rollouts"),
        ("train.debug_train_only", "unset eval.interval"),
        ("eval.eval_only", "train.num_steps = 0"),
        ("data.load_debug_rollout_data", "data.load_debug_data"),
        ("train.load_debug_data", r"\[data\]"),
    ],
)
def test_switches_of_other_trainers_are_unknown_and_the_hint_says_why(path: Path, key: str, why: str) -> None:
    with pytest.raises(ConfigError, match="unknown key") as caught:
        load_run(path, [f"{key}=true"])
    assert caught.value.field == key
    assert re.search(why, str(caught.value.hint))


def test_dumped_batches_are_trained_on_without_evaluation_or_not_at_all(path: Path) -> None:
    """Their curve would mean nothing."""
    load = ["data.load_debug_data=dumped"]
    with pytest.raises(ConfigError, match=r"unset eval\.interval"):
        load_run(path, load)
    config = load_run(path, [*load, "eval.interval=none", "eval.suites=[]"])
    assert config.data.load_debug_data == path.parent / "dumped"
    with pytest.raises(ConfigError, match="dumped already"):
        load_run(path, [*load, "data.save_debug_data=again", "eval.interval=none", "eval.suites=[]"])


def test_the_address_that_the_file_leaves_out_comes_from_the_environment(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVALFLEET_URL", "http://10.0.0.1:9")
    assert load_run(path, ["eval.url=none"]).eval.url == "http://10.0.0.1:9"
    assert load_run(path).eval.url == "http://127.0.0.1:1"
    monkeypatch.delenv("EVALFLEET_URL")
    with pytest.raises(ConfigError, match="the service's address"):
        load_run(path, ["eval.url=none"])


@pytest.mark.parametrize(("batch", "micro"), [(8, 8), (96, 32), (7, 1), (256, 64)])
def test_a_micro_batch_that_nobody_set_divides_the_batch(path: Path, batch: int, micro: int) -> None:
    assert load_run(path, [f"train.global_batch_size={batch}"]).train.micro_batch_size == micro


def test_a_copy_that_stays_on_the_device_is_refused_where_the_device_is_to_be_left_to_an_engine(path: Path) -> None:
    with pytest.raises(ConfigError, match="set it to 'host'") as caught:
        load_run(path, ["train.offload_train=true", "eval.buffer=device"])
    assert caught.value.field == "eval.buffer"
    assert load_run(path, ["eval.buffer=device"]).eval.buffer == "device"


def test_reuse_needs_an_interval_that_is_a_multiple_of_the_saves(path: Path) -> None:
    reuse = ["eval.snapshot_source=reuse", "train.save_hf=true"]
    with pytest.raises(ConfigError, match=r"multiple of train\.save_interval"):
        load_run(path, [*reuse, "train.save_interval=2"])
    with pytest.raises(ConfigError, match=r"multiple of train\.save_interval"):
        load_run(path, reuse)
    assert load_run(path, [*reuse, "train.save_interval=5"]).reuses


def test_a_config_mistake_ends_the_command_with_2_and_one_line(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--config", str(path), "--set", "train.colour=1"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("evalfleet-train: train.colour: run.toml: unknown key")
    assert error.count("\n") == 1
    assert main.main(["--config", str(path.parent / "none.toml")]) == 2


def test_no_file_and_no_toml_are_config_errors(tmp_path: Path) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text("[run\n")
    for path in (bad, tmp_path / "missing.toml", tmp_path):
        with pytest.raises(ConfigError, match="can't be read"):
            load_run(path)


# --- the launch


@pytest.mark.parametrize(("engines", "starts"), [(0, False), (1, True), ((0, 0), False), ((0, 3), True)])
def test_engines_start_when_the_eval_group_may_have_any(engines: Any, starts: bool) -> None:
    assert LaunchConfig(num_eval_engines=engines).starts_inference_engines is starts


def test_nothing_but_the_launch_reads_what_starts_inference_engines_is_derived_from() -> None:
    package = Path(launch.__file__).parent
    readers = {
        source.name
        for source in package.glob("*.py")
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "num_eval_engines"
    }
    assert readers == {"launch.py"}
    with pytest.raises(ValidationError, match="frozen"):
        LaunchConfig().starts_inference_engines = False  # type: ignore[misc]


def test_a_launch_tells_the_run_of_the_fleet_and_two_files_may_not_differ(path: Path) -> None:
    told = {"num_eval_engines": [2, 2]}
    assert load_run(path, fleet=told).fleet.num_eval_engines == (2, 2)
    assert load_run(path, ["fleet.num_eval_engines=2"], told).fleet.starts_inference_engines
    with pytest.raises(ConfigError, match=r"fleet\.toml \[2, 2\]") as caught:
        load_run(path, ["fleet.num_eval_engines=3"], told)
    assert caught.value.field == "fleet.num_eval_engines"


def test_an_interval_with_a_fleet_of_no_engine_is_refused_unless_some_are_attached(path: Path) -> None:
    """The symptom: an accepted config silently runs no evaluation: an interval without engines is an error."""
    with pytest.raises(ConfigError, match="an interval needs engines"):
        load_run(path, fleet={"num_eval_engines": [0, 0], "num_attached_engines": 0})
    attached = load_run(path, fleet={"num_eval_engines": [0, 0], "num_attached_engines": 1}).fleet
    assert (attached.starts_inference_engines, attached.has_engines) == (False, True)


# --- the model's config.json


def _model(directory: Path, **changes: Any) -> Path:
    table = {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 50,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        **changes,
    }
    (directory / "config.json").write_text(json.dumps({k: v for k, v in table.items() if v is not None}))
    for name in ("tokenizer_config.json", "generation_config.json", "model.safetensors"):
        (directory / name).write_text("{}")
    return directory


def test_rope_theta_is_read_from_either_place(tmp_path: Path) -> None:
    assert read_architecture(_model(tmp_path, rope_theta=5e5)).rope.theta == 5e5
    nested = {"rope_theta": 7e5, "rope_type": "default"}
    assert read_architecture(_model(tmp_path, rope_parameters=nested)).rope.theta == 7e5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"architectures": None}, "architecture none"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, "rope_type"),
        ({"dtype": "float8"}, "float8"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read_architecture(_model(tmp_path, **changes))
    assert caught.value.field == architecture.FIELD


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer_config.json", "generation_config.json", "model.safetensors"]
)
def test_a_model_directory_that_lacks_a_file_is_refused(tmp_path: Path, name: str) -> None:
    (_model(tmp_path) / name).unlink()
    with pytest.raises(ConfigError, match=name.removeprefix("model.")):
        read_architecture(tmp_path)
