"""A run that another trainer trains, without any host: what is refused, what is recorded, who acts."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grimp
import pytest

from eval_service.contract.errors import ConfigError
from eval_service.contract.manifest import Canary
from eval_service.contract.safetensors_io import TensorData
from eval_service.contract.snapshot import SnapshotWriter
from eval_service.contract.states import PointState, Reason
from tests.support.paper_service import PaperService
from tests.support.tiny_snapshots import tiny
from trainer.integrations.evaluations import Evaluations
from trainer.steplog import StepLog, read_steplog
from trainer.weights import ExportFailed, canary_of

ROOT = Path(__file__).parents[3]


@dataclass
class PaperWeights:
    """A tiny model of numpy's; `converts` gives what is written of its tensors."""

    converts: Callable[[list[TensorData]], list[TensorData]] = lambda tensors: tensors
    fault: OSError | None = None
    seed: int = 0

    def here(self) -> AbstractContextManager[None]:
        return nullcontext()

    def stage(self) -> None:
        self.seed += 1

    def canary(self) -> Canary | None:
        return None

    def fill(self, writer: SnapshotWriter) -> None:
        model = tiny(seed=self.seed)
        writer.partial.mkdir(parents=True)
        writer.expect(model.tensors)
        if self.fault is not None:
            (writer.partial / "model.safetensors").write_bytes(b"half")
            raise ExportFailed(str(self.fault)) from self.fault
        if written := self.converts(list(model.tensors.values())):
            writer.add_weights("model.safetensors", written)
        for name, data in model.files().items():
            writer.add_bytes(name, data)


@pytest.fixture
def service(tmp_path: Path) -> PaperService:
    return PaperService(tmp_path)


def trained(service: PaperService, weights: PaperWeights, steps: int = 3) -> Evaluations:
    made = Evaluations(
        connect=service.connect, run="r", root=service.root, url="http://paper", interval=1, suites=["main"]
    )
    with made:
        made.start(lambda _: weights, num_steps=steps)
        for step in range(1, steps + 1):
            made.step(step)
    return made


def ends(service: PaperService) -> set[tuple[PointState, Reason | None]]:
    return {(point.state, point.reason) for point in service.points("r")}


def test_every_step_of_a_sound_model_is_a_point(service: PaperService) -> None:
    made = trained(service, PaperWeights())
    assert [point.step for point in service.points("r")] == [0, 1, 2, 3]
    assert ends(service) == {(PointState.DONE, None)}
    assert made.receipt is not None
    assert made.receipt.drained


def test_a_converter_with_an_empty_mapping_ends_its_points_as_export_failed_and_training_goes_on(
    service: PaperService,
) -> None:
    """An unsupported architecture whose export "succeeds" with no weights."""
    trained(service, PaperWeights(converts=lambda _: []))
    assert [point.step for point in service.points("r")] == [0, 1, 2, 3]
    assert ends(service) == {(PointState.SKIPPED, Reason.EXPORT_FAILED)}
    assert "no tensor was written" in (service.points("r")[0].detail or "")
    assert not list((service.root / "r").glob("step_*"))


def test_a_converter_that_drops_a_tensor_ends_its_points_as_export_failed_and_names_it(service: PaperService) -> None:
    trained(service, PaperWeights(converts=lambda tensors: tensors[:-1]))
    assert ends(service) == {(PointState.SKIPPED, Reason.EXPORT_FAILED)}
    assert "was never written" in (service.points("r")[0].detail or "")


def test_a_disk_that_is_full_removes_the_partial_directory_and_training_goes_on(service: PaperService) -> None:
    trained(service, PaperWeights(fault=OSError(errno.ENOSPC, "No space left on device")))
    assert ends(service) == {(PointState.SKIPPED, Reason.EXPORT_FAILED)}
    assert not list((service.root / "r").glob(".partial*"))


def test_a_log_on_a_full_disk_stops_nothing() -> None:
    log = StepLog.__new__(StepLog)
    log.path, log._clock, log._seq = Path("/dev/full"), lambda: 0.0, 0
    import threading

    log._lock, log._file = threading.Lock(), Path("/dev/full").open("a", buffering=1)  # noqa: SIM115
    log.write("step_end", step=1)
    log.write("step_end", step=2)
    log.close()


def test_a_process_that_never_started_does_nothing(service: PaperService) -> None:
    """As every rank but the first."""
    made = Evaluations(
        connect=service.connect, run="r", root=service.root, url="http://paper", interval=1, suites=["main"]
    )
    made.step(1)
    made.evaluate(1, final=True)
    assert made.end(1) is None
    assert service.calls == []
    assert not (service.root / "r").exists()


