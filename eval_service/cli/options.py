"""The options that commands share."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any

import typer

from eval_service.contract.client import EvalClient
from eval_service.contract.errors import ConfigError, EvalfleetError
from eval_service.contract.token import check_token, read_token_lines

DEFAULT_URL = "http://127.0.0.1:8700"
_chosen: ContextVar[str | None] = ContextVar("token", default=None)

_COMPLETION_S = 2.0


def _run_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """The service's runs, for a shell that completes; none where it can't be reached."""
    url = ctx.params.get("url") or os.environ.get("EVALFLEET_URL") or DEFAULT_URL
    try:
        with EvalClient(url, timeout_s=_COMPLETION_S) as client:
            return [run for run in client.status().runs if run.startswith(incomplete)]
    except EvalfleetError:
        return []


Url = Annotated[str, typer.Option("--url", envvar="EVALFLEET_URL", help="Where the service listens.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Token = Annotated[
    str | None, typer.Option("--token", metavar="TOKEN", help="The service's token; better by EVALFLEET_TOKEN.")
]
TokenFile = Annotated[Path | None, typer.Option("--token-file", help="A file whose first line is the token.")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="The run's name.", autocompletion=_run_names)]


def connect(url: str) -> EvalClient:
    """A client of the service; tests put their own in its place."""
    return EvalClient(url, token=_chosen.get())


def talking(command: Callable[..., None]) -> Callable[..., None]:
    """The command with `--token` and `--token-file`, if it talks to a service: if it has `--url`."""
    signature = inspect.signature(command, eval_str=True)
    if "url" not in signature.parameters:
        return command

    @functools.wraps(command)
    def with_token(*, token: str | None = None, token_file: Path | None = None, **given: Any) -> None:
        _chosen.set(_token_of(token, token_file))
        command(**given)

    more = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in (("token", Token), ("token_file", TokenFile))
    ]
    whole = signature.replace(parameters=[*signature.parameters.values(), *more])
    with_token.__signature__ = whole  # type: ignore[attr-defined]  # what typer reads, and typeshed lacks
    with_token.__annotations__ = {name: parameter.annotation for name, parameter in whole.parameters.items()}
    return with_token


def _token_of(token: str | None, file: Path | None) -> str | None:
    """What the command line names; None: the environment's."""
    if token is not None:
        hide(token)
        if file is not None:
            raise ConfigError("--token is given, too", field="--token-file", hint="give one of the two")
        return check_token(token, "--token")
    if file is not None:
        return check_token(read_token_lines(file, "--token-file")[0], "--token-file")
    return None


def hide(secret: str) -> None:
    """Overwrite a secret in this process's command line, which every user of the host can read."""
    with suppress(OSError, ValueError, IndexError):
        start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
        with open("/proc/self/mem", "r+b", buffering=0) as memory:
            memory.seek(start)
            line = memory.read(end - start)
            memory.seek(start)
            memory.write(line.replace(secret.encode(), b"*" * len(secret.encode())))
