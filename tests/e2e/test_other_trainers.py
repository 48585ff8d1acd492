"""Trainers that are not ours against the real service: the Hugging Face trainer, and a watched directory."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import Any

import pytest

from eval_service.contract.states import PinProof
from eval_service.contract.wire import Kind, Source
from tests.support.live import DONE, SUITE, Live

pytestmark = [pytest.mark.real, pytest.mark.timeout(300), pytest.mark.filterwarnings("default")]


def test_three_old_directories_and_one_command_are_three_points_and_a_second_time_none(live: Live) -> None:
    """Users ask for a watch over an existing directory."""
    directory = live.root / "another-trainer"
    for step in (100, 200, 300):
        shutil.copytree(live.model, directory / f"checkpoint-{step}")
    before = sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))

    def watch() -> dict[str, Any]:
        command = [sys.executable, "-m", "eval_service.cli.main", "watch", str(directory), "--run", "watched"]
        command += ["--suites", SUITE, "--once", "--quiet", "1", "--poll", "0.5", "--timeout", "150", "--json"]
        command += ["--root", str(live.root), "--url", live.url]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
        assert done.returncode == 0, done.stderr + done.stdout
        report: dict[str, Any] = json.loads(done.stdout)
        return report

    assert watch()["done"] == 3
    points = live.points("watched")
    assert [(point.step, point.state, point.source) for point in points] == [
        (step, DONE, Source.CALLER) for step in (100, 200, 300)
    ]
    assert all(point.pin_proof in (PinProof.AGREEMENT, PinProof.UNPROVEN) for point in points)
    assert watch()["done"] == 3
    assert live.client.points(run="watched").total == 3
    assert sorted(str(path.relative_to(directory)) for path in directory.rglob("*")) == before


def test_the_hugging_face_trainers_points_are_proven_by_its_own_canary(live: Live) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

    from trainer.integrations.huggingface import EvalfleetCallback

    rows = [{"input_ids": torch.arange(5, 25), "labels": torch.arange(5, 25)} for _ in range(8)]
    arguments = TrainingArguments(
        output_dir=str(live.base / "hf-out"),
        max_steps=2,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    keys: dict[str, Any] = {
        "run": "hf",
        "root": live.root,
        "url": live.url,
        "interval": 1,
        "suites": [SUITE],
        "base": live.model,
    }
    with EvalfleetCallback(**keys, drain_timeout_s=120) as callback:
        Trainer(
            model=AutoModelForCausalLM.from_pretrained(live.model),
            args=arguments,
            train_dataset=rows,
            processing_class=AutoTokenizer.from_pretrained(live.model),
            callbacks=[callback],
        ).train()
    points = live.points("hf")
    assert [(point.step, point.kind, point.state) for point in points] == [
        (0, Kind.BASELINE, DONE),
        (1, Kind.PERIODIC, DONE),
        (2, Kind.FINAL, DONE),
    ]
    assert [point.pin_proof for point in points[1:]] == [PinProof.CANARY, PinProof.CANARY]
    receipt = callback.evaluations.receipt
    assert receipt is not None
    assert receipt.drained
