"""Makes what the demo runs on: the model, the data, and the three config files."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from eval_service.demo import tasks, tiny
from eval_service.demo.plan import RUN, SUITE, Plan
from eval_service.demo.workspace import Workspace


@dataclass(frozen=True, slots=True)
class Built:
    """What was made; `disjoint` prompts were looked up in the training set, and none was found."""

    data: tasks.DataFiles
    disjoint: int


def build(workspace: Workspace, plan: Plan, *, url: str, port: int) -> Built:
    """Write everything under the workspace.

    Raises:
        ValueError: a held-out prompt is trained on.
    """
    _quiet()
    tiny.build_model(workspace.model, seed=plan.seed)
    render = _renderer()
    data = tasks.write_data(
        workspace.data,
        render,
        seed=plan.seed,
        train_examples=plan.train_examples,
        eval_examples=plan.eval_examples,
    )
    disjoint = tasks.check_disjoint(data, render)
    workspace.snapshots.mkdir()
    workspace.config("fleet").write_text(fleet_toml(plan, port))
    workspace.config("suites").write_text(suites_toml(plan))
    workspace.config("run").write_text(run_toml(plan, url))
    return Built(data, disjoint)


def fleet_toml(plan: Plan, port: int) -> str:
    """Two SGLang engines on the CPU, booted with the base model."""
    return f"""\
[service]
port = {port}
state_dir = "state"
roots = ["snapshots", "model"]

[groups.eval]
grade = "sglang-cpu"
model = "model"
num_engines = {plan.engines}
num_gpus_per_engine = 0
server_concurrency = {plan.server_concurrency}
dtype = "float32"
"""


def suites_toml(plan: Plan) -> str:
    """One suite over the held-out prompts of every task."""
    datasets = "".join(f'    {{ name = "{task}", path = "data/eval_{task}.jsonl" }},\n' for task in tasks.TASKS)
    return f"""\
[suites.{SUITE}]
scorer = "exact"
sampling = {{ temperature = 0.0, max_new_tokens = {plan.max_new_tokens} }}
datasets = [
{datasets}]
"""


def run_toml(plan: Plan, url: str) -> str:
    """The trainer's: one thread, so that the engines find a core."""
    return f"""\
[run]
name = "{RUN}"
root = "snapshots"
output_dir = "train"

[model]
hf_path = "model"

[data]
train = "data/train.jsonl"
max_length = 64

[train]
num_steps = {plan.num_steps}
global_batch_size = {plan.batch_size}
micro_batch_size = {plan.batch_size}
lr = {plan.learning_rate}
min_lr = {plan.learning_rate / 10}
warmup_steps = {plan.warmup_steps}
schedule = "cosine"
seed = {plan.seed}
threads = 1
resume = false

[eval]
url = "{url}"
interval = {plan.interval}
suites = ["{SUITE}"]
snapshot_source = "staging"
max_in_flight = 2
keep = {plan.keep}
drain_timeout_s = 300.0
progress_interval_s = 0.5

[fleet]
num_eval_engines = {plan.engines}
"""


def _renderer() -> Callable[[str], str]:
    tokenizer = tiny.build_tokenizer()

    def render(question: str) -> str:
        messages = [{"role": "user", "content": question}]
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    return render


def _quiet() -> None:
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity(logging.ERROR)
