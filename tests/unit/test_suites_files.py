"""Suite files of both languages, and every format of data: each mistake is found at load, with its line and key."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset as Saved
from datasets import DatasetDict

from eval_service.contract.errors import ConfigError
from eval_service.fleet_config import FleetConfig
from eval_service.serve.settings import check_suites
from eval_service.suites.suite import Suite, load_suites

EXAMPLES = Path(__file__).parents[2] / "examples" / "suites"
CHAT = [{"role": "user", "content": "q"}]


def loaded(tmp_path: Path, text: str, name: str = "suites.toml") -> Suite:
    """The file's only suite."""
    (tmp_path / name).write_text(text)
    [suite] = load_suites(tmp_path / name).values()
    assert isinstance(suite, Suite)
    return suite


def jsonl(path: Path, *rows: dict[str, Any]) -> None:
    """Write rows."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    jsonl(tmp_path / "d.jsonl", *({"prompt": f"p{i}", "answer": f"{i}"} for i in range(6)))
    jsonl(
        tmp_path / "chat.jsonl", *({"prompt": [{"role": "user", "content": f"p{i}"}], "answer": "x"} for i in range(4))
    )
    jsonl(tmp_path / "mc.jsonl", {"prompt": "q", "choices": ["a", "b"], "answer": 1})
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\n")
    (tmp_path / "exits.py").write_text("import os\nos._exit(3)\n")
    (tmp_path / "mine.py").write_text("value = 3\ndef score(output, answer):\n    return 1.0\n")
    return tmp_path


# Each is the suite's own lines, TOML and YAML; `{scorer}` is put on line 2, the dataset on line 3.
MISTAKES = [
    ({"scorer": {"name": "regex", "pattern": "("}}, "scorer.pattern", 2, "no regular expression"),
    ({"scorer": {"name": "regex"}}, "scorer.pattern", 2, "Field required"),
    ({"scorer": {"name": "exact", "patern": "x"}}, "scorer.patern", 2, "unknown key"),
    ({"scorer": {"pattern": "x"}}, "scorer.name", 2, "has no name"),
    ({"scorer": "exakt"}, "scorer", 2, "there is no scorer 'exakt'"),
    ({"scorer": {"name": "numeric", "tolerance": -1}}, "scorer.tolerance", 2, "greater than or equal"),
    ({"scorer": {"name": "exact", "timeout_s": 0}}, "scorer.timeout_s", 2, "greater than 0"),
    ({"scorer": {"name": "json_schema", "json_schema": {"type": 3}}}, "scorer.json_schema", 2, "no JSON schema"),
    ({"scorer": {"name": "judge", "group": "g", "template": "x", "verdict": "x"}}, "scorer.template", 2, "{output}"),
    ({"scorer": {"name": "code", "run_timeout_s": 60}}, "scorer.run_timeout_s", 2, "not below timeout_s"),
    ({"scorer": {"name": "function", "function": "mine"}}, "scorer.function", 2, "should match pattern"),
    ({"scorer": {"name": "function", "function": "gone:f"}}, "scorer.function", 2, "No module named 'gone'"),
    ({"scorer": {"name": "function", "function": "broken:f"}}, "scorer.function", 2, "nothing_of_that_name"),
    ({"scorer": {"name": "function", "function": "exits:f"}}, "scorer.function", 2, "ended the process (3)"),
    ({"scorer": {"name": "function", "function": "mine:gone"}}, "scorer.function", 2, "no attribute 'gone'"),
    ({"scorer": {"name": "function", "function": "mine:value"}}, "scorer.function", 2, "can't be called"),
    ({"kind": "games"}, "kind", 2, "prompts"),
    ({"prompt_format": "xml"}, "prompt_format", 2, "'rendered' or 'chat'"),
    ({"prompt_format": "chat"}, "datasets.0", 3, "holds a text, and the suite asks chat messages"),
    ({"scorer": "multiple_choice"}, "datasets.0", 3, "no column 'choices'"),
    ({"scorer": "multiple_choice", "prompt_format": "chat"}, "prompt_format", None, "asks rendered prompts"),
    ({"data": {"path": "chat.jsonl"}, "kind": "prompts"}, "datasets.0", 3, "holds chat messages"),
    ({"data": {"weight": 0}, "kind": "prompts"}, "datasets.0.weight", 3, "greater than 0"),
    ({"data": {"split": "test"}, "kind": "prompts"}, "datasets.0.split", 3, "has no splits"),
    ({"data": {"fewshot": {"n": 6}}, "kind": "prompts"}, "datasets.0.fewshot.n", 3, "6 rows to draw 6 examples"),
    ({"data": {"fewshot": {"n": 1, "m": 1}}, "kind": "prompts"}, "datasets.0.fewshot.m", 3, "unknown key"),
    ({"data": {"fewshot": {"n": 1, "path": "gone"}}, "kind": "prompts"}, "datasets.0.fewshot.path", 3, "gone"),
    ({"data": {"prompt_ids": "ids", "fewshot": {"n": 1}}, "kind": "prompts"}, "datasets.0.prompt_ids", 3, "as they st"),
]


def written(mistake: dict[str, Any], language: str) -> str:
    """The suite `s`: its first key on line 2, its dataset on line 3 (YAML: one further down)."""
    mistake = dict(mistake)
    dataset = {"name": "d", "path": "d.jsonl", **mistake.pop("data", {})}
    (first, value), *more = mistake.items()
    if language == "toml":
        rest = "".join(f"{key} = {inline(v)}\n" for key, v in more)
        return f"[suites.s]\n{first} = {inline(value)}\ndatasets = [{inline(dataset)}]\n{rest}"
    rest = "".join(f"  {key}: {json.dumps(v)}\n" for key, v in more)
    return (
        f"suites: {{s:\n  {{{first}: {json.dumps(value)},\n  datasets: [{json.dumps(dataset)}],\n{rest.rstrip()}}}}}\n"
    )


def inline(value: Any) -> str:
    """TOML."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {inline(v)}" for key, v in value.items()) + " }"
    return json.dumps(value)


