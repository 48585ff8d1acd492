"""The Hugging Face trainer with its callback, as torchrun starts it on each rank: MODEL ROOT URL."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from trainer.integrations.huggingface import EvalfleetCallback


def main(model: str, root: str, url: str) -> None:
    """Train three steps on the CPU, over gloo."""
    torch.set_num_threads(1)
    arguments = TrainingArguments(
        output_dir=str(Path(root) / "hf"),
        max_steps=3,
        per_device_train_batch_size=2,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        ddp_backend="gloo",
        disable_tqdm=True,
    )
    with EvalfleetCallback(run="r", root=root, url=url, interval=2, suites=["main"]) as callback:
        Trainer(
            model=AutoModelForCausalLM.from_pretrained(model),
            args=arguments,
            train_dataset=[{"input_ids": torch.arange(5, 25), "labels": torch.arange(5, 25)} for _ in range(16)],
            processing_class=AutoTokenizer.from_pretrained(model),
            callbacks=[callback],
        ).train()
    print(f"rank {arguments.process_index}: receipt {callback.evaluations.receipt is not None}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
