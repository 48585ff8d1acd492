"""The training state: this rank's model, optimizer and data; it takes steps and goes into checkpoints and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from eval_service.contract.errors import ConfigError
from trainer import conversion
from trainer.architecture import FIELD, Architecture
from trainer.checkpoint import FIELD as SAVE_FIELD
from trainer.checkpoint import CheckpointStore
from trainer.config import ParallelSection, TrainSection
from trainer.data import Batch, Example, collate
from trainer.debug_data import Batches
from trainer.mcore import get_forward_backward_func, is_main_replica, quiet
from trainer.model import Model, build_model
from trainer.offload import CudaMemory, Offload, PlainMemory
from trainer.optim import Optimizer, build_optimizer
from trainer.parallel import Ranks, share_of
from trainer.rope import Positions
from trainer.sharding import HostCopies, Shards, model_shards
from trainer.sharding import load as load_shards


@dataclass(frozen=True, slots=True)
class StepResult:
    """`loss` is the mean over the learnt tokens of the whole batch, in nats; `grad_norm` is before clipping."""

    loss: float
    rate: float
    grad_norm: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Training:
    """Everything that a step changes."""

    config: TrainSection
    parallel: ParallelSection
    model: Model
    optimizer: Optimizer
    copies: HostCopies
    offload: Offload | None = None

    def here(self) -> AbstractContextManager[None]:
        """Parameters and optimizer are on the device meanwhile; in between they may wait on the host."""
        return self.offload.here() if self.offload is not None else nullcontext()

    def step(self, step: int, dataset: Batches) -> StepResult:
        """Train step `step` (from 1). Collective."""
        with self.here():
            return self._step(step, dataset)

    def _step(self, step: int, dataset: Batches) -> StepResult:
        examples = share_of(dataset.of_step(step), self.model.place)
        size = self.config.micro_batch_size
        length = self._length(dataset.of_step(step))
        self.model.ddp.zero_grad_buffer()
        with quiet():
            losses = get_forward_backward_func()(
                forward_step_func=partial(_forward, positions=self.model.positions),
                data_iterator=self._batches(examples, length),
                model=[self.model.ddp],
                num_microbatches=len(examples) // size,
                seq_length=length,
                micro_batch_size=size,
            )
        rate, norm = self.optimizer.step(step)
        loss, tokens = self._total(losses)
        return StepResult(loss / max(tokens, 1), rate, norm, int(tokens))

    def _length(self, examples: list[Example]) -> int:
        """Tokens of a row, the same for every micro-batch, as pipeline stages and sequence parallelism want it."""
        multiple = self.parallel.tensor if self.parallel.sequence_parallel else 1
        longest = max(len(example.token_ids) for example in examples) - 1
        return -(-longest // multiple) * multiple

    def _batches(self, examples: Any, length: int) -> Iterator[Batch]:
        for first in range(0, len(examples), self.config.micro_batch_size):
            batch = collate(examples[first : first + self.config.micro_batch_size], length=length)
            yield batch.to(self.model.ranks.device)

    def _total(self, losses: list[dict[str, Tensor]]) -> tuple[float, float]:
        """Summed loss and tokens of the whole batch, from the ranks that know a share of it."""
        place = self.model.place
        knows = place.last_stage and place.tensor == 0
        mine = torch.zeros(2, dtype=torch.float64)
        if knows:
            mine[0] = torch.stack([entry["loss"] for entry in losses]).double().sum().cpu()
            mine[1] = torch.stack([entry["tokens"] for entry in losses]).double().sum().cpu()
        total = self.model.ranks.main.sum(mine)
        return float(total[0]), float(total[1])

    def reserve(self) -> None:
        """Have host memory for a checkpoint before the first step, so that no save pays for it."""
        model = model_shards(self.model.gpt)
        mine = (shard.data.nbytes for shard in model.values() if is_main_replica(shard.replica_id))
        self.copies.reserve((*mine, *self.optimizer.sizes(model)))

    def state(self, step: int, data: Mapping[str, Any]) -> Shards:
        """What a checkpoint holds of now, in host memory that the next one takes again.

        Args:
            data: what decides the order of the data; a step's own place in it follows from its number, as its learning
                rate does.
        """
        with self.here():
            model = model_shards(self.model.gpt)
            state = {**self._common(), "step": step, "data": dict(data)}
            return self.copies.of({**state, "model": model, "optimizer": self.optimizer.shards(model)})

    def _common(self) -> dict[str, Any]:
        # Nothing here draws from the CUDA generators, so they are as the seed sets them, under any layout.
        return {"architecture": _identity(self.model.architecture), "rng": torch.get_rng_state()}

    def load(self, step: int, store: CheckpointStore) -> dict[str, Any]:
        """Go on from a checkpoint, of this layout of ranks or another; returns the `data` that it was saved with.

        Raises:
            ConfigError: it can't be read, or is of another model or optimizer.
        """
        model = model_shards(self.model.gpt)
        wanted = {"model": dict(model), "optimizer": self.optimizer.shards(model)}
        targets = _tensors(wanted)
        try:
            found = load_shards(wanted, store.path(step))
            if found["architecture"] != _identity(self.model.architecture):
                raise ValueError(f"it was saved of {found['architecture']}")
            _copy_into(targets, found)
            self.optimizer.load(found["optimizer"])
            torch.set_rng_state(found["rng"])
        except Exception as exc:  # one of many kinds, as files and shapes have it
            raise ConfigError(
                f"the checkpoint of step {step} can't be read, or is of another model or optimizer: {exc}",
                field=SAVE_FIELD,
                hint="name another directory, or set train.resume = false",
            ) from exc
        return dict(found["data"])


def build_training(
    architecture: Architecture,
    hf_path: Path,
    config: TrainSection,
    ranks: Ranks,
    parallel: ParallelSection | None = None,
) -> Training:
    """Model and optimizer at step 0, with the weights of a Hugging Face directory."""
    parallel = parallel or ParallelSection()
    model = build_model(architecture, ranks, parallel, config.dtype)
    load_hf(model, hf_path)
    optimizer = build_optimizer(model, config)
    offload = _offload(model, optimizer) if config.offload_train else None
    return Training(config, parallel, model, optimizer, HostCopies(ranks.device), offload)


def _offload(model: Model, optimizer: Optimizer) -> Offload:
    def kept() -> Iterator[Tensor]:
        yield from (param.data for param in model.ddp.parameters())
        yield from optimizer.tensors()

    def scratch() -> Iterator[Tensor]:
        yield from (buffer.grad_data for buffer in model.ddp.buffers)

    return Offload(kept, scratch, CudaMemory() if model.ranks.device.type == "cuda" else PlainMemory())


def load_hf(model: Model, hf_path: Path) -> None:
    """Fill a model from a directory's safetensors files; no more than one megatron tensor is held at a time.

    Raises:
        ConfigError: a tensor is missing, foreign, or of another shape.
    """
    with ExitStack() as stack:
        held: dict[str, Any] = {}
        for path in sorted(hf_path.glob("*.safetensors")):
            file = stack.enter_context(safe_open(path, framework="pt"))
            held.update(dict.fromkeys(file.keys(), file))
        conversion.check_names(held, model.architecture)
        for rule in conversion.rules_of(model.architecture):
            _load_rule(model, rule, held)


def _load_rule(model: Model, rule: conversion.Rule, held: Mapping[str, Any]) -> None:
    try:
        tensors = [held[name].get_tensor(name) for name in rule.hf]
        model.load(rule, rule.join(tensors, model.architecture))
    except RuntimeError as exc:
        raise ConfigError(f"weights and config.json disagree: {exc}", field=FIELD, hint="is it complete?") from exc


def _identity(architecture: Architecture) -> dict[str, Any]:
    """What of an architecture the shapes of a checkpoint's tensors don't tell."""
    return {"name": architecture.name, "vocab_size": architecture.vocab_size, "tied": architecture.tied}


def _tensors(shards: Any) -> Any:
    """The tensors behind shards, in the same structure."""
    if isinstance(shards, dict):
        return {name: _tensors(shard) for name, shard in shards.items()}
    return getattr(shards, "data", None)


@torch.no_grad()
def _copy_into(targets: Any, found: Any) -> None:
    """What megatron puts together of several shards is a tensor of its own; the rest was read in place."""
    for name, target in targets.items():
        if isinstance(target, dict):
            _copy_into(target, found[name])
        elif target is not None and target is not found[name]:
            target.copy_(found[name])


def _forward(batches: Iterator[Batch], ddp: Any, *, positions: Positions) -> tuple[Tensor, Any]:
    batch = next(batches)
    with positions.at(batch.position_ids if batch.documents is not None else None):
        losses = ddp(batch.token_ids, batch.position_ids, batch.visible(), labels=batch.labels)
    return losses, partial(_loss, batch.loss_mask)


def _loss(mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Megatron divides the gradients by the tokens of the whole batch, so the sum is handed over."""
    total = (losses.float() * mask).sum()
    tokens = mask.sum().to(torch.int)
    return total, tokens, {"loss": total.detach(), "tokens": tokens}
