"""Checkpoint eval functions: a real controller and real processes, without Ray and without an engine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from eval_service.contract.errors import ConfigError, InvalidRequest
from eval_service.contract.results import AlarmKind
from eval_service.contract.states import PinProof, PointState, Reason
from eval_service.contract.wire import RunSpec
from eval_service.engine.pin import SystemClock
from eval_service.engine.server import BootOptions
from eval_service.fleet_config import GroupConfig
from eval_service.ledger.orders import Orders
from eval_service.suites.kinds import LmEvalSuite
from eval_service.suites.suite import check_served, load_suites
from tests.support.controller_stand import Stand, said
from tests.support.engine_model import make_model
from tests.support.inner_engine import boot_inner
from tests.support.lost_samples import killed_once_written
from tests.support.processes import alive

pytestmark = pytest.mark.anyio

SUITE = """
[suites.mine]
kind = "function"
function = "tests.support.eval_functions:Noting"
metric = "accuracy"
timeout_s = {timeout_s}
options = {{ notes = "{notes}" }}
"""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def stand_of(root: Path, timeout_s: float = 60.0) -> Stand:
    stand = Stand(root, more_suites=SUITE.format(notes=root, timeout_s=timeout_s))
    stand.put_run("r", suites=("mine",))
    return stand


def noted(root: Path, what: str) -> list[int]:
    path = root / what
    return [int(line) for line in path.read_text().split()] if path.exists() else []


async def test_a_function_evaluates_in_one_process_over_many_points_and_disposes_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eval_service.controller.functions.DISPOSE_S", 60.0)  # it is never killed before it has noted

    async with stand_of(tmp_path).running(engines=0) as stand:
        points = [stand.dispatch("r", step) for step in (1, 2, 7, 8, 3)]
        one, two, skipped, crashed, three = await stand.until_ended(*points)
        for view, step in ((one, 1), (two, 2), (three, 3)):
            assert (view.state, view.score, view.stderr) == (PointState.DONE, 0.5, 0.5)
            assert (view.weight_version, view.pin_proof) == (f"mine.{step}", PinProof.CANARY)
            assert [sample.output for sample in stand.samples(view.id)] == ["right", "wrong"]
        assert (skipped.state, skipped.reason, skipped.detail) == (
            PointState.SKIPPED,
            Reason.EVAL_SKIP,
            "its benchmark needs 8 GPUs",
        )
        assert (crashed.state, crashed.reason) == (PointState.FAILED, Reason.CRASHED)
        assert "RuntimeError: the backend said no" in (crashed.detail or "")
        assert sorted(noted(tmp_path, "evaluated")) == [1, 2, 3]  # in the order in which their checks ended
        assert len(noted(tmp_path, "made")) == 1 or noted(tmp_path, "disposed") != []
    assert sorted(noted(tmp_path, "made")) == sorted(noted(tmp_path, "disposed"))


async def test_samples_that_the_ledger_never_knew_of_go_with_the_next_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A controller that is killed between the file and the ledger leaves the file."""
    written: list[Path] = []
    monkeypatch.setattr("eval_service.controller.foreign.write_samples", killed_once_written(written))
    async with stand_of(tmp_path).running(engines=0) as stand:
        [view] = await stand.until_ended(stand.dispatch("r", 1))
        assert (view.state, view.attempts) == (PointState.DONE, 2)
        assert [path for path in written if path.exists()] == [written[1]]


async def test_a_function_that_hangs_is_killed_with_its_children_and_the_next_point_has_a_new_process(
    tmp_path: Path,
) -> None:
    # The time of each starts with that of its process, which a busy machine takes seconds for.
    async with stand_of(tmp_path, timeout_s=12.0).running(engines=0) as stand:
        hanging = stand.dispatch("r", 9)
        await stand.until(lambda: noted(tmp_path, "child"))
        [child] = map(psutil.Process, noted(tmp_path, "child"))
        late, after = await stand.until_ended(hanging, stand.dispatch("r", 10))
        assert (late.state, late.reason) == (PointState.FAILED, Reason.DEADLINE)
        assert after.state is PointState.DONE
        await stand.until(lambda: not alive([child]))
        assert len(noted(tmp_path, "made")) == 2


