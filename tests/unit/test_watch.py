"""A directory that a trainer fills: what is taken, when, and that nothing is taken twice."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from eval_service.cli import main, options
from eval_service.contract.errors import InvalidRequest, Unavailable
from eval_service.contract.states import PointState, Reason
from eval_service.contract.wire import Kind, Source
from eval_service.ledger.schema import points
from eval_service.watch.completion import Rule
from eval_service.watch.steps import compile_pattern, parse_steps, step_of
from eval_service.watch.watcher import Asked, Watcher, gaps
from tests.support.paper_service import PaperService
from tests.support.tiny_snapshots import lay_out, publish, tiny


@dataclass
class Stand:
    """A service, a trainer's directory, and time that a test turns."""

    service: PaperService
    directory: Path
    monotonic: float = 0.0
    said: list[str] = field(default_factory=list)

    def save(self, name: str, *, seed: int = 0, shards: int = 1, **changes: Any) -> Path:
        return lay_out(tiny(seed=seed, **changes), self.directory / name, shards=shards)

    def watcher(self, **changes: Any) -> Watcher:
        asked: dict[str, Any] = {"directory": self.directory, "run": "w", "suites": ("main",)} | changes
        now = lambda: 0.0  # noqa: E731 - the files' clock is not ours, and can't be relied on
        return Watcher(Asked(**asked), self.service.connect(), now, lambda: self.monotonic, self.said.append)

    def quiet(self, watcher: Watcher, seconds: float = 30.0) -> None:
        """Two looks, with time in between."""
        watcher.turn()
        self.monotonic += seconds
        watcher.turn()

    def steps(self) -> list[int]:
        return [point.step for point in self.service.points("w")]


@pytest.fixture
def stand(tmp_path: Path) -> Stand:
    service = PaperService(tmp_path)
    directory = service.root / "trainer"
    directory.mkdir()
    return Stand(service, directory)


# --- names and steps


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("checkpoint-100", 100),
        ("step_100", 100),
        ("step-100", 100),
        ("step100", 100),
        ("global_step100", 100),
        ("global_step_100", 100),
        ("iter_0000100", 100),
        ("iteration_7", 7),
        ("epoch=1-step=100", 100),
        ("ckpt_100", 100),
        ("model_step_100", 100),
        ("step_100-1a2b3c4d", 100),
        ("0000100", 100),
        ("step_0", 0),
        ("latest", None),
        ("epoch_3", None),
        ("tmp-checkpoint-100", None),
        ("checkpoint-100.tmp", None),
        (".partial-12345678", None),
        ("checkpoint", None),
        ("runs", None),
        ("step_-1", None),
    ],
)
def test_the_step_is_read_from_the_names_that_trainers_give(name: str, step: int | None) -> None:
    assert step_of(name) == step


def test_a_pattern_of_ones_own_reads_other_names() -> None:
    pattern = compile_pattern(r"m-(\d+)k-final")
    assert step_of("m-12k-final", pattern) == 12
    assert step_of("checkpoint-12", pattern) is None
    assert step_of("a9-b12", compile_pattern(r"a(\d)-b(?P<step>\d+)")) == 12
    for bad in ("(", "no-group"):
        with pytest.raises(InvalidRequest, match="pattern"):
            compile_pattern(bad)


def test_steps_may_be_named_spanned_and_open() -> None:
    named = parse_steps("100, 300:500:100, 900:")
    assert [step for step in (0, 100, 200, 300, 350, 400, 500, 600, 901) if step in named] == [100, 300, 400, 500, 901]
    assert named.expected == {100, 300, 400, 500}
    assert not named.closed
    assert parse_steps("1,2").closed
    assert 7 in parse_steps(None)
    for bad in ("", "a", "5:3", "1:9:0", "-1", "0:99999999999:1"):
        with pytest.raises(InvalidRequest, match="steps"):
            parse_steps(bad)


# --- completion


def test_three_old_directories_of_another_exporter_become_three_points(stand: Stand) -> None:
    """Users ask for a watch over an existing directory: old checkpoints, no manifest, one command."""
    for number, name in enumerate(("checkpoint-100", "checkpoint-200", "checkpoint-1000")):
        stand.save(name, seed=number)
    before = sorted(str(path) for path in stand.directory.rglob("*"))
    watcher = stand.watcher(max_in_flight=9)
    stand.quiet(watcher)
    points = stand.service.points("w")
    assert [(point.step, point.kind, point.state) for point in points] == [
        (100, Kind.PERIODIC, PointState.DONE),
        (200, Kind.PERIODIC, PointState.DONE),
        (1000, Kind.PERIODIC, PointState.DONE),
    ]
    assert {point.source for point in points} == {Source.CALLER}
    assert all(point.digest for point in points), "the service made the manifests that they lack"
    assert sorted(str(path) for path in stand.directory.rglob("*")) == before, "nothing was written or deleted"
    assert watcher.at_rest
    assert gaps(watcher.coverage()) == []
    assert stand.service.ledger.views.run("w").step == 1000


