"""What an export costs: the copy that a step waits for, the canary, and the way from the copy to a published snapshot.

    python benchmarks/export.py [--quick] [--json] [--disk DIR] [--rounds N] [--snapshots DIR]

One process, one disk, rounds interleaved: ours, a bare copy of as many bytes into the same kind of buffer,
transformers' `save_pretrained`, `torch.distributed.checkpoint` asynchronously, and a raw write with fsync. On a GPU
where there is one (the model in bfloat16, and some training steps with and without an export behind them), on the CPU
otherwise. `--quick` takes a small model. `--snapshots` leaves two snapshots there, one training step apart.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from eval_service.contract.snapshot import SnapshotWriter
from trainer.architecture import read_architecture
from trainer.background import Background
from trainer.buffer import HostBuffer
from trainer.config import ParallelSection, TrainSection
from trainer.data import Dataset, Example
from trainer.export import Exporter
from trainer.mcore import quiet
from trainer.parallel import Ranks, parallel_session
from trainer.stager import Stager
from trainer.training import Training, build_training

SHAPES = {
    "qwen3-0.6b": {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "small": {
        "vocab_size": 8192,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
    },
}


@dataclass(frozen=True)
class Bench:
    """What everything is measured on."""

    hf_path: Path
    disk: Path
    training: Training
    exporter: Exporter
    stager: Stager
    ranks: Ranks
    rounds: int

    def sync(self) -> None:
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize()

    def timed(self, call: Callable[[], Any]) -> float:
        self.sync()
        began = time.perf_counter()
        call()
        self.sync()
        return time.perf_counter() - began

    def params(self) -> dict[str, torch.Tensor]:
        return {name: param.detach() for name, param in self.training.model.parameters().items()}


def build_model(directory: Path, shape: str) -> Path:
    """A bfloat16 model of a shape, with random weights and the demo's tokenizer."""
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    from eval_service.demo.tiny import build_tokenizer

    tokenizer = build_tokenizer()
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen3Config(
        **SHAPES[shape], max_position_embeddings=4096, tie_word_embeddings=True, dtype="bfloat16", **ids
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.generation_config = GenerationConfig(**ids, do_sample=False)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory, save_jinja_files=False)
    return directory


@contextmanager
def bench(args: argparse.Namespace, directory: Path) -> Iterator[Bench]:
    """Everything built, and the buffer allocated."""
    shape = "small" if args.quick else "qwen3-0.6b"
    hf_path = Path(args.model) if args.model else build_model(directory / "hf", shape)
    with parallel_session(ParallelSection(), seed=0, threads=None) as ranks:
        on_gpu = ranks.device.type == "cuda"
        section = TrainSection(
            num_steps=1000, lr=1e-4, schedule="constant", micro_batch_size=8, global_batch_size=8, dtype="bfloat16"
        )
        architecture = read_architecture(hf_path)
        training = build_training(architecture, hf_path, section, ranks)
        exporter = Exporter(training.model, hf_path, near=args.buffer == "device")
        stager = Stager(exporter, ranks.main, Background())
        rounds = args.rounds or (5 if on_gpu else 3)
        yield Bench(hf_path, directory, training, exporter, stager, ranks, rounds)


def measure_copy(b: Bench) -> dict[str, Any]:
    """The step's wait against one flat copy of as many bytes into a buffer of the same kind."""
    size = b.exporter.buffer.flat.numel()
    source = torch.empty(size, dtype=b.exporter.buffer.flat.dtype, device=b.ranks.device).fill_(0.5)
    target = torch.empty(size, dtype=source.dtype, pin_memory=source.is_cuda).zero_()
    bare, ours = [], []
    for number in range(2 * b.rounds + 1):
        bare.append(b.timed(lambda: target.copy_(source, non_blocking=True)))
        ours.append(_stall(b, number))
    clone = [b.timed(source.clone) for _ in range(3)]
    near = HostBuffer(b.training.model.owned(), source.dtype, near=True)
    copies = [b.timed(lambda: near.copy(b.training.model.owned())) for _ in range(2 * b.rounds + 1)][1:]
    figures: dict[str, Any] = {
        "bytes": b.exporter.buffer.size_bytes,
        "device_buffer_copy_s": statistics.median(copies),
        "bare_copy_s": statistics.median(bare[1:]),
        "stall_s": statistics.median(ours[1:]),
        "clone_on_device_s": statistics.median(clone) if source.is_cuda else None,
    }
    return figures | {"stall_to_bare": figures["stall_s"] / figures["bare_copy_s"]}


def _stall(b: Bench, step: int) -> float:
    """What the training thread waits for an export whose canary is timed apart."""
    writer = SnapshotWriter(b.disk / "none", "bench", step, "bench")
    b.sync()
    began = time.perf_counter()
    staged = b.stager.stage(writer, 60.0)
    wall = time.perf_counter() - began
    assert staged is not None
    b.stager.background.release()  # nothing is written in this measurement
    return wall - staged.canary_s


