"""Model, conversion and export on the real megatron-core, held against transformers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from eval_service.contract.canary import canary_token_ids
from eval_service.contract.errors import ConfigError, SnapshotFault
from eval_service.contract.snapshot import SnapshotWriter
from tests.support.tiny_model import EOS, build_tiny_model, write_chats
from trainer import conversion, cpu_megatron, mcore
from trainer.architecture import read_architecture
from trainer.config import ParallelSection, TrainSection
from trainer.data import Dataset, Example, encode, load_dataset, pack
from trainer.export import Exporter, plan_files
from trainer.model import build_model
from trainer.parallel import Ranks, check_world, parallel_session
from trainer.session import reserve
from trainer.training import Training, build_training, load_hf

pytestmark = pytest.mark.real
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """One process group for the module."""
    with parallel_session(ParallelSection(), seed=0, threads=1) as held:
        yield held


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a head of its own."""
    return build_tiny_model(tmp_path_factory.mktemp("hf"), tied=False, seed=3)


def _hf_logprobs(directory: Path, ids: torch.Tensor) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        table: torch.Tensor = model(ids).logits[:, :-1].log_softmax(-1)
    return table.gather(-1, ids[:, 1:, None]).squeeze(-1)


@pytest.mark.parametrize("tied", [True, False])
def test_a_trained_export_in_several_files_loads_in_transformers_and_has_its_canary(
    ranks: Ranks, tmp_path: Path, tied: bool
) -> None:
    """A tied lm_head is kept in the base model's index: an empty tensor in shard 2, whose header is rejected."""
    hf_dir = build_tiny_model(tmp_path / "hf", tied=tied, seed=3)
    training = build_training(
        read_architecture(hf_dir), hf_dir, TrainSection(num_steps=3, lr=1e-2, micro_batch_size=2), ranks
    )
    dataset = _dataset(hf_dir, tmp_path, global_batch_size=4)
    for step in (1, 2, 3):
        training.step(step, dataset)
    exporter = Exporter(training.model, hf_dir, max_file_bytes=60_000)
    exporter.stage()
    with SnapshotWriter(tmp_path, "run", 3, "test") as writer:
        exporter.fill(writer)
        digest = writer.digest()
        published = writer.publish(canary=exporter.canary(), dispatch=())
    assert published.manifest.digest == digest
    index = json.loads((published.path / "model.safetensors.index.json").read_text())["weight_map"]
    shards = {file: load_file(published.path / file) for file in set(index.values())}
    assert len(shards) > 1
    assert ("lm_head.weight" in index) is not tied
    assert {name: file for file, held in shards.items() for name in held} == index
    assert all(tensor.numel() for held in shards.values() for tensor in held.values())
    canary = published.manifest.canary
    assert canary is not None
    ids = torch.tensor(canary.token_ids)
    assert torch.allclose(torch.tensor(canary.logprobs), _hf_logprobs(published.path, ids), atol=1e-5)
    assert not torch.allclose(torch.tensor(canary.logprobs), _hf_logprobs(hf_dir, ids), atol=1e-2)
    assert AutoTokenizer.from_pretrained(published.path).eos_token == EOS


def test_a_bfloat16_model_trained_in_float32_is_exported_in_its_own_dtype(ranks: Ranks, tmp_path: Path) -> None:
    """Tensor dtype differs from config dtype: twice the size, or a silent cast."""
    hf_dir = build_tiny_model(tmp_path / "hf")
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(hf_dir / "model.safetensors").items()}
    save_file(weights, hf_dir / "model.safetensors", metadata={"format": "pt"})
    config = hf_dir / "config.json"
    config.write_text(config.read_text().replace('"dtype": "float32"', '"dtype": "bfloat16"'))
    with SnapshotWriter(tmp_path, "run", 1, "test") as writer:
        model = build_model(read_architecture(hf_dir), ranks, ParallelSection())
        load_hf(model, hf_dir)
        exporter = Exporter(model, hf_dir)
        exporter.stage()
        exporter.fill(writer)
        exported = load_file(writer.partial / "model.safetensors")
        size_bytes = (writer.partial / "model.safetensors").stat().st_size
    assert size_bytes == pytest.approx((hf_dir / "model.safetensors").stat().st_size, abs=4096)
    assert {tensor.dtype for tensor in exported.values()} == {torch.bfloat16}
    assert all(torch.equal(exported[name], weights[name]) for name in weights)