def test_a_directory_that_is_being_written_is_not_taken_until_it_is_quiet_and_passes_the_checks(stand: Stand) -> None:
    """Evaluated directories without a completion marker: half of the shards are there, and it must wait."""
    whole = stand.save("elsewhere", shards=2)
    index: dict[str, Any] = {"metadata": {}}
    shards = sorted(whole.glob("*.safetensors"))
    from eval_service.contract.safetensors_io import read_spans

    index["weight_map"] = {span.name: path.name for path in shards for span in read_spans(path)}
    place = stand.directory / "checkpoint-5"
    place.mkdir()
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(whole / name, place)
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copy(shards[0], place)
    watcher = stand.watcher()
    stand.quiet(watcher, 31)
    assert stand.steps() == []
    assert "which has no such tensor" in gaps(watcher.coverage())[0]

    data = shards[1].read_bytes()
    (place / shards[1].name).write_bytes(data[:-10])
    watcher.turn()
    assert "still changing" in gaps(watcher.coverage())[0]
    stand.monotonic += 31
    watcher.turn()
    assert stand.steps() == []
    (place / shards[1].name).write_bytes(data)
    watcher.turn()
    assert stand.steps() == [], "complete, but not yet quiet"
    stand.monotonic += 31
    watcher.turn()
    assert stand.steps() == [5]


def test_with_a_marker_nothing_is_taken_before_it_is_there(stand: Stand) -> None:
    """Evaluated directories without a completion marker."""
    place = stand.save("global_step7")
    watcher = stand.watcher(rule=Rule(marker="done.txt"))
    stand.quiet(watcher, 1000)
    assert stand.steps() == []
    assert gaps(watcher.coverage()) == ["step 7: not taken (no done.txt in it)"]
    (place / "done.txt").touch()
    watcher.turn()
    assert stand.steps() == [7]


def test_a_marked_directory_that_is_not_sound_has_a_recorded_end_and_one_that_is_mended_a_new_point(
    stand: Stand,
) -> None:
    place = stand.save("step_3")
    (place / "tokenizer.json").rename(place / "kept")
    (place / "done").touch()
    watcher = stand.watcher(rule=Rule(marker="done"))
    watcher.turn()
    (point,) = stand.service.points("w")
    assert (point.state, point.reason) == (PointState.SKIPPED, Reason.SNAPSHOT_INVALID)
    assert "tokenizer.json" in gaps(watcher.coverage())[0]
    (place / "kept").rename(place / "tokenizer.json")
    watcher.turn()
    assert [point.state for point in stand.service.points("w")] == [PointState.DONE]


