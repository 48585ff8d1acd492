"""docs/troubleshooting.md has every code that there is, and no other: the code itself is asked for its lists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from eval_service.cli import draining, main
from eval_service.contract.errors import BY_CODE, EvalfleetError
from eval_service.contract.states import REASONS
from eval_service.gateway import app
from eval_service.ledger.database import Fenced

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/troubleshooting.md").read_text()
# Events of a step log that are no news of evaluation or of a fault.
ORDINARY = {"start", "step_begin", "step_end", "save", "stopped", "exception"}


def rows(heading: str) -> list[list[str]]:
    """The cells of the table under a heading, its head apart."""
    table = re.split(r"\n## ", PAGE.split(f"\n## {heading}\n", 1)[1], maxsplit=1)[0]
    lines = [line for line in table.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def codes(heading: str, column: int = 0) -> set[str]:
    """What stands in backquotes in a column."""
    return {code for row in rows(heading) for code in re.findall(r"`([^`]+)`", row[column])}


def calls(package: str, *functions: str) -> Iterator[tuple[ast.Call, dict[str, str]]]:
    """Calls of functions by their last name, with the module's own constants that are texts."""
    for path in sorted((ROOT / package).rglob("*.py")):
        tree = ast.parse(path.read_text())
        constants = {
            target.id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            for target in node.targets
            if isinstance(target, ast.Name) and isinstance(node.value.value, str)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in functions:
                yield node, constants


def text(node: ast.expr | None, constants: dict[str, str]) -> str | None:
    """A text as the docs spell it; None where only the running program knows it."""
    if isinstance(node, ast.Constant):
        return str(node.value) if node.value is not None else None
    if isinstance(node, ast.Name):
        return constants.get(node.id)
    if isinstance(node, ast.JoinedStr):
        return "".join(_part(part, constants) for part in node.values)
    return None


def _part(part: ast.expr, constants: dict[str, str]) -> str:
    """Of an f-string: `NAME` where only the running program knows."""
    if isinstance(part, ast.FormattedValue):
        return constants.get(ast.unparse(part.value), "NAME")
    return str(ast.literal_eval(part))


def test_every_error_of_the_api_is_there_with_its_status() -> None:
    wanted = {code: error.status for code, error in BY_CODE.items()}
    wanted |= {EvalfleetError.code: EvalfleetError.status, Fenced.code: Fenced.status}
    wanted |= {code: status for status, code in app._CODES.items()}
    for call, constants in calls("eval_service/serve", "_refuse"):  # of what is no request yet
        status, code = (text(argument, constants) for argument in call.args[:2])
        assert status is not None
        assert code is not None
        wanted[code] = int(status)
    told = {row[0].strip("`"): row[1] for row in rows("Errors of the API")}
    assert told == {code: str(status) for code, status in wanted.items()} | {"http_error": "4xx"}


def test_no_route_answers_with_a_code_of_its_own() -> None:
    made = [
        text(keyword.value, constants)
        for call, constants in calls("eval_service/gateway", "ErrorBody")
        for keyword in call.keywords
        if keyword.arg == "code"
    ]
    assert {code for code in made if code is not None} <= codes("Errors of the API")


def test_every_exit_code_of_the_commands_is_there() -> None:
    told = {(row[0].strip("`"), int(row[1])) for row in rows("Exit codes")}
    ours = {1, main.USAGE, draining.TIME_IS_UP, main.UNREACHABLE, main.INTERNAL, 130}
    trainer = {int(code) for code in re.findall(r"\b(\d+) (?:an|what|SIGTERM)", (ROOT / "trainer/main.py").read_text())}
    assert told == {("evalfleet", code) for code in ours} | {("evalfleet-train", code) for code in trainer | {130}}


def test_every_reason_of_a_point_is_there_under_its_state() -> None:
    told = {(row[0].strip("`"), row[1].strip("`")) for row in rows("Reasons of a point")}
    assert told == {(state.value, reason.value) for state, reasons in REASONS.items() for reason in reasons}


def test_every_fault_of_an_attempt_is_there() -> None:
    made = {text(call.args[0], constants) for call, constants in calls("eval_service/controller", "LaneFault")}
    made |= {text(call.args[1], constants) for call, constants in calls("eval_service/ledger", "end_attempt")}
    assert made - {None, "done"} <= codes("Faults of an attempt")


def test_every_event_of_a_step_log_that_is_news_is_there_and_no_other() -> None:
    made = {text(call.args[0], known) for call, known in calls("trainer", "write") if len(call.args) == 1}
    events = {event for event in made if event is not None and re.fullmatch(r"[a-z_]+", event)}
    assert codes("Lines of the step log") - events <= {"save_failed", "eval_failed", "eval_skipped"}  # of a variable
    assert events - ORDINARY <= codes("Lines of the step log")


def test_every_field_that_a_trainer_or_a_launch_refuses_is_there() -> None:
    told = codes("Refusals of the trainer")
    named = set()
    for package in ("trainer", "eval_service/launch"):
        for call, constants in calls(package, "ConfigError"):
            field = next((keyword.value for keyword in call.keywords if keyword.arg == "field"), None)
            named.add(text(field, constants))
        for call, constants in calls(package, "ValueError"):
            said = text(call.args[0], constants) if call.args else None
            if said is not None and (own := re.match(r"([a-z_.]+): ", said)):
                named.add(own[1])
    asked = {field.replace("fleet.NAME", "fleet.num_eval_engines") for field in named if field is not None}
    lacking = {field for field in asked if not any(one == field or one.endswith(f".{field}") for one in told)}
    assert {field for field in lacking if not field.startswith("groups.NAME.overrides")} == set()
