"""The pages by name: texts are the code's own descriptions and docstrings, by hand are only titles and links."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import typer
from fastapi import FastAPI
from pydantic import BaseModel
from typer.cli import get_docs_for_click
from typer.core import TyperGroup

from eval_service.cli.main import app
from eval_service.fleet_config import FleetConfig
from eval_service.gateway.app import build_app
from eval_service.gateway.services import Services
from eval_service.suites.config import SuiteConfig
from eval_service.suites.kinds import FunctionConfig, LmEvalConfig
from scripts.reference.python import python_page
from scripts.reference.schemas import Schemas, sections
from trainer.config import RunConfig
from trainer.main import parser

_MADE = "<!-- Made by scripts/docs; change the code instead. -->\n\n"
FILES: Mapping[str, tuple[type[BaseModel], ...]] = {
    "fleet.toml": (FleetConfig,),
    "suites.toml": (SuiteConfig, LmEvalConfig, FunctionConfig),
    "run.toml": (RunConfig,),
}


class _NoServices:
    """An application that answers nobody needs none of them; each is None."""

    version = "-"

    def __getattr__(self, name: str) -> None:
        return None


def pages() -> dict[str, str]:
    """Every page's text by its name."""
    texts = {
        "api.md": api_page(build_app(cast("Services", _NoServices()))),
        "cli.md": cli_page(),
        "config.md": config_page(),
        "python.md": python_page(),
    }
    return {name: _MADE + text.rstrip() + "\n" for name, text in texts.items()}


def api_page(application: FastAPI) -> str:
    """Routes and what goes over them, from the OpenAPI document."""
    document = application.openapi()
    schemas = Schemas(document["components"]["schemas"], "#")
    parts = [
        "# The HTTP API\n\nThe same as the OpenAPI document that a service has at `/openapi.json`. "
        "Any other answer is an [ErrorEnvelope](#errorenvelope); each code's cause and fix is in "
        "[troubleshooting](../troubleshooting.md). `GET /events` is described on [a page of its own](../events.md). "
        "Times are Unix seconds, durations end in `_s`; None is JSON's null.",
        "## Routes",
        "| route | what |\n| --- | --- |\n"
        + "\n".join(
            f"| [`{method.upper()} {path}`](#{_anchor(method, path)}) | {_said(route)} |"
            for path, methods in document["paths"].items()
            for method, route in methods.items()
        ),
    ]
    for path, methods in document["paths"].items():
        parts += [_route(method, path, route, schemas) for method, route in methods.items()]
    parts += ["## Types", *(schemas.section(name) for name in sorted(schemas.all))]
    return "\n\n".join(parts)


def _anchor(method: str, path: str) -> str:
    """As GitHub makes it of a heading in backquotes."""
    kept = "".join(c for c in f"{method} {path}".lower() if c.isalnum() or c in " _-")
    return kept.replace(" ", "-")


def _said(route: Mapping[str, Any]) -> str:
    return " ".join(str(route["description"]).split())


def _route(method: str, path: str, route: Mapping[str, Any], schemas: Schemas) -> str:
    parts = [f"### `{method.upper()} {path}`", _said(route)]
    if route.get("parameters"):
        rows = [
            f"| `{given['name']}` | {given['in']} | {schemas.kind(given['schema'])} | "
            f"{schemas.default(given['schema'], required=given.get('required', False))} | "
            f"{given.get('description', '')} |"
            for given in route["parameters"]
        ]
        parts.append("| parameter | in | type | default | |\n| --- | --- | --- | --- | --- |\n" + "\n".join(rows))
    if "requestBody" in route:
        parts.append(f"Body: {_content(route['requestBody'], schemas)}.")
    answers = [
        f"`{status}` {_content(answer, schemas)}"
        for status, answer in sorted(route["responses"].items())
        if status.isdecimal() and status != "422"
    ]
    return "\n\n".join([*parts, f"Answers: {'; '.join(answers)}."])


def _content(message: Mapping[str, Any], schemas: Schemas) -> str:
    kinds = [schemas.kind(told.get("schema", {})) or f"`{kind}`" for kind, told in message.get("content", {}).items()]
    said = message.get("description", "")
    plain = said in ("", "OK", "Successful Response")
    return (" or ".join(kinds) or "nothing") + ("" if plain else f" ({said})")


def cli_page() -> str:
    """Every command's help, as typer's own generator has it, and that of the trainer's command."""
    command = typer.main.get_command(app)
    assert isinstance(command, TyperGroup)
    commands: Mapping[str, Any] = command.commands
    with typer.Context(command, info_name="evalfleet") as context:
        # Without its first part, which has the commands' texts cut short.
        text = get_docs_for_click(obj=command, ctx=cast("Any", context), name="evalfleet")
    rows = [f"| [`{name}`](#evalfleet-{name}) | {one.help} |" for name, one in commands.items()]
    each = text[text.index("\n## ") + 1 :].replace("* `--help`: Show this message and exit.\n", "")
    each = each.replace("**Options**:\n\n\n", "")
    trainer = parser()
    trainer.formatter_class = cast("type[argparse.HelpFormatter]", partial(argparse.HelpFormatter, width=100))
    return "\n\n".join(
        (
            "# The commands: arguments and options\n\nWhat each command is for, and the exit codes, are in "
            "[the commands](../cli.md). All of them have `--help`.",
            "| command | what |\n| --- | --- |\n" + "\n".join(rows),
            each.rstrip(),
            f"## `evalfleet-train`\n\n```\n{trainer.format_help().rstrip()}\n```",
        )
    )


def config_page() -> str:
    """Types and bounds of every key."""
    parts = [
        "# Config files: types and bounds\n\nWhat each key is for, with its default, is in "
        "[configuration](../configuration.md). A key that is not here is refused."
    ]
    for file, models in FILES.items():
        parts += [f"## {file}", *(part for model in models for part in sections(model))]
    return "\n\n".join(parts)
