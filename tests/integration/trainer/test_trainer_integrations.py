"""The callbacks for other trainers, in their real hosts, on a tiny model, against the real gateway and ledger."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from eval_service.contract.errors import ConfigError
from eval_service.contract.outbox import Outbox
from eval_service.contract.states import PointState, Reason
from eval_service.contract.wire import Kind, PointView
from tests.support.paper_service import PaperService
from tests.support.stub_service import StubService
from trainer.drain import drain
from trainer.integrations import evaluations as evaluations_module
from trainer.integrations.evaluations import Evaluations
from trainer.integrations.model import ModelWeights, weights_of
from trainer.steplog import read_steplog

pytestmark = pytest.mark.filterwarnings("default")  # the hosts' own
STEPS = 5


@pytest.fixture
def service(tmp_path: Path) -> PaperService:
    return PaperService(tmp_path)


@pytest.fixture
def model(tiny_model_dir: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model_dir)


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model_dir)


def evaluations(service: PaperService, **changes: Any) -> Evaluations:
    keys = {"run": "r", "root": service.root, "url": "http://paper", "interval": 2, "suites": ["main"]} | changes
    return Evaluations(connect=service.connect, **keys)


def rows(count: int = 24) -> list[dict[str, list[int]]]:
    source = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 40, (count, 12), generator=source).tolist()
    return [{"input_ids": row, "labels": row, "attention_mask": [1] * len(row)} for row in ids]


def train_hf(model: Any, tokenizer: Any, place: Path, made: Evaluations, **settings: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    from trainer.integrations.huggingface import EvalfleetCallback

    arguments: dict[str, Any] = {
        "output_dir": str(place / "hf"),
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "logging_strategy": "no",
        "seed": 1,
    }
    trainer = Trainer(
        model=model,
        args=TrainingArguments(**(arguments | settings)),
        train_dataset=rows(),
        processing_class=tokenizer,
        data_collator=lambda batch: {key: torch.tensor([row[key] for row in batch]) for key in batch[0]},
        callbacks=[EvalfleetCallback(made)],
    )
    trainer.train(resume_from_checkpoint=settings.pop("resume_from_checkpoint", None))
    return trainer


def curve(service: PaperService, run: str = "r") -> list[tuple[int, Kind, bool, PointState]]:
    return [(point.step, point.kind, point.force, point.state) for point in service.points(run)]


WHOLE = [
    (0, Kind.BASELINE, False, PointState.DONE),
    (2, Kind.PERIODIC, False, PointState.DONE),
    (4, Kind.PERIODIC, False, PointState.DONE),
    (5, Kind.FINAL, True, PointState.DONE),
]


def loaded(point: PointView) -> Any:
    from transformers import AutoModelForCausalLM

    assert point.snapshot is not None
    return AutoModelForCausalLM.from_pretrained(point.snapshot)


def same(left: nn.Module, right: nn.Module) -> bool:
    theirs = right.state_dict()
    return all(torch.equal(tensor, theirs[name]) for name, tensor in left.state_dict().items())


def test_the_hugging_face_trainer_has_its_base_model_its_interval_and_its_last_step_evaluated(
    service: PaperService, model: Any, tokenizer: Any, tiny_model_dir: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    made = evaluations(service, keep=9)
    trainer = train_hf(model, tokenizer, tmp_path, made, save_strategy="steps", save_steps=4)
    assert curve(service) == WHOLE
    base, _, fourth, last = service.points("r")
    assert same(loaded(base), AutoModelForCausalLM.from_pretrained(tiny_model_dir))
    assert same(loaded(fourth), AutoModelForCausalLM.from_pretrained(tmp_path / "hf/checkpoint-4")), "the step's own"
    assert same(loaded(last), trainer.model)
    assert made.receipt is not None
    assert made.receipt.drained
    assert [entry.step for entry in made.receipt.done] == [0, 2, 4, 5]
    assert service.ledger.views.run("r").step == STEPS
    assert not list((service.root / "r").glob(".*")), "no partial directory is left"
    assert all(point.timings.stall_s is not None for point in service.points("r"))


def test_a_step_is_saved_before_it_is_evaluated(
    service: PaperService, model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    saved: list[bool] = []
    checkpoint = tmp_path / "hf/checkpoint-2"

    def look(call: str) -> bool:
        if call == "POST /dispatch" and any(point.step == 0 for point in service.points("r")):
            saved.append(checkpoint.exists())
        return False

    service.away = look
    train_hf(model, tokenizer, tmp_path, evaluations(service), save_strategy="steps", save_steps=2, max_steps=3)
    assert saved
    assert all(saved[1:]), "the first is the base model's own snapshot"


def test_the_best_checkpoint_at_the_end_is_not_taken_for_the_last_step(
    service: PaperService, model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    made = evaluations(service, keep=9, interval=100)
    settings = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "max_steps": 3}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    from transformers import Trainer

    original = Trainer.__init__

    def with_eval(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **{**kwargs, "eval_dataset": rows(4)})

    Trainer.__init__ = with_eval
    try:
        trainer = train_hf(model, tokenizer, tmp_path, made, **settings, **best)
    finally:
        Trainer.__init__ = original
    assert trainer.state.best_global_step != 3
    assert [point.step for point in service.points("r")] == [0, 3]
    assert same(loaded(service.points("r")[-1]), AutoModelForCausalLM.from_pretrained(tmp_path / "hf/checkpoint-3"))


def test_a_resumed_hugging_face_run_repeats_no_point(
    service: PaperService, model: Any, tokenizer: Any, tiny_model_dir: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    saves: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    train_hf(model, tokenizer, tmp_path, evaluations(service, keep=9), **saves, max_steps=4)
    again = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    train_hf(again, tokenizer, tmp_path, evaluations(service, keep=9), **saves, resume_from_checkpoint=True)
    assert [point.step for point in service.points("r")] == [0, 2, 4, 5]
    assert service.ledger.views.points(run="r").total == 4


def test_a_service_that_is_away_changes_no_loss_and_the_outbox_keeps_what_it_may(
    service: PaperService,
    model: Any,
    tokenizer: Any,
    tiny_model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers import AutoModelForCausalLM

    undisturbed = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    train_hf(undisturbed, tokenizer, tmp_path, evaluations(service, interval=None, suites=[], url=None))
    service.away = lambda _: True
    made = evaluations(service, drain_timeout_s=60.0)
    # The last export is waited for; then the time is up.
    times = iter([0.0])
    monkeypatch.setattr(evaluations_module, "drain", partial(drain, clock=lambda: next(times, 60.0)))
    trainer = train_hf(model, tokenizer, tmp_path, made)
    assert same(trainer.model, undisturbed), "evaluation changes nothing that is trained, random numbers included"
    kept = [request.step for _, request in Outbox.of(service.root, "r").pending()]
    assert kept == [0, 2, 5]
    assert made.receipt is not None
    assert not made.receipt.drained

    service.away = lambda _: False
    monkeypatch.undo()
    with made:
        made.start(weights_of(model, tokenizer), step=STEPS, num_steps=STEPS)
    assert [point.step for point in service.points("r")] == [0, 2, 5], "sent by the next launch"


def test_an_export_that_fails_ends_its_point_and_training_goes_on(
    service: PaperService, model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    made = evaluations(service, skip_eval_before_train=True)
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    trainer = train_hf(model, tokenizer, tmp_path, made)
    assert trainer.state.global_step == STEPS
    assert {(point.state, point.reason) for point in service.points("r")} == {
        (PointState.SKIPPED, Reason.EXPORT_FAILED)
    }
    assert "not finite" in (service.points("r")[0].detail or "")
    assert not list((service.root / "r").glob(".partial*"))


def test_an_exception_in_the_loop_drains_what_there_is(service: PaperService, model: Any, tokenizer: Any) -> None:
    made = evaluations(service)

    def loop() -> None:
        with made:
            made.start(weights_of(model, tokenizer), num_steps=10)
            made.step(1)
            made.step(2)
            raise RuntimeError("the loop's own")

    with pytest.raises(RuntimeError, match="the loop's own"):
        loop()
    assert [point.step for point in service.points("r")] == [0, 2]
    assert made.receipt is not None
    assert made.receipt.drained


def test_trl_trains_with_the_same_callback(service: PaperService, model: Any, tokenizer: Any, tmp_path: Path) -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from trainer.integrations.huggingface import EvalfleetCallback

    chats = [{"messages": [{"role": "user", "content": "sort cab"}, {"role": "assistant", "content": "abc"}]}] * 16
    config = SFTConfig(
        output_dir=str(tmp_path / "trl"),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        max_length=64,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        logging_strategy="no",
    )
    with EvalfleetCallback(evaluations(service)) as callback:
        SFTTrainer(
            model=model,
            args=config,
            train_dataset=Dataset.from_list(chats),
            processing_class=tokenizer,
            callbacks=[callback],
        ).train()
    assert curve(service) == WHOLE


def lightning_module(model: Any) -> Any:
    from lightning.pytorch import LightningModule

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, _: int) -> Any:
            return self.model(input_ids=batch, labels=batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-2)

    return Module()


def fit(module: Any, made: Evaluations, tokenizer: Any, place: Path, **settings: Any) -> Any:
    from lightning.pytorch import Trainer

    from trainer.integrations.lightning import EvalfleetCallback

    quiet: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "accelerator": "cpu",
    }
    trainer = Trainer(
        default_root_dir=place,
        callbacks=[EvalfleetCallback(tokenizer=tokenizer, evaluations=made)],
        enable_model_summary=False,
        **quiet,
        **settings,
    )
    data: Any = [torch.tensor(row["input_ids"]) for row in rows()]
    batches: Any = DataLoader(data, batch_size=2)
    trainer.fit(module, batches)
    return trainer


def test_lightning_has_the_same_points_and_counts_optimizer_steps(
    service: PaperService, model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    made = evaluations(service, keep=9)
    fit(lightning_module(model), made, tokenizer, tmp_path, max_steps=STEPS, accumulate_grad_batches=2)
    assert curve(service) == WHOLE
    assert same(loaded(service.points("r")[-1]), model)


def test_lightning_drains_after_an_exception(service: PaperService, model: Any, tokenizer: Any, tmp_path: Path) -> None:
    module, made = lightning_module(model), evaluations(service)
    module.on_train_batch_end = lambda outputs, batch, index: 1 / 0 if index == 2 else None
    with pytest.raises(ZeroDivisionError):
        fit(module, made, tokenizer, tmp_path, max_steps=STEPS)
    assert [point.step for point in service.points("r")] == [0, 2]
    assert made.receipt is not None


def test_where_the_last_step_is_not_known_it_is_what_training_ends_at(
    service: PaperService, model: Any, tokenizer: Any
) -> None:
    made = evaluations(service)
    made.start(weights_of(model, tokenizer))
    for step in (1, 2, 3):
        made.step(step)
    made.end(3)
    assert [(point.step, point.kind) for point in service.points("r")] == [
        (0, Kind.BASELINE),
        (2, Kind.PERIODIC),
        (3, Kind.FINAL),
    ]


def test_a_tied_embedding_under_another_name_is_known_by_its_identity_and_the_config_follows(
    tiny_model_dir: Path, tokenizer: Any, tmp_path: Path
) -> None:
    """Tied embedding found by a hard-coded Hugging Face name: a model with prefixed names loses its lm_head."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from eval_service.contract.snapshot import SnapshotWriter

    def exported(model: Any, step: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        weights = ModelWeights(model, tokenizer, with_canary=False)
        weights.stage()
        with SnapshotWriter(tmp_path, "r", step, "tests") as writer:
            weights.fill(writer)
            path = writer.publish(canary=None, dispatch=()).path
        return load_file(path / "model.safetensors"), json.loads((path / "config.json").read_bytes())

    plain = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    prefixed: Any = nn.Module()
    prefixed.language_model = plain
    prefixed.config, prefixed.save_pretrained = plain.config, plain.save_pretrained
    prefixed.get_input_embeddings = plain.get_input_embeddings
    prefixed.get_output_embeddings = plain.get_output_embeddings
    tensors, config = exported(prefixed, 1)
    assert "language_model.model.embed_tokens.weight" in tensors
    assert "language_model.lm_head.weight" not in tensors
    assert config["tie_word_embeddings"] is True

    untied = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    untied.lm_head.weight = nn.Parameter(untied.lm_head.weight.detach() * 2)  # though its config says that it is tied
    tensors, config = exported(untied, 2)
    assert torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"] * 2)
    assert config["tie_word_embeddings"] is False
    ids = torch.tensor([[5, 6, 7, 8]])
    again = AutoModelForCausalLM.from_pretrained(next((tmp_path / "r").glob("step_2-*")))
    assert torch.equal(again(ids).logits, untied(ids).logits)


def test_a_tied_export_in_several_files_has_no_head_in_its_index_and_no_empty_tensor(
    model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    """A tied lm_head is kept in the base model's index: an empty tensor in shard 2, whose header is rejected."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from eval_service.contract import names
    from eval_service.contract.snapshot import SnapshotWriter

    weights = ModelWeights(model, tokenizer, with_canary=False, max_file_bytes=100_000)
    weights.stage()
    with SnapshotWriter(tmp_path, "r", 1, "tests") as writer:
        weights.fill(writer)
        path = writer.publish(canary=None, dispatch=()).path
    index = json.loads((path / names.INDEX).read_bytes())["weight_map"]
    shards = {name: load_file(path / name) for name in set(index.values())}
    assert len(shards) > 1
    assert "lm_head.weight" not in index
    assert all(shards[file][name].numel() for name, file in index.items())
    assert sum(len(tensors) for tensors in shards.values()) == len(index)
    assert same(AutoModelForCausalLM.from_pretrained(path), model)


def test_the_plain_pytorch_example_runs(
    stub: StubService, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub.known_suites = frozenset({"letters"})
    monkeypatch.setattr(sys, "argv", ["plain_pytorch.py", str(tiny_model_dir), str(tmp_path), stub.url])
    runpy.run_path(str(Path(__file__).parents[3] / "examples/plain_pytorch.py"))
    assert stub.steps() == [0, 2, 4]
    assert stub.point(4).force


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda model: setattr(model, "peft_config", {}), "adapters can't be exported"),
        (lambda model: setattr(model.model.norm.weight, "ds_id", 1), "model.norm.weight is cut over the ranks"),
    ],
)
def test_a_model_that_one_rank_does_not_hold_whole_is_refused_at_the_start_by_name(
    spoil: Callable[[Any], None], message: str, service: PaperService, model: Any, tokenizer: Any
) -> None:
    spoil(model)
    with pytest.raises(ConfigError, match=message):
        evaluations(service).start(weights_of(model, tokenizer), num_steps=2)


def test_a_buffer_that_does_not_fit_is_refused_at_the_start(
    service: PaperService, model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.integrations.model.free_memory_bytes", lambda: 10)
    with pytest.raises(ConfigError, match="the export buffer needs"):
        evaluations(service).start(weights_of(model, tokenizer), num_steps=2)


def test_an_unknown_suite_or_key_is_refused_at_the_start_by_name(
    service: PaperService, model: Any, tokenizer: Any
) -> None:
    with pytest.raises(ConfigError, match="suites: the service refuses the run: no suite 'nope'"):
        evaluations(service, suites=["nope"]).start(weights_of(model, tokenizer), num_steps=2)
    with pytest.raises(ConfigError, match="intervall: unknown key"):
        evaluations(service, intervall=3)
    with pytest.raises(ConfigError, match="suites"):
        evaluations(service, suites=[])
    with pytest.raises(ConfigError, match="snapshot_source"):
        evaluations(service, snapshot_source="reuse")


def test_every_tensor_of_a_half_precision_export_has_the_dtype_that_the_config_names(
    service: PaperService, model: Any, tokenizer: Any
) -> None:
    """Tensor dtype differs from config dtype: twice the size, or a silent cast."""
    made = evaluations(service, keep=9)
    model.to(torch.bfloat16)
    model.model.norm.weight.data = model.model.norm.weight.data.float()  # one that a host keeps in full precision
    made.start(weights_of(model, tokenizer), num_steps=1)
    made.end(1)
    point = service.points("r")[0]
    assert point.state is PointState.DONE
    assert json.loads((Path(point.snapshot or "") / "config.json").read_bytes())["dtype"] == "bfloat16"
    manifest = json.loads((Path(point.snapshot or "") / "manifest.json").read_bytes())
    assert {tensor["dtype"] for tensor in manifest["tensors"]} == {"BF16"}
    assert manifest["canary"]["dtype"] == "bfloat16"


def test_the_log_says_what_became_of_each_step(service: PaperService, model: Any, tokenizer: Any) -> None:
    made = evaluations(service)
    with made:
        made.start(weights_of(model, tokenizer), num_steps=2)
        made.step(1)
        made.step(2)
    events = [entry["event"] for entry in read_steplog(made.settings.output_dir / "steps.jsonl")]
    assert events.count("eval_dispatched") == 2
    assert events[0] == "start"
    assert events[-1] == "teardown"
