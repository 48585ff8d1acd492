"""Chat data: what is learnt, and in which order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eval_service.contract.errors import ConfigError
from trainer.data import Dataset, Example, collate, encode, load_dataset, pack
from trainer.parallel import Place, share_of

EOS = "$"


class CharTokenizer:
    """A token a character; `tail` follows the EOS, and `eos` may be left out of the template."""

    eos_token: str | None = EOS
    eos_token_id: int | None = ord(EOS)

    def __init__(self, *, eos: str = EOS, tail: str = "\n", forgetful: bool = False) -> None:
        self._eos, self._tail, self._forgetful = eos, tail, forgetful

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        assert not options["tokenize"]
        shown = conversation[-1:] if self._forgetful else conversation
        text = "".join(
            f"{m['role'][0]}>{m['content']}{self._eos + self._tail if m['role'] == 'assistant' else ''}" for m in shown
        )
        return text + ("a>" if options["add_generation_prompt"] else "")

    def __call__(self, text: str, **_: Any) -> dict[str, Any]:
        return {
            "input_ids": [ord(char) for char in text],
            "offset_mapping": [(index, index + 1) for index in range(len(text))],
        }


def _chat(*contents: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[index % 2], "content": content} for index, content in enumerate(contents)]


def _learnt(example: Example) -> str:
    return "".join(chr(token) for token, mark in zip(example.token_ids, example.learn, strict=True) if mark)


def test_only_the_assistants_tokens_and_the_eos_are_learnt() -> None:
    example = encode(_chat("q1", "x1", "q2", "x2"), CharTokenizer(), 100)
    assert _learnt(example) == "x1$x2$"
    assert "".join(map(chr, example.token_ids)) == "u>q1a>x1$\nu>q2a>x2$\n"


def test_a_template_without_an_eos_gets_one_to_learn() -> None:
    example = encode(_chat("q", "x"), CharTokenizer(eos="", tail="\n"), 100)
    assert _learnt(example).endswith("$")
    assert example.token_ids[-1] == ord(EOS)


def test_a_conversation_is_cut_at_max_length() -> None:
    example = encode(_chat("q", "xyz"), CharTokenizer(), 7)
    assert len(example.token_ids) == len(example.learn) == 7
    assert _learnt(example) == "xy"


def test_a_template_that_forgets_is_refused() -> None:
    with pytest.raises(ValueError, match="beginning otherwise"):
        encode(_chat("q", "x", "q2", "x2"), CharTokenizer(forgetful=True), 100)


def test_labels_are_the_next_tokens_and_padding_never_counts() -> None:
    batch = collate([Example((1, 2, 3), (False, True, True)), Example((4, 5), (False, True))])
    assert batch.token_ids.tolist() == [[1, 2], [4, 5]]
    assert batch.labels.tolist() == [[2, 3], [5, 0]]
    assert batch.loss_mask.tolist() == [[1.0, 1.0], [1.0, 0.0]]
    assert batch.position_ids.tolist() == [[0, 1], [0, 1]]


def _dataset(count: int = 10, size: int = 3, seed: int = 0) -> Dataset:
    return Dataset([Example((index, index), (True, True)) for index in range(count)], seed, size)


def _ids(examples: list[Example]) -> list[int]:
    return [example.token_ids[0] for example in examples]


def test_an_epoch_sees_no_conversation_twice_and_the_next_is_ordered_otherwise() -> None:
    data = _dataset()
    assert data.steps_per_epoch == 3
    first, second = ([i for step in steps for i in _ids(data.of_step(step))] for steps in ((1, 2, 3), (4, 5, 6)))
    assert len(set(first)) == len(set(second)) == 9
    assert first != second


def test_a_step_has_the_same_conversations_however_the_run_came_there() -> None:
    assert _ids(_dataset().of_step(5)) == _ids(_dataset().of_step(5))
    assert _ids(_dataset(seed=1).of_step(5)) != _ids(_dataset().of_step(5))


def test_a_batch_is_padded_to_the_length_that_all_stages_agree_on() -> None:
    batch = collate(_dataset(size=4).of_step(1)[:2], length=7)
    assert batch.token_ids.shape == batch.labels.shape == batch.loss_mask.shape == (2, 7)
    assert batch.loss_mask[:, 1:].sum() == 0


def test_data_parallel_ranks_share_a_step_out_in_order() -> None:
    places = [Place(0, 1, data, 2, True, True) for data in (0, 1)]
    assert [list(share_of([1, 2, 3, 4], place)) for place in places] == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2"),
        ("[]", "no messages"),
        ('{"messages": []}', "no messages"),
        ('{"messages": [{"role": "robot", "content": "x"}]}', "role"),
        ('{"messages": [{"role": "user"}]}', "content"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps({"messages": _chat("q", "x")}) + "\n" + line + "\n")
    with pytest.raises(ConfigError, match=message) as caught:
        load_dataset(path, CharTokenizer(), max_length=50, seed=0, global_batch_size=1)
    assert "line 2" in str(caught.value)
    assert caught.value.field == "data.train"


def test_fewer_conversations_than_a_batch_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(json.dumps({"messages": chat}) for chat in (_chat("q", "x"), _chat("only asked"))))
    with pytest.raises(ConfigError, match="1 conversations"):
        load_dataset(path, CharTokenizer(), max_length=50, seed=0, global_batch_size=2)


def conversations(count: int) -> list[Example]:
    """Of 3 to 9 tokens, each token a number of its own; all but the first two are learnt."""
    sizes = [3 + 5 * number % 7 for number in range(count)]
    return [
        Example(tuple(range(100 * number, 100 * number + size)), tuple(position > 1 for position in range(size)))
        for number, size in enumerate(sizes)
    ]


def test_packed_rows_hold_every_conversation_once_and_whole_and_none_is_too_long() -> None:
    examples = conversations(40)
    rows = pack(examples, 16, seed=1)
    assert pack(examples, 16, seed=1) == rows
    assert pack(examples, 16, seed=2) != rows
    assert max(len(row.token_ids) for row in rows) <= 16
    assert len(rows) < 20
    ends = [(*row.starts[1:], len(row.token_ids)) for row in rows]
    parts = [
        row.token_ids[a:b] for row, end in zip(rows, ends, strict=True) for a, b in zip(row.starts, end, strict=True)
    ]
    assert sorted(parts) == [example.token_ids for example in examples]


def test_in_a_packed_batch_positions_begin_anew_and_no_token_sees_another_conversation() -> None:
    first, second = Example((5, 6, 7), (True, True, True)), Example((8, 9), (True, True))
    (row,) = pack([first, second], 5, seed=0)
    batch = collate([row, first], length=6)
    assert row.starts == (0, 2) if row.token_ids[0] == 8 else (0, 3)
    cut = row.starts[1]
    assert batch.position_ids[0].tolist() == [*range(cut), *range(5 - cut), 0]
    assert batch.position_ids[1].tolist() == [0, 1, 2, 0, 1, 2]
    visible = batch.visible()
    assert visible is not None
    for i in range(6):
        seen = {j for j in range(6) if visible[0, 0, i, j]}
        begin = 0 if i < cut else cut if i < 5 else 5
        assert seen == set(range(begin, i + 1))
    assert batch.loss_mask[0].tolist() == [float(index + 1 not in (cut, 5, 6)) for index in range(6)]


def test_a_batch_of_rows_with_one_conversation_each_needs_no_mask() -> None:
    assert collate(conversations(3)).visible() is None


def test_what_decides_the_order_of_the_data_is_told() -> None:
    dataset = Dataset(pack(conversations(40), 16, seed=1), seed=1, global_batch_size=4)
    assert dataset.identity == {
        "seed": 1,
        "global_batch_size": 4,
        "rows": len(dataset.examples),
        "conversations": 40,
    }
