"""A Hugging Face snapshot of the weights, out of a host buffer, by all ranks together, with its canary.

Invariants: the weights are written in the base model's own dtype and its other files are copied as they are, so an
export of an untouched import has the import's tensors bit by bit, and the same digest each time and under each layout
of ranks. No rank holds more than its own part and one tensor. A rank that fails goes on to take part, so that no other
waits for it; then all agree that the export failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor

from eval_service.contract.canary import canary_token_ids
from eval_service.contract.errors import SnapshotFault
from eval_service.contract.manifest import Canary
from eval_service.contract.safetensors_io import TensorData
from eval_service.contract.snapshot import SnapshotWriter
from trainer import conversion
from trainer.architecture import Architecture
from trainer.buffer import HostBuffer
from trainer.conversion import Rule
from trainer.crash import crash_point
from trainer.model import Model
from trainer.weights import ExportFailed, canary_of

# What a model directory may hold beside its weights; anything else is somebody's note.
MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)
MAX_FILE_BYTES = 2 << 30
_CHECKED_AT_ONCE = 1 << 20
_DTYPES = {"float32": (torch.float32, "F32"), "bfloat16": (torch.bfloat16, "BF16"), "float16": (torch.float16, "F16")}


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """One safetensors file: its rules, in order, and the rank that writes it."""

    name: str
    rules: tuple[Rule, ...]
    writer: int


@dataclass(frozen=True, slots=True)
class Slice:
    """Who holds a tensor-parallel slice, and its shape."""

    rank: int
    tensor_rank: int
    shape: tuple[int, ...]


class Exporter:
    """Writes what the model holds; the files beside the weights come from the base model's directory."""

    def __init__(
        self,
        model: Model,
        hf_path: Path,
        *,
        with_canary: bool = True,
        near: bool = False,
        here: Callable[[], AbstractContextManager[None]] = nullcontext,
        max_file_bytes: int = MAX_FILE_BYTES,
    ) -> None:
        self.here = here
        self._model = model
        self._hf_path = hf_path
        self._with_canary = with_canary
        self._channel = model.ranks.export
        self._dtype, self._label = _DTYPES[model.architecture.dtype]
        self._slices = self._who_holds_what()
        writers = sorted({held.rank for slices in self._slices.values() for held in slices})
        self._plan = plan_files(model.architecture, max_file_bytes, writers)
        self._near = near

    @cached_property
    def buffer(self) -> HostBuffer:
        """Allocated when it is first asked for: where nothing is exported, nothing is held."""
        return HostBuffer(self._model.owned(), self._dtype, near=self._near)

    def reserve(self) -> int:
        """Allocate the buffer, so that no step pays for that; returns its bytes of host memory.

        Raises:
            RuntimeError: there is no such memory, as CUDA has it.
        """
        return self.buffer.size_bytes

    def stage(self) -> None:
        """As `Weights.stage`."""
        self.buffer.copy(self._model.owned())

    def canary(self) -> Canary | None:
        """As `Weights.canary`."""
        if not self._with_canary:
            return None
        ids = canary_token_ids(self._model.architecture.vocab_size)
        logprobs = self._model.logprobs(torch.tensor(ids))
        return canary_of(self._model.dtype, ids, logprobs.tolist())

    def fill(self, writer: SnapshotWriter) -> None:
        """As `Weights.fill`."""
        fault = self._write_part(writer)
        reports = self._channel.gather((fault, writer.files, writer.tensors))
        faults = [(rank, found) for rank, (found, _, _) in enumerate(reports) if found]
        if faults:
            where = f"rank {faults[0][0]}: " if self._channel.world > 1 else ""
            raise ExportFailed(f"{where}{faults[0][1]}")
        if self._channel.rank == 0:
            for _, files, tensors in reports[1:]:
                writer.absorb(files, tensors)
            self._add_model_files(writer)

    def _add_model_files(self, writer: SnapshotWriter) -> None:
        writer.expect(name for rule in conversion.rules_of(self._model.architecture) for name in rule.hf)
        try:
            for source in (self._hf_path / name for name in MODEL_FILES):
                if source.is_file():
                    writer.add_file(source)
        except OSError as exc:
            raise ExportFailed(_told(exc)) from exc

    def _write_part(self, writer: SnapshotWriter) -> str | None:
        """Write this rank's files and send its slices to the others' writers; what went wrong, or None."""
        fault: str | None = None
        try:
            self.buffer.settle()
            writer.partial.mkdir(parents=True, exist_ok=True)
            crash_point("in_export", writer.step)
        except (OSError, RuntimeError) as exc:  # RuntimeError: as CUDA has it
            fault = _told(exc)
        for file in self._plan:
            if file.writer != self._channel.rank:
                self._send(file)
                continue
            stream = _FileStream(self, file.rules)
            try:
                if fault is None:
                    writer.add_weights(f"{file.name}.safetensors", list(stream.tensors()))
                    crash_point("in_shard", writer.step)
                    stream.check()
            except (OSError, SnapshotFault, RuntimeError, MemoryError) as exc:  # RuntimeError: torch's
                fault = _told(exc)
            stream.discard()
        return fault

    def _send(self, file: PlannedFile) -> None:
        for rule in file.rules:
            if any(held.rank == self._channel.rank for held in self._slices[rule.megatron]):
                self._channel.send(self.buffer.views[rule.megatron], file.writer)

    def collect(self, rule: Rule) -> list[tuple[str, Tensor]]:
        """The Hugging Face tensors of a rule, from all ranks that hold a slice of it."""
        slices = [self._slice(rule, held) for held in self._slices[rule.megatron]]
        parts = rule.split(conversion.assemble(slices, rule), self._model.architecture)
        return list(zip(rule.hf, parts, strict=True))

    def data_of(self, name: str, shape: tuple[int, ...], data: object) -> TensorData:
        """A tensor for the writer, in the export's dtype."""
        return TensorData(name, self._label, shape, data)

    def shapes(self, rule: Rule) -> list[tuple[str, tuple[int, ...]]]:
        """(name, shape) of a rule's Hugging Face tensors."""
        return conversion.hf_shapes(rule, self._model.architecture)

    def _slice(self, rule: Rule, held: Slice) -> Tensor:
        if held.rank == self._channel.rank:
            return self.buffer.views[rule.megatron]
        return self._channel.receive(torch.empty(held.shape, dtype=self._dtype), held.rank)

    def _who_holds_what(self) -> dict[str, list[Slice]]:
        place = self._model.place
        mine = {name: (place.tensor, tuple(tensor.shape)) for name, tensor in self._model.owned().items()}
        found: dict[str, list[Slice]] = {}
        for rank, theirs in enumerate(self._model.ranks.main.gather(mine)):
            for name, (tensor_rank, shape) in theirs.items():
                found.setdefault(name, []).append(Slice(rank, tensor_rank, shape))
        cut = {rule.megatron: rule.dim is not None for rule in conversion.rules_of(self._model.architecture)}
        ordered = {name: sorted(slices, key=lambda held: held.tensor_rank) for name, slices in found.items()}
        return {name: slices if cut[name] else slices[:1] for name, slices in ordered.items()}