@pytest.mark.parametrize("language", ["toml", "yaml"])
@pytest.mark.parametrize(("mistake", "key", "line", "told"), MISTAKES, ids=[f"{m[1]}-{m[3][:12]}" for m in MISTAKES])
def test_a_mistake_in_a_suite_is_named_with_line_and_key(
    data: Path, mistake: dict[str, Any], key: str, line: int | None, told: str, language: str
) -> None:
    if language == "yaml" and key == "scorer.function":
        return  # nothing of it is the language's, and a process for each is slow
    with pytest.raises(ConfigError) as caught:
        loaded(data, written(mistake, language), f"suites.{language}")
    assert (caught.value.field, told in str(caught.value)) == (f"suites.s.{key}", True), str(caught.value)
    if line is not None:
        assert caught.value.message.startswith(f"line {line}: "), caught.value.message


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("suites:\n  a: [\n", "line 3"),
        ("- a\n", "no mapping"),
        ("suites:\n  a: {kind: prompts}\n  a: {kind: prompts}\n", "line 3: the key is there twice"),
        ("suites: &x\n  a: *x\n", "refers to itself"),
        ("", "suites: suites.yaml: Field required"),
        ("suites: !!python/object/apply:os.getcwd []\n", "could not determine a constructor"),
    ],
)
def test_broken_yaml_is_told_and_nothing_of_it_is_run(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, text, "suites.yaml")
    assert told in str(caught.value), str(caught.value)


def test_the_same_suite_in_yaml_has_the_same_digest() -> None:
    [of_yaml] = load_suites(EXAMPLES / "numeric.yaml").values()
    assert of_yaml.digest == load_suites(EXAMPLES / "suites.toml")["numeric"].digest


SUITE = '[suites.s]\ndatasets = [{{ name = "d", path = "{path}"{more} }}]\n'


def test_the_same_rows_are_the_same_questions_in_every_format(data: Path) -> None:
    rows = [json.loads(line) for line in (data / "d.jsonl").read_text().splitlines()]
    pq.write_table(pa.Table.from_pylist([row | {"other": b"x"} for row in rows]), data / "d.parquet")
    Saved.from_list(rows).save_to_disk(data / "one")
    DatasetDict({"train": Saved.from_list(rows[:1]), "test": Saved.from_list(rows)}).save_to_disk(data / "two")
    expected = loaded(data, SUITE.format(path="d.jsonl", more="")).prompts()
    for path, more in (("d.parquet", ""), ("one", ""), ("two", ', split = "test"')):
        assert loaded(data, SUITE.format(path=path, more=more)).prompts() == expected
    with pytest.raises(ConfigError, match="there are train, test"):
        loaded(data, SUITE.format(path="two", more=""))