def test_what_changes_while_it_is_read_is_not_taken(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    from eval_service.watch import completion

    place = stand.save("step_1")
    watcher = stand.watcher()
    watcher.turn()
    examine = completion.examine

    def disturbed(directory: Path) -> Any:
        report = examine(directory)
        (place / "trainer_state.json").write_text("{}")
        return report

    watcher.taken[1].checkpoint.check = disturbed
    stand.monotonic += 31
    watcher.turn()
    assert stand.steps() == []
    assert "changed while it was read" in gaps(watcher.coverage())[0]


def test_what_changed_after_it_was_read_in_the_same_look_is_read_again(stand: Stand) -> None:
    """The checks had read the first weights when the trainer put others in their place."""
    from eval_service.watch import completion

    place = stand.save("step_1")
    watcher = stand.watcher()
    watcher.turn()

    def replaced(directory: Path) -> Any:
        report = completion.examine(directory)
        shutil.rmtree(place)
        stand.save("step_1", seed=5)
        watcher.taken[1].checkpoint.check = completion.examine
        return report

    watcher.taken[1].checkpoint.check = replaced
    stand.monotonic += 31
    stand.quiet(watcher)
    stand.monotonic += 31
    watcher.turn()
    assert gaps(watcher.coverage()) == []
    (point,) = stand.service.points("w")
    assert (point.state, point.reason) == (PointState.DONE, None)
    report = completion.examine(place)
    assert report.manifest is not None
    assert point.digest == report.manifest.digest


def test_the_model_may_lie_deeper_and_a_directory_may_lie_about_its_run(stand: Stand) -> None:
    lay_out(tiny(), stand.directory / "global_step_9" / "actor" / "huggingface")
    (stand.directory / "w").mkdir()  # where the samples go
    watcher = stand.watcher(model="actor/huggingface")
    stand.quiet(watcher)
    assert stand.steps() == [9]


# --- once and never again


def test_a_restart_repeats_nothing(stand: Stand) -> None:
    for number in (1, 2):
        stand.save(f"step_{number}", seed=number)
    stand.quiet(stand.watcher(max_in_flight=9))
    for _ in range(2):
        again = stand.watcher()
        stand.quiet(again)
        assert again.at_rest
    assert stand.service.ledger.views.points(run="w").total == 2


def test_a_restart_reads_nothing_that_has_not_changed_since_it_was_handed_over(stand: Stand) -> None:
    place = stand.save("step_1")
    stand.service.ledger.clock.now = max(path.stat().st_ctime for path in place.iterdir()) + 100
    stand.quiet(stand.watcher())
    again = stand.watcher()

    def never(_: Path) -> Any:
        raise AssertionError("it was read")

    again._find()
    again.taken[1].checkpoint.check = never
    stand.quiet(again)
    assert gaps(again.coverage()) == []


def test_a_step_that_was_trained_anew_is_a_new_point_and_a_touched_one_is_not(stand: Stand) -> None:
    place = stand.save("step_1", seed=1)
    watcher = stand.watcher()
    stand.quiet(watcher)
    os.utime(place / "model.safetensors")
    stand.quiet(watcher)
    assert stand.service.ledger.views.points(run="w").total == 1
    shutil.rmtree(place)
    stand.save("step_1", seed=2)
    stand.quiet(watcher)
    assert stand.service.ledger.views.points(run="w").total == 2
    assert len(stand.service.points("w")) == 1, "the older one is superseded"


def test_a_further_suite_is_made_up_for_and_the_others_are_not_repeated(stand: Stand) -> None:
    stand.save("step_1")
    stand.quiet(stand.watcher())
    stand.quiet(stand.watcher(suites=("main", "extra")))
    assert [(point.suite, point.state) for point in stand.service.points("w")] == [
        ("extra", PointState.DONE),
        ("main", PointState.DONE),
    ]
    assert stand.service.ledger.views.points(run="w").total == 2


def test_a_backlog_over_the_runs_bound_waits_for_room_and_loses_no_step(stand: Stand) -> None:
    for number in range(1, 6):
        stand.save(f"step_{number}", seed=number)
    stand.service.works = False
    watcher = stand.watcher(max_in_flight=2)
    stand.quiet(watcher)
    assert stand.steps() == [1, 2]
    assert "waits for room: 2 checkpoints" in gaps(watcher.coverage())[2]
    stand.service.works = True
    for _ in range(3):
        stand.service.work()
        watcher.turn()
    assert stand.steps() == [1, 2, 3, 4, 5]
    assert watcher.at_rest


def test_only_the_steps_that_are_asked_for_are_taken_and_one_that_never_comes_is_a_named_gap(stand: Stand) -> None:
    """Some intermediate checkpoints are never evaluated, and nobody is told."""
    for number in (100, 150, 200):
        stand.save(f"checkpoint-{number}", seed=number)
    watcher = stand.watcher(steps=parse_steps("100:300:100"))
    stand.quiet(watcher)
    assert stand.steps() == [100, 200]
    assert watcher.at_rest
    assert not watcher.complete
    assert gaps(watcher.coverage()) == ["step 300: missing (no directory of this step was seen)"]
    stand.save("checkpoint-300", seed=300)
    stand.quiet(watcher)
    assert watcher.complete


def test_two_directories_of_one_step_are_named_and_neither_is_taken(stand: Stand) -> None:
    stand.save("step_4")
    stand.save("checkpoint-4", seed=1)
    watcher = stand.watcher()
    stand.quiet(watcher)
    assert stand.steps() == []
    assert gaps(watcher.coverage())[0].startswith("step 4: ambiguous (checkpoint-4 and step_4 are both of this step")


def test_our_own_exports_may_be_watched_too(stand: Stand) -> None:
    published = publish(tiny(), stand.directory, run="old", step=4)
    watcher = stand.watcher(directory=stand.directory / "old")
    stand.quiet(watcher)
    (point,) = stand.service.points("w")
    assert (point.step, point.state, point.digest) == (4, PointState.DONE, published.manifest.digest)


def test_a_service_that_is_away_or_has_lost_its_ledger_is_told_everything_later(stand: Stand) -> None:
    stand.save("step_1")
    watcher = stand.watcher()
    stand.service.away = lambda _: True
    with pytest.raises(Unavailable):
        watcher.turn()
    stand.service.away = lambda call: call == "POST /dispatch"
    stand.monotonic += 40
    with pytest.raises(Unavailable):
        stand.quiet(watcher)
    stand.service.away = lambda _: False
    watcher.turn()
    assert stand.steps() == [1]


def test_a_service_that_has_forgotten_the_run_is_told_of_it_again(stand: Stand) -> None:
    stand.save("step_1")
    watcher = stand.watcher()
    stand.quiet(watcher)
    with stand.service.ledger.db.writing() as connection:  # as a service with an empty ledger
        for table in reversed(points.metadata.sorted_tables):
            if table.name != "meta":
                connection.execute(table.delete())
    stand.save("step_2", seed=2)
    with pytest.raises(Unavailable):
        watcher.turn()
    stand.quiet(watcher)
    assert 2 in stand.steps()
    assert stand.service.ledger.views.run("w").spec.suites == ("main",)


def test_a_link_to_nothing_and_a_directory_that_goes_are_gaps_and_hold_nothing_up(stand: Stand) -> None:
    (stand.save("step_1") / "model-2.safetensors").symlink_to("gone")
    place = stand.save("step_2", seed=2)
    stand.save("step_3", seed=3)
    watcher = stand.watcher()
    watcher.turn()
    shutil.rmtree(place)
    stand.monotonic += 31
    watcher.turn()
    assert stand.steps() == [3]
    assert watcher.at_rest, [(step, taken.why, taken.blocked, taken.sent) for step, taken in watcher.taken.items()]
    first, second = gaps(watcher.coverage())
    assert "is a link to nothing" in first
    assert "step 2: not taken (can't be read" in second


def test_a_run_that_is_not_known_needs_suites_and_one_that_is_keeps_its_own(stand: Stand) -> None:
    stand.save("step_1")
    with pytest.raises(InvalidRequest, match="suites: run w is not known yet"):
        stand.watcher(suites=()).turn()
    stand.service.ledger.put_run("w", suites=("extra",), max_in_flight=7)
    stand.quiet(stand.watcher(suites=()))
    assert [point.suite for point in stand.service.points("w")] == ["extra"]
    assert stand.service.ledger.views.run("w").spec.max_in_flight == 7


# --- the command


@pytest.fixture
def command(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setattr(options, "connect", stand.service.connect)

    def run(*arguments: str) -> Any:
        base = ["watch", str(stand.directory), "--run", "w", "--poll", "0.05", "--quiet", "0"]
        return CliRunner().invoke(main.app, [*base, *arguments])

    return run


def test_the_command_once_exits_0_where_all_are_done_and_1_with_the_gaps_named(
    stand: Stand, command: Callable[..., Any]
) -> None:
    for number in (1, 2, 3):
        stand.save(f"checkpoint-{number}", seed=number)
    done = command("--suites", "main", "--once")
    assert done.exit_code == 0, done.output
    assert "3 of 3 points are done" in done.output
    gap = command("--once", "--steps", "1:4:1", "--json")
    assert gap.exit_code == 1
    report = json.loads(gap.stdout)
    assert report["done"] == 3
    assert report["points"][0]["directory"] == "checkpoint-1"


def test_the_command_ends_by_itself_once_every_named_step_is_done(stand: Stand, command: Callable[..., Any]) -> None:
    stand.save("checkpoint-1")
    assert command("--suites", "main", "--steps", "1").exit_code == 0


def test_the_command_at_its_deadline_exits_3(stand: Stand, command: Callable[..., Any]) -> None:
    stand.save("checkpoint-1")
    stand.service.works = False
    ended = command("--suites", "main", "--timeout", "0")
    assert ended.exit_code == 3
    assert "GAP: step 1 main: queued" in ended.output


def test_the_command_refuses_what_can_not_be_watched(stand: Stand, command: Callable[..., Any], tmp_path: Path) -> None:
    assert command("--once").exit_code == 1, "nothing was seen"
    model = stand.save("checkpoint-1")
    for place in (model, tmp_path / "none"):
        result = CliRunner().invoke(main.app, ["watch", str(place), "--run", "w"])
        assert isinstance(result.exception, InvalidRequest)
    result = command("--root", str(tmp_path / "outside"), "--suites", "main", "--once")
    assert "outside the service's roots" in str(result.exception)
