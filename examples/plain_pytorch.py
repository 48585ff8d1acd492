"""A plain PyTorch loop whose checkpoints are evaluated: five lines of it are Evalfleet's."""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer.integrations.evaluations import Evaluations
from trainer.integrations.model import weights_of

path, root, url = sys.argv[1:]
model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
with Evaluations(run="plain", root=root, url=url, interval=2, suites=["letters"]) as evaluations:
    evaluations.start(weights_of(model, tokenizer), num_steps=4)
    for step in range(1, 5):
        ids = torch.randint(len(tokenizer), (4, 16))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        evaluations.step(step)
