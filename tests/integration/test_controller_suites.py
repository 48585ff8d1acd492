"""What a point of each kind of suite is asked and how it is scored, by a real controller on fake engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval_service.contract.results import AlarmKind
from eval_service.contract.states import PointState, Reason
from eval_service.engine.fake import fake_logprobs
from eval_service.suites.suite import load_suites
from tests.support.bounded import go
from tests.support.controller_stand import SUITE, Stand


def stand_with(root: Path, rows: list[dict[str, object]], more: str, *, frozen: bool = False) -> Stand:
    """A stand whose only suite asks these rows."""
    stand = Stand(root, frozen=frozen)
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "own.toml").write_text(
        f'[suites.{SUITE}]\n{more}\ndatasets = [{{ name = "all", path = "rows.jsonl" }}]\n'
        "sampling = { max_new_tokens = 16 }\n"
    )
    stand.suites.update(load_suites(root / "own.toml"))
    return stand


def test_choices_are_told_apart_by_the_log_likelihood_of_their_own_tokens(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"prompt": f"a question {n}: ", "choices": ["yes", "no, never"], "answer": n % 2} for n in range(8)
    ]
    stand = stand_with(tmp_path, rows, 'scorer = "multiple_choice"')

    async def body() -> None:
        async with stand.running(2):
            await stand.until_ready()
            stand.put_run("r")
            export = stand.export("r", 1)
            [view] = await stand.until_ended(stand.dispatch("r", 1, export))
            assert view.state is PointState.DONE, view.detail
            assert {"acc", "acc_norm", "all/acc_norm"} <= set(view.metrics)
            for row, sample in zip(rows, stand.samples(view.id), strict=True):
                told = json.loads(sample.note or "")
                for choice in ("yes", "no, never"):
                    whole = list(f"{row['prompt']}{choice}".encode())
                    own = fake_logprobs(export.manifest.tensor_digest, whole)[-len(choice) - 1 :]
                    assert told[choice] == pytest.approx(sum(own)), "white space before it is the choice's"
                assert sample.output == max(told, key=told.__getitem__)
                assert sample.score == float(sample.output == sample.answer)
                assert set(sample.more) == {"acc_norm"}

    go(body)


JUDGE = (
    'scorer = {{ name = "judge", group = "judge", template = "{{output}}?", '
    'verdict = "{}", scale = 9, timeout_s = {} }}'
)
ROWS: list[dict[str, object]] = [{"prompt": f"p{n}", "answer": ""} for n in range(8)]


def test_a_judge_of_a_frozen_group_says_how_good_each_output_is(tmp_path: Path) -> None:
    stand = stand_with(tmp_path, ROWS, JUDGE.format("[0-9]", 60) + "\nmax_error_rate = 1.0", frozen=True)

    async def body() -> None:
        async with stand.running(1):
            stand.start_engine("j", group="judge")
            await stand.until_ready()
            stand.put_run("r")
            [view] = await stand.until_ended(stand.dispatch("r", 1))
            assert view.state is PointState.DONE, view.detail
            for sample in stand.samples(view.id):
                digits = [char for char in sample.note or "" if char.isdecimal()]
                assert sample.score == (int(digits[-1]) / 9 if digits else None)
                assert (sample.error is None) == bool(digits)

    go(body)


def test_a_judge_that_is_not_there_is_each_samples_error_and_holds_up_nothing_else(tmp_path: Path) -> None:
    stand = stand_with(tmp_path, ROWS, JUDGE.format("x", 0.5), frozen=True)

    async def body() -> None:
        async with stand.running(1):
            await stand.until_ready()
            stand.put_run("r")
            [view] = await stand.until_ended(stand.dispatch("r", 1))
            assert (view.state, view.reason, view.attempts) == (PointState.FAILED, Reason.ERROR_RATE, 1)
            assert "the judge did not answer" in (view.detail or "")

    go(body)


def test_a_chat_suite_skips_a_snapshot_without_a_template_and_says_why(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"prompt": [{"role": "user", "content": "q"}], "answer": "a"}]
    stand = stand_with(tmp_path, rows, 'prompt_format = "chat"')

    async def body() -> None:
        async with stand.running(1):
            await stand.until_ready()
            stand.put_run("r")
            [view] = await stand.until_ended(stand.dispatch("r", 1))
            assert (view.state, view.reason) == (PointState.SKIPPED, Reason.SNAPSHOT_INVALID)
            assert "has no chat template" in (view.detail or "")

    go(body)


def test_data_that_changes_between_two_points_while_the_service_lives_is_told_and_nothing_is_lost_by_it(
    tmp_path: Path,
) -> None:
    stand = stand_with(tmp_path, ROWS, 'scorer = "exact"')
    rows = tmp_path / "rows.jsonl"

    async def body() -> None:
        async with stand.running(1):
            await stand.until_ready()
            stand.put_run("r")
            [before] = await stand.until_ended(stand.dispatch("r", 1))
            rows.write_text(rows.read_text())  # written again, with the same bytes
            [again] = await stand.until_ended(stand.dispatch("r", 2))
            rows.write_text('{"prompt": "another one", "answer": ""}\n')
            [after] = await stand.until_ended(stand.dispatch("r", 3))
            rows.unlink()
            [gone] = await stand.until_ended(stand.dispatch("r", 4))
        assert (before.alarms, again.alarms) == ((), ())
        (told,), (missing,) = after.alarms, gone.alarms
        assert told.kind is missing.kind is AlarmKind.SUITE_STALE
        assert told.message.startswith(f"{rows} has changed since the service read it; this point was asked")
        assert told.evidence["was"] != told.evidence["is"]
        assert missing.message.startswith(f"{rows} is gone since")
        for view in (after, gone):
            assert (view.state, view.suite_digest) == (PointState.DONE, before.suite_digest), view.detail
            assert [sample.prompt for sample in stand.samples(view.id)] == [row["prompt"] for row in ROWS]

    go(body)