async def test_kill_9_of_a_functions_process_in_mid_point_is_that_points_crash_and_nobody_elses(tmp_path: Path) -> None:
    async with stand_of(tmp_path).running(engines=0) as stand:
        point = stand.dispatch("r", 9)
        await stand.until(lambda: noted(tmp_path, "child"))
        os.kill(noted(tmp_path, "made")[0], signal.SIGKILL)
        [view] = await stand.until_ended(point)
        assert (view.state, view.reason) == (PointState.FAILED, Reason.CRASHED)
        assert "signal 9" in (view.detail or "")
        [after] = await stand.until_ended(stand.dispatch("r", 10))
        assert after.state is PointState.DONE
        with contextlib.suppress(ProcessLookupError):  # seen with its parent, if that was still ending
            os.kill(noted(tmp_path, "child")[0], signal.SIGKILL)  # it had left its parent's group, which was gone


async def test_a_functions_process_that_died_while_it_did_nothing_costs_the_next_point_nothing(tmp_path: Path) -> None:
    async with stand_of(tmp_path).running(engines=0) as stand:
        await stand.until_ended(stand.dispatch("r", 1))
        [pid] = noted(tmp_path, "made")
        os.kill(pid, signal.SIGKILL)
        await stand.until(lambda: not psutil.pid_exists(pid))
        [view] = await stand.until_ended(stand.dispatch("r", 2))
        assert (view.state, view.attempts) == (PointState.DONE, 1)
        assert len(noted(tmp_path, "made")) == 2


async def test_the_example_pins_an_external_sglang_server_and_proves_it_by_the_canary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "examples/suites"))
    questions, key, admin = tmp_path / "questions.jsonl", tmp_path / "key", tmp_path / "admin"
    questions.write_text(json.dumps({"prompt": "p", "answer": "x"}))
    make_model(tmp_path / "theirs", seed=0)
    group = GroupConfig.model_validate({"model": tmp_path / "theirs", "grade": "fake"})
    engine = await boot_inner(group, BootOptions(log=tmp_path / "none"), SystemClock())
    try:
        key.write_text(engine.keys.api)
        admin.write_text(engine.keys.admin)
        options = (
            f'{{ url = "{engine.url}", questions = "{questions}", key_file = "{key}", admin_key_file = "{admin}" }}'
        )
        table = '[suites.mine]\nkind = "function"\nfunction = "attached_function:Attached"\nmetric = "accuracy"\n'
        stand = Stand(tmp_path, more_suites=f"{table}options = {options}\n")
        stand.put_run("r", suites=("mine",))
        async with stand.running(engines=0):
            export = stand.export("r", 1)
            wrong = stand.export("r", 2, canary=stand.export("q", 33).manifest.canary)
            good, bad = await stand.until_ended(stand.dispatch("r", 1, export), stand.dispatch("r", 2, wrong))
            assert (good.state, good.pin_proof) == (PointState.DONE, PinProof.CANARY), good.detail
            [sample] = stand.samples(good.id)
            assert sample.output == said(export.manifest.tensor_digest, "p")
            assert (bad.state, bad.reason) == (PointState.FAILED, Reason.CRASHED)
            assert "it holds other weights" in (bad.detail or "")
    finally:
        await engine.process.stop()
        await engine.api.close()


async def test_a_cancelled_point_ends_its_functions_process(tmp_path: Path) -> None:
    async with stand_of(tmp_path).running(engines=0) as stand:
        point = stand.dispatch("r", 9)
        await stand.until(lambda: noted(tmp_path, "child"))
        Orders(stand.database).cancel(point)
        assert stand.link.controller is not None
        stand.link.controller.wake()
        [view] = await stand.until_ended(point)
        assert (view.state, view.reason) == (PointState.CANCELLED, Reason.USER)
        await stand.until(lambda: not psutil.pid_exists(noted(tmp_path, "child")[0]))


