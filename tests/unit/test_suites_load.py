"""Suite files: what is wrong is found at load, with its line and key; what is loaded has a digest of what it asks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eval_service.contract.errors import ConfigError
from eval_service.suites.config import attempts_told
from eval_service.suites.suite import Suite, load_suites

GOOD = """\
[suites.letters]
scorer = "exact"
max_error_rate = 0.1

[suites.letters.sampling]
max_new_tokens = 16
stop = ["\\n"]

[[suites.letters.datasets]]
name = "reverse"
path = "reverse.jsonl"

[[suites.letters.datasets]]
name = "sort"
path = "data/sort.jsonl"
prompt = "question"
limit = 3
seed = 1
"""


def _jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_prompts_that_need_a_chat_template_are_refused_in_a_rendered_suite_and_the_reverse(
    file: Path, tmp_path: Path
) -> None:
    """The model would be asked in a form that it was never trained on, and the curve would look like a bad model."""
    file.write_text(GOOD.replace('scorer = "exact"', 'scorer = "exact"\nprompt_format = "chat"'))
    fault = _fault(file)
    assert fault.field == "suites.letters.datasets.0"
    assert "holds a text, and the suite asks chat messages" in fault.message
    file.write_text(GOOD)
    _jsonl(tmp_path / "reverse.jsonl", [{"prompt": [{"role": "user", "content": "q"}], "answer": "a"}])
    fault = _fault(file)
    assert fault.field == "suites.letters.datasets.0"
    assert "holds chat messages" in fault.message
    assert "chat template" in str(fault.hint)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    _jsonl(tmp_path / "reverse.jsonl", [{"prompt": f"r{i}", "answer": f"{i}", "extra": i} for i in range(4)])
    _jsonl(tmp_path / "data" / "sort.jsonl", [{"question": f"s{i}", "answer": f"{i}"} for i in range(10)])
    path = tmp_path / "suites.toml"
    path.write_text(GOOD)
    return path


def _only(path: Path) -> Suite:
    [suite] = load_suites(path).values()
    assert isinstance(suite, Suite)
    return suite


def _fault(path: Path) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_suites(path)
    return caught.value


def test_prompts_are_numbered_over_the_suite_and_drawn_with_the_seed(file: Path) -> None:
    suite = _only(file)
    prompts = suite.prompts()
    assert [prompt.index for prompt in prompts] == list(range(7))
    assert [prompt.dataset for prompt in prompts] == ["reverse"] * 4 + ["sort"] * 3
    assert (prompts[0].text, prompts[0].answer, prompts[0].ids) == ("r0", "0", None)
    drawn = [int(prompt.answer) for prompt in prompts[4:]]
    assert drawn == sorted(set(drawn))
    assert _only(file).prompts() == prompts
    assert (suite.headline, suite.scorer, suite.sampling.stop) == ("exact_match", "exact", ("\n",))


def test_another_seed_draws_other_rows(file: Path) -> None:
    before = _only(file).prompts()
    file.write_text(GOOD.replace("seed = 1", "seed = 2"))
    assert _only(file).prompts() != before


def test_the_digest_is_of_what_is_asked_and_not_of_where_it_lies(file: Path, tmp_path: Path) -> None:
    digest = _only(file).digest
    moved = tmp_path / "elsewhere" / "suites.toml"
    for name in ("reverse.jsonl", "data/sort.jsonl"):
        (moved.parent / name).parent.mkdir(parents=True, exist_ok=True)
        (moved.parent / name).write_bytes((tmp_path / name).read_bytes())
    (moved.parent / "reverse.jsonl").rename(moved.parent / "r.jsonl")
    moved.write_text("# a comment\n" + GOOD.replace("reverse.jsonl", "r.jsonl"))
    assert _only(moved).digest == digest


@pytest.mark.parametrize(
    ("old", "new"),
    [("max_new_tokens = 16", "max_new_tokens = 17"), ('"exact"', '"contains"'), ("seed = 1", "seed = 2")],
)
def test_whatever_changes_the_question_changes_the_digest(file: Path, old: str, new: str) -> None:
    digest = _only(file).digest
    file.write_text(GOOD.replace(old, new))
    assert _only(file).digest != digest


def test_a_byte_of_a_dataset_changes_the_digest(file: Path, tmp_path: Path) -> None:
    digest = _only(file).digest
    _jsonl(tmp_path / "reverse.jsonl", [{"prompt": f"r{i}", "answer": "x"} for i in range(4)])
    assert _only(file).digest != digest


@pytest.mark.parametrize(
    ("old", "new", "line", "field", "told"),
    [
        ("seed = 1", "sed = 1", 18, "suites.letters.datasets.1.sed", "unknown key"),
        ("max_error_rate", "max_errors", 3, "suites.letters.max_errors", "unknown key"),
        ("max_new_tokens = 16", "max_new_tokens = 0", 6, "suites.letters.sampling.max_new_tokens", "greater than"),
        ("limit = 3", "limit = 0", 17, "suites.letters.datasets.1.limit", "greater than"),
        (
            'scorer = "exact"',
            'scorer = "exakt"',
            2,
            "suites.letters.scorer",
            "there are chrf, code, contains, exact, function,",
        ),
        ('name = "sort"', 'name = "reverse"', 1, "suites.letters.datasets", "'reverse' is used twice"),
        ('scorer = "exact"', 'metric = "f1"', 2, "suites.letters.metric", "there are exact_match, reverse/exact_match"),
        ('path = "data/sort.jsonl"', 'path = "gone.jsonl"', 15, "suites.letters.datasets.1.path", "gone.jsonl"),
        ("limit = 3", 'answer = "label"', 13, "suites.letters.datasets.1", "line 1: no column 'label' (it has answer"),
    ],
)
def test_a_mistake_is_named_with_line_and_key(file: Path, old: str, new: str, line: int, field: str, told: str) -> None:
    file.write_text(GOOD.replace(old, new))
    fault = _fault(file)
    assert (fault.field, told in str(fault)) == (field, True), str(fault)
    assert fault.message.startswith(f"line {line}: ")


def test_lines_are_found_in_inline_tables_and_never_in_a_neighbour(file: Path) -> None:
    file.write_text(
        """\