def test_a_tensor_that_the_exporter_skips_fails_the_export_by_its_key(
    hf_dir: Path, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index lists keys that no shard contains, as of layers that a converter skips; and an unsupported
    architecture whose export "succeeds" with no weights."""
    model = build_model(read_architecture(hf_dir), ranks, ParallelSection())
    load_hf(model, hf_dir)
    whole = plan_files(model.architecture, 60_000, [0])
    for plan, said in (
        ([*whole[:-1], replace(whole[-1], rules=whole[-1].rules[:-1])], "lm_head.weight was never written"),
        ([], "no tensor was written"),
    ):
        monkeypatch.setattr("trainer.export.plan_files", lambda *_, plan=plan: plan)
        exporter = Exporter(model, hf_dir)
        exporter.stage()
        with SnapshotWriter(tmp_path, "run", 1, "test") as writer:
            exporter.fill(writer)
            with pytest.raises(SnapshotFault, match=said):
                writer.publish(canary=None, dispatch=())
        assert not list((tmp_path / "run").iterdir())


def test_a_buffer_is_held_only_where_something_is_exported_and_one_that_can_not_be_had_is_refused(
    hf_dir: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = Exporter(build_model(read_architecture(hf_dir), ranks, ParallelSection()), hf_dir)
    assert "buffer" not in vars(exporter)
    with monkeypatch.context() as patched:
        patched.setattr("trainer.export.HostBuffer", _no_memory)
        with pytest.raises(ConfigError, match=r"allocated: out of memory") as caught:
            reserve(exporter, "device")
    assert (caught.value.field, caught.value.hint) == ("eval.buffer", "set it to 'host'")
    reserve(exporter, "host")
    assert exporter.buffer.size_bytes == sum(4 * tensor.numel() for tensor in load_file(hf_dir / WEIGHTS).values())


def _no_memory(*_: object, **__: object) -> None:
    raise RuntimeError("out of memory")


def test_missing_and_foreign_tensors_are_refused_by_name(hf_dir: Path) -> None:
    architecture = read_architecture(hf_dir)
    tensors = load_file(hf_dir / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model\.norm\.weight"):
        conversion.to_megatron({name: t for name, t in tensors.items() if name != "model.norm.weight"}, architecture)
    with pytest.raises(ConfigError, match=r"model\.visual\.weight"):
        conversion.to_megatron({**tensors, "model.visual.weight": torch.zeros(1)}, architecture)


def test_micro_batches_do_not_change_a_step(hf_dir: Path, ranks: Ranks, tmp_path: Path) -> None:
    dataset = _dataset(hf_dir, tmp_path, global_batch_size=8)
    outcomes = []
    for size in (8, 2):
        training = _training(hf_dir, ranks, micro_batch_size=size)
        results = [training.step(step, dataset) for step in (1, 2)]
        outcomes.append([(result.loss, result.grad_norm, float(result.tokens)) for result in results])
    assert torch.allclose(torch.tensor(outcomes[0]), torch.tensor(outcomes[1]), rtol=1e-4)


def test_loss_is_the_mean_over_the_assistants_tokens_alone(hf_dir: Path, ranks: Ranks, tmp_path: Path) -> None:
    dataset = _dataset(hf_dir, tmp_path, global_batch_size=2)
    result = _training(hf_dir, ranks, micro_batch_size=1).step(1, dataset)
    total, count = 0.0, 0
    for example in dataset.of_step(1):
        logprobs = _hf_logprobs(hf_dir, torch.tensor([example.token_ids]))[0]
        wanted = torch.tensor(example.learn[1:])
        total -= float(logprobs[wanted].sum())
        count += int(wanted.sum())
    assert result.tokens == count
    assert result.loss == pytest.approx(total / count, abs=1e-4)


def test_a_packed_batch_has_the_loss_of_the_same_conversations_apart(
    hf_dir: Path, ranks: Ranks, tmp_path: Path
) -> None:
    plain = _dataset(hf_dir, tmp_path, global_batch_size=2)
    packed = Dataset(pack(plain.examples, 80, seed=0), 0, 2)
    apart: list[Example] = []
    for row in packed.of_step(1):
        ends = (*row.starts[1:], len(row.token_ids))
        apart += [
            Example(row.token_ids[begin:end], row.learn[begin:end]) for begin, end in zip(row.starts, ends, strict=True)
        ]
    assert len(apart) > 4
    total, count = 0.0, 0
    for example in apart:
        logprobs = _hf_logprobs(hf_dir, torch.tensor([example.token_ids]))[0]
        wanted = torch.tensor(example.learn[1:])
        total -= float(logprobs[wanted].sum())
        count += int(wanted.sum())
    results = [
        _training(hf_dir, ranks, micro_batch_size=size).step(1, data)
        for data, size in ((packed, 1), (packed, 2), (Dataset(apart, 0, len(apart)), len(apart)))
    ]
    for result in results:
        assert result.tokens == count
        assert result.loss == pytest.approx(total / count, abs=1e-5)
        assert result.grad_norm == pytest.approx(results[0].grad_norm, rel=1e-4)
    canary = torch.tensor(canary_token_ids(46))  # the next forward pass has plain positions again
    training = _training(hf_dir, ranks, micro_batch_size=2)
    before = training.model.logprobs(canary)
    with training.model.positions.at(torch.zeros(2, 3, dtype=torch.long)):
        pass
    assert torch.equal(training.model.logprobs(canary), before)


def test_the_tokenizers_own_template_is_learnt_up_to_the_eos(hf_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(hf_dir)
    messages = [
        {"role": "user", "content": "sort ba"},
        {"role": "assistant", "content": "ab"},
        {"role": "user", "content": "and c"},
        {"role": "assistant", "content": "c"},
    ]
    example = encode(messages, tokenizer, max_length=100)
    learnt = [token for token, mark in zip(example.token_ids, example.learn, strict=True) if mark]
    assert tokenizer.decode(learnt) == f"ab{EOS}c{EOS}"


def test_the_cpu_shim_leaves_torch_as_it_is(ranks: Ranks) -> None:
    assert cpu_megatron.install() is not torch.cuda.is_available()
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")
    assert mcore.schedules.torch.zeros([], device="cuda").device.type == "cpu"


def test_ranks_that_do_not_divide_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match="3 ranks"):
        check_world(ParallelSection(tensor=2))


def _dataset(hf_dir: Path, tmp_path: Path, *, global_batch_size: int) -> Dataset:
    path = write_chats(tmp_path / "train.jsonl", 16)
    tokenizer = AutoTokenizer.from_pretrained(hf_dir)
    return load_dataset(path, tokenizer, max_length=64, seed=0, global_batch_size=global_batch_size)


def _training(hf_dir: Path, ranks: Ranks, *, micro_batch_size: int) -> Training:
    config = TrainSection(num_steps=4, lr=1e-3, global_batch_size=8, micro_batch_size=micro_batch_size)
    return build_training(read_architecture(hf_dir), hf_dir, config, ranks)
