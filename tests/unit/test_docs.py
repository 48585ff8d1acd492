"""The docs tell the truth: config keys with defaults, commands and exit codes, no dead link, examples that load."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from eval_service.access.config import TokenConfig
from eval_service.cli import checking, draining, main
from eval_service.fleet_config import FleetConfig, GroupConfig, ServiceConfig, load_fleet
from eval_service.objects.config import ObjectsConfig
from eval_service.suites.config import DatasetConfig, FewshotConfig, SamplingConfig, SuiteConfig
from eval_service.suites.kinds import FunctionConfig, LmEvalConfig
from eval_service.suites.scorer_config import SCORER_CONFIGS
from eval_service.suites.suite import Suite, load_suites
from eval_service.trackers.config import TracesConfig, TrackerConfig, WebhookConfig
from trainer.config import DataSection, EvalSection, ModelSection, ParallelSection, RunSection, TrainSection, load_run
from trainer.launch import LaunchConfig

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
CONFIGURATION = (ROOT / "docs/configuration.md").read_text()
COMMANDS = (ROOT / "docs/cli.md").read_text()
SECTIONS: Mapping[str, type[BaseModel]] = {
    "top level": FleetConfig,
    "`[service]`": ServiceConfig,
    "`[groups.NAME]`": GroupConfig,
    "`[trackers.NAME]`": TrackerConfig,
    "`[webhooks.NAME]`": WebhookConfig,
    "`[tokens.NAME]`": TokenConfig,
    "`[traces]`": TracesConfig,
    "`[objects]`": ObjectsConfig,
    "`[suites.NAME]`": SuiteConfig,
    '`[suites.NAME]`, `kind = "lm_eval"`': LmEvalConfig,
    '`[suites.NAME]`, `kind = "function"`': FunctionConfig,
    "`datasets`": DatasetConfig,
    "`fewshot`": FewshotConfig,
    "`sampling`": SamplingConfig,
    "`[run]`": RunSection,
    "`[model]`": ModelSection,
    "`[data]`": DataSection,
    "`[train]`": TrainSection,
    "`[parallel]`": ParallelSection,
    "`[eval]`": EvalSection,
    "`[fleet]`": LaunchConfig,
}


def documented(heading: str) -> dict[str, str]:
    """The keys and defaults of the table under a heading."""
    after = CONFIGURATION.split(f"\n### {heading}\n", 1)[1]
    table = re.split(r"\n##", after, maxsplit=1)[0]
    return dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", table, re.MULTILINE))


def default_of(field: FieldInfo) -> str:
    """A key's default as the docs spell it."""
    if field.is_required():
        return "required"
    value: Any = field.get_default(call_default_factory=True)
    if value is None:
        return "-"
    if isinstance(value, BaseModel):
        return "table"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`{[str(one) for one in value]}`"
    return f"`{value}`" if isinstance(value, int | float | dict) else f"`{json.dumps(str(value))}`"


@pytest.mark.parametrize("heading", SECTIONS)
def test_every_key_is_documented_with_its_default_and_no_other(heading: str) -> None:
    fields = SECTIONS[heading].model_fields
    assert documented(heading) == {name: default_of(field) for name, field in fields.items()}


@pytest.mark.parametrize("name", SCORER_CONFIGS)
def test_every_scorer_is_documented_with_its_keys_and_metric(name: str) -> None:
    [line] = re.findall(rf"^\| `{name}` \|.*$", (ROOT / "docs/suites.md").read_text(), re.MULTILINE)
    config = SCORER_CONFIGS[name]
    keys = set(config.model_fields) - {"name", "timeout_s"}
    assert {key for key in keys if f"`{key}`" not in line} == set()
    assert all(f"`{metric}`" in line for metric in (config.metric_name, *config.more_metrics))


def test_every_table_of_keys_in_the_docs_is_checked_here() -> None:
    assert set(re.findall(r"^### (.+)$", CONFIGURATION, re.MULTILINE)) == set(SECTIONS)


@pytest.mark.parametrize("name", [command.name or "" for command in main.app.registered_commands])
def test_every_command_and_each_of_its_own_options_is_documented(name: str) -> None:
    section = re.split(r"\n## ", COMMANDS.split(f"\n## `evalfleet {name}`\n", 1)[1], maxsplit=1)[0]
    missing = [option for option in options_of(name) if f"[--{option}" not in section and f"--{option}" not in section]
    assert not missing


def options_of(name: str) -> Iterator[str]:
    """A command's long options, those apart that all have."""
    import typer
    from typer.core import TyperGroup

    found = typer.main.get_command(main.app)
    assert isinstance(found, TyperGroup)
    command = found.commands[name]
    for parameter in command.params:
        for spelling in (*parameter.opts, *parameter.secondary_opts):
            if spelling.startswith("--") and spelling not in (
                "--url",
                "--token",
                "--token-file",
                "--json",
                "--help",
                "--kill",
            ):
                yield spelling.removeprefix("--")


def test_every_exit_code_is_documented() -> None:
    codes = {int(code) for code in re.findall(r"^\| (\d) \|", COMMANDS, re.MULTILINE)}
    assert codes == {0, 1, draining.TIME_IS_UP, main.USAGE, main.UNREACHABLE, main.INTERNAL}
    assert checking.At.FINAL.value in COMMANDS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_link_in_the_docs_is_dead(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    local = [target for target in targets if not target.startswith(("http://", "https://"))]
    assert [target for target in local if not (page.parent / target).exists()] == []


def test_the_examples_are_files_that_the_programs_take() -> None:
    fleet = load_fleet(ROOT / "examples/fleet.toml")
    suites = load_suites(ROOT / "examples/suites.toml")
    run = load_run(ROOT / "examples/run.toml")
    assert fleet.service.port == 8700
    assert set(run.eval.suites) <= set(suites)
    letters = suites["letters"]
    assert isinstance(letters, Suite)
    assert len(letters.prompts()) == 3
