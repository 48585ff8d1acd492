"""A torch model with `save_pretrained` as what the eval hook exports: state, config, tokenizer.

Invariants: which tensors are one is told by their identity in memory, never by name, and config.json says the same;
every float tensor is exported in one dtype, which config.json names; a model that this process holds only a part of is
refused at the start.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eval_service.contract.canary import canary_token_ids
from eval_service.contract.errors import ConfigError, SnapshotFault
from eval_service.contract.manifest import Canary
from eval_service.contract.safetensors_io import TensorData
from eval_service.contract.snapshot import SnapshotWriter, is_of_model
from trainer.buffer import HostBuffer
from trainer.integrations.settings import HINT
from trainer.layout import free_memory_bytes, megabytes
from trainer.weights import ExportFailed, canary_of

MAX_FILE_BYTES = 2 << 30
DTYPES = {torch.float32: ("float32", "F32"), torch.bfloat16: ("bfloat16", "BF16"), torch.float16: ("float16", "F16")}
_SHARDED = frozenset({"DTensor", "FlatParameter"})  # FSDP's; DeepSpeed's have a `ds_id`
_WEIGHTS = (".safetensors", ".safetensors.index.json")


class ModelWeights:
    """The weights of a model that rank 0 holds whole.

    Args:
        model: a Hugging Face model, or one like it: `config`, `save_pretrained`, logits from token ids.
        tokenizer: anything with `save_pretrained`; None: the snapshot has none, and is refused by the service.
        dtype: of the export; None: that of the parameters.

    Raises:
        ConfigError: the model can't be exported from here.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        *,
        with_canary: bool = True,
        near: bool = False,
        dtype: torch.dtype | None = None,
        max_file_bytes: int = MAX_FILE_BYTES,
    ) -> None:
        self._model = unwrapped(model)
        _check(self._model)
        self._with_canary = with_canary
        self._max_file_bytes = max_file_bytes
        tensors = distinct_tensors(self._model)
        self._dtype = dtype or _common_dtype(tensors.values())
        _check_memory(sum(tensor.numel() for tensor in tensors.values()) * self._dtype.itemsize)
        self.buffer = HostBuffer(tensors, self._dtype, near=near)
        self._texts = _texts(self._model, tokenizer, DTYPES[self._dtype][0])

    def here(self) -> AbstractContextManager[None]:
        """As `Weights.here`: the host has them where they are."""
        return nullcontext()

    def stage(self) -> None:
        """As `Weights.stage`."""
        self.buffer.copy(distinct_tensors(self._model))

    def canary(self) -> Canary | None:
        """As `Weights.canary`; None too for a model whose forward pass can't be asked for log-probs."""
        if not self._with_canary:
            return None
        ids = canary_token_ids(int(self._model.config.vocab_size))
        try:
            logprobs = _logprobs(self._model, torch.tensor(ids), self._dtype)
        except (AttributeError, TypeError, RuntimeError):  # the engines must then agree among themselves
            return None
        return canary_of(DTYPES[self._dtype][0], ids, logprobs.tolist())

    def fill(self, writer: SnapshotWriter) -> None:
        """As `Weights.fill`."""
        try:
            writer.partial.mkdir(parents=True, exist_ok=True)
            writer.expect(self.buffer.views)
            self.buffer.settle()
            for name, part in self._files():
                writer.add_weights(name, [self._data(key) for key in part])
            for name, data in self._texts.items():
                writer.add_bytes(name, data)
        except (OSError, SnapshotFault, RuntimeError) as exc:  # RuntimeError: as CUDA has it
            raise ExportFailed(f"{type(exc).__name__}: {exc}") from exc

    def _files(self) -> Iterator[tuple[str, list[str]]]:
        groups: list[list[str]] = []
        held = 0
        for name, view in self.buffer.views.items():
            if not groups or held + view.nbytes > self._max_file_bytes:
                groups.append([])
                held = 0
            groups[-1].append(name)
            held += view.nbytes
        for number, group in enumerate(groups, start=1):
            one = len(groups) == 1
            yield "model.safetensors" if one else f"model-{number:05d}-of-{len(groups):05d}.safetensors", group

    def _data(self, name: str) -> TensorData:
        view = self.buffer.views[name]
        return TensorData(name, DTYPES[self._dtype][1], tuple(view.shape), partial(_finite_bytes, name, view))


def unwrapped(model: nn.Module) -> Any:
    """The model inside of DistributedDataParallel and torch.compile."""
    while True:
        inner = getattr(model, "_orig_mod", None) or (
            model.module if isinstance(model, nn.parallel.DistributedDataParallel) else None
        )
        if inner is None:
            return model
        model = inner