def measure_canary(b: Bench) -> dict[str, Any]:
    """The canary against one bare forward pass of its tokens."""
    from eval_service.contract.canary import canary_token_ids

    model = b.training.model
    ids = torch.tensor(canary_token_ids(model.architecture.vocab_size)).to(b.ranks.device)
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)

    def forward() -> None:
        with torch.no_grad(), quiet():
            model.gpt(ids, positions, None, labels=ids)

    pairs = [(b.timed(forward), b.timed(b.exporter.canary)) for _ in range(2 * b.rounds + 1)][1:]
    forward_s, canary_s = (statistics.median(column) for column in zip(*pairs, strict=True))
    return {"forward_s": forward_s, "canary_s": canary_s, "canary_to_forward": canary_s / forward_s}


def measure_publish(b: Bench) -> dict[str, Any]:
    """From the end of the copy to a published snapshot, against a raw write of the bytes with fsync."""
    ours, raw, peaks = [], [], []
    b.exporter.stage()
    b.exporter.buffer.settle()
    canary = b.exporter.canary()
    for number in range(b.rounds):
        raw.append(_raw_write(b))
        os.sync()
        with _peak_memory() as peak:
            began = time.perf_counter()
            with SnapshotWriter(b.disk / "root", "bench", number, "bench") as writer:
                b.exporter.fill(writer)
                published = writer.publish(canary=canary, dispatch=())
            ours.append(time.perf_counter() - began)
        peaks.append(peak())
        size = sum(path.stat().st_size for path in published.path.iterdir())
        shutil.rmtree(published.path)
        os.sync()
    largest = max(entry.size_bytes for entry in published.manifest.files)
    figures: dict[str, Any] = {
        "publish_s": statistics.median(ours),
        "raw_write_fsync_s": statistics.median(raw),
        "publish_mb_per_s": size / statistics.median(ours) / 1e6,
        "raw_mb_per_s": size / statistics.median(raw) / 1e6,
        "publish_all_s": ours,
        "raw_all_s": raw,
        "peak_extra_bytes_beside_the_buffer": max(peaks),
        "largest_file_bytes": largest,
    }
    return figures | {"publish_to_raw": figures["publish_s"] / figures["raw_write_fsync_s"]}


def _raw_write(b: Bench) -> float:
    data = b.exporter.buffer.flat.view(torch.uint8).numpy().data
    path = b.disk / "raw.bin"
    began = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for at in range(0, data.nbytes, 16 << 20):
            file.write(data[at : at + (16 << 20)])
        os.fsync(file.fileno())
    taken = time.perf_counter() - began
    path.unlink()
    return taken


@contextmanager
def _peak_memory() -> Iterator[Callable[[], int]]:
    """Anonymous memory above what it was, sampled; page cache does not count."""
    done, seen = threading.Event(), [_anonymous_bytes()]

    def look() -> None:
        while not done.wait(0.005):
            seen.append(_anonymous_bytes())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield lambda: max(seen) - seen[0]
    finally:
        done.set()
        thread.join()


def _anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def measure_save_pretrained(b: Bench) -> dict[str, Any]:
    """transformers' own way, of the same weights on the same device, all of it in the step's way."""
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(b.hf_path, dtype=torch.bfloat16).to(b.ranks.device)
    times = []
    for _ in range(max(2, b.rounds - 1)):
        times.append(b.timed(lambda: model.save_pretrained(b.disk / "saved")))
        shutil.rmtree(b.disk / "saved")
        os.sync()
    return {"save_pretrained_s": statistics.median(times), "save_pretrained_all_s": times}


def measure_dcp(b: Bench) -> dict[str, Any]:
    """torch.distributed.checkpoint, asynchronously: what the step waits for, and all of it."""
    from torch.distributed.checkpoint.state_dict_saver import async_save

    blocked, total = [], []
    group = torch.distributed.new_group(backend="gloo")
    for number in range(3):
        began = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            saved = str(b.disk / f"dcp{number}")
            future: Any = async_save(b.params(), checkpoint_id=saved, process_group=group)
        blocked.append(time.perf_counter() - began)
        future.result()
        total.append(time.perf_counter() - began)
        shutil.rmtree(b.disk / f"dcp{number}")
    return {"dcp_async_blocked_s": statistics.median(blocked), "dcp_async_total_s": statistics.median(total)}


def _dataset(b: Bench, length: int) -> Dataset:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 256, (64, length + 1), generator=generator).tolist()
    return Dataset([Example(tuple(row), (True,) * len(row)) for row in rows], 0, b.training.config.global_batch_size)


