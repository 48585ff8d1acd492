"""`evalfleet doctor --engine`: a snapshot is loaded into an engine of its own and held against its canary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from eval_service.cli import main
from eval_service.contract import names
from eval_service.contract.canary import canary_token_ids
from eval_service.contract.errors import InvalidRequest
from eval_service.contract.manifest import Canary, Manifest
from eval_service.engine.fake import fake_canary
from tests.support.engine_model import VOCAB_SIZE, make_model, reference_canary
from tests.support.tiny_snapshots import lay_out, publish, tiny


def doctor(*arguments: object) -> Any:
    return CliRunner().invoke(main.app, ["doctor", *map(str, arguments)])


def with_canary(directory: Path, manifest: Manifest, canary: Canary | None) -> Path:
    """As a trainer's export with this canary would be."""
    written = manifest.model_copy(update={"canary": canary})
    (directory / names.MANIFEST).write_text(written.model_dump_json())
    (directory / names.COMPLETE).touch()
    named = directory.with_name(names.step_dir_name(manifest.step, manifest.digest))
    return directory.rename(named)


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    """A fleet of fake engines, which boot with a model of their own."""
    make_model(tmp_path / "base", seed=9)
    path = tmp_path / "fleet.toml"
    path.write_text('[service]\nroots = ["."]\n[groups.eval]\ngrade = "fake"\nmodel = "base"\n')
    return path


def test_it_loads_and_its_canary_agrees(fleet: Path, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", seed=1)
    canary = fake_canary(model.manifest.tensor_digest, canary_token_ids(VOCAB_SIZE))
    place = with_canary(model.path, model.manifest, canary)
    result = doctor(place, "--engine", "--fleet", fleet, "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)["engine"]
    assert told["ok"]
    assert told["proof"] == "canary"
    assert told["canary_diff"] == 0.0


def test_a_canary_that_is_not_reproduced_is_a_fault_with_its_fix(fleet: Path, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", seed=1)
    place = with_canary(model.path, model.manifest, fake_canary("f" * 32, canary_token_ids(VOCAB_SIZE)))
    result = doctor(place, "--engine", "--fleet", fleet)
    assert result.exit_code == 1
    assert "the pin fails (canary): log-probs differ by" in result.output
    assert "-> the export is not what the trainer held" in result.output


def test_another_exporters_directory_is_loaded_too_and_said_to_be_unproven(fleet: Path, tmp_path: Path) -> None:
    result = doctor(make_model(tmp_path / "model", seed=1).path, "--engine", "--fleet", fleet)
    assert result.exit_code == 0, result.output
    assert "unproven: its exporter left no canary" in result.output


def test_a_snapshot_with_faults_is_not_tried(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", seed=1)
    (model.path / "config.json").unlink()
    result = doctor(model.path, "--engine", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["engine"] is None
    assert isinstance(doctor(model.path, "--fleet", tmp_path / "fleet.toml").exception, InvalidRequest)


@pytest.mark.real
@pytest.mark.timeout(300)
def test_real_sglang_reproduces_the_canary_of_transformers(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", seed=1)
    place = with_canary(model.path, model.manifest, reference_canary(model.path))
    result = doctor(place, "--engine", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)["engine"]
    assert told["proof"] == "canary"
    assert told["canary_diff"] < 2e-5


def test_every_fault_of_another_exporters_directory_is_named_at_once_with_tensor_and_fix(tmp_path: Path) -> None:
    model = tiny()
    model.config |= {"dtype": "bfloat16"}  # the tensors are float32
    del model.tensors["model.norm.weight"]
    del model.texts["tokenizer.json"]
    model.texts["generation_config.json"] = b'{"eos_token_id": [99]}'
    place = lay_out(model, tmp_path / "theirs", shards=2)
    (place / "pytorch_model.bin").write_bytes(b"never opened")
    result = doctor(place, "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    by_field = {fault["field"]: fault for fault in report["faults"]}
    assert {"model.norm.weight", "tokenizer.json", "eos_token_id", "model.safetensors.index.json"} <= set(by_field)
    assert by_field["model.embed_tokens.weight"]["message"] == "is F32; config.json calls for BF16"
    assert all(fault["hint"] for fault in report["faults"])
    assert not (place / names.MANIFEST).exists()


def test_a_published_snapshots_faults_are_all_named_too(tmp_path: Path) -> None:
    place = publish(tiny(), tmp_path, shards=2).path
    (place / names.COMPLETE).unlink()
    (place / "model-00001-of-00002.safetensors").write_bytes(b"short")
    (place / "stray.safetensors").write_bytes(b"x" * 20)
    report = json.loads(doctor(place, "--json").stdout)
    fields = {fault["field"] for fault in report["faults"]}
    assert {names.COMPLETE, "model-00001-of-00002.safetensors", "stray.safetensors"} <= fields
    assert all(fault["hint"] for fault in report["faults"])