class _FileStream:
    """The tensors of one file, made one after another as they are written."""

    def __init__(self, exporter: Exporter, rules: Sequence[Rule]) -> None:
        self._exporter = exporter
        self._rules = rules
        self._taken = 0
        self._parts: dict[str, Tensor] = {}
        self._checking: tuple[str, Future[bool]] | None = None
        self._checker = ThreadPoolExecutor(1)

    def tensors(self) -> Iterator[TensorData]:
        """What the writer is to write; the bytes are made when it asks for them."""
        for rule in self._rules:
            for name, shape in self._exporter.shapes(rule):
                yield self._exporter.data_of(name, shape, partial(self._bytes, name))

    def discard(self) -> None:
        """Take what was not written: other ranks send it in any case."""
        self._checker.shutdown()
        while self._taken < len(self._rules):
            self._take()

    def check(self) -> None:
        """Refuse values that are not finite, in the last tensor that was asked for.

        Raises:
            SnapshotFault: names the tensor.
        """
        if self._checking is not None and not self._checking[1].result():
            name = self._checking[0]
            raise SnapshotFault(f"{name} holds values that are not finite", field=name)

    def _take(self) -> None:
        self._parts = dict(self._exporter.collect(self._rules[self._taken]))
        self._taken += 1

    def _bytes(self, name: str) -> memoryview:
        if name not in self._parts:
            self._take()
        self.check()
        tensor = self._parts.pop(name).contiguous()
        self._checking = name, self._checker.submit(all_finite, tensor)  # while it is written
        return memoryview(tensor.view(-1).view(torch.uint8).numpy().data)


def plan_files(architecture: Architecture, limit_bytes: int, writers: Sequence[int]) -> list[PlannedFile]:
    """Cut the model into files of at most `limit_bytes` (but for one huge tensor), the writers taking turns."""
    item_bytes = _DTYPES[architecture.dtype][0].itemsize
    groups: list[list[Rule]] = []
    held = 0
    for rule in conversion.rules_of(architecture):
        size = item_bytes * torch.Size(conversion.shape_of(rule, architecture)).numel()
        if not groups or held + size > limit_bytes:
            groups.append([])
            held = 0
        groups[-1].append(rule)
        held += size
    count = len(groups)
    names = ["model"] if count == 1 else [f"model-{n:05d}-of-{count:05d}" for n in range(1, count + 1)]
    return [
        PlannedFile(name, tuple(rules), writers[n % len(writers)])
        for n, (name, rules) in enumerate(zip(names, groups, strict=True))
    ]


def all_finite(tensor: Tensor) -> bool:
    """Whether no value is infinite or not a number: by the sum, which is quick, and one by one where it overflows."""
    parts = torch.split(tensor.view(-1), _CHECKED_AT_ONCE)  # torch makes a float32 copy of what it sums
    return all(
        bool(torch.isfinite(part.sum(dtype=torch.float32))) or bool(torch.isfinite(part).all()) for part in parts
    )


def _told(exc: Exception) -> str:
    return f"{type(exc).__name__}: {exc}"