def measure_steps(b: Bench, snapshots: Path | None) -> dict[str, Any]:
    """Training steps without an export and with one behind them; the last two steps are published."""
    dataset = _dataset(b, 512 if b.ranks.device.type == "cuda" else 32)
    plain = [b.timed(partial(b.training.step, step, dataset)) for step in range(1, 7)][2:]
    behind, taken = [], []
    for step in (7, 8):
        root = snapshots or b.disk / "root"
        began = time.perf_counter()
        writer = SnapshotWriter(root, "bench", step - 1, "bench")
        staged = b.stager.stage(writer, 600.0)
        assert staged is not None
        taken.append(time.perf_counter() - began - staged.canary_s)
        b.stager.submit(partial(_publish, b, writer, staged.canary))
        behind.append(b.timed(partial(b.training.step, step, dataset)))
    b.stager.background.join(60.0)
    figures: dict[str, Any] = {
        "step_s": statistics.median(plain),
        "step_with_an_export_behind_s": statistics.median(behind),
        "stall_in_training_s": taken,
    }
    if b.ranks.device.type == "cuda":
        figures["peak_device_bytes"] = torch.cuda.max_memory_allocated()
    return figures


def _publish(b: Bench, writer: SnapshotWriter, canary: Any) -> None:
    with writer:
        b.exporter.fill(writer)
        writer.publish(canary=canary, dispatch=())


def environment(b: Bench) -> dict[str, Any]:
    """Where this was measured."""
    from importlib import metadata

    def version(name: str) -> str | None:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if b.ranks.device.type == "cuda" else "cpu",
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "megatron-core", "transformers", "safetensors")},
        "model": b.exporter._model.architecture.name,
        "disk": str(b.disk),
    }


def targets(found: dict[str, Any], on_gpu: bool) -> dict[str, dict[str, Any]]:
    """What is to be reached, and what was."""
    limits: list[tuple[str, float | None, float]] = [
        ("stall_to_bare", found.get("stall_to_bare"), 1.15),
        ("canary_to_forward", found.get("canary_to_forward"), 1.5),
        ("publish_to_raw", found.get("publish_to_raw"), 1.25),
    ]
    peak, largest = found.get("peak_extra_bytes_beside_the_buffer"), found.get("largest_file_bytes")
    if peak is not None and largest:
        limits.append(("peak_beside_the_buffer_to_one_file", peak / largest, 1.0))
    if on_gpu and found.get("save_pretrained_s") and found.get("stall_s"):
        for name, key in (("stall", "stall_s"), ("stall_with_device_buffer", "device_buffer_copy_s")):
            limits.append((f"{name}_to_save_pretrained", found[key] / found["save_pretrained_s"], 0.02))
    return {
        name: {"value": value, "at_most": limit, "ok": value is not None and value <= limit}
        for name, value, limit in limits
    }


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure everything; a part that fails costs its own figures alone."""
    result: dict[str, Any] = {"errors": {}}
    disk = Path(args.disk) if args.disk else None
    with (
        tempfile.TemporaryDirectory(prefix="evalfleet-export-", dir=disk) as directory,
        bench(args, Path(directory)) as b,
    ):
        result["environment"] = environment(b)
        snapshots = Path(args.snapshots) if args.snapshots else None
        parts: list[tuple[str, Callable[[], dict[str, Any]]]] = [
            ("copy", lambda: measure_copy(b)),
            ("canary", lambda: measure_canary(b)),
            ("publish", lambda: measure_publish(b)),
            ("save_pretrained", lambda: measure_save_pretrained(b)),
            ("dcp", lambda: measure_dcp(b)),
        ]
        if b.ranks.device.type == "cuda" or snapshots is not None or args.quick:
            parts.append(("steps", lambda: measure_steps(b, snapshots)))
        for name, part in parts:
            try:
                result.update(part())
            except Exception:  # noqa: BLE001 - the edge of a part: its figures alone are lost
                result["errors"][name] = traceback.format_exc()
        result["targets"] = targets(result, b.ranks.device.type == "cuda")
    return result


def report(result: dict[str, Any]) -> str:
    """For people."""
    lines = [f"{key:40} {value:.4g}" for key, value in result.items() if isinstance(value, int | float)]
    lines += [
        f"{'ok ' if entry['ok'] else 'NOT'} {name} {entry['value']} (at most {entry['at_most']})"
        for name, entry in result["targets"].items()
    ]
    return "\n".join([*lines, *result["errors"].values()])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--out", help="write the JSON object there too")
    parser.add_argument("--model", help="a Hugging Face directory instead of a random model")
    parser.add_argument("--disk", help="where to write; default: the temporary directory")
    parser.add_argument("--buffer", choices=("host", "device"), default="host", help="as eval.buffer")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--snapshots", help="leave two snapshots, one step apart, under this root")
    args = parser.parse_args()
    result = run(args)
    text = json.dumps(result, indent=1)
    if args.out:
        Path(args.out).write_text(text)
    print(text if args.json else report(result))
    return 1 if result["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