[suites.one]
datasets = [
  {name = "a", path = "reverse.jsonl"},
  {name = "b"},
  {name = "c", path = "reverse.jsonl", limit = 0},
]

[suites.two]
datasets = [{name = "a", path = "reverse.jsonl"}]
"""
    )
    fault = _fault(file)
    assert (fault.field, fault.message.split(":")[0]) == ("suites.one.datasets.1.path", "line 4")
    file.write_text(file.read_text().replace('{name = "b"}', '{name = "b", path = "reverse.jsonl"}'))
    fault = _fault(file)
    assert (fault.field, fault.message.split(":")[0]) == ("suites.one.datasets.2.limit", "line 5")


def test_broken_toml_and_no_file_and_no_suites_are_told(tmp_path: Path) -> None:
    path = tmp_path / "suites.toml"
    assert "can't be read" in str(_fault(path))
    path.write_text("[suites.a]\nscorer = \n")
    assert "line 2" in str(_fault(path))
    path.write_text("suites = {}\n")
    assert _fault(path).field == "suites"


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        ('{"prompt": "a", "answer": "b"}\n{"prompt": "a"}\n', "line 2: no column 'answer' (it has prompt)"),
        ('{"prompt": "a", "answer": "b"}\n\n{"prompt": "a", "answer": 3}\n', "line 3: column 'answer' holds int"),
        ('{"prompt": "a", "answer": "b"}\n{"prompt": \n', "line 2: not JSON"),
        ('["a"]\n', "line 1: not a JSON object"),
        ('{"prompt": "\\ud800", "answer": "b"}\n', "line 1: column 'prompt' holds half a surrogate pair"),
    ],
)
def test_a_faulty_dataset_is_named_with_its_line(file: Path, tmp_path: Path, rows: str, told: str) -> None:
    (tmp_path / "reverse.jsonl").write_text(rows)
    assert told in str(_fault(file))


def test_a_row_that_limit_leaves_out_is_checked_too(file: Path, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"question": "s", "answer": "1"} for _ in range(50)]
    _jsonl(tmp_path / "data" / "sort.jsonl", [*rows, {"question": "s"}])
    assert "line 51: no column 'answer'" in str(_fault(file))


def test_token_ids_are_a_column_of_their_own(file: Path, tmp_path: Path) -> None:
    file.write_text(GOOD.replace('path = "reverse.jsonl"', 'path = "reverse.jsonl"\nprompt_ids = "ids"'))
    _jsonl(tmp_path / "reverse.jsonl", [{"ids": [1, 2], "answer": "a"}, {"ids": [3], "answer": "b", "prompt": "shown"}])
    first, second = _only(file).prompts()[:2]
    assert (first.ids, first.text, second.ids, second.text) == ((1, 2), "", (3,), "shown")
    for bad in ([], "12", [1, "2"], [True], [1.5]):
        _jsonl(tmp_path / "reverse.jsonl", [{"ids": bad, "answer": "a"}])
        assert "line 1: column 'ids' is no list of token ids" in str(_fault(file))


SAMPLED = GOOD.replace("max_new_tokens = 16", "max_new_tokens = 16\nn = 3\ntemperature = 0.7")


def test_every_sample_of_a_prompt_has_a_place_and_a_seed_of_its_own(file: Path) -> None:
    file.write_text(SAMPLED)
    suite = _only(file)
    asks = list(suite.asks())
    assert [ask.index for ask in asks] == list(range(suite.size)) == list(range(21))
    assert [(ask.prompt.index, ask.sample) for ask in asks[:4]] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    seeds = [ask.seed for ask in asks]
    assert len(set(seeds)) == 21
    assert all(seed is not None and 0 <= seed < 2**31 for seed in seeds)
    assert [ask.seed for ask in _only(file).asks()] == seeds, "the same whenever it is made"


def test_another_seed_of_the_suite_gives_every_sample_another_one(file: Path) -> None:
    file.write_text(SAMPLED)
    before = _only(file)
    file.write_text(SAMPLED.replace("n = 3", "n = 3\nseed = 1"))
    after = _only(file)
    assert not {ask.seed for ask in before.asks()} & {ask.seed for ask in after.asks()}
    assert before.digest != after.digest


def test_greedy_samples_need_no_seed_and_there_is_one_a_prompt(file: Path) -> None:
    assert {(ask.sample, ask.seed) for ask in _only(file).asks()} == {(0, None)}


def test_several_greedy_samples_are_refused_since_they_are_all_the_same(file: Path) -> None:
    file.write_text(GOOD.replace("max_new_tokens = 16", "max_new_tokens = 16\nn = 4"))
    fault = _fault(file)
    assert (fault.field, "temperature above 0" in str(fault)) == ("suites.letters.sampling", True)


@pytest.mark.parametrize(("n", "told"), [(1, [1]), (2, [1, 2]), (5, [1, 2, 4, 5]), (8, [1, 2, 4, 8])])
def test_pass_at_k_is_told_at_powers_of_two_and_at_n(n: int, told: list[int]) -> None:
    assert list(attempts_told(n)) == told


def test_a_headline_may_be_any_metric_that_there_will_be(file: Path) -> None:
    file.write_text(SAMPLED.replace("[suites.letters]", '[suites.letters]\nmetric = "sort/pass@2"\ndirection = "min"'))
    assert (_only(file).headline, _only(file).config.direction) == ("sort/pass@2", "min")
    file.write_text(SAMPLED.replace("[suites.letters]", '[suites.letters]\nmetric = "pass@8"'))
    assert "there are exact_match, pass@1, pass@2, pass@3, pass^2, pass^3, avg@3, reverse/" in str(_fault(file))


@pytest.mark.parametrize("line", ['metric = "sort/exact_match"', 'direction = "min"', "max_error_rate = 0.2"])
def test_what_is_made_of_the_scores_leaves_points_comparable(file: Path, line: str) -> None:
    digest = _only(file).digest
    file.write_text(GOOD.replace("max_error_rate = 0.1", line))
    assert _only(file).digest == digest
