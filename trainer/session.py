"""From a checked config to a finished run: what is there is looked at, refused or planned, then trained and evaluated.

Invariant: everything that can be refused is refused in `prepare`, before a process group or a model exists.
"""

from __future__ import annotations

import io
import json
import os
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from eval_service.contract import names
from eval_service.contract.client import EvalClient
from eval_service.contract.errors import ConfigError
from trainer import cadence
from trainer.architecture import FIELD, Architecture, read_architecture
from trainer.background import Background
from trainer.checkpoint import FIELD as FIELD_SAVES
from trainer.checkpoint import CheckpointStore
from trainer.config import RunConfig, resolved_json
from trainer.data import Dataset, load_dataset
from trainer.debug_data import Batches, Dumping, load_dumped
from trainer.display import Display
from trainer.eval_hook import EvalHook
from trainer.export import Exporter
from trainer.layout import (
    buffer_bytes,
    check_checkpoint_memory,
    check_layout,
    check_memory,
    checkpoint_bytes,
    megabytes,
)
from trainer.loop import Loop, Saver
from trainer.parallel import check_world, launched_rank, parallel_session, world_size
from trainer.saving import CheckpointWriter
from trainer.service_link import ServiceLink, token_of
from trainer.stager import Stager
from trainer.steplog import StepLog
from trainer.stopping import EXIT_CODE, StopFlag
from trainer.training import Training, build_training


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run that can work. `start` is the step resumed from, None for a fresh one; `dataset` None: nothing to train."""

    config: RunConfig
    architecture: Architecture
    dataset: Batches | None
    start: int | None
    points: tuple[cadence.Point, ...]
    buffer_bytes: int
    checkpoint_bytes: int

    @property
    def description(self) -> str:
        """The resolved settings and the plan, for people."""
        begin = "fresh run" if self.start is None else f"resumes from step {self.start}"
        steps = f"{begin}; trains to step {self.config.train.num_steps}"
        buffer = f"export buffer: {megabytes(self.buffer_bytes)} of host memory on each rank"
        if self.buffer_bytes and self.config.eval.buffer == "device":
            buffer += ", and a copy of the weights on its device"
        saves = f"checkpoints: {megabytes(self.checkpoint_bytes)} of host memory on each rank that copies one"
        return f"{resolved_json(self.config)}\n{steps}\n{buffer}\n{saves}\nplan: {cadence.describe(self.points)}"

    @property
    def facts(self) -> dict[str, Any]:
        """What a launch has to know, for JSON."""
        config, parallel = self.config, self.config.parallel
        return {
            "run": config.run.name,
            "root": str(config.run.root),
            "output_dir": str(config.output_dir),
            "tensor": parallel.tensor,
            "pipeline": parallel.pipeline,
            "data": parallel.data or 1,
            "ranks": parallel.ranks,
            "starts_inference_engines": config.fleet.starts_inference_engines,
            "has_engines": config.fleet.has_engines,
            "allow_shared_gpu": config.fleet.allow_shared_gpu,
            "evaluates": config.eval.enabled,
            "url": config.eval.url,
            "suites": list(config.eval.suites),
            "drain_timeout_s": config.eval.drain_timeout_s,
            "on_timeout": config.eval.on_timeout,
            "start": self.start,
            "num_steps": config.train.num_steps,
            "points": [asdict(point) for point in self.points],
            "plan": cadence.describe(self.points),
            "buffer_bytes": self.buffer_bytes,
        }


def prepare(config: RunConfig) -> Prepared:
    """Look at model, data and checkpoints, and make the plan.

    Raises:
        ConfigError: names what can't work.
    """
    check_world(config.parallel)
    if config.train.offload_train and not torch.cuda.is_available():
        raise ConfigError(
            "there is no GPU here, so there is no memory of one to leave to an engine",
            field="train.offload_train",
            hint="set it to false",
        )
    architecture = read_architecture(config.model.hf_path)
    stages = check_layout(config, architecture, world_size())
    buffer = buffer_bytes(config, architecture, stages)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    check_memory(buffer, here)
    store = _store(config)
    start = _start(config, store)
    trains = (start or 0) < config.train.num_steps
    copy = checkpoint_bytes(config, architecture, stages) if trains else 0
    copies = min(here, config.parallel.tensor * config.parallel.pipeline)
    away = copy if config.train.offload_train else 0  # as much waits there, beside the copy
    check_checkpoint_memory(copy, copies, buffer * here + away * copies)
    dataset = _batches(config, architecture, start or 0) if trains else None
    points = cadence.plan(
        start=start or 0,
        num_steps=config.train.num_steps,
        interval=config.eval.interval,
        steps_per_epoch=dataset.steps_per_epoch if dataset else None,
        skip_eval_before_train=config.eval.skip_eval_before_train,
    )
    return Prepared(config, architecture, dataset, start, points, buffer, copy)


def run(prepared: Prepared) -> int:
    """Train and evaluate; returns the exit code."""
    config, start, leads = prepared.config, prepared.start or 0, launched_rank() == 0
    if leads:
        _save_plan(prepared)
    stop = StopFlag()
    with ExitStack() as stack:
        log = StepLog(config.output_dir / ("steps.jsonl" if leads else f"ranks/{launched_rank()}.jsonl"))
        stack.callback(log.close)
        stack.callback(log.write, "teardown")
        log.write("start", start=start, num_steps=config.train.num_steps, resumed=prepared.start is not None)
        display = Display(start, config.train.num_steps) if leads else Display(0, 0, io.StringIO())
        stack.callback(display.close)
        stack.enter_context(stop.installed())
        hook = _hook(config, log, stop, stack) if leads else None
        loop = Loop(config, start, prepared.points, log, display, stop, hook)
        if config.train.num_steps == 0:
            with loop.drained(config.output_dir):
                loop.before_training()
        elif prepared.dataset is not None or prepared.points:
            _run_model(prepared, loop)
    # torchrun ends all ranks as soon as one fails, and the first may still be draining.
    return EXIT_CODE if stop.is_set and leads else 0


def _run_model(prepared: Prepared, loop: Loop) -> None:
    config = prepared.config
    store = _store(config)
    with parallel_session(config.parallel, seed=config.train.seed, threads=config.train.threads) as ranks:
        training = build_training(prepared.architecture, config.model.hf_path, config.train, ranks, config.parallel)
        _resume(prepared, training, store, loop)
        stager = _stager(prepared, training)
        if prepared.dataset is not None:
            _reserve_copies(training)
        writer = CheckpointWriter(store, ranks, loop.log)
        data = prepared.dataset.identity if prepared.dataset is not None else {}
        saver = Saver(config, writer, training, data, stager, loop.log, time.monotonic)
        loop = replace(loop, stager=stager)
        if loop.hook is not None:
            loop.hook.stager, loop.hook.checkpoint = stager, saver.given
        with loop.drained(config.output_dir), writer.settled():
            loop.before_training()
            if prepared.dataset is not None:
                loop.train(training, prepared.dataset, saver)


def _resume(prepared: Prepared, training: Training, store: CheckpointStore, loop: Loop) -> None:
    ranks = training.model.ranks
    starts = ranks.main.gather(prepared.start)
    if len(set(starts)) > 1:
        raise ConfigError(
            f"the ranks see different latest checkpoints: {starts}", field=FIELD_SAVES, hint="put it on shared storage"
        )
    if ranks.leads and (swept := store.sweep()):
        loop.log.write("swept", paths=[str(path) for path in swept])
    if prepared.start is None:
        return
    saved = training.load(prepared.start, store)
    now = prepared.dataset.identity if prepared.dataset is not None else saved
    if saved != now:
        changed = sorted(key for key in saved.keys() | now.keys() if saved.get(key) != now.get(key))
        loop.log.write("data_changed", step=prepared.start, changed=changed)
        loop.display.say(f"the data is another than at step {prepared.start}: {', '.join(changed)}")


def _store(config: RunConfig) -> CheckpointStore:
    return CheckpointStore(config.save_dir, config.run.name, config.train.keep_checkpoints)


def _stager(prepared: Prepared, training: Training) -> Stager:
    config, ranks = prepared.config, training.model.ranks
    section = config.eval
    near = section.buffer == "device"
    weights = Exporter(training.model, config.model.hf_path, with_canary=section.canary, near=near, here=training.here)
    if prepared.buffer_bytes:
        reserve(weights, section.buffer)
    with training.here():  # what is to wait between steps waits from now on
        if ranks.device.type == "cuda" and config.eval.enabled:
            weights.canary()  # its first forward pass loads kernels; no step is to wait for that
    return Stager(weights, ranks.main, Background())


def _reserve_copies(training: Training) -> None:
    try:
        training.reserve()
    except RuntimeError as exc:  # pinned memory, as CUDA has it
        hint = "free host memory, or raise the limit on pinned memory"
        raise ConfigError(f"a checkpoint's copy can't be allocated: {exc}", field=FIELD_SAVES, hint=hint) from exc


def reserve(weights: Exporter, where: str) -> None:
    """Allocate the buffer before the first step.

    Raises:
        ConfigError: its memory can't be had.
    """
    try:
        weights.reserve()
    except RuntimeError as exc:  # pinned memory and the device's, as CUDA has them
        other = "set it to 'host'" if where == "device" else "free host memory, or raise the limit on pinned memory"
        raise ConfigError(f"the export buffer can't be allocated: {exc}", field="eval.buffer", hint=other) from exc


def _hook(config: RunConfig, log: StepLog, stop: StopFlag, stack: ExitStack) -> EvalHook | None:
    if not config.eval.enabled or config.eval.url is None:
        return None
    client = stack.enter_context(EvalClient(config.eval.url, token=token_of(config.eval), sleep=stop.sleep))
    link = ServiceLink(config, client, log)
    link.check()
    return EvalHook(config, link, log)


def _start(config: RunConfig, store: CheckpointStore) -> int | None:
    latest = store.latest() if config.train.num_steps else None
    if latest is not None and not config.train.resume:
        raise ConfigError(
            f"{store.directory} holds a checkpoint of step {latest}, which a fresh run would be mixed up with",
            field="train.save_dir",
            hint="name another directory, or set train.resume = true",
        )
    return latest


def _batches(config: RunConfig, architecture: Architecture, start: int) -> Batches:
    data, train = config.data, config.train
    if data.load_debug_data is not None:
        return load_dumped(
            data.load_debug_data,
            start + 1,
            train.num_steps,
            global_batch_size=train.global_batch_size,
            vocab_size=architecture.vocab_size,
        )
    dataset = _dataset(config, architecture)
    if data.save_debug_data is not None and launched_rank() == 0:
        return Dumping(dataset, data.save_debug_data)
    return dataset


def _dataset(config: RunConfig, architecture: Architecture) -> Dataset:
    dataset = load_dataset(
        config.data.train,
        _tokenizer(config),
        max_length=config.data.max_length,
        seed=config.train.seed,
        global_batch_size=config.train.global_batch_size,
        packing=config.data.packing,
    )
    highest = max(max(example.token_ids) for example in dataset.examples)
    if highest >= architecture.vocab_size:
        raise ConfigError(
            f"the tokenizer makes token id {highest}; the model's vocabulary ends before {architecture.vocab_size}",
            field=FIELD,
            hint="save the tokenizer that belongs to the model",
        )
    return dataset


def _tokenizer(config: RunConfig) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(config.model.hf_path, local_files_only=True)
    except (OSError, ValueError) as exc:
        raise ConfigError(f"no tokenizer can be loaded: {exc}", field=FIELD, hint="save one beside the model") from exc
    if not tokenizer.is_fast or not tokenizer.chat_template:
        raise ConfigError(
            "the tokenizer has no chat template or no tokenizer.json",
            field=FIELD,
            hint="give it both, and save it again",
        )
    return tokenizer


def _save_plan(prepared: Prepared) -> None:
    config = prepared.config
    try:
        config.output_dir.mkdir(parents=True, exist_ok=True)
        names.run_dir(config.run.root, config.run.name).mkdir(parents=True, exist_ok=True)
        (config.output_dir / "config.json").write_text(resolved_json(config))
        plan = {"start": prepared.start, "points": [asdict(point) for point in prepared.points]}
        (config.output_dir / "plan.json").write_text(json.dumps(plan, indent=1))
    except OSError as exc:
        raise ConfigError(f"{exc.filename} can't be written: {exc.strerror}", field="run.output_dir") from exc
