"""What a measured run is made of: the model, the data, the three config files. Runs apart, see `build_apart`."""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.gpu.processes import Clock, Process

RUN, SUITE = "sft", "upper"
# Graphs for few batch sizes and no prefill graphs: the start is what costs time here.
GPU_OVERRIDES = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "mem_fraction_static": 0.3,
    "cuda_graph_backend_prefill": "disabled",
    "cuda_graph_max_bs_decode": 64,
    "context_length": 512,
}


def build_apart(work: Path, port: int, tiny: bool, clock: Clock, plan: dict[str, Any]) -> dict[str, Any]:
    """Build in a process of its own: the GPU's memory is free again when it has ended."""
    argv = [__file__, str(work), str(port), json.dumps(tiny), json.dumps(plan)]
    process = Process(argv, work / "logs" / "inputs.log")
    if process.wait(clock.left(120.0)) != 0:
        raise RuntimeError(process.tail())
    found: dict[str, Any] = json.loads((work / "inputs.json").read_text())
    return found


def build_inputs(work: Path, plan: dict[str, Any], port: int, tiny: bool) -> dict[str, Any]:
    """Model, data and the three config files.

    Args:
        plan: `num_steps`, `batch`, `examples` and so on; `engines`, `tensor` and `data` where there is more than one;
            `load` prompts of `load_tokens` for each engine, where its speed is asked for.
    """
    from benchmarks.export import build_model
    from eval_service.demo.tiny import build_model as build_tiny
    from eval_service.demo.tiny import build_tokenizer

    began = time.monotonic()
    model = build_tiny(work / "model") if tiny else build_model(work / "model", plan["shape"])
    write_data(work, plan, build_tokenizer())
    write_configs(work, plan, port, tiny)
    return {"seconds": time.monotonic() - began, "model_bytes": sum(p.stat().st_size for p in model.iterdir())}


def write_data(work: Path, plan: dict[str, Any], tokenizer: Any) -> None:
    """Put five letters into upper case; what is asked is never trained on."""
    from eval_service.demo.tasks import TASKS, is_held_out

    rng = random.Random(0)
    train: list[tuple[str, str]] = []
    asked: dict[str, str] = {}
    examples = plan["examples"] * plan.get("engines", 1)
    while len(train) < plan["num_steps"] * plan["batch"] or len(asked) < examples:
        question, answer = TASKS["upper"](rng)
        if is_held_out(question):
            asked[question] = answer
        else:
            train.append((question, answer))
    with (work / "train.jsonl").open("w") as file:
        for question, answer in train[: plan["num_steps"] * plan["batch"]]:
            chat = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": chat}) + "\n")
    _write_prompts(work / "asked.jsonl", tokenizer, list(asked.items())[:examples])
    if load := plan.get("load"):
        prompts = [TASKS["upper"](rng) for _ in range(load * (plan["engines"] + 1))]
        _write_prompts(work / "load-one.jsonl", tokenizer, prompts[:load])
        _write_prompts(work / "load-all.jsonl", tokenizer, prompts[load:])


def _write_prompts(path: Path, tokenizer: Any, questions: list[tuple[str, str]]) -> None:
    with path.open("w") as file:
        for question, answer in questions:
            chat = [{"role": "user", "content": question}]
            prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            file.write(json.dumps({"prompt": prompt, "answer": answer}) + "\n")


def write_configs(work: Path, plan: dict[str, Any], port: int, tiny: bool) -> None:
    """Their paths are absolute."""
    engines = plan.get("engines", 1)
    gpus = 0 if tiny else 1
    overrides = "{}" if tiny else "{ " + ", ".join(f"{k} = {json.dumps(v)}" for k, v in GPU_OVERRIDES.items()) + " }"
    (work / "root").mkdir(exist_ok=True)
    (work / "fleet.toml").write_text(
        f"num_gpus = {gpus * engines}\noverrides = {overrides}\n"
        f'[service]\nport = {port}\nroots = ["{work}"]\nstate_dir = "{work / "state"}"\n'
        f'[groups.eval]\nmodel = "{work / "model"}"\nnum_engines = [1, {engines}]\nnum_gpus_per_engine = {gpus}\n'
        f"server_concurrency = {plan.get('concurrency', 64)}\nstart_timeout_s = 400\n"
    )
    suites = _suite(SUITE, work / "asked.jsonl", 8)
    if plan.get("load"):
        suites += "".join(_suite(f"load-{n}", work / f"load-{n}.jsonl", plan["load_tokens"]) for n in ("one", "all"))
    (work / "suites.toml").write_text(suites)
    (work / "run.toml").write_text(
        f'[run]\nname = "{RUN}"\nroot = "{work / "root"}"\noutput_dir = "{work / "train"}"\n'
        f'[model]\nhf_path = "{work / "model"}"\n[data]\ntrain = "{work / "train.jsonl"}"\nmax_length = 64\n'
        f"[train]\nnum_steps = {plan['num_steps']}\nglobal_batch_size = {plan['batch']}\n"
        f"micro_batch_size = {plan['batch'] // plan.get('data', 1)}\nlr = {plan['lr']}\n"
        f"warmup_steps = {plan['warmup']}\n"
        f'dtype = "{"float32" if tiny else "bfloat16"}"\n'
        f"[parallel]\ntensor = {plan.get('tensor', 1)}\n"
        f'[eval]\nurl = "http://127.0.0.1:{port}"\ninterval = {plan["num_steps"] // plan["points"]}\n'
        f'suites = ["{SUITE}"]\nbuffer = "{plan["buffer"]}"\n'
        f"keep = {plan.get('keep', 10)}\ndrain_timeout_s = 120\n"
    )


def _suite(name: str, data: Path, tokens: int) -> str:
    return (
        f"[suites.{name}]\nscorer = 'exact'\nsampling = {{ max_new_tokens = {tokens} }}\n"
        f"[[suites.{name}.datasets]]\nname = 'upper'\npath = '{data}'\n"
    )


if __name__ == "__main__":
    place = Path(sys.argv[1])
    built = build_inputs(place, json.loads(sys.argv[4]), int(sys.argv[2]), json.loads(sys.argv[3]))
    (place / "inputs.json").write_text(json.dumps(built))