def test_a_directory_that_no_data_was_saved_to_is_refused_and_its_script_is_not_run(data: Path) -> None:
    (data / "script").mkdir()
    (data / "script" / "script.py").write_text("raise SystemExit(9)")
    with pytest.raises(ConfigError, match="a loading script is never run"):
        loaded(data, SUITE.format(path="script", more=""))
    (data / "torn.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ConfigError, match="no Parquet file"):
        loaded(data, SUITE.format(path="torn.parquet", more=""))


def test_data_files_are_looked_for_in_their_own_directory_alone(data: Path) -> None:
    Saved.from_list([{"prompt": "p", "answer": "a"}]).save_to_disk(data / "one")
    state = json.loads((data / "one" / "state.json").read_text())
    state["_data_files"] = [{"filename": "../one/data-00000-of-00001.arrow"}]
    (data / "one" / "state.json").write_text(json.dumps(state))
    with pytest.raises(ConfigError, match="names no data files"):
        loaded(data, SUITE.format(path="one", more=""))


def test_a_label_that_is_missing_is_named_with_its_row(data: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a", "b"], "answer": ["x", None]}), data / "d.parquet")
    with pytest.raises(ConfigError, match="row 2: column 'answer' holds NoneType"):
        loaded(data, SUITE.format(path="d.parquet", more=""))


def test_examples_are_drawn_with_the_seed_and_are_never_the_question_itself(data: Path) -> None:
    rows = [{"prompt": f"p{i % 5}", "answer": f"{i % 5}"} for i in range(10)]  # each question is there twice
    jsonl(data / "d.jsonl", *rows)
    shots = ', fewshot = { n = 3, separator = "|", between = "=" }'
    suite = loaded(data, SUITE.format(path="d.jsonl", more=shots))
    for prompt in suite.prompts():
        *examples, asked = prompt.text.split("|")
        assert len(set(examples)) == 3
        assert all(example != f"{asked}={asked[1:]}" for example in examples)
    assert loaded(data, SUITE.format(path="d.jsonl", more=shots)).prompts() == suite.prompts()
    other = shots.replace("n = 3", "n = 3, seed = 1")
    assert loaded(data, SUITE.format(path="d.jsonl", more=other)).prompts() != suite.prompts()
    assert loaded(data, SUITE.format(path="d.jsonl", more=other)).digest != suite.digest


def test_examples_of_a_chat_are_turns_of_it_after_its_system_message(data: Path) -> None:
    system = {"role": "system", "content": "be brief"}
    jsonl(
        data / "c.jsonl",
        *({"prompt": [system, {"role": "user", "content": f"p{i}"}], "answer": f"{i}"} for i in (1, 2)),
    )
    text = SUITE.format(path="c.jsonl", more=", fewshot = { n = 1 }") + 'prompt_format = "chat"\n'
    first = loaded(data, text).prompts()[0]
    assert [(turn["role"], turn["content"]) for turn in first.messages] == [
        ("system", "be brief"),
        ("user", "p2"),
        ("assistant", "2"),
        ("user", "p1"),
    ]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"prompt": "q", "choices": ["a"], "answer": 0}, "no list of choices"),
        ({"prompt": "q", "choices": ["a", ""], "answer": 0}, "no list of choices"),
        ({"prompt": "q", "choices": ["a", "a"], "answer": 0}, "the same choice twice"),
        ({"prompt": "q", "choices": ["a", "b"], "answer": 2}, "none of the choices: '2'"),
        ({"prompt": "q", "choices": ["a", "b"], "answer": "c"}, "none of the choices: 'c'"),
        ({"prompt": "q", "choices": ["a", "b"]}, "no column 'answer'"),
    ],
)
def test_choices_that_are_none_are_named_with_their_row(data: Path, row: dict[str, Any], told: str) -> None:
    jsonl(data / "mc.jsonl", {"prompt": "q", "choices": ["a", "b"], "answer": "b"}, row)
    with pytest.raises(ConfigError, match="line 2: ") as caught:
        loaded(data, SUITE.format(path="mc.jsonl", more="") + 'scorer = "multiple_choice"\n')
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([{"role": "user"}], "a message without a text"),
        ([{"role": "user", "content": [{"image": "x"}]}], "a message without a text"),
        ([*CHAT, {"role": "assistant", "content": "a"}], "ends in an answer"),
        ([], "no chat messages"),
        ([{"role": "user", "content": "\ud800"}], "half a surrogate pair"),
    ],
)
def test_messages_that_no_template_could_render_are_named_with_their_row(
    data: Path, messages: list[Any], told: str
) -> None:
    jsonl(data / "c.jsonl", {"prompt": CHAT, "answer": "a"}, {"prompt": messages, "answer": "a"})
    with pytest.raises(ConfigError, match="line 2: ") as caught:
        loaded(data, SUITE.format(path="c.jsonl", more="") + 'prompt_format = "chat"\n')
    assert told in str(caught.value)


def test_a_change_of_the_users_function_changes_the_digest(data: Path) -> None:
    text = SUITE.format(path="d.jsonl", more="") + 'scorer = { name = "function", function = "mine:score" }\n'
    before = loaded(data, text)
    (data / "mine.py").write_text("def score(output, answer):\n    return 0.0\n")
    shutil.rmtree(data / "__pycache__", ignore_errors=True)
    assert loaded(data, text).digest != before.digest


def test_what_a_model_wrote_is_run_only_where_the_service_allows_it_and_judges_need_their_group(tmp_path: Path) -> None:
    suites = load_suites(EXAMPLES / "suites.toml")

    def check(name: str, *, allow: bool, groups: dict[str, Any]) -> None:
        model = {"model": str(tmp_path), "num_gpus_per_engine": 0}
        table = {
            "service": {"roots": [str(tmp_path)], "allow_code": allow},
            "groups": {"eval": model, **{group: model | more for group, more in groups.items()}},
        }
        check_suites({name: suites[name]}, FleetConfig.model_validate(table))

    with pytest.raises(ConfigError, match="allow_code = true"):
        check("code", allow=False, groups={})
    check("code", allow=True, groups={})
    with pytest.raises(ConfigError, match="no frozen group 'judge'"):
        check("judged", allow=False, groups={})
    check("judged", allow=False, groups={"judge": {"kind": "frozen"}})
