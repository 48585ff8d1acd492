"""The scorer pool: one sample's misbehaviour is its own error, and nothing outlives the pool."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from eval_service.demo import tiny
from eval_service.suites import scoring
from eval_service.suites.chat import NoTemplate, chat_options
from eval_service.suites.scorers import SCORERS, scorer
from eval_service.suites.scoring import Score, ScorerCall, ScorerPool, ScorerPoolFailed
from eval_service.suites.turns import Caller, Turns

pytestmark = pytest.mark.anyio
_BAD = "tests.support.bad_scorers"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def pool() -> Iterator[ScorerPool]:
    made = ScorerPool(2, 10.0, [_BAD])
    yield made
    made.close()


@pytest.mark.parametrize(
    ("name", "output", "answer", "value"),
    [
        ("exact", " abc\n", "abc", 1.0),
        ("exact", "abc d", "abc", 0.0),
        ("exact", "ABC", "abc", 0.0),
        ("exact", "", "abc", 0.0),
        ("contains", "it is abc.", "abc", 1.0),
        ("contains", "it is ab", "abc", 0.0),
    ],
)
def test_what_the_scorers_say(name: str, output: str, answer: str, value: float) -> None:
    assert SCORERS[name].function(output, answer) == value


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ValueError, match="'exact'"):
        scorer("exact", metric="m")(lambda output, answer: 0.0)


async def test_order_and_length_are_kept_over_chunks_and_processes(pool: ScorerPool) -> None:
    outputs = [str(i) for i in range(300)]
    answers = [str(i) if i % 3 == 0 else "no" for i in range(300)]
    scores = await pool.score("exact", outputs, answers)
    assert [score.value for score in scores] == [float(i % 3 == 0) for i in range(300)]
    assert await pool.score("exact", [], []) == []


async def test_text_of_any_kind_gets_there_and_back(pool: ScorerPool) -> None:
    outputs = ["\x00\n\u2028", "好", "\ud800", "x" * 1_000_000]
    assert await pool.score("exact", outputs, outputs) == [Score(1.0)] * 4


@pytest.mark.parametrize(
    ("name", "error"),
    [("raises_on_bad", "ValueError: can't score this"), ("exits_on_bad", "the scorer's process ended (7)")],
)
async def test_a_scorer_that_raises_or_exits_is_that_samples_error(pool: ScorerPool, name: str, error: str) -> None:
    scores = await pool.score(name, ["a", "bad", "b", "bad", "c"], [""] * 5)
    assert scores == [Score(1.0), Score(None, error), Score(1.0), Score(None, error), Score(1.0)]


async def test_an_answer_that_no_extractor_finds_scores_0_and_is_told_apart(pool: ScorerPool) -> None:
    scores = await pool.score("unparsed_on_bad", ["a", "bad"], ["", ""])
    assert scores == [Score(1.0), Score(0.0, unparsed=True)]


async def test_sys_exit_nan_and_an_unknown_name_are_errors_of_the_sample(pool: ScorerPool) -> None:
    assert await pool.score("exits_on_bad", ["sys.exit", "a"], ["", ""]) == [Score(None, "SystemExit: 3"), Score(1.0)]
    assert await pool.score("nan", ["a"], [""]) == [Score(None, "the scorer returned nan")]
    assert (await pool.score("nobody", ["a"], [""]))[0].error == "KeyError: 'nobody'"


async def test_a_scorer_that_hangs_delays_only_itself() -> None:
    pool = ScorerPool(2, 60.0, [_BAD])
    try:
        stuck = asyncio.create_task(pool.score("hangs_on_bad", ["bad"], [""]))
        assert await pool.score("exact", ["a"], ["a"]) == [Score(1.0)]
        assert not stuck.done()
        hasty = ScorerCall("hangs_on_bad", timeout_s=2.0)
        scores = await pool.score(hasty, ["a", "bad", "b"], [""] * 3)
        assert scores == [Score(1.0), Score(None, "no score within 2 s"), Score(1.0)]
        stuck.cancel()
        await asyncio.wait((stuck,))
    finally:
        pool.close()


async def test_a_scorer_that_hangs_on_all_of_a_points_samples_holds_up_no_other_point_in_a_pool_of_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("eval_service.suites.turns.STUCK_S", 0.1)
    pool = ScorerPool(1, 60.0, [_BAD])
    try:
        stuck = asyncio.create_task(pool.score("hangs_on_bad", ["bad"] * 200, [""] * 200))
        others = [pool.score("exact", ["a"] * 100, ["a"] * 100) for _ in range(2)]
        assert await asyncio.gather(*others) == [[Score(1.0)] * 100] * 2
        assert not stuck.done()
        stuck.cancel()
        await asyncio.wait((stuck,))
    finally:
        pool.close()


async def test_samples_of_many_points_take_turns() -> None:
    """The first of them has much to score, and does not go first with all of it."""
    turns, served = Turns(1), list[Caller]()
    many, few = Caller(), Caller()

    async def score(caller: Caller) -> None:
        await turns.take(caller)
        served.append(caller)
        await asyncio.sleep(0)
        turns.give_back(caller)

    await asyncio.gather(*(score(caller) for caller in (many, many, many, few, few)))
    assert served == [many, few, many, few, many]


async def test_one_that_gives_up_as_its_turn_comes_gives_it_back() -> None:
    turns, first, second = Turns(1), Caller(), Caller()
    await turns.take(first)
    leaves = asyncio.create_task(turns.take(second))
    await asyncio.sleep(0)
    turns.give_back(first)
    leaves.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaves
    await asyncio.wait_for(turns.take(first), 30)


async def test_one_that_gave_up_just_before_its_turn_came_takes_none() -> None:
    turns, first, second = Turns(1), Caller(), Caller()
    await turns.take(first)
    leaves = asyncio.create_task(turns.take(second))
    await asyncio.sleep(0)
    leaves.cancel()
    turns.give_back(first)  # before the task of the other has run again
    with pytest.raises(asyncio.CancelledError):
        await leaves
    assert second.at_work == 0
    await asyncio.wait_for(turns.take(first), 30)


async def test_a_process_that_died_idle_is_replaced_and_blames_nobody(pool: ScorerPool) -> None:
    [first] = await pool.score("pid", ["a"], [""])
    assert first.value is not None
    os.kill(int(first.value), signal.SIGKILL)
    assert await pool.score("exact", ["a"], ["a"]) == [Score(1.0)]


async def test_a_scorer_that_closes_its_socket_and_goes_on_is_that_samples_error(
    pool: ScorerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "_EXIT_S", 0.1)
    scores = await pool.score("deaf_on_bad", ["a", "bad", "b"], [""] * 3)
    assert scores == [Score(1.0), Score(None, f"the scorer's process ended ({-signal.SIGKILL})"), Score(1.0)]


async def test_a_process_that_does_not_read_is_replaced_and_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "_MESSAGE_S", 0.2)
    pool = ScorerPool(1, 10.0, [_BAD])
    try:
        (pid,) = await pool.score("pid", ["a"], [""])
        monkeypatch.undo()  # the one that takes its place has all the time that it needs
        os.kill(int(pid.value or 0), signal.SIGSTOP)
        much = "x" * (8 << 20)
        assert await pool.score("exact", [much], [much]) == [Score(1.0)]
        assert len(pool._all) == 1
    finally:
        pool.close()


async def test_close_ends_the_processes_and_what_they_are_at() -> None:
    pool = ScorerPool(1, 60.0, [_BAD])
    [process] = await pool.score("pid", ["a"], [""])
    stuck = asyncio.create_task(pool.score("hangs_on_bad", ["bad", "b"], ["", ""]))
    for _ in range(3):
        await asyncio.sleep(0)  # until a thread has it
    pool.close()
    with pytest.raises((ScorerPoolFailed, asyncio.CancelledError)):
        await stuck
    with pytest.raises(ScorerPoolFailed, match="closed"):
        await pool.score("exact", ["a"], ["a"])
    assert process.value is not None
    with pytest.raises(ProcessLookupError):
        os.kill(int(process.value), 0)


async def test_a_module_that_can_not_be_imported_is_no_samples_error() -> None:
    pool = ScorerPool(1, 10.0, ["no.such.module"])
    try:
        with pytest.raises(ScorerPoolFailed, match="did not start"):
            await pool.score("exact", ["a"], ["a"])
    finally:
        pool.close()


@pytest.mark.parametrize(("processes", "timeout_s", "name"), [(0, 1.0, "processes"), (1, 0.0, "timeout_s")])
def test_a_pool_that_could_do_nothing_is_refused_by_name(processes: int, timeout_s: float, name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: "):
        ScorerPool(processes, timeout_s)


async def test_64_samples_of_an_async_scorer_that_waits_are_scored_together(pool: ScorerPool) -> None:
    """Each takes 1 s; one after another they would take more than a minute."""
    call = ScorerCall("waits", {"seconds": 1.0})
    await pool.score(ScorerCall("waits", {"seconds": 0.0}), [""], [""])
    began = time.monotonic()
    scores = await pool.score(call, [str(i) for i in range(64)], [""] * 64)
    took_s = time.monotonic() - began
    assert scores == [Score(1.0, more={"beside": 0.5})] * 64
    assert took_s < 30, "they did not run together"


async def test_an_async_scorer_that_raises_waits_or_exits_is_that_samples_error_and_no_other_ones() -> None:
    pool = ScorerPool(2, 3.0, [_BAD])
    try:
        outputs = ["a", "raise", "b", "wait", "unparsed", "sys.exit", "c"]
        scores = await pool.score("async_bad", outputs, [""] * 7)
        assert [score.error for score in scores] == [
            *(None, "ValueError: can't score this", None, "no score within 3 s", None, "SystemExit: 3", None)
        ]
        assert [score.unparsed for score in scores] == [False] * 4 + [True] + [False] * 2
        scores = await pool.score("async_bad", ["a", "exit", "b"], [""] * 3)
        assert [score.error for score in scores] == [None, "the scorer's process ended (7)", None]
        scores = await pool.score("async_bad", ["a", "hang"], [""] * 2)
        assert [score.error for score in scores] == [None, "no score within 3 s"]
    finally:
        pool.close()


async def test_a_scorer_has_a_timeout_of_its_own(pool: ScorerPool) -> None:
    [score] = await pool.score(ScorerCall("waits", {"seconds": 9.0}, timeout_s=0.2), [""], [""])
    assert score.error == "no score within 0.2 s"


CHATS = [[{"role": "user", "content": "2+2?"}], [{"role": "user", "content": "bad"}]]


def _snapshot(path: Path, template: str | None) -> Path:
    tokenizer = tiny.build_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    return path


@pytest.mark.parametrize(
    "template",
    [
        tiny.CHAT_TEMPLATE,
        "{{ eos_token }}{% for m in messages %}\n"
        "  {% generation %}{{ m.content | tojson }}{% endgeneration %}\n{% break %}"
        "{% endfor %}{% if add_generation_prompt %}>{% endif %}",
    ],
)
async def test_chat_messages_are_rendered_as_transformers_renders_them(
    pool: ScorerPool, tmp_path: Path, template: str
) -> None:
    snapshot = _snapshot(tmp_path, template)
    found = await pool.render(chat_options(snapshot), [json.dumps(chat) for chat in CHATS])
    tokenizer = tiny.build_tokenizer()
    tokenizer.chat_template = template
    for chat, rendered in zip(CHATS, found, strict=True):
        assert rendered.text == tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(rendered.ids, skip_special_tokens=False) == rendered.text


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{% if messages[0].content == 'bad' %}{{ raise_exception('no such role') }}{% endif %}x", "no such role"),
        ("{% if messages[0].content == 'bad' %}{{ ''.__class__.__mro__ }}{% endif %}x", "is unsafe"),
        ("{% if messages[0].content == 'bad' %}{{ range(999999999) | list }}{% endif %}x", "OverflowError"),
    ],
)
async def test_what_a_template_refuses_or_may_not_do_is_that_prompts_error(
    pool: ScorerPool, tmp_path: Path, template: str, told: str
) -> None:
    good, bad = await pool.render(chat_options(_snapshot(tmp_path, template)), [json.dumps(chat) for chat in CHATS])
    assert (good.text, good.error) == ("x", None)
    assert told in str(bad.error)


def test_a_snapshot_without_a_template_or_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(NoTemplate, match="has no chat template"):
        chat_options(_snapshot(tmp_path, None))
    (tmp_path / "chat_template.jinja").write_text("x")
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(NoTemplate, match="has no tokenizer"):
        chat_options(tmp_path)