def test_a_start_that_is_refused_leaves_no_log_open(service: PaperService, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[StepLog] = []

    def watched(path: Path) -> StepLog:
        opened.append(StepLog(path))
        return opened[-1]

    monkeypatch.setattr("trainer.integrations.evaluations.StepLog", watched)
    keys = {"run": "r", "root": service.root, "url": "http://paper", "interval": 1, "suites": ["main"]}
    made = Evaluations(connect=service.connect, **keys, token_file=service.root / "none")
    with pytest.raises(ConfigError, match="token_file"):
        made.start(lambda _: PaperWeights(), num_steps=3)
    assert [log._file.closed for log in opened] == [True]


def test_with_no_interval_nothing_is_ever_evaluated(service: PaperService) -> None:
    made = Evaluations(connect=service.connect, run="r", root=service.root)
    made.start(lambda _: PaperWeights(), num_steps=2)
    made.step(1)
    made.step(2)
    assert made.end(2) is None
    assert service.calls == []


def test_training_that_ends_early_has_its_last_step_forced(service: PaperService) -> None:
    made = Evaluations(
        connect=service.connect, run="r", root=service.root, url="http://paper", interval=10, suites=["main"]
    )
    made.start(lambda _: PaperWeights(), num_steps=100)
    made.step(7)
    made.end(7)
    assert [(point.step, point.force) for point in service.points("r")] == [(0, False), (7, True)]
    assert read_steplog(made.settings.output_dir / "steps.jsonl")[-1]["event"] == "teardown"


def test_skip_eval_before_train_leaves_out_the_step_resumed_from_and_nothing_else(service: PaperService) -> None:
    keys: dict[str, Any] = {"interval": 2, "suites": ["main"], "skip_eval_before_train": True}
    made = Evaluations(connect=service.connect, run="r", root=service.root, url="http://paper", **keys)
    made.start(lambda _: PaperWeights(), step=4, num_steps=7)
    made.evaluate(4)  # as a host asks before its first step
    for step in (5, 6, 7):
        made.step(step)
    made.end(7)
    assert [point.step for point in service.points("r")] == [6, 7]


def test_a_base_model_that_is_named_is_evaluated_where_it_lies(service: PaperService) -> None:
    from tests.support.tiny_snapshots import lay_out

    base = lay_out(tiny(), service.root / "base")
    made = Evaluations(
        connect=service.connect,
        run="r",
        root=service.root,
        url="http://paper",
        interval=1,
        suites=["main"],
        base=base,
    )
    made.start(lambda _: PaperWeights(), num_steps=1)
    made.end(1)
    assert service.points("r")[0].snapshot == str(base)
    assert service.points("r")[0].state is PointState.DONE


def test_each_integration_needs_the_contract_alone_beside_its_host() -> None:
    graph = grimp.build_graph("trainer", "eval_service", cache_dir=None)
    for module in ("evaluations", "huggingface", "lightning", "model", "settings"):
        reached = graph.find_upstream_modules(f"trainer.integrations.{module}")
        strays = {name for name in reached if name.startswith("eval_service.") and ".contract" not in name}
        assert strays == set()
        ours = {name for name in reached if name.startswith("trainer.")}
        assert ours.isdisjoint({"trainer.mcore", "trainer.cpu_megatron", "trainer.parallel", "trainer.model"})


def test_the_core_of_the_integrations_loads_with_nothing_but_what_the_contract_needs() -> None:
    """As `pip install evalfleet` without extras has it: no torch, no megatron, no Ray."""
    code = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in {'torch','megatron','ray','sglang','fastapi','numpy','transformers',"
        "'sqlalchemy','aiohttp','typer'}:\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Block())\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "import trainer.integrations.evaluations\n"
        "print('loaded')\n"
    )
    done: Any = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "loaded", done.stderr


def test_the_plain_pytorch_example_is_under_twenty_lines() -> None:
    lines = (ROOT / "examples/plain_pytorch.py").read_text().splitlines()
    assert len([line for line in lines if line.strip()]) < 20


@pytest.mark.parametrize("where", ["stage", "canary", "fill"])
def test_whatever_an_export_raises_its_reservation_is_given_up_and_nobody_waits_for_it(
    where: str, service: PaperService
) -> None:
    class Faulty(PaperWeights):
        def stage(self) -> None:
            self._maybe("stage")

        def canary(self) -> Canary | None:
            self._maybe("canary")
            return None

        def fill(self, writer: SnapshotWriter) -> None:
            self._maybe("fill")

        def _maybe(self, here: str) -> None:
            if here == where:
                raise ValueError("of another kind")

    made = trained(service, Faulty())
    assert ends(service) == {(PointState.SKIPPED, Reason.EXPORT_FAILED)}
    assert made.receipt is not None
    assert made.receipt.drained


def test_log_probs_that_are_not_finite_make_no_canary() -> None:
    assert canary_of("float32", [[1, 2]], [[float("nan")]]) is None
    assert canary_of("float32", [[1, 2]], [[-1.0]]) is not None
