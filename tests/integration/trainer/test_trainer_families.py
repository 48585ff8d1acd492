"""Every family on the real megatron-core: transformers, megatron and what megatron exports say the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from eval_service.contract.errors import ConfigError
from eval_service.contract.snapshot import SnapshotWriter
from tests.support.tiny_model import build_tiny_model
from trainer.architecture import read_architecture
from trainer.config import ParallelSection, TrainSection
from trainer.export import Exporter
from trainer.mcore import quiet
from trainer.model import Model, build_model
from trainer.parallel import Ranks, parallel_session
from trainer.rope import inverse_frequencies
from trainer.training import Training, build_training, load_hf
from trainer.weights import ExportFailed

pytestmark = pytest.mark.real

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"tied": True},
    "qwen3, untied": {"tied": False},
    "qwen2": {"family": "qwen2", "tied": True},
    "qwen2, untied, a key of its own for each head": {"family": "qwen2", "tied": False, "num_key_value_heads": 4},
    "llama, one key for all heads": {"family": "llama", "tied": False, "num_key_value_heads": 1},
    "llama 3.1": {"family": "llama", "tied": False, "rope_parameters": LLAMA3_ROPE},
    "llama 3.2, tied": {"family": "llama", "tied": True, "rope_parameters": LLAMA3_ROPE, "head_dim": 32},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    "padded vocabulary": {"parallel": {"vocab_multiple": 128}},
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """One process group for the module."""
    with parallel_session(ParallelSection(), seed=0, threads=1) as held:
        yield held


@dataclass(frozen=True)
class Imported:
    """A model of a family, in transformers' directory and in megatron."""

    hf_dir: Path
    model: Model


@pytest.fixture(scope="module", params=list(FAMILIES))
def imported(request: pytest.FixtureRequest, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Imported:
    """One of each."""
    settings = dict(FAMILIES[request.param])
    parallel = ParallelSection(**settings.pop("parallel", {}))
    hf_dir = build_tiny_model(tmp_path_factory.mktemp("hf"), **settings)
    model = build_model(read_architecture(hf_dir), ranks, parallel)
    load_hf(model, hf_dir)
    return Imported(hf_dir, model)


def _logits(directory: Path, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        table: torch.Tensor = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)(ids).logits
    return table


def _export(model: Model, hf_dir: Path, root: Path, step: int = 1) -> Path:
    exporter = Exporter(model, hf_dir)
    exporter.stage()
    with SnapshotWriter(root, "run", step, "test") as writer:
        exporter.fill(writer)
        return writer.publish(canary=exporter.canary(), dispatch=()).path


def test_logits_of_transformers_of_megatron_and_of_the_export_agree(imported: Imported, tmp_path: Path) -> None:
    vocab = imported.model.architecture.vocab_size
    ids = torch.randint(0, vocab, (2, 200), generator=torch.Generator().manual_seed(5))
    positions = torch.arange(200).expand_as(ids)
    with torch.no_grad(), quiet():
        ours = imported.model.gpt(ids, positions, None)[..., :vocab]
    theirs = _logits(imported.hf_dir, ids)
    assert (ours - theirs).abs().max() < 1e-4
    exported = _export(imported.model, imported.hf_dir, tmp_path)
    assert torch.equal(_logits(exported, ids), theirs)


def test_an_untouched_export_is_the_import_bit_by_bit(imported: Imported, tmp_path: Path) -> None:
    directory = _export(imported.model, imported.hf_dir, tmp_path)
    exported, original = (load_file(path / "model.safetensors") for path in (directory, imported.hf_dir))
    assert original.keys() == exported.keys()
    assert all(torch.equal(original[name], exported[name]) for name in original)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (directory / name).read_bytes() == (imported.hf_dir / name).read_bytes()


def test_a_copy_on_the_device_first_is_the_same_export(imported: Imported, tmp_path: Path) -> None:
    exporter = Exporter(imported.model, imported.hf_dir, near=True)
    exporter.stage()
    with SnapshotWriter(tmp_path, "run", 1, "test") as writer:
        exporter.fill(writer)
        digest = writer.digest()
    assert _export(imported.model, imported.hf_dir, tmp_path).name == f"step_1-{digest[:8]}"


def test_llama3_frequencies_are_those_of_transformers(tmp_path: Path) -> None:
    hf_dir = build_tiny_model(tmp_path, family="llama", rope_parameters=LLAMA3_ROPE)
    architecture = read_architecture(hf_dir)
    theirs = AutoModelForCausalLM.from_pretrained(hf_dir).model.rotary_emb.inv_freq
    assert torch.equal(inverse_frequencies(architecture.rope, architecture.head_dim), theirs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_main_parameters_are_float32_whatever_the_model_is_in(ranks: Ranks, tmp_path: Path, dtype: str) -> None:
    """A change too small for bfloat16 is not lost: it adds up in the main parameters."""
    hf_dir = build_tiny_model(tmp_path / "hf", tied=True)
    section = TrainSection(num_steps=64, lr=1e-6, schedule="constant", dtype=dtype, clip_grad=None)
    training: Training = build_training(read_architecture(hf_dir), hf_dir, section, ranks)
    before = {name: param.detach().float().clone() for name, param in training.model.parameters().items()}
    for step in range(1, 65):
        for param in training.model.ddp.parameters():
            param.main_grad.fill_(1.0)
        training.optimizer.step(step)
    name = "decoder.final_layernorm.weight"
    moved = before[name] - training.model.parameters()[name].detach().float()
    assert training.model.parameters()[name].dtype == getattr(torch, dtype)
    # 64 steps of 1e-6 are well under bfloat16's resolution at 1.0: nothing to see there, all of it in float32.
    assert float(moved.abs().max()) == pytest.approx(6.4e-5 if dtype == "float32" else 0.0, rel=0.05, abs=1e-9)
    mains = [main for main in training.optimizer.tensors() if main.shape == before[name].shape]
    assert any(float(main[0]) == pytest.approx(1 - 6.4e-5, abs=1e-6) for main in mains)


def test_a_tensor_that_is_not_finite_fails_the_export_by_name(imported: Imported, tmp_path: Path) -> None:
    params = imported.model.parameters()
    weight = params["decoder.layers.1.mlp.linear_fc2.weight"].data
    held = weight[0, 0].clone()
    weight[0, 0] = float("inf")
    try:
        with pytest.raises(ExportFailed, match=r"model\.layers\.1\.mlp\.down_proj\.weight holds values"):
            _export(imported.model, imported.hf_dir, tmp_path)
    finally:
        weight[0, 0] = held
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize("fault", [MemoryError("no room"), RuntimeError("can't allocate memory")])
def test_memory_that_runs_out_in_a_shard_fails_the_export_and_every_rank_is_told(
    fault: Exception, imported: Imported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Raised past the ranks' agreement, the others would wait for this one."""

    def none_left(*_: object) -> None:
        raise fault

    monkeypatch.setattr(SnapshotWriter, "add_weights", none_left)
    with pytest.raises(ExportFailed, match=str(fault)):
        _export(imported.model, imported.hf_dir, tmp_path)
    assert list((tmp_path / "run").iterdir()) == []


def test_an_architecture_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    hf_dir = build_tiny_model(tmp_path)
    config = json.loads((hf_dir / "config.json").read_text())
    (hf_dir / "config.json").write_text(json.dumps({**config, "architectures": ["MixtralForCausalLM"]}))
    with pytest.raises(ConfigError, match=r"MixtralForCausalLM can't be trained.*Qwen3.*Qwen2.*Llama"):
        read_architecture(hf_dir)