def test_a_run_has_functions_or_engines_suites_and_never_both(tmp_path: Path) -> None:
    stand = stand_of(tmp_path)
    with pytest.raises(InvalidRequest, match="'mine' is a checkpoint eval function and 'words' is evaluated by"):
        stand.intents.put_run("both", RunSpec(root=str(stand.runs), suites=("words", "mine")))
    with pytest.raises(InvalidRequest, match="checkpoint eval function"):
        stand.dispatch("r", 1, suites=("words",))
    stand.database.close()


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("tests.support.eval_functions:Trains", "what trains .it has train_step"),
        ("trainer.loop:Loop", "is what trains"),
        ("tests.support.eval_functions:Nothing", "no attribute 'Nothing'"),
        ("no_such_module:Thing", "No module named"),
    ],
)
def test_a_class_that_trains_or_cannot_be_imported_is_refused_at_load(tmp_path: Path, function: str, says: str) -> None:
    file = tmp_path / "suites.toml"
    file.write_text(f'[suites.mine]\nkind = "function"\nfunction = "{function}"\nmetric = "accuracy"\n')
    with pytest.raises(ConfigError, match=says) as refused:
        load_suites(file)
    assert refused.value.field == "suites.mine.function"


def test_lm_eval_tasks_are_refused_at_load_where_there_is_no_such_task_or_no_proxy(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.yaml").write_text("task: mine\n")
    file = tmp_path / "suites.toml"
    table = '[suites.harness]\nkind = "lm_eval"\npath = "mine"\nmetric = "mine/acc"\ntasks = ["{}"]\n'
    file.write_text(table.format("none_such"))
    with pytest.raises(ConfigError, match="there is no task 'none_such'") as refused:
        load_suites(file)
    assert refused.value.field == "suites.harness.tasks.0"
    file.write_text(table.format("mine"))
    with pytest.raises(ConfigError, match="through the proxy") as off:
        check_served(load_suites(file), has_proxy=False)
    assert "service.proxy_port" in (off.value.hint or "")
    check_served(load_suites(file), has_proxy=True)


def harness(base: Path, more: str = "") -> LmEvalSuite:
    """A suite of one lm-eval task, with more keys."""
    (base / "mine").mkdir(exist_ok=True)
    (base / "mine" / "a.yaml").write_text("task: mine\n")
    file = base / "suites.toml"
    table = '[suites.harness]\nkind = "lm_eval"\npath = "mine"\nmetric = "mine/acc"\ntasks = ["mine"]\n'
    file.write_text(table + more)
    suite = load_suites(file)["harness"]
    assert isinstance(suite, LmEvalSuite)
    return suite


def test_data_beside_lm_eval_tasks_is_in_the_suites_digest(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.yaml").write_text("task: mine\n")
    file = tmp_path / "suites.toml"
    file.write_text('[suites.harness]\nkind = "lm_eval"\npath = "mine"\nmetric = "mine/acc"\ntasks = ["mine"]\n')
    found = set()
    for rows in ("{}", "{} "):
        (tmp_path / "mine" / "rows.jsonl").write_text(rows)
        found |= {load_suites(file)["harness"].digest, load_suites(file)["harness"].digest}
    assert len(found) == 2
    mine = load_suites(file)["harness"]
    assert isinstance(mine, LmEvalSuite)
    (tmp_path / "mine" / ".rows.jsonl.swp").write_text("an editor's")
    assert mine.digest_now() == mine.digest
    (tmp_path / "mine" / "rows.jsonl").write_text("{}  ")
    assert mine.digest_now() not in found, "what is read at each point is digested at each point"


@pytest.mark.parametrize(
    ("given", "seeds"),
    [("", [0, 1234, 1234, 1234]), ("seed = 0", [0, 0, 0, 0]), ("seed = [4, 3, 2, 1]", [4, 3, 2, 1])],
)
def test_lm_evals_four_seeds_are_its_own_unless_one_or_four_are_given(
    tmp_path: Path, given: str, seeds: list[int]
) -> None:
    suites = [harness(tmp_path, text) for text in (given, f"seed = {seeds}", "seed = 99")]
    names = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
    assert {name: suites[0].config.asked()[name] for name in names} == dict(zip(names, seeds, strict=True))
    assert suites[0].digest == suites[1].digest != suites[2].digest, "it is what is asked, not how it is written"


@pytest.mark.parametrize("seed", ["-1", "true", "[1, 2]", "[1, 2, 3, -4]", "'x'"])
def test_a_seed_that_is_none_is_refused_by_its_key(tmp_path: Path, seed: str) -> None:
    with pytest.raises(ConfigError, match="is no seed") as refused:
        harness(tmp_path, f"seed = {seed}")
    assert refused.value.field == "suites.harness.seed"
    assert "or four" in (refused.value.hint or "")


def test_a_chats_keys_are_what_is_asked_and_its_few_shot_examples_are_turns_unless_it_says_no(tmp_path: Path) -> None:
    chat = "apply_chat_template = true"
    told = ["", chat, f"{chat}\nfewshot_as_multiturn = true", f"{chat}\nfewshot_as_multiturn = false",
            f'{chat}\nsystem_instruction = "be brief"', 'apply_chat_template = "tool_use"']  # fmt: skip
    suites = [harness(tmp_path, text) for text in told]
    assert [suite.config.asked()["fewshot_as_multiturn"] for suite in suites] == [False, True, True, False, True, True]
    assert len({suite.digest for suite in suites}) == 5
    assert suites[1].digest == suites[2].digest, "the same, said and unsaid"


@pytest.mark.parametrize(
    ("given", "field", "fix"),
    [
        ("fewshot_as_multiturn = true", "fewshot_as_multiturn", "set apply_chat_template = true"),
        ("apply_chat_template = 3", "apply_chat_template", "write true"),
        ("apply_chat_template = ''", "apply_chat_template", "write true"),
    ],
)
def test_a_chats_keys_that_mean_nothing_are_refused_by_key_and_fix(
    tmp_path: Path, given: str, field: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        harness(tmp_path, given)
    assert refused.value.field == f"suites.harness.{field}"
    assert fix in (refused.value.hint or "")


OWN = """
class Own:
    def __init__(self, data):
        self.data = data

    def evaluate_checkpoint(self, snapshot_dir, context):
        rows = open(self.data).read().split()
        context.sample(prompt="{}", output="", score=1.0)
        context.metric("accuracy", 1.0, n=len(rows))

    def dispose(self):
        pass
"""


async def test_a_function_whose_module_or_data_changes_is_run_as_it_is_then_under_another_digest_and_the_change_is_told(
    tmp_path: Path,
) -> None:
    module, data = tmp_path / "own_eval_of_a_test.py", tmp_path / "rows.txt"
    module.write_text(OWN.format("one"))
    data.write_text("a b")
    table = '[suites.mine]\nkind = "function"\nfunction = "own_eval_of_a_test:Own"\nmetric = "accuracy"\n'
    table += f'data = ["rows.txt"]\noptions = {{ data = "{data}" }}\n'
    stand = Stand(tmp_path, more_suites=table)
    stand.put_run("r", suites=("mine",))
    async with stand.running(engines=0):
        [one] = await stand.until_ended(stand.dispatch("r", 1))
        module.write_text(OWN.format("another one"))
        [two] = await stand.until_ended(stand.dispatch("r", 2))
        data.write_text("a b c")
        [three] = await stand.until_ended(stand.dispatch("r", 3))
        [four] = await stand.until_ended(stand.dispatch("r", 4))
    views = (one, two, three, four)
    assert {view.state for view in views} == {PointState.DONE}, [view.detail for view in views]
    assert [stand.samples(view.id)[0].prompt for view in views] == ["one", *["another one"] * 3]
    assert [view.metrics["accuracy"].n for view in views] == [2, 2, 3, 3]
    assert len({view.suite_digest for view in views}) == 3
    assert [[alarm.kind for alarm in view.alarms] for view in views] == [[], *[[AlarmKind.SUITE_CHANGED]] * 2, []]
    data.unlink()
    with pytest.raises(ConfigError, match="there is no file") as refused:
        load_suites(tmp_path / "suites.toml")
    assert refused.value.field == "suites.mine.data.0"
