"""Two long-lived ranks on gloo: a case goes to both as a JSON line, each answers with what it found.

The process group is made anew for each case, so one pair of processes serves every layout.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from eval_service.ports import free_port

TIMEOUT_S = 240.0  # the first case waits for the imports


@dataclass(frozen=True, slots=True)
class Case:
    """Train `steps`, save, publish; `distributed`: with the optimizer of GPUs. `env` is set on rank 1 alone."""

    hf_path: str
    data: str
    root: str
    parallel: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    steps: int = 3
    max_file_bytes: int = 2 << 30
    save_dir: str | None = None
    resume_at: int = 0
    keep_checkpoints: int | None = None
    packing: bool = False
    distributed: bool = False
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Found:
    """What a rank saw. `published` is None where the export failed, and `fault` says why."""

    losses: list[tuple[float, float, int]]
    published: str | None
    fault: str | None
    buffer_bytes: int
    save_fault: str | None = None


class RankPair:
    """The handle that tests hold."""

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        self._processes = processes

    def run(self, case: Case) -> list[Found]:
        """What each rank found, by rank."""
        port = str(free_port("127.0.0.1"))
        for rank, process in enumerate(self._processes):
            env = {"MASTER_PORT": port, **(case.env if rank else {})}
            assert process.stdin is not None
            process.stdin.write(json.dumps({"case": asdict(case), "env": env}) + "\n")
            process.stdin.flush()
        end = threading.Timer(TIMEOUT_S, self._kill)
        end.start()
        try:
            return [self._answer(process) for process in self._processes]
        finally:
            end.cancel()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()

    @staticmethod
    def _answer(process: subprocess.Popen[str]) -> Found:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "a rank ended"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return Found(**answer)


@contextmanager
def rank_pair(cwd: Path) -> Iterator[RankPair]:
    """Start two, and end them."""
    processes = []
    for rank in range(2):
        env = {**os.environ, "PYTHONPATH": str(cwd), "OMP_NUM_THREADS": "1", "RANK": str(rank), "WORLD_SIZE": "2"}
        env |= {"MASTER_ADDR": "127.0.0.1", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
        command = [sys.executable, "-m", "tests.support.rank_pair"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        processes.append(subprocess.Popen(command, cwd=cwd, env=env, text=True, **pipes))  # type: ignore[call-overload]
    try:
        yield RankPair(processes)
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def run_case(case: Case) -> Found:
    """One rank's part of a case."""
    from transformers import AutoTokenizer

    from tests.support.distributed_on_cpu import distributed_on_cpu
    from trainer.architecture import read_architecture
    from trainer.background import Background
    from trainer.checkpoint import CheckpointStore
    from trainer.config import ParallelSection, TrainSection
    from trainer.data import load_dataset
    from trainer.export import Exporter
    from trainer.parallel import parallel_session
    from trainer.saving import CheckpointWriter
    from trainer.stager import Stager
    from trainer.training import build_training

    hf_path = Path(case.hf_path)
    parallel = ParallelSection(**case.parallel)
    settings = {"num_steps": 10, "lr": 1e-3, "global_batch_size": 8, "micro_batch_size": 2, "clip_grad": 0.1}
    section = TrainSection(**{**settings, **case.train})
    tokenizer = AutoTokenizer.from_pretrained(hf_path)
    dataset = load_dataset(Path(case.data), tokenizer, max_length=64, seed=0, global_batch_size=8, packing=case.packing)
    optimizer = distributed_on_cpu() if case.distributed else nullcontext()
    with parallel_session(parallel, seed=0, threads=1) as ranks, optimizer:
        training = build_training(read_architecture(hf_path), hf_path, section, ranks, parallel)
        writer = CheckpointWriter(CheckpointStore(Path(case.save_dir or ""), "run", case.keep_checkpoints), ranks)
        if case.resume_at:
            training.load(case.resume_at, writer.store)
        results = []
        for step in range(case.resume_at + 1, case.resume_at + case.steps + 1):
            results.append(training.step(step, dataset))
            if case.save_dir and not case.resume_at:
                writer.save(step, partial(training.state, step, dataset.identity))  # behind the next step
        writer.settle()
        exporter = Exporter(training.model, hf_path, max_file_bytes=case.max_file_bytes)
        stager = Stager(exporter, ranks.main, Background())
        published, fault = _publish(stager, Path(case.root), case.resume_at + case.steps)
        ranks.main.gather(None)
        losses = [(result.loss, result.grad_norm, result.tokens) for result in results]
        return Found(losses, published, fault, exporter.buffer.size_bytes, writer.fault)


def _publish(stager: Any, root: Path, step: int) -> tuple[str | None, str | None]:
    from trainer.weights import ExportFailed

    published = fault = None
    with stager.led():
        if stager.channel.rank == 0:
            try:
                published = str(stager.publish_now(root, "run", step).path)
            except ExportFailed as exc:
                fault = str(exc)
    assert stager.background.join(60.0)
    return published, fault


def _serve() -> None:
    # What libraries print must not be taken for an answer.
    answers, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr
    os.dup2(2, 1)
    for line in sys.stdin:
        order = json.loads(line)
        before = dict(os.environ)
        os.environ.update(order["env"])
        try:
            answer = asdict(run_case(Case(**order["case"])))
        except Exception:  # noqa: BLE001 - the edge: the test is told
            answer = {"error": traceback.format_exc()}
        os.environ.clear()
        os.environ.update(before)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
