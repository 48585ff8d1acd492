"""The demo's model and data: seeded, whole, and honest about what is held out."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from eval_service.demo import build, tasks, tiny
from eval_service.demo.plan import Plan
from eval_service.demo.tasks import DataFiles
from eval_service.fleet_config import load_fleet

PLAN = Plan(num_steps=10, interval=4, batch_size=8, eval_examples=30)


def render(question: str) -> str:
    return f"<{question}>"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build_model(tmp_path_factory.mktemp("model"), seed=3)


@pytest.fixture
def data(tmp_path: Path) -> DataFiles:
    return tasks.write_data(tmp_path / "data", render, seed=1, train_examples=600, eval_examples=90)


def test_the_same_seed_gives_the_same_weights_and_another_gives_others(model: Path, tmp_path: Path) -> None:
    weights = (model / "model.safetensors").read_bytes()
    assert (tiny.build_model(tmp_path / "same", seed=3) / "model.safetensors").read_bytes() == weights
    assert (tiny.build_model(tmp_path / "other", seed=4) / "model.safetensors").read_bytes() != weights


def test_the_config_is_a_qwen3_with_tied_embeddings_whose_vocabulary_is_the_tokenizers(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["tie_word_embeddings"] is True
    assert config["dtype"] == "float32"
    assert config["num_attention_heads"] > config["num_key_value_heads"]
    assert config["vocab_size"] == tiny.BYTES + len(tiny.SPECIAL_TOKENS)


def test_the_end_of_a_turn_is_the_eos_in_all_three_configs(model: Path) -> None:
    eos = json.loads((model / "config.json").read_text())["eos_token_id"]
    assert json.loads((model / "generation_config.json").read_text())["eos_token_id"] == eos
    assert json.loads((model / "tokenizer_config.json").read_text())["eos_token"] == tiny.IM_END


def test_any_text_survives_the_tokenizer_as_loaded_from_disk(model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    text = "sort dbeac\n Größe 漢字 \U0001f600\t end"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_chat_template_travels_with_the_model(model: Path) -> None:
    from transformers import AutoTokenizer

    messages = [{"role": "user", "content": "sort ba"}]
    rendered = AutoTokenizer.from_pretrained(model).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert rendered == "<|im_start|>user\nsort ba<|im_end|>\n<|im_start|>assistant\n"


def test_every_task_has_the_right_answers(data: DataFiles) -> None:
    rules: dict[str, Callable[[str], str]] = {
        "upper": str.upper,
        "reverse": lambda word: word[::-1],
        "sort": lambda word: "".join(sorted(word)),
    }
    for task, path in data.evals.items():
        for line in map(json.loads, path.read_text().splitlines()):
            name, word = line["question"].split()
            assert (name, line["answer"]) == (task, rules[task](word))


def test_no_held_out_prompt_is_trained_on(data: DataFiles) -> None:
    assert tasks.check_disjoint(data, render) == data.eval_examples == 90


def test_a_question_is_on_one_side_whatever_the_seed(tmp_path: Path) -> None:
    for seed in range(3):
        files = tasks.write_data(tmp_path / str(seed), render, seed=seed, train_examples=300, eval_examples=30)
        for line in map(json.loads, files.train.read_text().splitlines()):
            assert not tasks.is_held_out(line["messages"][0]["content"])


def test_a_leak_is_found_and_named(data: DataFiles) -> None:
    leaked = json.loads(data.evals["sort"].read_text().splitlines()[0])
    messages = [{"role": "user", "content": leaked["question"]}, {"role": "assistant", "content": "x"}]
    with data.train.open("a") as file:
        file.write(json.dumps({"messages": messages}) + "\n")
    with pytest.raises(ValueError, match=r"eval_sort.jsonl: 1 prompts are trained on"):
        tasks.check_disjoint(data, render)


def test_a_prompt_that_stands_twice_is_found(data: DataFiles) -> None:
    path = data.evals["upper"]
    path.write_text(path.read_text() + path.read_text().splitlines()[0] + "\n")
    with pytest.raises(ValueError, match="stands twice"):
        tasks.check_disjoint(data, render)


def test_the_fleet_file_is_one_that_the_service_takes(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(build.fleet_toml(PLAN, 8123))
    fleet = load_fleet(path)
    assert fleet.service.port == 8123
    assert fleet.groups["eval"].bounds == (2, 2)
    assert fleet.groups["eval"].model == tmp_path / "model"


def test_the_training_set_is_as_long_as_the_run_so_that_epochs_add_no_points() -> None:
    run = tomllib.loads(build.run_toml(PLAN, "http://127.0.0.1:1"))["train"]
    assert PLAN.train_examples == run["num_steps"] * run["global_batch_size"]


@pytest.mark.parametrize(("num_steps", "steps"), [(10, (0, 4, 8, 10)), (8, (0, 4, 8))])
def test_the_plan_has_the_last_step_once(num_steps: int, steps: tuple[int, ...]) -> None:
    assert Plan(num_steps=num_steps, interval=4).steps == steps


def test_the_demos_own_plan_has_enough_points() -> None:
    assert len(Plan().steps) >= Plan().min_points