def distinct_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and persistent buffer once, under the first name that it has."""
    persistent = model.state_dict(keep_vars=True)
    found: dict[str, Tensor] = {}
    seen: set[tuple[Any, ...]] = set()
    for name, tensor in persistent.items():
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride()) if tensor.numel() else (id(tensor),)
        if isinstance(tensor, Tensor) and key not in seen and tensor.is_floating_point():
            seen.add(key)
            found[name] = tensor.detach()
    return found


def tied(model: Any) -> bool | None:
    """Whether the output layer is the embedding itself; None where the model has no such layers to ask for."""
    try:
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    if embedding is None or head is None:
        return None
    return bool(head.weight is embedding.weight or head.weight.data_ptr() == embedding.weight.data_ptr())


def _check(model: Any) -> None:
    for needed in ("config", "save_pretrained"):
        if not hasattr(model, needed):
            raise ConfigError(
                f"{type(model).__name__} has no {needed}: it can't be exported as a Hugging Face directory",
                field="model",
                hint=f"name the Hugging Face model inside of it; {HINT}",
            )
    if hasattr(model, "peft_config"):
        raise ConfigError(
            "adapters can't be exported: the engines load whole models",
            field="model",
            hint="merge them into checkpoints and point `evalfleet watch` at those",
        )
    for name, parameter in model.named_parameters():
        if (
            type(parameter).__name__ in _SHARDED
            or type(parameter.data).__name__ in _SHARDED
            or hasattr(parameter, "ds_id")
        ):
            raise ConfigError(
                f"{name} is cut over the ranks (FSDP, ZeRO-3, tensor parallelism): no rank holds it whole",
                field="model",
                hint="let the trainer save whole checkpoints, and point `evalfleet watch` at them",
            )


def _check_memory(needed_bytes: int) -> None:
    print(f"evalfleet: export buffer: {megabytes(needed_bytes)} of host memory", flush=True)
    free = free_memory_bytes()
    if free is not None and needed_bytes > free:
        raise ConfigError(
            f"the export buffer needs {megabytes(needed_bytes)} of host memory; {megabytes(free)} are free",
            field="model",
            hint="free memory, or let the trainer save checkpoints and point `evalfleet watch` at them",
        )


def _common_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    dtypes = [tensor.dtype for tensor in tensors]
    if not dtypes:
        raise ConfigError("the model has no weights", field="model", hint=HINT)
    common = max(set(dtypes), key=dtypes.count)
    if common not in DTYPES:
        raise ConfigError(f"weights of {common} can't be exported", field="dtype", hint="float32, bfloat16 or float16")
    return common


def _texts(model: Any, tokenizer: Any, dtype: str) -> dict[str, bytes]:
    """Config, generation config and tokenizer as they are saved: once, since training changes none of them."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = dtype
    if (is_tied := tied(model)) is not None:
        config.tie_word_embeddings = is_tied
    with tempfile.TemporaryDirectory(prefix="evalfleet-") as scratch:
        place = Path(scratch)
        try:
            config.save_pretrained(place)
            if getattr(model, "generation_config", None) is not None:
                model.generation_config.save_pretrained(place)
            if tokenizer is not None:
                tokenizer.save_pretrained(place)
        except (OSError, ValueError, AttributeError) as exc:
            raise ConfigError(f"config or tokenizer can't be saved: {exc}", field="model", hint=HINT) from exc
        return {path.name: path.read_bytes() for path in sorted(place.iterdir()) if _kept(path)}


def _kept(path: Path) -> bool:
    return path.is_file() and is_of_model(path.name) and not path.name.endswith(_WEIGHTS)


@torch.no_grad()
def _logprobs(model: Any, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Log-probs of each row's next tokens, computed as an engine of the exported dtype would: no dropout, no autocast
    of the host's, but one of ours where parameters are kept in another dtype."""
    device = next(model.parameters()).device
    ids = ids.to(device)
    casts = dtype is not torch.float32 and any(parameter.dtype is not dtype for parameter in model.parameters())
    with _evaluating(model), torch.autocast(device.type, dtype if casts else None, enabled=casts):
        # The class's own forward: hosts wrap the instance's (autocast, a cast of the logits).
        logits = type(model).forward(model, input_ids=ids, use_cache=False).logits
    scores = logits[:, :-1].float().log_softmax(-1)
    return scores.gather(-1, ids[:, 1:, None])[..., 0].cpu()


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """In eval mode, and each module as it was afterwards; no random number is drawn."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _finite_bytes(name: str, view: Tensor) -> memoryview:
    if not bool(torch.isfinite(view).all()):
        raise SnapshotFault(f"{name} holds values that are not finite", field=name, hint="has the training diverged?")
    return memoryview(view.contiguous().view(-1).view(torch.uint8).numpy().data)


def weights_of(model: nn.Module, tokenizer: Any = None, **settings: Any) -> Callable[[bool], ModelWeights]:
    """What `Evaluations.start` takes; `settings` go to `ModelWeights`."""
    return lambda canary: ModelWeights(model, tokenizer, with_canary=canary, **settings)
